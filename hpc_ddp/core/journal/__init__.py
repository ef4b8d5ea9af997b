"""The journal of a run, and what is computed from it."""
