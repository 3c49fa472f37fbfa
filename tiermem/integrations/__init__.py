"""tiermem.integrations: see README.md in this folder."""
