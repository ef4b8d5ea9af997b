"""Scripts that submit a job script which is a text in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, OURS, Conversion
from hpc_ddp.submission.job_script.convert import convert
from hpc_ddp.submission.job_script.project_file import is_code

JOB = """\
#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=4 --job-name=$MODEL
#SBATCH --time=1:00:00
srun torchrun --nnodes=2 --nproc_per_node=4 train.py --model '$MODEL' --user \\$USER > /tmp/log
"""


def of_text(tmp_path: Path, text: str, *arguments: str) -> Conversion:
    return convert(f"#!/bin/bash\n{text}", tmp_path, tmp_path, arguments)


@pytest.mark.parametrize(
    "form",
    [
        "sbatch <<EOT\n{}EOT\n",
        "cat <<EOT | sbatch\n{}EOT\n",
        "cat > $JOB <<EOT\n{}EOT\nchmod +x $JOB\nsbatch $JOB\nrm -f $JOB\n",
        "cat <<EOT > job.sh\n{}EOT\nid=$(sbatch --parsable job.sh)\necho $id\n",
        "id=$(sbatch <<EOT\n{}EOT\n)\n[ -n $id ] || exit 1\n",
    ],
)
def test_a_here_document_is_the_job(form: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, "MODEL=big\nJOB=$(mktemp)\n" + form.format(JOB))
    assert conversion.settings() == {
        "job-name": "big",
        "nodes": 2,
        "gpus-per-node": "4",
        "time": "1:00:00",
        "script": "train.py",
        "args": ["--model", "big", "--user", "$USER"],
        "expand": ["USER"],
    }
    lines = enumerate(form.format(JOB).splitlines(), 4)
    assert LOST not in {conversion.group(n)[0] for n, line in lines if is_code(line)}


def test_lines_around_it_are_the_jobs(tmp_path: Path) -> None:
    text = f"mkdir -p logs\nexport A=1\nMODEL=$1\nsbatch <<EOT\n{JOB}EOT\necho $1\n"
    settings = of_text(tmp_path, text, "big").settings()
    assert settings["setup"] == ["mkdir -p logs"]
    assert settings["env"] == {"A": "1"}
    assert settings["job-name"] == "big"
    assert "teardown" not in settings


def test_options_of_its_command_line_come_first(tmp_path: Path) -> None:
    text = f"T=2:00:00\nMODEL=b\nsbatch --time=$T \\\n -p gpu <<EOT\n{JOB}EOT\n"
    conversion = of_text(tmp_path, text)
    assert conversion.values["time"] == ("2:00:00", 4)
    assert conversion.values["partition"] == ("gpu", 4)
    assert conversion.group(8) == (OURS, "--time of line 4 replaces it")


def test_a_quoted_one_keeps_its_variables(tmp_path: Path) -> None:
    text = (
        "A=1\nsbatch <<-'EOT'\n\t#SBATCH -N 1 --gpus=2\n\tsrun python train.py '\\$A' $B\n\tEOT\n"
    )
    settings = of_text(tmp_path, text).settings()
    assert (settings["nodes"], settings["args"]) == (1, ["\\$A", "${ARGUMENTS_1[@]}"])


def test_what_only_the_shell_knows_is_named(tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"MODEL=x-$(date +%s)\nsbatch <<EOT\n{JOB}EOT\n")
    assert conversion.group(5) == (
        LOST,
        "--job-name=$MODEL: only the shell that submits knows it: write it",
    )
    assert "job-name" not in conversion.settings()


@pytest.mark.parametrize(
    ("before", "after"), [("for MODEL in a b; do", "done"), ("if [ -n $1 ]; then", "fi")]
)
def test_one_in_a_block_is_refused(before: str, after: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"{before}\nsbatch <<EOT\n{JOB}EOT\n{after}\n")
    assert "script" not in conversion.settings()
    assert conversion.group(3)[0] == LOST


def test_of_two_none_is_the_job(tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"sbatch <<EOT\n{JOB}EOT\nsbatch <<EOT\n{JOB}EOT\n")
    assert "script" not in conversion.settings()
