"""Whether swap files can be made on this operating system, asked before anything else is imported.

Owns the errors that say so. Does not know files. Guarantees that whoever comes from Windows or macOS is told what would
do, and not which attribute of which module is missing.
"""

import os
import sys

from swap.errors import SwapError

try:
    import fcntl  # noqa: F401 - only whether it is there
except ModuleNotFoundError:
    raise ImportError(
        f"swap files need Linux, and this is {sys.platform}: on Windows install and run tiermem in WSL 2"
    ) from None


def require_linux() -> None:
    """Raise SwapError where system calls are missing: on macOS, which has enough of them to plan and not to swap."""
    missing = [name for name in ("O_DIRECT", "posix_fallocate", "fdatasync") if not hasattr(os, name)]
    if missing:
        raise SwapError(f"swap files need Linux, and this is {sys.platform}: there is no {', '.join(missing)}")
