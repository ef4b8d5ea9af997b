"""Words of real job scripts, of which an import was wrong once: what they have to become."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script
from hpc_ddp.submission.job_script.launchers.tasks import LOGIN
from hpc_ddp.submission.job_script.output import to_comment, to_toml
from hpc_ddp.submission.job_script.secrets import is_secret, looks_secret
from hpc_ddp.submission.job_script.statements.rules import ATTEMPTED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path("/home/me/project")
TRAIN = "srun python train.py"


def of_text(*lines: str) -> Conversion:
    """Return the conversion of a script whose third line is the first of `lines`."""
    text = "\n".join(("#!/bin/bash", "#SBATCH -N 2", *lines)) + "\n"
    return import_script(text, HERE, HERE, name="job.sh")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # Slurm opens the output before a `cd`, and after --chdir.
        (("#SBATCH -o o.txt", "cd /x", TRAIN), {"output": f"{HERE}/o.txt", "chdir": "/x"}),
        (("#SBATCH -o o.txt -D /x", TRAIN), {"output": "o.txt", "script": "/x/train.py"}),
        (("#SBATCH -D sub", "cd /x", TRAIN), {"chdir": "/x", "script": "/x/train.py"}),
        (("#SBATCH -D sub", "cd in", TRAIN), {"chdir": f"{HERE}/sub/in"}),
        (("#SBATCH -D sub", TRAIN), {"chdir": "sub", "script": "sub/train.py"}),
        # Nothing runs behind an `exit`, or an `exec` of a program, that no condition guards.
        (("python train.py a", "exit", "rm -rf out", "srun python other.py b"),
         {"script": "train.py", "args": ["a"], "setup": None}),
        ((f"{TRAIN} a", "exit $?", "export LR=2", "cp -r out results"),
         {"args": ["a"], "env": None, "teardown": None}),
        (("exec > log.txt", "exec 2>&1", "[ -n $A ] || exit 1", f"{TRAIN} a"), {"args": ["a"]}),
        # What a child shell sets stays in it; an `eval` changes the shell itself.
        (("LR=1", '(LR=3; srun -n1 python prep.py)', f"{TRAIN} $LR"), {"args": ["1"]}),
        (("LR=1", 'bash -c "LR=3; python prep.py"', f"{TRAIN} $LR"), {"args": ["1"]}),
        (("LR=1", 'srun bash -c "LR=3; python prep.py"', "srun torchrun train.py $LR"),
         {"args": ["1"]}),
        (("(cd sub; srun -n1 python prep.py)", TRAIN), {"chdir": None, "script": "train.py"}),
        (('bash -c "export A=8; python prep.py"', TRAIN),
         {"env": None, "setup": ['bash -c "export A=8; python prep.py"']}),
        (("A=$(x)", "(A=3; srun -n1 python prep.py $A)", "mkdir $A", f"{TRAIN} --a $A"),
         {"setup": ["A=$(x)", "(A=3; srun -n1 python prep.py $A)", "mkdir $A",
                    "ARGUMENTS_1=(${A})"]}),
        (("go() { (export A=1; srun -N2 python train.py); }", "main() { go; }",
          "(cd data; srun -N1 -n1 python prep.py)", "main"),
         {"chdir": None, "setup": ["(cd data; srun -N1 -n1 python prep.py)"], "env": {"A": "1"}}),
        # Lines in a block whose output goes to a file.
        (("{", "module load x", "export A=1", TRAIN, "} 2>&1 | tee log"),
         {"setup": ["module load x", "export A=1"], "env": None}),
        (('eval "$(cd /opt/spack && bin/spack load --sh gcc)"', TRAIN), {"script": "train.py"}),
        # A function that the text of a task calls.
        (("run() { torchrun a.py; }", "export -f run", "srun --container-image=a.sqsh bash -c run"),
         {"script": "a.py", "image": "a.sqsh", "setup": None}),
        # What the directives alone say of GPUs and CPUs.
        (("#SBATCH --gpus=2", "#SBATCH -N 2-4", "srun torchrun a.py"), {"gpus-per-node": None}),
        (("#SBATCH -N 1 -n 64", "torchrun --nproc-per-node=8 a.py"), {"cpus-per-node": 64}),
        (("#SBATCH -N 1 -n 16", "python a.py"), {"cpus-per-node": 16, "launcher": "srun"}),
        (("#SBATCH -n 4 -c 4", "srun python a.py"), {"cpus-per-task": 4, "cpus-per-node": None}),
        (("#SBATCH -n 4", "srun -c 2 torchrun a.py"), {"cpus-per-task": 2}),
        (("#SBATCH --mail-type=begin", "#SBATCH --mail-type=end", TRAIN),
         {"mail-type": "begin,end"}),
        # Slurm's variables that the job has not, or with another value.
        (("export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK", TRAIN),
         {"env": None, "setup": ["export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"], "expand": None}),
        (("#SBATCH -N 1 --gpus=4", "export N=$SLURM_GPUS", TRAIN),
         {"env": {"N": "4"}, "expand": None}),
        (("#SBATCH -N 1 --ntasks-per-node=4 -c 8", "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK}",
          "torchrun --nproc-per-node=4 a.py"),
         {"env": {"OMP_NUM_THREADS": "8"}, "cpus-per-node": 32}),
        (("#SBATCH -c 8", "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK", TRAIN),
         {"env": {"OMP_NUM_THREADS": "$SLURM_CPUS_PER_TASK"}, "expand": ["SLURM_CPUS_PER_TASK"]}),
        # An export stands behind the module that may set the name.
        (("export A=1", "module load x", "export B=2", f"C=3 {TRAIN}"),
         {"env": {"A": "1"}, "setup": ["module load x", "export B=2", "export C=3"]}),
        # A test on a variable of the shell that submits, below `set -u`.
        (('if [ -z "${X:-}" ]; then echo no X; exit 1; fi', TRAIN),
         {"setup": ['if [ -z "${X:-}" ]; then echo no X; exit 1; fi']}),
        (("#SBATCH -N 2 --gres=gpu:4", "WORLD_SIZE=$((2*SLURM_NNODES))",
          'srun bash -c "accelerate launch --num_machines 2 --num_processes $WORLD_SIZE a.py"'),
         {"nproc-per-node": 2, "script": "a.py"}),
        (("srun ~root/env/bin/python3 a.py --d ~root/d ~nosuchuser/e",),
         {"python": os.path.expanduser("~root/env/bin/python3"),
          "args": ["--d", os.path.expanduser("~root/d"), "~nosuchuser/e"]}),
        ((f"{TRAIN} root=~/a --b=~/c",), {"args": [f"root={Path.home()}/a", "--b=~/c"]}),
        # Words that bash makes others of.
        (("for s in {1,2}; do", f"{TRAIN} --seed $s", "done"), {"script": None}),
        ((f"{TRAIN} --x {{1,2}} c/[ab].yaml layers=[1,2] '{{1,2}}'",),
         {"args": ["--x", "${ARGUMENTS_1[@]}", "${ARGUMENTS_2[@]}", "layers=[1,2]", "{1,2}"],
          "setup": ["ARGUMENTS_1=({1,2})", "ARGUMENTS_2=(c/[ab].yaml)"]}),
        (("#SBATCH --gres=gpu:4", "srun torchrun a.py"), {"nproc-per-node": 1}),
        # Two secrets of one name, and one that is used twice.
        (("export API_KEY=a1b2c3d4", f"{TRAIN} --api-key z9y8x7w6"),
         {"env-names": ["API_KEY", "API_KEY_2"], "args": ["--api-key", "$API_KEY_2"]}),
        (("export API_KEY=a1b2c3d4", f"{TRAIN} --api-key $API_KEY"),
         {"env-names": ["API_KEY"], "args": ["--api-key", "$API_KEY"]}),
        (("(cd sub; A=3; srun python train.py $A)",), {"chdir": "sub", "args": ["3"]}),
        (('eval "cd sub"', TRAIN), {"script": "python", "args": ["train.py"]}),
        # A launcher or a Python without a program starts nothing.
        (("python --version",), {"script": None, "setup": ["python --version"]}),
        (("python -m pip list",), {"script": None, "setup": ["python -m pip list"]}),
        (("torchrun --help", TRAIN), {"script": "train.py", "setup": ["torchrun --help"]}),
        (('srun sh -c "python -V; python train.py"',), {"worker-setup": ["python -V"]}),
        (('srun sh -c "python a.py; python train.py"',), {"script": "train.py"}),
        # The workers' Python is the one of the set-up lines.
        (("module load pytorch/2", TRAIN), {"python": "python"}),
        (("ml PyTorch", "srun python3 train.py"), {"python": "python3"}),
        (("export PATH=/opt/bin:$PATH", TRAIN), {"python": "python"}),
        (("source env.sh", "srun torchrun train.py"), {"python": "python"}),
        (('srun bash -c "source bin/activate; python train.py"',), {"python": "python"}),
        (("module load cuda gcc/12", "ml nccl", TRAIN), {"python": None}),
        (("source /venv/bin/activate", TRAIN), {"python": None}),
        # The image in the directives, and options with a value of their own.
        (("#SBATCH --image=a:b", "srun shifter python train.py"), {"image": "a:b", "sbatch": []}),
        (
            ("#SBATCH --container-image=a --container-mounts=/b", f"{TRAIN}"),
            {"image": "a", "container-tool": "pyxis",
             "container-options": ["--container-mounts=/b"]},
        ),
        # A word that can't be written takes an option without its value along, and no other flag.
        (("srun singularity exec --nv --cleanenv --bind=your_data a.sif python train.py",),
         {"container-options": ["--nv"]}),
        (
            ("srun apptainer -q exec -B/b --pwd /w --nv a.sif python train.py",),
            {"image": "a.sif", "container-options": ["-B/b", "--pwd", "/w", "--nv"]},
        ),
        (
            ("#SBATCH --gpus-per-node=1", "srun apptainer exec --nv a.sif python train.py"),
            {"image": "a.sif", "container-options": None},
        ),
        (
            ("srun shifter --image=a -V '/a:/b;/c:/d' python train.py",),
            {"container-options": ["--volume=/a:/b;/c:/d"]},
        ),
        (
            ("#SBATCH --environment=/a.toml", TRAIN),
            {"sbatch": ["--environment=/a.toml"], "python": "python", "script": "train.py"},
        ),
        # Set-up and clean-up lines have the functions that they call, and what these need.
        (
            ("log() { echo $1 >>$F; }", "F=/x", "log a", TRAIN),
            {"setup": ["log() { echo $1 >>$F; }", "F=/x", "log a"], "teardown": None},
        ),
        (
            ("log() { echo $1 >>$F; }", "F=/x", "end() { log a; }", TRAIN, "end || exit"),
            {
                "setup": ["log() { echo $1 >>$F; }", "F=/x", "end() { log a; }"],
                "teardown": ["end || exit"],
            },
        ),
        (
            ("f() { date; }", "trap 'f' EXIT", TRAIN, "if ! f; then echo; fi"),
            {
                "setup": ["f() { date; }", "trap 'f' EXIT"],
                "teardown": ["if ! f; then echo; fi"],
            },
        ),
        (
            ("srun --environment=/a.toml --container-workdir=/w python train.py",),
            {"srun": ["--environment=/a.toml", "--container-workdir=/w"], "image": None,
             "script": "python", "args": ["train.py"], "no-python": True},
        ),
        # Tasks in all come before those of a node.
        (("srun -n 8 --ntasks-per-node=8 python train.py",), {"nproc-per-node": 4}),
        (
            ("#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8", "export N=8",
             'C="accelerate launch --num_processes $((SLURM_NNODES * N)) a.py"',
             'srun bash -c "$C"'),
            {"gpus-per-node": "8", "nproc-per-node": None, "script": "a.py"},
        ),
        # Options of deepspeed, and the Python beside a launcher.
        (
            ("srun bash -c 'e/bin/deepspeed --no_ssh --node_rank $SLURM_NODEID a.py -x'",),
            {"script": "a.py", "args": ["--local_rank=$LOCAL_RANK", "-x"],
             "python": "e/bin/python"},
        ),
        (("srun deepspeed --no_local_rank a.py -x",), {"script": "a.py", "args": ["-x"]}),
        (("srun composer -n 4 -c python a.py",),
         {"script": "python", "args": ["a.py"], "no-python": True}),
        (("srun shifter -i a --entrypoint python a.py",),
         {"script": "a.py", "container-options": ["--entrypoint"]}),
        (("srun ~/.local/bin/torchrun train.py",), {"script": "train.py", "python": None}),
        (("srun /usr/local/bin/torchrun train.py",), {"script": "train.py", "python": None}),
        (("srun /a/bin/torchrun-b train.py",), {"script": "train.py", "python": None}),
        (("srun $E/bin/torchrun --nproc-per-node 4 train.py",),
         {"script": "train.py", "python": "$E/bin/python", "srun": None}),
        (("conda install python a", "conda install deepspeed a", "python train.py"),
         {"script": "train.py", "setup": ["conda install python a", "conda install deepspeed a"]}),
        (("uv venv --python python3.11 .venv", TRAIN), {"script": "train.py"}),
        (("srun conda run -n x python a.py", TRAIN), {"script": "train.py"}),
        (("poetry run srun torchrun train.py",), {"script": "train.py", "setup": None}),
        (
            ("accelerate launch --num_cpu_threads_per_process 4 train.py",),
            {"env": {"OMP_NUM_THREADS": "4"}},
        ),
        # Its own name in a text is no requeue.
        (("cat <<A", "sbatch $0 MODEL", "A", TRAIN), {"setup": ["cat <<A\nsbatch $0 MODEL\nA"]}),
        (
            ('[ -n "$A" ] || { echo "Usage: sbatch $0"; exit 1; }', TRAIN),
            {"setup": ['[ -n "$A" ] || { echo "Usage: sbatch $0"; exit 1; }']},
        ),
        # Slurm sets no variable for an option that the script lacks, and the default counts.
        (("#SBATCH -n 2 --gres=gpu:4", "export W=${SLURM_NTASKS_PER_NODE:-4}",
          "srun accelerate launch --num_processes $((W * 2)) a.py"), {"nproc-per-node": None}),
        (("#SBATCH --gres=gpu:4", "srun torchrun --nproc=${SLURM_GPUS_PER_NODE:-1} a.py"),
         {"nproc-per-node": 1}),
        (("#SBATCH --gpus-per-node=4", "srun torchrun --nproc=${SLURM_GPUS_PER_NODE:-1} a.py"),
         {"nproc-per-node": None}),
        (("#SBATCH --gres=gpu:4", "srun torchrun --nproc=$((${SLURM_GPUS:-6} / 2)) a.py"),
         {"nproc-per-node": 3}),
        (('if [ -n "$SLURM_NTASKS" ]; then', "srun torchrun a.py", "else", "srun torchrun b.py",
          "fi"), {"script": "b.py"}),
        (("#SBATCH --gres=gpu:4", 'if [ -z "$CUDA_VISIBLE_DEVICES" ]; then n=1; else',
          'n=$(jq -n "[$CUDA_VISIBLE_DEVICES] | length"); fi', "srun torchrun --nproc=$n a.py"),
         {"script": "a.py", "nproc-per-node": None}),
        # Numbers of GPUs that a command counts in a list.
        (("export CUDA_VISIBLE_DEVICES=0,1,2",
          "n=$(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)",
          "srun torchrun --nproc=$n a.py"), {"nproc-per-node": 3}),
        (("export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1}",
          "n=$(echo \"$CUDA_VISIBLE_DEVICES\" | awk -F, '{print NF}')",
          "srun torchrun --nproc=$n a.py"),
         {"nproc-per-node": 2, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}),
        (("#SBATCH --gres=gpu:4", "export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1}",
          "n=$(echo $CUDA_VISIBLE_DEVICES | tr , '\\n' | wc -l)", "srun torchrun --nproc=$n a.py"),
         {"nproc-per-node": None, "gpus-per-node": "4"}),
        # A program that no launcher starts is no child of torchrun's agent.
        (("#SBATCH -N 1 --gres=gpu:2", "python -m a.train -x"),
         {"launcher": "srun", "nproc-per-node": 1, "script": "a.train"}),
        (("#SBATCH -N 1-2", "python train.py"), {"launcher": None, "script": "train.py"}),
        *(
            (("#SBATCH -N 1 --gres=gpu:4", f"{tool} torchrun --nproc=4 a.py"),
             {"launcher": "srun", "nproc-per-node": 1, "script": tool.split()[0],
              "no-python": True, "args": [*tool.split()[1:], "torchrun", "--nproc=4", "a.py"]})
            for tool in ("uv run", "poetry run", "pipenv run", "conda run -n e", "numactl -N 0",
                         "micromamba run -n e", "nice -n 9")
        ),
        (("#SBATCH -N 1", "uv run python prepare.py", "uv run torchrun a.py"),
         {"setup": ["uv run python prepare.py"], "args": ["run", "torchrun", "a.py"]}),
        (("#SBATCH -N 1", "uv run python -m pip list", TRAIN),
         {"setup": ["uv run python -m pip list"], "script": "train.py"}),
        (("srun micromamba run -n e torchrun a.py",),
         {"script": "micromamba", "args": ["run", "-n", "e", "torchrun", "a.py"]}),
        # A here-document without a command is a comment.
        (("<<end", "srun python old.py", "torchrun x.py", "end", TRAIN),
         {"script": "train.py", "args": None, "setup": None}),
        (("<<end", "#  a", "M=<a|b>", "sbatch \\", " --m=${M} \\", " a.sh", "end", TRAIN),
         {"script": "train.py", "setup": None}),
        (("<<-'END'", "$(x) `y`", "\tEND", TRAIN), {"script": "train.py", "setup": None}),
        (("<<E", "$(touch x)", "E", TRAIN), {"setup": [": <<E\n$(touch x)\nE"]}),
        (("cat <<A", "<<B", "A", TRAIN), {"setup": ["cat <<A\n<<B\nA"]}),
        # Lines around the launch that do not change it.
        (("trap 'echo \"failed at $(date): $?\" >&2; exit 1' ERR", TRAIN),
         {"setup": ["trap 'echo \"failed at $(date): $?\" >&2; exit 1' ERR"]}),
        (("top > a &", "P=$!", TRAIN, 'kill -9 "$P" 2>/dev/null || true'),
         {"setup": ["top > a &"], "teardown": None}),
        (('V="${1:?usage: sbatch a.sh <x|y>}"', TRAIN), {"script": "train.py"}),
        # Options of Accelerate that are its defaults, or what hpc-ddp does; a name of tokens.
        (("srun accelerate launch --deepspeed_multinode_launcher standard -m a.b",),
         {"script": "a.b", "module": True}),
        (("export A_TOKEN_REDUCTION=mean", TRAIN), {"setup": ["export A_TOKEN_REDUCTION=mean"]}),
        (("export SLURM_LABEL_OUTPUT=1", TRAIN), {"env": {"SLURM_LABEL_OUTPUT": "1"}}),
        (("h=$(hostname)", "read -ra my <<< $h", "echo $h", TRAIN),
         {"setup": ["h=$(hostname)", "read -ra my <<< $h", "echo $h"]}),
        # Other names of options, and beginnings of them.
        (("#SBATCH --tasks-per-node=4", TRAIN), {"nproc-per-node": 4}),
        (("#SBATCH --ntasks-per-no=4 --part=a", TRAIN), {"nproc-per-node": 4, "partition": "a"}),
        (("#SBATCH --workdir=/x", TRAIN), {"chdir": "/x"}),
        (("srun --tasks-per-node=4 python train.py",), {"nproc-per-node": 4}),
        (("srun --cpu_b=none --unbuf python train.py",), {"srun": ["--cpu-bind=none"]}),
        # A variable that an `export` of its name alone needs, and one that only workers have.
        (("A=$(date)", "export A", TRAIN), {"setup": ["A=$(date)", "export A"]}),
        (("export A=$SLURM_PROCID", TRAIN), {"setup": ["export A=$SLURM_PROCID"], "env": None}),
        # Functions and texts with arguments of their own, and a site's torchrun.
        (('cmd() { time "$@"; }', "cmd srun torchrun train.py"), {"script": "train.py"}),
        (("srun torchrun_jsc train.py",), {"script": "train.py"}),
        (("srun bash -c 'python train.py \"$@\"' x --lr 1",), {"args": ["--lr", "1"]}),
        (("f() { srun torchrun a.py ${1:-x}; }", "f"), {"args": ["x"]}),
        (("f() { A=$1; run $A; srun torchrun a.py; }", "f b"), {"setup": ["A=b", "run $A"]}),
        # What a shell reads and sets by the words behind its name.
        (("#SBATCH -o a.%J", TRAIN), {"output": "a.%J"}),
        (("#SBATCH --export=NONE", TRAIN), {"sbatch": ["--export=NONE"]}),
        (("srun -n 2 -c 4 python train.py",), {"cpus-per-task": 4}),
        (("#SBATCH -c 4", "srun -c 4 python train.py",), {"cpus-per-task": 4}),
        # A dropped loop's variables are not set: their names are not exported.
        (
            ("F=()", "for h in $(ls); do F+=($(ssh $h x)); done", f"NCCL_X=$F {TRAIN}"),
            {"env": None, "setup": ["F=()"], "script": "train.py"},
        ),
        # Values that the outer shell has put between single quotes.
        (
            ("A=$(date)", """srun bash -c "python train.py --a '$A' 'b c'\""""),
            {"args": ["--a", "$A", "b c"], "expand": ["A"]},
        ),
        # A text that only the job knows is bash's, in the task.
        (
            ("A=$(cat x)", 'srun bash -c "$A"'),
            {"script": "bash", "args": ["-c", "$A"], "expand": ["A"], "no-python": True},
        ),
        # A launch on one node leaves nothing behind.
        (('srun -N1 -n1 -w a bash -c "make; python train.py"', "rm x"),
         {"script": None, "setup": None, "worker-setup": None, "teardown": None}),
        (('if [ "${SLURM_NNODES:-1}" -gt 1 ]; then', TRAIN, "fi"), {"script": "train.py"}),
        (("export PMI_DEBUG=1", TRAIN), {"env": {"PMI_DEBUG": "1"}}),
        (("srun uv run torchrun train.py",), {"script": "uv", "no-python": True}),
        (("srun uv --project . run python train.py",), {"script": "uv", "no-python": True}),
        # A default of what each job has stays bash.
        ((f"{TRAIN} ${{TMPDIR:-/tmp}}",), {"setup": ["ARGUMENTS_1=(${TMPDIR:-/tmp})"]}),
        # Quotes behind a variable, and a word that is the name of a column.
        (("A=$(date)", 'srun sh -c "run \\"$A\\"\npython train.py"'),
         {"worker-setup": ['run "${A}"']}),
        ((f"{TRAIN} --data-key json",), {"args": ["--data-key", "json"], "env-names": None}),
        # Secrets with a = in them, and those of Hydra.
        ((f"{TRAIN} --wandb-key c2Vj=cmV0MA==",),
         {"args": ["--wandb-key", "$WANDB_KEY"], "env-names": ["WANDB_KEY"]}),
        ((f"{TRAIN} --password ab=cd12ef",), {"args": ["--password", "$PASSWORD"]}),
        ((f"{TRAIN} wandb.api_key=abcdefgh12345678 lr=0.1",),
         {"args": ["wandb.api_key=$WANDB_API_KEY", "lr=0.1"], "env-names": ["WANDB_API_KEY"]}),
        ((f"{TRAIN} --api-key=abcdefgh12345678==",), {"args": ["--api-key=$API_KEY"]}),
        ((f"{TRAIN} db.url=https://me:secret1@host/x",), {"args": ["db.url=$SECRET"]}),
        # A name that is partly quoted, and functions that call themselves.
        (('srun env "A"B=c python train.py',), {"env": {"AB": "c"}, "script": "train.py"}),
        (("retry() {", "srun python train.py || retry", "}", "retry"), {"script": "train.py"}),
        (("a() { b; }", "b() { a; srun python train.py; }", "a"), {"script": "train.py"}),
        (("f() {", "shift 0", 'srun python train.py "$@"', "}", "f a b"), {"args": ["a", "b"]}),
        (("srun singularity_wrapper run python3 train.py",), {"script": None, "container": None}),
        # A loop over one word, and one of the options that argparse understands by its beginning.
        (("s=(42)", 'for i in "${s[@]}"; do', "mkdir d$i", f"{TRAIN} --seed $i", "done"),
         {"args": ["--seed", "42"], "setup": ["i=42", "mkdir d$i"]}),
        (("for i in 1 2; do", f"{TRAIN} --seed $i", "done"), {"script": None}),
        (("srun torchrun --nnode=$SLURM_NNODES a.py",), {"script": "a.py", "torchrun": None}),
        # An array of which one task runs at a time, and whose tasks differ.
        (("#SBATCH --array=0-2%1", "echo go; python t.py --seed $SLURM_ARRAY_TASK_ID"),
         {"array": "0-2%1"}),
        (("#SBATCH --array=0-2%1", "echo $SLURM_ARRAY_TASK_ID > task", TRAIN), {"array": "0-2%1"}),
        (("#SBATCH --array=0-2%1", "echo task $SLURM_ARRAY_TASK_ID", TRAIN), {"array": None}),
        # All GPUs of a node, counted there.
        (("#SBATCH --gres=gpu:4", "n=`nvidia-smi -L | wc -l`", "srun torchrun --nproc=$n a.py"),
         {"gpus-per-node": "4", "nproc-per-node": None}),
        # Tasks of a step are no workers of Accelerate.
        (("srun --ntasks-per-node=1 accelerate launch --num_machines 2 \\",
          "--num_processes 16 a.py"),
         {"script": "a.py", "nproc-per-node": 8}),
        # A word that goes on in the next line, and the blank between two arrays.
        (("srun --container-image=a --container-mounts=\\", "/b,\\", "$USER \\", " python a.py"),
         {"container-options": ["--container-mounts=/b,$USER"], "script": "a.py"}),
        (("A=(-a 1)", 'C=" \\', '"${A[@]}" \\', '"${A[@]}" \\', '"', f"{TRAIN} $C"),
         {"args": ["-a", "1", "-a", "1"]}),
        # A value that only bash knows is a variable, and one that each task sets is named.
        (("srun --container-image=/i/$(id -gn) python a.py",),
         {"image": "$ARGUMENTS_1", "setup": ['ARGUMENTS_1=/i/"$(id -gn)"']}),
        (("srun sh -c 'D=$(mktemp)", 'apptainer exec -B "$D" -e a.sif python a.py\'',),
         {"image": "a.sif", "container-options": []}),
        # The Python of torchrun's agent, of a program that only the job finds.
        (("ml pytorch", "cd $REPO", 'srun bash -c "torchrun `pwd`/a.py"'),
         {"script": "python", "no-python": True, "python": "python"}),
        # Variables of the shell that submits, and those that bash changes.
        (("export A=$A", 'export B="${B}"', TRAIN), {"env-names": ["A", "B"], "setup": None}),
        (("source a.sh", "export A=$A", TRAIN), {"setup": ["source a.sh", "export A=$A"]}),
        (("RANDOM=8", f"{TRAIN} $RANDOM"), {"setup": ["RANDOM=8", "ARGUMENTS_1=(${RANDOM})"]}),
        # In a task's text, variables that the batch script puts there, and those that bash reads.
        (("source a.sh", 'srun bash -c "torchrun a.py $OUT/a"'),
         {"expand": ["OUT", "ARGUMENTS_1[@]"], "node-setup": ['eval "ARGUMENTS_1=(${OUT}/a)"']}),
        (("export C=$(date)", "srun bash -c 'torchrun a.py $C'"),
         {"node-setup": ["ARGUMENTS_1=(${C})"]}),
        (('srun a.sif bash -lc "exec \'$V/bin/x\' train"',), {"script": "a.sif"}),
        (("srun bash -lc \"exec '$V/bin/x' train\"",),
         {"script": "env", "args": ["$V/bin/x", "train"]}),
        # An image's runscript that becomes the launcher.
        (("srun apptainer run -e a.sif bash -c 'torchrun a.py'",),
         {"container-tool": "apptainer-run", "script": "a.py"}),
        # The number of nodes, as scripts count it.
        (("#SBATCH -N 2", "n=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)",
          "n=${COUNT:-$n}", "if (( n == 0 )); then n=1; fi", "if [ $n -gt 1 ]; then",
          "srun torchrun --nnodes=$n a.py", "else", "torchrun b.py", "fi"), {"script": "a.py"}),
        (("#SBATCH -N 2", "h=(`scontrol show hostname \"$SLURM_NODELIST\"`)", "g=(0 1 2)",
          "if [ ${#h[@]} == 2 ]; then", "srun torchrun --nproc_per_node=${#g[@]} a.py", "fi"),
         {"script": "a.py", "nproc-per-node": 3}),
        # A trap for the end that names signals, too, before the function that it calls.
        (("trap 'end 1' INT EXIT TERM", "end() { cp a b; }", TRAIN),
         {"setup": ["trap 'end 1' EXIT", "end() { cp a b; }"]}),
        # What is temporary may go.
        (('rm -rf "$TMPDIR"/a /tmp/b', "trap 'rm -rf $MY_TMP' EXIT", TRAIN,
          "rm -rf $TRITON_CACHE_DIR"),
         {"setup": ['rm -rf "$TMPDIR"/a /tmp/b', "trap 'rm -rf $MY_TMP' EXIT"],
          "teardown": ["rm -rf $TRITON_CACHE_DIR"]}),
        (("rm -rf /tmp/../a", "rm -r /tmp/a $OUT", "rm -r my/runs", "rm -r *", TRAIN),
         {"setup": None}),
        (("rm -rf /dev/shm/a 2>/dev/null || true", TRAIN),
         {"setup": ["rm -rf /dev/shm/a 2>/dev/null || true"]}),
        # What is deleted before the launch is deleted once for a run.
        (("rm -rf $OUT/old 2>/dev/null", TRAIN),
         {"setup": [f"{ATTEMPTED} || {{ rm -rf $OUT/old 2>/dev/null; }}"]}),
        (("D=/data", "rm -rf $D/last", "D=/tmp/x", TRAIN),
         {"setup": ["D=/data", f"{ATTEMPTED} || {{ rm -rf $D/last; }}"]}),
        # A launch in a variable, to which a condition adds words.
        (("C=(torchrun a.py --a 1)", "C+=(--b)", '[ -e x ] && C+=(--x "$(cat x)")', "C+=(--c)",
          '"${C[@]}"'),
         {"args": ["--a", "1", "--b", "${ARGUMENTS_1[@]}"], "nproc-per-node": None,
          "setup": ["C=()", "C=()", '[ -e x ] && C+=(--x "$(cat x)")', "C+=(--c)",
                    'ARGUMENTS_1=("${C[@]:0}")']}),
        *(((f'C="{launch}torchrun a.py"', 'C="$C --a 1"', 'if [ -e x ]; then C="$C -x"; fi', call),
           {"script": "a.py", "args": ["--a", "1", "${ARGUMENTS_1[@]}"],
            "setup": ["C=", "C=", 'if [ -e x ]; then C="$C -x"; fi', line]})
          for launch, call, line in (
              ("", "srun $C", "ARGUMENTS_1=(${C-})"),
              ("srun ", "eval $C", 'eval "ARGUMENTS_1=(${C-})"'),
              ("", 'eval "$C"', 'eval "ARGUMENTS_1=(${C-})"'))),
        (("C='torchrun a.py'", "if [ -e x ]; then C+=' -x'; fi", 'srun bash -c "$C"'),
         {"setup": ["C=", "if [ -e x ]; then C+=' -x'; fi", 'VALUE_1="${C-}"'],
          "node-setup": ['eval "ARGUMENTS_1=(${VALUE_1})"'], "args": ["${ARGUMENTS_1[@]}"]}),
        (("export C='torchrun a.py'", 'if [ -e x ]; then C="$C -x"; fi', "srun $C"),
         {"script": "a.py", "args": ["${ARGUMENTS_1[@]}"], "env": {"C": ""}}),
        # Nor where the launch is set anew, or asked, or gets words with quotes, or half a word.
        (("C=(torchrun a.py)", "if [ -e x ]; then C=(torchrun b.py); fi", '"${C[@]}"'),
         {"script": None}),
        *((("C='torchrun a.py -b'", line, 'eval "$C"'), {"script": None})
          for line in ('if [[ $C == *b* ]]; then C="$C -x"; fi', "[ -e x ] && C+=',c'",
                       '[ -e x ] && C="$C > log"',
                       'if [ -e x ]; then unset C; C+=" -x"; fi')),
        # Loops over the script's arguments, of which there are none.
        (("E=''", 'while [[ $# -gt 0 ]]; do case $1 in -x) E="-x"; shift;; esac; done',
          'for i in "$@"; do echo "$i"; done', f"{TRAIN} $E"), {"args": None, "setup": None}),
        # What a file that is sourced may use stays before it.
        (("A=/a", "B=$(x)", "M=1", ". ./own.sh", "C=3", "srun torchrun a.py"),
         {"setup": ["A=/a", "B=$(x)", "M=1", ". ./own.sh"]}),
        (("A=/a", "source venv/bin/activate", "srun torchrun a.py"),
         {"setup": ["source venv/bin/activate"]}),
        # A single quote within double quotes is a letter.
        (("D=${D:-a}", "X=$(echo \"print('$D')\" | python)", f"{TRAIN} $X"),
         {"setup": ["D=${D:-a}", "X=$(echo \"print('$D')\" | python)", "ARGUMENTS_1=(${X})"]}),
        # A default that is empty is no demand on the shell that submits.
        (('X="${X:-}"', '[ -n "$X" ] && E="-x $X"', f"{TRAIN} $E"),
         {"setup": ['X="${X:-}"', '[ -n "$X" ] && E="-x $X"', "ARGUMENTS_1=(${E})"],
          "env-names": None}),
        # A program that the job itself makes is none of now.
        *(((line, "srun torchrun a.py"),
           {"script": "python", "no-python": True, "args": ["a.py"], "setup": [line]})
          for line in ("cp src/a.py a.py", "cp src/a.py .", "jupyter nbconvert --to script a.ipynb",
                       "sed -i 's/x/y/' a.py", "cat head.py tail.py > ./a.py")),
        *(((line, "srun torchrun a.py"), {"script": "a.py", "setup": [line]})
          for line in ("cp a.py out/a.py", "cp a.py $OUT", "sed 's/x/y/' a.py > b.py")),
        # Numbers of the script's tasks, where the job has other ones.
        (("#SBATCH --ntasks-per-node=2 -c 3", "X=$(x ${SLURM_CPUS_PER_TASK:-1} $SLURM_NTASKS)",
          "srun --ntasks-per-node=1 torchrun a.py -t $SLURM_CPUS_PER_TASK $X"),
         {"setup": ["X=$(x 3 4)", "ARGUMENTS_1=(${X})"],
          "args": ["-t", "3", "${ARGUMENTS_1[@]}"]}),
        (("#SBATCH --gpus-per-task=2", "srun torchrun --nproc-per-node=$SLURM_GPUS_PER_TASK a.py"),
         {"nproc-per-node": None, "gpus-per-node": "2"}),
        (("#SBATCH --gpus-per-node=4", "IFS=',' read -ra D <<< \"$CUDA_VISIBLE_DEVICES\"",
          "export CUDA_VISIBLE_DEVICES=0", "torchrun --nproc-per-node ${#D[@]} a.py"),
         {"nproc-per-node": None}),
        (("#SBATCH --ntasks=8", "srun -n 2 bash -c 'python a.py -n $SLURM_NTASKS'"),
         {"args": ["-n", "$SLURM_NTASKS"]}),
        (("#SBATCH --ntasks-per-node=4", "awk '{print $SLURM_NTASKS}' f", "export SLURM_NPROCS=2",
          "srun -n2 torchrun a.py $SLURM_NPROCS"), {"setup": ["awk '{print $SLURM_NTASKS}' f"]}),
        # Launchers by their places.
        (("srun python `which torchrun` --nproc-per-node=2 a.py -b",),
         {"script": "a.py", "args": ["-b"], "nproc-per-node": 2}),
        (("srun python /opt/bin/accelerate launch --mixed_precision bf16 a.py",),
         {"script": "a.py", "env": {"ACCELERATE_MIXED_PRECISION": "bf16"}}),
        (("deepspeed --include localhost:0,1,2 --master_port 1 a.py",),
         {"script": "a.py", "nproc-per-node": 3}),
        (("export FSDP_USE_ORIG_PARAMS=false",  # which the launcher replaces
          "accelerate launch --use_fsdp --fsdp_sync_module_states false a.py"),
         {"env": {"ACCELERATE_USE_FSDP": "true", "FSDP_SYNC_MODULE_STATES": "false",
                  "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
                  "FSDP_MIN_NUM_PARAMS": "100000000"}}),
        # The first node's address, asked for by ssh, is hpc-ddp's in a worker.
        (("ips=$(ssh \"$first\" hostname -I)", 'read -ra arr <<< "$ips"', "MASTER_ADDR=${arr[0]}",
          'echo "at $MASTER_ADDR"', f"{TRAIN} --no-b --master-addr=$MASTER_ADDR --x 1"),
         {"args": ["--no-b", "--master-addr=$MASTER_ADDR", "--x", "1"], "expand": ["MASTER_ADDR"],
          "setup": None}),
        # Neither the option before a lost argument that has one, nor a file that is not written.
        (("ip=$(ssh a x)", f"{TRAIN} --no-b --head=$ip --c 2"), {"args": ["--no-b", "--c", "2"]}),
        (("set -e", "ssh a hostname > hosts.$SLURM_JOB_ID", "cat hosts.$SLURM_JOB_ID", TRAIN),
         {"setup": ["set -e"]}),
        (("exit_after=30", f"{TRAIN} --exit $exit_after"), {"args": ["--exit", "30"]}),
        # A text that a container runs is in the container, and plain Python there a program.
        (("#SBATCH -N 1", 'singularity exec a.sif bash -c "', "source /x/env.sh",
          'python a.py || exit"'),
         {"worker-setup": ["source /x/env.sh"], "setup": None, "script": "a.py", "image": "a.sif"}),
        (('bash -c "python a.py || exit"',), {"script": "a.py"}),
        (("s=${s:-x$((($seed + 1) % $n))}", f"{TRAIN} $s"), {"script": "train.py"}),
        (("srun python -m torchrun --nproc-per-node 3 a.py",), {"nproc-per-node": 3}),
        (("D=/tmp/$USER", "trap 'rm -rf \"$D\"' EXIT", TRAIN),
         {"setup": ["D=/tmp/$USER", "trap 'rm -rf \"$D\"' EXIT"]}),
        (("#SBATCH --gpus-per-node=4", "#SBATCH --gres=gpumem:80g", "srun torchrun a.py"),
         {"gpus-per-node": "4", "sbatch": ["--gres=gpumem:80g"]}),
        # Blanks before a word are no part of it.
        (("eval $(x)", 'R="singularity exec \\', "    $P/a.sif", '"', "srun $R torchrun a.py"),
         {"image": "$P/a.sif"}),
        (("#SBATCH -J a/b_%j", TRAIN), {"job-name": "ab_j"}),
        ((f"{TRAIN} --llm_pad_token pad --eos-token end",), {"env-names": None}),
        # A port of hpc-ddp's that a line of each task prints.
        (("export MASTER_PORT=29500", "srun bash -c 'P=$MASTER_PORT; echo $P > p; torchrun a.py'"),
         {"env": None, "setup": ["export MASTER_PORT=29500"]}),
        ((f"{TRAIN} --data /scratch/hf_v5_token_llama_2_1024",), {"env-names": None}),
        # The words of more public scripts: of Python, of container tools, and of the rank's number.
        (("srun python -um pkg.run --a 1",),
         {"script": "pkg.run", "module": True, "args": ["--a", "1"]}),
        (('P=$(find_python)', '"$P" -m torch.distributed.run --nproc_per_node=2 a.py'),
         {"script": "a.py", "nproc-per-node": 2, "python": "$P", "expand": ["P"]}),
        (("if [ -e x ]; then C=apptainer; else C=singularity; fi",
          "$C exec --nv --bind /d:/d a.sif python a.py"),
         {"script": "a.py", "image": "a.sif", "container-tool": None,
          "container-options": ["--nv", "--bind", "/d:/d"]}),
        (("stdbuf -oL srun python a.py",), {"script": "a.py"}),
        (("#SBATCH --gpus-per-node=4", "deepspeed --no_local_rank --num_gpus=4 a.py -b",),
         {"script": "a.py", "args": ["-b"]}),
        (("N=$(expr $SLURM_NNODES \\* $SLURM_GPUS_PER_NODE)",
          "srun accelerate launch --num_processes $N a.py"),
         {"script": "a.py", "nproc-per-node": None}),
        (("H=hosts.$SLURM_JOB_ID", "for n in $(scontrol show hostnames $SLURM_JOB_NODELIST); do",
          "  ssh $n hostname", "done > $H", "cat $H", "mpirun -np 2 --hostfile $H python a.py"),
         {"script": "a.py", "setup": None}),
        (("#SBATCH -N 1", "if [ ! -d venv ]; then srun -n1 bash -c 'venv/bin/pip install x'; fi",
          "srun torchrun a.py"), {"script": "a.py"}),
        (("PIDS=()", "srun python a.py &", "PIDS+=($!)", 'for p in "${PIDS[@]}"; do wait $p; done'),
         {"script": "a.py", "teardown": None}),
        (("trap 'E=$?; echo \"line $LINENO: $E\" >&2; exit $E' ERR",
          "trap 'echo ended; exit 130' INT", "srun python a.py"), {"script": "a.py"}),
        (("LR=1", 'while getopts "l:" o; do LR=$OPTARG; done', "srun python a.py --lr $LR"),
         {"script": "a.py", "args": ["--lr", "1"]}),
        (('echo "sbatch job at $(date)"', "srun python a.py"),
         {"setup": ['echo "sbatch job at $(date)"']}),
        (("srun python download.py", "srun python train.py"),
         {"script": "train.py", "setup": ["srun python download.py"]}),
        # Of the ninth sample.
        (("#SBATCH --time=1-", "srun python a.py"), {"time": "1-"}),
        (("source env.sh", "MODEL_CACHE_KEY=Qwen_Qwen2.5-32B", "export HF_HOME=/x/$MODEL_CACHE_KEY",
          "srun python a.py"),
         {"env-names": None}),
        (('D="~/out/x"', "rm -rf $D", "srun python a.py"),
         {"setup": ['D="~/out/x"', f"{ATTEMPTED} || {{ rm -rf $D; }}"]}),
        (("if which sbatch > /dev/null; then export A=3; fi", "srun python a.py"),
         {"setup": ["if which sbatch > /dev/null; then export A=3; fi"]}),
        (("mkdir -p results", "cd /elsewhere", "srun python a.py"),
         {"chdir": None, "setup": ["mkdir -p results", "cd /elsewhere"]}),
        # Long texts that nearly fit a pattern.
        (("trap 'echo a", *["echo b"] * 40, "rm x' INT", "srun python a.py"), {"script": "a.py"}),
        (("C='torchrun a.py'", f"[ -e x ] && C=\"$C {'--x $(echo y) ' * 40}> z\"", "srun $C"),
         {"script": "env"}),
        # A secret's value stands nowhere, also not within other words.
        (("MY_API_KEY=zq81kfp0aa73xd", "export WHO=/x/$MY_API_KEY",
          "srun python a.py --key $MY_API_KEY --k2 a/$MY_API_KEY"),
         {"args": ["--key", "$MY_API_KEY", "--k2", "a/$MY_API_KEY"], "env-names": ["MY_API_KEY"],
          "env": None, "setup": ["export WHO=/x/$MY_API_KEY"]}),
        (("source env.sh", "export MY_PASSWORD=${MY_PASSWORD:-drowssap}", "srun python a.py"),
         {"env-names": ["MY_PASSWORD"], "setup": ["source env.sh"]}),
        # A configuration that the script writes itself, and changes behind the launch.
        (("#SBATCH --gpus-per-node=4", "C=$SCRATCH/a.yaml", "cat > $C <<E", "fp16: true",
          "machine_rank: $SLURM_PROCID", "num_processes: $((SLURM_NNODES * 2))",
          "num_machines: $SLURM_NNODES", "E", "echo 'gradient_clipping: 2' >> ${C}",
          "srun accelerate launch --config_file $C a.py",
          "echo > $C"),
         {"nproc-per-node": 2, "env": {"ACCELERATE_MIXED_PRECISION": "fp16",
                                       "ACCELERATE_GRADIENT_CLIPPING": "2"}}),
        (("srun bash -c 'echo \"{\\\"mixed_precision\\\": \\\"bf16\\\"}\" | tee /tmp/a.json",
          "accelerate launch --config_file /tmp/a.json a.py'"),
         {"env": {"ACCELERATE_MIXED_PRECISION": "bf16"}}),
        # A part of a value that follows from the directives.
        (("#SBATCH --gpus-per-node=a100:4", "N=$((${SLURM_GPUS_PER_NODE#*:} / 2))",
          "srun bash -c \"torchrun --nproc_per_node=$N a.py\""), {"nproc-per-node": 2}),
        (("G=gpu:2", "srun torchrun --nproc_per_node=${G: -1} a.py"), {"nproc-per-node": 2}),
        # Of torchrun's variables those are a user's that no worker has from it.
        (("export TORCHELASTIC_ENABLE_FILE_TIMER=1", "export TORCHELASTIC_RUN_ID=a", TRAIN),
         {"env": {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}}),
        ((f"TORCHELASTIC_TIMEOUT=120 {TRAIN}",), {"env": {"TORCHELASTIC_TIMEOUT": "120"}}),
        (("srun accelerate launch --fp16 a.py b",),
         {"script": "a.py", "env": {"ACCELERATE_MIXED_PRECISION": "fp16"}}),
        # No arguments are none, and a check of each node is no training.
        ((f"{TRAIN} \"$@\" -a",), {"args": ["-a"]}),
        (('C="python a.py $@ -a"', 'srun bash -c "$C"'), {"args": ["-a"]}),
        (("for h in $(x); do srun -N1 -n1 -w $h ./c.sh & done", "wait",
          "for t in a b; do python $t.py; done"), {"script": None, "teardown": None}),
    ],
)  # fmt: skip
def test_words_of_real_scripts(lines: tuple[str, ...], expected: dict[str, Any]) -> None:
    result = of_text(*lines).settings()
    assert {key: result.get(key) for key in expected} == expected


