"""tiermem.pager: see README.md in this folder."""
