"""Words of 194 public job scripts (jobspec-database), and what they have to become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script

HERE = Path("/home/me/project")
NODE = "#SBATCH --nodes=1 --gpus-per-node=2"
TRAIN = "srun python train.py"
OF_TASK = "srun bash -c '{}python train.py'"
IN_IMAGE = "singularity exec --nv app.img python"


def of_text(*lines: str) -> Conversion:
    """Return the conversion of a script of one node, which has `lines` from the third line on."""
    return import_script("\n".join(("#!/bin/bash", NODE, *lines)) + "\n", HERE, HERE, name="job.sh")


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        # A word of a task that the batch script's variables make up is filled in there.
        (("B=$(cat bs)", 'export CMD="train.py --bs $B"', "srun bash -c 'torchrun $CMD'"),
         {"expand": ["B", "ARGUMENTS_1[@]"], "node-setup": ["ARGUMENTS_1=(${B})"]}),
        # What stands before && and the launch has to succeed.
        (("source a/activate && python train.py",), {"setup": ["source a/activate || exit"]}),
        (("echo a && module load b && srun python train.py",),
         {"setup": ["echo a", "module load b || exit"]}),
        (("cd sub && nvidia-smi && srun python train.py",), 
         {"chdir": "sub", "setup": ["nvidia-smi"]}),
        ((OF_TASK.format("python prep.py && "),), {"worker-setup": ["python prep.py || exit"]}),
        # The commands in a variable are no words of one command.
        (('P="a; b"', '[ -f y ] && P="$P; c"', 'eval "$P; python train.py"'),
         {"setup": ['P="a; b"', '[ -f y ] && P="$P; c"', 'eval "${P}"']}),
        # srun shows its tasks other GPUs than the batch script.
        ((OF_TASK.format("CUDA_VISIBLE_DEVICES=0 "),),
         {"env": None, "worker-setup": ["export CUDA_VISIBLE_DEVICES=0"]}),
        (("srun env CUDA_VISIBLE_DEVICES=0 torchrun train.py",),
         {"env": None, "node-setup": ["export CUDA_VISIBLE_DEVICES=0"]}),
        # Tokens of a vocabulary.
        ((rf"{TRAIN} --mask '<mask>' --end \</s\>",),
         {"args": ["--mask", "<mask>", "--end", "</s>"]}),
        # Folders are made anew by the first attempt alone.
        (("if [ -d out ]; then", "  rm out/*", "else mkdir out; fi", TRAIN),
         {"setup": ["<once> || { if [ -d out ]; then\n  rm out/*\nelse mkdir out; fi; }"]}),
        (('if [ ! -d "$D"/a ]; then', '  rm -rf "$D"/a', "  mkdir $D/a", "fi", TRAIN),
         {"setup": ['if [ ! -d "$D"/a ]; then\n  rm -rf "$D"/a\n  mkdir $D/a\nfi']}),
        (("if [ ! -d $D ]; then", "  unzip d.zip -d $D", '  rm -rf "$D/x"', "fi", TRAIN),
         {"setup": ['if [ ! -d $D ]; then\n  unzip d.zip -d $D\n  rm -rf "$D/x"\nfi']}),
        (("rm -rf bert_out*", TRAIN), {"setup": ["<once> || { rm -rf bert_out*; }"]}),
        # A chain has no array; the first node's name is no other node's.
        (("#SBATCH --array=1-9%1", f"{TRAIN} --id $SLURM_ARRAY_JOB_ID"),
         {"args": ["--id", "${RUN_NAME}"], "expand": ["RUN_NAME"],
          "setup": ['export RUN_NAME="${HPC_DDP_RUN##*/}"']}),
        ((f"{TRAIN} --at $HOSTNAME",),
         {"args": ["--at", "${ARGUMENTS_1[@]}"], "setup": ["ARGUMENTS_1=(${HOSTNAME})"]}),
        (("#SBATCH --cpus-per-gpu=8 --ntasks-per-node=4", "torchrun --nproc_per_node=2 a.py"),
         {"cpus-per-node": None, "sbatch": ["--cpus-per-gpu=8"]}),
        # Words behind a redirection; a requeue beside other commands, and alone.
        (("torchrun a.py 2>&1 --lr 3 | tee log",), {"args": ["--lr", "3"]}),
        (("torchrun a.py > log \\", "  2>&1 \\", "  --lr 3"), {"args": ["--lr", "3"]}),
        (("mkdir -p out && sbatch -d afterany:$SLURM_JOB_ID $0", TRAIN),
         {"setup": ["mkdir -p out && :"]}),
        (("if ! torchrun a.py; then echo x; scontrol requeue $SLURM_JOB_ID; fi",),
         {"script": "a.py", "teardown": None}),
        (("N=1", 'let "N++"', "torchrun a.py --n ${N}"),
         {"setup": ["N=1", 'let "N++"', "ARGUMENTS_1=(${N})"]}),
        (("f() { echo $1; scontrol requeue $SLURM_JOB_ID; }", "trap 'f USR1' USR1", TRAIN),
         {"setup": []}),
        (("cat x > /s/$A/jobs/$B/o.txt", f"{TRAIN} a > $D/$SLURM_JOB_ID.log"),
         {"args": ["a"], "setup": ["cat x > /s/$A/jobs/${B}/o.txt"]}),
        (("srun bash clean.sh", "python3 train.py a", "srun sh clean_tmp.sh"),
         {"setup": ["srun bash clean.sh"], "teardown": ["srun sh clean_tmp.sh"]}),
        (("a[0]=5", TRAIN, "cp x ${a[0]}"), {"setup": ["a[0]=5"]}),
        (("#SBATCH --gpu-accounting", TRAIN), {"sbatch": ["--gpu-accounting"]}),
        # Clean-up lines have what the set-up lines have set.
        (("if [ -d /a ]; then D=/a; else D=/b; fi", TRAIN, "cp -r out $D/"),
         {"setup": ["if [ -d /a ]; then D=/a; else D=/b; fi"],
          "teardown": ["cp -r out $D/"]}),
        # Programs.
        (("python3 -m torch.distributed.run $(which fairseq-train) data",),
         {"script": "fairseq-train", "no-python": True, "args": ["data"]}),
        (("srun python -m my-package.train",), {"script": "my-package.train", "module": True}),
        (("source a/activate", "python3.11 train.py"), {"python": "python3.11"}),
        (("python train.py \\  # the program", "  --lr 1"), {"args": ["--lr", "1"]}),
        (("cd /tmp", 'CMD=" \\', '  `pwd`/train.py --lr 1"', "torchrun $CMD"),
         {"args": ["--lr", "1"], "script": "/tmp/train.py"}),
        # MPICH's variables; what is HyperPod's own; the machine that the loop is on.
        (("mpirun -np 2 -genv A=1 -genv B 2 python train.py",), {"env": {"A": "1", "B": "2"}}),
        (('AUTO_RESUME=""', "[ -d /opt/a ] && AUTO_RESUME=--auto-resume=1",
          "srun $AUTO_RESUME torchrun a.py"),
         {"srun": None, "script": "a.py"}),
        (('for N in $NODES; do if [ "$N" = "$HOSTNAME" ]; then torchrun --rdzv_id=1 a.py --x 1 &',
          'else ssh $N "cd $PWD; torchrun --rdzv_id=1 a.py --x 1" & fi; done', "wait"),
         {"script": "a.py", "args": ["--x", "1"]}),
        # Durations, and what a here-document or a print has in it.
        (("T=$(date +%s)", TRAIN, "D=$(($(date +%s) - T))", "echo $D"),
         {"setup": ["T=$(date +%s)"], "teardown": ["D=$(($(date +%s) - T))", "echo $D"]}),
        (("cat > run.sh <<EOF", "torchrun a.py", "EOF", "srun bash run.sh"),
         {"setup": ["cat > run.sh <<EOF\ntorchrun a.py\nEOF"], "args": ["run.sh"]}),
        (('echo "pdsh : $(which pdsh)"', TRAIN), {"setup": ['echo "pdsh : $(which pdsh)"']}),
    ],
)  # fmt: skip
def test_words_keep_their_meaning(lines: tuple[str, ...], settings: dict[str, Any]) -> None:
    result = of_text(*lines)
    written = {key: result.settings().get(key) for key in settings}
    for key in {"setup"} & written.keys():
        texts = [text.rpartition('START-}" != yes ] ')[2] for text in written["setup"] or ()]
        written[key] = [f"<once> {text}" if text.startswith("||") else text for text in texts]
    assert written == settings
    assert LOST not in {result.group(line)[0] for line in range(2, 3 + len(lines))}


@pytest.mark.parametrize(
    ("lines", "line", "group", "reason"),
    [
        (("#SBATCH --partition=<add your partition>", TRAIN), 3, LOST, "is a placeholder"),
        (("#SBATCH --dependency=afterok:<ID>", TRAIN), 3, LOST, "is a placeholder"),
        ((f'wandb login "{"0123456789abcdef" * 2}"', TRAIN), 3, LOST, "looks like a secret"),
        (("R=$(torchrun a.py | tail -1)",), 3, LOST, "it may start a training"),
        (("out=$(srun python a.py)", "echo $out"), 3, LOST, "it may start a training"),
        (('cmd="srun python train.py ${c}:0"', "`$cmd > log`"), 4, LOST, "it may be the launch"),
        ((TRAIN, "X=1 python3 main.py | tee t"), 4, LOST, "it may start a training"),
        ((f"{TRAIN} --data <DIR> --lr 3",), 3, LOST, "it needs a value of yours"),
        (("C=run1", "OUT=<checkpoint>/${C}", f"{TRAIN} --out $OUT --lr 3"), 5, LOST, "of yours"),
        (("OUT=/data/<user>/x", f"{TRAIN} --out $OUT"), 4, LOST, "of yours"),
        ((f"{TRAIN} --out <checkpoint>/run1 --lr 3",), 3, LOST, "of yours"),
        (("<ENV>", TRAIN), 3, LOST, "a placeholder"),
        (("source <the path>/activate", TRAIN), 3, LOST, "a placeholder"),
        (("torchrun a.py || { touch x; scontrol requeue $SLURM_JOB_ID; }",), 3, TAKEN, "teardown"),
        (("trap 'cp a b; scontrol requeue $SLURM_JOB_ID' USR1", TRAIN), 3, LOST, "does more"),
        (("f() { cp a b; sbatch $0; }", "trap f USR1", TRAIN), 4, LOST, "does more"),
        (("source ./h.sh", 'L="torchrun a.py"', 'retry "$L"'), 5, LOST, "it may be the launch"),
        (("#SBATCH --gpus= # number", TRAIN), 3, LOST, "--gpus is empty"),
        (("#SBATCH --exclude=", TRAIN), 3, OURS, "--exclude is empty"),
        (('#SBATCH --export="A=1,B=2" \\', TRAIN), 3, TAKEN, "env"),
        (("#SBATCH --cpus-per-gpu=8", "srun -c 4 python a.py"), 4, LOST, "beside --cpus-per-gpu"),
        (("srun -n 4 --gres=gpu:4 python a.py",), 3, LOST, "srun has 4 GPUs of a node"),
        (("torchrun --standalone $*",), 3, LOST, "it may start a training"),
        (("if [ -d a ]; then printf x; rm -rf $(ls a); fi", "printf y", TRAIN), 4, TAKEN, "setup"),
        # Words that hpc-ddp decides are no settings, and none of them is left without a word.
        (("#SBATCH --gres=gpu:2", "#SBATCH --gpus=2", "torchrun a.py"), 4, OURS, "are those of --"),
        (("#SBATCH --requeue", "#SBATCH --requeue", TRAIN), 3, OURS, "the same --requeue"),
        (("srun -ul python a.py",), 3, TAKEN, "srun --unbuffered, srun --label"),
        (("srun -c $SLURM_CPUS_ON_NODE python a.py",), 3, TAKEN, "sets srun --cpus-per-task"),
        (("srun -c $(nproc) python a.py",), 3, LOST, "only the job knows it: cpus-per-task = N"),
        (("A='torchrun a.py'", "echo $A", "srun $A"), 4, OURS, "it prints the launch's text"),
        (("MASTER_ADDR=$(scontrol show hostnames | head -n 1)i", TRAIN), 3, TAKEN, "host-suffix"),
        (('"""', "a comment", '"""', TRAIN), 4, OURS, "a text, and no command"),
        (("srun bash -c 'cd a && python a.py'",), 3, TAKEN, "setup"),
        (("accelerate launch --deepspeed_hostfile h a.py",), 3, TAKEN, "--deepspeed-hostfile"),
        ((f'srun bash -c "export A=1 && {IN_IMAGE} prep.py && {IN_IMAGE} train.py"',),
         3, LOST, "before it enters the container"),
    ],
)  # fmt: skip
def test_what_has_no_place_is_named(
    lines: tuple[str, ...], line: int, group: str, reason: str
) -> None:
    result = of_text(*lines)
    assert result.group(line)[0] == group, result.group(line)
    assert reason in result.group(line)[1]


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (("srun --gres=gpu:1 python a.py",), "srun has 1 GPUs of a node, and the job 2"),
        (("srun singularity exec a.img python a.py",), "hpc-ddp adds --nv"),
        (("#SBATCH --signal=B:USR1@60", TRAIN), "reaches the workers"),
        (('cp "$0" out', TRAIN), "$0 is the batch script of hpc-ddp"),
        (("python a.py \\ ", "  --lr 1"), "read as it is meant"),
        (("torchrun --nnodes=1 \\ ", "train.py --lr 1"), "read as it is meant"),
        (("#BATCH --mem=1G", TRAIN), "is #SBATCH meant"),
        (("python a.py --n $SLURM_ARRAY_TASK_ID",), "has no --array"),
        (("cd $(pwd -P)", TRAIN), "only the job knows its folder"),
        (("torchrun a.py || scontrol requeue $SLURM_JOB_ID",), "requeued until it has finished"),
        (("python train_a.py", TRAIN), "a training of its own"),
        (("module load python/3.6.1", TRAIN), "hpc-ddp needs Python 3.10"),
        ((f"{TRAIN} --e $EPOCHS",), "$EPOCHS: not set in this shell"),
        (("accelerate launch a.py",), "default_config.yaml is not read"),
        (("A=(", "--out /path/to/dir", ")", f'{TRAIN} "${{A[@]}}"'), "/path/to/dir looks like a"),
        (("export DATA=path/to/data", TRAIN), "path/to/data looks like a placeholder"),
        (("conda activate your_env", TRAIN), "your_env looks like a placeholder"),
        (('srun bash -c "podman run I torchrun --r=$SLURM_NODEID a.py"',), "each worker has its"),
    ],
)
def test_what_differs_has_a_note(lines: tuple[str, ...], note: str) -> None:
    assert note in str(of_text(*lines).notes)


def test_a_moment_that_only_gives_a_duration_has_no_note() -> None:
    lines = ("T=$(date +%s)", TRAIN, "echo $(($(date +%s) - T))")
    assert "another value at each start" not in str(of_text(*lines).notes)
    assert "another value at each start" in str(of_text("T=$(date +%s)", f"{TRAIN} $T").notes)


def test_without_a_launch_no_number_of_workers_is_written() -> None:
    assert "nproc-per-node" not in of_text("module load cuda").settings()
