"""The launchers of a job script, and the launch that they make."""
