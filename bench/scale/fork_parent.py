"""The warm parent of a rehearsal: it has imported torch, and forks all that would import it.

``python bench/scale/fork_parent.py SOCKET CLIENT`` listens for `fork_client`, which the job has as
its Python. A fork gets the client's files, folder, environment, host name and network, and runs
its command line as Python would; it ends with the client, and the client with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import runpy
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass, field
from typing import NoReturn

WORD = struct.Struct("=i")
SPACES = ("uts", "net", "mnt")  # the last one hides the others' files
MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.data",
    "torch.nn.parallel",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "multiprocessing.connection",
    "subprocess",
    "json",
    "hmac",
    "ctypes",
)


@dataclass
class Request:
    """A client's process, and the state of what it asks for."""

    connection: socket.socket
    text: bytes = b""
    size: int = -1  # of the whole text
    files: list[int] = field(default_factory=list)  # stdin, stdout, stderr, the working directory
    child: int = 0

    def words(self) -> tuple[int, list[str], dict[str, str]]:
        """Return the client's process id, its command line and its environment."""
        fields = iter(os.fsdecode(self.text).split("\0"))
        pid = int(next(fields))
        argv = [next(fields) for _ in range(int(next(fields)))]
        pairs = [next(fields) for _ in range(int(next(fields)))]
        return pid, argv, dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def receive(self) -> bool:
        """Read what has come; return whether the connection is still open."""
        if self.size < 0:
            size, files, _, _ = socket.recv_fds(self.connection, WORD.size, 4)
            if len(size) < WORD.size:
                return False
            self.size, self.files = WORD.unpack(size)[0], files
            return True
        content = self.connection.recv(65536)
        if self.child:  # signals to pass on
            for number in content:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.child, number)
        else:
            self.text += content
        return bool(content)


class WarmParent:
    """Forks a process for each client, and ends it with its client."""

    def __init__(self, path: str, client: str) -> None:
        self.client = client
        self.requests: dict[int, Request] = {}  # by the descriptor of their connection
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(4096)
        self.poll = select.epoll()
        self.poll.register(self.listener, select.EPOLLIN)
        self.wake, waker = socket.socketpair()
        waker.setblocking(False)
        self.waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poll.register(self.wake, select.EPOLLIN)

    def serve(self) -> None:
        """Serve for ever; return in each child, once it is what its client asks for."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    self.requests[connection.fileno()] = Request(connection)
                    self.poll.register(connection, select.EPOLLIN)
                elif descriptor == self.wake.fileno():
                    self.wake.recv(4096)
                    self.report_ends()
                elif (request := self.requests.get(descriptor)) and not self.follow(request):
                    return

    def follow(self, request: Request) -> bool:
        """Act on what a client sends. Return False in the child that it has asked for."""
        try:
            is_open = request.receive()
        except ConnectionError:
            is_open = False
        if not is_open:
            if request.child:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(request.child, signal.SIGKILL)
            self.forget(request)
        elif not request.child and len(request.text) == request.size:
            request.child = os.fork()
            if not request.child:
                self.become(request)
                return False
            for file in request.files:
                os.close(file)
        return True

    def forget(self, request: Request) -> None:
        """Close a connection. Its child, if it runs, is reaped by `report_ends`."""
        self.requests.pop(request.connection.fileno(), None)
        self.poll.unregister(request.connection)
        request.connection.close()

    def report_ends(self) -> None:
        """Send the exit codes of ended children to their clients."""
        by_child = {request.child: request for request in self.requests.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if request := by_child.get(pid):
                with contextlib.suppress(OSError):
                    request.connection.sendall(WORD.pack(os.waitstatus_to_exitcode(status)))
                self.forget(request)

    def become(self, request: Request) -> None:
        """Make this process, just forked, what its client would have been."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pid, argv, environ = request.words()
        libc = ctypes.CDLL(None, use_errno=True)
        spaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in SPACES]
        for space in spaces:
            if libc.setns(space, 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.fchdir(request.files[3])
        os.setsid()
        for target, file in enumerate(request.files[:3]):
            os.dup2(file, target)
        for file in [*spaces, *request.files]:
            if file > 2:
                os.close(file)
        for other in self.requests.values():
            other.connection.close()
        for shared in (self.listener, self.wake, self.waker, self.poll):
            shared.close()
        self.requests.clear()
        os.environ.clear()
        os.environ.update(environ)
        sys.executable = self.client
        words = argv[1:]
        while words[0].startswith("-"):
            words.pop(0)
        sys.argv[:] = words


def main() -> NoReturn:
    """Import, then serve; in a child run its file."""
    path, client = sys.argv[1:]
    for name in MODULES:
        __import__(name)
    gc.collect()
    gc.freeze()
    # A fork server collects once more, which copies what all nodes' processes share here.
    gc.disable()
    for name in ("collect", "unfreeze", "enable"):
        setattr(gc, name, lambda *_: 0)
    parent = WarmParent(path, client)
    print("ready", flush=True)
    parent.serve()
    file = sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(file))
    runpy.run_path(file, run_name="__main__")
    sys.exit(0)


if __name__ == "__main__":
    main()
