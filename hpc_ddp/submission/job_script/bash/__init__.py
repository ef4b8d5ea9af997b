"""Bash, as far as a job script can be understood without running it."""
