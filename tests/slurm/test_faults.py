"""The soak of random faults: several runs at once, and all end as if nothing had been.

``HPC_DDP_FAULT_MINUTES`` (30) is for how long faults come, ``HPC_DDP_FAULT_SEED`` (1) decides which
ones, and ``HPC_DDP_FAULT_REPORT`` names a file for the result.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest
from cluster import Cluster, available
from cluster_machine import LIMIT_S, poll, sh
from fault_player import Lot, Noted, Player, outcome
from faults import GAP_S, KINDS, LANES, WORKERS, plan, schedule, table
from harness import DIGITS, Hpc, Job, same_weights

from hpc_ddp.core.checkpoints import candidates, step_of, verify
from hpc_ddp.core.journal import goodput
from hpc_ddp.core.run_folder import RunFolder
from tests.raw_events import raw_events

MINUTES = float(os.environ.get("HPC_DDP_FAULT_MINUTES", "30"))
SEED = int(os.environ.get("HPC_DDP_FAULT_SEED", "1"))
REPORT = os.environ.get("HPC_DDP_FAULT_REPORT")

EPOCHS = {1: 6, 2: 11}  # by nodes: 540 and 495 steps
STEP_S = "0.2"  # so a run takes some 100 s of steps
SEEDS = 2  # the runs of a lane have them in turn
SCRATCH = "size=128m"
# From the last fault on. A run may just have begun, and a busy machine takes a minute to start one.
END_S = 900.0


# --- the schedule, without a cluster -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_says_which_faults_come(seed: int) -> None:
    faults = schedule(seed, 1800)
    assert faults == schedule(seed, 1800)
    assert faults[: len(schedule(seed, 600))] == schedule(seed, 600)
    times = [fault.at for fault in faults]
    gaps = [b - a for a, b in zip([0, *times], times, strict=False)]
    assert all(GAP_S[0] - 0.1 <= gap <= GAP_S[1] + 0.1 for gap in gaps)
    assert times[-1] < 1800 <= times[-1] + GAP_S[1] + 0.1
    assert {fault.kind for fault in faults} == set(KINDS)
    for fault in faults:
        nodes = LANES[fault.lane].nodes
        assert fault.lane in KINDS[fault.kind].lanes
        assert fault.node < nodes
        assert fault.rank < nodes * WORKERS


def test_other_seeds_have_other_faults() -> None:
    assert len({tuple(schedule(seed, 1800)) for seed in range(20)}) == 20
    assert plan(schedule(1, 300)).count("\n") == 2 + len(schedule(1, 300))


# --- the soak ------------------------------------------------------------------------------------


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[list[Path]]:
    """A file system of its own for each lane, made before the cluster whose nodes are to see it."""
    reason = available()
    if reason:
        pytest.skip(reason)
    folders = [tmp_path / f"lane-{lane}" for lane in range(len(LANES))]
    for folder in folders:
        folder.mkdir()
        sh("mount", "-t", "tmpfs", "-o", SCRATCH, "none", str(folder))
    try:
        yield folders
    finally:
        for folder in folders:
            sh("umount", "-l", str(folder))


@pytest.fixture
def own_cluster(lanes: list[Path]) -> Iterator[Cluster]:
    up = Cluster.up()
    try:
        yield up
    finally:
        up.down()


@dataclass
class Soak:
    """Keeps a run in each lane, and plays the faults beside them."""

    cluster: Cluster
    lanes: list[Path]
    player: Player
    kept: Path  # a folder for what is left of runs that are lost
    began: float = 0.0
    runs: list[Lot] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    _asked: float = 0.0
    _suspects: set[str] = field(default_factory=set)

    def say(self, text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", flush=True)

    def submit(self, lane: int) -> None:
        """Submit the next run of a lane. Code of earlier runs, 11 MB each, would fill its disk."""
        earlier = [lot for lot in self.runs if lot.lane == lane]
        for lot in earlier[:-1]:
            shutil.rmtree(lot.job.run.path / "code", ignore_errors=True)
        number = len(earlier)
        kind, seed = LANES[lane], number % SEEDS
        backend = "slurm" if kind.chain or (lane + number) % 2 == 0 else "submitit"
        hpc = Hpc(self.cluster, self.lanes[lane])
        words = ("--continue-by", "resubmit") if kind.chain else ("--backend", backend)
        try:
            job = hpc.submit(
                *("--job-name", f"run-{lane}-{number}", "--max-failures", "1000", *words),
                *("--nodes", str(kind.nodes), "--gpus-per-node", str(WORKERS)),
                *(str(DIGITS), *arguments(kind.nodes, seed), "--step-seconds", STEP_S),
                env={"HPC_DDP_SAVE_EVERY": "1"},
            )
        except AssertionError as error:  # tried again, since the place stays empty
            self.say(f"run-{lane}-{number} could not be submitted: {error}")
            return
        lot = Lot(lane, number, seed, "chain" if kind.chain else backend, job, self.lanes[lane])
        self.runs.append(lot)
        self.player.lots[lane] = lot
        self.say(f"{lot.name} is job {job.id} ({lot.backend})")

    def go(self, seconds: float) -> None:
        """Play the schedule, and have a new run take the place of each that is through."""
        faults = schedule(SEED, seconds)
        for lane in range(len(LANES)):
            self.submit(lane)
        self.began = time.time()
        while (now := time.time() - self.began) < seconds:
            self.player.heal()
            if faults and faults[0].at <= now and not self.player.ctld_frozen:
                noted = self.player.play(faults.pop(0))
                self.say(f"{'missed: ' if noted.missed else ''}{noted.fault.kind}: {noted.target}")
            if not self.player.ctld_frozen:
                self.look_for_lost()
                for lane in range(len(LANES)):
                    lot = self.player.lots.get(lane)
                    if lot is None or lot.job.run.finished() or lot.name in self.lost:
                        self.submit(lane)
            time.sleep(0.5)
        self.player.heal(everything=True)

    def wait(self, seconds: float) -> None:
        """Wait until all runs are finished and no job is left; stop early if none can follow."""

        def over() -> bool:
            self.look_for_lost()
            left = [lot for lot in self.runs if lot.name not in self.lost]
            return all(lot.job.run.finished() for lot in left) and not self.queue()

        poll(over, seconds, 1.0)

    def queue(self) -> dict[str, str]:
        """Return what Slurm has, by the job's name: state and reason."""
        told = self.cluster.run("squeue", "-h", "-o", "%j %T %r", check=False).stdout
        return {line.split()[0]: line.partition(" ")[2] for line in told.splitlines()}

    def look_for_lost(self) -> None:
        """Every ten seconds: a run that is not finished and has no job, twice, is lost."""
        if time.time() < self._asked + 10:
            return
        self._asked = time.time()
        done = self.cluster.run("squeue", "-h", "-o", "%j", check=False)
        if done.returncode:
            return
        names = done.stdout.split()
        gone = {
            lot.name
            for lot in self.runs
            if lot.name not in names and not lot.job.run.finished() and lot.name not in self.lost
        }
        for name in sorted(gone & self._suspects):
            self.say(f"LOST: {name} is not finished, and has no job any more")
            self.lost.append(name)
            self._keep(next(lot for lot in self.runs if lot.name == name))
        self._suspects = gone

    def _keep(self, lot: Lot) -> None:
        """Copy what tells why a run was lost out of its lane, which is unmounted at the end."""
        source, target = lot.job.run.path, self.kept / lot.name
        for folder in ("journal", "logs"):
            shutil.copytree(source / folder, target / folder, dirs_exist_ok=True)
        shutil.copytree(self.cluster.folder / "log", target / "log", dirs_exist_ok=True)
        lines = (self.cluster.folder / "log" / "slurmctld.log").read_text().splitlines()
        of_job = [line for line in lines if re.search(rf"JobId={lot.job.id}\b", line)]
        print("\n".join((*of_job[-20:], *lot.job.output().splitlines()[-20:])), flush=True)

    # --- the result ---

    def log(self) -> str:
        """Return the table of all faults that were played, with what came of each."""
        rows = []
        for index, noted in enumerate(self.player.noted):
            when = f"{datetime.fromtimestamp(noted.time):%H:%M:%S}"
            what = "missed" if noted.missed else outcome(noted, self._until(index))
            rows.append((when, noted.fault.kind, noted.target, what))
        return table(("time", "fault", "target", "what came of it"), rows)

    def _until(self, index: int) -> float:
        """Return the time of the next fault that hit one of the same runs."""
        noted = self.player.noted
        mine = {id(lot) for lot, _ in noted[index].hit}
        later = (n for n in noted[index + 1 :] if mine & {id(lot) for lot, _ in n.hit})
        following: Noted | None = next(later, None)
        return following.time if following else float("inf")

    def summary(self) -> str:
        """Return the result in Markdown."""
        faults = Counter(n.fault.kind for n in self.player.noted if not n.missed)
        missed = Counter(n.fault.kind for n in self.player.noted if n.missed)
        events = {lot.name: raw_events(lot.job.run.path) for lot in self.runs}
        verdicts = Counter(
            (e["cause"], e["action"])
            for found in events.values()
            for e in found
            if e["event"] == "verdict"
        )
        attempts = sum(len(lot.job.run.attempts()) for lot in self.runs)
        parts = Counter[str]()
        for lot in self.runs:
            parts.update(goodput.account(lot.job.run.events()))
        nodes = {lot.name: LANES[lot.lane].nodes for lot in self.runs}
        rows = [
            (
                lot.name,
                lot.backend,
                f"{nodes[lot.name]}x{WORKERS}",
                lot.seed,
                len(lot.job.run.attempts()),
                "yes" if lot.job.run.finished() else "NO",
            )
            for lot in self.runs
        ]
        commit = sh("git", "-C", str(DIGITS.parent), "rev-parse", "--short", "HEAD", check=False)
        return "\n".join(
            (
                f"# Soak of random faults, {datetime.now():%Y-%m-%d %H:%M}\n",
                f"Seed {SEED}, {MINUTES:g} minutes of faults, commit {commit.strip()}, "
                f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}.\n",
                f"- {len(self.runs)} runs in {attempts} attempts, "
                f"{attempts - verdicts.total()} of them ended without a verdict",
                f"- {faults.total()} faults, {missed.total()} missed their target",
                f"- {goodput.line(dict.fromkeys(goodput.PARTS, 0.0) | dict(parts))}\n",
                table(
                    ("fault", "done", "missed", "what it is"),
                    [(k, faults[k], missed[k], KINDS[k].is_there) for k in KINDS],
                ),
                table(("cause", "action", "verdicts"), [(*k, n) for k, n in verdicts.items()]),
                table(("run", "back-end", "size", "seed", "attempts", "finished"), rows),
                self.log(),
            )
        )

    def problems(self, twins: dict[tuple[int, int], Job]) -> Iterator[str]:
        """Yield whatever is not as it should be in the end."""
        queue = self.queue()
        for lot in self.runs:
            if not lot.job.run.finished():
                yield f"{lot.name} is not finished: {queue.get(lot.name, 'no job')}"
                continue
            yield from self._checkpoints(lot)
            yield from self._steps(lot)
            if not same_weights(lot.job, twins[LANES[lot.lane].nodes, lot.seed]):
                yield f"{lot.name} has other weights than its twin"
        if queue:
            yield f"jobs are left: {queue}"
        if not poll(lambda: not self.cluster.strays(), LIMIT_S, 1):
            yield f"processes are left: {[p.name() for p in self.cluster.strays()]}"

    def _checkpoints(self, lot: Lot) -> Iterator[str]:
        """Check that nothing lies there that a start would take for a checkpoint and is none."""
        for path in candidates(lot.job.run.checkpoints):
            why = verify(path)
            if why and path.name not in lot.damaged:
                yield f"{lot.name}: {path.name} does not verify: {why}"
        newest = candidates(lot.job.run.checkpoints)[0]
        if step_of(newest) != lot.job.events("finished")[-1]["step"] or verify(newest):
            yield f"{lot.name}: its newest checkpoint is {newest.name}: {verify(newest)}"

    def _steps(self, lot: Lot) -> Iterator[str]:
        """Check that each attempt went on from the newest checkpoint but for the ones damaged."""
        saved: list[tuple[float, int]] = []
        set_aside: set[int] = set()  # damaged ones, which no later attempt sees
        for attempt in lot.job.run.attempts():
            here = [e for e in raw_events(lot.job.run.path) if e["attempt"] == attempt.number]
            began = min((e["time"] for e in here if e["event"] == "started"), default=0.0)
            restored = next((e for e in here if e["event"] == "restored"), None)
            first = next((e["step"] for e in here if e["event"] == "first_step"), None)
            steps = {step for when, step in saved if when < began} - set_aside
            known = max(steps, default=0)
            passed = restored["passed_over"] if restored else []
            set_aside |= {step_of(Path(name.partition(":")[0])) for name in passed}
            if passed and not {name.partition(":")[0] for name in passed} <= lot.damaged:
                yield f"{lot.name}.{attempt.number} passed over {passed}"
            step = restored["step"] if restored else 0
            if first is not None and (first != step + 1 or (step < known and not passed)):
                yield (
                    f"{lot.name}.{attempt.number} restored step {step} and went on at {first};"
                    f" step {known} was saved"
                )
            saved += [(e["time"], e["step"]) for e in here if e["event"] == "checkpoint"]


