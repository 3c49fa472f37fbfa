"""Objects that are closed at the end of a `with`.

Owns the two methods of a context manager. Does not know what closing means. Guarantees that `close` is called however
the body ends, and that the body's error is not swallowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """`with` gives the object itself and closes it."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
