"""tiermem.zero3: see README.md in this folder."""