def arguments(nodes: int, seed: int) -> tuple[str, ...]:
    return ("--epochs", str(EPOCHS[nodes]), "--batch-size", "8", "--seed", str(seed))


def make_twins(cluster: Cluster, tmp_path: Path) -> dict[tuple[int, int], Job]:
    """Return an undisturbed run for each number of nodes and seed.

    They are dry runs; for each number of nodes, one on the cluster shows that it is the same.
    """
    twins = {}
    for nodes in EPOCHS:
        size = ("--nodes", str(nodes), "--gpus-per-node", str(WORKERS))
        on_cluster = Hpc(cluster, tmp_path / "runs").submit(
            *size, str(DIGITS), *arguments(nodes, 0)
        )
        for seed in range(SEEDS):
            words = ("--json", *size, str(DIGITS), *arguments(nodes, seed))
            told = Hpc(cluster, tmp_path / "twins")("dry-run", *words).stdout
            run = RunFolder(Path(json.loads(told.splitlines()[-1])["run"]))
            twins[nodes, seed] = Job(cluster, "", run)
        assert on_cluster.end() == "COMPLETED", on_cluster.output()
        assert same_weights(on_cluster, twins[nodes, 0])
        assert not same_weights(twins[nodes, 0], twins[nodes, 1])
    return twins


@pytest.mark.more
def test_random_faults(own_cluster: Cluster, lanes: list[Path], tmp_path: Path) -> None:
    print(f"\nseed {SEED}, {MINUTES:g} minutes; again with HPC_DDP_FAULT_SEED={SEED}")
    print(plan(schedule(SEED, MINUTES * 60)), flush=True)
    twins = make_twins(own_cluster, tmp_path)
    soak = Soak(own_cluster, lanes, Player(own_cluster), tmp_path / "lost")
    try:
        soak.go(MINUTES * 60)
        soak.say("no more faults")
        soak.wait(END_S)
    finally:
        soak.player.heal(everything=True)
        text = soak.summary()
        print(text, flush=True)
        if REPORT:
            Path(REPORT).write_text(text)
    problems = list(soak.problems(twins))
    assert not problems, "\n".join(problems)
