"""Making the files of a space durable: every device at once.

Owns the threads that wait for the devices, one each. Does not know what was written, and does not bound the wait: the
files' own system calls give up on a drive which does not answer. Guarantees that every device has been asked before
anything is raised, and that the error names each that failed.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from swap.errors import SwapIOError
from swap.files import SwapFile


def sync_files(files: Sequence[SwapFile], *, names: bool) -> None:
    """Wait until completed writes to all files are durable; with `names` also the files' names. Raises SwapIOError.

    Files on one device follow each other, and after one that fails nothing more is asked of that device.
    """
    devices: dict[int, list[SwapFile]] = {}
    for file in files:
        devices.setdefault(file.device, []).append(file)
    errors: dict[int, BaseException] = {}

    def sync(device: int) -> None:
        try:
            for file in devices[device]:
                file.sync()
                if names:
                    file.sync_name()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors[device] = error

    first, *others = devices
    threads = [threading.Thread(target=sync, args=(device,), name="swap-sync") for device in others]
    for device, thread in zip(others, threads, strict=True):
        try:
            thread.start()
        except RuntimeError:  # a limit on threads: one device after the other then
            sync(device)
    sync(first)
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise _one([errors[device] for device in devices if device in errors])


def _one(errors: Sequence[BaseException]) -> BaseException:
    """The first of the errors, which names the others."""
    first, *others = errors
    if not others or not isinstance(first, SwapIOError):
        return first
    told = "; ".join(str(error) for error in others)
    code = first.errno or errno.EIO
    found = SwapIOError(first.operation, first.path, errno=code, detail=f"{os.strerror(code)}, and besides: {told}")
    found.__cause__ = first
    return found
