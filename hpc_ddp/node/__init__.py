"""Runs on the compute nodes. Standard library only, so that it works in any container.

``batch`` in the batch shell, ``supervisor`` as the Slurm task of each node, ``elastic_agent``
(which is torchrun) and ``worker`` below it; ``dry_run`` plays the batch shell on one machine.
"""
