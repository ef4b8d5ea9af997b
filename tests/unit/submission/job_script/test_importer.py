"""Job scripts as settings: what is taken over, what hpc-ddp sets, what is left to the user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.importer import import_script
from hpc_ddp.submission.job_script.launchers.tasks import LOGIN
from hpc_ddp.submission.job_script.output import format_table, is_code, subtract_site, to_toml

SAMPLES = Path(__file__).parent / "samples"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.sbatch"))


def converted(name: str, folder: Path = SAMPLES) -> Conversion:
    return import_script((SAMPLES / f"{name}.sbatch").read_text(), folder, folder)


def settings(name: str) -> dict[str, Any]:
    return converted(name).settings()


def of_text(*lines: str) -> Conversion:
    return import_script("\n".join(("#!/bin/bash", *lines)) + "\n", SAMPLES, SAMPLES)


@pytest.mark.parametrize("name", NAMES)
def test_every_line_falls_into_one_group(name: str) -> None:
    text = (SAMPLES / f"{name}.sbatch").read_text()
    conversion = converted(name)
    count = sum(map(is_code, text.splitlines()))
    heads = [row for row in format_table(conversion, text) if not row.startswith(" ")]
    assert [head.partition(":")[0] for head in heads] == [TAKEN, OURS, LOST]
    assert sum(int(head.partition(": ")[2].split()[0]) for head in heads) == count
    for number, line in enumerate(text.splitlines(), 1):
        if is_code(line):
            assert conversion.group(number)[1], f"{number}: {line}"
            assert conversion.group(number)[1] != "not understood", f"{number}: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_a_line_that_is_taken_over_is_in_the_file(name: str) -> None:
    conversion = converted(name)
    text = to_toml(conversion, name)
    for number in conversion.marks:
        group, reason = conversion.group(number)
        if group == TAKEN and reason in ("setup", "teardown", "env", "chdir", "worker-setup"):
            is_more = conversion.group(number - 1) == (group, reason)  # of a block
            assert is_more or f"# {number}\n" in text, f"line {number}: {reason}"


def test_of_a_line_that_is_taken_over_in_part_the_table_has_both() -> None:
    lines = ("#SBATCH --nodes=2 --account=<yours>", "srun python a.py --b \\", "  --lr $1")
    text = "\n".join(("#!/bin/bash", *lines))
    rows = format_table(import_script(text, SAMPLES, SAMPLES), text)
    assert [" ".join(row.split()[:3]) for row in rows] == [
        *("taken over: 2", "2 #SBATCH --nodes=2", "3 srun python"),
        "set by hpc-ddp",
        *("not taken over:", "2 (a part)", "4 --lr $1"),
    ]
    assert rows[-3].endswith(": 1 line, and parts of 1")
    assert rows[-2].endswith("--account=<yours> is a placeholder: --account with yours")
    text = f"#!/bin/bash\n#SBATCH --nodes=2 --comment=hf_{'aB3' * 12}\nsrun python a.py\n"
    rows = format_table(import_script(text, SAMPLES, SAMPLES), text)
    assert "#SBATCH --nodes ..." in rows[1]
    assert not any("hf_" in row for row in rows)


def test_torchrun_in_its_usual_form() -> None:
    conversion = converted("torchrun")
    assert conversion.settings() == {
        "job-name": "vit",
        "time": "1-12:00:00",
        "partition": "gpu",
        "script": "train.py",
        "max-restarts": 2,
        "nodes": 2,
        "gpus-per-node": "a100:4",
        "gpu-request": "gres",
        "cpus-per-task": 32,
        "sbatch": ["--hint=nomultithread"],
        "setup": [
            "module purge",
            "module load cuda/12.4",
            "source /opt/venv/bin/activate",
            "export NCCL_DEBUG=INFO",
            "export OUT=/scratch/runs/$SLURM_JOB_ID",
            'mkdir -p "$OUT"',
        ],
        "teardown": ['cp -r "$OUT" results'],
        "args": ["--config", "configs/vit.yaml", "--out", "/scratch/runs/$SLURM_JOB_ID"],
        "expand": ["SLURM_JOB_ID"],
        "srun": ["--cpu-bind=none"],
    }
    assert {conversion.group(line)[0] for line in (19, 20, 21, 22, 26, 29, 30)} == {OURS}


def test_a_task_for_each_worker_through_a_function_and_arrays() -> None:
    assert settings("ranks") == {
        "output": str(SAMPLES / "log-%j.txt"),
        "chdir": "/data/project",
        "script": "package.train",
        "module": True,
        "nodes": 2,
        "gpus-per-node": "4",
        "gpu-request": "gpus-per-task",
        "launcher": "srun",
        "python": "python",
        "setup": [LOGIN, "set -euo pipefail", "WORLD=$((SLURM_NNODES * 4))"],
        "args": ["--epochs", "3", "--name", "two words", "--world", "$WORLD", "--seed", "1"],
        "expand": ["WORLD"],
        "srun": ["--mpi=pmix"],
    }
    assert converted("ranks").group(5) == (
        OURS,
        "a chain: one run goes on until it has finished",
    )


def test_lines_of_each_task_and_a_container_of_pyxis() -> None:
    result = settings("pyxis")
    assert result["image"] == "/images/nemo.sqsh"
    assert result["container-tool"] == "pyxis"
    assert result["container-options"] == [
        "--container-mounts=/data:/data,/home:/home",
        "--container-workdir=/data",
        "--no-container-mount-home",
    ]
    assert result["worker-setup"] == [
        "source /opt/env.sh",
        "export CACHE=/tmp/cache_${SLURM_NODEID}",
    ]
    assert (result["script"], result["no-python"]) == ("python", True)
    cache = "/tmp/cache_$SLURM_NODEID"
    assert result["args"] == ["/opt/app/train.py", "--cache", cache, "--world", "$WORLD_SIZE"]
    assert (result["launcher"], result["gpus-per-node"]) == ("srun", "8")
    assert converted("pyxis").group(11)[0] == OURS  # RANK


def test_accelerate_with_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
        "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_offload_params: false\n"
    )
    result = converted("accelerate", tmp_path).settings()
    assert (result["script"], result["args"]) == ("finetune.py", ["--model", "base"])
    assert (result["nodes"], result["gpus-per-node"]) == (2, "4")
    assert result["env"] == {
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_OFFLOAD_PARAMS": "false",
        # Defaults of the launcher.
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_MIN_NUM_PARAMS": "100000000",
    }
    assert any("fsdp.yaml can't be read" in note for _, note in converted("accelerate").notes)


@pytest.mark.parametrize("text", ["a: [", "only words", "- 1"])
def test_a_configuration_of_accelerate_that_is_none_is_a_note(tmp_path: Path, text: str) -> None:
    (tmp_path / "fsdp.yaml").write_text(text)
    notes = converted("accelerate", tmp_path).notes
    assert any("fsdp.yaml can't be read" in note for _, note in notes)


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("fp16: true\nuse_cpu: false\n", "fp16"),
        ("fp16: true\nmixed_precision: bf16\n", "bf16"),
        ("fp16: false\nbf16: false\n", None),
    ],
)
def test_the_older_form_of_mixed_precision(
    tmp_path: Path, text: str, precision: str | None
) -> None:
    (tmp_path / "fsdp.yaml").write_text(f"distributed_type: 'NO'\n{text}")
    result = converted("accelerate", tmp_path)
    assert result.settings()["env"].get("ACCELERATE_MIXED_PRECISION") == precision
    assert not [note for _, note in result.notes if "fp16" in note or "bf16" in note]


def test_odd_keys_of_a_configuration_of_accelerate_end_no_import(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("1: one\nnum_processes: many\nmixed_precision: bf16\n")
    result = converted("accelerate", tmp_path)
    assert result.settings()["env"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert any("1 of fsdp.yaml" in note for _, note in result.notes)


def test_mpirun_and_a_container() -> None:
    assert settings("mpirun") == {
        "script": "python",
        "no-python": True,
        "image": "/images/app.sif",
        "container-tool": "singularity",
        "nodes": 2,
        "nproc-per-node": 2,
        "launcher": "mpirun",
        "mpirun": ["--mca pml ob1"],
        "container-options": ["--nv", "-B", "/data:/mnt"],
        "args": ["/app/main.py", "--lr", "0.1"],
        "env": {"NCCL_DEBUG": "INFO"},
    }


@pytest.mark.parametrize("option", ["--bind-to=core", "--bind-to core", "--mca a_list B=1"])
def test_an_option_of_mpirun_stays_as_it_is_written(option: str) -> None:
    result = of_text("#SBATCH -N 2", f"mpirun -np 4 {option} python train.py")
    assert result.settings()["mpirun"] == [option]
    assert result.settings()["script"] == "train.py"


def test_a_loop_over_the_nodes_is_one_launch() -> None:
    result = settings("loop")
    assert (result["script"], result["args"]) == ("train.py", ["--epochs", "2"])
    assert (result["nodes"], result["gpus-per-node"]) == (2, "4")


def test_secrets_are_never_written() -> None:
    conversion = converted("secrets")
    text = to_toml(conversion, "secrets.sbatch")
    script = (SAMPLES / "secrets.sbatch").read_text()
    for secret in ("0123456789", "hf_abc", "secretword", "sk-abc", "passw0rd"):
        assert secret not in text + "\n".join(format_table(conversion, script))
    assert conversion.settings()["env-names"] == [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "DATABASE",
        "API_KEY",
        "DB_PASSWORD",
    ]
    assert "--tokenizer" in conversion.settings()["args"]
    assert {conversion.group(line)[0] for line in (3, 4, 5, 6, 7)} == {LOST}


def test_duplicates_placeholders_late_directives_and_dangerous_lines() -> None:
    conversion = converted("chain")
    result = conversion.settings()
    assert result["nodes"] == 4
    assert result["signal"] == "USR1@120"
    assert "account" not in result
    assert "time" not in result
    groups = {line: conversion.group(line)[0] for line in (2, 4, 5, 7, 8, 9, 10, 11, 14, 16)}
    lost = {4, 5, 7, 9, 10}
    assert groups.pop(14) == TAKEN
    assert groups == {line: LOST if line in lost else OURS for line in groups}
    assert result["setup"] == ["python prepare.py --data raw"]
    test = '[ "$HPC_DDP_VERDICT" != finished ] || { srun python evaluate.py; }'
    assert result["teardown"][0] == test


def test_conditions_here_documents_and_eval() -> None:
    conversion = converted("conditions")
    result = conversion.settings()
    assert result["env"] == {"PRECISION": "bf16"}
    assert conversion.group(8) == (OURS, "an earlier branch runs")
    assert result["args"] == ["--data", "${ARGUMENTS_1[@]}", "--lr", "0.1", "--precision", "bf16"]
    assert (result["expand"], result["setup"][-1]) == (
        ["ARGUMENTS_1[@]"],
        'eval "ARGUMENTS_1=(${DATA})"',
    )
    assert any(line.startswith("if [ -d /opt/data ]") for line in result["setup"])
    assert "cat > hosts.txt <<END\nhead of $SLURM_JOB_ID\nEND" in result["setup"]
    assert conversion.group(18) == (OURS, "a function that nothing calls")


def test_arguments_of_the_script_are_reported() -> None:
    conversion = converted("arguments")
    assert conversion.settings()["args"] == []
    assert {conversion.group(line)[0] for line in (3, 4, 5, 6, 7, 9, 10)} == {LOST}


def test_deepspeed_and_ssh_are_reported() -> None:
    conversion = converted("deepspeed")
    assert conversion.settings()["args"][0] == "--local_rank=$LOCAL_RANK"
    assert conversion.group(4)[0] == LOST
    assert "the launcher deepspeed: torchrun starts the workers" in str(conversion.notes)


@pytest.mark.parametrize(
    ("directives", "nodes", "workers"),
    [
        (("-N2", "--ntasks-per-node=4"), 2, 4),
        (("-N 2", "-n 8"), 2, 4),
        (("-N 2", "--ntasks=4", "--ntasks-per-node=4"), 2, 2),
        (("-N 2", "--ntasks=4", "--ntasks-per-node=4", "--gpus-per-task=1"), 2, 2),
        (("--nodes=2-2", "--ntasks=8"), 2, 4),
        (("--ntasks 8", "--ntasks-per-node=4"), 2, 4),
        (("--gpus=8", "--gpus-per-node=4", "--ntasks-per-node=4"), 2, 4),
    ],
)
def test_nodes_and_workers_from_any_directives(
    directives: tuple[str, ...], nodes: int, workers: int
) -> None:
    lines = [f"#SBATCH {directive}" for directive in directives]
    result = of_text(*lines, "srun python train.py").settings()
    assert result["nodes"] == nodes
    assert result.get("nproc-per-node", int(result.get("gpus-per-node", 0))) == workers


@pytest.mark.parametrize(
    ("options", "gpus", "gpu_request"),
    [
        (("--gres=gpu:a100:4,nvme:950",), "a100:4", "none"),
        (("--gpus-per-node=a100:4", "--gres=nvme:950"), "a100:4", None),
        (("--gres=lscratch:200",), None, None),
    ],
)
def test_a_request_for_more_than_gpus_is_kept(
    options: tuple[str, ...], gpus: str | None, gpu_request: str | None
) -> None:
    lines = [f"#SBATCH {option}" for option in options]
    conversion = of_text(*lines, "srun torchrun --nproc_per_node=4 train.py")
    result = conversion.settings()
    assert result["sbatch"] == [options[-1]]
    assert (result.get("gpus-per-node"), result.get("gpu-request")) == (gpus, gpu_request)


@pytest.mark.parametrize("option", ["--gres=gpu:2080ti:4", "--gpus-per-node=2080ti:4"])
def test_a_type_that_begins_with_a_digit_is_a_type(option: str) -> None:
    result = of_text(f"#SBATCH {option}", "srun torchrun --nproc_per_node=4 train.py").settings()
    assert result["gpus-per-node"] == "2080ti:4"
    assert "nproc-per-node" not in result


def test_the_site_s_values_are_left_out() -> None:
    conversion = of_text(
        "#SBATCH --nodes=2", "#SBATCH --constraint=gpu", "module load site", "srun python train.py"
    )
    site = {"constraint": "gpu", "setup": ["module load site"], "sbatch": ["--licenses=scratch"]}
    subtract_site(conversion, site)
    result = conversion.settings()
    assert "constraint" not in result
    assert "setup" not in result
    assert result["without"] == ["--licenses=scratch"]


def test_a_raw_option_of_the_site_that_the_script_has_too_stays() -> None:
    conversion = of_text("#SBATCH --nodes=2", "#SBATCH --account=p", "srun python train.py")
    subtract_site(conversion, {"sbatch": ["--account=p"]})
    assert not {"account", "without"} & conversion.settings().keys()
    conversion = of_text("#SBATCH --nodes=2", "#SBATCH --account=q", "srun python train.py")
    subtract_site(conversion, {"sbatch": ["--account=p"]})
    result = conversion.settings()
    assert (result["account"], result["without"]) == ("q", ["--account=p"])


def test_an_empty_setting_of_the_site_changes_nothing() -> None:
    conversion = of_text("#SBATCH --nodes=2", "srun python train.py")
    before = conversion.settings()
    subtract_site(conversion, {"constraint": "", "env": {"CACHE": ""}})
    assert conversion.settings() == before


def test_a_broken_quote_is_reported_and_nothing_is_lost() -> None:
    conversion = of_text("#SBATCH --nodes=2", 'echo "open', "srun python train.py")
    assert conversion.group(3)[0] == LOST
    assert conversion.settings()["nodes"] == 2


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    of_text(f"touch {mark}", f"x=$(touch {mark})", f"y=$((1/0))", "srun python train.py")  # noqa: F541
    assert not mark.exists()


def test_a_preparation_on_one_node_is_a_set_up_line() -> None:
    conversion = of_text(
        "#SBATCH --nodes=2", "srun -N1 -n1 python prepare.py", "srun python train.py", "wait"
    )
    assert conversion.settings()["setup"] == ["srun -N1 -n1 python prepare.py"]
    assert conversion.settings()["script"] == "train.py"


def test_arithmetic_is_done_here_or_in_the_job() -> None:
    result = of_text(
        "#SBATCH --nodes=2", "srun python train.py --a $((40 + 2)) --b $((SLURM_NNODES * 4))x"
    ).settings()
    assert result["args"] == ["--a", "42", "--b", "${ARGUMENTS_1[@]}"]
    assert result["setup"] == ['ARGUMENTS_1=("$((SLURM_NNODES * 4))"x)']
    assert "env-names" not in result


def test_a_launch_that_only_the_job_chooses_is_reported() -> None:
    conversion = of_text(
        "#SBATCH --nodes=2",
        "case $HOSTNAME in a*) srun torchrun a.py;; *) srun torchrun b.py;; esac",
    )
    assert "script" not in conversion.settings()
    assert conversion.group(3)[0] == LOST


def test_a_clean_up_line_has_the_variables_of_the_set_up() -> None:
    """It runs in a subshell of the batch script."""
    conversion = of_text("#SBATCH --nodes=2", "OUT=/x", "srun python train.py", 'ls "$OUT"')
    assert conversion.settings()["setup"] == ["OUT=/x"]
    assert conversion.settings()["teardown"] == ['ls "$OUT"']


def test_an_array_that_a_loop_fills_is_filled_by_a_set_up_line() -> None:
    lines = ("FILES=()", "for part in a b; do FILES+=($(ls $part)); done")
    result = of_text(
        "#SBATCH --nodes=2",
        *lines,
        'srun python train.py --files "${FILES[@]}" $(cat "more words")',
    ).settings()
    assert result["args"] == ["--files", "${ARGUMENTS_1[@]}", "${ARGUMENTS_2[@]}"]
    arrays = ['ARGUMENTS_1=("${FILES[@]}")', 'ARGUMENTS_2=($(cat "more words"))']
    assert result["setup"] == [*lines, *arrays]
    assert result["expand"] == ["ARGUMENTS_1[@]", "ARGUMENTS_2[@]"]


@pytest.mark.parametrize("outer", ["A=$(echo 'x y')", "[ -d /x ] && A='x y'"])
def test_the_text_of_bash_c_has_what_the_batch_script_has_put_into_it(outer: str) -> None:
    """As it is read there a second time: with its quotes."""
    result = of_text("#SBATCH --nodes=2", outer, 'srun bash -c "python train.py $A"').settings()
    assert result["args"] == ["${ARGUMENTS_1[@]}"]
    assert result["worker-setup"] == ['eval "ARGUMENTS_1=(${A})"']
    assert (result["setup"], result["expand"]) == ([outer], ["A", "ARGUMENTS_1[@]"])


def test_a_variable_of_hpc_ddp_has_the_script_s_value_in_an_argument() -> None:
    lines = ("WORLD_SIZE=$((SLURM_NNODES * 8))", "srun python train.py --world $WORLD_SIZE")
    result = of_text("#SBATCH --nodes=2", *lines).settings()
    assert result["args"] == ["--world", "${ARGUMENTS_1[@]}"]
    assert result["setup"] == [lines[0], "ARGUMENTS_1=(${WORLD_SIZE})"]


def test_what_bash_does_to_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    lines = ("EMPTY=", "FILES=(a 'b c')", "KIND=$(uname)")
    words = (
        """~/x '~/y' ${EMPTY:-d} ${EMPTY-e} "${FILES[*]}" "${FILES[@]}" $'a\\tb' ${KIND:-f} \\$X"""
    )
    result = of_text("#SBATCH --nodes=2", *lines, f"srun python train.py {words}").settings()
    array, star, default = (f"${{ARGUMENTS_{n}[@]}}" for n in (1, 2, 3))
    plain = ["/home/me/x", "~/y", "d", array, "a b c", "a", "b c", "a\tb"]
    assert result["args"] == [*plain, star, "$X"]
    assert default not in result["args"]
    arrays = ["ARGUMENTS_1=(${EMPTY-e})", "ARGUMENTS_2=(${KIND:-f})"]
    assert result["setup"] == ["EMPTY=", "KIND=$(uname)", *arrays]


def test_a_variable_that_an_earlier_line_has_stays_behind_it() -> None:
    lines = ('[ -n "$A" ] || B=1', "export A=1", "srun python train.py")
    assert of_text("#SBATCH --nodes=2", *lines).settings()["setup"] == [*lines[:2]]


def test_a_function_that_shifts_its_arguments() -> None:
    lines = ('run() { name=$1; shift; srun torchrun "$@" --name $name; }', "run first a.py --x 1")
    result = of_text("#SBATCH --nodes=2", *lines).settings()
    assert (result["script"], result["args"]) == ("a.py", ["--x", "1", "--name", "first"])


def test_a_variable_that_was_set_anew_is_reported() -> None:
    lines = ('CMD="train.py --out $OUT"', "OUT=$(pwd -P)", "srun python $CMD")
    assert of_text("#SBATCH --nodes=2", *lines).group(5)[0] == LOST


@pytest.mark.parametrize("line", ["monitor.sh &", "(cd data && ./unpack.sh)", "{ a; b; } > log"])
def test_a_line_stays_as_it_is(line: str) -> None:
    result = of_text("#SBATCH --nodes=2", line, "srun python train.py").settings()
    assert result["setup"] == [line]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("exit 1", "here the job script ends"),
        ("export SLURM_HOSTFILE=hosts", "an option of srun in its place"),
        ("export A=<yours>", "a placeholder"),
        ("srun $(cat options) torchrun other.py", "only the job knows it"),
        ("srun torchrun other.py < words.txt", "its standard input"),
        ("[ -d /data ] && srun torchrun other.py\ncp a b", "only the job knows chooses a launch"),
        ("prepare || srun torchrun other.py\ncp a b", "only the job knows chooses a launch"),
        ("echo yes | srun torchrun other.py", "its standard input"),
        ("srun torchrun --nnodes 1 other.py", "another number than the job's nodes"),
    ],
)
def test_what_would_change_the_launch_is_reported(line: str, reason: str) -> None:
    lines = (line,) if "other.py" in line else (line, "srun torchrun train.py")
    conversion = of_text("#SBATCH --nodes=2", *lines)
    assert conversion.group(3)[0] == LOST
    assert reason in conversion.group(3)[1]


def test_what_only_reports_how_the_launch_ended_is_hpc_ddps() -> None:
    lines = ("srun python train.py", "CODE=$?", "if [ $CODE -ne 0 ]; then echo bad; fi")
    conversion = of_text("#SBATCH --nodes=2", *lines, "cp out $HOME")
    assert "how the launch ended" in conversion.group(4)[1]
    assert conversion.group(5)[0] == OURS
    assert conversion.settings()["teardown"] == ["cp out $HOME"]


def test_a_launch_that_a_variable_of_the_shell_chooses_is_the_one_without_it() -> None:
    lines = ('if [ -z "$MODE" ]; then export A=1; fi',
             'if [ -n "$MODE" ]; then srun torchrun a.py; else srun torchrun b.py; fi')  # fmt: skip
    conversion = of_text("#SBATCH --nodes=2", *lines)
    assert (conversion.settings()["script"], conversion.settings()["env"]) == ("b.py", {"A": "1"})
    assert conversion.notes[-1][1].startswith("$MODE is taken to be unset")


@pytest.mark.parametrize(
    "directives", [("--gres=gpu:2", "--gpus-per-node=1"), ("-c 12", "--gpus-per-node=1")]
)
def test_two_numbers_of_one_thing_are_reported(directives: tuple[str, ...]) -> None:
    lines = (f"#SBATCH -N 2 {' '.join(directives)}", "srun -c 4 python train.py")
    conversion = of_text(*lines)
    assert any(conversion.group(line)[0] == LOST for line in (2, 3))


def test_a_program_below_a_folder_that_the_script_enters(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=2\nsource env.sh\ncd {}\nsrun torchrun train.py\n"
    result = import_script(text.format("/data/code"), tmp_path, tmp_path).settings()
    assert (result["script"], result["setup"][-1]) == ("/data/code/train.py", "cd /data/code")
    result = import_script(text.format("src"), tmp_path, tmp_path).settings()
    assert result["script"] == "src/train.py"
    result = import_script(text.format("$CODE"), tmp_path, tmp_path).settings()
    assert (result["script"], result["no-python"]) == ("python", True)
    assert result["args"] == ["train.py"]


def test_variables_that_refer_to_each_other() -> None:
    lines = ("A=$((B + 1))", "B=$((A + 1))", "A=$((B + 1))", "srun -N $A torchrun train.py")
    assert of_text("#SBATCH --nodes=2", *lines).settings()["nodes"] == 2


def test_lines_of_each_task_have_variables_of_the_batch_script() -> None:
    text = 'bash -c "cd $CODE; echo there; python train.py"'
    result = of_text("#SBATCH --nodes=2", "CODE=$(pwd)/$USER", f"srun {text}").settings()
    assert result["worker-setup"] == [f"cd {SAMPLES}/${{USER}}", "echo there"]
    result = of_text("#SBATCH --nodes=2", "source env.sh", f"srun {text}").settings()
    assert result["worker-setup"][0] == "cd ${CODE}"
    assert result["expand"] == ["CODE"]


def test_a_condition_on_what_the_script_does_not_set_stays_one() -> None:
    lines = ("#SBATCH --nodes=2", 'if [ -n "$DATA" ]; then export A=1; fi', "srun python train.py")
    assert of_text(*lines).settings()["setup"] == [lines[1]]
    assert of_text(lines[0], "source ./own.sh", *lines[1:]).settings()["setup"][1] == lines[1]


def test_the_number_of_a_node_in_a_loop() -> None:
    """From 0 it is the task's number of its node; another one is reported."""
    lines = ("    srun -N1 -n1 -w node$i python train.py \\", "        --node $i &", "done")
    for start, sign in enumerate(("<", "<=")):
        loop = f"for ((i = {start}; i {sign} 2; i++)); do"
        conversion = of_text("#SBATCH --nodes=2", loop, *lines)
        args = conversion.settings()["args"]
        assert args == ([] if start else ["--node", "$SLURM_NODEID"])
        assert (conversion.group(5)[0] == LOST) is bool(start)


