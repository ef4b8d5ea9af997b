"""The numbers of nodes, workers, CPUs and GPUs of a launch, as settings, and other resources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from hpc_ddp.core.job.slurm_options import as_raw
from hpc_ddp.core.job.slurm_values import gpus_of
from hpc_ddp.submission.job_script.bash.words import literal
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.directives import (
    GPUS,
    Directives,
    has_range_of_nodes,
    names_not_set,
    read_gpus,
    requested_gpus,
    tasks_of_node,
)
from hpc_ddp.submission.job_script.launchers.launch import Launch

OF_A_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")  # other values in each task


def tasks_of_launch(launch: Launch, numbers: Mapping[str, int]) -> int:
    """Return the number of tasks that a launch has on a node: all its tasks divided by the nodes,
    rounded down, by ``-n``; else by ``--ntasks-per-node`` or ``--ntasks-per-gpu``; else the job's.
    `numbers` are as from `read_sizes`."""
    of_launch = (launch.tasks or 0) // (numbers.get("SLURM_NNODES") or launch.nodes or 1)
    of_gpu, _ = launch.options.get("ntasks-per-gpu", (None, 0))
    if of_gpu and of_gpu.text.isdecimal() and not (of_launch or launch.tasks_per_node):
        of_launch = int(of_gpu.text) * numbers.get("SLURM_GPUS_ON_NODE", 0)
    return of_launch or launch.tasks_per_node or tasks_of_node(numbers)


def read_texts(directives: Directives, numbers: Mapping[str, int]) -> dict[str, str]:
    """Return the values of Slurm's variables on sizes that follow from the directives, by name, as
    Slurm writes them: "a100:3" for SLURM_GPUS_PER_NODE, "4(x2)" for SLURM_TASKS_PER_NODE. `numbers`
    are as from `read_sizes`."""
    texts = {name: str(number) for name, number in numbers.items()}
    for name in ("gpus", "gpus-per-node", "gpus-per-task"):
        texts[f"SLURM_{name.upper().replace('-', '_')}"] = directives.get(name) or ""
    for name in ("partition", "account", "name"):
        operand = directives.get("job-name" if name == "name" else name) or ""
        texts[f"SLURM_JOB_{name.upper()}"] = "" if "," in operand else operand
    nodes, tasks = numbers.get("SLURM_NNODES"), tasks_of_node(numbers)
    if nodes and numbers["SLURM_NTASKS"] == nodes * tasks:
        texts["SLURM_TASKS_PER_NODE"] = f"{tasks}(x{nodes})" if nodes > 1 else str(tasks)
    not_set = names_not_set(directives)
    return {name: text for name, text in texts.items() if text and name not in not_set}


def take_sizes(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int],
    gpus: int,
) -> None:  # fmt: skip
    """Put the numbers of nodes, workers and CPUs into `result`, and the command that starts the
    tasks. `numbers` are as from `directives.read_sizes`; `gpus` is the number of a node's GPUs."""
    _take_nodes(launch, result, directives, numbers)
    _take_workers(launch, result, directives, numbers, gpus)
    _take_step_launcher(launch, result, directives, numbers, gpus)
    _take_cpus(launch, result, directives, numbers)


