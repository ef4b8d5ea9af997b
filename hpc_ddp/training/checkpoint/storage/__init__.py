"""Checkpoints in files: which bytes lie where, how they are written, and read again."""
