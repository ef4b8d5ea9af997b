"""Scripts that submit a job script which is a text in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.submission.job_script.conversion import LOST, OURS, Conversion
from hpc_ddp.submission.job_script.importer import import_script
from hpc_ddp.submission.job_script.output import is_code

JOB = """\
#!/bin/bash
#SBATCH --nodes=2 --gpus-per-node=4 --job-name=$MODEL
#SBATCH --time=1:00:00
srun torchrun --nnodes=2 --nproc_per_node=4 train.py --model '$MODEL' --user \\$USER > /tmp/log
"""


def of_text(tmp_path: Path, text: str, *arguments: str) -> Conversion:
    return import_script(f"#!/bin/bash\n{text}", tmp_path, tmp_path, arguments)


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


def test_a_document_is_no_job_where_sbatch_reads_another_script(tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"sbatch -p gpu other.sh <<'EOT'\n{JOB}EOT\n")
    assert "script" not in conversion.settings()


def test_its_first_line_and_its_array_are_the_jobs(tmp_path: Path) -> None:
    """A sentence of the report was read in place of the job's text."""
    head = "#!/bin/bash -l\n#SBATCH --array=0-3%1 --gpus=1\n"
    job = f"{head}python train.py --fold $SLURM_ARRAY_TASK_ID\n"
    settings = of_text(tmp_path, f"sbatch <<'EOT'\n{job}EOT\n").settings()
    assert settings["array"] == "0-3%1"
    assert settings["setup"][0].startswith(". /etc/profile")


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


def test_an_option_that_only_the_shell_knows_is_named(tmp_path: Path) -> None:
    conversion = of_text(
        tmp_path, f"MODEL=b\nT=$(date +%H)\nsbatch --time=$T -p gpu <<EOT\n{JOB}EOT\n"
    )
    assert conversion.group(4) == (
        LOST,
        "--time=$T: only the shell that submits knows it: write it",
    )
    assert conversion.values["partition"] == ("gpu", 4)
    assert "time" not in conversion.settings()


@pytest.mark.parametrize(
    "text",
    [
        "MODEL=x-$(date +%s)\nsbatch <<EOT\n{}EOT\n",  # the text has it
        "MODEL=a\nLR=1\nsbatch <<EOT\n{}echo \\$LR\nEOT\n",  # the job does not have it
        "MODEL=a\nsbatch <<EOT\n{}echo $(cat x)\nEOT\n",
        "MODEL=a\ncd work && sbatch <<EOT\n{}EOT\n",
        "MODEL=a\nA=1 sbatch <<EOT\n{}EOT\n",
        "MODEL=a\nsbatch other.sh\nsbatch <<EOT\n{}EOT\n",
        "MODEL=a\ncat > x.sh <<EOT\n{}EOT\nsbatch x.sh 1\n",
        "MODEL=a\ncat > x.sh <<EOT\n{}EOT\nif [ $A ]; then sbatch x.sh; fi\n",
        "MODEL=a\ncat > x.sh <<EOT\n{}EOT\nsbatch $OPTIONS x.sh\n",
        "MODEL=a\ncat <<EOT | sed s/a/b/ | sbatch\n{}EOT\n",
        "MODEL=a\nAPI_KEY=zq81kfp0aa73xd\nsbatch <<EOT\n{}echo $API_KEY\nEOT\n",  # a secret
        'MODEL=a\nD=$(dirname "$0")\nsbatch <<EOT\n{}EOT\n',
    ],
)
def test_a_job_that_is_more_than_its_text_is_refused(text: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, text.format(JOB))
    assert "script" not in conversion.settings()
    lines = enumerate(f"#!/bin/bash\n{text.format(JOB)}".splitlines(), 1)
    assert any(conversion.group(n)[0] == LOST for n, line in lines if "sbatch" in line)


@pytest.mark.parametrize(
    "line",
    ["export DATA=/data/sbatch/x", "export MODEL", "unset LR", "source sbatch/env.sh"],
)
def test_other_lines_before_it_stay(line: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"MODEL=a\nLR=2\n{line}\nsbatch <<EOT\n{JOB}EOT\n")
    assert conversion.settings()["script"] == "train.py"
    assert conversion.group(4) != (OURS, "hpc-ddp submit does it")


@pytest.mark.parametrize(
    ("line", "group"), [("tail -f x.log", LOST), ("mv out final", LOST), ("echo $id", OURS)]
)
def test_lines_behind_it_are_none_of_the_job(line: str, group: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"MODEL=a\nset -e\nid=$(sbatch <<EOT\n{JOB}EOT\n)\n{line}\n")
    assert conversion.group(11)[0] == group
    assert not {"setup", "teardown"} & conversion.settings().keys()


