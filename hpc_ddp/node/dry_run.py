"""The batch script's part on one machine: the same attempt, supervisors and verdict, no Slurm.

``python <run>/lib/node.py dry_run <torchrun command line, or python and the script>``

Nodes are processes of this machine. SIGTERM or SIGINT here is the notice that a preempting
Slurm would send: workers that still run when the time of ``--signal`` is over are killed; a second
signal kills them in some seconds. A run that Slurm would requeue goes on at once, except after such
a notice: then it ends with exit code 75, and `dry-run --run` goes on.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from hpc_ddp.core import process
from hpc_ddp.core.accelerators import CPU_ONLY, NO_GPU
from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import CAN_GO_ON, HpcDdpError
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_values import array_indexes
from hpc_ddp.core.job.sweep import trial_args
from hpc_ddp.core.job.task_folder import make_task
from hpc_ddp.core.job.trackers import tracker_env
from hpc_ddp.core.journal.enums import Action, Cause
from hpc_ddp.core.journal.events import Started
from hpc_ddp.core.process import NOTICES
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.batch import attempt_env, next_port
from hpc_ddp.node.child_process import fill_options
from hpc_ddp.node.net.names_and_ports import LOOPBACK, free_port
from hpc_ddp.node.outcome.end_message import notify_of_end
from hpc_ddp.node.outcome.gather_facts import enforce_budget, judge_attempt
from hpc_ddp.node.outcome.verdict import Verdict
from hpc_ddp.node.preflight import driver
from hpc_ddp.node.preflight.dialogue import Command
from hpc_ddp.node.watch.end_time import note_end_time
from hpc_ddp.node.workers.staging import removal

KILL_WAIT_S = 30.0  # Slurm's default between SIGTERM and SIGKILL at the time limit
PORT_TRIES = 5  # as the batch script
BRING_S = 900  # as there
AGAIN_S = 1.0  # a signal that comes sooner is the same one: timeout(1) sends two


class DryRun:
    """Plays attempts of one run, one after the other."""

    def __init__(self, run: RunFolder, command: list[str]) -> None:
        """Read the run's job. From now on the signals of `NOTICES` to this process are notices; so
        are signals that came earlier, if this process was started with `NOTICES` blocked.

        `command` is torchrun's or python's command line with the script. Raise UsageError for a
        broken job.json, OSError for a job.json that can't be read.
        """
        self.run = run
        self.command = command
        self.spec = JobSpec.from_json(run.job_json.read_bytes())
        self.nodes = [f"local-{index}" for index in range(self.spec.node_range[1])]
        self.notified = False  # a first signal has come, a notice
        self.is_hurried = False  # a second signal has come
        self._noticed_at = 0.0  # when the last signal came, by time.monotonic()
        # The parent sets the variable: it may have ended by now, and getppid() name another.
        self.parent = int(os.environ.get("HPC_DDP_PARENT") or os.getppid())
        self.supervisors: list[subprocess.Popen[bytes]] = []
        for number in NOTICES:
            signal.signal(number, self._handle_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. The first signal, a notice, is passed on to the supervisors as SIGTERM;
        after the second `_await_supervisors` has the workers torn down; the third kills the
        supervisors. A signal within `AGAIN_S` of the last one has no effect."""
        if self.notified and time.monotonic() < self._noticed_at + AGAIN_S:
            return
        for supervisor in self.supervisors:
            if not self.notified:
                supervisor.terminate()
            elif self.is_hurried:
                supervisor.kill()
        self.notified, self.is_hurried = True, self.notified
        self._noticed_at = time.monotonic()

    def play(self) -> int:
        """Run attempts while the verdict is a requeue; return the exit code of the last verdict.
        After a notice no further attempt begins: the code is `CAN_GO_ON` where the verdict is a
        requeue. Raises as `run_attempt`."""
        while True:
            verdict = self.run_attempt()
            if verdict.action != Action.REQUEUE:
                return verdict.exit_code
            if self.notified:
                return CAN_GO_ON

    def run_attempt(self) -> Verdict:
        """Run one attempt to its end and return its verdict, which is journalled and printed.
        Before the training the parcel of ``--stage`` is unpacked, and the preflight made, if the
        job has them. With ``--notify``, `notify_of_end` sends its message.

        Raises
        ------
        HpcDdpError
            the budget is used up, another process runs this run, or job.json is broken
        OSError
            the run's folder can't be used, no port is free, or a process can't be started
        UsageError
            an option of torchrun has a variable that is not set, or a ``$`` without a name
        """
        enforce_budget(self.run, self.spec)
        info = {**process.identity(), "nodes": self.nodes}
        claim = partial(self.run.claim_attempt, info, _is_live)
        attempt = self.run.make_room_for("an attempt", claim)
        self.run.journal("batch", attempt.number).write(Started(**info))
        environ = self._make_environ(attempt)
        if self.spec.stage:
            environ["HPC_DDP_BROUGHT"] = self._unpack_parcel(environ)
        try:
            if not self.spec.preflight or self._run_preflight(attempt.number, environ):
                self._train(attempt, environ)
        finally:
            if self.spec.stage:
                removal.run_stage_script("tidy")
        goes_on = not self.notified
        facts, verdict = judge_attempt(self.run, attempt, environ, job=None, goes_on=goes_on)
        if verdict.cause == Cause.FAILED and facts.failure and NO_GPU.search(facts.failure.error):
            say(CPU_ONLY)
        if self.spec.notify:
            notify_of_end(self.run, facts, verdict, verdict.exit_code)
        return verdict

    def _unpack_parcel(self, environ: dict[str, str]) -> str:
        """Unpack the parcel of ``--stage`` on this machine, for `BRING_S` seconds at most, or until
        a notice. Return the value of HPC_DDP_BROUGHT: the name of the parcel's file that was
        unpacked; ``no`` where it could not be unpacked; '' where the run has no parcel, or is
        marked to do without a copy (`unstaged`)."""
        label = self.run.parcel / "label"
        if self.run.unstaged.exists() or not label.exists():
            return ""
        with suppress(OSError, IndexError):  # without ``timeout``, or of a damaged label
            part = label.read_text().split()[1]  # its first line is: part NAME CHECKSUM SIZE
            argv = ["timeout", str(BRING_S), *removal.STAGE_SH, "bring", self.command[0], part]
            unpacking = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL)
            while unpacking.poll() is None and not self.notified:
                time.sleep(0.1)
            unpacking.terminate()
            if unpacking.wait() == 0:
                return part
        return "no"

    def _run_preflight(self, attempt: int, environ: dict[str, str]) -> bool:
        """Test the nodes for the attempt of this number, journal and print the outcome, and return
        whether the nodes are fit for the training: not after a notice meanwhile. Raise OSError if a
        check can't be started or the run's folder can't be used, UsageError for a broken
        job.json."""
        argv = [self.command[0], str(self.run.lib / "node.py"), "preflight.checks"]
        commands = [
            Command(argv, dict(environ, HPC_DDP_NODE_INDEX=str(index)), node)
            for index, node in enumerate(self.nodes)
        ]
        fields = driver.examine_nodes(
            self.run, self.nodes, commands, lambda: "SIGTERM" if self.notified else ""
        )
        return driver.record_outcome(self.run, attempt, fields)

    def _make_environ(self, attempt: AttemptFolder) -> dict[str, str]:
        """Return this process's environment with the variables of an attempt that begins now. Raise
        OSError if no port is free, or the journal can't be read."""
        end = time.time() + self.spec.time_s if self.spec.time_s else None
        env = attempt_env(self.run, attempt, len(self.nodes), end, self.spec)
        return {
            **os.environ,
            **tracker_env(self.run, os.environ, env.first_attempt),
            # Dry runs that start together begin to look for a free port at different ones.
            **replace(env, head=LOOPBACK, port=free_port(20000 + os.getpid())).to_env(),
        }

    def _train(self, attempt: AttemptFolder, environ: dict[str, str]) -> None:
        """Run `_supervise`; if another process has taken the attempt's port by then, run it again
        with another port, `PORT_TRIES` times in all, as the batch script does. Raise OSError as
        `next_port`. Raises further as `_supervise`."""
        self._supervise(environ)
        for _ in range(PORT_TRIES - 1):
            if self.notified or not attempt.port_taken.exists():
                return
            port = next_port(environ)
            environ = environ | replace(AttemptEnv.from_env(environ), port=port).to_env()
            self._supervise(environ)

    def _supervise(self, environ: dict[str, str]) -> None:
        """Run the supervisors of all nodes, or of all workers without torchrun, until they have
        ended, and meanwhile do as `_await_supervisors` says. Raise OSError if a supervisor can't be
        started, UsageError as `fill_options`."""
        node, tasks = str(self.run.lib / "node.py"), self.spec.tasks_per_node
        start = [sys.executable]
        if self.spec.stage:
            start = [*removal.STAGE_SH, "run", self.command[0], "-E", "-s"]
        if self.spec.launcher != "torchrun":
            argv = [*start, node, "supervisor", "worker", *self.command]
        else:
            argv = [*start, node, "supervisor", "torchrun", *fill_options(self.command, environ)]
        self._start_supervisors(argv, environ, tasks)
        self._await_supervisors(environ)

    def _start_supervisors(self, argv: list[str], environ: dict[str, str], tasks: int) -> None:
        """Start `tasks` supervisors of each node, by the command `argv` and the variables of
        `_task_env`. If one can't be started, kill those that run, and raise OSError."""
        self.supervisors = []
        signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)  # until a supervisor can handle them
        try:
            for index in range(len(self.nodes) * tasks):
                env = environ | self._task_env(index, tasks)
                self.supervisors.append(subprocess.Popen(argv, env=env))
        except OSError:
            for supervisor in self.supervisors:
                supervisor.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)
        if self.notified:  # the notice came before these supervisors had started
            for supervisor in self.supervisors:
                supervisor.terminate()

    def _await_supervisors(self, environ: dict[str, str]) -> None:
        """Wait until all supervisors have ended. After a notice note, and print, that the time ends
        in `warn_s`; the end of the parent process, the user's command, is a notice, too. After a
        second signal write ``failed``, by which the supervisors end their workers, and print that.
        Like Slurm, kill the supervisors `KILL_WAIT_S` after the end of the time."""
        attempt = AttemptEnv.from_env(environ)
        end = math.inf if attempt.end_time is None else attempt.end_time
        is_timed = is_torn_down = False
        while any(supervisor.poll() is None for supervisor in self.supervisors):
            time.sleep(0.1)
            if os.getppid() != self.parent and not self.notified:  # the user's command has ended
                self._handle_signal(signal.SIGTERM, None)
            if self.notified and not is_timed:  # as Slurm sets the end of a preempted job
                is_timed, end = True, min(end, time.time() + self.spec.warn_s)
                note_end_time(environ, end)
                say(
                    f"a signal: the workers may stop and save, for {self.spec.warn_s:.0f} s; a"
                    " second one ends them at once"
                )
            if self.is_hurried and not is_torn_down:
                is_torn_down = True
                say("a second signal: the workers are killed within some seconds")
                with suppress(OSError):  # the third signal needs no file
                    attempt.attempt_folder.failed.write_text("a second signal")
            if time.time() > end + KILL_WAIT_S:
                for supervisor in self.supervisors:
                    supervisor.kill()

    def _task_env(self, index: int, per_node: int) -> dict[str, str]:
        """Return the variables that Slurm would set for the task number `index`, one of `per_node`
        on its node, and HPC_DDP_NODE_INDEX, the node's number."""
        return {
            "HPC_DDP_NODE_INDEX": str(index // per_node),
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index % per_node),
            "SLURM_NTASKS": str(len(self.nodes) * per_node),
        }


