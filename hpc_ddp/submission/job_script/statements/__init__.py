"""The statements of a job script: how they are read, and what becomes of each."""
