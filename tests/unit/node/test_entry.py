"""node.py finds the package beside it before any other, and looks there for nothing of Python's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.node.outcome.first_failure import read_failures

ENTRY = Path(__file__).parents[3] / "hpc_ddp/node/entry.py"
PART = """
import json, sys
def main(words):
    print(json.dumps({"path": sys.path, "words": words, "file": __file__, "json": json.__file__}))
    return 7
"""


def make(folder: Path) -> Path:
    """Make a package hpc_ddp with one part, and return the folder."""
    (folder / "hpc_ddp/node").mkdir(parents=True)
    for name, text in {"__init__": "", "node/__init__": "", "node/part": PART}.items():
        (folder / "hpc_ddp" / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize("has_pythonpath", [False, True])
def test_the_package_comes_after_pythons_library_and_before_all_else(
    tmp_path: Path, has_pythonpath: bool
) -> None:
    lib, other = make(tmp_path / "lib"), make(tmp_path / "other")
    (lib / "node.py").write_text(ENTRY.read_text())
    (other / "json.py").write_text("1 / 0")  # in the working directory, which is not looked at
    env = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    if has_pythonpath:
        (other / "json.py").unlink()
        env["PYTHONPATH"] = str(other)
    done = subprocess.run(
        [sys.executable, lib / "node.py", "part", "a word"],
        cwd=other,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    report = json.loads(done.stdout)
    assert (report["words"], report["file"]) == (["a word"], str(lib / "hpc_ddp/node/part.py"))
    library = str(Path(report["json"]).parents[1])
    place, pythons = report["path"].index(str(lib)), report["path"].index(library)
    if has_pythonpath:
        assert report["path"][:2] == [str(lib), str(other)]
    else:
        assert pythons < place
        assert not [path for path in report["path"][:place] if "-packages" in path]


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["supervisor", "torchrun", "x"], "logs/attempt-2/n1/record.json"),
        (["supervisor", "worker", "x"], "logs/attempt-2/n1/record-3.json"),
        (["elastic_agent", "--nnodes=1"], "failures.json"),
        (["batch", "begin"], ""),
    ],
)
def test_an_old_python_says_so_where_the_verdict_reads_it(
    tmp_path: Path, words: list[str], file: str
) -> None:
    """Any Python stands in for an old one, by the number that it gives."""
    text = f"import sys; sys.version_info = (3, 8, 1); exec(open({str(ENTRY)!r}).read())"
    env = {"HPC_DDP_RUN": str(tmp_path), "HPC_DDP_ATTEMPT": "2", "SLURM_PROCID": "3"}
    env |= {"HPC_DDP_NODE_FOLDER": str(tmp_path), "SLURMD_NODENAME": "n1"}
    done = subprocess.run([sys.executable, "-c", text, *words], env=env, capture_output=True)
    assert done.returncode == 1
    error = "Python 3.8 is too old; accepted for --python: 3.10 or later"
    assert done.stderr.decode() == f"hpc-ddp: {error}\n"
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == ([tmp_path / file] if file else [])
    if not file:
        return
    record: dict[str, Any] = json.loads(written[0].read_text())
    if "agent" in record:
        assert record == {"agent": error}
    else:
        (failure,) = read_failures(record)
        assert str(failure) == f"torchrun on n1: {error}"


@pytest.mark.parametrize(
    ("line", "number", "code", "message"),
    [
        ("import hpc_ddp.away", "0", 111, "hpc-ddp: its part can't be loaded yet"),
        ("import hpc_ddp.away", "1", 111, ""),
        ("raise ImportError('libffi.so.8: cannot open')", "0", 1, "ImportError: libffi.so.8"),
    ],
)
def test_a_part_that_is_away_is_told_from_one_that_never_loads(
    tmp_path: Path, line: str, number: str, code: int, message: str
) -> None:
    """It took a quarter of an hour, without a word, on a node without a library of Python's."""
    lib = make(tmp_path)
    (lib / "node.py").write_text(ENTRY.read_text())
    (lib / "hpc_ddp/node/batch.py").write_text(line)
    env = {**os.environ, "HPC_DDP_TRY": number}
    words = [sys.executable, str(lib / "node.py"), "batch", "begin"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert message in done.stderr
    assert message or not done.stderr


def test_a_call_of_the_batch_script_lives_through_slurms_sigterm(tmp_path: Path) -> None:
    lib = make(tmp_path)
    (lib / "node.py").write_text(ENTRY.read_text())
    text = "import os, signal\ndef main(words): os.kill(os.getpid(), signal.SIGTERM); return 7\n"
    (lib / "hpc_ddp/node/batch.py").write_text(text)
    reading, writing = os.pipe()
    env = {**os.environ, "HPC_DDP_LOADED": str(writing)}
    words = [sys.executable, str(lib / "node.py"), "batch", "watch"]
    assert subprocess.run(words, env=env, pass_fds=(writing,)).returncode == 7
    assert os.read(reading, 9) == b"yes"  # so that it is not called again
    assert subprocess.run(words, env=env).returncode == 7  # of a wrapper that closes it
    os.close(reading)
    os.close(writing)
