"""Which runtime owns a parameter.

Owns the one deliberate piece of process-wide state: a weak map from parameters to whoever offloaded them. It exists
because `tiermem.AdamW(model.parameters())` is given parameters and nothing else, and hanging an attribute on the
user's parameters would be worse. Does not know what an owner is or does. Guarantees to keep neither parameters nor
owners alive, and that one parameter never has two living owners.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tiermem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Attachment:
    """Who owns a parameter, and the number by which the owner knows it."""

    owner: object
    index: int


class Registry:
    """The map itself; a class so that tests can have one of their own. Any thread."""

    def __init__(self) -> None:
        # Reentrant: the cycle collector may begin in here, and close a runtime that somebody has dropped.
        self._lock = threading.RLock()
        # By identity: two parameters never compare equal, however alike their values. Values refer to owners weakly,
        # since an owner holds its parameters and a strong reference would keep the key alive for ever.
        self._attachments: MutableMapping[torch.Tensor, tuple[weakref.ref[object], int]] = WeakIdKeyDictionary()

    def attach(self, parameter: torch.Tensor, owner: object, index: int) -> None:
        """Record that `owner` knows `parameter` as number `index`. Raises `ConfigError` if another owner has it."""
        with self._lock:
            found = self._find(parameter)
            if found is not None and found.owner is not owner:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is already offloaded by another runtime; "
                    "close that runtime first"
                )
            self._attachments[parameter] = (weakref.ref(owner), index)

    def detach(self, parameter: torch.Tensor) -> None:
        """Forget a parameter; nothing happens if it is not known."""
        with self._lock:
            self._attachments.pop(parameter, None)

    def find(self, parameter: torch.Tensor) -> Attachment | None:
        """The attachment of a parameter, or None if nobody living owns it."""
        with self._lock:
            return self._find(parameter)

    def _find(self, parameter: torch.Tensor) -> Attachment | None:
        entry = self._attachments.get(parameter)
        if entry is None:
            return None
        reference, index = entry
        owner = reference()
        return None if owner is None else Attachment(owner, index)


registry = Registry()
