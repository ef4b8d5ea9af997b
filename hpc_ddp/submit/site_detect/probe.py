"""Probe a login node for the values of its cluster. Only Slurm's controller has to answer."""

from __future__ import annotations

import getpass
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpc_ddp import slurm
from hpc_ddp.submit.site_detect.infer import ClusterFacts

# Variables of sites for a disk that all nodes see, the fastest first.
SCRATCH = ("SCRATCH", "PSCRATCH", "CINECA_SCRATCH", "FAST", "WORK", "GROUP_SCRATCH")
CONTAINERS = ("apptainer", "singularity", "shifter", "podman-hpc")


def probe(environ: Mapping[str, str]) -> ClusterFacts:
    """Return the values of the cluster that Slurm and this shell have.

    Raises
    ------
    HpcDdpError
        this machine has no Slurm client, or the controller does not answer
    """
    return ClusterFacts(
        config=slurm.show_config(),
        partitions=slurm.show_all("partition"),
        nodes=slurm.show_all("node"),
        qos=slurm.show_qos(),
        accounts=slurm.show_accounts(getpass.getuser()),
        scratch=_scratch(environ),
        runs=environ.get("HPC_DDP_RUNS", ""),
        containers=_containers(),
    )


def _scratch(environ: Mapping[str, str]) -> list[tuple[str, str, bool]]:
    named = [(name, environ[name]) for name in SCRATCH if environ.get(name)]
    return [(name, path, Path(path).is_dir() and os.access(path, os.W_OK)) for name, path in named]


def _containers() -> list[str]:
    pyxis = ["pyxis"] if slurm.takes_option("srun", "container-image") else []
    return [name for name in CONTAINERS if shutil.which(name)] + pyxis
