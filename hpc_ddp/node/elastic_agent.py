"""torchrun, with the things changed that a requeued job needs.

``python <run>/lib/node.py elastic_agent`` takes torchrun's own command line. The differences:

- The signals of a notice (SIGTERM, SIGUSR1 …) do nothing to it. A preempting Slurm, or scancel,
  may signal every process of the step, and torchrun would die of that, or kill the workers in
  mid-save and exit 1. A no-op handler, not "ignored": children inherit the latter, and then a
  worker that hangs can't be ended by the agent either.
- Workers are forked from a process that has imported torch already (`fork_server`), or started
  through ``worker.py``; either way they have a log by rank, and end with the agent.
- Failed workers are written to ``failures.json``, not as a table; its own exit code is 1 then.
- Workers are not started again (``--max-restarts``) once the attempt has to end.
- TORCHELASTIC_RESTART_COUNT is the same on all nodes (`count_rounds`).
- The nodes of a job of fixed size meet by `fixed_rendezvous`, whose traffic does not grow with the
  square of the job. An elastic job keeps torchrun's own, as `elastic_rendezvous` changes it.
- Ranks go by Slurm's order of the nodes, in which neighbours share switches and the first node,
  with rank 0, hosts the store. torchrun sorts host names as text: node10 comes before node9.

This module and the rendezvous import torch: they run in the worker's environment.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.file_io import patiently, read_word
from hpc_ddp.core.job.attempt_folder import AttemptFolder, NodeFolder
from hpc_ddp.core.process import NOTICE_SIGNALS
from hpc_ddp.node.child_process import NO_GROUP, split_words
from hpc_ddp.node.net import elastic_rendezvous, fixed_rendezvous
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.preflight.agent_part import await_outcome
from hpc_ddp.node.workers import fork_server
from hpc_ddp.node.workers.fork_server import ForkServer
from hpc_ddp.node.workers.forked_script import ForkedScript
from hpc_ddp.node.workers.preload import keep_cpus, pause_collector, record_lookups
from hpc_ddp.node.workers.worker import die_with_parent, worker_command

LOOK_TIMEOUT = timedelta(seconds=10)  # of `note_missing_group`, for the store's answer


def escape_dollars(script_args: list[str]) -> list[str]:
    """Return the script's arguments with each ``$`` doubled: torchrun replaces ``${local_rank}`` in
    them, and ``$$`` by ``$``."""
    return [word.replace("$", "$$") for word in script_args]


def replace_signal_handler() -> None:
    """Patch torchrun's handler of signals, which torchrun installs when it starts its workers: the
    `NOTICE_SIGNALS` have no effect any more. At other signals it still raises SignalException.

    Newer torchruns have ``--signals-to-handle`` for this; all have a handler of this name.
    """
    from torch.distributed.elastic.multiprocessing import api

    original = api._terminate_process_handler

    def handle_signal(signum: int, frame: FrameType | None) -> None:
        """Ignore the `NOTICE_SIGNALS`; pass any other signal to torchrun's own handler."""
        if signum not in NOTICE_SIGNALS:
            original(signum, frame)

    api._terminate_process_handler = handle_signal


class EndingError(RuntimeError):
    """The workers have ended, and are not started again, because the attempt has to end."""


def end_after_notice(node: NodeFolder) -> None:
    """Patch torchrun: it starts no workers again once the supervisor has written the notice into
    the folder `node`.

    The grace time would be over before new workers are at work, and a peer's agent may be gone.
    Where torchrun then wants to restart workers, or finds the rendezvous closed, it raises its
    ChildFailedError with the workers that have failed here; where none has failed here, EndingError
    or RendezvousClosedError.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent as Agent
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    restart, monitor = Agent._restart_workers, LocalElasticAgent._monitor_workers

    def monitor_and_keep(self: Any, group: Any) -> Any:
        """Return torchrun's result on its workers; keep the failed ones in the agent's
        `failures`."""
        result = monitor(self, group)
        self.failures = result.failures
        return result

    def restart_or_end(self: Any, group: Any) -> None:
        """Start the workers again; after a notice, or if the rendezvous is closed, raise as
        `end_after_notice` says. A notice that can't be read counts as none."""
        try:
            if read_word(node.notice):
                raise EndingError("the workers failed after a notice")
            restart(self, group)
        except (EndingError, RendezvousClosedError) as error:
            if self.failures:
                raise ChildFailedError(group.spec.get_entrypoint_name(), self.failures) from error
            raise

    LocalElasticAgent._monitor_workers = monitor_and_keep  # type: ignore[method-assign]
    Agent._restart_workers = restart_or_end  # type: ignore[method-assign]


