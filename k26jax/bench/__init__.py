"""Measures what the engine reaches, and reads what was compiled for a GPU that is not there."""
