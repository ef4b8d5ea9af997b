"""Files that a submit writes into a run's folder, and how that is undone."""
