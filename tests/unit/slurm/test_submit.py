"""A script is submitted to Slurm once; stand-ins take the place of its commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_ddp import slurm, slurm_text
from hpc_ddp.core import attempt_env
from hpc_ddp.core.job.job_ref import JobRef
from hpc_ddp.slurm import NoAnswerError
from unit.fakes import Clock, Slurm
from unit.slurm.fakes import HEADER, SCRIPT, TIMED_OUT


def _submit(*options: str, known_ids: tuple[str, ...] = ()) -> str:
    jobs = [JobRef(id) for id in known_ids]
    return str(slurm.sbatch(SCRIPT, os.environ, *options, earlier=jobs))


def test_a_submit_is_answered_with_the_id(slurm_commands: Slurm) -> None:
    slurm_commands.answer("sbatch", "7;cluster\n")
    assert _submit("--array=1") == "7;cluster"
    assert slurm_commands.calls("sbatch") == [["--parsable", "--array=1", "job.sbatch"]]
    assert not slurm_commands.calls("squeue")


def test_a_submit_without_an_id_is_not_made_again(slurm_commands: Slurm, clock: Clock) -> None:
    slurm_commands.answer("sbatch", "Submitted!\n")
    slurm_commands.answer("squeue", "7\x1fN/A\x1fjob.sbatch\n")
    assert _submit() == "7"
    with pytest.raises(NoAnswerError, match="printed no job id: 'Submitted!'"):
        _submit(known_ids=("7",))
    assert len(slurm_commands.calls("sbatch")) == 2


def test_a_chains_own_job_is_not_found_for_its_next_one(
    slurm_commands: Slurm, clock: Clock, tmp_path: Path
) -> None:
    """The script names all clusters; the next job is submitted to that of the one before."""
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --clusters=all\n")
    slurm_commands.answer_by("sbatch", f"echo {TIMED_OUT!r} >&2; exit 1")
    slurm_commands.answer("squeue", f"5\x1fN/A\x1f{script}\n")
    with pytest.raises(NoAnswerError):
        slurm.sbatch(script, os.environ, earlier=[JobRef("5", "a")], cluster="a")


def test_a_job_that_can_not_be_searched_for_may_be_queued(
    slurm_commands: Slurm, clock: Clock
) -> None:
    """A refusal would have its folder deleted."""
    slurm_commands.answer_by("sbatch", f"echo {TIMED_OUT!r} >&2; exit 1")
    slurm_commands.answer_by("squeue", "echo 'squeue: error: Unexpected message' >&2; exit 1")
    with pytest.raises(NoAnswerError, match="squeue refused: Unexpected message") as caught:
        _submit()
    assert "squeue --me" in str(caught.value.hint)


def test_options_of_a_job_override_a_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    retained = {"SBATCH_ACCOUNT": "physics", "SLURM_CLUSTERS": "big", "SLURM_JWT": "secret"}
    same = {"SBATCH_PARTITION": "debug"}
    replaced = {"SBATCH_GPUS": "8", "SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "1-9"}
    replaced["SBATCH_NO_KILL"] = "set"  # would keep a job without its first node until its limit
    dropped = {"SLURM_JOB_ID": "5", "SRUN_CPUS_PER_TASK": "77", "SLURM_NTASKS": "9"}
    for name, value in {**retained, **same, **replaced, **dropped}.items():
        monkeypatch.setenv(name, value)
    env = attempt_env.submit_env(os.environ, slurm_text.parse_options(HEADER))
    assert {
        name: env[name] for name in {**retained, **same, **replaced, **dropped} if name in env
    } == retained
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "hpc-ddp: SBATCH_ARRAY_INX=1-9 is not used: a job of hpc-ddp has its own way",
        "hpc-ddp: SBATCH_GPUS=8 is not used: the job has --gpus-per-node",
        "hpc-ddp: SBATCH_NO_KILL=set is not used: a job of hpc-ddp has its own way",
        "hpc-ddp: SBATCH_WAIT=1 is not used: a job of hpc-ddp has its own way",
    ]


@pytest.mark.parametrize(("variables", "umask"), [({"HPC_DDP_UMASK": "2"}, "0002"), ({}, "0022")])
def test_a_job_gets_the_umask_of_its_user(
    slurm_commands: Slurm, tmp_path: Path, variables: dict[str, str], umask: str
) -> None:
    """The processes of hpc-ddp on a node have one of their own, and sbatch passes its own on."""
    slurm_commands.answer_by("sbatch", f"umask >{tmp_path}/umask; echo 7")
    before = os.umask(0o022)
    try:
        slurm.sbatch(Path("job.sbatch"), {**os.environ, **variables})
    finally:
        os.umask(before)
    assert (tmp_path / "umask").read_text().strip() == umask


def test_an_option_of_the_command_line_counts_as_the_jobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = slurm_text.parse_options(HEADER, ["--exclude=n1", "--hold"])
    assert options == {"partition": "debug", "gpus-per-node": "2", "exclude": "n1", "hold": ""}
    environ = {"SBATCH_TIMELIMIT": "5", "SBATCH_EXCLUDE": "n2"}
    assert attempt_env.submit_env(environ, options) == {"SBATCH_TIMELIMIT": "5"}
    assert "SBATCH_EXCLUDE=n2 is not used: the job has --exclude" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("-H", {"hold": ""}),
        ("-b now+1hour", {"begin": ""}),
        ("-pdebug", {"partition": "debug"}),
        ("--nodes=2 --hold  # by hand", {"nodes": "2", "hold": ""}),
        ("--comment='a --begin b' -t 5", {"comment": "a --begin b", "time": ""}),
        ("--comment='a --qos=x", {"comment": "'a", "qos": "x"}),
    ],
)
def test_options_of_a_line_that_was_written_by_hand(line: str, options: dict[str, str]) -> None:
    assert slurm_text.parse_options(f"#!/bin/bash\n#SBATCH {line}\n#SBATCHER -M x\n") == options


def test_options_behind_the_first_command_are_none() -> None:
    """As in a here-document of the set-up lines."""
    head = "#!/bin/bash\n#SBATCH --nodes=2\n\n  # a comment\n#SBATCH --time=5\n"
    script = f"{head}  cat >job <<EOF\n#!/bin/bash\n#SBATCH --dependency=singleton\nEOF\n"
    assert slurm_text.parse_options(script) == {"nodes": "2", "time": "5"}


@pytest.mark.parametrize(
    ("options", "known_ids", "rows", "id"),
    [
        ((), (), "7\x1fN/A\x1fjob.sbatch\n", "7"),
        ((), (), "8\x1fN/A\x1f/r/other\n9\x1fN/A\x1fjob.sbatch\n10\x1fN/A\x1fjob.sbatch\n", "10"),
        ((), ("10",), "9\x1fN/A\x1fjob.sbatch\n10\x1fN/A\x1fjob.sbatch\n", "9"),
        (("--array=2",), (), "9\x1f2\x1fjob.sbatch\n10\x1f1\x1fjob.sbatch\n", "9"),
        (("--hold",), (), "torn line\n9\x1f1\x1fjob.sbatch\n", "9"),
    ],
)
def test_a_submit_without_an_answer_looks_into_the_queue(
    slurm_commands: Slurm,
    clock: Clock,
    options: tuple[str, ...],
    known_ids: tuple[str, ...],
    rows: str,
    id: str,
) -> None:
    slurm_commands.answer("sbatch", err=TIMED_OUT, code=1)
    slurm_commands.answer("squeue", "")
    slurm_commands.answer("squeue", rows)
    assert _submit(*options, known_ids=known_ids) == id
    assert len(slurm_commands.calls("sbatch")) == 1
    assert clock.slept == [2, 2]


def test_a_job_missing_from_the_queue_is_submitted_again(
    slurm_commands: Slurm, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_commands.answer("sbatch", err=TIMED_OUT, code=1)
    slurm_commands.answer("sbatch", "8\n")
    slurm_commands.answer("squeue", "7\x1fN/A\x1fjob.sbatch\n")
    assert _submit(known_ids=("7",)) == "8"
    assert len(slurm_commands.calls("squeue")) == slurm.SUBMIT_LOOKS
    assert "trying again" in capsys.readouterr().err


def test_a_wrapper_may_fail_once_the_job_is_accepted(slurm_commands: Slurm) -> None:
    """The job runs, and needs its folder."""
    slurm_commands.answer("sbatch", "8\n", err="accounting: no database", code=1)
    assert _submit() == "8"


def test_a_submit_is_given_up_after_a_while(slurm_commands: Slurm, clock: Clock) -> None:
    slurm_commands.answer("sbatch", err=TIMED_OUT, code=1)
    slurm_commands.answer("squeue", "")
    with pytest.raises(NoAnswerError):
        _submit()
    pause_s = 2 * slurm.SUBMIT_LOOKS
    assert slurm.PATIENCE_S < sum(clock.slept) <= slurm.PATIENCE_S + pause_s
