"""The options of a job that ask Slurm for something, and the way to ask."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_ddp.core.job.option_declaration import COMMON, GPUS, NODES, WORKERS, option

BACKENDS = ("slurm", "submitit", "local", "salloc")
GPU_REQUESTS = ("gpus-per-node", "gres", "gpus-per-task", "none")


@dataclass(frozen=True)
class ResourceOptions:
    """The program of a job, and the fields of a `JobSpec` that become options of sbatch."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = option(
        False, "SCRIPT is a module, as of python -m.", group=COMMON, letter="m", is_local=True
    )
    no_python: bool = option(
        False,
        "SCRIPT is a command on the nodes, such as composer or bash, and runs as the code is then.",
        group=COMMON,
        is_local=True,
    )
    job_name: str = option(
        "job", "Default: the script's name.", group=COMMON, letter="J", metavar="NAME"
    )
    backend: str = option(
        "slurm", "How the job is started (default slurm).", group=WORKERS, accepted=BACKENDS
    )
    nodes: int | str = option(
        1,
        "Number of nodes (default 1), or a range that is accepted, as 2-4.",
        group=COMMON,
        letter="N",
        metavar="N|MIN-MAX",
        kind=NODES,
        is_sbatch=True,
        is_local=True,
    )
    gpus_per_node: str | None = option(
        None,
        "GPUs per node, with one worker for each.",
        group=COMMON,
        metavar="[TYPE:]N",
        kind=GPUS,
        is_local=True,
    )
    gpu_request: str = option(
        "gpus-per-node", "The option of sbatch that --gpus-per-node becomes.", accepted=GPU_REQUESTS
    )
    nproc_per_node: int | None = option(
        None, "Workers per node (default: one per GPU, or 1).", group=COMMON, least=1, is_local=True
    )
    cpus_per_node: int | None = option(
        None, "CPUs per node, for all its workers.", group=COMMON, least=1
    )
    cpus_per_task: int | None = option(
        None,
        "CPUs per Slurm task: one torchrun per node, or each worker with --launcher srun.",
        letter="c",
        least=1,
    )
    time: str | None = option(
        None,
        "Time limit of one attempt, or UNLIMITED.",
        group=COMMON,
        letter="t",
        metavar="TIME",
        is_sbatch=True,
    )
    time_min: str | None = option(
        None,
        "The least limit of an attempt that Slurm may give, to fit it into a hole of the queue.",
        metavar="TIME",
        is_sbatch=True,
    )
    partition: str | None = option(None, "Partition.", group=COMMON, letter="p", is_sbatch=True)
    account: str | None = option(None, "Account.", group=COMMON, letter="A", is_sbatch=True)
    qos: str | None = option(None, "Quality of service.", letter="q", is_sbatch=True)
    constraint: str | None = option(None, "Features of the nodes.", letter="C", is_sbatch=True)
    mem: str | None = option(None, "Memory per node.", metavar="SIZE", is_sbatch=True)
    exclusive: bool = option(False, "Share the nodes with no other job.")
    nodelist: str | None = option(None, "Nodes to take.", letter="w", is_sbatch=True)
    exclude: str | None = option(None, "Nodes to avoid.", letter="x", is_sbatch=True)
    reservation: str | None = option(None, "Reservation.", is_sbatch=True)
    array: str | None = option(
        None, "One run for each index.", letter="a", metavar="INDEXES", is_sbatch=True
    )
    dependency: str | None = option(None, "As for sbatch.", letter="d", is_sbatch=True)
    mail_type: str | None = option(None, "As for sbatch.", is_sbatch=True)
    mail_user: str | None = option(None, "As for sbatch.", is_sbatch=True)
    output: str | None = option(
        None, "A link to the job's output, as out-%j.txt.", letter="o", metavar="PATTERN"
    )
    error: str | None = option(
        None, "The same: both streams are in one file.", letter="e", metavar="PATTERN"
    )
    sbatch: tuple[str, ...] = option(
        (),
        "Any other option of sbatch, as --sbatch=--network=…; repeatable.",
        metavar="OPTION",
        is_joined=True,
    )
