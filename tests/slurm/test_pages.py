"""Every command that the documentation shows, on the cluster: it prints what is shown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from harness import use

from tests.page_blocks import NOISE, REPO, Block, blocks, pages, same

# What a block's `first` may call: waits that a reader does by eye, and another user's job. A wait
# for a step reads the journal: a command of hpc-ddp takes seconds, in which steps go on.
PRELUDE = r"""
at_step() { python -S -c "
import json, pathlib, sys, time
name, attempt, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
while True:
    runs = sorted(pathlib.Path('$HPC_DDP_RUNS', name).glob('*/journal'))
    text = ''.join(file.read_text() for run in runs[-1:] for file in run.glob('rank-0.jsonl'))
    events = [json.loads(line) for line in text.splitlines() if line.endswith('}')]
    if any(e['attempt'] == attempt and e.get('step', 0) >= step for e in events):
        break
    time.sleep(0.1)
" "$@"; }
over() { while [ -n "$(squeue --noheader --name "$1")" ]; do sleep 0.5; done; }
preempt() {
    sbatch --quiet --partition=high --nodes=2 --gpus-per-node=4 --output=/dev/null \
        --nodelist="$(squeue --noheader --format=%N --name "$1")" --wrap='sleep 1'
}
"""


def _with_commands() -> Iterator[object]:
    for page in pages():
        name = str(page.relative_to(REPO))
        if any(not block.not_run for block in blocks(page.read_text())):
            yield pytest.param(page, id=name)


class Session:
    """A shell in a copy of the repository, with what a page says about where things are."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.project, self.runs = folder / "project", folder / "scratch"
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=REPO, text=True)
        for name in filter(None, names.split("\0")):
            (self.project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, self.project / name)
        (folder / "home").mkdir()
        bin = folder / "bin"
        bin.mkdir()
        # Not `python -m hpc_ddp`, which would take the copy's own.
        (bin / "hpc-ddp").symlink_to(Path(sys.executable).with_name("hpc-ddp"))
        (bin / "python").symlink_to(sys.executable)
        env = cluster.env() | {"HPC_DDP_RUNS": str(self.runs), "HOME": str(folder / "home")}
        env |= {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(REPO), "COLUMNS": "120"}
        self._log = folder / "log"
        with open(self._log, "w") as log:
            self._shell = subprocess.Popen(
                ["bash"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.project,
                env=env,
                text=True,
            )
        self.names = {str(self.runs): "/scratch/me/hpc-ddp", str(self.project): "/home/me/project"}
        self.names |= {
            str(bin / "python"): "/home/me/env/bin/python",
            sys.executable: "/home/me/env/bin/python",
        }
        self.names |= {str(folder / "home"): "/home/me"}
        self.names |= {str(REPO / "templates"): "/home/me/hpc-ddp/templates"}
        self.names |= {cluster.nodes[0].removesuffix("1"): "hd0n"}  # the first test cluster's
        self.run(PRELUDE)

    def run(self, text: str) -> str:
        """Return what a command prints, with a reader's paths."""
        assert self._shell.stdin
        for real, shown in self.names.items():
            text = text.replace(shown, real)
        before, done = self._log.stat().st_size, self._log.with_name("done")
        # A command must not read what is typed next.
        self._shell.stdin.write(f"{{\n{text}\n}} </dev/null\ntouch {done}\n")
        self._shell.stdin.flush()
        wait = ["bash", "-c", f"until [ -e {done} ]; do sleep 0.05; done; rm {done}"]
        subprocess.run(wait, check=True, timeout=400)
        printed = self._log.read_bytes()[before:].decode()
        for real, shown in self.names.items():
            printed = printed.replace(real, shown)
        return NOISE.sub("", printed)

    def end(self) -> None:
        assert self._shell.stdin
        self._shell.stdin.close()
        self._shell.wait(60)


@pytest.mark.more
@pytest.mark.parametrize("page", list(_with_commands()))
def test_page(page: Path, cluster: Cluster, tmp_path: Path) -> None:
    """To accept what was printed, run with ``HPC_DDP_ACCEPT=1``, and read the diff."""
    use(cluster)
    cluster.reset()
    text, session = page.read_text(), Session(cluster, tmp_path)
    wrong, new, end = [], [], 0
    for block in blocks(text):
        printed = [] if block.not_run else _play(block, session)
        wrong += [
            f"$ {command.text}printed\n{output}\nin place of\n{command.output}"
            for command, output in zip(block.commands, printed, strict=False)
            if not same(command.output, output)
        ]
        keep = block.not_run or "…" in text[block.start : block.end]
        told = zip(block.commands, printed, strict=False)
        body = "".join(f"$ {command.text}{output}" for command, output in told)
        new += [text[end : block.start], text[block.start : block.end] if keep else body]
        end = block.end
    session.end()
    cluster.reset()
    if os.environ.get("HPC_DDP_ACCEPT"):
        page.write_text("".join([*new, text[end:]]))
    assert not wrong, "\n\n".join(wrong)


def _play(block: Block, session: Session) -> list[str]:
    if block.first:
        session.run(block.first)
    return [session.run(command.text) for command in block.commands]
