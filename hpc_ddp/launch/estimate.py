"""Before a submit: when and where Slurm would start the job, and what would keep it waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.launch.backends import BACKENDS
from hpc_ddp.launch.prepare import Prepared
from hpc_ddp.run.errors import HpcDdpError, UsageError
from hpc_ddp.run.spec import JobSpec

ASKED = ("slurm", "submitit")
SOON_S = 60  # what starts within a minute starts now: Slurm looks at its queue that often


@dataclass(frozen=True)
class Outlook:
    """Slurm's estimate, and notes on what it leaves out."""

    estimate: slurm.Estimate
    notes: list[str]

    def text(self) -> str:
        """Return it in one line for a person; Slurm's own words, where they can't be read."""
        found = self.estimate
        if found.start is None:
            return found.said
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.start))
        wait_s = found.start - time.time()
        told = f"would start now ({when})" if wait_s < SOON_S else f"would start at {when}"
        if wait_s >= SOON_S:
            told += f", in {_span(wait_s)}"
        told += f", on {found.nodes}" if found.nodes else ""
        told += f", in partition {found.partition}" if found.partition else ""
        if found.preempts:
            told += f"; it would preempt {', '.join(found.preempts)}"
        return told

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.estimate), "notes": self.notes}


def of(prepared: Prepared) -> Outlook:
    """Ask Slurm about a planned job. Nothing is submitted, nor written.

    Raises
    ------
    UsageError
        the back-end does not go through sbatch
    HpcDdpError
        Slurm refuses it, or would queue it and never start it
    """
    spec = prepared.spec
    if spec.backend not in ASKED:
        raise UsageError(
            f"--test-only asks sbatch, and the {spec.backend} back-end submits nothing;"
            f" accepted: {', '.join(ASKED)}",
            hint="--backend slurm, or hpc-ddp dry-run to try the job here",
        )
    script = BACKENDS[spec.backend].script(prepared)
    wanted = [name for name in (spec.partition or "").split(",") if name]
    mine = [
        each
        for each in slurm.partitions()
        if each.name in wanted or (not wanted and each.is_default)
    ]
    try:
        found = slurm.estimate(script, os.environ)
    except HpcDdpError as error:
        if trouble := _hopeless(spec, mine):  # says more than Slurm does
            raise HpcDdpError(f"{error.message} ({trouble})", hint=error.hint) from None
        raise
    # Slurm accepts these, where EnforcePartLimits is NO, and estimates as if there were no limit.
    # A QOS may lift it.
    trouble = _hopeless(spec, mine)
    if trouble and not spec.qos:
        raise HpcDdpError(
            f"{trouble}: Slurm would queue it and never start it",
            hint="a shorter --time or fewer --nodes; hpc-ddp goes on after the time limit",
        )
    return Outlook(found, [*([trouble] if trouble else []), *_notes(spec, mine)])


def _hopeless(spec: JobSpec, partitions: Sequence[slurm.Partition]) -> str | None:
    """Return why none of the partitions could ever run the job, None if one could."""
    reasons = [_beyond(spec, each) for each in partitions]
    return reasons[0] if reasons and all(reasons) else None


def _beyond(spec: JobSpec, partition: slurm.Partition) -> str | None:
    time_s, longest = spec.time_s, partition.max_time_s
    if time_s is not None and longest is not None and time_s > longest:
        return (
            f"partition {partition.name} allows {clock(longest)} at most, and --time is {spec.time}"
        )
    least, _ = spec.node_range
    most = partition.nodes if partition.max_nodes is None else partition.max_nodes
    if least > most:
        return (
            f"partition {partition.name} gives a job {most} nodes at most, and --nodes is {least}"
        )
    return None


def _notes(spec: JobSpec, partitions: Sequence[slurm.Partition]) -> list[str]:
    notes = [
        f"partition {each.name} is {each.state}: nothing starts there before it is UP"
        for each in partitions
        if each.state != "UP"
    ]
    if spec.time is None and len(partitions) == 1:
        limit = partitions[0].default_time_s or partitions[0].max_time_s
        if limit:
            notes.append(f"without --time the time limit is {clock(limit)}, the partition's")
    if spec.dependency:
        notes.append(f"the estimate takes no account of --dependency {spec.dependency}")
    return notes


def _span(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min"


def clock(seconds: float) -> str:
    """Return a time in Slurm's form: ``12:00:00``, ``1-12:00:00``."""
    days, rest = divmod(int(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    text = f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text
