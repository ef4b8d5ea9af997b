"""A process that has imported torch and forks workers on request.

Importing torch takes seconds of each worker's start; a fork has it for nothing. ``fork_server.py
NAME`` listens on the abstract Unix socket of that name, goes into the background once it does, and
ends with its last client. Requests and answers are JSON lines: ``{"workers": [{"env", "argv",
"log"}…]}`` gives ``{"pids": […]}``; ``{"wait": pid}`` gives ``{"code": …}``, null while it runs,
negative after a signal; ``{"import": […]}`` loads more modules for the workers from then on.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import sys
from typing import Any

import torch
import torch.distributed.checkpoint

# Imported here so that workers need not; torch's part of sharding takes a second.
import hpc_ddp.training
import hpc_ddp.training.models.sharding  # noqa: F401

# The first optimizer of a process imports two seconds' worth of torch's compiler.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1).zero_grad()


def become(worker: dict[str, Any]) -> None:
    """In the forked child: take over the worker's environment, command line and output."""
    log = os.open(worker["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((null, log, log)):
        os.dup2(handle, number)
    job = os.environ.get("SLURM_JOB_ID", "")
    os.environ.update({"HPC_DDP_WORKER": f"{os.getpid()} {job}", **worker["env"]})
    os.chdir(worker["cwd"])
    sys.argv = worker["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])


def freeze() -> None:
    """Leave what there is out of the workers' collections of garbage: each would take half a
    second, and copy the pages that the workers share."""
    gc.collect()
    gc.freeze()


def answer_to(request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a request; None in a child, which has become a worker."""
    if "wait" in request:
        pid, status = os.waitpid(request["wait"], os.WNOHANG)
        return {"code": os.waitstatus_to_exitcode(status) if pid else None}
    if "import" in request:
        names = [name for name in request["import"] if name not in sys.modules]
        for name in names:
            importlib.import_module(name)
        if names:
            freeze()
        return {"modules": len(names)}
    pids = []
    for worker in request["workers"]:
        pid = os.fork()
        if pid == 0:
            become(worker)
            return None
        pids.append(pid)
    return {"pids": pids}


def serve(listener: socket.socket) -> list[str] | None:
    """Answer requests until the last client has left; return in a child the argv to run."""
    clients: dict[socket.socket, Any] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    clients[client] = client.makefile("rw")
                    selector.register(client, selectors.EVENT_READ)
                    continue
                assert isinstance(key.fileobj, socket.socket)
                stream = clients[key.fileobj]
                line = stream.readline()
                if line:
                    answer = answer_to(json.loads(line))
                    if answer is None:
                        for client in (listener, *clients):
                            os.close(client.fileno())
                        return sys.argv
                    stream.write(json.dumps(answer) + "\n")
                    stream.flush()
                    continue
                selector.unregister(key.fileobj)
                stream.close()
                key.fileobj.close()
                del clients[key.fileobj]
                if not clients:
                    listener.close()
                    return None


if __name__ == "__main__":
    freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{sys.argv[1]}")
    listener.listen()
    if os.fork():
        os._exit(0)
    argv = serve(listener)
    code: Any = 0
    if argv is not None:  # at the top level, so that an exception meets sys.excepthook
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
        atexit._run_exitfuncs()
    stand_in: Any = sys.modules.get("sim.backend")  # of tests/device
    if argv is not None and stand_in:
        stand_in.show_reports()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit spends a second on taking torch's compiler apart
