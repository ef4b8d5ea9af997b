"""Runs on the login node, before the job. Never imports torch."""
