"""The output of a run: the job's own, one rank's log, or all ranks' in order of time."""
