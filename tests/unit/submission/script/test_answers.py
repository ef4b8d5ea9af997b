"""The batch script takes answers of hpc-ddp's part alone from a Python that is a wrapper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.script.render import Rendering

VALUE = "export A='x y'\nexport B=2"
ANSWER = f"from hpc_ddp.core.console.terminal import answer; answer({VALUE!r})"


def _script(spec: JobSpec) -> str:
    return Rendering(spec, RunFolder(Path("/r/x/1")), Path("/r/x/1/code"), Path("x.py")).text()


def _functions(*names: str) -> str:
    """Return functions of the batch script."""
    script = _script(JobSpec("x.py"))
    begins = [script.index(f"{name}() {{") for name in names]
    return "".join(script[begin : script.index("\n}\n", begin) + 3] for begin in begins)


def _answer(wrapper: str, code: str) -> subprocess.CompletedProcess[str]:
    """Return what `_answer_of` prints with a wrapper of Python, a shell's line before `code`."""
    lines = [
        _functions("_end_of_wait", "_await", "_run_part", "_answer_of"),
        'wrapped() { eval "$1"; }',
        '_node_side=(wrapped "$1") _node=/dev/null',
        "_answer_of batch begin",
    ]
    line = wrapper.replace("PYTHON", '"$PROGRAM" -c "$CODE"')
    return subprocess.run(
        ["bash", "-c", "\n".join(lines), "bash", line],
        env={"PROGRAM": sys.executable, "CODE": code, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("wrapper", "printed"),
    [
        ("PYTHON", ""),
        ("echo 'a (b) & c; d'; PYTHON", "a (b) & c; d\n"),
        ("printf 'no newline '; PYTHON", "no newline \n"),
        ("PYTHON; echo bye", "\nbye\n"),
        ('text=$(PYTHON); echo a; echo "$text"', "a\n"),  # as conda run does
        ("kill $BASHPID; PYTHON", ""),  # a preemption whose SIGTERM reaches all processes
    ],
)
def test_an_answer_is_told_from_a_wrappers_lines(wrapper: str, printed: str) -> None:
    done = _answer(wrapper, ANSWER)
    assert (done.stdout, done.stderr, done.returncode) == (f"{VALUE}\n", printed, 0)


def test_without_an_answer_nothing_is_taken_for_one() -> None:
    done = _answer("echo 'a (b) & c; d'; PYTHON", "raise SystemExit(3)")
    assert (done.stdout, done.stderr, done.returncode) == ("", "a (b) & c; d\n", 3)


def test_each_value_that_the_script_takes_is_an_answer() -> None:
    spec = JobSpec("x.py", teardown=("true",), preflight=True, stage=True, continue_by="resubmit")
    script = _script(spec)
    assert '$("${_node_side[@]}"' not in script  # but `_answer_of`, which calls again
    calls = ("begin", "next-port", "teardown-plan")
    assert all(f"$(_answer_of batch {call})" in script for call in calls)


@pytest.mark.parametrize(
    ("trouble", "calls"), [("code 111", 3), ("code 143", 3), ("away", 2), ("", 1)]
)
def test_a_part_that_could_not_be_loaded_is_called_again(
    tmp_path: Path, trouble: str, calls: int
) -> None:
    """The runs' disk was away for 4 s as Python loaded that part from it, and the job FAILED."""
    node, count = tmp_path / "node.py", tmp_path / "count"
    if trouble != "away":
        node.touch()
    code = trouble.partition(" ")[2] or "2"
    text = f"""
        part() {{
            echo x >>{count}; local n=$(wc -l <{count})
            ((n < {calls})) && return {code}
            return 7
        }}
        sleep() {{ ((++slept < 5)) || touch {node}; }}
        _node_side=(part) _node={node}
        _run_part batch begin
    """
    script = _functions("_end_of_wait", "_await", "_run_part")
    done = subprocess.run(["bash", "-c", script + text], capture_output=True, text=True)
    assert (done.returncode, count.read_text().count("x")) == (7, calls), done.stderr


def test_a_part_that_has_begun_is_called_once(tmp_path: Path) -> None:
    """A worker that SIGTERM had ended gives its code, 143, to the verdict: it came each second.
    Also on a node without a TMPDIR."""
    text = f"""
        part() {{ echo x >>{tmp_path}/count; echo yes >&"$HPC_DDP_LOADED"; return 143; }}
        _node_side=(part) _node=/dev/null
        _run_part batch verdict
    """
    script = _functions("_end_of_wait", "_await", "_run_part")
    env = {**os.environ, "TMPDIR": str(tmp_path / "none")}
    done = subprocess.run(["bash", "-c", script + text], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "")
    assert (tmp_path / "count").read_text() == "x\n"
