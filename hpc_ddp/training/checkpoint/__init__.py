"""Checkpoints of a run: its state, the files, saving and restoring."""