@pytest.mark.parametrize("options", ["-G a100:2", "--gpus=a100:2 -n 8"])
def test_gpus_of_a_script_without_a_number_of_nodes(options: str) -> None:
    text = f"#SBATCH {options}\nsrun torchrun --nproc-per-node=2 a.py\n"
    result = import_script(text, Path("/"), Path("/")).settings()
    assert (result["gpus-per-node"], result["nodes"]) == ("a100:2", 1)


@pytest.mark.parametrize(
    ("lines", "line", "group", "reason"),
    [
        (("srun singularity run a.sif train.py",), 3, LOST, "runscript"),
        (("srun shifter python train.py",), 3, LOST, "image is not named"),
        (("N=$(date)", "srun -n $N python train.py"), 4, LOST, "srun --ntasks: only the job knows"),
        (
            ("f() { echo $1 | tee a; srun torchrun a.py; }", "f b"),
            3,
            LOST,
            "arguments of its function",
        ),
        (('srun -N1 bash -c "make; python a.py"', TRAIN), 3, TAKEN, "setup"),
        (
            ("srun -N1 -n1 -w a python train.py",),
            3,
            LOST,
            "1 of 2 nodes: submit it as a job of its",
        ),
        (("eval \"srun -N1 bash -c 'python a.py'\"", "wait", "x"), 4, OURS, "hpc-ddp waits"),
        (("eval \"srun -N1 bash -c 'python a.py'\"", "wait", "x"), 5, LOST, "behind a launch"),
        (("export A=<yours>", TRAIN), 4, TAKEN, "the launch"),
        (("srun --container-image=<image> \\", "python a.py"), 3, LOST, "write it into image"),
        (
            ("srun --environment=your_env python a.py",),
            3,
            LOST,
            "a value of yours: write it into srun",
        ),
        (("export http_proxy=your_proxy", TRAIN), 3, LOST, "a placeholder"),
        (("ssh a ls", TRAIN), 3, LOST, "it runs something on other hosts"),
        (("A=$(ssh a ls)", f"X=$A {TRAIN}"), 4, LOST, "it needs A, of line 3"),
        (
            ("srun -A a --mpi=b torchrun --nnodes 2 a.py",),
            3,
            TAKEN,
            "the launch; hpc-ddp sets srun --account, torchrun --nnodes, srun --mpi",
        ),
        (("#SBATCH --comment='{\"a\": 1}'", TRAIN), 3, TAKEN, "--comment"),
        (("#SBATCH -A changeme@gpu", TRAIN), 3, LOST, "is a placeholder"),
        (("go torchrun a.py", TRAIN), 3, LOST, "it may start a training"),
        (("go srun python a.py",), 3, LOST, "it may be the launch"),
        (("true", "exit 0"), 4, LOST, "here the job script ends"),
        (("P=$(hostname)", "echo $P", TRAIN), 4, OURS, "a variable that is left out"),
        (("N=$(ls a | wc -l)", "echo $N", TRAIN), 4, TAKEN, "setup"),
        (('F=""', "f() { F=x; }", "f", 'if [ -n "$F" ]; then echo; fi', TRAIN), 6, TAKEN, "setup"),
        (
            ("P=$(date)", 'srun sh -c "', "export MASTER_PORT=1", 'python train.py --p $(id)"'),
            *(5, OURS, "workers have hpc-ddp's MASTER_PORT"),
        ),
        (
            ("srun sh -c 'cp a b; apptainer exec a.sif python a.py'",),
            *(3, LOST, "before it enters the container"),
        ),
        (('O="a/$(date +%s)"', 'echo "$O"', TRAIN, "cp a $O"), 4, TAKEN, "setup"),
        ((f"{TRAIN} &", "while ! curl a; do sleep 1; done", "wait"), 4, LOST, "beside the launch"),
        ((f"{TRAIN} &", "echo a", "wait", "cp a b"), 6, TAKEN, "teardown"),
        (("srun python3 <<'P'", "print(1)", "P", "echo a"), 6, LOST, "behind a launch"),
        (("srun -n 5 python train.py",), 3, LOST, "5 tasks on 2 nodes"),
        (("#SBATCH -n 3", TRAIN), 3, LOST, "3 tasks on 2 nodes"),
        (("#SBATCH -n 3", "srun --ntasks-per-node=1 python a.py"), 3, OURS, "tasks follow"),
        (("uv run torchrun a.py",), 3, LOST, "uv before the launch"),
        (("nice -n 9 srun torchrun a.py",), 3, LOST, "nice before the launch"),
        (("timeout 9h srun torchrun a.py",), 3, TAKEN, "hpc-ddp sets timeout: --time"),
        (("<<end", "sbatch a.sh", "end", TRAIN), 4, OURS, "a comment"),
        (("top > a &", "P=$!", TRAIN, "kill $P 2>/dev/null"), 6, OURS, "the end of the job"),
        (("top > a &", "P=$!", TRAIN, "kill $P $Q"), 6, LOST, "it ends something"),
        (("top > a &", "P=$!", "kill $P", TRAIN), 5, LOST, "it ends something"),
        ((f"{TRAIN} &", "P=$!", "kill $P"), 5, LOST, "it ends something"),
        (("trap 'echo a; kill -15 \"$P\"; wait $P' INT", f"{TRAIN} &", "P=$!"), 3, OURS, "notices"),
        (
            (
                "s() { kill -s TERM ${P} 2>/dev/null || true; exit $?; }",
                "trap -- s USR1 EXIT",
                f"{TRAIN} &",
                'P="$!"',
            ),
            4,
            OURS,
            "notices reach",
        ),
        (('trap "trap - TERM && kill -- -$$" TERM EXIT', TRAIN), 3, OURS, "notices reach"),
        (("trap 'rc=$?; kill $(jobs -p); pkill -P $$; exit $rc' 15", TRAIN), 3, OURS, "notices"),
        (
            ("trap 'for p in \"${P[@]}\"; do kill $p; done' TERM", f"{TRAIN} &", "P+=($!)"),
            3,
            OURS,
            "notices reach",
        ),
        (
            ("#SBATCH --gpus-per-node=a:3", "srun torchrun -n ${SLURM_GPUS_PER_NODE#*:} a.py"),
            *(4, TAKEN, "the launch"),
        ),
        (
            ("#SBATCH --ntasks-per-node=3", "srun torchrun -n ${SLURM_TASKS_PER_NODE%%(*} a.py"),
            *(4, TAKEN, "the launch"),
        ),
        (
            ("#SBATCH --gres=gpu:a:3", "srun torchrun -n ${SLURM_GPUS_PER_NODE#*:} a.py"),
            *(4, LOST, "torchrun --n: only the job knows it"),
        ),
        # Lines in the quotes of bash -c.
        (("srun bash -c 'torchrun \\", " --rdzv_id=a \\", " train.py'"), 3, TAKEN, "the launch"),
        (("srun bash -c 'torchrun \\", " --rdzv_id=a \\", " a.py'"), 4, OURS, "torchrun --rdzv-id"),
        (("srun bash -c 'torchrun \\", " --rdzv_id=a \\", " train.py'"), 5, TAKEN, "the launch"),
        (("trap 'kill $P; cp a b' TERM", f"{TRAIN} &", "P=$!"), 3, LOST, "a trap"),
        (("trap 'kill $Q' TERM", f"{TRAIN} &", "P=$!"), 3, LOST, "a trap"),
        (("trap 'kill 77 $(cat pid)' TERM", TRAIN), 3, LOST, "a trap"),
        (("top > a &", "P=$!", "trap 'kill $P' EXIT", TRAIN), 5, TAKEN, "setup"),
        (("trap 'echo a; rm -r x' ERR", TRAIN), 3, LOST, "a trap"),
        (("trap 'echo a; $B' ERR", TRAIN), 3, LOST, "a trap"),
        (("trap 'echo `x`' ERR", TRAIN), 3, LOST, "a trap"),
        (("srun accelerate launch --dynamo_backend no -m a",), 3, TAKEN, "launch --dynamo-backend"),
        (("srun accelerate launch --dynamo_backend inductor a.py",), 3, LOST, "dynamo-backend"),
        (
            ("srun accelerate launch --deepspeed_multinode_launcher pdsh a.py",),
            3,
            TAKEN,
            "hpc-ddp sets launch --deepspeed-multinode-launcher",
        ),
        *(
            ((f"export {name}=1", TRAIN), 3, LOST, "would change hpc-ddp's step")
            for name in (
                "SLURM_LABELIO",
                "SLURM_MPI_TYPE",
                "SLURM_DISTRIBUTION",
                "SRUN_CPUS_PER_GPU",
                "SLURM_STEP_GRES",
                "SLURM_OVERCOMMIT",
                "SBATCH_PARTITION",
            )
        ),
        (("#SBATCH --get-user-env", TRAIN), 3, OURS, "come before a login shell's"),
        (("poetry run srun torchrun a.py",), 3, LOST, "poetry before the launch"),
        (("srun torchrun \\ # a", "train"), 3, LOST, "before a blank"),
        (("torchrun --nnodes 2 \\ ", "train"), 3, LOST, "before a blank"),
        *(
            ((TRAIN, text), 4, OURS, "requeued until it has finished")
            for text in (
                'trap \'echo "a"; sbatch "$0"\' USR1',
                'test -f x && sbatch "$0"',
                "STEP=2 sbatch $0",
                "/usr/bin/sbatch $0",
                'if sbatch "$0"; then echo; fi',
                'nohup sbatch "$0"',
                'until sbatch "$0"; do sleep 1; done',
                'echo "next: $(sbatch $0)"',
                "sbatch --dependency=afterany:$SLURM_JOB_ID $SCRIPT",
                'sbatch -d afterany:$SLURM_JOB_ID "$PWD/job.sh"',
                "bash -c 'sbatch job.sh'",
                "if [ -z $N ]; then sbatch $0; exit; fi",
                "sbatch $0 || exit 1",
            )
        ),
        *(
            ((text, TRAIN, "echo a"), 3, LOST, "submits another job")
            for text in (
                "sbatch --dependency=afterok:$SLURM_JOB_ID a.sh",
                "sbatch -p x a.sh 1",
                "J=$(sbatch --parsable a.sh)",
                "sbatch my-job.sh",
                "sbatch --dependency=afterany:$SLURM_JOB_ID $D/a.sh",
            )
        ),
        *(
            ((text, TRAIN), 3, LOST, "its exit guards the launch")
            for text in (
                'if [ -f a ]; then sbatch "$0"; else exit 1; fi',
                "[ -f a ] && sbatch job.sh || exit 0",
                "if [ -f a ]; then exit 0; else sbatch -d afterany:$SLURM_JOB_ID $0; fi",
            )
        ),
        (("D=/x", "cp a.sh $D/b.sh", "sbatch $D/b.sh", TRAIN), 5, LOST, "submits another job"),
        (("D=/x", "cp $0 $D/b.sh", "sbatch $D/b.sh", TRAIN), 5, OURS, "requeued until"),
        (("S=a.sh", "sbatch -d afterany:$SLURM_JOB_ID $S", TRAIN), 4, LOST, "another job"),
        (("#SBATCH -N 2 --gpus=3", TRAIN), 3, LOST, "3 GPUs on 2 nodes"),
        (("export SLURM_EXPORT_ENV=ALL", TRAIN), 3, OURS, "the step has"),
        (("A=$(x)", "B=c/$A", "A=2", 'srun bash -c "python a.py $B"'), 6, LOST, "set anew before"),
        (("X=1", f"(X=2; cd src; {TRAIN})", "cp a $X"), 5, LOST, "sets another X: teardown"),
        (("X=1", f"(X=2; cd src; {TRAIN})", "cp /a /b"), 5, TAKEN, "teardown"),
        (("sub() { sbatch $0; }", TRAIN, "sub"), 5, OURS, "requeued until it has finished"),
        (("sub() { sbatch $0; }", TRAIN, "if x; then sub; fi"), 5, OURS, "requeued until"),
        (("sub() { sbatch a.sh; }", TRAIN, "sub"), 5, LOST, "submits another job"),
        (("a() { rm -rf /x; }", "b() { a; }", TRAIN, "b"), 6, LOST, "it deletes"),
        (
            ("C=(torchrun a.py)", "[ -e x ] && C+=(-x)", 'log "${C[@]}"', '"${C[@]}"'),
            5,
            LOST,
            "it uses C, which the launch is made of",
        ),
        ((': "${C:?Set C=<path>}"', f"{TRAIN} $C"), 3, TAKEN, "setup"),
        (("export WANDB_API_KEY= <key>", TRAIN), 3, LOST, "behind a blank"),
        ((f"export WANDB_API_KEY= {'0a1b' * 10}", TRAIN), 3, LOST, "secret"),
        (("export A= B=1", TRAIN), 3, TAKEN, "env"),
        (("export MASTER_PORT=1", "bash -c 'nc n $MASTER_PORT'", TRAIN), 3, TAKEN, "setup"),
        (("export MASTER_PORT=1", "printenv MASTER_PORT > a", TRAIN), 3, TAKEN, "setup"),
        (("pkill -f old && rm -f /tmp/old.pid", TRAIN), 3, LOST, "it ends something"),
        (("until [ $# -gt 0 ]; do LR=2; set -- 1; done", f"{TRAIN} $LR"), 3, LOST, "arguments"),
        (("conda activate <my-env>", TRAIN), 3, LOST, "a placeholder: write your own"),
        (("#SBATCH -N 4", "srun -N 2-2 -n 8 python a.py"), 4, LOST, "a launch on 2 of 4 nodes"),
        (("deepspeed --include a@b a.py",), 3, LOST, "deepspeed --include: nodes = N"),
        (("say() { echo 'sbatch a.sh'; }", TRAIN, "say"), 3, TAKEN, "setup"),
        (('J=$(sbatch --parsable "$0")', TRAIN), 3, OURS, ""),
        ((TRAIN, "for t in a b; do python -m train $t; done"), 4, LOST, "it may start a training"),
        ((TRAIN, "for t in a b; do python -m pip list; done"), 4, TAKEN, "teardown"),
    ],
)
def test_reasons_are_true(lines: tuple[str, ...], line: int, group: str, reason: str) -> None:
    conversion = of_text(*lines)
    assert conversion.group(line)[0] == group, conversion.group(line)
    assert reason in conversion.group(line)[1]


