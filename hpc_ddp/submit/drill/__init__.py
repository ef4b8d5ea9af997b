"""The drill: does a script resume right?"""

from hpc_ddp.submit.drill.runs import drill

__all__ = ["drill"]
