"""Words of a launcher that only the job knows: options, images and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script

HERE = Path("/home/me/project")
ARRAY = "B=(-B /a)", "if [ -d /p ]; then B+=(-B /p); fi"
TEXT = 'B="-B /a"', '[ -d /p ] && B="$B -B /p"'
EXEC = "srun singularity exec --nv"
PYTHON = "python train.py --lr 1"
IN_IMAGE = {"image": "/i.sif", "script": "train.py", "args": ["--lr", "1"], "expand": None}
PLAIN = {"script": "train.py", "args": ["--lr", "1"], "no-python": None}


def of_text(*lines: str) -> Conversion:
    """Return the conversion of a script whose second line is the first of `lines`."""
    return import_script("\n".join(("#!/bin/bash", *lines)) + "\n", HERE, HERE, name="job.sh")


def losses(result: Conversion) -> str:
    """Return the reasons of all lines for what is not taken over."""
    return "; ".join(filter(None, (result.reasons(line, LOST) for line in result.marks)))


@pytest.mark.parametrize(
    "line",
    [
        "srun {}", 'srun bash -c "{}"', "{}", "sudo {}", "{} > a.log",
        "srun bash -c 'echo a && {}'", 'srun podman exec C bash -c "{}"',
    ],
)  # fmt: skip
@pytest.mark.parametrize("tool", ["podman run --rm I", "docker run -v /a:/b I", "mytool run"])
def test_a_tool_that_runs_a_launcher_is_the_program(line: str, tool: str) -> None:
    words = f"{tool} torchrun --nproc_per_node=2 a.py"
    result = of_text("#SBATCH --nodes=1", line.format(words))
    settings = result.settings()
    assert settings["no-python"]
    assert " ".join((settings["script"], *settings["args"])).endswith(words)
    assert "a launcher of its own in each task" in str(result.notes)
    assert losses(result) == ""


@pytest.mark.parametrize(
    "line", ["echo run torchrun a.py", "which run torchrun; ls", "run torchrun"]
)
def test_other_words_than_a_tools_are_no_program(line: str) -> None:
    settings = of_text("#SBATCH --nodes=1", line, "python train.py").settings()
    assert settings["script"] == "train.py"


@pytest.mark.parametrize(
    ("lines", "settings", "reason"),
    [
        # Options of a container's tool.
        ((*ARRAY, f'{EXEC} "${{B[@]}}" /i.sif {PYTHON}'), IN_IMAGE, "singularity exec ${B[@]}:"),
        ((*ARRAY, f'{EXEC} "${{B[@]}}" --pwd /w $IMG {PYTHON}'), {"image": "$IMG"}, "${B[@]}:"),
        ((*TEXT, f"{EXEC} $B /i.sif {PYTHON}"), IN_IMAGE, "singularity exec $B:"),
        ((*TEXT, f"{EXEC} $B docker://a/b {PYTHON}"), {"image": "docker://a/b"}, "exec $B:"),
        (("O=$(cat o)", f"{EXEC} $O --pwd /w /i.sif {PYTHON}"), {"image": "/i.sif"}, "exec $O:"),
        (("O=$(cat o)", f"{EXEC} $O /images/a {PYTHON}"), {"image": None}, "whether it is the im"),
        (('E=""', 'if [ -d /p ]; then E="-B /p"; fi', f"{EXEC} $E /i.sif {PYTHON}"), IN_IMAGE,
         "exec $E:"),
        (('if [ -d /p ]; then E="-B /p"; else E=""; fi', f'C="{EXEC} $E /i.sif"', f"$C {PYTHON}"),
         IN_IMAGE, "exec $E:"),
        (("A=(--nv)", "[ -d /p ] && A+=(/p.sif)", f'srun singularity exec "${{A[@]}}" {PYTHON}'),
         {"image": None, "script": "train.py"}, "no image before python"),
        # Options of a launcher of workers.
        ((*ARRAY, 'torchrun "${B[@]}" train.py --lr 1'), PLAIN, "torchrun ${B[@]}: only the job"),
        ((*TEXT, "torchrun $B train.py --lr 1"), PLAIN, "torchrun $B: only the job knows it"),
        ((*ARRAY, 'accelerate launch "${B[@]}" train.py --lr 1'), PLAIN, "accelerate launch ${B"),
        ((*ARRAY, 'deepspeed "${B[@]}" train.py --lr 1'), {"script": "train.py"}, "deepspeed ${B"),
        (("A=()", 'while read x; do A+=("$x"); done', 'torchrun "${A[@]}"'), {"script": None},
         "it may start a training"),
        (("torchrun ${X:+--tee 3} train.py --lr 1",), PLAIN, "torchrun ${X:+--tee 3}:"),
        # Options of what starts the tasks.
        ((*ARRAY, 'srun "${B[@]}" ./run.sh a'), {"script": "./run.sh"}, "srun ${B[@]}:"),
        ((*ARRAY, f'srun "${{B[@]}}" singularity exec /i.sif {PYTHON}'), IN_IMAGE, "srun ${B"),
        ((*ARRAY, 'mpirun -np 2 "${B[@]}" ./run.sh a'), {"script": "./run.sh"}, "mpirun ${B[@]}:"),
        (("A=$(cat a)", f"horovodrun -np 2 $A {PYTHON}"), PLAIN, "horovodrun $A:"),
    ],
)  # fmt: skip
def test_options_are_no_image_and_no_program(
    lines: tuple[str, ...], settings: dict[str, Any], reason: str
) -> None:
    result = of_text("#SBATCH -N 1 --gpus-per-node=2", *lines)
    assert {key: result.settings().get(key) for key in settings} == settings
    assert reason in losses(result)


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (("IMG=$(ls -t /i/*.sif | head -1)", f"{EXEC} $IMG {PYTHON}"), {"image": "$IMG"}),
        (("IMG=/a.sif", "[ -d /p ] && IMG=/b.sif", f"{EXEC} $IMG ./run.sh"), {"image": "$IMG"}),
        (("I=/a", "[ -d /p ] && I=/b", f"{EXEC} $I my-tool"), {"image": "$I", "script": "my-tool"}),
        ((f'{EXEC} --bind "$(cat b)" /i.sif {PYTHON}',), {"image": "/i.sif"}),
        ((f"{EXEC} /python-3.sif {PYTHON}",), {"image": "/python-3.sif", "script": "train.py"}),
        (("P=$(ls *.py)", "torchrun $P --lr 1"), {"args": ["${ARGUMENTS_1[@]}", "--lr", "1"]}),
        (("SCRIPT=$(find_it)", "torchrun $SCRIPT conf.py"), {"script": "python"}),
        (("C=(train.py --a 1)", "[ -d x ] && C+=(--resume)", 'torchrun "${C[@]}"'),
         {"script": "python", "args": ["${ARGUMENTS_1[@]}"]}),
    ],
)  # fmt: skip
def test_an_image_or_a_program_of_the_job_stays(
    lines: tuple[str, ...], settings: dict[str, Any]
) -> None:
    result = of_text("#SBATCH -N 1 --gpus-per-node=2", *lines)
    assert {key: result.settings().get(key) for key in settings} == settings
    assert not losses(result)


def test_a_note_names_a_tool_that_only_the_job_knows() -> None:
    line = f'srun "$C" exec --nv /i.sif {PYTHON}'
    result = of_text("if [ -e /a ]; then C=apptainer; else C=singularity; fi", line)
    assert "container-tool" not in result.settings()
    assert any("container-tool = …" in text for _, text in result.notes)


@pytest.mark.parametrize(
    "line",
    [
        "run python -u -m pkg.train --lr 1",
        'log_run "train" python train.py',
        'run_step "$NAME" uv run train.py',
    ],
)
def test_a_name_before_a_program_may_be_a_function_of_a_file(line: str) -> None:
    result = of_text("source lib.sh", line)
    assert result.group(3) == (LOST, "it may be the launch: script = …, args = […]")
    assert "script" not in result.settings()
    assert of_text("xvfb-run python train.py").settings()["script"] == "xvfb-run"


def test_a_brace_of_a_template_is_a_row_of_its_own() -> None:
    lines = 'export A="${{P}}/b"', 'export B="0x${{P}},${{Q}}"', "awk '{print \"${{P}}\"}' b"
    result = of_text(
        *lines, 'torchrun train.py "${{P}}/a" --lr 1', "cat > x <<'E'", '"${{P}}"', "E"
    )
    assert [result.group(n)[0] for n in (2, 3, 4)] == [LOST, LOST, TAKEN]
    assert "a template's brace" in result.group(2)[1]
    assert "${{P}}/a: it needs a value of yours" in losses(result)
    settings = result.settings()
    assert (settings["script"], settings["setup"]) == ("train.py", [lines[2]])
    assert settings["teardown"] == ["cat > x <<'E'\n\"${{P}}\"\nE"]


@pytest.mark.parametrize("value", ["${SLURM_GPUS_ON_NODE:-4}", "${SLURM_GPUS_ON_NODE}"])
def test_a_second_default_of_a_number_is_not_used(value: str) -> None:
    lines = "#SBATCH --gpus-per-node=2", f'N="{value}"', 'N="${N:-4}"'
    result = of_text(*lines, 'torchrun --nproc_per_node="$N" train.py')
    assert not losses(result)
    unknown = of_text(lines[1], lines[2], 'torchrun --nproc_per_node="$N" train.py')
    assert "only the job knows" in losses(unknown)


def test_ray_with_the_program_behind_is_the_program_of_each_node() -> None:
    lines = "#SBATCH --nodes=2 --gpus-per-node=2 --ntasks-per-node=1", "A=$(hostname):6379"
    result = of_text(*lines, 'srun ray symmetric-run --address "$A" -- python -m pkg.train')
    settings = result.settings()
    assert (settings["script"], settings["nproc-per-node"]) == ("ray", 1)
    assert settings["args"][:3] == ["symmetric-run", "--address", "$A"]
    assert "starts the workers" in str(result.notes)
    assert "script" not in of_text("srun ray status").settings()
