"""A run: its job, its folder, its journal. Standard library only; runs everywhere."""
