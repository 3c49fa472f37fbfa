"""tiermem.checkpoint: see README.md in this folder."""
