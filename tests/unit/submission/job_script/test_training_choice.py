"""Which launch of a job script is the training."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script

HEAD = "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=1\n"
RUN = "python train.py --a 1"


def of_text(tmp_path: Path, text: str) -> Conversion:
    for name in ("train.py", "src/train.py", "prepare.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import torch\n")
    return import_script(HEAD + text, tmp_path, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        f"{RUN} || exit 1", f"{RUN} && echo done", f"{RUN} 2>&1 | tee log", f"{RUN} > log.txt 2>&1",
        f"if {RUN}; then\n  echo ok\nelse\n  exit 1\nfi", f"time {RUN} > log &\nwait",
        f"{{ {RUN}; }} 2>&1 | tee log", f"nohup {RUN} > out.log", f"command {RUN}",
        f"/usr/bin/time -v {RUN}", f"{RUN} &\nPID=$!\nwait $PID",
    ],
)  # fmt: skip
def test_plain_python_wherever_it_stands(line: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"{line}\n")
    settings = conversion.settings()
    assert (settings["script"], settings["args"]) == ("train.py", ["--a", "1"])
    assert LOST not in {conversion.group(n)[0] for n in range(3, 3 + line.count("\n") + 1)}


@pytest.mark.parametrize("line", [f"(cd src && {RUN})", f"cd src && {RUN}"])
def test_plain_python_in_another_folder(line: str, tmp_path: Path) -> None:
    settings = of_text(tmp_path, f"{line}\n").settings()
    assert (settings["script"], settings["chdir"]) == ("src/train.py", "src")


def test_of_plain_programs_the_one_that_trains_is_the_launch(tmp_path: Path) -> None:
    settings = of_text(tmp_path, f"python prepare.py --to d\n{RUN}\n").settings()
    assert (settings["script"], settings["setup"]) == ("train.py", ["python prepare.py --to d"])


def test_a_launcher_comes_before_plain_python(tmp_path: Path) -> None:
    text = (
        "python prepare.py > log\ntorchrun --nproc_per_node=1 train.py\npython eval.py | tee log\n"
    )
    conversion = of_text(tmp_path, text)
    assert conversion.settings()["script"] == "train.py"
    assert conversion.settings()["setup"] == ["python prepare.py > log"]
    line = '[ "$HPC_DDP_VERDICT" != finished ] || { python eval.py | tee log; }'
    assert conversion.settings()["teardown"] == [line]


@pytest.mark.parametrize(
    ("line", "is_test"),
    [
        ("srun python scripts/test.py", True),
        ("srun -n 1 python -m tools.predict --a", True),
        ("python main.py --mode test", True),
        ("python train.py --eval_only", True),
        ("python -u evaluate.py", True),
        ("python tools/meta.py finalize --run-dir x", True),
        ("uv run python report.py", True),
        ("python other.py finalize", True),
        ("python train.py report", False),
        ("python -m medumm post-train", False),
        ("python -u -m pkg.render --ckpt out/field.pt", True),
        ("python verify.py |& tee log", True),
        ("for c in a b; do python verify.py $c; done", True),
        ("if [ -f x ]; then python verify.py; python train2.py; fi", False),
        ("python verify.py --epochs 3", False),
        ("python finetune.py", False),
        ("python $UNKNOWN --ckpt a", False),
        ("python3 $T |& tee log", True),
        ("python3 $T", True),
        ("srun python verify.py", False),
        ("python stage2.py", False),
        ("srun python train.py --eval_steps 100", False),
        ("python main.py --test-size 3", False),
        ("srun python train_eval.py", False),
    ],
)
def test_a_test_behind_the_training_is_left_to_a_finished_run(
    tmp_path: Path, line: str, is_test: bool
) -> None:
    conversion = of_text(tmp_path, f"#SBATCH --nodes=1\nT=$A/x.py; srun python train.py\n{line}\n")
    assert (conversion.group(5)[0] == LOST) is not is_test
    assert ("once the training has finished" in str(conversion.notes)) is is_test


@pytest.mark.parametrize("shell", ["{}", "bash -c '{}'", "bash -lc '{}'"])
def test_of_two_calls_of_the_launch_the_first_stays(tmp_path: Path, shell: str) -> None:
    command = shell.format("exec torchrun train.py --phase $PHASE")
    lines = f'f() {{ export PHASE="$1"\nsrun {command}; }}\nf a\ncp x y\nf b\n'
    conversion = of_text(tmp_path, lines)
    settings = conversion.settings()
    assert (settings["args"], settings["env"]) == (["--phase", "a"], {"PHASE": "a"})
    assert settings["teardown"] == ["cp x y"]
    groups = [conversion.group(line) for line in range(3, 8)]
    assert [group for group, _ in groups] == [TAKEN, TAKEN, TAKEN, TAKEN, LOST]
    assert "a second launch" in groups[-1][1]


def test_of_plain_programs_without_a_training_name_a_second_may_train(tmp_path: Path) -> None:
    conversion = of_text(tmp_path, "python model.py\npython other.py\n")
    assert conversion.group(4)[0] == LOST


@pytest.mark.parametrize(
    ("lines", "ends"),
    [
        # What a line of clean-up prints after finished, failed, preempted.
        ("RC=0\n{} || RC=$?\nif [ $RC != 0 ]; then exit 1; fi\nmail kept", "mail kept/"),
        ("{}\nRC=$?\n[ $RC = 0 ] && mail ok || mail bad", "mail ok/mail bad"),
        ("{}\nif [ $? -eq 0 ]; then mail ok; fi\nmail all", "mail ok;mail all/mail all"),
        ("{} | tee a\nRC=${{PIPESTATUS[0]}}\nmail $RC", "mail 0/mail 1"),
        ("{} &\nwait $!\nRC=$?\nmail $RC", "mail 0/mail 1"),
        ("{} || exit 1\nmail kept", "mail kept/"),
        ("die() {{ echo no; exit 1; }}\n{} || die\nmail kept", "mail kept/"),
        ("{} && mail ok", "mail ok/"),
        ("if {}; then\n  mail ok\nelse\n  echo a\nfi\nmail c", "mail ok;mail c/mail c"),
        ("if ! {} | tee log; then mail bad; exit 1; fi\nmail c", "mail c/mail bad"),
        ("if {}; then echo a; else exit 1; fi\nmail c", "mail c/"),
        ("{} && echo a || mail bad\nmail kept", "mail kept/mail bad;mail kept"),
        ("{} &\nP=$!\nwait $P || RC=$?\nmail $RC", "mail/mail 1"),
        # The codes of other commands are theirs.
        (
            "{}\nRC=$?\nbad a\nif [ $? -ne 0 ]; then mail no; exit 1; fi\nmail c",
            "mail no/mail no/mail no",
        ),
        ("{}\nbad a\nRC=$?\nmail $RC", "mail 3/mail 3/mail 3"),
        ("{}\nRC=$?\nbad a\nC=$?\nmail $RC $C", "mail 0 3/mail 1 3"),
        ("{}\nRC=$?\nbad a || RC=$?\nif [ $RC -ne 0 ]; then mail no; fi", "mail no/mail no"),
        ("{}\nA=$(bad a)\nif [ $? -ne 0 ]; then mail no; fi", "mail no/mail no/mail no"),
        (
            "{}\nbad a | cat\nif [ ${{PIPESTATUS[0]}} = 3 ]; then mail no; fi",
            "mail no/mail no/mail no",
        ),
        ("{}\necho a\nif [ $? = 0 ]; then mail ok; fi", "mail ok/mail ok/mail ok"),
        ("{}\necho a\nRC=$?\nmail $RC", "mail 0/mail 0/mail 0"),
        ("{}\nif ! bad a; then F=$?; mail $F; fi", "mail 0/mail 0/mail 0"),
        ("{}\npython eval.py\nif [ $? -eq 0 ]; then mail ok; fi", "mail ok//"),
        (
            "{}\npython eval.py\nR=$?\n[ $R = 0 ] && mail ok || mail <<E\na\nE\nmail c",
            "mail ok;mail c/mail c/mail c",
        ),
        ("c() {{ if [ $? -ne 0 ]; then mail no; fi; }}\n{}\nbad a\nc", "mail no/mail no/mail no"),
        ("{}\nmail b || exit 1\nmail c", "mail b;mail c/mail b;mail c/mail b;mail c"),
        ("{}\nsrun python eval.py || exit 1\nmail c", "mail c/mail c/mail c"),
        ("{}\nsrun python eval.py && mail c", "mail c//"),
        ("python prepare.py || exit 1\n{}\nmail c", "mail c/mail c/mail c"),
        ("{} || {{ RC=$?; mail bad $RC; }}", "/mail bad 1"),
    ],
)
def test_lines_behind_the_launch_have_its_exit_code_by_the_verdict(
    tmp_path: Path, lines: str, ends: str
) -> None:
    settings = of_text(tmp_path, lines.format("srun python train.py")).settings()
    mail = 'mail() { echo "mail $*"; }; srun() { :; }; python() { :; }; bad() { return 3; }'
    code = "\n".join((mail, *settings.get("setup", ()), *settings["teardown"]))
    printed = []
    for verdict in ("finished", "failed", "preempted"):
        bash = ["env", f"HPC_DDP_VERDICT={verdict}", "bash", "-c", code]
        text = subprocess.run(bash, capture_output=True, text=True, check=False).stdout
        printed.append(";".join(line.strip() for line in text.splitlines() if line[:5] == "mail "))
    assert printed == [*ends.split("/"), ""][:3]


@pytest.mark.parametrize(
    "lines", ["{} || RC=$?\nexit $RC", "{}\nif [ $? -ne 0 ]; then exit 1; fi", "{} || exit 1"]
)
def test_an_exit_code_that_no_line_needs_is_left_out(tmp_path: Path, lines: str) -> None:
    conversion = of_text(tmp_path, lines.format("python train.py"))
    assert "teardown" not in conversion.settings()
    assert LOST not in {conversion.group(line)[0] for line in conversion.marks}


@pytest.mark.parametrize(
    ("lines", "script", "setup"),
    [
        # Names.
        (("python model.py", "python run_eval.py"), "model.py", None),
        (("python fit.py", "python main_plot.py"), "fit.py", None),
        (("python prune.py", "python maintenance.py"), "prune.py", None),
        (("python -m pkg.prepare", "python -m pkg.train"), "pkg.train", ["python -m pkg.prepare"]),
        # What is around a preparation stays.
        (("python prepare.py || exit 1", RUN), "train.py", ["python prepare.py || exit 1"]),
        (("if ! python prepare.py; then exit 1; fi", RUN), "train.py",
         ["if ! python prepare.py; then exit 1; fi"]),
        (('prep() { python prepare.py --d "$1"; }', "prep a", "prep 'b c'", RUN), "train.py",
         ['prep() { python prepare.py --d "$1"; }', "prep a", "prep 'b c'"]),
    ],
)  # fmt: skip
def test_a_preparation_is_told_by_its_name(
    lines: tuple[str, ...], script: str, setup: list[str] | None, tmp_path: Path
) -> None:
    settings = of_text(tmp_path, "\n".join((*lines, ""))).settings()
    assert (settings["script"], settings.get("setup")) == (script, setup)


CONDITION = 'if [ "$(cat n)" -gt 1 ]; then'


@pytest.mark.parametrize(
    ("first", "second", "launcher"),
    [
        (f"srun {RUN}", RUN, "srun"),
        (f"echo one\n{RUN}", f"echo two\nsrun -n 1 {RUN}", "srun"),
        (f"mpirun -np 2 {RUN}", f"# one\n{RUN}", "mpirun"),
        ("srun torchrun train.py --a 1", "torchrun train.py --a 1", None),
        (f"srun {RUN}", f"{RUN}\nelif [ -e x ]; then\n{RUN}", "srun"),
    ],
)
def test_branches_with_the_same_program_are_one_launch(
    first: str, second: str, launcher: str | None, tmp_path: Path
) -> None:
    text = f"{CONDITION}\n{first}\nelse\n{second}\nfi\n"
    if "elif" in second:
        text = f"{CONDITION}\n{second}\nelse\n{first}\nfi\n"
    conversion = of_text(tmp_path, text)
    settings = conversion.settings()
    assert (settings["script"], settings["args"]) == ("train.py", ["--a", "1"])
    assert settings.get("launcher") == launcher
    assert LOST not in {conversion.group(n)[0] for n in range(3, 3 + text.count("\n"))}
    assert "every branch starts this program" in str(conversion.notes)


@pytest.mark.parametrize(
    ("first", "end"),
    [
        (f"srun {RUN}", f"else\n{RUN} --b 2\nfi"),
        (f"srun {RUN}", f"else\nA=1 {RUN}\nfi"),
        (f"srun {RUN}", "fi\ncp a b"),
        (f"srun {RUN}", f"elif [ -e x ]; then\n{RUN}\nfi"),
        (f"srun {RUN}\ncp a b", f"else\n{RUN}\nfi"),
        (f"srun {RUN}", "else\npython other.py\nfi"),
    ],
)
def test_branches_that_differ_are_named(first: str, end: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"{CONDITION}\n{first}\n{end}\n")
    assert conversion.group(4)[0] == LOST
    assert "every branch" not in str(conversion.notes)


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        (f"[ -f x ] && srun {RUN}", ["[ -f x ] || exit"]),
        (f"[ -f x ] && [ -f y ] && srun {RUN}", ["[ -f x ] && [ -f y ] || exit"]),
        (f"grep -q over log || srun {RUN}", ["grep -q over log && exit"]),
        (
            f"if [ -f x ]; then\nsrun {RUN}\nfi\necho over",
            ["if [ -f x ]; then\n:\nelse exit 0; fi"],
        ),
        (
            f"if [ -f x ]; then\n  cp a b\n  srun {RUN}\nelse\n  echo no\nfi",
            ["if [ -f x ]; then\n  :\nelse\n  echo no\n  exit\nfi", "cp a b"],
        ),
        (
            f"case $(hostname) in\n  n*) srun {RUN} ;;\n  *) rm x ;;\nesac",
            ["case $(hostname) in\n  n*) : ;;\n  *) rm x\n     exit ;;\nesac"],
        ),
    ],
)
def test_a_condition_on_the_only_launch_ends_the_job_where_it_would_not_run(
    text: str, setup: list[str], tmp_path: Path
) -> None:
    conversion = of_text(tmp_path, f"{text}\n")
    settings = conversion.settings()
    assert (settings["script"], settings["setup"]) == ("train.py", setup)
    assert LOST not in {conversion.group(n)[0] for n in range(3, 3 + text.count("\n"))}


def test_deepspeed_with_a_file_of_hosts_starts_on_all_nodes(tmp_path: Path) -> None:
    text = "#SBATCH --nodes=4 --gpus-per-node=4\ndeepspeed --hostfile=hosts train.py\n"
    conversion = of_text(tmp_path, text)
    assert conversion.settings()["nodes"] == 4
    assert "of 4 nodes" not in str(conversion.notes)


@pytest.mark.parametrize("start", ["env -u NCCL_DEBUG ", "env -i A=1 ", "numactl -N 0 "])
@pytest.mark.parametrize("arguments", [("--a", "--b"), ("--a", "--a")])
@pytest.mark.parametrize("is_first", [True, False])
def test_branches_of_other_launches_are_not_merged(
    start: str, arguments: tuple[str, str], is_first: bool, tmp_path: Path
) -> None:
    """Whether the first branch has the other launch or the second."""
    starts = (start, "") if is_first else ("", start)
    first, second = (f"srun {s}python train.py {a}" for s, a in zip(starts, arguments, strict=True))
    text = f"if nvidia-smi | grep -q A100; then\n  {first}\nelse\n  {second}\nfi\n"
    conversion = of_text(tmp_path, text)
    assert conversion.group(3)[0] == LOST
    assert "worker-setup" not in conversion.settings()


def test_branches_that_write_other_configurations_are_not_merged(tmp_path: Path) -> None:
    run = "accelerate launch --config_file a.yaml train.py"
    branches = (f"  echo 'num_processes: {n}' > a.yaml\n  {run} --n {n}" for n in (2, 4))
    text = "if nvidia-smi | grep -q A100; then\n{}\nelse\n{}\nfi\n".format(*branches)
    assert of_text(tmp_path, text).group(3)[0] == LOST


@pytest.mark.parametrize(
    ("test", "args"),
    [
        # Only the job knows whether Slurm sets these.
        ('[ -n "$SLURM_RESTART_COUNT" ]', ["${ARGUMENTS_1[@]}"]),
        ('[ -n "$SLURM_MEM_PER_NODE" ]', ["${ARGUMENTS_1[@]}"]),
        ("[[ -v SLURM_RESTART_COUNT ]]", ["${ARGUMENTS_1[@]}"]),
        ('[[ -n "$SLURM_JOB_ID" && -e x ]]', ["${ARGUMENTS_1[@]}"]),
        # These it sets, or does not, by the options.
        ('[ -n "$SLURM_JOB_ID" ]', ["--yes"]),
        ('[ -n "$SLURM_JOB_GPUS" ]', ["--yes"]),
        ('[ -n "$SLURM_CPUS_PER_TASK" ]', ["--yes"]),
        ('[ -n "$SLURM_NTASKS" ]', ["--no"]),
        ("[[ -v SLURM_JOB_NUM_NODES ]]", ["--yes"]),
        ("[[ ! -v SLURM_NTASKS ]]", ["--yes"]),
        ('[[ -v SLURM_GPUS_ON_NODE && -n "$SLURM_GPUS_ON_NODE" ]]', ["--yes"]),
        ('[[ -z "$SLURM_JOB_ID" || -n "$SLURM_NTASKS" ]]', ["--no"]),
        ('[[ "a && b" == "a && b" ]]', ["${ARGUMENTS_1[@]}"]),
        # Patterns.
        ("[[ $SLURM_GPUS_PER_NODE == *:* ]]", ["--no"]),
        ("[[ $SLURM_GPUS_PER_NODE != *:* ]]", ["--yes"]),
        ('[[ "$SLURM_GPUS_PER_NODE" == *":"* ]]', ["--no"]),
        ("[[ ${SLURM_GPUS_PER_NODE} =~ 2 ]]", ["--yes"]),
        ('[[ $SLURM_GPUS_PER_NODE == "*" ]]', ["${ARGUMENTS_1[@]}"]),
        ("[[ $PARTITION == gpu* ]]", ["${ARGUMENTS_1[@]}"]),
    ],
)
def test_variables_of_slurm_in_conditions(test: str, args: list[str]) -> None:
    lines = "#SBATCH -N 1 --gpus-per-node=2 -c 3", f"if {test}; then A=--yes; else A=--no; fi"
    text = "\n".join(("#!/bin/bash", *lines, "srun python train.py $A")) + "\n"
    settings = import_script(text, Path("/w"), Path("/w")).settings()
    assert settings["args"] == args


@pytest.mark.parametrize(
    "lines",
    [
        "[ -e d ] || srun -n1 python prepare.py",
        "[ -e d ] || srun -n1 bash -c 'cd d; ./get.sh'",
        "if [ -e d ]; then\n  srun -n1 bash -c 'timeout 5 a' > log &\nfi",
        'for i in a b; do srun -n1 bash -c "timeout 5 $i" > log & done',
    ],
)
def test_a_condition_of_steps_stays_bash(lines: str, tmp_path: Path) -> None:
    settings = of_text(tmp_path, f"{lines}\nsrun torchrun train.py\n").settings()
    assert (settings["script"], settings["setup"]) == ("train.py", [lines])


@pytest.mark.parametrize("step", ["torchrun a.py", "python train.py --lr 1"])
def test_a_condition_that_may_train_is_named(step: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"[ -e d ] || srun {step}\nsrun torchrun train.py\n")
    assert conversion.group(3)[0] == LOST
