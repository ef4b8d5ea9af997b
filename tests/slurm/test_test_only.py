"""What Slurm says of a job before it is submitted; nothing is queued here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from harness import BACKENDS, SCRIPTS, Hpc

PLAIN = str(SCRIPTS / "plain.py")


@pytest.fixture
def short(cluster: Cluster) -> Iterator[str]:
    """A partition with limits that sbatch --test-only passes over."""
    name = "PartitionName=short"
    cluster.run("scontrol", "create", name, "Nodes=ALL", "MaxTime=60", "DefaultTime=10")
    yield "short"
    cluster.run("scontrol", "delete", name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_when_and_where(hpc: Hpc, backend: str) -> None:
    words = ("submit", "--test-only", "--backend", backend, "--nodes", "2")
    told = json.loads(hpc(*words, "--json", PLAIN).stdout)
    assert told["start"]
    assert told["partition"] == "low"
    assert "[" in told["nodes"]
    done = hpc(*words, PLAIN)
    assert "would start now" in done.stdout
    assert f", on {told['nodes']}, in partition low" in done.stdout
    assert not hpc.runs.exists()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--partition", "nope"], "invalid partition specified: nope", "sinfo -s"),
        (["--nodes", "9"], "gives a job 4 nodes at most, and --nodes is 9", "sinfo -o"),
        (["--gpus-per-node", "9"], "node configuration is not available", "sinfo -o"),
        (["--reservation", "x"], "reservation is invalid", "scontrol show reservation"),
        (
            ["--partition", "short", "--time", "2:00:00"],
            "partition short allows 1:00:00 at most, and --time is 2:00:00: Slurm would queue it",
            "a shorter --time",
        ),
    ],
)
def test_a_refusal_says_what_to_do(
    hpc: Hpc, short: str, words: list[str], message: str, hint: str
) -> None:
    done = hpc("submit", "--test-only", *words, PLAIN, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert f"hint: {hint}" in done.stderr
    assert not hpc.runs.exists()


def test_what_slurm_leaves_out_is_noted(
    hpc: Hpc, cluster: Cluster, short: str, tmp_path: Path
) -> None:
    """Not from the repository's folder, whose own project file has a time."""
    cluster.run("scontrol", "update", f"PartitionName={short}", "State=DOWN")
    words = ("--partition", short, "--dependency", "afterok:999999", PLAIN)
    done = hpc("submit", "--test-only", "--json", *words, cwd=tmp_path)
    notes = json.loads(done.stdout)["notes"]
    assert notes == [
        "partition short is DOWN: nothing starts there before it is UP",
        "without --time the time limit is 0:10:00, the partition's",
        "the estimate takes no account of --dependency afterok:999999",
    ]
