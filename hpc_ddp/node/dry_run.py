"""The batch shell's part on one machine: the same attempt, supervisors and verdict, no Slurm.

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
from hpc_ddp.node.batch import attempt_env, next_port, note_end_time
from hpc_ddp.node.child_process import expand
from hpc_ddp.node.net.network import LOOPBACK, free_port
from hpc_ddp.node.outcome.end_message import notify_of_end
from hpc_ddp.node.outcome.gather_facts import check_budget, judge
from hpc_ddp.node.outcome.verdict import Verdict
from hpc_ddp.node.preflight import driver
from hpc_ddp.node.preflight.dialogue import Command
from hpc_ddp.node.workers.staging import removal

KILL_WAIT_S = 30.0  # Slurm's default between SIGTERM and SIGKILL at the time limit
PORT_TRIES = 5  # as the batch script
BRING_S = 900  # as there
AGAIN_S = 1.0  # a signal that comes sooner is the same one: timeout(1) sends two


class DryRun:
    """Plays attempts of one run, one after the other."""

    def __init__(self, run: RunFolder, command: list[str]) -> None:
        """Read the run's job. From now on the signals of `NOTICES` to this process are notices; so
        are those that have come before, if this process was started with them blocked.

        `command` is torchrun's or python's command line with the script. Raise UsageError for a
        broken job.json, OSError for one that can't be read.
        """
        self.run = run
        self.command = command
        self.spec = JobSpec.from_json(run.job_json.read_bytes())
        self.nodes = [f"local-{index}" for index in range(self.spec.node_range[1])]
        self.notified = False  # a first signal has come, a notice
        self.is_hurried = False  # a second one has come
        self._noticed_at = 0.0
        # By its variable, since the parent may have ended by now.
        self.parent = int(os.environ.get("HPC_DDP_PARENT") or os.getppid())
        self.supervisors: list[subprocess.Popen[bytes]] = []
        for number in NOTICES:
            signal.signal(number, self._notify)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)

    def _notify(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. The first one, a notice, is passed on to the supervisors as SIGTERM;
        after the second `_wait` has the workers torn down; the third kills the supervisors. A
        signal within `AGAIN_S` of the last one has no effect."""
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
        """Run attempts while the verdict is a requeue; return the exit code of the last one.

        After a notice no further attempt begins: the code is `CAN_GO_ON` where the verdict is a
        requeue. Raises as `attempt`.
        """
        while True:
            decided = self.attempt()
            if decided.action != Action.REQUEUE:
                return decided.exit_code
            if self.notified:
                return CAN_GO_ON

    def attempt(self) -> Verdict:
        """Run one attempt to its end and return its verdict, which is journalled and printed. If
        the job has them, the parcel of ``--stage`` is unpacked and the preflight made before; and
        if the job has addresses, `notify_of_end` sends its message.

        Raises
        ------
        HpcDdpError
            the budget is used up, another process runs this run, or job.json is broken
        OSError
            the run's folder can't be used, no port is free, or a process can't be started
        UsageError
            an option of torchrun has a variable that is not set, or a ``$`` without a name
        """
        check_budget(self.run, self.spec)
        info = {**process.identity(), "nodes": self.nodes}
        attempt = self.run.claim_attempt(info, _is_live)
        self.run.journal("batch", attempt.number).write(Started(**info))
        environ = self._environ(attempt)
        if self.spec.stage:
            environ["HPC_DDP_BROUGHT"] = self._bring(environ)
        try:
            if not self.spec.preflight or self._preflight(attempt.number, environ):
                self._train(attempt, environ)
        finally:
            if self.spec.stage:
                removal.call("remove")
        facts, decided = judge(self.run, attempt, environ, job=None, goes_on=not self.notified)
        if decided.cause == Cause.FAILED and facts.failure and NO_GPU.search(facts.failure.error):
            say(CPU_ONLY)
        if self.spec.notify:
            notify_of_end(self.run, facts, decided, decided.exit_code)
        return decided

    def _bring(self, environ: dict[str, str]) -> str:
        """Unpack the parcel of ``--stage``, for `BRING_S` seconds at most, or until a notice.
        Return the value of HPC_DDP_BROUGHT: the name of the parcel's file that was unpacked; ``no``
        where it could not be; '' where the run has no parcel, or is marked to do without one
        (`unstaged`)."""
        label = self.run.parcel / "label"
        if self.run.unstaged.exists() or not label.exists():
            return ""
        with suppress(OSError, IndexError):  # without ``timeout``, or of a damaged label
            part = label.read_text().split()[1]
            argv = ["timeout", str(BRING_S), *removal.STAGE_SH, "bring", self.command[0], part]
            bringing = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL)
            while bringing.poll() is None and not self.notified:
                time.sleep(0.1)
            bringing.terminate()
            if bringing.wait() == 0:
                return part
        return "no"

    def _preflight(self, attempt: int, environ: dict[str, str]) -> bool:
        """Test the nodes, journal and print the outcome, and return whether they are fit for the
        training.

        A notice meanwhile counts as unfit. Raise OSError if a check can't be started or the run's
        folder can't be used, UsageError for a broken job.json.
        """
        argv = [self.command[0], str(self.run.lib / "node.py"), "preflight.checks"]
        commands = [
            Command(argv, dict(environ, HPC_DDP_NODE_INDEX=str(index)), node)
            for index, node in enumerate(self.nodes)
        ]
        fields = driver.examine(
            self.run, self.nodes, commands, lambda: "SIGTERM" if self.notified else ""
        )
        return driver.conclude(self.run, attempt, fields)

    def _environ(self, attempt: AttemptFolder) -> dict[str, str]:
        """Return this process's environment with the attempt's variables. Raise OSError if no port
        is free, or the journal can't be read."""
        end = time.time() + self.spec.time_s if self.spec.time_s else None
        env = attempt_env(self.run, attempt, len(self.nodes), end, self.spec)
        return {
            **os.environ,
            **tracker_env(self.run, os.environ, env.first_attempt),
            **replace(env, head=LOOPBACK, port=free_port(20000 + os.getpid())).to_env(),
        }

    def _train(self, attempt: AttemptFolder, environ: dict[str, str]) -> None:
        """Run `_supervise`. Where another process has taken the attempt's port since it was looked
        up, run it again with another port, `PORT_TRIES` times in all, as the batch script does.
        Raise OSError as `next_port`. Raises further as `_supervise`."""
        self._supervise(environ)
        for _ in range(PORT_TRIES - 1):
            if self.notified or not attempt.port_taken.exists():
                return
            port = next_port(environ)
            environ = environ | replace(AttemptEnv.from_env(environ), port=port).to_env()
            self._supervise(environ)

    def _supervise(self, environ: dict[str, str]) -> None:
        """Run the supervisors of all nodes, or of all workers without torchrun, until they have
        ended.

        Like Slurm, kill the supervisors that still run `KILL_WAIT_S` after the time limit, or after
        the `warn_s` that a notice leaves. The end of the parent process, the user's command, is a
        notice. After a second signal the file ``failed`` makes the supervisors end their workers.
        Raise OSError if a supervisor can't be started, once those before it were killed; UsageError
        as `expand`.
        """
        node, tasks = str(self.run.lib / "node.py"), self.spec.tasks_per_node
        start = [sys.executable]
        if self.spec.stage:
            start = [*removal.STAGE_SH, "run", self.command[0], "-E", "-s"]
        if self.spec.launcher != "torchrun":
            argv = [*start, node, "supervisor", "worker", *self.command]
        else:
            argv = [*start, node, "supervisor", "torchrun", *expand(self.command, environ)]
        self._start(argv, environ, tasks)
        self._wait(environ)

    def _start(self, argv: list[str], environ: dict[str, str], tasks: int) -> None:
        """Start a supervisor for each of the `tasks` tasks of each node. Raise OSError if one can't
        be started, once those before it were killed."""
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
        if self.notified:  # before they had started
            for supervisor in self.supervisors:
                supervisor.terminate()

    def _wait(self, environ: dict[str, str]) -> None:
        """Wait until all supervisors have ended. Meanwhile note a notice's new end time, tear the
        workers down after a second signal, and kill the supervisors `KILL_WAIT_S` after the end of
        the time."""
        attempt = AttemptEnv.from_env(environ)
        end = math.inf if attempt.end_time is None else attempt.end_time
        is_timed = is_torn_down = False
        while any(supervisor.poll() is None for supervisor in self.supervisors):
            time.sleep(0.1)
            if os.getppid() != self.parent and not self.notified:  # the user's command has ended
                self._notify(signal.SIGTERM, None)
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
        """Return the variables that Slurm would set for the task `index`, one of `per_node` on its
        node, and the node's index."""
        return {
            "HPC_DDP_NODE_INDEX": str(index // per_node),
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index % per_node),
            "SLURM_NTASKS": str(len(self.nodes) * per_node),
        }


