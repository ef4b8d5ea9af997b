"""Variables of the job: filled in where they are named, by the batch script and the worker; every
other character arrives as it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.variables import fill, shell_word
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.workers import worker
from hpc_ddp.submission.script.render import Rendering

NAMES = ("ID", "DIR", "RANK")
VALUES = {"ID": "7 $(touch x) '\"\\ ${DIR}", "DIR": "/a b\n", "RANK": "3", "IDLE": "no"}
PIECES = st.sampled_from(
    [f"${name}" for name in (*NAMES, "IDLE", "HOME", "")]
    + [f"${{{name}}}" for name in (*NAMES, "IDLE", "ID:-x", "ID%.*", "#ID")]
    + ["$(touch x)", "`touch x`", "$((1+1))", "\\$ID", "'$ID'", '"', "'", "$$", "$1", "é", " ", "x"]
)
CHARACTERS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
TEXT = st.lists(st.one_of(PIECES, CHARACTERS), max_size=6).map("".join)
MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def _expected(text: str, values: dict[str, str]) -> str:
    """The rule, character by character: a dollar sign, then a name of `NAMES`, plain or in braces,
    and no further letter, digit or underscore behind a plain one."""
    done = ""
    while text:
        for name in NAMES:
            plain, braced = f"${name}", f"${{{name}}}"
            after = text[len(plain) : len(plain) + 1]
            goes_on = after == "_" or (after.isascii() and after.isalnum())
            if text.startswith(braced) or (text.startswith(plain) and not goes_on):
                done += values[name]
                text = text[len(braced if text.startswith(braced) else plain) :]
                break
        else:
            done, text = done + text[0], text[1:]
    return done


@MANY
@example(texts=["$ID", "$IDLE", "${ID}LE", "$IDé", "a$ID", ""])
@given(texts=st.lists(TEXT, min_size=1, max_size=20))
def test_bash_and_python_fill_in_the_same(texts: list[str], tmp_path: Path) -> None:
    words = " ".join(shell_word(text, NAMES) for text in texts)
    (tmp_path / "script").write_text(f"printf '%s\\0' {words}")
    done = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=VALUES, capture_output=True, check=True
    )
    expected = [_expected(text, VALUES) for text in texts]
    assert done.stdout.decode().split("\0")[:-1] == expected
    assert [fill(text, NAMES, VALUES) for text in texts] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


def _rendering(**values: Any) -> Rendering:
    spec = JobSpec(script="/home/me/train.py", chdir="/", **values)
    return Rendering(spec, RunFolder(Path("/r")), Path("/c"), Path("/c/train.py"))


def _worker(
    rendering: Rendering, folder: Path, launcher: str, lines: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Run the script's blocks in bash, and start what srun is given as a worker: its sys.argv and
    os.environ."""
    show = folder / "show.py"
    show.write_text(
        "import json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(folder / 'seen')!r}, 'w'))\n"
    )
    shell = "\n".join(
        [
            f"srun() {{ printf '%s\\0' \"$@\" >{folder}/words; env -0 >{folder}/env; }}",
            "sleep() { :; }",
            rendering.block("settings"),
            "_find_python() { :; }; _node_side=(true) _node=/n",
            "SLURM_NNODES=1 SLURM_CPUS_PER_TASK=1",
            lines,
            rendering.block("attempt"),
            rendering.block("step"),
        ]
    )
    (folder / "script").write_bytes(shell.encode())
    outer = {"ID": VALUES["ID"], "PATH": os.environ["PATH"], "SLURM_JOB_ID": "9"}
    subprocess.run(["bash", "script"], cwd=folder, env=outer, check=True, capture_output=True)
    words = (folder / "words").read_bytes().decode().split("\0")[:-1]
    args = words[words.index("/c/train.py") + 1 :]
    pairs = (
        pair.partition("=") for pair in (folder / "env").read_bytes().decode().split("\0")[:-1]
    )
    of_rank = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    of_rank |= {"GROUP_RANK": "1", "HPC_DDP_NODE_FOLDER": str(folder), "HPC_DDP_RUN": str(folder)}
    env = {name: value for name, _, value in pairs} | of_rank | {"DIR": VALUES["DIR"]}
    command = worker.worker_command(sys.executable, [str(show), *args])
    done = subprocess.run(command, env=env, capture_output=True)
    assert done.returncode == 0, (folder / "rank-3.log").read_text()
    seen = json.loads((folder / "seen").read_text())
    return seen[0], seen[1]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(args=st.lists(TEXT, max_size=20), texts=st.lists(TEXT, max_size=5))
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_worker_gets_exactly_the_text_with_the_named_variables(
    args: list[str], texts: list[str], launcher: str, tmp_path: Path
) -> None:
    """DIR is set on the node only, as TMPDIR may be, and so it can be in arguments alone."""
    texts = [text.replace("DIR", "ID") for text in texts]
    env = {f"V{place}": text for place, text in enumerate(texts)}
    rendering = _rendering(args=tuple(args), env=env, expand=NAMES, launcher=launcher)
    argv, environ = _worker(rendering, tmp_path, launcher)
    assert argv == [_expected(text, VALUES) for text in args]
    assert {n: environ[n] for n in env} == {n: _expected(t, VALUES) for n, t in env.items()}
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_elements_of_an_array_are_words(launcher: str, tmp_path: Path) -> None:
    """It may have none."""
    names = ("FILES[@]", "NONE[@]")
    args = ("--files", "${FILES[@]}", "${NONE[@]}", "x", "${OTHER[@]}")
    rendering = _rendering(args=args, expand=names, launcher=launcher)
    lines = "FILES=(a '' 'b  c' $'d\\n\\'é*') NONE=()"
    argv, _ = _worker(rendering, tmp_path, launcher, lines)
    assert argv[:5] == ["--files", "a", "", "b  c", "d\n'é*"]
    assert argv[6:] == ["${OTHER[@]}"]


