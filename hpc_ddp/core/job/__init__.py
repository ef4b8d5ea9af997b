"""A job as the user wants it: its settings, and their checks."""