@pytest.mark.parametrize(
    "line",
    [
        "time srun --account=a --ntasks=4 --cpus-per-task=2 --mem=0 --mpi=pmi2 --label --unbuffered"
        " --export=ALL,NAME=1 --cpu-bind=none apptainer -q exec --nv --bind /b a.sif python"
        " -W ignore train.py --lr 1",
        "srun --nodes=2 --ntasks-per-node=1 --overlap --container-image=i --container-writable"
        " --mpi=none bash -lc 'torchrun --nnodes=2 --nproc-per-node=3 --rdzv-backend=c10d"
        " --max-restarts=1 --tee 3 --master-port 1 train.py --lr 1'",
        "A=1 mpirun --np 4 --map-by node --bind-to core --mca b c python train.py --lr 1",
        "srun torchrun \\\n --rdzv-backend=c10d --rdzv-endpoint=a --log-dir=b \\\n train.py --lr 1",
        "accelerate launch --num-machines 2 --mixed-precision bf16 --dynamo-backend no"
        " --config-file a.yaml train.py --lr 1",
    ],
)
def test_each_word_of_a_launch_is_written_or_named(line: str) -> None:
    """In the file, or in the report; not in the report's copies of the lines."""
    result = of_text(line)
    reasons = [reason for marks in result.marks.values() for _, reason in marks]
    text = " ".join([to_toml(result, ""), *reasons, *(note for _, note in result.notes)]).lower()
    renamed = {"export": "name", "container-image": "image", "config-file": "a.yaml", "lc": "-l"}
    for option in re.findall(r"^time|(?<=\s-)-?[\w-]+", line):
        name = renamed.get(option.strip("-"), option.strip("-").lower())
        assert name.replace("-", "_") in text.replace("-", "_"), f"{option}: {text}"


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (("A=${A:-x}", f"{TRAIN} $A"), "$A: taken as unset: if your shell has"),
        ((f"{TRAIN} $DATA",), "$DATA: not set in this shell: to be exported"),
        (
            ("source a.sh", f"{TRAIN} $DATA"),
            "$DATA: not set in this shell: to be exported before hpc-ddp submit, unless a",
        ),
        (('if [ -n "${B:-}" ]; then A=1; fi', TRAIN), "$B: unset in this shell; lines ask"),
        (("echo ${A:-x}", f"{TRAIN} ${{A:-x}}"), "$A: taken as unset: if your shell has"),
        (
            ("while read -r k v; do export $k=$v; done < a", f"{TRAIN} $DATA"),
            "$DATA: not set in this shell: to be exported before hpc-ddp submit, unless a",
        ),
        (("trap 'echo a' ERR", TRAIN), "the trap is for the lines of setup"),
        (("git pull --ff-only", TRAIN), "git pull changes the folder behind the copy"),
        (("rm -rf a/old", TRAIN), "deletes in the first attempt alone"),
        (("cp b/train.py .", TRAIN), "train.py is made by that line: the job runs it where it is"),
        (("#SBATCH -J a_%j", TRAIN), "--job-name=a_%j: job-name = 'a_j'"),
        (('A="${A:-1}"', "echo $A", TRAIN), "$A: taken as unset: if your shell has"),
        (("#SBATCH -N 1 --gres=gpu:2", "python a.py"), "plain Python: one process"),
        (
            ("#SBATCH --ntasks-per-node=2", "srun torchrun --standalone a.py"),
            "2 tasks on a node would each start",
        ),
        (("time srun torchrun train.py",), "time is left out: hpc-ddp status has"),
        (("srun bash -ec 'python train.py'",), "bash -e: left out"),
        (("srun apptainer -q exec a.sif python train.py",), "apptainer -q is left out"),
        (("srun --container-image=a python train.py",), "the container starts in the job's folder"),
        (("srun numactl -N 0 torchrun other.py",), "numactl starts a launcher of its own"),
        (("export PATH=$PATH:/x/bin", "srun torchrun a.py"), "PATH has /x/bin at its end: if"),
        (
            ("#SBATCH -o a.txt", "srun -o a.txt -e %N.err torchrun a.py"),
            "its output is in the run's log, not in %N.err: hpc-ddp logs",
        ),
        (
            ("srun --output=a/%N.out -e a/%N.out accelerate launch a.py",),
            "its output is in the run's log, not in a/%N.out: hpc-ddp logs",
        ),
        (
            ("srun --output b bash -c 'python a.py > c'",),
            "its output is in the run's log, not in c and b: hpc-ddp logs",
        ),
        (
            (
                "echo gradient_clipping: $CLIP > a.yaml",
                "accelerate launch --config_file a.yaml a.py",
            ),
            "not taken over: gradient_clipping of a.yaml: only the job knows ${CLIP}",
        ),
        (
            ("echo num_processes: $N > a.yaml", "srun accelerate launch --config_file a.yaml a.py"),
            "not taken over: num_processes of a.yaml: only the job knows ${N}",
        ),
        (("srun torchrun_jsc train.py",), "torchrun_jsc is taken to be torchrun"),
    ],
)
def test_notes(lines: tuple[str, ...], note: str) -> None:
    assert any(text.startswith(note) for _, text in of_text(*lines).notes)


