"""tiermem.optim: exact AdamW on paged state; see README.md in this folder."""
