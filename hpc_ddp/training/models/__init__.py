"""Models over several ranks, their numbers and their precision."""
