"""Where sbatch does not tell whether the other nodes suffice, Slurm's list of the nodes does."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from hpc_ddp.core.file_io import write_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from unit.fakes import Clock, Slurm
from unit.node.outcome.requeue.fakes import SHOWN_JOB, blame_nodes, changes_of

NODES = """\
NodeName=n1 CPUTot=8 ActiveFeatures=a OS=Linux RealMemory=9 Gres=gpu:4 State=IDLE Partitions=p,q
NodeName=n2 CPUTot=8 ActiveFeatures=a OS=Linux RealMemory=9 Gres=gpu:4 State=IDLE Partitions=p
NodeName=n3 CPUTot=8 ActiveFeatures=b OS=Linux RealMemory=9 Gres=gpu:4 State=IDLE Partitions=p
NodeName=n4 CPUTot=8 ActiveFeatures=a OS=Linux RealMemory=9 State=IDLE Partitions=p
"""
LIMIT = "allocation failure: AssocMaxSubmitJobLimit"
UNCLEAR = (LIMIT, "access from this host is not permitted", "Socket timed out")
NO_NODES = "allocation failure: Requested node configuration is not available"


@pytest.fixture
def kept_off(
    slurm_commands: Slurm, end: Callable[..., int], run: RunFolder
) -> Callable[..., list[str]]:
    """Requeue a job that was on n1, and return what Slurm is asked to keep it off."""

    def requeue_job(
        answer: str,
        requests: str,
        nodes: str = f"printf %s {shlex.quote(NODES)}",
        states: str = "",
    ) -> list[str]:
        blame_nodes(run, "n1")
        least = int(requests.removeprefix("NumNodes=")[0])
        run.job_json.write_text(JobSpec("t.py", nodes=least).to_json())
        # Behind the requeue Slurm counts the nodes that have not ended yet.
        requests = f"NumNodes=1 {requests.partition(' ')[2]}"
        shown = shlex.quote(f"{SHOWN_JOB.format('RUNNING', 2)}   {requests}\n")
        reservation = "ReservationName=mine Nodes=n[1-2]\n"
        cases = (
            f"*' show node') {nodes} ;; *' show reservation') printf '{reservation}' ;;"
            rf" *hostnames*) printf 'n1\nn2\n' ;; show*) printf %s {shown} ;;"
        )
        slurm_commands.answer_by("scontrol", f"case $* in {cases} esac")
        slurm_commands.answer("sbatch", err=answer, code=int(bool(answer)))
        slurm_commands.answer("sinfo", states)
        assert end() == 0
        texts = [words[2] for words in changes_of(slurm_commands) if words[0] == "update"]
        return [text.removeprefix("ExcNodeList=") for text in texts]

    return requeue_job


@pytest.mark.parametrize("answer", UNCLEAR)
def test_a_limit_a_ban_or_silence_keeps_no_job_on_a_broken_node(
    kept_off: Callable[..., list[str]], printed: list[str], answer: str
) -> None:
    assert kept_off(answer, "NumNodes=2-2 Partition=q,p Reservation=(null)") == ["n1"]
    assert printed == ["kept off: n1"]


@pytest.mark.parametrize(
    ("answer", "requests", "states"),
    [
        (NO_NODES, "NumNodes=1 Partition=p", ""),
        ("Invalid node name specified", "NumNodes=1 Partition=p", ""),
        (LIMIT, "NumNodes=1 Partition=q", ""),  # n1 alone
        (LIMIT, "NumNodes=3-4 Partition=p", ""),  # n4 has no GPU
        (LIMIT, "NumNodes=2 Partition=p Features=a", ""),
        (LIMIT, "NumNodes=2 Partition=p", "n2|idle\nn3|drained\n"),
        (LIMIT, "NumNodes=2 Partition=p Reservation=mine", ""),
    ],
)
def test_a_job_without_enough_other_nodes_is_not_kept_off_one(
    kept_off: Callable[..., list[str]],
    printed: list[str],
    answer: str,
    requests: str,
    states: str,
) -> None:
    """Slurm would hold it for good, by BadConstraints."""
    assert kept_off(answer, requests, states=states) == [""]
    why = "" if answer != LIMIT else "too few other nodes; no test of them, since "
    assert printed == [f"not kept off n1: {why}sbatch refused: {answer}"]


def test_a_job_that_asks_for_a_node_by_name_is_not_kept_off_it(
    kept_off: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = SHOWN_JOB.replace("ReqNodeList=(null)", "ReqNodeList=n1")
    monkeypatch.setitem(kept_off.__globals__, "SHOWN_JOB", named)
    assert kept_off(LIMIT, "NumNodes=1 Partition=p") == [""]


@pytest.mark.parametrize("nodes", ["echo Access denied >&2; exit 1", "echo No nodes"])
def test_a_site_that_hides_its_nodes_keeps_no_job_on_a_broken_one(
    kept_off: Callable[..., list[str]], nodes: str
) -> None:
    assert kept_off(LIMIT, "NumNodes=1 Partition=p", nodes) == ["n1"]


def test_a_reservation_has_other_nodes(kept_off: Callable[..., list[str]]) -> None:
    assert kept_off(LIMIT, "NumNodes=1 Partition=p Reservation=mine") == ["n1"]


@pytest.mark.parametrize(("state", "kept"), [("IDLE", "n1,n2"), ("ALLOCATED", "n1")])
def test_a_node_is_suspected_where_others_are_free(
    kept_off: Callable[..., list[str]], run: RunFolder, clock: Clock, state: str, kept: str
) -> None:
    """Data were away for three minutes, and then the job waited for days beside its idle node."""
    write_json(run.vain_nodes, {"n2": [clock.now, clock.now]})
    nodes = shlex.quote(NODES.replace("IDLE", state))
    assert kept_off("", "NumNodes=1 Partition=p", nodes=f"printf %s {nodes}") == [kept]