def _take_nodes(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> None:
    """Put the number of nodes into `result`, unless it is there: from the directives, as a text
    where it is a range (``2-4``), else from the launch, else 1 with a note. `numbers` are as from
    `read_sizes`."""
    of_step = 0 if launch.in_loop else launch.nodes  # a loop over the nodes has one in each step
    nodes = numbers.get("SLURM_NNODES") or of_step
    is_range = has_range_of_nodes(directives, numbers)
    at = directives.line("nodes", "ntasks") or launch.line
    result.values.setdefault("nodes", (directives.get("nodes") if is_range else nodes or 1, at))
    tasks, of_node = directives.number("ntasks"), directives.number("ntasks-per-node")
    if tasks and of_node and directives.number("nodes") and tasks != of_node * (nodes or 1):
        text = f"--ntasks={tasks} beside --ntasks-per-node={of_node} on {nodes} nodes"
        result.note(directives.line("ntasks"), f"{text}: --ntasks counts, by Slurm's manual")
    if not is_range and not nodes:
        result.note(0, "the script has no number of nodes: 1 is taken; --nodes N")


def _take_workers(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int],
    gpus: int,
) -> None:  # fmt: skip
    """Put the number of workers on a node into `result`, unless hpc-ddp takes that number by
    itself: one for each of the node's `gpus`, one without GPUs.

    The number is the launcher's; where it names none, its processes divided by the nodes, else one
    for each GPU. Without a launcher of workers it is the number of tasks on a node that srun or
    mpirun starts, else 1. Notes name a number that is not known, torchrun's own default on a node
    of several GPUs, a launcher that several tasks of a node would start, and one that would train
    on each of several nodes by itself. Lines are marked as by `_mark_uneven_tasks`. `numbers` are
    as from `read_sizes`."""
    line, nodes = launch.line, numbers.get("SLURM_NNODES") or launch.nodes or 1
    is_range, processes = has_range_of_nodes(directives, numbers), launch.processes or 0
    trains_alone = launch.machines == 1 and (nodes > 1 or is_range)
    trains_alone &= "PET_NNODES" not in {*launch.env, *result.env}  # torchrun's own variable
    if trains_alone and processes <= (gpus or processes):
        processes *= nodes  # the number is of each node's training
    if launch.kind:
        workers = launch.workers or processes // nodes or gpus or 1
    else:
        workers = tasks_of_launch(launch, numbers) if launch.step else 1
    if launch.step and not launch.kind:
        _mark_uneven_tasks(launch, result, directives, numbers)
    if launch.kind == "torchrun" and launch.workers is None and not gpus:
        is_of_gpus = any(
            operand and "SLURM_GPUS" in operand.text for operand, _ in launch.options.values()
        )
        hint = "--gpus-per-node N, and a worker on each" if is_of_gpus else "--nproc-per-node N"
        result.note(line, f"the number of workers is not known here: {hint}")
    has_number = {"nproc-per-node", "nproc", "n"} & launch.options.keys()
    if launch.kind == "torchrun" and launch.workers == 1 < gpus and not has_number:
        text = "torchrun's own default is one worker: drop nproc-per-node for one on each GPU"
        result.note(line, text)
    if trains_alone and launch.step:
        option = "--num_machines" if launch.kind == "accelerate" else "--nnodes"
        size = "all nodes" if is_range else f"{nodes} nodes with {workers} workers each"
        text = f"{option} is 1 here: each node trains by itself; hpc-ddp makes one training"
        result.note(line, f"{text} of {size}")
    if launch.step and launch.kind and not (launch.tasks or launch.in_loop):
        count = launch.tasks_per_node or tasks_of_node(numbers)
        text = f"{count} tasks on a node would each start the launcher there; hpc-ddp starts one"
        if count > 1:
            result.note(line, text)
    if workers != (gpus or 1) and launch.line:  # 0: there is no launch
        result.values["nproc-per-node"] = workers, line


def _mark_uneven_tasks(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> None:
    """Mark the line with the number of tasks, the launch's or the job's, as lost where this is no
    multiple of the number of nodes. `numbers` are as from `read_sizes`."""
    nodes = numbers.get("SLURM_NNODES") or launch.nodes
    of_job = 0 if launch.tasks_per_node else numbers.get("SLURM_NTASKS", 0)
    tasks = launch.tasks or of_job
    if tasks % (nodes or 1):
        text = f"{tasks} tasks on {nodes} nodes: each node has as many: nproc-per-node = N"
        at = (0 if launch.tasks else directives.line("ntasks")) or launch.line
        result.mark(at, at, LOST, text)


def _take_step_launcher(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int],
    gpus: int,
) -> None:  # fmt: skip
    """Put the command that starts the launch's tasks (``srun``, ``mpirun``) into `result`: as
    ``step-launcher`` where a launcher of workers runs in them, else as ``launcher``. As
    ``step-launcher`` srun is left out, which hpc-ddp takes itself.

    A program without any launcher gets ``launcher = "srun"``, unless the number of nodes is a
    range; a note says so where the node has several `gpus`. `numbers` are as from `read_sizes`.
    """
    has_range = has_range_of_nodes(directives, numbers)
    lacks_launcher = bool(launch.program) and not (launch.kind or has_range)
    # Under torchrun the program, and what it starts, would get the variables of a worker.
    step = launch.step or ("srun" if lacks_launcher else "")
    if lacks_launcher and not launch.step and gpus > 1 and "no-python" not in launch.settings:
        text = "plain Python: one process; for a worker on each GPU drop launcher, nproc-per-node"
        result.note(launch.line, text)
    if step and not (launch.kind and step == "srun"):
        result.values["step-launcher" if launch.kind else "launcher"] = step, launch.line