MODULE = "srun bash -c 'cd sub && python -m pkg.train a'"
READ = ("read -r -d '' CMD <<EOF", "torchrun --nnodes=2 train.py \\$SLURM_NNODES", "EOF")


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        # A module behind the task's own cd is not looked for in the job's folder.
        ((MODULE,), {"script": "python", "no-python": True, "args": ["-m", "pkg.train", "a"]}),
        (("cd sub", "srun python -m pkg.train a"), {"script": "pkg.train", "module": True}),
        # A command in brackets that begins with arithmetic.
        (
            ('srun bash -c "torchrun --rdzv_conf=a=\\$(((SLURM_NODEID)) && echo 1) train.py b"',),
            {"script": "train.py", "args": ["b"]},
        ),
        (("srun torchrun train.py --n $(((SLURM_NNODES+1)*2))",), {"script": "train.py"}),
        (("#SBATCH --mail-user=", TRAIN), {"script": "train.py"}),
        (('srun python train.py a --b ${@:3} "${@:2}"',), {"args": ["a", "--b"]}),
        (
            ("#SBATCH --gpus-per-node=2", "srun apptainer exec --rocm i.sif python train.py"),
            {"container-options": ["--rocm"]},
        ),
        (
            ("#SBATCH --gpus-per-node=mi250:2", "srun apptainer exec --rocm i.sif python train.py"),
            {"container-options": None},
        ),
        ((*READ, 'srun bash -c "$CMD"'), {"script": "train.py", "args": ["$SLURM_NNODES"]}),
        (
            ("srun bash -lc 'source a/b; torchrun train.py'",),
            {"node-setup": [*LOGIN.split("; ", 1), "source a/b"]},
        ),
        (("export SLURM_CPU_BIND=cores", TRAIN), {"srun": ["--cpu-bind=cores"]}),
        (
            ("H=$(hostname)", "srun bash -c \"torchrun train.py '$H'i '$H'_r\""),
            {"args": ["${H}i", "${H}_r"], "expand": ["H"]},
        ),
        # Behind a child shell in another folder the script is where it was.
        (
            (f"(cd src; {TRAIN}; cp a b) | tee -a log", "mv log c"),
            {"chdir": "src", "teardown": ["cp a b", f"cd {HERE}", "mv log c"]},
        ),
        ((f"(cd src; {TRAIN})", "echo done"), {"chdir": "src", "teardown": ["echo done"]}),
        ((f"({TRAIN})", "mv log c"), {"teardown": ["mv log c"]}),
    ],
)
def test_nothing_of_these_is_lost(lines: tuple[str, ...], settings: dict[str, Any]) -> None:
    """As the tenth sample of public scripts has them."""
    result = of_text(*lines)
    assert {key: result.settings().get(key) for key in settings} == settings
    assert LOST not in {group for marks in result.marks.values() for group, _ in marks}


