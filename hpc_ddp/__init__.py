"""hpc-ddp: take a PyTorch script to a Slurm cluster and keep it going there.

A folder of this package is a place where code runs::

    login node                compute node               worker              anywhere
    cli ─► launch, report     node (batch, supervisor)   training            run, slurm

Importing the package imports nothing: the login node must not pay for torch, and a
compute node must not need click.
"""

__version__ = "0.1.0"