@pytest.mark.parametrize(
    ("before", "after"), [("for MODEL in a b; do", "done"), ("if [ -f a ]; then", "fi")]
)
def test_one_in_a_block_is_refused(before: str, after: str, tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"{before}\nsbatch <<EOT\n{JOB}EOT\n{after}\n")
    assert "script" not in conversion.settings()
    assert conversion.group(3)[0] == LOST


def test_of_two_none_is_the_job(tmp_path: Path) -> None:
    conversion = of_text(tmp_path, f"sbatch <<EOT\n{JOB}EOT\nsbatch <<EOT\n{JOB}EOT\n")
    assert "script" not in conversion.settings()


@pytest.mark.parametrize(
    "addition",
    [
        "cat >> job.sh <<'E'\npython a.py\nE", "cat >> ./job.sh <<E\n#SBATCH -t 5\nE",
        "echo 'python a.py' >> \"job.sh\"", "sed -i s/train/a/ job.sh", "echo b | tee -a job.sh",
        "if [ -e x ]; then\n  echo b >> job.sh\nfi",
    ],
)  # fmt: skip
def test_a_script_that_is_written_in_parts_is_named(addition: str, tmp_path: Path) -> None:
    text = f"cat > job.sh <<'EOT'\n{JOB}EOT\n{addition}\nsbatch job.sh\n"
    conversion = of_text(tmp_path, text)
    group, reason = conversion.group(text.count("\n") + 1)
    assert (group, "in parts" in reason) == (LOST, True)
    assert "script" not in conversion.settings()
    other = of_text(tmp_path, text.replace(addition, "echo b > job.sh.log; cat job.sh"))
    assert "in parts" not in str(other.marks)


@pytest.mark.parametrize(
    "form",
    [
        'if [ -z "${{SLURM_JOB_ID:-}}" ]; then\n  exec sbatch {} "$0" "$@"\nfi\n{}\n',
        '[ -n "$SLURM_JOB_ID" ] || {{ sbatch {} $0; exit; }}\n{}\n',
        '[ -z "$SLURM_JOB_ID" ] && sbatch {} "${{BASH_SOURCE[0]}}" && exit\n{}\n',
        'if [[ -z ${{SLURM_JOB_ID+x}} ]]; then sbatch {} "$0"; exit 0; fi\n{}\n',
        'if [ -n "$SLURM_JOB_ID" ]; then\n  {1}\nelse\n  sbatch {0} "$0"\nfi\n',
    ],
)
def test_the_options_of_a_script_that_submits_itself_are_the_jobs(
    form: str, tmp_path: Path
) -> None:
    options = "--nodes=4 --export=ALL,LR=3 -A x --time=5"
    launch = "srun torchrun --nnodes=4 --nproc_per_node=2 train.py --lr $LR"
    conversion = of_text(tmp_path, "#SBATCH -t 9\n" + form.format(options, launch))
    settings = conversion.settings()
    keys = ("nodes", "account", "time", "env", "script")
    assert [settings[key] for key in keys] == [4, "x", "5", {"LR": "3"}, "train.py"]
    said = str(conversion.marks) + str(conversion.notes)
    assert "--time of line" in said or "replaces it" in said
    assert not [word for word in ("is false", "requeued", "to be exported") if word in said]


def test_what_only_the_shell_that_submits_knows_is_named(tmp_path: Path) -> None:
    lines = 'if [ -z "$SLURM_JOB_ID" ]; then', "source .env", "N=4; mkdir -p logs"
    submit = 'LR=3 sbatch -N $N --account="$ACC" --mail-user="$MAIL" "$0" run'
    conversion = of_text(tmp_path, "\n".join((*lines, submit, "fi", "srun python train.py")))
    assert conversion.settings()["nodes"] == 4
    for number in (3, 4):
        assert conversion.group(number)[0] == LOST
        assert "it runs where sbatch is called" in conversion.group(number)[1]
    reasons = conversion.reasons(5, LOST)
    assert all(text in reasons for text in ("--account=$ACC", "--mail-user=$MAIL", "LR=3 run"))


def test_a_job_that_submits_itself_again_is_requeued(tmp_path: Path) -> None:
    text = 'srun python train.py\n[ -n "$SLURM_JOB_ID" ] && sbatch --nodes=4 "$0"\n'
    conversion = of_text(tmp_path, text)
    assert conversion.settings()["nodes"] == 1
    assert conversion.group(3) == (OURS, "the job is requeued until it has finished")
