"""The roof: builds every room from a Config and tears them down in reverse."""

from tiermem.runtime.face import Runtime, offload

__all__ = ["Runtime", "offload"]
