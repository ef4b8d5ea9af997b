"""A process that has imported torch and forks workers on request.

Importing torch takes seconds of each worker's start; a fork has it for nothing. Requests are
JSON lines on stdin, answers JSON lines on stdout: ``{"workers": [{"env", "argv", "log"}…]}``
gives ``{"pids": […]}``; ``{"wait": pid}`` gives ``{"code": …}``, null while it runs, negative
after a signal; ``{"import": […]}`` loads more modules for the workers from then on;
``{"end": true}`` ends it.
"""

import importlib
import json
import os
import runpy
import sys
from typing import Any

import torch

import hpc_ddp.training  # noqa: F401  # imported here so that workers need not

# The first optimizer of a process imports two seconds' worth of torch's compiler.
torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1).zero_grad()


def become(worker: dict[str, Any]) -> None:
    """In the forked child: take over the worker's environment, command line and output."""
    log = os.open(worker["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((null, log, log)):
        os.dup2(handle, number)
    os.environ.update(worker["env"])
    os.chdir(worker["cwd"])
    sys.argv = worker["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])


def serve() -> list[str] | None:
    """Answer requests; return None at the end, and in a child the argv to run."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer: dict[str, Any] = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        elif "end" in request:  # an end of file may not come: a fork of our parent has the pipe too
            return None
        elif "import" in request:
            answer = {"modules": len([importlib.import_module(each) for each in request["import"]])}
        else:
            pids = []
            for worker in request["workers"]:
                pid = os.fork()
                if pid == 0:
                    become(worker)
                    return sys.argv
                pids.append(pid)
            answer = {"pids": pids}
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    argv = serve()
    code: Any = 0
    if argv is not None:  # at the top level, so that an exception meets sys.excepthook
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
    stand_in: Any = sys.modules.get("sim.backend")  # of tests/device
    if argv is not None and stand_in:
        stand_in.show_reports()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an ordinary exit spends a second on taking torch's compiler apart
