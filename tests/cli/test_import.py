"""``hpc-ddp import``: the file that it writes, the table, and its errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_ddp.cli.main import main

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --time=1:00:00
module load cuda
scancel -n old
export HF_TOKEN=hf_abcdefghijklmnopqrstuvwx
srun torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d train.py --lr 0.1
"""
FILE = """\
# From job.sbatch, by hpc-ddp import; the numbers are its lines.

script = "train.py"  # 8
args = ["--lr", "0.1"]  # 8
nodes = 2  # 2
gpus-per-node = "4"  # 3
time = "1:00:00"  # 4
env-names = ["HF_TOKEN"]  # 7
setup = ["module load cuda"]  # 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["import", *words])


def test_writes_a_file_that_renders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("job.sbatch")
    assert result.exit_code == 0, result.output
    assert sorted((folder / "hpc-ddp.toml").read_text().splitlines()) == sorted(FILE.splitlines())
    assert "taken over: 5 lines" in result.stdout
    assert "not taken over: 2 lines" in result.stdout
    assert "        6  scancel -n old" in result.stdout
    assert "hf_abc" not in result.output
    starts_over = "train.py does not use hpc_ddp.training: after a preemption it starts over"
    assert starts_over in result.stdout
    (folder / "train.py").write_text("from hpc_ddp.training import start\n")
    assert starts_over not in run("job.sbatch").stdout
    monkeypatch.setenv("HF_TOKEN", "x")
    rendered = CliRunner().invoke(main, ["render"])
    assert "#SBATCH --nodes=2" in rendered.stdout, rendered.output
    assert "module load cuda" in rendered.stdout


def test_a_script_in_a_subfolder_is_that_of_the_working_directory(folder: Path) -> None:
    """As ``sbatch scripts/job.sbatch`` has it: relative paths are those of the call."""
    (folder / "scripts").mkdir()
    (folder / "job.sbatch").rename(folder / "scripts" / "job.sbatch")
    result = run("scripts/job.sbatch")
    assert result.exit_code == 0, result.output
    text = (folder / "hpc-ddp.toml").read_text()
    assert text.startswith("# From scripts/job.sbatch,")
    assert 'script = "train.py"' in text
    rendered = CliRunner().invoke(main, ["render"], env={"HF_TOKEN": "x"})
    assert rendered.exit_code == 0, rendered.output


def test_leaves_a_file_as_it_is_and_shows_the_difference(folder: Path) -> None:
    (folder / "hpc-ddp.toml").write_text("nodes = 3\n")
    result = run("job.sbatch")
    assert result.exit_code == 1
    assert "-nodes = 3" in result.stdout
    assert "+nodes = 2  # 2" in result.stdout
    assert "left as it is; --output FILE" in result.stderr
    assert (folder / "hpc-ddp.toml").read_text() == "nodes = 3\n"
    assert run("job.sbatch", "--output", "mine.toml").exit_code == 0
    assert run("job.sbatch", "--output", "mine.toml").exit_code == 0  # the same already
    (folder / "hpc-ddp.toml").write_bytes(b"nodes = 3  # f\xfcr\n")
    assert "left as it is; --output FILE" in run("job.sbatch").stderr


def test_bash_goes_on_to_export_a_name(folder: Path) -> None:
    """What is assigned behind an ``export`` of the name, or to one of the login's, counts."""
    lines = "export LR=0.4\nLR=0.1\nexport DATA=/d\nDATA=$DATA/x\nPATH=/x:$PATH\nlocal=3\n"
    (folder / "job.sbatch").write_text(SCRIPT.replace("scancel -n old\n", lines))
    assert run("job.sbatch").exit_code == 0
    text = (folder / "hpc-ddp.toml").read_text()
    setup = text.partition("setup = [")[2].partition("\n]")[0]
    for line in ("export LR=0.4", "export LR=0.1", "export DATA=$DATA/x", "export PATH=/x:$PATH"):
        assert f'"{line}"' in setup
    assert "local" not in text


