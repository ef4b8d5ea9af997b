"""Files that a script sources, and texts that it evaluates: they may change variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.bash.blocks import may_set_unknown_names
from hpc_ddp.submission.job_script.conversion import Conversion
from hpc_ddp.submission.job_script.importer import import_script

RUN = "srun python train.py --lr $LR"
AT_RUN_TIME = ["--lr", "${ARGUMENTS_1[@]}"]


def of_lines(folder: Path, *lines: str) -> Conversion:
    text = "\n".join(("#!/bin/bash", "#SBATCH -N 1", *lines))
    return import_script(f"{text}\n", folder, folder, name="job.sbatch")


def doubts(result: Conversion) -> list[str]:
    return [text for _, text in result.notes if "taken as set" in text]


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        ("export LR=0.5", ("source ./env.sh",)),
        ("LR=0.5", (". env.sh a b",)),
        ("LR=0.5", ("[ -f env.sh ] && source env.sh",)),
        ("LR=0.5", ("load() { source env.sh; }", "load")),
        ("set_lr() { LR=0.5; }\nset_lr", ("if [ -e env.sh ]; then", " . ./env.sh", "fi")),
        ("set_lr() { LR=0.5; }", ("source env.sh", "LR=0.2", "set_lr")),
        ("set_lr() { . inner.sh; }", ("source env.sh", "LR=0.2", "if set_lr; then echo; fi")),
        ("source inner.sh", ("set -a; source env.sh; set +a",)),
        ("eval 'LR=0.5'", ("source env.sh",)),
        ("LR=0.5", ("eval 'source ./env.sh'",)),
    ],
)
def test_a_variable_that_a_file_sets_has_its_value_at_run_time(
    file: str, lines: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "env.sh").write_text(f"{file}\n")
    (tmp_path / "inner.sh").write_text("LR=0.5\n")
    result = of_lines(tmp_path, "LR=0.1", "B=2", *lines, f"{RUN} --b $B")
    settings = result.settings()
    assert settings["args"] == [*AT_RUN_TIME, "--b", "2"]
    setup = settings["setup"]
    assert setup.index("LR=0.1") < setup.index("ARGUMENTS_1=(${LR})") == len(setup) - 1
    assert not doubts(result)


@pytest.mark.parametrize(
    "line",
    [
        "source ./missing.sh",
        "source $HERE/env.sh",
        "source ./train_profile",
        'eval "$(cat lr)"',
        "export $(xargs < .env)",
        "read -r $NAME < lr",
        "f() { . ./missing.sh; }; f",
        "[ -e x ] && . ./missing.sh",
    ],
)
def test_a_value_that_an_unknown_text_may_change_has_a_note(line: str, tmp_path: Path) -> None:
    result = of_lines(tmp_path, "LR=0.1", "B=2", line, "B=3", f"{RUN} --b $B")
    assert result.settings()["args"] == ["--lr", "0.1", "--b", "3"]
    assert doubts(result) == ["$LR: taken as set before line 5, which may set it anew"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("A=$LR", "srun python train.py $A"), ["$LR"]),
        (('CMD="srun python train.py $LR"', "$CMD"), ["$LR"]),
        (('CMD="srun python train.py $LR"', 'eval "$CMD"'), ["$LR"]),
        (("ARGS+=(c)", 'srun python train.py "${ARGS[@]}"'), ["$ARGS"]),
        (("srun python train.py $EMPTY",), ["$EMPTY"]),
        (("torchrun --nproc_per_node=$N train.py",), ["$N"]),
        (("torchrun --nproc_per_node=$((N * 2)) train.py",), ["$N"]),
        (('srun bash -c "python train.py $LR"',), ["$LR"]),
        (("run() { srun python train.py $1; }", "run $LR"), ["$LR"]),
        (('if [ "$LR" = 0.1 ]; then srun python a.py; else srun python b.py; fi',), ["$LR"]),
        (("if [ -e x ]; then srun python a.py; else srun python a.py $LR; fi",), ["$LR"]),
        (("case $N in 2) A=a ;; *) A=b ;; esac", "srun python train.py $A"), ["$N"]),
        (("cd $DIR", "srun python train.py"), ["$DIR"]),
        (("MASTER_PORT=1", "srun python train.py"), []),
        (("echo $LR", "srun python train.py"), []),
    ],
)
def test_notes_on_all_uses_of_a_value_that_may_have_changed(
    lines: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    before = ("LR=0.1", "N=2", "ARGS=(a b)", "EMPTY=", f"DIR={tmp_path}/sub", "source /x/env.sh")
    notes = doubts(of_lines(tmp_path, *before, *lines))
    assert [note.partition(":")[0] for note in notes] == expected


@pytest.mark.parametrize(
    "line",
    [
        "source ~/.bashrc",
        "source activate env",
        "source /opt/conda/etc/profile.d/conda.sh",
        "source deactivate",
        "module load cuda",
        "conda activate env",
        'eval "$(conda shell.bash hook)"',
        'eval "$(micromamba shell hook --shell bash)"',
        "(source ./missing.sh; ./prepare)",
        "source /usr/share/lmod/lmod/init/bash",
        'source "$MODULESHOME/init/bash"',
        ". $HOME/.cargo/env",
        "source /opt/intel/oneapi/setvars.sh --force",
        ". spack/share/spack/setup-env.sh",
        "cp -r . /tmp/copy",
        "find . -delete",
        "pip install -e . --quiet",
        "echo 'to source env.sh: eval it'",
        "python tools.py eval --all",
        'eval "A=1"',
    ],
)
def test_a_line_that_sets_no_other_variable_raises_no_doubt(line: str, tmp_path: Path) -> None:
    result = of_lines(tmp_path, "LR=0.1", line, RUN)
    assert result.settings()["args"] == ["--lr", "0.1"]
    assert not doubts(result)


@pytest.mark.parametrize("line", ["cp -r . /tmp/copy", "pip install . --quiet", "find . -delete"])
def test_a_folder_is_no_file_that_is_sourced(line: str, tmp_path: Path) -> None:
    settings = of_lines(tmp_path, "A=1", line, "srun python train.py").settings()
    assert settings.get("python") is None
    assert settings["setup"][0] != "A=1"


def test_a_document_for_sbatch_keeps_what_a_file_may_have_changed(tmp_path: Path) -> None:
    document = ("sbatch <<EOT", "#!/bin/bash", "#SBATCH --nodes=$N", RUN, "EOT")
    text = "\n".join(("#!/bin/bash", "LR=0.1", "N=2", "source ./env.sh", *document)) + "\n"
    result = import_script(text, tmp_path, tmp_path, name="job.sbatch")
    assert result.settings()["args"] == ["--lr", "0.1"]
    assert result.settings()["nodes"] == 2
    of_line_4 = "taken as set before line 4, which may set it anew"
    assert doubts(result) == [f"$N: {of_line_4}", f"$LR: {of_line_4}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source env.sh", True),
        ("if a; then . ./x; fi", True),
        ("export A=1 $B=2", True),
        ("printf -v $A 1", True),
        ("A=$(source env.sh; echo $B)", False),
        ("bash -c 'source env.sh'", False),
        ("export A=$B", False),
        ("X=1", False),
    ],
)
def test_code_that_may_set_variables_of_unknown_names(text: str, expected: Any) -> None:
    assert may_set_unknown_names(text) == expected
