"""The roof: builds every room from a Config and tears them down in reverse."""

from tiermem.runtime.face import Runtime
from tiermem.runtime.offloading import offload

__all__ = ["Runtime", "offload"]