@pytest.mark.parametrize(
    ("launch", "lines"),
    [
        ("srun env -u X python train.py", ['worker-setup = ["unset X"]']),
        ("srun env -iu X python train.py", ['worker-setup = ["unset X"]']),
        ("srun env -u X -- X=1 python train.py", ['  "export X=1",']),
        (
            "srun env --unset=X Y=1 torchrun train.py",
            ['  "export Y=1",', 'node-setup = ["unset X"]'],
        ),
        ("env -uX srun python train.py", ["setup = [", '  "module load cuda",', '  "unset X",']),
        (
            "srun env -u X bash -c '. a.sh; env -u Y python train.py'",
            ["worker-setup = [", '  "unset X",', '  ". a.sh",', '  "unset Y",'],
        ),
        ("srun env -u X bash -c 'X=1 python train.py'", ['  "export X=1",']),
    ],
)
def test_env_unsets_a_variable(folder: Path, launch: str, lines: list[str]) -> None:
    """Where it stands: in the batch script, on each node, or in each worker."""
    (folder / "job.sbatch").write_text(SCRIPT.partition("srun")[0] + launch)
    run("job.sbatch")
    written = (folder / "hpc-ddp.toml").read_text().splitlines()
    written = [line.partition("  #")[0] for line in written]
    assert [line for line in written if line in lines] == lines
    assert sum("unset" in line for line in written) == sum("unset" in line for line in lines)


def test_what_follows_a_launch_is_named(folder: Path) -> None:
    launch = "srun python train.py && srun python evaluate.py && echo done"
    (folder / "job.sbatch").write_text(SCRIPT.partition("srun")[0] + launch)
    output = run("job.sbatch").output
    assert "a second launch: teardown starts it once the training has finished" in output
    assert 'script = "train.py"' in (folder / "hpc-ddp.toml").read_text()


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        ("srun env -i python train.py", "env -i: workers need the job's variables: worker-setup"),
        ("srun env -C out python train.py", "env -C: chdir = DIR, and script = DIR/…"),
        ('srun env -u "$(a)" python train.py', 'env -u: setup or worker-setup = ["unset NAME"]'),
        ("env -u SLURM_JOB_ID srun python train.py", "env -u SLURM_JOB_ID: hpc-ddp and srun need"),
        ("env -u X bash -c 'X=1; srun python train.py'", "env -u X before a script: setup = "),
        ("srun env -S 'python train.py'", "it may be the launch: script = …, args = […]"),
    ],
)
def test_options_of_env_without_a_key_are_named(folder: Path, launch: str, reason: str) -> None:
    (folder / "job.sbatch").write_text(SCRIPT.partition("srun")[0] + launch)
    result = run("job.sbatch")
    assert f"  {reason}" in result.stdout.partition("not taken over")[2]
    assert "unset X" not in (folder / "hpc-ddp.toml").read_text()


@pytest.mark.parametrize("word", ["hetjob", "PACKJOB", "-N1 hetjob"])
def test_a_heterogeneous_job_is_taken_apart(folder: Path, word: str) -> None:
    """The first component's directives are the job; each line of the others says what to do."""
    head = f"#SBATCH 'a\n#SBATCH --nodes=2\n#SBATCH {word}\n#SBATCH --nodes=5 --gpus=1\n"
    launches = (
        "srun --het-group=1 hostname\n",
        "srun --pack-group=0 python train.py : --het-group=1 python serve.py \\\n  --port 1\n",
    )
    (folder / "job.sbatch").write_text(head + "".join(launches))
    result = run("job.sbatch")
    rows = dict(
        row.split(maxsplit=1)
        for row in result.stdout.partition("not taken over")[2].splitlines()[1:]
    )
    assert "its quotes do not match" in rows["1"]
    none = "hpc-ddp has no heterogeneous jobs"
    assert f"{none}: the lines above are the job; submit each" in rows["3"]
    assert "of another component of a heterogeneous job: submit that" in rows["4"]
    assert f"{none}: submit each component as a job of its own" in rows["5"]
    assert f"srun … : …: {none}: submit the others as jobs of their own" in rows["6"]
    assert f"srun --het-group: {none}: write this component's nodes" in rows["6"]
    assert f"srun … : …: {none}" in rows["7"]
    written = (folder / "hpc-ddp.toml").read_text()
    assert written.splitlines()[2:] == [
        'script = "train.py"  # 6',
        "nodes = 2  # 2",
        'launcher = "srun"  # 6',
    ]


