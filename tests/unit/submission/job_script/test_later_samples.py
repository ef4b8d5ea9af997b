"""Words of public job scripts of the latest samples, and what they have to become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script

HERE = Path("/home/me/project")
TRAIN = "srun python train.py"
GPUS = "#SBATCH --nodes=1 --ntasks-per-node=4 --gpus-per-node=4"


def of_text(*lines: str) -> Conversion:
    """Return the conversion of a script whose second line is the first of `lines`."""
    return import_script("\n".join(("#!/bin/bash", *lines)) + "\n", HERE, HERE, name="job.sh")


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        # Each task sees its own GPU, whatever gives the number of the node's.
        ((f"{GPUS} --gpus-per-task=1", TRAIN), {"gpu-request": "gpus-per-task"}),
        ((GPUS, f"{TRAIN[:4]} --gpus-per-task=1 {TRAIN[5:]}"), {"gpu-request": "gpus-per-task"}),
        (
            ("#SBATCH -N 1 -n 2 --gres=gpu:a100:4 --gpus-per-task=2", TRAIN),
            {"gpus-per-node": "a100:4", "gpu-request": "gpus-per-task", "nproc-per-node": 2},
        ),
        ((f"{GPUS} --gpus-per-task=1", "torchrun train.py"), {"gpu-request": None}),
        # A worker on each GPU that Slurm lists.
        (
            ("#SBATCH -N 1 --gpus=2", "IFS=',' read -r -a g <<< \"$SLURM_JOB_GPUS\"",
             "torchrun --nproc_per_node=${#g[@]} train.py"),
            {"nproc-per-node": None, "gpus-per-node": "2"},
        ),
        (
            ("#SBATCH -N 1 --gpus=2", "N=$(echo $SLURM_JOB_GPUS | tr ',' '\\n' | wc -l)",
             "torchrun --nproc_per_node=$N train.py"),
            {"nproc-per-node": None, "gpus-per-node": "2"},
        ),
        (
            ("#SBATCH -N 1 -n 1", "srun torchrun --nproc-per-node=$SLURM_GPUS_PER_TASK train.py"),
            {"nproc-per-node": None},
        ),
        # A function that leaves the script in another folder.
        (("init() { cd sub; }", "init", TRAIN), {"script": "sub/train.py", "chdir": None}),
        (("init() { cd $1 || exit 1; }", "init sub", TRAIN), {"script": "sub/train.py"}),
        (("init() { (cd sub; make); }", "init", TRAIN), {"script": "train.py"}),
        (("make_it() { pushd sub; make; popd; }", "make_it", TRAIN), {"script": "train.py"}),
        (("init() { cd sub; }", "outer() { init; }", "outer", TRAIN), {"script": "sub/train.py"}),
        (("cd $HOME/y", TRAIN), {"script": f"{Path.home()}/y/train.py", "chdir": "~/y"}),
        # Red Hat's software collections.
        (
            ("scl enable gcc-toolset-12 -- srun python3 train.py a",),
            {"script": "train.py", "setup": ["source scl_source enable gcc-toolset-12"]},
        ),
        (
            ("scl enable a b 'torchrun train.py a'",),
            {"script": "train.py", "args": ["a"], "setup": ["source scl_source enable a b"]},
        ),
        (
            ("srun scl enable a -- python train.py",),
            {"worker-setup": ["source scl_source enable a"], "setup": None},
        ),
        (("scl enable a -- make", TRAIN), {"setup": ["scl enable a -- make"]}),
        # Defaults of variables that nothing sets.
        (
            ("run='torchrun --nproc_per_node=2 train.py'",
             "if [ ! -z \"$PROFILED\" ]; then run=\"nsys profile $run\"; fi", "eval $run"),
            {"script": "train.py", "nproc-per-node": 2},
        ),
        (
            ("if [ -z \"$G\" ]; then", "G=8", "fi", "torchrun --nproc_per_node=$G train.py"),
            {"nproc-per-node": 8, "setup": None},
        ),
        (("[[ -z $LR ]] && export LR=1", f"{TRAIN} --lr $LR"), {"args": ["--lr", "1"]}),
        (
            ("A=$(x)", "if [ -z \"$A\" ]; then A=8; fi", f"{TRAIN} $A"),
            {"setup": ["A=$(x)", "if [ -z \"$A\" ]; then A=8; fi", "ARGUMENTS_1=(${A})"]},
        ),
        # An array may be one of the command line.
        (
            ("A=1", "if [ ! -z $SLURM_ARRAY_TASK_ID ]; then A=2; fi", f"{TRAIN} $A"),
            {"setup": ["A=1", "if [ ! -z $SLURM_ARRAY_TASK_ID ]; then A=2; fi",
                       "ARGUMENTS_1=(${A})"]},
        ),
        (
            ("#SBATCH --array=1-2", "A=1", "if [ ! -z $SLURM_ARRAY_TASK_ID ]; then A=2; fi",
             f"{TRAIN} $A"),
            {"args": ["2"], "setup": None},
        ),
        # A variable of hpc-ddp's that a line needs.
        (
            ("if [ -z \"$WORLD_SIZE\" ]; then export WORLD_SIZE=1; fi",
             "N=$(( $WORLD_SIZE * 2 ))", "torchrun train.py --n $N"),
            {"setup": ["if [ -z \"$WORLD_SIZE\" ]; then export WORLD_SIZE=1; fi",
                       "N=$(( $WORLD_SIZE * 2 ))", "ARGUMENTS_1=(${N})"]},
        ),
        (
            ("if [ -z \"$WORLD_SIZE\" ]; then export WORLD_SIZE=1; fi", "torchrun train.py"),
            {"setup": None},
        ),
        # Tasks for each GPU.
        (("#SBATCH -N 1 --gpus-per-node=4 --ntasks-per-gpu=1", TRAIN),
         {"nproc-per-node": None, "sbatch": None}),
        (("#SBATCH -N 2 -n 8 --ntasks-per-gpu=1", TRAIN),
         {"gpus-per-node": "4", "nproc-per-node": None}),
        (("#SBATCH -N 1 --gpus-per-node=4", "srun --ntasks-per-gpu=1 python train.py"),
         {"nproc-per-node": None, "srun": None}),
        # Launchers of MPI.
        (("#SBATCH -N 2 --gres=gpu:4", "mpirun -prepend-rank -env A 1 -n 8 -ppn 4 python train.py"),
         {"launcher": "mpirun", "script": "train.py", "env": {"A": "1"}, "nproc-per-node": None}),
        (("#SBATCH -N 1 --gpus-per-node=2", "horovodrun -np 2 -H a:2 python train.py b"),
         {"launcher": "mpirun", "script": "train.py", "args": ["b"], "nproc-per-node": None}),
        (("#SBATCH --gres=gpu:4", "torchrun --nnodes=1:2 --nproc_per_node=4 train.py"),
         {"elastic": None, "nodes": 1}),
        # What an eval in a task gets from a command.
        (("srun bash -c 'eval \"$(conda shell.bash hook)\"", "[ -f e ] && eval `cat e`",
          "python train.py a'"),
         {"script": "train.py",
          "worker-setup": ["eval \"$(conda shell.bash hook)\"", "[ -f e ] && eval `cat e`"]}),
        # Tokens of a language model, and a secret among several words.
        (("A=\"--sep_token [SEP] --stop_token '<|eot_id|>' --x 2\"", f"{TRAIN} $A"),
         {"env-names": None}),
        (("#SBATCH -N 1 --gpus-per-node=a100", TRAIN), {"gpus-per-node": "a100:1"}),
        # A print of the launch, of which setup has a part.
        (("C=(torchrun train.py)", "if [ -n \"$R\" ]; then C+=(--resume \"$R\"); fi",
          "printf ' %q' \"${C[@]}\"", "\"${C[@]}\""),
         {"setup": ["C=()", "if [ -n \"$R\" ]; then C+=(--resume \"$R\"); fi",
                    "ARGUMENTS_1=(\"${C[@]:0}\")"]}),
        # On one of the job's nodes.
        (("#SBATCH -N 3 --gres=gpu:4", "torchrun --nnodes=1 --nproc_per_node=4 train.py"),
         {"nodes": 1, "nproc-per-node": None}),
        # What goes to the nodes before the launch, and is waited for.
        (("#SBATCH -N 2 -t 0", "for n in $A; do ssh $n \"mkdir /tmp/d && cp -r d /tmp\" & done",
          "wait", TRAIN),
         {"setup": ["for n in $A; do ssh $n \"mkdir /tmp/d && cp -r d /tmp\" & done", "wait"],
          "time": "UNLIMITED"}),
        (("cp -r d /tmp &", "wait", TRAIN), {"setup": ["cp -r d /tmp &", "wait"]}),
        (("#SBATCH -N 1 --gres=gpu:2", "python -m torchrun_jsc --nproc_per_node=gpu train.py"),
         {"script": "train.py", "module": None}),
        # Commands that train by their form or name, where there is no launcher.
        (("#SBATCH -N 1", "./setup.sh", "wandb agent a/b"),
         {"script": "wandb", "no-python": True, "setup": ["./setup.sh"]}),
        (("#SBATCH -N 1", "uv sync", "uv run train.py a"),
         {"script": "uv", "args": ["run", "train.py", "a"], "setup": ["uv sync"]}),
        (("#SBATCH -N 1", "PORT=1 bash tools/dist_train.sh c.py 8", "cp a b"),
         {"script": "bash", "args": ["tools/dist_train.sh", "c.py", "8"], "env": {"PORT": "1"}}),
        (("#SBATCH -N 1", "singularity exec --nv /i.sif nnUNetv2_train 1"),
         {"script": "nnUNetv2_train", "image": "/i.sif"}),
        (("#SBATCH -N 2", "srun bash -c 'NODE_RANK=$SLURM_NODEID llamafactory-cli train c.yaml'"),
         {"script": "llamafactory-cli", "worker-setup": ['export NODE_RANK="${SLURM_NODEID}"']}),
        (("#SBATCH -N 1", "source train.sh", "conda activate train", "ls run"), {"script": None}),
        (("#SBATCH -N 2", "srun ./config_env.sh", "source a/activate", "srun ./run_train.sh"),
         {"script": "./run_train.sh", "setup": ["srun ./config_env.sh", "source a/activate"]}),
        (("#SBATCH -N 2", 'srun bash -c "uv run python prepare_data.py"',
          'srun bash -c "uv run python main.py a"'),
         {"args": ["run", "python", "main.py", "a"]}),
        (("#SBATCH -N 1", "timeout 23h python train.py a",
          "if [[ $? -eq 124 ]]; then sbatch job.sh; fi"), {"script": "train.py", "args": ["a"]}),
        # Words behind the text of a shell, and texts that a shell reads.
        (("#SBATCH -N 2", "F=$(ls)", "srun bash -c 'export A=1", "torchrun \"$@\"",
          "' _ train.py --d $F"),
         {"setup": ["F=$(ls)", "ARGUMENTS_1=(${F})"], "node-setup": ["export A=1"],
          "expand": ["ARGUMENTS_1[@]"]}),
        (("singularity exec /i.sif /bin/bash <<'EOF'", "source a.sh", "python train.py", "EOF"),
         {"script": "train.py", "worker-setup": ["source a.sh"]}),
        (("srun singularity exec /i.sif bash -c '$WITH_CONDA && torchrun train.py'",),
         {"script": "train.py", "node-setup": ["$WITH_CONDA || exit"], "env-names": None}),
        (('srun --container-image=$HOME/i bash -c "', "export HOME=/h", 'python train.py"'),
         {"image": "$HOME/i", "worker-setup": ["export HOME=/h"]}),
        (("#SBATCH --container-image=/i -G 2", "A=$(x)", "pip install b", "torchrun train.py $A"),
         {"setup": None, "node-setup": ["A=$(x)", "pip install b", "ARGUMENTS_1=(${A})"]}),
        (("srun --container-mounts=/d:/d,`pwd`:`pwd` --container-image=/i python train.py",),
         {"container-options": [f"--container-mounts=/d:/d,{HERE}:{HERE}"]}),
        # Loops over the nodes, by their index.
        (("#SBATCH -N 2", "n=($(scontrol show hostnames))", 'for i in "${!n[@]}"; do', "m=${n[$i]}",
          'echo "$m is $i"', "X=$i srun -w $m -N1 -n1 python train.py &", "done", "wait"),
         {"worker-setup": ['export X="${SLURM_NODEID}"'], "args": None}),
        # Conditions that the job's own options decide.
        (("#SBATCH -p dense", 'if [[ "$SLURM_JOB_PARTITION" == "dense" ]]; then', TRAIN,
          "else", "echo skip", "fi"), {"script": "train.py"}),
        (("#SBATCH -N 1 -n 1", "if [[ -z $SLURM_NNODES ]] || [[ -z $SLURM_NTASKS ]]; then N=1",
          "else N=2; fi", f"{TRAIN} $N"), {"args": ["2"], "setup": None}),
        (('if [ -n "$1" ]; then C="$1"; else C=$(ls); fi', f'{TRAIN} "$C"'),
         {"setup": ["C=$(ls)"], "args": ["$C"]}),
        (("#SBATCH --gpus-per-node=a100:4",
          "G=$(echo \"${SLURM_GPUS_PER_NODE:-8}\" | grep -oE '[0-9]+' || echo 8)",
          "torchrun --nproc_per_node=$G train.py"), {"nproc-per-node": None}),
        (("#SBATCH --nodes=1 --gpus-per-node=rtx:2", "N=$SLURM_GPUS_PER_NODE",
          "if [[ $N == *:* ]]; then N=$(echo $N | awk -F: '{print $NF}'); fi",
          "torchrun --nproc_per_node=$N train.py"), {"nproc-per-node": None, "setup": None}),
        (("#SBATCH --nodes=1 --gpus-per-node=rtx:2", "N=$SLURM_GPUS_PER_NODE",
          'if [[ "$N" =~ ":" ]]; then N=${N##*:}; fi', f"{TRAIN} $N"), {"args": ["2"]}),
        (("N=a1:2", "N=$(echo $N | grep -o '[0-9]*')", f"{TRAIN} $N"),
         {"args": ["${ARGUMENTS_1[@]}"]}),
        # Exported are the assignments between `set -a` and `set +a` alone.
        (("set -a", "LR=1", "set +a", "SEED=2", TRAIN), {"env": {"LR": "1"}}),
        (("set -o allexport; LR=1; set +o allexport", "SEED=2", TRAIN), {"env": {"LR": "1"}}),
        (("set -a; LR=1; set +a", "LR=2", TRAIN), {"setup": ["set -a", "set +a", "export LR=2"]}),
        (("set -- -a", "LR=1", TRAIN), {"env": None}),
        # One program with other arguments in each branch.
        (("#SBATCH --array=1-2", "case $SLURM_ARRAY_TASK_ID in", "1) python train.py a ;;",
          "2) python train.py 'b c' ;;", "esac"),
         {"script": "train.py", "args": ["${ARGUMENTS_1[@]}"],
          "setup": ["case $SLURM_ARRAY_TASK_ID in\n1) ARGUMENTS_CHOSEN=(a) ;;\n"
                    "2) ARGUMENTS_CHOSEN=('b c') ;;\n*) exit 1 ;; esac",
                    'ARGUMENTS_1=("${ARGUMENTS_CHOSEN[@]}")']}),
        (("if [ -e a ]; then", "srun torchrun train.py a", "else", "srun torchrun train.py", "fi"),
         {"setup": ["if [ -e a ]; then\nARGUMENTS_CHOSEN=(a)\nelse\nARGUMENTS_CHOSEN=()\nfi",
                    'ARGUMENTS_1=("${ARGUMENTS_CHOSEN[@]}")']}),
        # Forms that the parser reads otherwise than bash, and flags of Python.
        (('P="${A:+x;}"', "srun python -O -W ignore -Xfaulthandler train.py"),
         {"env": {"PYTHONOPTIMIZE": "1", "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": "1"}}),
        (("srun python train.py || { echo no >&2; exit 1; }",), {"script": "train.py"}),
        (("srun python train.py || scontrol requeue $SLURM_JOB_ID",), {"script": "train.py"}),
        (("#SBATCH -N 2", "srun python prepare.py && srun torchrun train.py",),
         {"script": "train.py", "setup": ["srun python prepare.py || exit"]}),
        (("#SBATCH -N 1", "f() { echo usage; }",
          "while [ $# -gt 0 ]; do case $1 in a) shift ;; *) f; exit 1 ;; esac; done", TRAIN),
         {"script": "train.py"}),
        (('srun bash -c "\\$PRE; source a/activate; python3 train.py a"',),
         {"script": "train.py", "worker-setup": ["$PRE", "source a/activate"]}),
        (("#SBATCH -N 2 --gres=gpu:4", "N=${SLURM_NNODES:=1}", "mpirun -n $((N*4)) python a.py"),
         {"nproc-per-node": None}),
        (("N=", 'if [[ -z "$N" ]] || [[ -z "$M" ]]; then echo no; exit 1; fi', TRAIN),
         {"setup": ["N=", 'if [[ -z "$N" ]] || [[ -z "$M" ]]; then echo no; exit 1; fi']}),
        (('if [ -n "$SLURM_JOB_ID" ]; then nvidia-smi -l 30 > g & fi', TRAIN),
         {"setup": ["nvidia-smi -l 30 > g &"]}),
        (("M=a", "case $M in", "a) srun torchrun train.py a ;;", "b) srun python x.py ;;", "esac"),
         {"script": "train.py", "args": ["a"]}),
        (("#SBATCH -p a100x", 'case "$SLURM_JOB_PARTITION" in a100*) N=4 ;; *) N=8 ;; esac',
          "torchrun --nproc_per_node=$N train.py"), {"nproc-per-node": 4}),
        (("if [ ! -d d ]; then srun -n1 python download.py; fi", "srun torchrun train.py"),
         {"script": "train.py", "setup": ["if [ ! -d d ]; then srun -n1 python download.py; fi"]}),
        # A file that the script itself writes.
        (("cat > ./pick <<'E'", "echo $1", "E", TRAIN, "rm -rf ./pick"),
         {"teardown": ["rm -rf ./pick"]}),
        # A launcher's own process has flags that its workers have not.
        (("#SBATCH -N 1 --gpus=2", "python -W ignore -m torch.distributed.launch"
          " --use_env --nproc_per_node=2 train.py",), {"env": None, "script": "train.py"}),
        (('run() { $1; }', 'run "torchrun --nproc_per_node=2 train.py a"'),
         {"script": "train.py", "args": ["a"]}),
        (("die() { echo $1 >&2; exit 1; }", 'srun python train.py || die "no"'),
         {"script": "train.py"}),
        # Names of nodes on another network.
        (('MASTER_ADDR="$(scontrol show hostnames | head -n 1)"', 'MASTER_ADDR="${MASTER_ADDR}i"',
          "export MASTER_ADDR", TRAIN), {"host-suffix": "i", "setup": None}),
        (("export MASTER_ADDR=${nodes[0]}-ib0", TRAIN), {"host-suffix": "-ib0"}),
        (("export MASTER_ADDR=${nodes[0]}", TRAIN), {"host-suffix": None}),
        # The path of the script itself.
        (("H=$(dirname \"$(scontrol show job $SLURM_JOB_ID | awk -F= '/Command=/{print $2}')\")",
          'cd "$H/sub"', TRAIN), {"chdir": f"{HERE}/sub", "script": "sub/train.py"}),
        # Jobs that another script submits.
        (("sbatch -N 2 <<EOF", "#!/bin/bash", TRAIN, "EOF"), {"nodes": 2, "script": "train.py"}),
        (("{", "sbatch <<EOF", "#!/bin/bash", "#SBATCH -N 2", TRAIN, "EOF", "exit 0", "}"),
         {"nodes": 2, "script": "train.py"}),
    ],
)  # fmt: skip
def test_nothing_of_these_is_lost(lines: tuple[str, ...], settings: dict[str, Any]) -> None:
    result = of_text(*lines)
    assert {key: result.settings().get(key) for key in settings} == settings
    assert LOST not in {group for marks in result.marks.values() for group, _ in marks}


def test_a_secret_among_other_words_comes_back_as_words() -> None:
    lines = ("A='--lr 1 --hf_token hf_abcdefghijklmnopqrstuvwx'", f"{TRAIN} $A")
    settings = of_text(*lines).settings()
    assert settings["env-names"] == ["A"]
    assert (settings["setup"], settings["args"]) == (["ARGUMENTS_1=(${A})"], ["${ARGUMENTS_1[@]}"])


def test_words_in_place_of_numbers_are_placeholders() -> None:
    result = of_text("#SBATCH --gpus-per-node=GPU_NUM --cpus-per-task=CPU_NUM --mem=MEM_GB", TRAIN)
    assert result.group(2)[1].count("is a placeholder") == 3
    assert not {"gpus-per-node", "cpus-per-task", "mem"} & result.settings().keys()


@pytest.mark.parametrize(
    ("lines", "line", "group", "reason"),
    [
        (
            ("#SBATCH --ntasks-per-node=3 -N 2",
             "export SRUN_NTASKS_PER_NODE=$SLURM_NTASKS_PER_NODE", TRAIN),
            3, OURS, "the step has the job's numbers",
        ),
        (("export SRUN_NTASKS=7", TRAIN), 2, LOST, "would change hpc-ddp's step"),
        (
            ("#SBATCH -N 1 -n 2 --gpus-per-node=4", "#SBATCH --gpus-per-task=1", TRAIN),
            3, LOST, "--gpus-per-task=1 for 2 tasks beside 4 GPUs of a node",
        ),
        ((f"{GPUS} --gpus-per-task=1", TRAIN), 2, TAKEN, "--gpus-per-task=1"),
        (("#SBATCH -N 2", "srun -w a ray start --head &", "python train.py"), 3, LOST,
         "Ray starts its workers itself"),
        (("#SBATCH -N 2", "bash run.sh a"), 3, LOST, "it may be the launch, on 1 of 2 nodes"),
        (("#SBATCH -N 2", "mpirun --foo -n 8 python train.py"), 3, LOST, "mpirun --foo"),
        (("export SLURM_UNBUFFEREDIO=1", TRAIN), 2, OURS, "no buffer"),
        (("C=(srun python train.py)", 'if [ -e x ]; then C+=(";" echo a); fi', 'eval "${C[@]}"'),
         4, LOST, ""),
        (("read B < conf", "A=$B", "B=2", "srun --ntasks-per-node=$A python train.py"), 5, LOST,
         "only the job knows it"),
        (("K=$(x)", "B=(python train.py)",
          'case $K in a) C=("${B[@]}" a);; *) C=("${B[@]}");; esac', '"${C[@]}"'), 5, LOST,
         "it may be the launch"),
        (("source ./helper.sh", "run_it torchrun --nproc_per_node=2 train.py"), 3, LOST,
         "it may start a training"),
        (("mkdir -p out", TRAIN, "rm -rf out"), 4, LOST, "it deletes something"),
        (("if [ ! -d a ]; then make; else rm -rf a; fi", TRAIN), 2, LOST, "it deletes something"),
        (("A=$(x)", "srun bash -c '$A torchrun train.py'"), 3, LOST, "$A before the launch"),
    ],
)  # fmt: skip
def test_reasons_are_true(lines: tuple[str, ...], line: int, group: str, reason: str) -> None:
    found_group, text = of_text(*lines).group(line)
    assert (found_group, reason in text) == (group, True), text


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (("#SBATCH --gpus-per-node=1", "export CUDA_VISIBLE_DEVICES=7", "python train.py"),
         "CUDA_VISIBLE_DEVICES: srun shows each task"),
        (("#SBATCH -N 1 -n 1", "torchrun --nproc-per-node=$SLURM_GPUS_PER_TASK train.py"),
         "the number of workers is not known here: --gpus-per-node N, and a worker on each"),
        (("if [ -z \"$G\" ]; then G=8; fi", f"{TRAIN} --g $G"), "$G: taken as unset"),
        (("#SBATCH -N 1", "torchrun train.py &"), "nothing waits for it"),
        (("srun singularity exec /i.sif bash -c 'source /e/env.sh; python train.py'",),
         "the image's own python3 starts the workers"),
        ((f"{TRAIN} --rank $SLURM_PROCID",), "$SLURM_PROCID is the batch script's there"),
        (("if [ -z \"$FP32\" ]; then export A=1; fi", TRAIN), "$FP32: unset in this shell"),
    ],
)  # fmt: skip
def test_notes(lines: tuple[str, ...], note: str) -> None:
    assert any(text.startswith(note) for _, text in of_text(*lines).notes), of_text(*lines).notes


@pytest.mark.parametrize("launch", ["torchrun train.py", "srun python train.py"])
def test_devices_that_srun_has_or_that_are_all_get_no_note(launch: str) -> None:
    lines = "#SBATCH -N 1 -n 1 --gpus-per-node=2", "export CUDA_VISIBLE_DEVICES=0,1", launch
    assert not any("VISIBLE" in text for _, text in of_text(*lines).notes)


@pytest.mark.parametrize("kind", ["a pipe", "aliases"])
def test_a_configuration_that_has_no_end_is_left_alone(kind: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    if kind == "a pipe":
        os.mkfifo(config)
    else:
        levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
        config.write_text("\n".join(["l0: &l0 [a]", *levels, "mixed_precision: bf16", ""]))
    text = "#!/bin/bash\n#SBATCH -N 1\nsrun accelerate launch --config_file c.yaml train.py\n"
    conversion = import_script(text, tmp_path, tmp_path)
    is_known = conversion.env.get("ACCELERATE_MIXED_PRECISION", ("",))[0] == "bf16"
    assert is_known is (kind == "aliases")
    assert any("c.yaml" in sentence for _, sentence in conversion.notes)


@pytest.mark.parametrize(
    ("lines", "args", "names"),
    [
        # The program is told the name of the variable that holds the secret.
        (
            ("export hf_token=your_token", f"{TRAIN} --hf_token hf_token"),
            ["hf_token"],
            ["hf_token"],
        ),
        ((f"{TRAIN} --hf_token HF_TOKEN",), ["HF_TOKEN"], None),
        ((f"{TRAIN} --token abcdef0123",), ["$TOKEN"], ["TOKEN"]),
        (("export API_KEY='<yours>'", f"{TRAIN} --api_key API_KEY"), ["API_KEY"], ["API_KEY"]),
    ],
)
def test_the_name_of_a_secret_is_none(
    lines: tuple[str, ...], args: list[str], names: list[str] | None
) -> None:
    result = of_text(*lines)
    settings = result.settings()
    assert (settings["args"][1:], settings.get("env-names")) == (args, names)
    assert not any("which a line that is left uses" in text for _, text in result.notes)


def test_a_word_that_is_the_name_of_a_variable_does_not_use_it() -> None:
    result = of_text('N="${N:-50}"', "R=${R:-/r}", "mkdir -p $R", f'{TRAIN} N "${{N}}"')
    assert result.settings()["args"] == ["N", "50"]
    assert not any("which a line that is left uses" in text for _, text in result.notes)


@pytest.mark.parametrize(
    ("comment", "is_taken"),
    [("Key=Monitoring,Value=ON", True), ("Key=Monitoring,password=a1b2c3", False)],
)
def test_a_key_beside_a_value_is_no_secret(comment: str, is_taken: bool) -> None:
    result = of_text(f'#SBATCH --comment "{comment}"', TRAIN)
    assert (result.group(2)[0] == TAKEN) is is_taken
    assert (comment in str(result.settings())) is is_taken


@pytest.mark.parametrize(
    ("line", "args"),
    [
        # The launcher's argparse swallows the first of these, that of the program does not.
        ("torchrun --nproc_per_node 2 -m pkg.train -- --out a", ["--out", "a"]),
        ("accelerate launch -m pkg.train -- --out a", ["--out", "a"]),
        ("deepspeed train.py -- a", ["--local_rank=$LOCAL_RANK", "a"]),
        (f"{TRAIN} -- a", ["--", "a"]),
        # A text in single quotes beside the variable.
        (f"{TRAIN} '$HOME' \"$HOME\"", ["${ARGUMENTS_1[@]}", "$HOME"]),
        (f"{TRAIN} '^$B$' '$HOME'", ["^$B$", "$HOME"]),
        ("time (python train.py --lr 1) |& tee a", ["--lr", "1"]),
        ("time { python train.py --lr 1; }", ["--lr", "1"]),
    ],
)
def test_arguments_are_those_of_the_program(line: str, args: list[str]) -> None:
    assert of_text("#SBATCH -N 1 --gpus-per-node=2", line).settings()["args"] == args


@pytest.mark.parametrize(
    "lines",
    [
        ("{", "echo start", "python train.py", "} > a.log 2>&1"),
        ("C='python train.py'", 'eval "$C" > a.log'),
        ("run() { python train.py; }", "run | tee a.log"),
        ("(python train.py) |& tee a.log",),
        ("for i in a; do", "python train.py", "done > a.log"),
    ],
)
def test_the_output_of_a_block_is_that_of_the_launch(lines: tuple[str, ...]) -> None:
    notes = [text for _, text in of_text(*lines).notes]
    assert "its output is in the run's log, not in a.log: hpc-ddp logs" in notes


@pytest.mark.parametrize(
    ("line", "is_moved"),
    [
        ("./prepare_env.sh", False),
        ("[ -d data ] || { echo no; exit 1; }", False),
        ("export ROOT=$(dirname $(pwd))", False),
        ("pip install -r r.txt", False),
        ("wandb online", False),
        ("conda activate ./env", False),
        ("module load a", True),
        ("export ROOT=$(pwd)", True),
        ("[ -d /data ] || exit 1", True),
        ("conda activate env", True),
        ("pip install torch", True),
        ("wandb login", True),
        ("export PORT=$(date +%s)", True),
    ],
)
def test_a_line_before_a_cd_runs_where_it_did(line: str, is_moved: bool) -> None:
    settings = of_text(line, "cd /proj/p", "srun python /proj/p/train.py").settings()
    assert ("chdir" in settings) is is_moved
    assert ("cd /proj/p" in settings.get("setup", ())) is not is_moved


@pytest.mark.parametrize(
    ("line", "is_missing"),
    [
        ("echo N=$N", True),
        (f"{TRAIN} n=$N", True),
        (f'{TRAIN} "n=$N"', True),
        ("python prep.py n=$N", True),
        ("A=(n=$N x)", True),
        ("N=1 M=2 bash -c 'echo $N'; echo $N", False),
        ("for N in $(ls); do echo $N; done", False),
        ("if [ -d a ]; then M=1 N=2; fi; echo $N", False),
        ("srun bash -c 'export N=1; env; python train.py $N'", False),
    ],
)
def test_an_argument_sets_no_variable(line: str, is_missing: bool) -> None:
    notes = "; ".join(text for _, text in of_text("n=1", line, f"{TRAIN} ${{A[@]}}").notes)
    assert ("$N: not set in this shell" in notes) is is_missing


def test_a_line_with_a_default_asks_for_nothing() -> None:
    lines = "source e.sh", "B=${B:-4}", "echo $B", f"{TRAIN} --b $B --c $C"
    notes = "; ".join(text for _, text in of_text(*lines).notes)
    assert "$C: not set in this shell" in notes
    assert "$B" not in notes


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        # Variables of awk, those that a line asks for, and those of the import itself.
        (("ls | awk \"{print \\$NF}\" > f", TRAIN), "$NF"),
        (('[ -n "${PORT:-}" ] && export P=$PORT', TRAIN), "$PORT: not set"),
        (('MASTER_ADDR="$(scontrol show hostnames | head -n 1)"',
          'srun bash -lc "torchrun --rdzv_endpoint=$MASTER_ADDR:29 train.py"'), "$VALUE_1"),
        (("#SBATCH -N 2", "accelerate launch --deepspeed_hostfile h train.py"), "a launch on 1 of"),
    ],
)  # fmt: skip
def test_no_note_is_false(lines: tuple[str, ...], text: str) -> None:
    assert text not in str(of_text(*lines).notes)


def test_a_task_ends_where_its_folder_is_missing() -> None:
    settings = of_text("srun bash -c 'cd a && torchrun train.py'").settings()
    assert settings["node-setup"] == ["cd a || exit"]


def test_the_jobs_name_of_a_script_is_for_its_program() -> None:
    conversion = of_text("export SLURM_JOB_NAME=b", f"{TRAIN} --name $SLURM_JOB_NAME")
    assert conversion.settings()["setup"] == ["export SLURM_JOB_NAME=b"]
    assert conversion.settings()["args"] == ["--name", "b"]
    assert conversion.group(2)[0] == TAKEN
    assert "job-name = … names the job" in str(conversion.notes)


@pytest.mark.parametrize(
    "command", ["rm -rf /scratch/old", "find /scratch -name 'r.*' \\\n  -exec rm -rf {} + || true"]
)
def test_of_a_staging_step_only_the_command_that_deletes_is_left_out(command: str) -> None:
    lines = "srun -N 2 bash -s <<'NODE'", "mkdir -p /s/data", command, "cp /d/x.tar /s", "NODE"
    conversion = of_text("#SBATCH -N 2", *lines, TRAIN)
    (line,) = conversion.settings()["setup"]
    assert "rm" not in line
    assert "cp /d/x.tar /s\nNODE" in line
    last = 5 + command.count("\n")
    groups = [conversion.group(n)[0] for n in range(3, last + 3)]
    assert groups == [TAKEN, TAKEN, *[LOST] * (last - 4), TAKEN, TAKEN]


@pytest.mark.parametrize(
    ("launch", "line", "link"),
    [
        (f"{TRAIN} |& tee t.log", "grep loss t.log > r", "t.log"),
        (f'LOG=t.log; {TRAIN} > "$LOG" 2>&1', "cp ${LOG} keep", '"$LOG"'),
        (f"srun -o t.log {TRAIN[5:]}", "cp t.log keep", "t.log"),
        (f"{TRAIN} > t.log", "echo t.log", None),
        (f"{TRAIN} >> t.log", "cp t.log keep", ""),
        (f"srun bash -c '{TRAIN[5:]} > t.log'", "cp t.log keep", ""),
        (f"{TRAIN} | tee t_$(date).log", "cp t_*.log keep", None),
    ],
)
def test_lines_read_the_runs_log(launch: str, line: str, link: str | None) -> None:
    conversion = of_text(launch, line)
    setup = "\n".join(conversion.settings().get("setup", ()))
    text = f'ln -sf "$HPC_DDP_RUN/logs/slurm.out" {link}'
    assert (text in setup) is bool(link)
    assert ("nothing writes t.log" in str(conversion.notes)) is (link == "")
    assert conversion.settings()["teardown"] == [line]


def test_a_request_of_another_resource_than_gpus_is_none_of_gpus() -> None:
    conversion = of_text("#SBATCH -N 1 --gres=gpumem:23000m", "#SBATCH --gpus=rtx_4090:1", TRAIN)
    assert conversion.group(3) == (TAKEN, "--gpus=rtx_4090:1")


@pytest.mark.parametrize(("tasks", "is_other"), [(4, True), (8, False), (16, True)])
def test_two_numbers_of_tasks_get_a_note(tasks: int, is_other: bool) -> None:
    conversion = of_text(f"#SBATCH --nodes=2 --ntasks-per-node=4 -n{tasks}", TRAIN)
    assert ("--ntasks counts" in str(conversion.notes)) is is_other


@pytest.mark.parametrize("number", ["", "<N>", "NODE_NUM"])
def test_a_blank_is_no_number(number: str) -> None:
    command = "srun torchrun --nproc_per_node=$G train.py"
    conversion = of_text(f"#SBATCH --nodes={number}", "G=", command)
    assert conversion.settings()["nodes"] == 1
    assert conversion.group(2)[0] == LOST
    assert "it is empty: nproc-per-node = N" in conversion.group(4)[1]


def test_a_pattern_that_stands_in_the_launch_is_used_there() -> None:
    lines = "D=/data", 'F=("$D"/c_{00..05}.parquet)', "H=$(hostname)"
    conversion = of_text(*lines, f'{TRAIN} --f "${{F[@]}}"')
    assert conversion.group(3) == (TAKEN, "its value, where it is used")
    assert conversion.group(4)[0] == OURS


@pytest.mark.parametrize("name", ["0", "{BASH_SOURCE[0]}"])
def test_the_path_of_the_script_is_another_one_in_the_job(name: str) -> None:
    notes = str(of_text(f'export S="$(dirname "${name}")"', TRAIN).notes)
    assert "is the batch script of hpc-ddp there" in notes


NODES = "#SBATCH --nodes=2 --gpus-per-node=2"
TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=2"


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        # Code behind an option's name.
        (('srun --cpu-bind="$(f)" python train.py',),
         {"srun": ["--cpu-bind=$ARGUMENTS_1"], "setup": ['ARGUMENTS_1="$(f)"']}),
        # A deletion counts by the value of its variable.
        (("export D=$HOME/x/e", "rm -rf $D", TRAIN),
         {"setup": ['[ "${HPC_DDP_FIRST_START-}" != yes ] || { rm -rf $D; }']}),
        # The launcher is a default, which a file may change.
        (("source e.sh", 'R="${R:-srun}"', '"$R" uv run python train.py a'),
         {"script": "uv", "args": ["run", "python", "train.py", "a"], "launcher": "srun"}),
        (("source e.sh", "R=${R:-srun}", "$R python train.py"), {"script": "train.py"}),
        # The length of a list of nodes, of which head takes ten.
        (("N=($(scontrol show hostnames | head))", "if (( ${#N[@]} > 1 )); then", "cp a b",
          f"{TRAIN} a", "else", "cp c d", "python train.py a", "fi"), {"setup": ["cp a b"]}),
        # A manager in front of the step starts each task's program.
        (("uv run --env-file=.env -- srun python -m train a",),
         {"script": "uv", "args": ["run", "--env-file=.env", "--", "python", "-m", "train", "a"]}),
        # A number that is cut out of Slurm's of the node's GPUs.
        (('N=$(echo "$SLURM_GPUS_PER_NODE" | sed "s/.*://")', f"{TORCHRUN[:-1]}$N train.py"),
         {"nproc-per-node": None, "script": "train.py"}),
        # A placeholder takes no other words with it.
        (('P="<PATH>/a.py"', f"srun {TORCHRUN} $P --a 5"), {"args": ["--a", "5"], "script": None}),
        ((f"srun {TORCHRUN} a.py --d /d/<NAME> --a 5",), {"args": ["--a", "5"]}),
        ((f"C='{TORCHRUN} a.py --d /d/<NAME> --a 5'", 'srun bash -c "$C"'), {"args": ["--a", "5"]}),
        # A program in the image, by the folder of its task.
        ((f"srun singularity exec i.sif bash -c 'cd /opt/x; {TORCHRUN} a.py'",),
         {"script": "python3", "args": ["a.py"], "node-setup": ["cd /opt/x"]}),
    ],
)  # fmt: skip
def test_words_of_the_nineteenth_sample(lines: tuple[str, ...], settings: dict[str, Any]) -> None:
    found = of_text(NODES, *lines).settings()
    assert {key: found.get(key) for key in settings} == settings


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (("source e.sh", "R=${R:-srun}", "$R python a.py"), "$R: taken as srun"),
        ((f"srun python -m torch.distributed.launch {TORCHRUN[9:]} a.py",), "--local_rank: from"),
        (("N=`echo $SLURM_GPUS_ON_NODE|tr -d x`", f"srun {TORCHRUN[:-1]}$N a.py"),
         "torchrun --nproc-per-node: taken to be the number of a node's GPUs"),
        ((f"srun singularity exec i.sif bash -c 'cd /opt/x; {TORCHRUN} a.py'",),
         "a.py: only the job knows its folder"),
        (("srun idr_accelerate a.py",), "idr_accelerate starts a launcher of its own"),
    ],
)  # fmt: skip
def test_what_is_taken_so_is_noted(lines: tuple[str, ...], note: str) -> None:
    assert any(text.startswith(note) for _, text in of_text(NODES, *lines).notes)


def test_a_tool_that_starts_itself_by_a_launcher_is_the_program() -> None:
    line = "oumi distributed torchrun -m oumi train -c c.yaml"
    settings = of_text("#SBATCH -N 1", line).settings()
    assert [settings["script"], *settings["args"]] == line.split()


def test_a_variable_of_the_job_with_a_default_is_the_jobs() -> None:
    line = 'export SLURM_JOB_ID="${SLURM_JOB_ID:-local}"'
    conversion = of_text(NODES, line, f"{TRAIN} $SLURM_JOB_ID")
    assert conversion.group(3)[0] == OURS
    assert "not taken over" not in str(conversion.notes)


@pytest.mark.parametrize("line", ["D=${D:?set D, as /path/to/data}", 'echo "no /path/to/data"'])
def test_a_path_of_a_message_is_no_placeholder(line: str) -> None:
    notes = of_text(NODES, "source e.sh", line, f"{TRAIN} $D").notes
    assert "looks like a placeholder" not in str(notes)


def test_a_blank_number_of_workers_is_named_so() -> None:
    conversion = of_text(NODES, f"srun {TORCHRUN[:-1]}<GPUS> a.py")
    assert "--nproc-per-node: a placeholder" in conversion.group(3)[1] + str(conversion.marks)


@pytest.mark.parametrize("command", ["python prepare.py", "srun python prepare.py", "ls"])
def test_a_secret_in_a_function_is_not_written(command: str) -> None:
    line = f"f() {{ export HF_TOKEN=abcdef12345; {command}; }}"
    conversion = of_text(NODES, line, "f", f"srun {TORCHRUN} a.py")
    assert "abcdef12345" not in str(conversion.settings())
    assert conversion.group(3)[0] == conversion.group(4)[0] == LOST