def _take_cpus(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> None:
    """Put the number of CPUs into `result`, from the directives: of a task (``cpus-per-task``), or,
    where several tasks of the job become one launcher of workers or one program, of all tasks of a
    node (``cpus-per-node``). Where the directives have no number, put the launch's number of a
    task, or without that 1 for each of several tasks that become one.

    Beside the job's ``--cpus-per-gpu`` nothing is put there. The launch's line is marked as lost
    where it has a number beside that, or another one than the directives. `numbers` are as
    from `read_sizes`.
    """
    if "cpus-per-gpu" in directives.options:  # sbatch refuses both
        if launch.cpus:
            text = f"srun --cpus-per-task={launch.cpus} beside --cpus-per-gpu of the job"
            reason = f"{text}: cpus-per-task = N, without the other"
            result.mark(launch.line, launch.line, LOST, reason)
        return
    tasks = tasks_of_node(numbers) if launch.kind or not launch.step else 1  # that become one
    default = 1 if tasks > 1 and launch.cpus is None else 0  # of Slurm, for each task
    cpus = directives.number("cpus-per-task") or default
    if cpus:
        key = "cpus-per-task" if tasks == 1 else "cpus-per-node"
        at = directives.line("cpus-per-task", "ntasks-per-node", "ntasks")
        result.values[key] = cpus * tasks, at
        if launch.cpus not in (None, cpus):
            text = f"srun --cpus-per-task={launch.cpus} beside {cpus} of the job: cpus-per-task = N"
            result.mark(launch.line, launch.line, LOST, text)
    elif launch.cpus:
        result.values["cpus-per-task"] = launch.cpus, launch.line


def take_gpus(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> int:
    """Put the number of a node's GPUs, with their type (``gpus-per-node``), and the option that
    asks for them (``gpu-request``) into `result`: from the directives, else from the launch's own
    options. Return the number, 0 without one. `numbers` are as from `read_sizes`.

    Lines whose requests do not agree, or give the nodes different numbers, are marked as lost; a
    step with fewer GPUs than the job gets a note. ``--nv`` of a container is taken out of `launch`.
    """
    count = numbers.get("SLURM_GPUS_ON_NODE", 0)
    options = directives.operands if count else launch.gpus
    count = count or read_gpus(options, ("gpus-per-node", "gres"))
    count = count or read_gpus(options, ("gpus-per-task",)) * tasks_of_launch(launch, numbers)
    if not (count and (settings := _gpu_request(options, count))):
        return count
    at = directives.line(*GPUS) or launch.line
    gpus, request = settings
    result.values["gpus-per-node"] = gpus, at
    if launch.step and not launch.kind:
        request = _request_of_task(launch, result, directives, numbers) or request
    if request != "gpus-per-node":
        result.values["gpu-request"] = request, at
    total, nodes = read_gpus(options, ("gpus",)), numbers.get("SLURM_NNODES", 1)
    if request == "gpus-per-node" and total % nodes:
        result.mark(at, at, LOST, f"{total} GPUs on {nodes} nodes: each node has as many")
    for name in {"gpus-per-node", "gres"} & directives.options.keys():
        if read_gpus(options, (name,)) not in (0, count):
            at, text = directives.line(name), f"--{name}={options[name]} beside {count} GPUs"
            result.mark(at, at, LOST, f"{text} of a node: gpus-per-node has one number")
    of_step = read_gpus(launch.gpus, ("gpus-per-node", "gres"))
    of_step = of_step or read_gpus(launch.gpus, ("gpus",)) // nodes
    text = f"{launch.step} has {of_step} GPUs of a node, and the job {count}"
    if of_step > count:
        result.mark(launch.line, launch.line, LOST, f"{text}: gpus-per-node has one number")
    elif 0 < of_step < count:
        result.note(launch.line, f"{text}: here the workers have all of them")
    first = next((name for name in GPUS if requested_gpus(options, name)[1]), "ntasks-per-gpu")
    for name in {"gpus-per-task", "gpus"} & directives.options.keys() - {first, request}:
        marks = result.marks[directives.line(name)]
        mark = TAKEN, as_raw(name, directives.operands[name])
        same = OURS, f"{mark[1]}: a node's GPUs are those of --{first}"
        marks[:] = [same if entry == mark else entry for entry in marks]
    _take_container_flag(launch, gpus)
    return count


def _request_of_task(
    launch: Launch, result: Conversion, directives: Directives, numbers: Mapping[str, int]
) -> str:
    """Return "gpus-per-task", a value of ``gpu-request``, if job or launch ask for GPUs of a task,
    so that each task sees only its own; else ''. If that gives the node another number of GPUs than
    it has by `numbers`, as from `read_sizes`, its line is marked as lost, and '' is returned."""
    count, tasks = numbers.get("SLURM_GPUS_ON_NODE", 0), tasks_of_launch(launch, numbers)
    of_task = read_gpus(directives.operands | launch.gpus, ("gpus-per-task",))
    if of_task and count not in (0, of_task * tasks):
        at = directives.line("gpus-per-task") or launch.line
        text = f"--gpus-per-task={of_task} for {tasks} tasks beside {count} GPUs of a node"
        result.mark(at, at, LOST, f"{text}: gpus-per-node has one number")
        return ""
    return "gpus-per-task" if of_task else ""


def _take_container_flag(launch: Launch, gpus: str) -> None:
    """Remove ``--nv`` from the launch's options of a container, since hpc-ddp writes it; for AMD's
    types of `gpus` ("mi250:8") ``--rocm``."""
    container_options = launch.settings.get("container-options", [])
    standard = "--rocm" if re.match(r"mi\d", gpus, re.I) else "--nv"  # as `container._gpu_options`
    texts = {word.text for word in container_options}
    is_alone = not texts & {"--nv", "--rocm"} - {standard}
    tool = launch.settings.get("container-tool", [literal("")])[0].text
    verb = "run" if tool.endswith("-run") else "exec"
    adds_flag = "image" in launch.settings and tool not in ("pyxis", "shifter")
    if adds_flag and not texts & {"--nv", "--rocm"}:
        launch.mark(launch.line, "", f"hpc-ddp adds {standard} to the container's options")
    for word in [word for word in container_options if word.text == standard and is_alone]:
        container_options.remove(word)
        launch.mark(word.line, OURS, f"{verb} {word.text}")


def take_other_gres(result: Conversion, directives: Directives) -> None:
    """Put a ``gres`` that asks for more than GPUs, as "gpu:4,nvme:1", into `result` as a raw option
    of sbatch, unless its line is lost. If the job's GPUs are in it, set ``gpu-request`` to "none",
    so that hpc-ddp asks for no others. To be called after `take_gpus`."""
    request, line = directives.options.get("gres", ("", 0))
    has_more = any(not gpus_of(part) for part in request.split(","))
    if request and has_more and result.group(line)[0] == TAKEN:
        result.append("sbatch", f"--gres={request}", line)
        if gpus_of(request) and "gpus-per-node" in result.values:
            result.values["gpu-request"] = "none", line


def _gpu_request(options: Mapping[str, str], count: int) -> tuple[str, str] | None:
    """Return the settings ``gpus-per-node`` and ``gpu-request`` for `count` GPUs of a node:
    ("a100:4", "gres") for "gpu:a100:4" of ``gres`` in `options`, values by sbatch's long names. The
    first option of `GPUS` that asks for some counts, else ``ntasks-per-gpu``; None without one."""
    for name in GPUS:
        gpu_type, number = requested_gpus(options, name)
        if number:
            form = "gpus-per-node" if name == "gpus" else name
            return (f"{gpu_type}:{count}" if gpu_type else str(count)), form
    return (str(count), "gpus-per-node") if "ntasks-per-gpu" in options else None


def note_devices(result: Conversion, gpus: int) -> None:
    """Add a note to `result` on each line that sets CUDA_VISIBLE_DEVICES to other GPUs than
    ``0,1,…``, all of the node's; `gpus` is their number, and with 0 nothing is noted. Not to be
    called for a launch by srun, which replaces the variable in its tasks."""
    name = "CUDA_VISIBLE_DEVICES"
    lines = [(text, n) for text, n in result.lists.get("setup", ()) if f"export {name}=" in text]
    lines += [(f"{name}={text}", n) for text, n in [result.env[name]]] if name in result.env else []
    every = rf"{name}=[\"']?{','.join(map(str, range(gpus)))}[\"']?$"
    for text, line in lines:
        if gpus and not re.search(every, text):
            reason = "srun shows each task the job's own GPUs, whatever the batch script exports"
            result.note(line, f"{name}: {reason}: worker-setup, if it is meant")


def note_task_numbers(launch: Launch, result: Conversion, of_batch: Set[str]) -> None:
    """Add a note to `result` on each variable of `OF_A_TASK` in the program's arguments that the
    batch script fills in (`of_batch` has the names that it does): ``$SLURM_PROCID`` is then 0 for
    all tasks, while each of hpc-ddp's workers has its own value."""
    for word in launch.args:
        for name in sorted({*word.names} & of_batch & {*OF_A_TASK}):
            reason = "is the batch script's there, 0 for all tasks; here each worker has its own"
            result.note(word.line or launch.line, f"${name} {reason}")