def test_a_function_with_a_launchers_name_is_no_launch() -> None:
    result = of_text("torchrun_mine() {", "  hostname", "}", "torchrun_mine train.py a")
    assert "script" not in result.settings()
    assert result.group(6)[0] == LOST


def test_a_first_line_without_its_sign_is_meant_as_one() -> None:
    result = import_script(f"!/bin/bash -l\n#SBATCH -N 2\n{TRAIN}\n", HERE, HERE)
    assert (result.settings()["nodes"], result.settings()["setup"]) == (2, [LOGIN])
    assert result.notes[0][0] == 1


@pytest.mark.parametrize(
    ("options", "lines"),
    [("-x", ["set -x"]), ("-l", [LOGIN]), ("--login", [LOGIN]), ("-le", [LOGIN, "set -e"])],
)
def test_options_of_the_shell_are_set_up_lines(options: str, lines: list[str]) -> None:
    result = import_script(f"#!/bin/bash {options}\n#SBATCH -N 2\n{TRAIN}\n", HERE, HERE).settings()
    assert result["setup"] == lines


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("sort.py --sort-key name", False),
        ("a.py --key 'json'", False),
        ("a.py --api-key abcdefgh", True),
        ("a.py --key 0123456789abcdef", True),
        ("A_KEY=secretsecretsecretsecret", True),
        ("echo 'sorted by key: name'", False),
        ('echo \'{"key": "json"}\' > a.json', False),
    ],
)
def test_a_key_of_a_table_is_no_secret(text: str, is_one: bool) -> None:
    assert looks_secret(text) is is_one
    assert is_secret("--api-key", "json")
    assert not is_secret("--data-key", "json")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ('curl -H "Authorization: Bearer abcdef012345" https://x', True),
        ("curl -H 'authorization: basic bWU6c2VjcmV0'", True),
        ('curl -H "Authorization: Bearer $TOKEN" https://x', False),
        ("mysql --password=abcdef012345 db", True),
        ("mysql --password abcdef012345 db", True),
        ("PGPASSWORD=abcdef012345 psql db", True),
        ("echo a basic training-run has begun", False),
        ('echo "machine a.org login me password abcdef012345" > ~/.netrc', True),
        ("cat > a.yaml <<EOF\napi_key: abcdef012345\nEOF", True),
        ('cat > a.yaml <<EOF\npassword: "${PASSWORD}"\nEOF', False),
        ('echo \'{"password": "abcdef012345"}\' > a.json', True),
        ("git clone https://x/y github_pat_11AAAAAAA0abcdefghij", True),
        ("glab auth --with glpat-abcdefgh0123456789", True),
        ("curl -d hi https://hooks.slack.com/services/T0/B0/abc", True),
        ("curl -d hi https://discord.com/api/webhooks/1/abc", True),
        ("mysql -uroot -pabcdef012345 -e 'select 1'", True),
        ('mysql -uroot -p"$PW" db', False),
        ("mkdir -p /tmp/mysql_data && cp -p abcdef x", False),
        ("sshpass -p abcdef012345 ssh x", True),
        ("curl -u me:abcdef012345 https://x/y", True),
        ("curl -u me:$PW https://x/y", False),
        ('docker login --password-stdin <<< "abcdef012345"', True),
        ('docker login --password-stdin <<< "$PW"', False),
        ('read -r TOKEN <<< "abcdef012345"', True),
        ('read -r NAME <<< "abcdef012345"', False),
    ],
)
def test_a_secret_is_known_in_headers_and_in_files(text: str, is_one: bool) -> None:
    assert looks_secret(text) is is_one


