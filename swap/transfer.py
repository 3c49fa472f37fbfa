"""What to do after each system call of a block: go on, try again, or give up.

Owns the rules for short transfers, interrupted calls and the end of a file, free of I/O, so that threads and coroutines
share them; `transfer`, the loop that applies them with real system calls; and `write_all`, for small files. Does not
know queues. Guarantees that a block is moved completely or ends in a SwapIOError that names operation, path, offset,
length and errno; that transfers stay aligned on a file opened with O_DIRECT; and that no fault makes it go round for
ever.
"""

from __future__ import annotations

import errno
import os

from swap.blocks import align_down
from swap.errors import SwapError, SwapIOError
from swap.requests import Block, Operation
from swap.syscalls import SystemCalls

_ATTEMPTS = 64  # fruitless calls in a row; with the pauses below, about fifteen seconds
_ENDINGS = 3  # calls in a row that moved nothing
_LONGEST_PAUSE = 0.25  # seconds


class Progress:
    """How far the transfer of one block has come."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._moved = 0
        self._fruitless = 0

    @property
    def done(self) -> bool:
        """Whether every byte has been moved."""
        return self._moved == self._block.nbytes

    @property
    def offset(self) -> int:
        """Where in the file the next call begins, bytes."""
        return self._block.offset + self._moved

    @property
    def view(self) -> memoryview:
        """What is left to fill or to write."""
        return self._block.view[self._moved :]

    def advance(self, nbytes: int) -> SwapIOError | None:
        """Account for a call that returned `nbytes`; return the error that ends the transfer, if it does."""
        if nbytes == 0 and self._block.operation is Operation.READ:
            return self._end_of_file()
        before = self._moved
        self._moved += nbytes
        if not self.done and self._block.file.direct:
            # The kernel may stop anywhere; O_DIRECT may only go on from an aligned place, so the tail is moved again.
            self._moved = align_down(self._moved)
        if self._moved > before:
            self._fruitless = 0
            return None
        self._fruitless += 1
        # A tail shorter than a sector again and again: the file, or the room on the disk, ends inside it.
        return self._end_of_file() if self._fruitless >= _ENDINGS else None

    def fail(self, error: Exception) -> SwapIOError | float:
        """Account for a call that raised; return the error that ends the transfer, or the seconds to pause."""
        if not isinstance(error, OSError):  # no memory, say: whoever waits for the block has to hear of it
            return self._error(errno.EIO, f"{type(error).__name__}: {error}")
        if error.errno in (errno.EINTR, errno.EAGAIN) and self._fruitless < _ATTEMPTS:
            self._fruitless += 1
            return 0.0 if error.errno == errno.EINTR else min(0.001 * 2 ** min(self._fruitless, 16), _LONGEST_PAUSE)
        return self._error(error.errno or errno.EIO, None)

    def _end_of_file(self) -> SwapIOError:
        if self._block.operation is Operation.READ:
            detail = f"unexpected end of file: expected {self._block.nbytes} bytes, found {self._moved}"
        else:
            detail = f"the device takes no more: expected to write {self._block.nbytes} bytes, wrote {self._moved}"
        return self._error(errno.EIO, f"{detail}; the swap file was truncated, or its drive is faulty")

    def _error(self, code: int, detail: str | None) -> SwapIOError:
        block = self._block
        return SwapIOError(
            block.operation, block.file.path, offset=block.offset, length=block.nbytes, errno=code, detail=detail
        )


def transfer(system: SystemCalls, block: Block) -> SwapError | None:
    """Move one block, waiting for the device; return the error to record instead of raising it."""
    progress = Progress(block)
    call = system.preadv if block.operation is Operation.READ else system.pwritev
    while not progress.done:
        try:
            moved = call(block.file.fileno(), progress.view, progress.offset)
        except SwapError as error:  # the file was closed underneath
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - recorded; a worker thread must go on
            verdict = progress.fail(error)
            if isinstance(verdict, SwapIOError):
                return verdict
            if verdict:
                system.sleep(verdict)
        else:
            failure = progress.advance(moved)
            if failure is not None:
                return failure
    return None


def write_all(fd: int, data: memoryview, offset: int, *, path: str | os.PathLike[str], system: SystemCalls) -> None:
    """Write all of `data`, however many calls it takes. Raises OSError, SwapIOError if the device takes nothing."""
    done = 0
    while done < len(data):
        moved = system.pwritev(fd, data[done:], offset + done)
        if moved == 0:
            raise SwapIOError("write", path, offset=offset, length=len(data), detail="the device takes no more")
        done += moved
