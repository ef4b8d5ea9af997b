"""The process from which the workers of a node are forked, so that torch is imported once.

torchrun's agent imports torch, and forks this process while it has no threads. The fork server
imports what the optimizers and the script will need, and forks a worker whenever the agent asks for
one: at torchrun's start, and at each restart. The agent itself can't fork workers: its rendezvous
has threads.

A worker is forked twice and so becomes a child of the agent, as if the agent had started it. Where
a fork would not be the same as a start of Python, the server refuses, with a reason, and the agent
starts the worker by exec: docs/decisions/011-warm-start.md.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_ddp.core import process
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.job.variables import OF_A_RANK
from hpc_ddp.node.workers.first_import import MISSING, FirstImport, is_read
from hpc_ddp.node.workers.forked_script import ForkedScript, is_main_kept, wipe_main_first
from hpc_ddp.node.workers.module_files import find_hiding_file, own_folders
from hpc_ddp.node.workers.preload import (
    forget_rank,
    import_all,
    name_of_plugin,
    record_lookups,
)
from hpc_ddp.node.workers.script_imports import UnfitError, modules_ahead
from hpc_ddp.node.workers.worker import (
    OF_AN_MPI_TASK,
    die_with_parent,
    fill_variables,
    heed_notice,
    prepare_worker,
    set_compile_cache,
    worker_command,
)

if TYPE_CHECKING:
    pass

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
ANSWER_S = 300.0  # an import may wait without end here, for another worker, say
# Variables that torchrun and `worker.prepare_worker` set for a worker; no import depends on them.
OF_A_WORKER = re.compile(
    rf"({OF_A_RANK}|TORCH_DISABLE_SHARE_RDZV_TCP_STORE)$|SLURM_|HPC_DDP_|(TORCH_)?NCCL_"
    rf"|TORCH_?ELASTIC_|{'|'.join(OF_AN_MPI_TASK)}"
)
# A worker that torchrun starts has the default handler of these, which torchrun handles, even where
# this process ignores them: below nohup, or in the background of a shell.
HANDLED_BY_TORCHRUN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
CHILD_S = 60.0  # within which a worker is its agent's child
SIGNALS = (*process.NOTICE_SIGNALS, signal.SIGQUIT)


@dataclass
class ForkedProcess:
    """A worker, as torchrun uses its ``subprocess.Popen``."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the worker runs. This does not
        wait."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the worker's end and return its exit code, negative for a signal. Raise
        ``subprocess.TimeoutExpired`` after `timeout` seconds (None: never)."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return code


@dataclass
class ForkServer:
    """The agent's end of a fork server."""

    connection: Connection
    is_reported: bool = False  # the reason of a refusal is printed once

    def fork(self, command: Sequence[str], environ: dict[str, str]) -> ForkedProcess | None:
        """Have the server fork a worker that runs `command`, as `worker_command` makes it, with the
        environment `environ`; return the worker, which is a child of this process. None where the
        server refuses, has ended, or does not answer within `ANSWER_S`: the caller then has to
        start the worker by exec. The first reason for that is printed."""
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # the worker's parent ends, and this process gets it
        try:
            self.connection.send((list(command), environ))
            if not self.connection.poll(ANSWER_S):
                self.connection.close()  # this ends the server, once it reads again
                raise EOFError(f"no answer within {ANSWER_S:.0f} s")
            answer: int | str = self.connection.recv()
        except (EOFError, OSError) as error:
            answer = f"the fork server has ended: {error!r}"
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        if isinstance(answer, int):
            return ForkedProcess(answer)
        if not self.is_reported:
            say(f"workers are started by exec: {answer}")
            self.is_reported = True
        return None


def start_server(script: Sequence[str]) -> ForkServer | ForkedScript | None:
    """Fork the server for a `script` (its words, with the arguments) from this process, the agent,
    which has imported torch; return the agent's end of the server.

    In each worker that the server forks the call returns once more, with the script that the
    process has to run. It returns None where workers can't be forked: on other systems than Linux;
    for a program that is no script; where each worker gets set-up lines or variables of its own, on
    which an import may depend; and where this process has threads, which a fork would not have (a
    site's ``sitecustomize`` may start some). All but the first reason are printed.
    """
    if sys.platform != "linux":
        return None
    if Path(script[0]).name == "program.py":
        say("workers are started by exec: the program is a module or a command, and no script")
        return None
    if "HPC_DDP_EXPAND_ENV" in os.environ or "HPC_DDP_WORKER_SETUP" in os.environ:
        say("workers are started by exec: each has set-up lines, or variables, of its own")
        return None
    if threading.active_count() > 1:
        name = threading.enumerate()[-1].name
        say(f"workers are started by exec: torchrun's agent has threads, such as {name}")
        return None
    agent_end, server_end = Pipe()
    agent = os.getpid()
    if os.fork():
        server_end.close()
        return ForkServer(agent_end)
    agent_end.close()
    die_with_parent()
    if os.getppid() != agent:  # the agent has ended before the line above
        os._exit(0)
    try:
        return _Server(server_end, list(script), agent).serve()
    except Exception:  # of this process, or of a worker that can't become its script
        sys.excepthook(*sys.exc_info())
        os._exit(1)


