"""The Slurm task of each node: starts torchrun, and decides whether a signal is a notice.

``python <run>/lib/node.py supervisor torchrun <python> -u <run>/lib/node.py elastic_agent <words>``
``python <run>/lib/node.py supervisor worker <python> <script> <its arguments>``

The second form is for ``--launcher srun``: a task, and so a supervisor, for each worker.

Slurm signals the task, or each process of the step. The supervisor, which is the task, decides
whether that is a notice. If so, it writes a file and signals the workers; without that file SIGTERM
means the failure of a peer.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpc_ddp.core.attempt_env import AWAY_S, AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import make_folders, patiently, read_seconds, read_word, write_json
from hpc_ddp.core.journal.enums import NoticeSource
from hpc_ddp.core.journal.events import NoticeGiven
from hpc_ddp.core.process import STOOD_STILL_S, signal_from_pid_files
from hpc_ddp.node.child_process import (
    LAUNCHES,
    Launch,
    fill_options,
    ignore_notices,
    limit_umask,
    note_missing_variable,
    raise_file_limit,
    wait_for_files,
    warn_of_wrapper,
)
from hpc_ddp.node.net import tracker_lookup
from hpc_ddp.node.net.comparison import FabricComparison
from hpc_ddp.node.net.names_and_ports import check_resolves
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.outcome import first_failure, oom
from hpc_ddp.node.watch import checkpoint_note
from hpc_ddp.node.watch.agent_watch import AgentWatch
from hpc_ddp.node.watch.head_failover import take_over_verdict, watch_head
from hpc_ddp.node.watch.local_notice import LocalNotice
from hpc_ddp.node.watch.log_offsets import Growth
from hpc_ddp.node.watch.look_times import AttemptWatch
from hpc_ddp.node.watch.received_signals import Signals
from hpc_ddp.node.workers.staging.removal import leave_tree

POLL_EVERY_S = 1.0
TEARDOWN_S = 4.0  # an aware worker is gone after 2; a process that still runs then hangs
PEERS_S = 8.0  # how long a failed node waits for its peers' ends before srun kills them
CATCH_UP_S = 15.0  # until the batch script has asked for that time, and this process has read it
AFTERMATH_S = 60.0  # after a suspension, in which it may be the cause of a child's end
LEAD_S = 10.0  # what workers have after a notice, however late it is: KillWait is 30 s by default


@dataclass
class Supervisor:
    """The supervisor of one node in one attempt; with ``--launcher srun``, of one worker. Without
    `signals` it handles the signals of this process from now on."""

    place: Place
    launch: Launch
    signals: Signals = field(default_factory=Signals)
    notice: str | None = None  # the source of the notice that the workers got
    torn_down: str | None = None  # the failed peer, or later attempt, that has ended the workers
    killed: bool = False  # this supervisor has killed the workers, which did not end
    idle: bool = False  # it has killed torchrun, which did not end after its workers
    _has_warned: bool = False  # that the workers will be killed
    _kill_at: float = 0.0  # 0: not set; this and the next by `time.monotonic()`
    _noticed_at: float = 0.0
    _polled_at: float = math.inf  # no poll yet
    _next_poll: float = 0.0
    _woke_at: float = -math.inf  # when this loop last went on after it had stood still
    _oom_kills: int = field(default_factory=oom.count_kills)

    def __post_init__(self) -> None:
        """Make the launch's folder with an empty file of failures, delete pid files of an earlier
        start, and begin to watch the folders. Raise OSError if one can't be made or changed."""
        self.end_time, self.folder = self.place.end_time, self.launch.folder
        patiently(partial(make_folders, self.folder.path))
        for pid_file in self.folder.pids():
            pid_file.unlink(missing_ok=True)
        patiently(partial(self.folder.failures.write_text, ""))
        self.journal = self.place.run.journal(self.launch.name, self.place.attempt.number)
        self.fabric = FabricComparison(self.place, self.journal)
        self.growth = Growth(self.folder, shows_rank_0=self.launch.rank in (None, 0))
        self.watch = AttemptWatch(self.place, self.launch.task)
        self.agent_watch = AgentWatch(self.folder)
        self.local_notice = LocalNotice()

    def run(self) -> int:
        """Run the child to its end, and meanwhile `_poll`; return the task's exit code, see
        `_conclude`. Where a peer has failed already, no child starts, and the code is 1 for the
        supervisor with `peers`, 0 for the others. A child that can't be started counts as failed
        with 127. Where Slurm has lost an elastic job's first node, the child is killed. Raises
        OSError as `_conclude`."""
        if read_word(self.place.attempt.failed):  # a peer failed before this supervisor was up
            return 1 if self.launch.peers else 0
        try:
            child = self._start()
        except OSError as error:
            write_json(self.folder.failures, {"agent": str(error)})
            return self._conclude(127)
        self.watch.links.start()
        checkpoint_note.watch_checkpoint()
        environ = dict(os.environ)
        head_gone = self.launch.is_elastic and watch_head(self.place, environ)
        while child.poll() is None:
            self.signals.wait(0.1)
            self._poll(child)
            if head_gone and head_gone.is_set() and not self._kill_at:
                self._kill_at = time.monotonic()
        self.signals.wait_for_late_notice(child.returncode)
        if name := self.signals.take():
            self._heed(name, child)
        self.growth.note_all()
        return self._conclude(child.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the child in a session of its own, with its output in the agent log, and return it;
        `_make_env` has further effects. Raise OSError if the child can't be started, or if the
        first node's name can't be looked up for 30 s. Raises further what `_make_env` raises."""
        check_resolves(self.place.host_of(0))
        with open(self.folder.agent_log, "ab") as log:
            return subprocess.Popen(
                self.launch.command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._make_env(),
                start_new_session=True,
                preexec_fn=ignore_notices,
            )

    def _make_env(self) -> dict[str, str]:
        """Choose and report the interconnect, begin to look up trackers, and return the child's
        environment. Raise OSError where the attempt's secret can't be read."""
        return {
            **os.environ,
            "HPC_DDP_NODE": self.place.node,
            "HPC_DDP_NODE_FOLDER": str(self.folder.path),
            "HPC_DDP_NOTICE": str(self.folder.notice),
            **self.local_notice.env(),
            **self.fabric.choose(self.launch.reports_fabric),
            **self.place.interface_env(),
            **self.place.store_env(),
            **tracker_lookup.start_lookups(self.place, self.launch.rank, os.environ),
            **self.launch.env,
        }

    def _poll(self, child: subprocess.Popen[bytes]) -> None:
        """Act on signals, the attempt's files and the clock: give the workers notice, tear them
        down, or kill them and `child` at `_kill_at`. Note when this loop has stood still."""
        now = time.monotonic()  # a clock that is set meanwhile makes no wait longer or shorter
        polled_at, self._polled_at = self._polled_at, now
        if now - polled_at > STOOD_STILL_S:  # Slurm has another end time
            self._woke_at = now
        if name := self.signals.take():
            self._heed(name, child)
        if self.watch.begin_look_if_due():
            self._heed(read_word(self.place.attempt.notice), child)
            self._read_end_time()
        if now >= self._next_poll:
            self._next_poll = now + POLL_EVERY_S
            self._poll_node(child, now)
        if self.watch.begin_fence_if_due():
            self._kill_if_superseded(now)
        if self.notice and now >= self._noticed_at + LEAD_S and not self._kill_at:
            self._kill_late_workers(now)
        if self._kill_at and now >= self._kill_at:
            self.killed = True
            self._signal_workers(signal.SIGKILL)
            child.kill()

    def _kill_late_workers(self, now: float) -> None:
        """Have `_poll` kill the workers, which still run `LEAD_S` after a notice, if the job's time
        is over. The supervisor with `peers` prints that, or once a warning before."""
        if self._time_is_over():
            # Slurm's own SIGKILL would end the batch shell too, and with it the verdict.
            self._kill_at = now
            text = "the script has not ended since the notice, and its time is over: it is killed"
        elif self._has_warned:
            return
        else:
            left_s = (self.end_time or math.inf) - time.time()
            end = f"in {left_s:.0f} s" if left_s <= self.place.warn_s else "when its time is over"
            text = f"the script still runs, {LEAD_S:.0f} s after the notice; it is killed {end}"
            self._has_warned = True
        if self.launch.peers:
            say(text)

    def _heed(self, source: str, child: subprocess.Popen[bytes]) -> None:
        """Tear the workers down where the attempt's ``failed`` names a peer: srun sends SIGTERM
        then, too. Else give them the notice `source`, '' for none."""
        if peer := self._failed_peer():
            self._tear_down(peer)
        elif source:
            self._give_notice(source, child)

    def _poll_node(self, child: subprocess.Popen[bytes], now: float) -> None:
        """Write the beat for the workers, copy rank 0's output, note the growth of logs and compare
        the interconnect; give notice if the time limit is near, but not just after a suspension.
        Have `_poll` kill a torchrun that does not end."""
        self.local_notice.write(beat=now)
        self.growth.note()
        self.fabric.compare()
        is_exempt = self.notice or self.torn_down or now < self._woke_at + CATCH_UP_S
        if not is_exempt and self._time_is_over(self.place.warn_s):
            self._give_notice(NoticeSource.TIME_LIMIT, child)
        if self.agent_watch.is_idle(now) and not self._kill_at:
            self.idle, self._kill_at = True, now
            say(f"torchrun on {self.place.node} has not ended after its workers: it is killed")

    def _time_is_over(self, in_s: float = 0.0) -> bool:
        """Return whether the job's time ends within `in_s` seconds; False without a limit. Before
        True is returned, `end_time` is read anew from the attempt's file."""
        time_s = time.time() + in_s
        if self.end_time and time_s >= self.end_time:
            self._read_end_time()
        return self.end_time is not None and time_s >= self.end_time

    def _read_end_time(self) -> None:
        """Read the attempt's ``end-time``, and pass a new end time on to the workers."""
        end_time = read_seconds(self.place.attempt.end_time)
        if end_time and end_time != self.end_time:
            self.end_time = end_time
            self.local_notice.write(end_time=end_time)

    def _kill_if_superseded(self, now: float) -> None:
        """Have `_poll` kill the workers and the child if a later attempt runs: behind a cut link,
        or where slurmd is dead, they would wait for their peers until the watchdog ends them."""
        if not self.torn_down and self._is_superseded():
            self.torn_down, self._kill_at = "a later attempt", now

    def _is_superseded(self) -> bool:
        """Return whether a later attempt has started; False where the disk does not answer."""
        with suppress(OSError):
            return not self.place.run.is_newest(self.place.attempt.number)
        return False

    def _failed_peer(self) -> str:
        """Return the name in the attempt's ``failed`` if it is another supervisor's, else ''."""
        name = read_word(self.place.attempt.failed)
        return "" if name == self.launch.name else name

    def _give_notice(self, source: str, child: subprocess.Popen[bytes]) -> None:
        """Give the workers a notice with `source`, a signal's name or a `NoticeSource`: write it
        for them and into the journal, and signal them. Where no worker has started yet, kill
        `child`; a time limit then also becomes the attempt's notice, for all supervisors. Only the
        first call has an effect, and none after a tear-down."""
        if self.notice or self.torn_down:
            return
        self.local_notice.write(source=source)
        with suppress(OSError):  # for workers that can't read the local notice
            write_json(self.folder.notice, {"source": source, "time": time.time()})
        self.notice, self._noticed_at = source, time.monotonic()
        self.journal.write(NoticeGiven(source))
        if not self._signal_workers(self.place.notice_signal):
            child.kill()
            if source == NoticeSource.TIME_LIMIT:  # by this node's clock; Slurm signals all nodes
                self._write(partial(self.place.attempt.notice.write_text, source))
                self.watch.links.wake()

    def _tear_down(self, peer: str) -> None:
        """Send SIGTERM to the workers since the supervisor `peer` has failed, wake the others, and
        have `_poll` kill the workers `TEARDOWN_S` later. Only the first call has an effect."""
        if not self.torn_down:
            self.torn_down = peer
            self.watch.links.wake()
            self._signal_workers(signal.SIGTERM)
            self._kill_at = time.monotonic() + TEARDOWN_S

    def _signal_workers(self, number: int) -> int:
        """Send signal `number` to all workers that run; return how many were signalled, 1 where
        the disk refuses: there may be workers, which read the notice's file themselves."""
        with suppress(OSError):
            return signal_from_pid_files(self.folder.pids(), number)
        return 1

    def _conclude(self, code: int) -> int:
        """Record the end of the child with exit code `code`; return the task's exit code: 0 where
        `code` is 0, after a notice, for an `idle` torchrun, and where a later attempt runs. A node
        that has left an elastic job returns 1, after `take_over_verdict`. After any
        other failure the peers are ended, and the supervisor with `peers` returns 1, the others 0.
        Raise OSError as `take_over_verdict`, or where a file can't be looked up."""
        has_left = self._write_record(code)
        # With 1 an old srun would end the step of the requeued job, which has the same id.
        if code == 0 or self.notice or self.idle or self._is_superseded():
            return 0
        if has_left:
            take_over_verdict(self.place, dict(os.environ), partial(bool, self.signals.seen))
            return 1
        self._end_peers()
        return 1 if self.launch.peers else 0

    def _write_record(self, code: int) -> bool:
        """Write the record of the child's end with exit code `code`; return whether this node has
        left an elastic job, whose other nodes go on. Raise OSError as `_collect_failures`."""
        failures = [] if code == 0 else self._collect_failures(code)
        # No worker has failed, but torchrun itself: it has lost the rendezvous on the first node.
        is_without_worker = any(failure["rank"] is None for failure in failures)
        has_left = self.launch.is_elastic and self.place.index > 0 and is_without_worker
        record: dict[str, Any] = {
            "node": self.place.node,
            "tasks": self.launch.task.per_node,
            "code": code,
            "notice": self.notice,
            "torn_down": self.torn_down,
            "killed": self.killed,
            "idle": self.idle,
            "stood_still": time.monotonic() < self._woke_at + AFTERMATH_S,
            "left": has_left,
            "failures": failures,
        }
        self._write(partial(write_json, self.folder.record, record))
        checkpoint_note.note_now()
        return has_left

    def _end_peers(self) -> None:
        """Write the attempt's ``failed``, by which the other supervisors end their workers, unless
        a peer has written it. Wait for the records of `peers`, up to `PEERS_S`, unless a port was
        taken: the batch script then starts anew. Raise OSError where a file can't be looked up."""
        if not self.torn_down:
            self._write(partial(self.place.attempt.failed.write_text, self.launch.name))
            self.watch.links.wake()
        if not self.place.attempt.port_taken.exists():
            wait_for_files(self.launch.peers, PEERS_S)

    def _write(self, write_file: Callable[[], object]) -> None:
        """Call `write_file`, again for `AWAY_S` where it fails; print the last OSError."""
        try:
            patiently(write_file, min(AWAY_S, (self.end_time or math.inf) - time.time() - 30))
        except OSError as error:  # the verdict will count this supervisor among the silent ones
            say(f"{self.launch.name} can't record how it ended: {error}")

    def _collect_failures(self, code: int) -> list[dict[str, Any]]:
        """Return the failures of `failures_of` for the child's exit code `code`, with kills for
        want of memory named. If the port of this worker's store was taken, make the attempt's file
        ``port-taken``; raise OSError where that fails."""
        failures = first_failure.failures_of(code, self.place.run, self.folder)
        oom.name_kills(failures, self._oom_kills)
        error, port = failures[0]["error"], self.launch.store_port
        if port and "EADDRINUSE" in error and str(port) in error:
            self.place.attempt.port_taken.touch()
        return failures


def main(argv: list[str]) -> int:
    """Supervise the launch of `argv`: a name in `LAUNCHES`, and a command with the job's Python (a
    step of the batch script, and ``--stage``, use this process's). Return the code of
    `Supervisor.run`; 1 for a damaged variable or an OSError, which is printed."""
    kind, *command = argv
    is_in_batch_step = "SLURM_JOB_ID" in os.environ and "SUBMITIT_EXECUTOR" not in os.environ
    if (is_in_batch_step or "HPC_DDP_NEAR" in os.environ) and sys.executable:
        command[:1] = [sys.executable]
    supervisor: Supervisor | None = None
    try:
        raise_file_limit()
        try:
            place = Place.from_env(dict(os.environ))
            launch = LAUNCHES[kind](place, command)
        except (KeyError, ValueError) as error:  # variables, or a file of the attempt
            if str(error.args[0]).startswith(("HPC_DDP_", "SLURM_")):
                raise OSError(note_missing_variable(error.args[0])) from error
            raise OSError(f"its place in the job is unknown: {error!r}") from error
        if launch.peers:
            warn_of_wrapper(os.environ)
        return (supervisor := Supervisor(place, launch)).run()
    except OSError as error:
        say(f"this node can't take part: {error}")
        return 1
    finally:
        leave_tree(is_hurried=bool(supervisor and supervisor.notice))


def submitit_main(kind: str, command: list[str]) -> None:
    """Run as submitit's task: supervise `kind` and `command`, as `main`, with the script's
    arguments from job.json added. Exit with the supervisor's code, or with 1 and a message if
    job.json is broken or `fill_options` refuses; submitit's own exit code would always be 0."""
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit's handler would log each SIGCONT
    limit_umask()
    try:
        job_json = AttemptEnv.from_env(os.environ).run_folder.job_json
        args = json.loads(patiently(job_json.read_text)).get("args", [])
        command = fill_options(command, os.environ) if kind == "torchrun" else command
        sys.exit(main([kind, *command, *args]))
    except (HpcDdpError, OSError, KeyError, ValueError) as error:  # the last: a damaged job.json
        sys.exit(f"hpc-ddp: this node can't take part: {error}")
