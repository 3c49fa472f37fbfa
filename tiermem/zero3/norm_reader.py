"""Norms that a device has yet to compute, read without waiting for it.

Owns which of them are on their way to host memory, and their values when they are there. Does not know parameters,
units or what a norm is good for. Guarantees that nobody waits here, and that a value is of the very tensor that is
asked for.

Why. A copy to host memory that is waited for ends when the device is through with all it was asked for up to then, and
with nothing asked of it the device then waits in turn: of a backward with eight layers on an H200 it was half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class _Entry:
    norm: torch.Tensor
    sent: _CudaCopy
    index: int


class NormReader:
    """Keeps the values of one step's norms, by number."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def are_known(self, norms: Mapping[int, torch.Tensor]) -> bool:
        """Whether all of them can be read at once; those that cannot are on their way from now on."""
        if all(norm.is_cpu for norm in norms.values()):
            return True
        new = [number for number, norm in norms.items() if not norm.is_cpu and self._entry(number, norm) is None]
        if new:
            sent = _CudaCopy([norms[number] for number in new])
            self._entries.update({number: _Entry(norms[number], sent, index) for index, number in enumerate(new)})
        away = [self._entries[number].sent for number, norm in norms.items() if not norm.is_cpu]
        return all(sent.arrived() for sent in dict.fromkeys(away))

    def read(self, norms: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The same norms, in host memory if that goes for all of them without waiting, else as they were given."""
        found = []
        for number, norm in norms.items():
            entry = None if norm.is_cpu else self._entry(number, norm)
            if not norm.is_cpu and (entry is None or not entry.sent.arrived()):
                return list(norms.values())
            found.append(norm if entry is None else entry.sent.values[entry.index])
        return found

    def clear(self) -> None:
        """A new step begins."""
        self._entries.clear()

    def _entry(self, number: int, norm: torch.Tensor) -> _Entry | None:
        entry = self._entries.get(number)
        return entry if entry is not None and entry.norm is norm else None


class _CudaCopy:
    """Norms of one device on their way to page-locked memory, after what the calling thread has asked of its stream."""

    def __init__(self, norms: Sequence[torch.Tensor]) -> None:
        stacked = torch.stack(list(norms))
        self.values = stacked.to("cpu", non_blocking=True)  # what they are is known when `arrived`
        self._event = torch.cuda.current_stream(stacked.device).record_event()

    def arrived(self) -> bool:
        """Whether they are there. Raises the device's error, if it has failed."""
        return bool(self._event.query())