def test_variables_of_a_directive_are_those_of_the_job() -> None:
    """Slurm takes a value from the shell that submits where there is none; the script's own line
    comes later, and counts."""
    line = "#SBATCH --export=ALL,HF_HOME,A=1,B='x y',HF_TOKEN=abcdef012345,C="
    result = of_text("#SBATCH --nodes=2", line, "export A=2", "srun python train.py")
    settings = result.settings()
    assert settings["env"] == {"A": "2", "B": "x y", "C": ""}
    assert settings["env-names"] == ["HF_HOME", "HF_TOKEN"]
    assert "abcdef" not in str(settings)


def test_a_secret_of_a_directive_is_not_written() -> None:
    line = "#SBATCH --comment=api_key=abcdef012345"
    result = of_text("#SBATCH --nodes=2", line, "srun python train.py")
    assert result.group(3)[0] == LOST
    assert "abcdef" not in str(result.settings())


def test_an_option_that_a_later_line_replaces_takes_no_other_along() -> None:
    lines = ("#SBATCH -p gpu -N 1", "#SBATCH -N 2", "srun python train.py")
    result = of_text(*lines)
    assert result.settings()["partition"] == "gpu"
    assert result.settings()["nodes"] == 2
    assert result.group(2) == ("taken over", "--partition=gpu")


