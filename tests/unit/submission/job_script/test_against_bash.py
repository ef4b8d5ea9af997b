"""What bash starts for a job script, and what it starts for the settings of its import."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.conversion import LOST
from hpc_ddp.submission.job_script.importer import import_script
from unit.submission.job_script.random_scripts import as_script, play, prepare, words_of

GROWS = '[ -e x ] && CMD="$CMD --x"'


def played(tmp_path: Path, text: str) -> tuple[str, str, bool]:
    """Return the words that a script starts, those that its import starts, and whether the import
    reports lines as lost."""
    prepare(tmp_path, has_file=True)
    expected = words_of(text, tmp_path)
    conversion = import_script(text, tmp_path, tmp_path, name="job.sbatch")
    settings = conversion.settings()
    is_lost = any(group == LOST for marks in conversion.marks.values() for group, _ in marks)
    return (
        expected,
        words_of(as_script(settings), tmp_path) if "script" in settings else "",
        is_lost,
    )


@pytest.mark.parametrize(
    "lines",
    [
        # The launch's variable, after the job has added to it.
        ('CMD="torchrun train.py --a 1"', GROWS, 'CMD="env Q=1 $CMD"', "srun $CMD"),
        ('CMD="torchrun train.py --a 1"', GROWS, 'CMD="${CMD/a 1/a 2}"', "srun $CMD"),
        ('CMD="torchrun train.py --a 1"', GROWS, 'CMD+=",b"', "srun $CMD"),
        ('CMD="torchrun train.py --a 1"', GROWS, "srun ${CMD/a 1/b 2}"),
        ("CMD=(torchrun train.py)", "[ -e x ] && CMD+=(--b)", "CMD[2]=--aa", 'srun "${CMD[@]}"'),
        ("CMD=(torchrun train.py)", "[ -e x ] && CMD+=(--b)", 'eval "${CMD[@]}"'),
        ("CMD=(torchrun train.py)", "[ -e x ] && CMD+=(--b)", 'RUN=(srun "${CMD[@]}")',
         '"${RUN[@]}"'),
        ('CMD="torchrun train.py"', "if [ -e x ]; then", "  # CMD gets --y", '  echo "was $CMD"',
         '  CMD="$CMD \\', '    --y $(ls *.pt | head -1)"', "fi", "$CMD"),
        ("CMD='torchrun train.py'", "[ -e x ] && CMD+=' --home $HOME'", "eval $CMD"),
        ('CMD="torchrun train.py"', '[ -e x ] && CMD="$CMD --t {1,2} --d ~/d"', "eval $CMD"),
        # Assignments in one line are no prefix of the next one.
        ("A=$(cat a) B=$(cat b)", 'torchrun train.py --a "$A" --b $B'),
        ("A=1 B=2", "X=$(cat a)", "srun torchrun train.py --x $X"),
        ("A=$(cat a) B=$(cat b) # both", "torchrun train.py --a $A --b $B"),
        ("A=1 B=2", "if true; then C=3; fi", "torchrun train.py $C"),
        # Values.
        ("OLD=$IFS; IFS=','; P=($(cat a),2); IFS=$OLD", "torchrun train.py ${P[0]} ${P[1]}"),
        ("L=(1 2 3); IFS=+; S=\"${L[*]}\"; unset IFS", "torchrun train.py $S"),
        ("IFS=,", "V=a,b", "torchrun train.py $V"),
        ("declare -i N=2+3", "declare -l M=ABC", "torchrun train.py $N $M"),
        ('A="my run"', "printf -v A '%s-%s' \"$A\" 7", 'torchrun train.py "$A"'),
        ('ARGS=(--n "my run" "")', "torchrun train.py ${ARGS[@]}"),
        ("export A=1", "export -n A", 'torchrun train.py "${A-}"'),
        ("N=$(cat a)", "CMD=\"torchrun train.py --n '$N'\"", "eval $CMD"),
        ("A=1", "eval A=$(echo 2)", "torchrun train.py $A"),
        ("sort <a> out", "torchrun train.py --n $(cat out)"),
        ("cat > n <<'X'", "$SLURM_NNODES", "X", 'torchrun train.py "$(cat n)"'),
        ('A="p q"', 'echo "$A" && echo $A > out', "torchrun train.py $(cat out)"),
        ('f() { srun torchrun train.py --log "${0##*/}" $1; }', "f 3"),
        ('if [ -z "x$Q" ]; then A=1; else A=2; fi', "torchrun train.py $A"),
    ],
)  # fmt: skip
def test_the_same_words_are_started(lines: tuple[str, ...], tmp_path: Path) -> None:
    head = ("#!/bin/bash", "#SBATCH -N1 --gpus=2")
    expected, words, is_lost = played(tmp_path, "\n".join((*head, *lines, "")))
    assert (words, is_lost) == (expected, False)
    assert expected.endswith("END\n")


@pytest.mark.parametrize(
    "lines",
    [
        # A value is set anew before eval reads it.
        ("D=$(cat a)", 'CMD="torchrun train.py $D"', "D=/new", "eval $CMD"),
        # The launch, which only the job knows.
        ('CMD="torchrun train.py --a 1"', GROWS, 'CMD+=",b"', "$CMD"),
        ('CMD="torchrun train.py"', '[ -e x ] && CMD="$CMD > log"', 'eval "$CMD"'),
        ('L="torchrun --nproc_per_node=2"', '[ -e x ] && L="$L --rdzv-id=1"', "$L train.py"),
        ('CMD="torchrun train.py"', GROWS, 'printf -v N %s "${CMD// /_}"', "$CMD --n $N"),
    ],
)
def test_other_words_are_reported(lines: tuple[str, ...], tmp_path: Path) -> None:
    expected, words, is_lost = played(tmp_path, "\n".join(("#!/bin/bash", "#SBATCH -N1", *lines)))
    assert is_lost or words == expected


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_random_scripts(first: int, tmp_path: Path) -> None:
    check_scripts(first, 60, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("first", range(1000, 7000, 500))
def test_more_random_scripts(first: int, tmp_path: Path) -> None:
    check_scripts(first, 500, tmp_path)


def check_scripts(first: int, count: int, folder: Path) -> None:
    """Fail with all differences of the scripts of some seeds."""
    differences = []
    for seed in range(first, first + count):
        (folder / str(seed)).mkdir()
        differences += [text] if (text := play(seed, folder / str(seed))) else []
    assert not differences, "\n\n".join(differences)