def test_a_line_of_each_worker_fills_an_array(tmp_path: Path) -> None:
    rendering = _rendering(worker_setup=("FILES=(a 'b c')",), expand=("FILES[@]", "GONE[@]"))
    text = rendering.block("settings")
    shell = f'{text}\neval "$HPC_DDP_WORKER_SETUP"; printf %s "$HPC_DDP_WORDS_FILES"'
    done = subprocess.run(["bash", "-c", shell], env=dict(os.environ), capture_output=True)
    assert done.stdout.split(b"\x1f") == [b"", b"a", b"b c"]


@pytest.mark.parametrize(
    "values",
    [
        {"args": ("--f=${FILES[@]}",)},
        {"args": ("$FILES[@]",)},
        {"env": {"X": "${FILES[@]}"}},
    ],
    ids=str,
)
def test_an_array_within_a_text_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"FILES\[@\] stands within a text; accepted"):
        _rendering(expand=("FILES[@]",), **values)


def test_an_array_that_no_variable_can_hold_is_left_out(tmp_path: Path) -> None:
    rendering = _rendering(worker_setup=("FILES=($(seq 30000))",), expand=("FILES[@]",))
    shell = f'{rendering.block("settings")}\nset -u; eval "$HPC_DDP_WORKER_SETUP"; env | wc -c'
    done = subprocess.run(["bash", "-c", shell], env=dict(os.environ), capture_output=True)
    assert b"--expand passes on at most 100000 characters; FILES has more" in done.stderr
    assert int(done.stdout) < 100_000


def test_a_worker_says_which_variable_is_not_set(tmp_path: Path) -> None:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {"GROUP_RANK": "0", "HPC_DDP_RUN": str(tmp_path), "HPC_DDP_NODE_FOLDER": str(tmp_path)}
    env["HPC_DDP_EXPAND"] = "HOSTNAME GONE"
    script = ["-c", "import sys; print(sys.argv[1:])"]
    start = worker.worker_command(sys.executable, script)
    done = subprocess.run([*start, "at-$HOSTNAME"], env=env)
    assert done.returncode == 0
    assert (tmp_path / "rank-0.log").read_text() == f"['at-{socket.gethostname()}']\n"
    assert subprocess.run([*start, "$GONE"], env=env).returncode == 1
    assert "--expand names GONE, which is not set" in (tmp_path / "rank-0.log").read_text()
    env["HPC_DDP_EXPAND"] = "NONE[@]"
    assert subprocess.run([*start, "${NONE[@]}"], env=env).returncode == 1
    assert "--expand names NONE[@], which is not set" in (tmp_path / "rank-0.log").read_text()


def test_a_job_whose_image_has_a_missing_variable_ends_before_its_attempt(tmp_path: Path) -> None:
    rendering = _rendering(image="$IMAGES/a b.sif", expand=("IMAGES",))
    shell = "_find_python() { echo reached; exit 1; }\n" + rendering.block("attempt")
    done = subprocess.run(["bash", "-c", shell], env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (127, "")
    assert "IMAGES: is not set, and --expand names it" in done.stderr
    shell = "srun() { printf '%s\\n' \"$@\"; }\n" + rendering.block("step")
    done = subprocess.run(
        ["bash", "-c", shell], env={"IMAGES": "/i $X"}, capture_output=True, text=True
    )
    assert "\n/i $X/a b.sif\n" in done.stdout


@pytest.mark.parametrize(
    "values",
    [
        {"image": "a-$RANK.sif"},
        {"container": "enter $HOSTNAME"},
        {"image": "a-$ID", "container_tool": "shifter"},  # a line of sbatch, which fills in nothing
        {"srun": ("--output=${RANK}",), "launcher": "srun", "env": {"A": "$RANK"}},
    ],
)
def test_what_the_batch_script_cant_know_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"can't have \$(RANK|HOSTNAME|ID)|set by hpc-ddp"):
        _rendering(expand=("RANK", "HOSTNAME", "ID"), **values)


def test_variable_in_an_option_of_sbatch_is_refused_without_a_word_of_the_step() -> None:
    with pytest.raises(UsageError, match="sbatch fills in no variable") as error:
        _rendering(expand=("SLURM_JOB_ID",), image="a-$SLURM_JOB_ID", container_tool="shifter")
    assert error.value.hint == "write the value in place of $SLURM_JOB_ID"


def test_a_name_is_a_name() -> None:
    with pytest.raises(UsageError, match="not a name of an environment variable"):
        JobSpec("t.py", expand=("$ID",))