def test_two_secrets_have_two_names() -> None:
    secrets = [f"hf_{letter * 20}" for letter in "ab"]
    command = f"srun python train.py {' '.join(secrets)} --token {'c' * 20} --token {'d' * 20}"
    result = of_text("#SBATCH --nodes=2", command).settings()
    assert result["args"] == [
        *("$SECRET", "$SECRET_2", "--token", "$TOKEN", "--token", "$TOKEN_2"),
    ]
    assert result["env-names"] == ["SECRET", "SECRET_2", "TOKEN", "TOKEN_2"]


def test_a_folder_below_home_is_no_part_of_another() -> None:
    lines = ("#SBATCH --nodes=2", "#SBATCH --chdir=/a", "cd $HOME/b", "srun python train.py")
    assert of_text(*lines).settings()["chdir"] == str(Path.home() / "b")


def test_an_image_that_is_a_placeholder_is_no_error() -> None:
    lines = ("#SBATCH --nodes=2", "#SBATCH --image=<image>", "srun shifter python train.py")
    assert of_text(*lines).group(3)[0] == LOST


@pytest.mark.parametrize(
    ("lines", "program", "is_array"),
    [
        (("LRS=(0.1 0.01)", "srun python train.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}"), "", True),
        (("srun python train.py --seed $SLURM_ARRAY_TASK_ID",), "", True),
        (("srun python train.py",), 'i = os.environ["SLURM_ARRAY_TASK_ID"]', True),
        (("srun python -m train",), 'i = os.environ["SLURM_ARRAY_TASK_COUNT"]', True),
        (
            ("echo $SLURM_ARRAY_TASK_ID", "# $SLURM_ARRAY_TASK_ID", "srun python train.py"),
            "",
            False,
        ),
        (("srun python train.py --id $SLURM_ARRAY_JOB_ID",), "", False),
    ],
)
def test_an_array_whose_tasks_differ_is_no_chain(
    tmp_path: Path, lines: tuple[str, ...], program: str, is_array: bool
) -> None:
    (tmp_path / "train.py").write_text(program)
    text = "\n".join(("#!/bin/bash", "#SBATCH --array=0-2%1", *lines, ""))
    conversion = import_script(text, tmp_path, tmp_path)
    assert conversion.settings().get("array") == ("0-2%1" if is_array else None)
    assert conversion.group(2)[0] == (TAKEN if is_array else OURS)
    word = "a run for each" if is_array else 'if its tasks differ, array = "0-2%1"'
    assert any(word in note for line, note in conversion.notes if line == 2)


