"""The time limit, with one of its two warnings, and with a slow save."""

from __future__ import annotations

import pytest
from cluster import Cluster
from harness import BACKENDS, ONE_BY_TWO, WALK, Hpc, Job, in_one_go, same_weights, use

# As if the site kept the warning signal to itself, and as if nobody knew when the job ends.
NO_SIGNAL = """--setup=trap() {
    if [ "${*: -1}" = USR2 ]; then builtin trap '' USR2; else builtin trap "$@"; fi
}"""
NO_DEADLINE = "--setup=declare -rx HPC_DDP_END_TIME="
WAYS: dict[str, tuple[str, ...]] = {
    "signal alone": (NO_DEADLINE,),
    "deadline alone": (NO_SIGNAL,),
    "slow save": (),
}


def _goes_on_like(job: Job, walked: Job) -> None:
    """Wait for a job that meets its time limit, and ends like one that met none."""
    assert job.end() == "COMPLETED", job.output()
    assert set(job.verdicts()[:-1]) == {("time limit", "requeue")}
    assert in_one_go(job)
    assert same_weights(job, walked)


@pytest.fixture(scope="module", params=BACKENDS)
def limited(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Job]:
    """All at once, since they mostly wait."""
    use(cluster)
    cluster.reset()
    hpc = Hpc(cluster, tmp_path_factory.mktemp("limited"))
    jobs = {}
    for way, options in WAYS.items():
        words = ("--backend", request.param, "--time", "3", *options, *ONE_BY_TWO, str(WALK))
        slow = ("--write-seconds", "6") if way == "slow save" else ()
        jobs[way] = hpc.submit(*words, "--step-seconds", "0.8", "--save-every-steps", "25", *slow)
    return jobs


@pytest.mark.more
@pytest.mark.row(
    "time limit, with only one of its two warnings",
    promise="goes on at the next step: by the warning signal alone, or by the known end alone",
)
@pytest.mark.parametrize("way", ["signal alone", "deadline alone"])
def test_one_warning(limited: dict[str, Job], walked: Job, way: str) -> None:
    job = limited[way]
    _goes_on_like(job, walked)


@pytest.mark.more
@pytest.mark.row(
    "a save that takes longer than the lead of the warning",
    promise="the stop comes as early as a measured save needs",
)
def test_the_lead_is_learned(limited: dict[str, Job], walked: Job) -> None:
    job = limited["slow save"]
    _goes_on_like(job, walked)
    assert {event["reason"] for event in job.events("stopped")} == {"deadline"}
    assert min(event["write_s"] for event in job.events("checkpoint")) > 18  # the lead


def test_a_hole_in_the_queue_is_taken(hpc: Hpc, cluster: Cluster) -> None:
    use(cluster)
    cluster.reset()
    sleep = ("--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    cluster.run("sbatch", "--nodes=3", "--time=10", *sleep)
    cluster.run("sbatch", "--nodes=4", "--time=10", *sleep)  # waits, and has a reservation
    words = ("--time", "60", "--gpus-per-node", "1", str(WALK), "--step-seconds", "0.1")
    whole = hpc.submit(*words)
    job = hpc.submit("--time-min", "2", "--signal", "TERM@10", *words)
    job.at_step(2)
    assert whole.state() == "PENDING"
    in_the_hole = ("00:02:00", "00:09:00", "00:08:00")  # the least, or with Slurm 26.05 all of it
    assert job.show()["TimeLimit"] in in_the_hole
    cluster.run("scancel", "--signal=TERM", job.id)
    job.until(lambda: job.show()["TimeLimit"] == "01:00:00", "the whole limit of a waiting job")
    job.at_step(2, attempt=1)
    assert job.show()["TimeLimit"] in in_the_hole
    assert whole.state() == "PENDING"


@pytest.fixture(scope="module")
def changed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs of a minute, or of what an operator makes of it while they run; all at once."""
    use(cluster)
    cluster.reset()
    folder = tmp_path_factory.mktemp("changed")
    hpc = Hpc(cluster, folder)
    limits = {"extended": "1", "shortened": "30", "teardown": "1"}
    jobs = {}
    for way, minutes in limits.items():
        lines = 'teardown = ["sleep 1000"]\n' if way == "teardown" else ""
        (folder / "hpc-ddp.toml").write_text(lines)
        words = ("--time", minutes, *ONE_BY_TWO, str(WALK), "--step-seconds", "0.5")
        jobs[way] = hpc.submit(*words, "--save-every-steps", "25", cwd=folder)
    for way, minutes in (("extended", "5"), ("shortened", "1")):
        jobs[way].at_step(1)
        jobs[way].set_time_limit(minutes)
    return jobs


@pytest.mark.more
@pytest.mark.row(
    "a time limit that an operator extends while the job runs",
    promise="the new limit is used: no stop at the old one",
)
def test_an_extended_limit_is_used(changed: dict[str, Job]) -> None:
    job = changed["extended"]
    assert job.end() == "COMPLETED", job.output()
    assert job.verdicts() == [("finished", "none")]
    event = job.events("finished")[0]
    assert event["time"] - job.events("started")[0]["time"] > 60


@pytest.mark.more
@pytest.mark.row(
    "a time limit that an operator shortens while the job runs",
    promise="stops and saves before the new limit, and goes on at the next step",
)
def test_a_shortened_limit_is_respected(changed: dict[str, Job], walked: Job) -> None:
    job = changed["shortened"]
    _goes_on_like(job, walked)


@pytest.mark.more
@pytest.mark.row(
    "a teardown that takes longer than the time limit leaves",
    promise="it is cut short, and the verdict comes",
)
def test_a_teardown_ends_with_the_time(changed: dict[str, Job], walked: Job) -> None:
    job = changed["teardown"]
    _goes_on_like(job, walked)
    assert "the teardown has 1 s: the job's time is nearly over" in job.output()
