"""Whether an open swap file is still what this process made of it.

Owns the looks at what others may have done to it, and how that is said. Does not open files, and does not know why it
is asked. Guarantees that a file which somebody has cut short, punched, removed, replaced or written over at its
beginning is not taken for whole; a look costs a few system calls, one of which reads a block. Data written over in
place are for checksums to find.
"""

from __future__ import annotations

import errno
import os

from swap import superblock
from swap.blocks import ALIGNMENT
from swap.buffers import AlignedBuffer
from swap.errors import SwapIOError, reporting
from swap.paths import is_same
from swap.superblock import SUPERBLOCK_BYTES, Superblock
from swap.syscalls import SystemCalls


def has_all_blocks(found: os.stat_result, nbytes: int) -> bool:
    """Whether the file system has given a file room for `nbytes`."""
    return found.st_blocks * 512 >= nbytes


def require_intact(fd: int, path: str, block: Superblock, system: SystemCalls, *, reserved: bool, named: bool) -> None:
    """Raise SwapIOError unless the file `fd` is whole; `block`: what its first bytes say.

    `reserved`: whether all of its room was. `named`: whether it is to be at `path` still.
    """
    if reserved and not has_all_blocks(os.fstat(fd), ALIGNMENT + block.nbytes):
        detail = (
            "somebody has cut this file short, or punched holes into it; what was there is lost: go on from a "
            "snapshot, or start anew"
        )
        raise SwapIOError("sync", path, errno=errno.ENODATA, detail=detail)
    if named and not _is_in_place(fd, path, system):
        detail = (
            "somebody has removed this file, or put another in its place; its bytes end with this process: "
            "save them elsewhere before it is closed"
        )
        raise SwapIOError("sync", path, errno=errno.ENOENT, detail=detail)
    if not _begins_with(fd, path, superblock.pack(block), system):
        detail = (
            "somebody has written over the beginning of this file, without which it will be refused: save what it "
            "holds elsewhere before it is closed"
        )
        raise SwapIOError("sync", path, errno=errno.EBADMSG, detail=detail)


def _is_in_place(fd: int, path: str, system: SystemCalls) -> bool:
    mine = os.fstat(fd)  # not within the call: one that was given up may outlive the descriptor
    with reporting("look at", path):
        return system.ask(lambda: is_same(path, mine))


def _begins_with(fd: int, path: str, expected: bytes, system: SystemCalls) -> bool:
    with AlignedBuffer(ALIGNMENT) as buffer:
        with reporting("read", path, length=ALIGNMENT):
            system.preadv(fd, buffer.view, 0)
        return bytes(buffer.view[:SUPERBLOCK_BYTES]) == expected
