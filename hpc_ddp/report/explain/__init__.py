"""What became of a run, why, and what to do about it."""
