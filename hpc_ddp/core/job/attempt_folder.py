"""The paths of one attempt of a run, and of one node in it."""

from __future__ import annotations

import fnmatch
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hpc_ddp.core.file_io import (
    READER_THREADS,
    list_names,
    parse_object,
    patiently,
    read_json,
    read_text,
)
from hpc_ddp.core.job.job_ref import JobRef


class PathIn:
    """An attribute of a class with a `path`: a file or folder below it. ``{task}`` in the name is
    the object's `task`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, kind: type | None = None) -> Path:
        name = self._name.replace("{task}", folder.task) if "{" in self._name else self._name
        return cast(Path, folder.path / name)


@dataclass(frozen=True)
class NodeFolder:
    """One node's folder in an attempt. One supervisor has all workers of the node (`rank` None), or
    worker `rank` alone (``--launcher srun``); then its files have the rank in their names."""

    path: Path
    rank: int | None = None

    # The file by which the supervisor, and no other process, states that a signal is a notice.
    notice = PathIn("notice{task}")
    # The JSON file that says how this node's torchrun, or this task's worker, has ended.
    record = PathIn("record{task}.json")
    # The JSON file of the failed workers, as torchrun reports them to the supervisor, or of why it
    # reports none; empty before (see `AttemptFolder.notice`).
    failures = PathIn("failures{task}.json")
    # The file that shows how the logs grow: its lines have unix seconds, a rank, and the bytes of
    # the rank's log at that time.
    printed = PathIn("printed{task}")
    # The JSON file of the port at which the supervisor listens to its peers; few supervisors have
    # one.
    peer_port = PathIn("peer-port{task}.json")

    @property
    def task(self) -> str:
        """The end of the files' names: ``-3`` for worker 3 alone, '' for all workers."""
        return "" if self.rank is None else f"-{self.rank}"

    def pids(self) -> list[Path]:
        """Return the files with the process ids of the workers that have started, with a `rank`
        only this worker's; [] before the first start. Raise OSError where the folder can't be
        listed, or is gone, as after a user has removed it: workers may run then."""
        pattern = f"rank-{'*' if self.rank is None else self.rank}.pid"
        return [self.path / name for name in fnmatch.filter(os.listdir(self.path), pattern)]

    def records(self) -> list[Path]:
        """Return the files by which the node's tasks have recorded their ends so far, by name.
        Raise OSError where the folder can't be listed: without its records a node counts as
        lost."""
        names = sorted(fnmatch.filter(list_names(self.path), "record*.json"))
        return [self.path / name for name in names]

    agent_log = PathIn("agent.log")  # the output of this node's torchrun

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def stacks(self, rank: int) -> Path:
        """The file with the stacks of a rank's threads when the rank hung; empty if it ended
        otherwise."""
        return self.path / f"stack-rank-{rank}.txt"

    def flight(self, rank: int) -> Path:
        """The file with the last collectives of a rank that hung; torch's ``torchfrtrace`` compares
        them."""
        return self.path / f"flight-rank-{rank}"


@dataclass(frozen=True)
class AttemptFolder:
    """One start of a run, ``logs/attempt-<k>``."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name.removeprefix("attempt-"))

    @property
    def info(self) -> dict[str, Any]:
        """The content of ``attempt.json``: the job of the attempt (``job_id``, ``restarts``), or
        its process (``host``, ``pid``); and the names of its nodes, ``nodes``. {} where the file is
        missing or damaged."""
        return read_json(self.path / "attempt.json")

    @property
    def link(self) -> JobRef | None:
        """The next job of the chain, as the attempt's job has queued it; None where it has queued
        none."""
        text = read_json(self.path / "next.json").get("job_id")
        return JobRef.parse(str(text)) if text else None

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the attempt's nodes, in the order of the ranks.

        A disk in trouble is waited for (`patiently`). Raises OSError where that is in vain, and
        ValueError or KeyError where the file is damaged.
        """
        names = parse_object(patiently((self.path / "attempt.json").read_text))["nodes"]
        if not isinstance(names, list):
            raise ValueError(f"nodes is {names!r}; accepted: a list")
        return tuple(names)

    # Holds a word once the batch script has a notice to pass on; empty before. The file exists from
    # the start: opening a file that exists asks an NFS server for its newest content, while a
    # look-up of a missing name may be answered from a cache.
    notice = PathIn("notice")
    # Holds the end of the job's time in unix seconds, once Slurm has changed it since the attempt's
    # start; empty before (see `notice`).
    end_time = PathIn("end-time")
    # Holds the name of a supervisor whose workers failed, ``<node>`` or, where each worker is a
    # task, ``<node>-<rank>``; or, in a dry run, ``a second signal``. Empty before (see `notice`).
    failed = PathIn("failed")
    # Holds the interconnect that the first node has found; empty before (see `notice`).
    fabric = PathIn("fabric")
    # Holds a word once the preflight has found all nodes fit, for which torchrun's agents wait;
    # empty before (see `notice`).
    fit = PathIn("fit")
    # Holds what the attempt's agents sign with; its owner alone may read it.
    secret = PathIn("secret")

    @property
    def staged(self) -> set[str]:
        """The words for the kinds of copies of ``--stage`` from which Pythons of the attempt have
        started: ``staged-memory``, ``staged-disk``. Raises OSError where the folder can't be
        listed."""
        return {name for name in list_names(self.path) if name.startswith("staged-")}

    # Exists once the port of torchrun's rendezvous turned out to be in use.
    port_taken = PathIn("port-taken")

    def node(self, name: str, rank: int | None = None) -> NodeFolder:
        """Return the folder of a node; with `rank` the one for the Slurm task of this worker, with
        None for the supervisor of all workers. Nothing is made on disk."""
        return NodeFolder(self.path / name, rank)

    def nodes(self) -> list[NodeFolder]:
        """Return the folders of the nodes so far, by name; raise OSError where they can't be
        listed."""
        with os.scandir(self.path) as entries:  # it knows which are folders, without a look at each
            names = sorted(entry.name for entry in entries if entry.is_dir())
        return [self.node(name) for name in names]

    def records(self) -> list[dict[str, Any]]:
        """Return the records by which the nodes, or their Slurm tasks, have noted their ends so
        far. A record that is damaged or has no exit ``code`` is left out. Raise OSError where a
        folder can't be listed, or a record can't be read."""
        nodes = self.nodes()
        with ThreadPoolExecutor(READER_THREADS) as pool:  # a thousand files take seconds in a row
            records = [record for of_node in pool.map(_records_of, nodes) for record in of_node]
        return [record for record in records if "code" in record]


def _records_of(node: NodeFolder) -> list[dict[str, Any]]:
    """Return the objects in a node's records, those that are whole. Raise as `records`."""
    records = []
    for path in node.records():
        with suppress(ValueError):
            records.append(parse_object(read_text(path)))
    return records
