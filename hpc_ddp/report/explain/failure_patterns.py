"""The patterns of known failures, in the words of Python, torch, NCCL, the shell and Slurm.

One row for each; the first row whose pattern is in a text counts. ``{…}`` in its words stands for
a group of its pattern; in its hint also for ``{again}``, the command that goes on with the run,
``{python}``, the job's Python, and ``{logs}``, the command that shows the rank's log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    kind: str
    pattern: str
    words: str
    hint: str


class Diagnosis(NamedTuple):
    """A row that matches a text: its words are filled in, its hint is a template."""

    kind: str
    words: str
    hint: str
    groups: Mapping[str, str]


_MEMORY = "more --mem, fewer or leaner DataLoader workers, or data that is not held in memory"
_NETWORK = (
    "{again}; if it comes again: --interface, or --fabric ethernet, and NCCL_DEBUG=INFO with --env"
)
_PEERS = "look at that rank: {logs}; if it comes again, leave that node out: --exclude"
_DISK = "make room, then: {again}"
_PYTHON = "--python with the path of the Python that has torch, or --setup 'module load …'"

CAUSES = (
    # memory
    Cause(
        "cuda out of memory",
        r"CUDA out of memory(\. Tried to allocate (?P<size>[\d.]+ \w+))?|"
        r"CUDA error: out of memory|CUDA ran out of memory",
        "the GPU's memory was full{when_size}",
        "a smaller batch_size (run.loader(…, accumulate=2) keeps the numbers), or"
        " --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
    ),
    Cause(
        "host out of memory",
        r"out of memory: killed by the kernel|[Dd]etected \d+ oom[-_]kill|oom[-_]kill event|"
        r"Exceeded (job|step) memory limit|is killed by signal: Killed",
        "the memory of the node, or what the job may have of it, was used up, and the kernel"
        " killed the process",
        _MEMORY,
    ),
    Cause(
        "host out of memory",
        r"DefaultCPUAllocator: can't allocate memory|^(numpy\.\S+)?MemoryError|"
        r"_ArrayMemoryError|Errno 12\] Cannot allocate memory",
        "the node had no more memory to give",
        _MEMORY,
    ),
    Cause(
        "host out of memory",
        r"out of shared memory|unable to (mmap|allocate shared memory)|"
        r"unable to write to file </tor|killed by signal: Bus error",
        "the shared memory of the node (/dev/shm), in which DataLoader workers hand over batches,"
        " was full",
        "fewer DataLoader workers or smaller batches, or more --mem",
    ),
    # disk
    Cause(
        "disk full",
        r"Errno 28\]|No space left (on device|for)",
        "the disk was full",
        _DISK,
    ),
    Cause("disk full", r"Errno 122\]|Disk quota exceeded", "the disk quota was used up", _DISK),
    Cause(
        "disk read-only",
        r"Errno 30\]|Read-only file system",
        "the file system could only be read",
        "--runs-dir on a disk that takes files, or wait until it is repaired, then: {again}",
    ),
    Cause(
        "disk failed",
        r"Errno (5|107|108|116)\]|Stale file handle|Input/output error|"
        r"Transport endpoint is not connected",
        "the file system gave no answer or an error",
        "{again}; if it comes again, tell your site's support which node it was",
    ),
    # environment
    Cause(
        "bad environment",
        r"No module named '?torch'?$",
        "the job's Python has no torch",
        _PYTHON,
    ),
    Cause(
        "bad environment",
        r"No module named '?(?P<module>[\w.]+)",
        "the job's Python does not find the module {module}",
        "install what has it for {python}, or name another Python: --python",
    ),
    Cause(
        "bad environment",
        r"partially initialized module '(?P<module>[\w.]+)'",
        "a file of yours seems to have the name of a module that {module} needs, and is loaded"
        " in its place",
        "give that file another name",
    ),
    Cause(
        "bad environment",
        r"(?P<library>lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "the library {library} was not found on the node",
        "load the module that has it: --setup 'module load …'",
    ),
    Cause(
        "bad environment",
        r"version `(?P<version>\w+)' not found",
        "a library of the node is older than what was built against it ({version})",
        "use an environment that was built on the cluster, or --container",
    ),
    Cause(
        "bad environment",
        r"ImportError: cannot import name '(?P<name>[^']+)' from '(?P<module>[^']+)'",
        "{module} has no {name}: another version than the script was written for",
        "install the version that it needs for {python}",
    ),
    Cause(
        "bad environment",
        r"Torch not compiled with CUDA enabled",
        "this torch is a build for CPUs only",
        "install a CUDA build of torch, or name the Python that has one: --python",
    ),
    Cause(
        "bad environment",
        r"Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device is detected",
        "there was no GPU to be seen",
        "ask for them: --gpus-per-node; in a container: apptainer exec --nv",
    ),
    Cause(
        "bad environment",
        r"NVIDIA driver on your system is too old|no kernel image is available|"
        r"CUDA driver version is insufficient",
        "this build of torch does not fit the node's GPUs or their driver",
        "a build of torch for an older CUDA, or a newer one for newer GPUs",
    ),
    Cause(
        "bad environment",
        r"invalid device ordinal|workers on this node, but \d+ visible GPU|Duplicate GPU detected",
        "there were more workers on the node than GPUs",
        "the same number for --nproc-per-node as for --gpus-per-node, or leave it out",
    ),
    Cause(
        "bad environment",
        r"can't open file '(?P<file>[^']+)'",
        "the script {file} was not there",
        "look whether it is in the snapshot of your code (a git-ignored file is not); then {again}",
    ),
    Cause(
        "bad environment",
        r"(unknown: \"(?P<a>[^\"]+)|Unable to locate a modulefile for '(?P<b>[^']+))",
        "the environment module {a}{b} does not exist here",
        "module avail lists them; then fix --setup",
    ),
    Cause(
        "bad environment",
        r"(?P<command>module|conda|mamba|apptainer|singularity|enroot|srun|ml): "
        r"(command )?not found",
        "the command {command} was not found on the node",
        "make it known in a --setup line, such as: source /etc/profile",
    ),
    Cause(
        "bad environment",
        r"(?P<file>\S*/activate): No such file",
        "there is no virtual environment {file}",
        "fix --setup, or name its Python: --python",
    ),
    Cause(
        "bad environment",
        r"(EnvironmentNameNotFound|EnvironmentLocationNotFound).*|shell has not been properly "
        r"configured to use 'conda activate'",
        "the conda environment could not be activated",
        "name its Python instead: --python",
    ),
    Cause(
        "bad environment",
        r"cd: (?P<folder>.+): No such file or directory",
        "the working directory {folder} is not there on the nodes",
        "submit from a folder that the nodes see, too",
    ),
    Cause(
        "bad environment",
        r"execve\(\): (?P<program>\S+): (?P<why>.+)",
        "{program} could not be started on the node: {why}",
        "a path that the nodes see, too: --python, or --container",
    ),
    Cause(  # the supervisor's, of torchrun: a script's own error begins with its type
        "bad environment",
        r"^\[Errno (2|13)\] (?P<why>[^:]+): '(?P<program>[^']+)'",
        "{program} could not be started on the node: {why}",
        "a path that the nodes see, too: --python",
    ),
    Cause(
        "bad environment",
        r"Exec format error|Illegal instruction",
        "a program is built for another kind of processor",
        "use an environment that was built on such a node",
    ),
    Cause(
        "bad environment",
        r"Error: network [\w ]+ not found|Failed to initialize any NET plugin",
        "NCCL could not use the network of NCCL_NET: its plugin, or"
        " libibverbs, is not in the job's environment, or the cards are not in the node",
        "read its lines in the output, and load the missing part (--setup 'module load …');"
        " or go without it, slowly: --fabric ethernet",
    ),
    # peers and network
    Cause(
        "hang",
        r"HangError: no step for (?P<s>[\d.e+]+) s at step (?P<step>\d+)",
        "no step was done for {s} s after step {step}",
        "compare where the ranks stood (stack-rank-*.txt beside their logs); a collective that not"
        " all ranks call hangs like this",
    ),
    Cause(
        "communication",
        r"Watchdog caught collective operation timeout: WorkNCCL\(.*?OpType=(?P<op>\w+).*?"
        r"Timeout\(ms\)=(?P<ms>\d+)",
        "NCCL waited {ms} ms for the others in {op}",
        _PEERS,
    ),
    Cause(
        "communication",
        r"Timed out waiting (?P<ms>\d+)ms for (?P<what>\w+) operation",
        "gloo waited {ms} ms for another rank ({what})",
        _PEERS,
    ),
    Cause(
        "rendezvous failure",
        r"Rendezvous(Timeout|Closed|State|Graceful)\w*Error|"
        r"Timed out after \d+ seconds? waiting for clients",
        "not all nodes had met within the time for it",
        "{again}; if it comes again: the nodes can't reach the first one, so --interface, or"
        " --exclude the node that has no record",
    ),
    Cause(
        "rendezvous failure",
        r"RendezvousConnectionError|client socket has (timed out|failed to connect)",
        "a node could not reach the first node's store",
        "{again}; if it comes again: --interface or the site's host suffix, or --exclude the node;"
        " a script that sets MASTER_PORT itself needs --launcher srun",
    ),
    Cause(
        "rendezvous failure",
        r"EADDRINUSE|address already in use",
        "the rendezvous port was taken on the first node, five times",
        "{again}",
    ),
    Cause(
        "communication",
        r"Connect to (?P<address>[\w.:%]+)<\d+> failed ?: (?P<why>[\w ]+)",
        "NCCL could not connect to {address}: {why}",
        _NETWORK,
    ),
    Cause(
        "communication",
        r"DistStoreError: wait timeout after (?P<ms>\d+)ms",
        "a rank waited {ms} ms for another one to join the process group",
        _PEERS,
    ),
    Cause(
        "communication",
        r"Connection (closed|reset|refused)|Broken pipe|Socket Timeout",
        "the connection to another rank was lost",
        _PEERS,
    ),
    Cause(
        "communication",
        r"NCCL|[Gg]loo|Dist(Network|Backend|Store)Error|ProcessGroup",
        "the collective communication failed",
        _NETWORK,
    ),
    # the GPU itself
    Cause(
        "gpu failed",
        r"uncorrectable ECC|has fallen off the bus|unspecified launch failure|"
        r"CUDA error: unknown error|device-side error",
        "the GPU, or its driver, failed",
        "{again} with --exclude of that node, and tell your site's support",
    ),
    Cause(
        "non-finite weights",
        r"the weights have NaN or infinity in them",
        "the weights had become NaN or infinite",
        "a lower learning rate, or run.update(optimizer, clip_norm=1.0); then {again}",
    ),
)

# Signals that are no notice, and their usual reason.
SIGNALS = {
    6: "it gave up by itself (SIGABRT), as C++ code does after an error",
    7: "a file that it had mapped into memory was cut short, or /dev/shm was full (SIGBUS)",
    9: "it was killed (SIGKILL); the kernel does so where memory runs out, but has not reported it",
    11: "compiled code touched memory that it must not (SIGSEGV)",
}


def recognise(text: str) -> Diagnosis | None:
    """Return the first row whose pattern is in a text; None without one."""
    for cause in CAUSES:
        match = re.search(cause.pattern, text, re.M)
        if match:
            groups = {name: group or "" for name, group in match.groupdict().items()}
            size = groups.get("size")
            groups["when_size"] = f" when it asked for {size} more" if size else ""
            return Diagnosis(cause.kind, cause.words.format(**groups), cause.hint, groups)
    return None
