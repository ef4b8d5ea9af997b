"""The explanation of a run: its end, the cause, and what to do about it."""