def test_without_a_number_of_nodes_all_tasks_are_on_one() -> None:
    text = f"#!/bin/bash\n#SBATCH --ntasks=8 --gpus-per-task=1\n{TRAIN}\n"
    result = import_script(text, HERE, HERE)
    assert result.settings()["gpus-per-node"] == "8"
    assert "nproc-per-node" not in result.settings()
    assert any("no number of nodes: 1 is taken" in text for _, text in result.notes)


def test_a_variable_that_adds_to_its_own_value_is_the_shells() -> None:
    assert any(
        note.startswith("$DATA: ") for _, note in of_text("export DATA=$DATA/a", TRAIN).notes
    )
    lines = ("export DATA=/a", "export DATA=$DATA/b", "export PATH=$PATH:/c", TRAIN)
    assert not any("your shell" in note for _, note in of_text(*lines).notes)


def test_a_variable_that_this_shell_has_is_passed_on() -> None:
    text = f"#!/bin/bash\n#SBATCH -N 2\n{TRAIN} $DATA $HOME ${{LR:-1}}\n"
    result = import_script(text, HERE, HERE, environ={"DATA": "/x", "HOME": "/home/me", "LR": "2"})
    assert result.settings()["env-names"] == ["DATA", "LR"]
    assert "ARGUMENTS_2=(${LR:-1})" in result.settings()["setup"]
    assert not any("$DATA" in note for _, note in result.notes)


