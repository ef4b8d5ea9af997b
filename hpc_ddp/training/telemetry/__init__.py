"""Measured numbers on their way to the journal and to people."""