def _is_live(info: dict[str, Any]) -> bool:
    """Return whether another process of this host plays the attempt whose attempt.json has
    `info`."""
    return info.get("pid") != os.getpid() and process.is_live(info)


def _sweep(run: RunFolder, spec: JobSpec, command: list[str]) -> int:
    """Journal the start of a sweep, and run its tasks one after the other. Pass over finished
    tasks, and those that `cancel` has marked since this start.

    Return the first exit code that is not 0, else 0; that of a marked task is `CAN_GO_ON`. Where a
    notice, or the mark ``cancelled`` of the whole sweep, keeps the next task from starting, return
    the highest code so far, or `CAN_GO_ON` if that is 0. An error ends the sweep. Raises as
    `DryRun.attempt` and `make_task`.
    """
    run.journal("batch").write(Started(**process.identity()))
    codes = [0]
    trials, indexes = spec.trials, array_indexes(spec.array or "")
    for index in indexes:
        run.task(index).cancelled.unlink(missing_ok=True)  # of an earlier start
    before: DryRun | None = None
    for index in indexes:
        task = make_task(run, index)
        if task.finished():
            continue
        words = trial_args(trials[index], spec.args)
        local = DryRun(task, [*command, *words])  # signals are for this one from now on
        if run.cancelled.exists() or (before and before.notified):
            return max(codes) or CAN_GO_ON
        if task.cancelled.exists():
            say(f"task {index} is cancelled")
            codes.append(CAN_GO_ON)
            continue
        say(f"task {index}: {' '.join(words)}")
        codes.append(local.play())
        before = local
    return next(filter(None, codes), 0)


def main(command: list[str]) -> int:
    """Play the run of HPC_DDP_RUN with the command line of torchrun, or of python and the script.

    Return the exit code: 0 at once for a finished run. Errors are printed: an HpcDdpError gives its
    own code, an OSError `CAN_GO_ON`. An earlier mark ``cancelled`` of the run is removed.
    """
    run = AttemptEnv.from_env(os.environ).run_folder
    try:
        if run.finished():
            say(f"run {run.path} is finished")
            return 0
        run.cancelled.unlink(missing_ok=True)
        spec = JobSpec.from_json(run.job_json.read_bytes())
        return _sweep(run, spec, command) if spec.sweep else DryRun(run, command).play()
    except HpcDdpError as error:
        say(error.message)
        if error.hint:
            say(f"hint: {error.hint}")
        return error.exit_code
    except OSError as error:
        say(f"the run's folder can't be used: {error}")
        return CAN_GO_ON