def test_a_default_is_not_taken_where_this_shell_has_the_variable() -> None:
    text = f"#!/bin/bash\n#SBATCH -N 2\nS=${{S:-1}}\n{TRAIN} $S\n"
    assert import_script(text, HERE, HERE).settings()["args"] == ["1"]
    result = import_script(text, HERE, HERE, environ={"S": "7"})
    assert result.settings()["setup"] == ["export S=${S:-1}", "ARGUMENTS_1=(${S})"]
    assert result.settings()["env-names"] == ["S"]
    assert not [text for _, text in result.notes if "unset" in text]


def test_of_a_file_that_can_be_read_the_variables_stay(tmp_path: Path) -> None:
    (tmp_path / "own.sh").write_text(': "${A:?}"\n')
    text = f"#!/bin/bash\n#SBATCH -N 2\nA=/a\nB=/b\nsource own.sh\n{TRAIN}\n"
    setup = ["A=/a", "source own.sh"]
    assert import_script(text, tmp_path, tmp_path).settings()["setup"] == setup
    (tmp_path / "own.sh").write_text("source other.sh\n")
    setup = ["A=/a", "B=/b", "source own.sh"]
    assert import_script(text, tmp_path, tmp_path).settings()["setup"] == setup


def test_the_user_in_a_path_is_the_one_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")
    result = of_text("srun /homes/$(whoami)/env/bin/python train.py --user `id -un`").settings()
    assert result["python"] == "/homes/me/env/bin/python"
    assert (result["args"], result["expand"]) == (["--user", "$USER"], ["USER"])


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("srun -N $SLURM_NNODES -n $((16 * SLURM_NNODES)) python a.py", {"nproc-per-node": 16}),
        ("accelerate launch --num_processes $((SLURM_NNODES*8)) a.py", {"nproc-per-node": 8}),
        ("srun -N 2-2 -n 8 python a.py", {"nodes": 2, "nproc-per-node": 4}),
    ],
)
def test_numbers_without_one_of_nodes(launch: str, expected: dict[str, Any]) -> None:
    result = import_script(f"#!/bin/bash\n#SBATCH -t 5\n{launch}\n", HERE, HERE)
    assert result.settings() | expected == result.settings()
    assert result.group(3)[0] == TAKEN


