"""Messages, progress and units for people."""
