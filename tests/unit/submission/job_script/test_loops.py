"""Loops of job scripts: over the nodes, and of launches that are tried again; and IFS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, Conversion
from hpc_ddp.submission.job_script.importer import import_script
from hpc_ddp.submission.job_script.output import is_code

HEAD = """\
#!/bin/bash
#SBATCH --nodes=4 --gpus-per-node=2 --time=1:00:00 --job-name=x
nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))
"""
RUN = (
    "torchrun --nnodes=4 --nproc_per_node=2 --node_rank={} --master_addr=${{nodes[0]}} train.py {}"
)
ON_FIRST = f"srun -N 1 -n 1 -w ${{nodes[0]}} {RUN.format(0, '--a 1')}"
COUNT = "((i=1; i<SLURM_NNODES; i++))"
ON_OTHERS = f"""\
for {COUNT}; do
  srun -N 1 -n 1 -w ${{nodes[$i]}} {RUN.format("$i", "--a 1")} &
done
"""


def of_text(tmp_path: Path, text: str) -> Conversion:
    (tmp_path / "train.py").write_text("import torch\n")
    return import_script(text, tmp_path, tmp_path)


def lost(conversion: Conversion, text: str) -> list[int]:
    """Return the lines that are not taken over."""
    lines = enumerate(text.splitlines(), 1)
    return [n for n, line in lines if is_code(line) and conversion.group(n)[0] == LOST]


def expected(**more: Any) -> dict[str, Any]:
    of_job = {"nodes": 4, "gpus-per-node": "2", "time": "1:00:00", "job-name": "x"}
    return {**of_job, "script": "train.py", "args": ["--a", "1"], **more}


@pytest.mark.parametrize(
    "lines",
    [
        f"{ON_FIRST} &\nsleep 10\n{ON_OTHERS}wait\n",
        f"{ON_OTHERS}{RUN.format(0, '--a 1')}\nwait\n",
        f"{ON_FIRST} &\n{ON_OTHERS.replace(COUNT, 'i in $(seq 1 $((SLURM_NNODES - 1)))')}wait\n",
    ],
)
def test_the_first_node_has_a_line_of_its_own(lines: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, HEAD + lines)
    assert conversion.settings() == expected()
    assert lost(conversion, HEAD + lines) == []


def test_clean_up_behind_the_first_nodes_line_stays(tmp_path: Path) -> None:
    text = f"{HEAD}{ON_OTHERS}{RUN.format(0, '--a 1')}\ncp -r out results\n"
    assert of_text(tmp_path, text).settings() == expected(teardown=["cp -r out results"])


def test_another_program_on_the_first_node_is_none_of_it(tmp_path: Path) -> None:
    text = f"{HEAD}{ON_FIRST.replace('--a 1', '--a 2')} &\n{ON_OTHERS}wait\n"
    assert 4 in lost(of_text(tmp_path, text), text)


@pytest.mark.parametrize("last", ["i<=SLURM_NNODES", "i<SLURM_NNODES"])
def test_the_number_of_a_node_is_its_counter(last: str, tmp_path: Path) -> None:
    text = HEAD + ON_OTHERS.replace("i<SLURM_NNODES", last).replace("--a 1", "--node $i")
    conversion = of_text(tmp_path, text)
    is_number = last == "i<SLURM_NNODES"
    assert (conversion.settings()["args"] == ["--node", "$SLURM_NODEID"]) == is_number
    assert lost(conversion, text) == ([] if is_number else [5])


@pytest.mark.parametrize(
    ("loop", "ssh"),
    [
        ("for n in ${nodes[@]}; do\n  SSH &\ndone\nwait\n", "ssh $n"),
        ("for ((i=0; i<4; i++)); do\n  SSH &\ndone\nwait\n", "ssh -o BatchMode=yes ${nodes[$i]}"),
        ("echo $SLURM_JOB_ID > h\nwhile read -r n; do\n  SSH &\ndone < h\nwait\n", "ssh -n $n"),
    ],
)
@pytest.mark.parametrize("quote", ['"', ""])
def test_a_launch_by_ssh_on_each_node(loop: str, ssh: str, quote: str, tmp_path: Path) -> None:
    run = f"cd {tmp_path}\\; export A=1\\; {RUN.format('$R', '--a 1')}"
    run = run if not quote else run.replace("\\", "")
    text = HEAD + loop.replace("SSH", f"{ssh} {quote}{run}{quote}")
    conversion = of_text(tmp_path, text)
    settings = conversion.settings()
    assert settings.pop("setup", []) in ([], ["echo $SLURM_JOB_ID > h"])
    assert settings.pop("node-setup") == [f"cd {tmp_path}", "export A=1"]
    assert settings == expected()
    assert lost(conversion, text) == []


def test_ssh_outside_of_a_loop_is_no_launch(tmp_path: Path) -> None:
    text = f"{HEAD}ssh login1 python notify.py\nsrun {RUN.format('$SLURM_NODEID', '--a 1')}\n"
    conversion = of_text(tmp_path, text)
    assert conversion.settings() == expected()
    assert lost(conversion, text) == [4]


def test_how_bash_splits_words_stays(tmp_path: Path) -> None:
    lines = ["IFS=,", "for d in $DIRS; do mkdir -p $d; done", "srun python train.py ${LR:-$DIRS}"]
    settings = of_text(tmp_path, HEAD + "DIRS=a,b\n" + "\n".join(lines)).settings()
    assert settings["setup"][:3] == ["DIRS=a,b", *lines[:2]]
    assert settings["setup"][-1] == "unset IFS"


TRY = "srun torchrun --nproc_per_node=2 train.py --a 1"


@pytest.mark.parametrize(
    "loop",
    [
        f"until {TRY}; do\n  sleep 5\ndone\n",
        f"while ! {TRY}; do sleep 5; done\n",
        f"for i in 1 2 3; do\n  {TRY} && break\n  echo again\n  sleep 5\ndone\n",
        f"while true; do\n  if {TRY}; then break; fi\n  sleep $((RANDOM % 9))\ndone\n",
        f"while :; do\n  {TRY}\n  [ $? -eq 0 ] && break\n  sleep 5\ndone\n",
    ],
)
def test_a_launch_that_is_tried_again(loop: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, HEAD + loop)
    assert conversion.settings() == expected()
    assert lost(conversion, HEAD + loop) == []


@pytest.mark.parametrize(
    "loop",
    [
        f"for i in 1 2; do\n  {TRY} --seed $i && break\ndone\n",
        f"for i in 1 2; do\n  {TRY}\ndone\n",
        f"while true; do\n  {TRY} && break\n  rm -rf out\ndone\n",
    ],
)
def test_a_loop_that_does_more_is_named(loop: str, tmp_path: Path) -> None:
    assert 4 in lost(of_text(tmp_path, HEAD + loop), HEAD + loop)


@pytest.mark.parametrize(
    "loop",
    [
        f"for i in 1 2 3; do {TRY} || break; done\n",
        f"for i in 1 2 3; do\n  {TRY}\n  [ $? -eq 0 ] || break\ndone\n",
        f"for i in 1 2 3; do\n  {TRY}\n  if [ $? -ne 0 ]; then exit 0; fi\ndone\n",
        f"for i in 1 2 3; do if {TRY}; then echo ok; else break; fi; done\n",
        f"for c in a b; do export CFG=$c; {TRY} && break; done\n",
    ],
)
def test_a_loop_that_goes_on_after_a_success_is_named(loop: str, tmp_path: Path) -> None:
    assert 4 in lost(of_text(tmp_path, HEAD + loop), HEAD + loop)


def test_nodes_with_other_variables_are_not_joined(tmp_path: Path) -> None:
    text = f"{HEAD}{ON_FIRST} &\nexport ROLE=worker\n{ON_OTHERS}wait\n"
    assert 4 in lost(of_text(tmp_path, text), text)


@pytest.mark.parametrize(
    "line", ['ssh $n "rm -rf data"; echo $n', "ssh $n hostname; python setup_db.py"]
)
def test_a_loop_that_does_more_than_a_hostfile_is_named(line: str, tmp_path: Path) -> None:
    loop = f"W=0\nfor n in ${{nodes[@]}}; do\n  {line}\n  W=$((W+1))\ndone > hf\n"
    text = f"{HEAD}{loop}mpirun -np 8 --hostfile hf python train.py --world $W\n"
    conversion = of_text(tmp_path, text)
    assert {5, 9} <= {*lost(conversion, text)}


def test_a_training_of_its_own_on_each_node_is_named(tmp_path: Path) -> None:
    run = "srun -N1 -n1 -r $i torchrun --nproc_per_node=2 train.py"
    loop = f"for ((i=0; i<4; i++)); do\n  {run} &\ndone\n"
    conversion = of_text(tmp_path, f"{HEAD}{loop}wait\n")
    assert 5 in lost(conversion, f"{HEAD}{loop}wait\n")
    assert "script" not in conversion.settings()


@pytest.mark.parametrize("prefix", ["", "cd /w; "])
def test_a_note_says_where_ssh_starts_a_launch(prefix: str) -> None:
    command = f"{prefix}python -m torch.distributed.run --rdzv-endpoint=a:1 train.py --save out"
    loop = f'for n in $(scontrol show hostnames); do ssh $n "{command}" & done; wait'
    text = "\n".join(("#!/bin/bash", "#SBATCH -N 2", loop)) + "\n"
    notes = import_script(text, Path("/w"), Path("/w")).notes
    assert any("ssh starts it in the home folder" in note for _, note in notes) == (not prefix)


@pytest.mark.parametrize(
    ("lines", "setup"),
    [
        (("for d in a; do", "[ -d $d ] || continue", "srun python t.py $d", "done"),
         ["d=a", "[ -d $d ] || exit 0"]),
        (("run() {", "[ -d data ] || return 1", "srun python t.py", "}", "run"),
         ["[ -d data ] || exit 1"]),
        (("run() {", 'if [ ! -d a ]; then echo "no; return"; return; fi', "srun python t.py", "}",
          "run"), ['if [ ! -d a ]; then echo "no; return"; exit; fi']),
        (("run() {", "for i in 1 2; do [ -e $i ] && break; done", "srun python t.py", "}", "run"),
         ["for i in 1 2; do [ -e $i ] && break; done"]),
        (("run() {", "cd sub || return", "srun python t.py", "}", "run"), None),
        (("run() {", "srun python t.py", "return 0", "}", "run"), None),
    ],
)  # fmt: skip
def test_a_command_that_leaves_a_function_or_a_loop_ends_the_job(
    lines: tuple[str, ...], setup: list[str] | None
) -> None:
    text = "\n".join(("#!/bin/bash", *lines)) + "\n"
    settings = import_script(text, Path("/w"), Path("/w")).settings()
    assert (settings.get("setup"), settings.get("teardown")) == (setup, None)
