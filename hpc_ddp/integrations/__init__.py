"""Trainings of other libraries under hpc-ddp: stopped together, saved, and resumed.

`stop_point` is for any loop; `transformers`, `lightning`, `fabric` and `accelerate` are for these
libraries, and each imports its library alone.
"""

from hpc_ddp.integrations.stop_point import StopPoint

__all__ = ["StopPoint"]