@dataclass
class _Server:
    """The server's own side."""

    connection: Connection
    script: list[str]
    agent: int  # the agent's process id
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))  # at the imports
    refusal: str = ""  # the reason why no worker can be forked
    output: int = -1  # descriptor of a file with what the imports print

    def serve(self) -> ForkedScript:
        """Make the imports, then fork a worker for each request; return only in a worker, its
        script. The server ends with 0 once the agent closes the connection. Where the script is
        unfit for a fork, each request is refused. Raise as `_become_worker`, in a worker."""
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        for number in SIGNALS:  # a preempting Slurm may signal each process of the step
            signal.signal(number, signal.SIG_IGN)
        sys.argv[:] = self.script  # some packages look at it
        forget_rank()
        set_compile_cache()  # torch would set another at its import
        self.output = process.memory_file("imports")
        try:
            self._import_all()
        except UnfitError as error:
            self.refusal = str(error)
        if began := process.began_at(self.agent):
            process.imports_ahead = process.ImportsAhead(began, time.time())
        gc.unfreeze()
        gc.collect()  # once, during the rendezvous, and not at the end of each worker
        if is_main_kept():
            atexit.register(wipe_main_first)
        gc.freeze()  # a collection would touch, and so copy, the pages that the workers share
        atexit.register(_end_collections)  # the first function registered is called last
        while True:
            try:
                command, environ = self.connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            answer = self._refusal(command, environ) or self._fork_worker()
            if answer is not None:  # None: this process is the worker
                self.connection.send(answer)
                continue
            inherited = set(SIGNALS) - set(HANDLED_BY_TORCHRUN)
            _reset_signals(ignored=[n for n in inherited if handlers[n] is signal.SIG_IGN])
            return self._become_worker(command, environ)

    def _import_all(self) -> None:
        """Make the imports of `import_all` while a fork tries the accelerator; set `refusal` where
        that trial fails. Raise UnfitError where a forked worker would differ from one that is
        started by exec."""
        # A worker's Python has a seed of hashes and -u, and neither -P nor -s.
        is_other = getattr(sys.flags, "safe_path", False) or sys.flags.no_user_site
        if "PYTHONHASHSEED" not in self.environ or is_other:
            raise UnfitError("its Python was started in another way than a script's")
        if plugin := name_of_plugin(self.environ):
            raise UnfitError(f"torch loads {plugin} at its import")
        folders = own_folders(Path(self.script[0]))
        names = modules_ahead(Path(self.script[0]), folders, self.script[1:])
        from hpc_ddp.node.workers.device_check import Trial

        trial = Trial()
        with record_lookups():
            import_all(names, self.output)
        if file := find_hiding_file(folders, sys.modules, MISSING):
            raise UnfitError(f"{file} hides a module that is imported already")
        self.refusal = trial.await_failure()

    def _refusal(self, command: list[str], environ: dict[str, str]) -> str:
        """Return the reason why no worker with this command and environment may be forked, '' where
        one may. Reasons are the server's `refusal`, a command that `worker_command` has not made,
        and a variable that has changed since the imports, and on which an import may depend."""
        if self.refusal:
            return self.refusal
        start = worker_command(sys.executable, [])
        if command[: len(start)] != start:
            return f"its command begins with {command[0]}"
        names = {*environ, *self.environ}
        for name in sorted(names):
            has_changed = environ.get(name) != self.environ.get(name)
            if has_changed and is_read(name) and not OF_A_WORKER.match(name):
                return f"{name} has changed since the imports"
        return ""

    def _fork_worker(self) -> int | str | None:
        """Fork twice, so that the agent becomes the worker's parent; return the worker's process
        id, or the reason for which the fork has failed. Return None in the worker."""
        reader, writer = os.pipe()
        try:
            go_between = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            return f"a fork has failed: {error}"
        if not go_between:
            try:
                pid = os.fork()
            except OSError:
                os._exit(1)
            if not pid:
                os.close(reader)
                os.close(writer)
                return None
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            text = file.read()
        os.waitpid(go_between, 0)
        return int(text) if text else "a fork has failed"

    def _become_worker(self, command: list[str], environ: dict[str, str]) -> ForkedScript:
        """Prepare this process, just forked, as `worker.py` would with `command` and `environ`, and
        return its script. First wait until the process is the agent's child, and end it with 1 if
        the agent has died. Print what the imports have printed. Raise as `worker.prepare_worker`
        and `ForkedScript.become`."""
        self.connection.close()
        give_up = time.monotonic() + CHILD_S
        while os.getppid() != self.agent:  # until the process between them has ended
            if os.getppid() == 1 or time.monotonic() > give_up:  # 1: an orphan, as the agent died
                os._exit(1)
            time.sleep(0.0005)
        os.setsid()
        os.environ.clear()
        os.environ.update(environ)
        start = len(worker_command(sys.executable, [])) - 2  # of the script's own: python, -u, …
        words = fill_variables(prepare_worker(command[start:]))
        heed_notice()
        os.write(2, os.pread(self.output, os.fstat(self.output).st_size, 0))
        os.close(self.output)
        script = ForkedScript.become(words)
        FirstImport(words)  # last: nothing of hpc-ddp may import torch before the script does
        return script


def _end_collections() -> None:
    """Collect the worker's own objects at its exit; then unfreeze the imported objects for Python's
    last collections, since extension modules complain of objects that are left. Python's first
    collection at the exit is switched off: it would find nothing among the imported objects, and
    take a fifth of the worker's end."""
    if gc.isenabled():
        gc.collect()
    gc.unfreeze()
    gc.disable()  # so Python leaves out that first collection


def _reset_signals(ignored: Sequence[int]) -> None:
    """Set the handlers of `SIGNALS` to those that Python has after an exec: signals in `ignored`
    stay ignored, all others get the default handler."""
    for number in SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
