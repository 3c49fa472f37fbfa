"""Objects that are closed at the end of a `with`.

Owns the two methods of a context manager. Does not know what closing means. Guarantees that `close` is called however
the body ends, and that the body's error is not swallowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """`with` gives the object itself and closes it."""

    @abstractmethod
    def close(self) -> None:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
