"""Lines of a job script that would mean something else in the new job; the report says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script


def of_lines(*lines: str, folder: Path = Path("/w"), first: str = "#!/bin/bash") -> Conversion:
    return import_script("\n".join((first, *lines)) + "\n", folder, folder, name="job.sbatch")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--distribution=block:block", "--distribution=block:block"),
        ("-m block:cyclic", "--distribution=block:cyclic"),
        ("-m '*:fcyclic'", "--distribution=*:fcyclic"),
        ("-m block", ""),
        ("-m cyclic:block", ""),
        ("--distribution=plane=4", ""),
    ],
)
def test_a_distribution_of_the_step_is_taken_over_for_a_nodes_cpus(
    option: str, expected: str
) -> None:
    result = of_lines("#SBATCH -N 2 --ntasks-per-node=4", f"srun {option} \\", " python train.py")
    assert "".join(result.settings().get("srun", [])) == expected
    assert result.group(3)[0] == TAKEN
    assert result.group(3)[1].endswith("hpc-ddp sets srun --distribution") == (not expected)


@pytest.mark.parametrize("option", ["-m cyclic", "-m plane=4", "-m nopack", "-m block:block"])
def test_a_distribution_of_the_job_goes_node_by_node(option: str) -> None:
    result = of_lines(f"#SBATCH {option}", "srun -n 2 python train.py")
    is_taken = option in ("-m nopack", "-m block:block")
    assert result.group(2)[0] == (TAKEN if is_taken else OURS)
    expected = [option.replace("-m ", "--distribution=")] if is_taken else None
    assert result.settings().get("sbatch") == expected
    assert result.settings()["launcher"] == "srun"


@pytest.mark.parametrize(
    ("line", "args"),
    [
        ("srun bash -c 'python train.py $0 \"${0}\" $1' A B", ["A", "A", "B"]),
        ("srun bash -c 'python train.py $0'", ["bash"]),
        ("srun sh -c 'python train.py $0 $1' _ x", ["_", "x"]),
    ],
)
def test_the_name_of_a_shell_is_the_word_behind_its_text(line: str, args: list[str]) -> None:
    assert of_lines(line).settings()["args"] == args


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("$args", ["--lr", "1", "--n", "a b"]),
        ("${args} --b", ["--lr", "1", "--n", "a b", "--b"]),
        ("'$args'", ["$args"]),
        ("$one", ["${ARGUMENTS_1[@]}"]),
    ],
)
def test_an_array_of_zsh_is_all_of_its_elements(words: str, args: list[str]) -> None:
    lines = "args=(--lr 1", '  --n "a b")', "# isn't it", f"srun python train.py {words}"
    assert of_lines(*lines, first="#!/usr/bin/zsh").settings()["args"] == args


@pytest.mark.parametrize("line", [". ~/.zshrc", "source ~/.zshrc", "setopt sh_word_split"])
def test_a_line_of_zsh_is_named(line: str) -> None:
    result = of_lines(line, "srun python train.py", first="#!/bin/zsh -l")
    assert result.group(2)[0] == LOST
    assert line not in str(result.settings())
    assert of_lines(line, "srun python train.py").group(2)[0] == TAKEN  # bash reads it, too


def test_lines_have_the_scripts_arrays_functions_and_name() -> None:
    """The clean-up lines run in a subshell of the batch script, the set-up lines in the script."""
    before = ("A=(a b)", 'f() { cp "${BASH_SOURCE%/*}/a" "${A[@]}"; }', 'cp "$BASH_SOURCE" c')
    after = ("f", "cp ${BASH_SOURCE[0]} d", 'cp "$0" e')
    settings = of_lines(*before, "srun python train.py", *after).settings()
    assert (settings["setup"], settings["teardown"]) == ([*before], [*after])


@pytest.mark.parametrize(
    ("line", "workers"),
    [
        ("srun torchrun --nproc_per_node=2 train.py", 2),
        ("srun bash -c 'torchrun --nproc_per_node=4 train.py'", 4),
        ("mpirun -np 4 python -m torch.distributed.run --nproc-per-node=2 train.py", 2),
        ("srun deepspeed train.py", 4),
        ("srun accelerate launch --num_processes 4 train.py", 4),
        ("srun accelerate launch --num_processes 2 --num_machines 1 train.py", 2),
        ("srun accelerate launch --num_processes 16 train.py", 4),
        ("printf 'num_processes: 2' > c; srun accelerate launch --config_file c train.py", 2),
        ("printf 'num_machines: 1' > c; srun accelerate launch --config_file c train.py", 4),
    ],
)
def test_a_launcher_that_knows_of_one_node_trains_on_each(line: str, workers: int) -> None:
    lines = ("#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=4", *line.split("; "))
    result = of_lines(*lines)
    notes = [text for at, text in result.notes if at == 1 + len(lines) and "by itself" in text]
    assert [text.partition("one training of ")[2] for text in notes] == [
        f"4 nodes with {workers} workers each"
    ]
    assert result.settings().get("nproc-per-node", 4) == workers
    one_node = of_lines("#SBATCH --nodes=1 --gpus-per-node=4", *line.split("; "))
    assert "by itself" not in str(one_node.notes)


@pytest.mark.parametrize(
    "line",
    [
        "srun torchrun --nnodes=$SLURM_NNODES train.py",
        "srun torchrun --nnodes=1:4 train.py",
        "PET_NNODES=4 srun torchrun train.py",
        "srun accelerate launch --num_machines $SLURM_NNODES --num_processes 16 train.py",
        "srun accelerate launch --config_file absent.yaml train.py",
        "srun python train.py",
    ],
)
def test_a_launcher_that_knows_of_its_nodes_has_no_note(line: str) -> None:
    result = of_lines("#SBATCH --nodes=4 --gpus-per-node=4", line)
    assert "by itself" not in str(result.notes)


def test_a_launch_on_one_of_several_nodes_has_the_workers_of_that_node() -> None:
    line = "accelerate launch --num_processes 4 train.py"
    settings = of_lines("#SBATCH --nodes=4 --gpus-per-node=8", line).settings()
    assert settings["nproc-per-node"] == 4


def test_another_number_of_machines_is_lost() -> None:
    line = "srun accelerate launch --num_machines 2 --num_processes 8 train.py"
    result = of_lines("#SBATCH --nodes=4 --gpus-per-node=4", line)
    assert "--num-machines: another number" in result.group(3)[1]


@pytest.mark.parametrize(
    ("first", "lines", "at"),
    [
        ("# Copyright", ("#SBATCH -N 1", "srun python train.py"), 1),
        ("", ("#!/bin/bash", "#SBATCH -N 1", "srun python train.py"), 1),
        (" #!/bin/bash", ("#SBATCH -N 1", "srun python train.py"), 1),
        ("#!/bin/bash", ("#SBATCH -N 1", "srun python train.py"), 0),
        ("#! /bin/sh", ("#SBATCH -N 1", "srun python train.py"), 0),
        # The shell runs a script that submits another one.
        ("", ("sbatch <<E", "#!/bin/bash", "#SBATCH -N 1", "srun python train.py", "E"), 0),
        ("#!/bin/bash", ("sbatch <<E", "#SBATCH -N 1", "srun python train.py", "E"), 3),
    ],
)
def test_a_script_that_sbatch_refuses_for_its_first_line(
    first: str, lines: tuple[str, ...], at: int
) -> None:
    result = of_lines(*lines, first=first)
    assert [line for line, text in result.notes if "no #!" in text] == ([at] if at else [])
    assert result.settings()["script"] == "train.py"


@pytest.mark.parametrize(
    ("lines", "at"),
    [
        (("srun python train.py --a 1 \\", "  # old:", "  --b 2"), 3),
        (("srun python train.py --a 1 \\", "# old:", "# older:", "  x=2 \\", "  y=3"), 3),
        (("srun python train.py --a 1 \\", "  # --b 2"), 0),
        (("srun python train.py \\", "  --a 1 # \\", "  echo done"), 0),
        (("srun python train.py --a 1 \\", "  # --b 2", "", "echo done"), 0),
        (("srun python train.py --a 1", "# old:", "  echo done"), 0),
        (("cat > f <<E", "a \\", "# b", "  c", "E", "srun python train.py --a 1"), 0),
        (("# srun \\", "# python", "  srun python train.py --a 1"), 0),
    ],
)  # fmt: skip
def test_a_comment_that_ends_a_command_is_named(lines: tuple[str, ...], at: int) -> None:
    result = of_lines(*lines)
    notes = [line for line, text in result.notes if "this comment ends the command" in text]
    assert notes == ([at] if at else [])
    assert result.settings()["args"] == ["--a", "1"]


def test_an_option_is_no_command() -> None:
    result = of_lines("srun python train.py \\", "# old:", "  --b 2 \\", "  --c 3")
    assert [result.group(n)[0] for n in (4, 5)] == [LOST, LOST]
    assert "an option is no command" in result.group(4)[1]
    assert "teardown" not in result.settings()


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ("$1 $2", []),
        ("a ${1} b ${10}", ["a", "b"]),
        ('--lr 1 ${1:+--resume "$1"}', ["--lr", "1"]),
        ("--flag ${2+--o $2}", ["--flag"]),
        ('x "$1"', ["x"]),
        ("--lr $1 x", ["x"]),
    ],
)
def test_an_argument_that_is_not_there_is_nothing(words: str, args: list[str]) -> None:
    result = of_lines(f"srun python train.py {words}")
    assert result.settings().get("args", []) == args
    assert "give the script's arguments" in str(result.notes)
    is_lost = "--lr $1" in words or '"$1"' in words.replace('"$1"}', "")
    assert result.group(2)[0] == (LOST if is_lost else TAKEN)
    given = import_script(
        f"#!/bin/bash\nsrun python train.py {words}\n", Path("/w"), Path("/w"), ["A"]
    )
    assert LOST not in {mark for mark, _ in given.marks[2]}


@pytest.mark.parametrize(
    "block",
    [
        '{\n  function pick { echo "$1"; }\n  export A=$(pick 3)\n}',
        '{\n  pick() { echo "$1" "$#"; }\n  export A=$(pick 3)\n}',
        'if [ -e x ]; then\n  f() { shift; echo $@ $2; }\n  export A=$(f 1 2)\nfi',
    ],
)  # fmt: skip
def test_arguments_of_a_function_within_a_block_are_not_the_scripts(block: str) -> None:
    result = of_lines(*block.split("\n"), "srun python train.py")
    assert result.settings()["setup"] == [block]
    assert "arguments" not in str(result.notes)
    with_own = block.replace("A=$(", 'B="$1" A=$(')
    result = of_lines(*with_own.split("\n"), "srun python train.py")
    assert "job script's own arguments" in result.group(2)[1]


@pytest.mark.parametrize(
    "lines",
    [
        ("NAME=$(hostname)", "LOG=/x/$NAME", 'echo "NAME: $NAME"', 'touch "$LOG"'),
        ("NODE=$(hostname)", "source ./env.sh", 'echo "Node: $NODE"'),
        ("T=$(hostname)", 'echo "T: $T"', 'eval "$(cat steps)"'),
        ("T=$(hostname)", 'echo "T: $T"', "export U=$T"),
        ("T=$(hostname)", 'echo "T: $T"', "f() { touch $T; }", "f"),
    ],
)
def test_a_print_of_a_variable_that_stays_is_no_print_of_one_that_is_left_out(
    lines: tuple[str, ...],
) -> None:
    result = of_lines("#SBATCH -N 1", *lines, "srun python train.py")
    assert {result.group(n)[0] for n in range(3, 3 + len(lines))} == {TAKEN}
    alone = of_lines("#SBATCH -N 1", "T=$(hostname)", 'echo "T: $T"', "srun python train.py")
    assert alone.group(4) == (OURS, "it prints a variable that is left out")


def test_the_verb_of_a_container_is_the_scripts() -> None:
    for verb in ("run", "exec"):
        line = f"srun singularity {verb} --nv a.sif python train.py"
        result = of_lines("#SBATCH -N 1 --gpus-per-node=1", line)
        assert f"hpc-ddp sets {verb} --nv" in result.group(3)[1]


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (('srun python train.py \\', '  a="a b \\', '  b="c" \\', ""), 3),
        (('srun python train.py --a "b c" --c "',), 3),
        (('srun python train.py --a "b" \\', '  "'), 3),
        (('echo "start', 'srun python train.py --a "1" \\'), 3),
        (("A=x >", "srun python train.py $A"), 3),
        (("if [ -f x ]; then", "  srun python train.py", "echo"), 3),
        (("echo a", "srun python train.py)", "echo b"), 4),
    ],
)  # fmt: skip
def test_what_bash_itself_refuses_is_no_launch(lines: tuple[str, ...], first: int) -> None:
    result = of_lines("#SBATCH -N 1 -n 1", *lines)
    numbers = [n for n, line in enumerate(lines, 3) if line and n >= first]
    assert "bash itself refuses the script from here on: line " in result.group(first)[1]
    assert {result.group(n) for n in numbers} == {(LOST, result.group(first)[1])}
    assert "script" not in result.settings()


def test_what_stands_before_the_place_that_bash_refuses_is_taken_over() -> None:
    result = of_lines("srun python train.py", "if true; then", '  echo "$(', "fi")
    assert result.settings()["script"] == "train.py"
    assert [result.group(n)[0] for n in range(2, 6)] == [TAKEN, LOST, LOST, LOST]


def test_what_bash_reads_or_a_blank_is_not_refused() -> None:
    for line in ("rm -f !(a|b)", "cat <<EOT > f", "source <your env>", "#!/bin/zsh\nA=${(f)B}"):
        first, _, line = line.rpartition("\n")
        result = of_lines(line, "srun python train.py", first=first or "#!/bin/bash")
        assert "refuses" not in str(result.marks)


@pytest.mark.parametrize("value", ["# <B>", "#<B>", " # <B b>", "<B>", "#YOUR_PATH"])
def test_a_blank_behind_a_comment_sign_is_a_blank(value: str) -> None:
    result = of_lines(f"export A={value}", "export C=1", 'srun python train.py $C "${A}/x"')
    assert result.group(2) == (LOST, "a placeholder: write your own")
    assert result.settings()["env"] == {"C": "1"}
    assert "write it into args" in str(result.marks[4])


def test_a_backslash_at_the_end_of_a_line_stays_in_single_quotes() -> None:
    lines = (
        'export O=\'{"a": 1, \\',
        " b}'",
        'srun python train.py "$O" \'e \\',
        "  f' \"g \\",
        'h"',
    )
    settings = of_lines(*lines).settings()
    text = '{"a": 1, \\\n b}'
    assert settings["env"] == {"O": text}
    assert settings["args"] == [text, "e \\\n  f", "g h"]


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (("source #YOUR VIRTUAL ENV", "torchrun train.py"), "source has no word but a comment"),
        (("cd  # YOUR PROJECT", "torchrun train.py"), "cd has no word but a comment"),
        (("torchrun axolotl train c.yaml",), "axolotl is started as a command, and not"),
        (("set -e", "torchrun train.py", 'echo "OK"'), "teardown runs after each attempt"),
        (("#SBATCH --export=NONE", "torchrun train.py $Y"), "exported in env, for --export=NONE"),
    ],
)
def test_a_note_says_what_a_line_does_otherwise(lines: tuple[str, ...], note: str) -> None:
    assert note in str(of_lines(*lines).notes)


def test_a_variable_that_must_be_set_has_its_value(tmp_path: Path) -> None:
    lines = 'cd "${SLURM_SUBMIT_DIR:?by sbatch}"', "A=1", "torchrun train.py ${A:?a} ${B:?b}"
    settings = of_lines(*lines, folder=tmp_path).settings()
    assert (settings["script"], settings["args"][0]) == ("train.py", "1")
    assert settings["setup"][1:] == ["ARGUMENTS_1=(${B:?b})"]
