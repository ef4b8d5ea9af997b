"""The job script's own arguments, which `import` is given behind its name, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script

HERE = Path("/home/me/project")


def of_text(*lines: str, arguments: tuple[str, ...] = ()) -> Conversion:
    """Return the conversion of a script whose third line is the first of `lines`."""
    text = "\n".join(("#!/bin/bash", "#SBATCH -N 2", *lines)) + "\n"
    return import_script(text, HERE, HERE, arguments)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (('srun python $1 "$@"',), {"script": "train.py", "args": ["train.py", "--lr", "a b"]}),
        (("srun python t.py ${1:-x} ${4:-y} $#",), {"args": ["train.py", "y", "3"]}),
        (("P=$1", "shift", 'srun python $P "$@"'), {"script": "train.py", "args": ["--lr", "a b"]}),
        (
            ('if [ -z "$1" ]; then exit 1; fi', "export A=$2", "srun python $1"),
            {"script": "train.py", "setup": None, "env": {"A": "--lr"}},
        ),
        (
            ("if [ $# -lt 2 ]; then exit 1; fi", "run $2", "srun python $1"),
            {"setup": ["set -- train.py --lr 'a b'", "run $2"], "script": "train.py"},
        ),
        (
            ("while [ $# -gt 1 ]; do L=$2; shift; done", 'srun python t.py "$@" $L'),
            {
                "setup": [
                    "set -- train.py --lr 'a b'",
                    "while [ $# -gt 1 ]; do L=$2; shift; done",
                    'ARGUMENTS_1=("$@")',
                    "ARGUMENTS_2=(${L})",
                ],
                "args": ["${ARGUMENTS_1[@]}", "${ARGUMENTS_2[@]}"],
            },
        ),
        (("f() { srun python t.py $1; }", "f b"), {"args": ["b"], "setup": None}),
        (("srun python t.py", "echo $1"), {"teardown": ["set -- train.py --lr 'a b'", "echo $1"]}),
    ],
)
def test_arguments_that_are_given(lines: tuple[str, ...], expected: dict[str, Any]) -> None:
    conversion = of_text(*lines, arguments=("train.py", "--lr", "a b"))
    result = conversion.settings()
    assert {key: result.get(key) for key in expected} == expected
    assert LOST not in {conversion.group(line)[0] for line in conversion.marks}
    assert not conversion.notes


@pytest.mark.parametrize(
    "line",
    ["srun python $1", "srun python -u $1 --a", "srun torchrun $1 8 1", "srun python a.py $1"],
)
def test_arguments_that_are_not_given_are_asked_for(line: str) -> None:
    """A program that is one of them is no bare Python."""
    conversion = of_text(line)
    result = conversion.settings()
    assert result.get("script") == ("a.py" if "a.py" in line else None)
    assert not {"args", "no-python"} & result.keys()
    # Behind the program it is nothing, as "$@".
    assert conversion.group(3)[0] == (TAKEN if "a.py" in line else LOST)
    note = "give the script's arguments, if it gets any: hpc-ddp import job.sbatch -- ARG…"
    assert (0, note) in conversion.notes


def test_a_bash_without_its_text_is_no_program() -> None:
    conversion = of_text('srun bash -c "$1"')
    assert "script" not in conversion.settings()
    assert conversion.group(3) == (
        LOST,
        "-c $1: it needs the job script's own arguments: write it into args",
    )


def test_a_default_of_an_argument_asks_for_it() -> None:
    conversion = of_text("srun python t.py ${1:-x}")
    assert conversion.settings()["args"] == ["x"]
    assert any("import job.sbatch -- ARG" in text for _, text in conversion.notes)


@pytest.mark.parametrize(
    ("lines", "setup"),
    [
        # The function stays for the other calls of it.
        (
            ('run() { echo "+ $*"; "$@" || exit 1; }', "run module load a", "run srun python t.py"),
            ['run() { echo "+ $*"; "$@" || exit 1; }', "run module load a",
             "echo '+ srun python t.py'"],
        ),
        (
            ('run() { "$@"; }', "init() { run mkdir a; }", "init", "run srun python t.py"),
            ['run() { "$@"; }', "init() { run mkdir a; }", "init"],
        ),
        (('run() { "$@"; }', "run srun python t.py", "run cp a b"), None),
        # The words that the function gets, in the lines that it runs.
        (('go() { echo "$@"; time $@; }', "go srun python t.py"), ["echo srun python t.py"]),
        (('go() { mkdir -p "o/$1"; srun python t.py $1; }', "go 'a b'"), ["mkdir -p 'o/a b'"]),
        (('go() { mkdir -p "o/$1"; srun python t.py; }', 'read A < f', 'go "$A"'),
         ["read A < f", 'mkdir -p o/"${A}"']),
    ],
)  # fmt: skip
def test_a_function_that_runs_its_arguments(
    lines: tuple[str, ...], setup: list[str] | None
) -> None:
    text = "\n".join(("#!/bin/bash", *lines)) + "\n"
    result = import_script(text, Path("/w"), Path("/w"))
    assert result.settings().get("setup") == setup
    assert result.settings()["script"] == "t.py"
    if setup is None:  # for clean-up lines, too
        assert result.settings()["teardown"] == ['run() { "$@"; }', "run cp a b"]


def test_a_print_of_arguments_into_another_command_is_named() -> None:
    lines = 'go() { echo "$@" | tee a; srun python t.py; }', "go b"
    result = import_script("\n".join(("#!/bin/bash", *lines)) + "\n", Path("/w"), Path("/w"))
    assert "it uses the arguments of its function" in result.reasons(2, LOST)
