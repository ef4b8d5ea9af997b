"""The way on after an attempt, or after a start that came to nothing: a requeue, or a new job."""
