"""`JobRef`: a job of Slurm by id and cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class JobRef:
    """A job of Slurm. Its id alone names no job: clusters that share a disk number theirs alike.

    `cluster` is '' where it is not known.
    """

    id: str
    cluster: str = ""

    @classmethod
    def parse(cls, text: str) -> JobRef:
        """Return the job of ``id;cluster``, as ``sbatch --parsable`` prints it, or of ``id``."""
        job_id, _, cluster = text.partition(";")
        return cls(job_id, cluster)

    @classmethod
    def of(cls, job_id: str | None, cluster: str | None) -> JobRef | None:
        """Return the job that an event or an ``attempt.json`` names; None where it names none."""
        return cls(job_id, cluster or "") if job_id else None

    def __str__(self) -> str:
        return f"{self.id};{self.cluster}" if self.cluster else self.id

    def is_same(self, job: JobRef) -> bool:
        """Return whether both are one job; an unknown cluster counts as the other's."""
        is_unknown = not (self.cluster and job.cluster)
        return self.id == job.id and (self.cluster == job.cluster or is_unknown)

    def is_among(self, jobs: Iterable[JobRef]) -> bool:
        """Return whether one of some jobs is this one."""
        return any(map(self.is_same, jobs))


def distinct(jobs: Iterable[JobRef]) -> list[JobRef]:
    """Return each job once, in their order, and with its cluster where one of them has it."""
    jobs = list(dict.fromkeys(jobs))
    named = {job.id for job in jobs if job.cluster}
    return [job for job in jobs if job.cluster or job.id not in named]