def test_a_range_of_nodes_of_the_launch_is_no_difference() -> None:
    result = import_script("#!/bin/bash\nsrun -N 2-4 python a.py\n", HERE, HERE)
    assert result.group(2) == (LOST, 'srun --nodes: a range: nodes = "2-4"')


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a '$B' \"x '$C' y\" $(echo '$D' \"'$E'\") `echo '$F'`", ["C", "E"]),
        ("case x in a) echo '$G';; esac", []),
        ("\"it's $H\" 'z'", ["H"]),
        ('echo "Job # $A"\nexport X="--o=\'$FOO\'"', ["A", "FOO"]),
        ("x # it's $I\ny $J", ["J"]),
        ("cat <<EOF > f\n# it's $K\n'$L'\nEOF\necho '$M' $N", ["K", "L", "N"]),
        ("cat <<-'EOF' > f\n$K\n\tEOF\necho $N # $O", ["N"]),
    ],
)
def test_single_quotes_of_bash(code: str, expected: list[str]) -> None:
    assert re.findall(r"\$(\w+)", without_quoted_texts(code)) == expected


def test_a_comment_may_begin_with_blanks() -> None:
    text = "#!/bin/bash\n  # a comment\n\n#SBATCH -J mine\n"
    assert import_script(f"{text}{TRAIN}\n", HERE, HERE).settings()["job-name"] == "mine"


def test_an_output_with_the_jobs_name_has_the_scripts() -> None:
    assert of_text("#SBATCH -o %x-%t.out", TRAIN).settings()["job-name"] == "job.sh"
    assert of_text("#SBATCH -o %x.out -J a", TRAIN).settings()["job-name"] == "a"


@pytest.mark.parametrize(
    ("lines", "group", "reason"),
    [
        # What asks how the launch ended, and only prints that or ends the script.
        ((TRAIN, "if [ $? -eq 0 ]; then echo a; else echo b; exit 1; fi"), OURS, "ended"),
        ((TRAIN, "if [[ ${PIPESTATUS[0]} != 0 ]]; then exit 1; fi"), OURS, "ended"),
        ((TRAIN, "A=$?", 'echo "a $A"', "exit $A"), OURS, "ended"),
        ((TRAIN, "cp a b", "if [ $? -eq 0 ]; then cp b c; fi"), TAKEN, "teardown"),
        ((f"{TRAIN} || {{", "echo a", "exit 1", "}"), OURS, "ended"),
        ((f"if ! {TRAIN}; then", "echo a", "exit 1", "fi"), OURS, "ended"),
        ((f"if true; then {TRAIN}; fi", "cp a b"), TAKEN, "teardown"),
    ],
)
def test_what_asks_how_the_launch_ended(lines: tuple[str, ...], group: str, reason: str) -> None:
    conversion = of_text(*lines)
    of_last = conversion.group(2 + len(lines) - lines[-1:].count("fi") - lines[-1:].count("}"))
    assert (of_last[0], reason in of_last[1]) == (group, True), of_last
    assert group == LOST or conversion.settings()["script"] == "train.py"


CONTROLS = [*map(chr, range(1, 32)), "\x7f"]


@pytest.mark.parametrize("text", ["a{}b", "a\n{}b", "'''\n{}", "{}\r\n", "a'\n{}''"])
def test_each_text_is_read_from_the_project_file_as_it_was(text: str) -> None:
    for sign in CONTROLS:
        conversion = Conversion(values={"job-name": (text.format(sign), 1)})
        conversion.env["A"] = text.format(sign), 2
        conversion.append("setup", text.format(sign), 3)
        settings = tomllib.loads(to_toml(conversion, f"job{sign}.sh"))
        texts = settings["job-name"], settings["env"]["A"], *settings["setup"]
        assert {*texts} == {text.format(sign)}


def test_a_comment_of_the_project_file_is_one_line() -> None:
    assert not tomllib.loads("\n".join(to_comment(f"a{sign}b = 1") for sign in CONTROLS))


@pytest.mark.parametrize(
    "command",
    ["python prep.py --exit-early", 'python prep.py --sep ";"', "echo y | ./fetch_data.sh"],
)
def test_a_command_in_front_of_the_launch_ends_the_job_where_it_fails(command: str) -> None:
    (setup,) = of_text(f"{command} && {TRAIN}").lists["setup"]
    assert setup[0] == f"{command} || exit"


@pytest.mark.parametrize(
    "line",
    [
        "mpirun -host a bash -c 'stdbuf -o0 nvidia-smi dmon > x' &",
        "bash -c 'python monitor.py' &",
        "srun --overlap bash -c 'python monitor.py' &",
        "srun -n1 bash -c 'python check.py' || { echo bad; exit 1; }",
        "srun bash -c 'python prep.py' > log",
        "srun -n1 bash -c 'python prep.py' && touch done",
        "srun -n1 bash -c 'python prep.py' |& tee log",
        "srun bash -c 'timeout 5 a' && srun bash -c 'timeout 5 b'",
        "cd x && srun bash -c 'timeout 5 a' > log &",
        "if ! srun -n1 bash -c 'python check.py'; then echo bad; exit 1; fi",
        "if ! singularity exec i.sif bash -c 'python check.py'; then exit 1; fi",
        "srun -N1 -n1 singularity exec i.sif bash -c 'cd d && python prep.py'",
        "(cd a && srun bash -c 'timeout 5 a') > log 2>&1 &",
        "{ srun bash -c 'timeout 5 a'; srun bash -c 'timeout 5 b'; } &",
    ],
)
def test_a_step_before_the_launch_is_a_whole_line(line: str) -> None:
    """Without its ``&`` the set-up lines waited for it for ever."""
    launch = "srun torchrun --nnodes=2 --nproc_per_node=2 train.py"
    assert of_text(line, launch).lists["setup"] == [(line, 3)]


def test_a_step_of_a_function_in_the_background_stays_its_call() -> None:
    function, launch = "f() { srun bash -c 'timeout 5 a' > log; date; }", "srun torchrun a.py"
    assert of_text(function, "f &", launch).lists["setup"] == [(function, 3), ("f &", 4)]


def test_a_function_that_prepares_the_training_stays_its_call() -> None:
    """Its ``return`` ends the function, and not the job."""
    function = "prep() { [ -e d ] && return 0; python prepare.py; }"
    assert of_text(function, "prep", TRAIN).lists["setup"] == [(function, 3), ("prep", 4)]


def test_a_list_in_the_background_moves_no_other_line() -> None:
    settings = of_text("cd x && srun bash -c 'timeout 5 a' &", "srun torchrun a.py").settings()
    assert settings["script"] == "a.py"


def test_what_follows_a_step_behind_the_launch_stays_with_it() -> None:
    settings = of_text("srun python a.py && srun python eval.py && touch done").settings()
    assert "srun python eval.py && touch done" in settings["teardown"][0]


def test_a_step_in_the_training_function_gets_the_words_of_the_call() -> None:
    lines = "run() {", 'srun -n1 bash -c "python prep.py $1" &', "srun torchrun a.py", "}", "run x"
    assert of_text(*lines).lists["setup"] == [("srun -n1 bash -c 'python prep.py x' &", 4)]
