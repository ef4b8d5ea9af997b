"""Watches of a supervisor, at little cost to the shared disk: files, logs, signals and peers."""
