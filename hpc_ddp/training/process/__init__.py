"""A worker's process: its environment, its group, its end."""
