"""`JobRef` names a job of Slurm by id and cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class JobRef:
    """A job of Slurm. Its id alone names no job: clusters that share a disk number theirs alike.

    `cluster` is ``name@host:port``, with the controller's host and port, since clouds give all of
    their clusters one name. It is ``name`` where only the name is known, as of a job sent to
    another cluster; or ''.
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
        """Return the job that an event or an ``attempt.json`` names by these two values; None
        without an id."""
        return cls(job_id, cluster or "") if job_id else None

    def __str__(self) -> str:
        return f"{self.id};{self.cluster}" if self.cluster else self.id

    def task(self, index: int) -> JobRef:
        """Return the task `index` of this job, which is an array: ``ID_INDEX``."""
        return JobRef(f"{self.id}_{index}", self.cluster)

    @property
    def cluster_name(self) -> str:
        """The name of the job's cluster, as ``--clusters`` takes it; '' where it is not known."""
        return self.cluster.partition("@")[0]

    def is_of(self, cluster: str) -> bool:
        """Return whether this may be a job of `cluster`, a text as in the class. A name or a
        controller that is missing on one side counts as equal: '' may be any cluster."""
        name, _, controller = self.cluster.partition("@")
        cluster_name, _, its_controller = cluster.partition("@")
        if not name or not cluster_name:
            return True
        controllers = {controller, its_controller} - {""}
        return name == cluster_name and len(controllers) < 2

    def is_of_namesake(self, cluster: str) -> bool:
        """Return whether this job is of another cluster than `cluster` that has the same name, but
        another controller."""
        is_namesake = self.cluster_name == JobRef("", cluster).cluster_name
        return is_namesake and not self.is_of(cluster)

    def is_same(self, job: JobRef) -> bool:
        """Return whether this and `job` may be one job: the ids are equal, and the clusters' names
        where both are known. Controllers are not compared: one may have moved to another host."""
        names = {self.cluster_name, job.cluster_name} - {""}
        return self.id == job.id and len(names) < 2

    def is_vaguer_than(self, job: JobRef) -> bool:
        """Return whether this and `job` may be one job, and `job` tells more of the cluster."""
        return self != job and self.is_same(job) and job.cluster.startswith(self.cluster)

    def is_among(self, jobs: Iterable[JobRef]) -> bool:
        """Return whether one of `jobs` may be this job, by `is_same`."""
        return any(map(self.is_same, jobs))


def remove_duplicates(jobs: Iterable[JobRef]) -> list[JobRef]:
    """Return each job once, in the order of their first places. A job is left out where another job
    of its id tells more of the cluster."""
    jobs = list(dict.fromkeys(jobs))
    by_id: dict[str, list[JobRef]] = {}
    for job in jobs:
        by_id.setdefault(job.id, []).append(job)
    return [job for job in jobs if not any(map(job.is_vaguer_than, by_id[job.id]))]