def count_rounds() -> None:
    """Patch torchrun: the workers' TORCHELASTIC_RESTART_COUNT is the number of the job's restarts
    before this start, on all nodes, also on one that joins late.

    torchrun's own count differs between nodes: a node counts the restarts for which its own workers
    had failed, and not those that another node asked for.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    start_workers = LocalElasticAgent._start_workers

    def start_counted(self: Any, group: Any) -> Any:
        """Start the workers, and return their ids. For this call the agent's remaining restarts are
        those of the whole job: torchrun computes the count from them."""
        remaining = self._remaining_restarts
        self._remaining_restarts = group.spec.max_restarts - group.spec.rdzv_handler.joined_round
        try:
            return start_workers(self, group)
        finally:
            self._remaining_restarts = remaining

    LocalElasticAgent._start_workers = start_counted  # type: ignore[method-assign]


def note_missing_group(folder: Path) -> None:
    """Patch torchrun: once all workers have ended well, the first node's agent looks whether they
    have formed a process group, and if not makes the file ``no-group`` in `folder`.

    A group leaves keys in torchrun's store; a group that a script forms by other means leaves none.
    No file is made for a single worker, nor where the store can't be asked.
    """
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent as Agent

    wait: Any = Agent._exit_barrier

    def look_and_wait(self: Any) -> None:
        """Look at the store, and make the file; then wait for the other agents, after which the
        store may be gone."""
        group = self._worker_group
        with contextlib.suppress(Exception):  # no reason to fail: the training is done
            if group.group_rank == 0 and group.workers[0].world_size > 1:
                store = TCPStore(group.master_addr, group.master_port, timeout=LOOK_TIMEOUT)
                if not store.num_keys():  # torch 2.9 can not list them
                    (folder / NO_GROUP).touch()
        wait(self)

    Agent._exit_barrier = look_and_wait  # type: ignore[method-assign]


def read_options(options: list[str]) -> Any:
    """Return torchrun's parsed options (an argparse Namespace) for words of the form
    ``--name=value``.

    Raise ValueError, with torchrun's own message, for an option that it refuses.
    """
    from torch.distributed import run

    parse: Any = run.parse_args  # without types in torch
    stderr = io.StringIO()  # argparse prints its message there, and exits
    try:
        with contextlib.redirect_stderr(stderr):
            return parse([*options, "--no-python", "script"])
    except SystemExit:
        raise ValueError(stderr.getvalue().strip().rpartition("error: ")[2]) from None


def fork_workers(server: ForkServer) -> None:
    """Patch torchrun: its workers come from the fork server, unless torchrun redirects a worker's
    output, or the server refuses, as it does a command that torchrun has wrapped."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start_new: Any = SubprocessHandler._popen

    def fork_or_start(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        """Return a new process of a worker with this command line and environment: forked by the
        server if it can be, else started by torchrun."""
        if self._stdout is None and self._stderr is None:
            process = server.fork(args, env)
            if process is not None:
                return process
        return start_new(self, args, env)

    SubprocessHandler._popen = fork_or_start  # type: ignore[method-assign]


def launch(
    argv: list[str], place: Place, server: ForkServer | None = None
) -> dict[str, Any] | None:
    """Run torchrun with its command line `argv` until all workers have ended; `server` forks them,
    if given. Return None when all workers exited with 0, else
    ``{"failures": [{"rank", "code", "time"}, …]}``, by rank.

    This patches torchrun in this process, as the module says, and may set variables of torch in its
    environment. Raise ValueError for a wrong option, StopIteration without a script, OSError for a
    secret that can't be read, and EndingError where the workers ended after a notice and none of
    this node has failed. Raises further any error of torchrun itself, as of its rendezvous.
    """
    with keep_cpus():
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    options, script = split_words(argv)
    args = read_options(options)
    args.training_script, *script_args = worker_command(sys.executable, script)
    args.training_script_args = escape_dollars(script_args)
    config, command, command_args = run.config_from_args(args)
    replace_signal_handler()
    end_after_notice(place.attempt.node(place.node))
    count_rounds()
    hosts = [place.host_of(index) for index in range(len(place.nodes))]
    secret = patiently(place.attempt.secret.read_bytes)
    if "last_call_timeout" in config.rdzv_configs:  # elastic, also where it has its least nodes
        elastic_rendezvous.patch_torchrun(hosts, secret)
        # Each agent computes the ranks from the order of the nodes. Without this all agents would
        # wait, for the read timeout, for the numbers of a node that was lost after its join.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    else:
        fixed_rendezvous.patch_torchrun(place.index, hosts, secret)
    if server is not None:
        fork_workers(server)
    if config.max_restarts:
        # Each start of the workers has a store of its own: in the agent's store, which all starts
        # would share, workers would find what earlier workers have left.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        note_missing_group(place.attempt.node(place.node).path)
    try:
        elastic_launch(config=config, entrypoint=command)(*command_args)
    except ChildFailedError as error:
        return {"failures": [_failure(rank, f) for rank, f in sorted(error.failures.items())]}
    return None


def _failure(rank: int, failure: Any) -> dict[str, Any]:
    """Return torchrun's record of a failed worker as JSON: its rank, its exit code (negative for a
    signal), and the unix time."""
    return {"rank": rank, "code": failure.exitcode, "time": failure.timestamp}


def start_server(argv: list[str]) -> ForkServer | ForkedScript | None:
    """Import torch, and start the fork server for the script of torchrun's command line `argv`.
    Return what `fork_server.start_server` returns: in a forked worker a ForkedScript, in the agent
    the server or None. None for a job with ``--no-warm-start``."""
    with pause_collector(), keep_cpus():
        with record_lookups():
            import torch  # noqa: F401  # the server, and so all workers, have it then

        if not AttemptEnv.from_env(os.environ).warm_start:
            return None
        return fork_server.start_server(split_words(argv)[1])


def await_preflight(place: Place) -> None:
    """Take part in the preflight where the batch script makes one at the same time, and return once
    the training can start; exit with 1 if it can not. This process must not have threads."""
    if AttemptEnv.from_env(os.environ).preflight_shell and not await_outcome(place):
        os._exit(1)


def main(argv: list[str]) -> ForkedScript:
    """Run torchrun with its command line `argv`, after the preflight if there is one; exit with 0,
    or with 1 when a worker has failed, or a node is unfit. Only in a forked worker this returns,
    with the worker's script.

    Failed workers are written to ``failures.json`` of the node's folder. So is an exception, as
    ``{"agent": text}``, which is then raised; if a port was taken, the attempt's ``port-taken`` is
    made, too. Raise OSError if these files can't be written.

    From now on the `NOTICE_SIGNALS` have no effect on this process, and it dies with its parent.
    HPC_DDP_AGENT_PID is set to its id, by which workers see its death; the variables of torchrun's
    options (PET_) are removed.
    """
    for number in NOTICE_SIGNALS:
        signal.signal(number, lambda *_: None)
    die_with_parent()  # else, if the supervisor is killed, the workers would go on
    os.environ["HPC_DDP_AGENT_PID"] = str(os.getpid())
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun would take them for options: --torchrun has those
    folder = Path(os.environ["HPC_DDP_NODE_FOLDER"])
    failures = NodeFolder(folder).failures  # it exists: the disk may have no room for a new file
    try:
        place = Place.from_env(dict(os.environ))
        try:
            server = start_server(argv)
        except Exception:
            await_preflight(place)  # it names a node on which torch can't be imported
            raise
        if isinstance(server, ForkedScript):
            return server
        await_preflight(place)
        result = launch(argv, place, server)
    except Exception as error:
        if "EADDRINUSE" in f"{error!r} {error.__cause__!r}":
            AttemptFolder(folder.parent).port_taken.touch()
        failures.write_text(json.dumps({"agent": f"{type(error).__name__}: {error}"}))
        raise
    if result is not None:
        failures.write_text(json.dumps(result))
    # Nothing is left to do, and taking torch apart takes a second of a preempted job's grace.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result is None else 1)
