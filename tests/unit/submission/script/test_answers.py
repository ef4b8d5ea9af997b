"""The batch script takes answers of hpc-ddp's part alone from a Python that is a wrapper."""

from __future__ import annotations

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


def _answer(wrapper: str, code: str) -> subprocess.CompletedProcess[str]:
    """Return what `_answer_of` prints with a wrapper of Python, a shell's line before `code`."""
    script = _script(JobSpec("x.py"))
    begin = script.index("_answer_of() {")
    lines = [
        script[begin : script.index("\n}\n", begin) + 3],
        'wrapped() { eval "$1"; }',
        '_node_side=(wrapped "$1")',
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
    assert script.count('$("${_node_side[@]}"') == 1  # within `_answer_of`
    calls = ("begin", "next-port", "teardown-plan")
    assert all(f"$(_answer_of batch {call})" in script for call in calls)