def _is_live(info: dict[str, Any]) -> bool:
    """Return whether a process of this host, but not this one, plays the attempt whose attempt.json
    has `info`."""
    return info.get("pid") != os.getpid() and process.is_live(info)


def _run_sweep(run: RunFolder, spec: JobSpec, command: list[str]) -> int:
    """Journal the start of a sweep, remove its tasks' marks ``cancelled``, and run the tasks one
    after the other. Pass over finished tasks, and those that `cancel` has marked since this start.

    Return the first exit code that is not 0, else 0; that of a marked task is `CAN_GO_ON`. Where a
    notice, or the mark ``cancelled`` of the whole sweep, keeps the next task from starting, return
    the highest code so far, or `CAN_GO_ON` if that is 0. An error ends the sweep. Raises as
    `DryRun.run_attempt` and `make_task`.
    """
    run.journal("batch").write(Started(**process.identity()))
    codes = [0]
    trials, indexes = spec.trials, array_indexes(spec.array or "")
    for index in indexes:
        run.task(index).cancelled.unlink(missing_ok=True)  # of an earlier start
    previous: DryRun | None = None
    for index in indexes:
        task = make_task(run, index)
        if task.finished():
            continue
        words = trial_args(trials[index], spec.args)
        dry_run = DryRun(task, [*command, *words])  # it gets the signals from now on
        # A notice to the task before counts here, too: asked now, no signal is lost in between.
        if run.cancelled.exists() or (previous and previous.notified):
            return max(codes) or CAN_GO_ON
        if task.cancelled.exists():
            say(f"task {index} is cancelled")
            codes.append(CAN_GO_ON)
            continue
        say(f"task {index}: {' '.join(words)}")
        codes.append(dry_run.play())
        previous = dry_run
    return next(filter(None, codes), 0)


def main(command: list[str]) -> int:
    """Play the run of HPC_DDP_RUN with `command`, the command line of torchrun, or of python and
    the script, and return the exit code: 0 at once for a finished run. Errors are printed: an
    HpcDdpError gives its own code, an OSError `CAN_GO_ON`. An earlier mark ``cancelled`` of the run
    is removed. Raise KeyError without HPC_DDP_RUN.
    """
    run = AttemptEnv.from_env(os.environ).run_folder
    try:
        if run.finished():
            say(f"run {run.path} is finished")
            return 0
        run.cancelled.unlink(missing_ok=True)
        spec = JobSpec.from_json(run.job_json.read_bytes())
        return _run_sweep(run, spec, command) if spec.sweep else DryRun(run, command).play()
    except HpcDdpError as error:
        say(error.message)
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    except OSError as error:
        say(f"the run's folder can't be used: {error}")
        return CAN_GO_ON
