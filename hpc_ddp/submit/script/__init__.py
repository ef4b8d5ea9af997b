"""From a job to its batch script."""