def test_a_dependency_on_jobs_of_the_name_is_taken_over() -> None:
    conversion = of_text("#SBATCH --dependency=afterok:5,singleton", "srun python train.py")
    assert conversion.settings()["dependency"] == "afterok:5,singleton"
    assert [line for line, note in conversion.notes if "goes on by itself" in note] == [2]


@pytest.mark.parametrize(
    ("argument", "note"),
    [
        ("$((1024 / SLURM_NTASKS))", "$SLURM_NTASKS is 8 there; hpc-ddp's job has one task"),
        ("$SLURM_CPUS_PER_TASK", ""),  # the number is written
        ("$RANDOM", "RANDOM has another value at each start"),
        ("run-$(date +%s)", "date has another value at each start"),
        ("$(mktemp -d)", "mktemp has another value at each start"),
        ("run-$$", "$$ has another value at each start"),
        ("out/$SLURM_JOB_ID", "$SLURM_JOB_ID is another one where the run goes on in a new job"),
        ("out/${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID", "$SLURM_ARRAY_JOB_ID is another one"),
        ("$SLURM_NTASKS", ""),  # a worker has it as a task would
        ("$(hostname -s)", ""),
    ],
)
def test_a_value_that_is_another_one_in_the_job_is_noted(argument: str, note: str) -> None:
    lines = ("#SBATCH --nodes=2 --ntasks-per-node=4 --cpus-per-task=2", 'echo "at $(date)"')
    launch = "srun --ntasks-per-node=1 torchrun --nnodes=2 --nproc_per_node=4 train.py"
    result = of_text(*lines, f"{launch} --value {argument}")
    notes = [text for _, text in result.notes if not re.search("is set|no --array", text)]
    assert [text.startswith(note) for text in notes] == [True] * bool(note)


