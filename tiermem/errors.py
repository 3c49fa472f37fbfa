"""The errors tiermem raises.

Owns the exception classes above the byte line (errors about bytes on disk are `swap.SwapError` and below). Knows
nothing of who raises them. Guarantees one root, `TiermemError`.
"""

from __future__ import annotations

import copy


class TiermemError(Exception):
    """Root of tiermem's own errors. Besides them: `swap.SwapError`, and OSError for a file that the caller names."""


class CapacityError(TiermemError):
    """A tier cannot hold what is asked of it; the message names the tier, the bytes needed and who holds the rest."""


class ConfigError(TiermemError, ValueError):
    """A setting is unknown, malformed or impossible together with another."""


class ResumeError(TiermemError):
    """A run cannot be continued from, or started over, what its directories hold."""


class InvariantError(TiermemError):
    """An internal rule was broken: a bug in tiermem, never in the caller's model."""


class BudgetError(CapacityError, ConfigError):
    """A configured budget in which this model cannot train at all; the message names the least that works."""


class MissingSnapshotError(ResumeError, ConfigError):
    """What `resume` names is no folder: neither one of its words nor a snapshot that could be continued."""


class UnknownSettingError(ConfigError, TypeError):
    """A setting that does not exist; also the TypeError that Python gives for a keyword nobody expects."""


class CopyError(TiermemError, TypeError):
    """What exists once was copied or pickled; also the TypeError that Python gives for what cannot be."""


def again(error: BaseException) -> BaseException:
    """A copy of an error that is kept, to be raised from it.

    What is raised keeps the frames that it passes, here those of the model, and with them whatever these hold.
    """
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - a class that cannot be made again from its arguments
        return TiermemError(f"{type(error).__name__}: {error}")
