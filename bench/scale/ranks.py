"""Real ranks over Gloo, many of them on this machine: start, agreements, stop, save, restore.

``python bench/scale/ranks.py [RANKS] [RANKS_LATER]`` (512 384), 16 to a node: the first attempt is
stopped by a signal to one rank, the second goes on with another number of ranks, and a single rank
does the same without a stop: their weights have to be the same bits. Ranks are forked from a
process that has imported torch, as the tests do; only hpc-ddp's own messages travel (see
equal_ranks.py), and of the default group, a full mesh that NCCL does not make, only the connections
that are used (TORCH_GLOO_LAZY_INIT). Idle threads of Gloo look for messages less often
(patient_epoll.c; needs gcc).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests/ddp")]
os.environ.setdefault("PYTEST_CURRENT_TEST", "bench")  # the tests' workers are named after it

from crews import (  # type: ignore[import-not-found]  # noqa: E402  # of the tests
    Crew,
    Zygote,
)
from patient_epoll import preload_patient_epoll  # noqa: E402

from hpc_ddp.core.checkpoints import published, read_manifest  # noqa: E402
from hpc_ddp.core.run_folder import RunFolder  # noqa: E402
from hpc_ddp.training.checkpoint.restore import open_checkpoint  # noqa: E402

PER_NODE = 16
TOTAL, STOP_AT = 20, 6
SCRIPT = str(Path(__file__).with_name("equal_ranks.py"))


class Trial:
    """A run on this machine, attempt by attempt."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        folder.mkdir()
        run = RunFolder(folder / "run").make()
        self.crew, self.folder = Crew(zygote, folder, run), folder

    def attempt(self, ranks: int, stop_at: int | None = None) -> list[dict[str, Any]]:
        """Play an attempt, stopped by a signal at a step or to its end; print what it took, and
        return what the ranks report."""
        began = time.time()
        nodes = {"LOCAL_WORLD_SIZE": str(min(PER_NODE, ranks)), "TORCH_GLOO_LAZY_INIT": "1"}
        argv = (str(TOTAL), str(self.folder))
        nodes_of = [f"n{rank // PER_NODE}" for rank in range(ranks)]
        launch = self.crew.launch(ranks, *argv, script=SCRIPT, nodes=nodes_of, **nodes)
        while stop_at and self._step() < stop_at:
            time.sleep(0.01)
        sent = time.time()
        if stop_at:
            os.kill(launch.pids[ranks // 2], signal.SIGTERM)
        codes = launch.wait()
        assert not any(codes), launch.output()[-3000:]
        facts = [json.loads((self.folder / f"rank-{n}.json").read_text()) for n in range(ranks)]
        self._print(facts, began, sent)
        return facts

    def _step(self) -> int:
        """Return the step that rank 0 has ended last."""
        path = self.folder / "at"
        return int(path.read_text() or 0) if path.exists() else 0

    def _print(self, facts: list[dict[str, Any]], began: float, sent: float) -> None:
        """Print what an attempt took."""
        names = ("first_step", "stopped", "restored", "checkpoint")
        events = {name: [e for e in self.crew.events(name) if e["time"] > began] for name in names}
        times, sockets = facts[0]["times"], [row["sockets"] for row in facts]
        ms = [1000 * seconds for seconds in (statistics.median(times), max(times))]
        print(f"\n**{len(facts)} ranks**, {-(-len(facts) // PER_NODE)} nodes")
        print(f"- first step after {events['first_step'][0]['time'] - began:.1f} s")
        print(f"- a step, which is an agreement: {ms[0]:.0f} ms (median), {ms[1]:.0f} ms (slowest)")
        for event in events["stopped"]:
            print(f"- stopped and saved {event['time'] - sent:.2f} s after the signal")
        for event in events["restored"]:
            slowest = max(row["restored_s"] for row in facts)
            print(f"- verified in {event['restore_s']:.2f} s; read by all ranks in {slowest:.2f} s")
        print(f"- sockets of a rank: {statistics.median(sockets):.0f}, {max(sockets)} at most")
        newest = published(self.crew.run.checkpoints)[0]
        files, index = read_manifest(newest)["files"], open_checkpoint(newest).index
        print(f"- {newest.name}: {len(files) + 1} files, {len(index.layouts)} layouts", flush=True)
        for save in events["checkpoint"][-1:]:  # none of an attempt of a few steps
            print(f"- {save['bytes'] / 1e6:.1f} MB, written in {save['write_s']:.2f} s", flush=True)


def main() -> None:
    """Play it, and compare the weights."""
    preload_patient_epoll()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    ranks, later = (int(word) for word in (sys.argv[1:] or ["512", "384"]))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        zygote = Zygote(Path(name), "cpu")
        alone = Trial(zygote, Path(name) / "alone").attempt(1)
        trial = Trial(zygote, Path(name) / "many")
        first = trial.attempt(ranks, STOP_AT)
        second = trial.attempt(later)
    zygote.end()
    sums = [{row["sum"] for row in facts} for facts in (first, second, alone)]
    print(f"\nranks that stopped: {len(sums[0])} sum; those that went on: {len(sums[1])} sum;")
    print(f"the same as that of one rank: {sums[1] == sums[2]}")


if __name__ == "__main__":
    main()