def test_branches_that_do_not_run_have_their_reasons() -> None:
    conversion = of_text(
        *("if true; then", "srun python a.py", "elif false; then", "srun python b.py"),
        *("else", "srun python c.py", "fi"),
    )
    assert conversion.settings()["script"] == "a.py"
    assert conversion.group(5) == conversion.group(7) == (OURS, "an earlier branch runs")


def test_the_last_command_of_a_condition_decides() -> None:
    conversion = of_text(
        "if true; false; then", "srun python a.py", "else", "srun python b.py", "fi"
    )
    assert "script" not in conversion.settings()
    assert conversion.group(3)[0] == conversion.group(5)[0] == LOST


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ("#!/bin/tcsh -f", "tcsh reads it"),
        ("#!/usr/bin/env -S python3 -u", 'script = "job.sbatch"'),
    ],
)
def test_lines_of_other_languages_are_not_read_as_bash(first: str, reason: str) -> None:
    text = f"{first}\n#SBATCH --nodes=2\nsetenv A 8\nimport os\n"
    conversion = import_script(text, SAMPLES, SAMPLES, name="job.sbatch")
    assert conversion.settings()["nodes"] == 2
    assert "setup" not in conversion.settings()
    for line in (3, 4):
        assert conversion.group(line)[0] == LOST
        assert reason in conversion.group(line)[1]


@pytest.mark.parametrize("first", ["#!/usr/bin/env A=1 bash", "#!/bin/bash-5.2", "#!/bin/zsh"])
def test_other_ways_to_a_shell_are_read(first: str) -> None:
    assert import_script(f"{first}\nsrun python a.py\n", SAMPLES, SAMPLES).settings()["script"]


def test_directives_of_a_burst_buffer_are_named() -> None:
    text = "#!/bin/bash\n#DW jobdw capacity=1TB access_mode=striped\nsrun python train.py\n"
    conversion = import_script(text, SAMPLES, SAMPLES)
    assert conversion.group(2) == (LOST, "of a burst buffer: your own template may have it")
    assert any("#DW jobdw" in row for row in format_table(conversion, text))
