"""tiermem.optim: see README.md in this folder."""
