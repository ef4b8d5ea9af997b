"""The drill: does a script resume right?"""

from hpc_ddp.launch.drill.runs import drill

__all__ = ["drill"]
