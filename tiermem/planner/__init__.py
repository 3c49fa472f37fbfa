"""Decisions about budgets and tiles: pure functions, no I/O of their own."""
