"""tiermem.planner: see README.md in this folder."""
