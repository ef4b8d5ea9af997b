"""The state of runs: of one, of the tasks of an array, and the table of all."""