def test_follows_no_link_to_a_file_that_is_not_there(folder: Path) -> None:
    """A neighbour in a shared folder may have laid it: to the login shell's file, say."""
    (folder / "hpc-ddp.toml").symlink_to(folder / "home" / ".bash_profile")
    (folder / "home").mkdir()
    result = run("job.sbatch")
    assert result.exit_code == 2
    assert "is a link to a file that is not there" in result.stderr
    assert not list((folder / "home").iterdir())


def test_takes_no_setting_from_the_name_of_a_script(folder: Path) -> None:
    name = 'a\nsetup = ["touch x"]\n#.sbatch'
    (folder / "job.sbatch").rename(folder / name)
    assert run(name).exit_code == 0
    assert "touch" in (folder / "hpc-ddp.toml").read_text().partition("\n")[0]
    (folder / "hpc-ddp.toml").unlink()
    (folder / "train.py").unlink()  # with another first line
    assert run(name).exit_code == 1
    lines = (folder / "hpc-ddp.toml").read_text().splitlines()
    assert [line[0] for line in lines if "touch" in line] == ["#"]


def test_says_what_does_not_render_yet(folder: Path) -> None:
    (folder / "train.py").unlink()
    result = run("job.sbatch")
    assert result.exit_code == 1
    assert "does not render yet: script" in result.stdout
    assert (folder / "hpc-ddp.toml").read_text().startswith("# does not render yet: script")


def test_takes_out_a_setting_that_is_refused(folder: Path) -> None:
    """And names it, and the variables of the shell that it renders with."""
    (folder / "job.sbatch").write_text(SCRIPT.replace("--time=1:00:00", "--array=soon"))
    result = run("job.sbatch")
    assert result.exit_code == 0, result.output
    assert "4  #SBATCH --array=soon" in result.stdout.partition("not taken over")[2]
    assert "renders once your shell has HF_TOKEN: " in result.stdout
    assert f"python: {sys.executable}, which runs hpc-ddp" in result.stdout
    assert "array" not in (folder / "hpc-ddp.toml").read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.sbatch", None, "can't be read: No such file"),
        ("image.sbatch", b"\xff\xfe\x00", "can't be read: it is no text"),
        ("notes.txt", b"nodes: 2\n", "is no job script: neither #! nor #SBATCH in it"),
    ],
)
def test_refuses_what_is_no_job_script(
    folder: Path, name: str, text: bytes | None, message: str
) -> None:
    if text is not None:
        (folder / name).write_bytes(text)
    result = run(name)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "hint: " in result.stderr


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda text: "\ufeff".encode() + text, "note, line 1: it begins with a byte-order mark"),
        (lambda text: text.replace(b"\n", b"\r\n"), "note, line 1: lines end as on DOS"),
        (lambda text: text + b"# Gr\xf6\xdfe\n", "wrote"),
    ],
)
def test_reads_what_other_editors_write(
    folder: Path, change: Callable[[bytes], bytes], note: str
) -> None:
    text = b"#!/bin/bash\n#SBATCH --nodes=3\nsrun python train.py\n"
    (folder / "other.sbatch").write_bytes(change(text))
    result = run("other.sbatch")
    assert "nodes = 3" in (folder / "hpc-ddp.toml").read_text()
    assert note in result.stderr


def test_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    result = run("job.sbatch")
    assert result.exit_code == 2
    assert "accepted: hpc-ddp[import]" in result.stderr
    assert "hint: pip install tree-sitter tree-sitter-bash pyyaml" in result.stderr
    assert not (folder / "hpc-ddp.toml").exists()


def test_says_that_a_copy_of_the_code_is_too_large(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1\nsrun python train.py\n")
    (folder / "train.py").write_text("import torch\n")
    monkeypatch.setattr("hpc_ddp.submission.run_files.snapshot.LIMIT_BYTES", 3)
    result = run("job.sbatch")
    assert "renders once its code can be copied: the code in" in result.stdout
    assert "nodes = 1" in (folder / "hpc-ddp.toml").read_text()
