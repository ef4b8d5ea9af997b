"""Counts what each node asks of a file system, in the kernel, without slowing it down.

Needs bpftrace (``apt-get install bpftrace``), whose program attaches to the kernel's system calls.
A node is a network namespace. Calls by path count if it begins with the folder, calls by
descriptor if the file is on the folder's file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

BY_PATH = {
    "open": {"openat": "filename"},
    "stat": {"newfstatat": "filename", "statx": "filename", "faccessat": "filename"}
    | {"faccessat2": "filename", "readlinkat": "pathname", "access": "filename"}
    | {"newstat": "filename", "newlstat": "filename", "readlink": "path"},
    "change": {"rename": "oldname", "renameat": "oldname", "renameat2": "oldname"}
    | {"unlink": "pathname", "unlinkat": "pathname", "mkdir": "pathname", "mkdirat": "pathname"}
    | {"chmod": "filename", "fchmodat": "filename", "rmdir": "pathname", "link": "oldname"}
    | {"symlink": "newname", "symlinkat": "newname", "utimensat": "filename"},
}
BY_DESCRIPTOR = {
    "list": ["getdents64"],
    "write": ["write", "pwrite64", "writev"],
    "sync": ["fsync", "fdatasync"],
}
SPACE = "((struct task_struct *)curtask)->nsproxy->net_ns->ns.inum"
FILE = "(*(((struct task_struct *)curtask)->files->fdt->fd + args->fd))"


def program(folder: Path) -> str:
    """Return the program of bpftrace that counts by kind and namespace, and prints at its end."""
    prefix, device = f"{folder}/", os.stat(folder).st_dev
    # The kernel's number of a device is not that of stat: 12 bits of major, 20 of minor.
    number = os.major(device) << 20 | os.minor(device)
    lines = []
    for kind, calls in BY_PATH.items():
        for call, name in calls.items():
            lines.append(
                f"tracepoint:syscalls:sys_enter_{call}"
                f' /strncmp(str(args->{name}), "{prefix}", {len(prefix)}) == 0/'
                f' {{ @[{SPACE}, "{kind}"] = count(); }}'
            )
    for kind, names in BY_DESCRIPTOR.items():
        for call in names:
            lines.append(
                f"tracepoint:syscalls:sys_enter_{call} /args->fd > 2 &&"
                f" {FILE}->f_inode->i_sb->s_dev == {number}/"
                f' {{ @[{SPACE}, "{kind}"] = count(); }}'
            )
    return "\n".join(['BEGIN { printf("counting\\n"); }', *lines])


def read_counts(text: str, spaces: dict[int, str]) -> dict[str, Counter[str]]:
    """Return the counts by node and kind from what bpftrace has printed."""
    counts: dict[str, Counter[str]] = {node: Counter() for node in spaces.values()}
    for space, kind, number in re.findall(r"^@\[(\d+), (\w+)\]: (\d+)$", text, re.MULTILINE):
        counts.setdefault(spaces.get(int(space), "login"), Counter())[kind] += int(number)
    return counts


@contextlib.contextmanager
def count(folder: Path, spaces: dict[int, str]) -> Iterator[dict[str, Counter[str]]]:
    """Count while the block runs; the dictionary is filled at its end, by node and kind.

    `spaces` are the nodes by the inode of their network namespace; what is of no node is counted
    for "login". Raise RuntimeError if bpftrace does not start.
    """
    counts: dict[str, Counter[str]] = {}
    with tempfile.NamedTemporaryFile("w") as source:
        source.write(program(folder))
        source.flush()
        env = {**os.environ, "BPFTRACE_STRLEN": "96", "BPFTRACE_MAP_KEYS_MAX": "65536"}
        argv = ["bpftrace", "-B", "line", source.name]
        with subprocess.Popen(argv, env=env, stdout=PIPE, stderr=PIPE, text=True) as tracer:
            assert tracer.stdout is not None
            while (line := tracer.stdout.readline()) != "counting\n":
                if not line:
                    raise RuntimeError(f"bpftrace: {tracer.communicate()[1][-2000:]}")
            try:
                yield counts
            finally:
                counts.update(read_counts(end(tracer), spaces))


def end(tracer: subprocess.Popen[str]) -> str:
    """Interrupt bpftrace, which may miss it, until it has printed its counts; return them."""
    while True:
        tracer.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return tracer.communicate(timeout=10)[0]


def main() -> None:
    """Count for some seconds by hand: ``python bench/scale/operations.py FOLDER SECONDS``."""
    import sys
    import time

    with count(Path(sys.argv[1]), {os.stat("/proc/self/ns/net").st_ino: "here"}) as counts:
        time.sleep(float(sys.argv[2]))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
