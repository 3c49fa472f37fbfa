"""tiermem.memory: see README.md in this folder."""
