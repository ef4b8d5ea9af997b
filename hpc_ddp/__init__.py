"""hpc-ddp: take a PyTorch script to a Slurm cluster and keep it going there.

A folder of this package is a place where code runs::

    login node                compute node               worker              anywhere
    cli ─► submission, report node (batch, supervisor)   training            core, slurm

Importing the package imports nothing: the login node must not pay for torch, and a
compute node must not need click. The interface for Python, `hpc_ddp.api`, is imported when
it is first named::

    import hpc_ddp
    run = hpc_ddp.submit(script="train.py", nodes=2, gpus_per_node="4")
    run.wait()
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # what type checkers take for true; typing itself costs milliseconds
if TYPE_CHECKING:
    from hpc_ddp.api import Handle as Handle
    from hpc_ddp.api import HpcDdpError as HpcDdpError
    from hpc_ddp.api import HpcDdpWarning as HpcDdpWarning
    from hpc_ddp.api import JobSpec as JobSpec
    from hpc_ddp.api import Status as Status
    from hpc_ddp.api import UsageError as UsageError
    from hpc_ddp.api import find as find
    from hpc_ddp.api import submit as submit
else:

    def __getattr__(name):
        """Import `hpc_ddp.api`, and return its `name`; raise AttributeError for an unknown one."""
        if name not in (
            "Handle",
            "HpcDdpError",
            "HpcDdpWarning",
            "JobSpec",
            "Status",
            "UsageError",
            "find",
            "submit",
        ):
            raise AttributeError(f"module 'hpc_ddp' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module("hpc_ddp.api"), name)
