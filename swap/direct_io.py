"""Whether a swap file can be moved past the page cache.

Owns the try. Does not know who opened the file. Guarantees that the file is the same afterwards: what is written is
what was read, if that was whole.
"""

from __future__ import annotations

import errno
import fcntl
import os

from swap import superblock
from swap.blocks import ALIGNMENT
from swap.buffers import AlignedBuffer
from swap.errors import NO_SPACE, FormatError, SwapIOError, reporting
from swap.superblock import SUPERBLOCK_BYTES
from swap.syscalls import SystemCalls

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""By which a file system says that it does not do it."""


def takes_direct(fd: int, path: str, system: SystemCalls) -> bool:
    """Whether the header can be read and written through `fd`, open with O_DIRECT. Raises SwapIOError.

    Written, too: mergerfs reads so, and refuses to write.
    """
    try:
        with AlignedBuffer(ALIGNMENT) as probe:
            with reporting("read", path, length=ALIGNMENT):
                moved = system.preadv(fd, probe.view, 0)
            if moved == ALIGNMENT and _may_write(fd) and _is_header(probe.view, path):
                with reporting("write", path, length=ALIGNMENT):
                    system.pwritev(fd, probe.view, 0)
    except SwapIOError as error:
        if error.errno in NO_DIRECT:
            return False
        if error.errno not in NO_SPACE:  # a full disk says nothing of how it is written to
            raise
    return True


def _may_write(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def _is_header(view: memoryview, path: str) -> bool:
    try:
        superblock.parse(bytes(view[:SUPERBLOCK_BYTES]), path)
    except FormatError:
        return False
    return True
