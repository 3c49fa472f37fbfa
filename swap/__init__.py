"""The swap-file engine: bytes between memory and NVMe, without torch."""
