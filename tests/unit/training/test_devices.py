"""Devices are chosen and used in one module alone."""

from __future__ import annotations

import ast
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training import devices
from hpc_ddp.training.devices import CPU, choose_backend, choose_devices
from hpc_ddp.training.process.environment import DistEnv
from unit.training.fakes import give_gpus


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_worker_with_one_visible_gpu_takes_it(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, gpus)
    dist_env = DistEnv(rank=6, local_rank=2, world_size=8, local_world_size=4, launched=True)
    assert choose_devices(dist_env) == [torch.device("cuda", 0 if gpus == 1 else 2)]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    if gpus == 1:
        with pytest.raises(HpcDdpError, match="4 workers on this node, but 1 visible GPU"):
            choose_devices(dist_env)
    else:
        assert choose_devices(dist_env) == [torch.device("cuda", 2)]


@pytest.mark.parametrize(
    ("gpus", "per_worker", "local", "torchrun", "first"),
    [
        (0, 2, 0, False, None),
        (4, 1, 3, True, 3),
        (4, 2, 1, True, 2),
        (2, 2, 1, False, 0),  # srun lets a task see its own
        (3, 2, 1, True, "start 1 workers per node"),
        (1, 1, 1, True, "2 workers on this node, but 1 visible"),
    ],
)
def test_each_worker_has_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    per_worker: int,
    local: int,
    torchrun: bool,
    first: int | str | None,
) -> None:
    current = give_gpus(monkeypatch, gpus)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    dist_env = DistEnv(local, local, 2, 2, launched=True)
    if isinstance(first, str):
        with pytest.raises(HpcDdpError) as caught:
            choose_devices(dist_env, per_worker)
        assert first in f"{caught.value.message} {caught.value.hint}"
        assert (" of 2 GPUs" in caught.value.message) is (per_worker == 2)
        return
    expected = [torch.device("cpu")] * per_worker
    if first is not None:
        expected = [torch.device("cuda", first + index) for index in range(per_worker)]
    assert choose_devices(dist_env, per_worker) == expected
    assert current == ([] if first is None else [first])


def test_one_slice_of_several_is_all_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1c,MIG-2d")
    with pytest.raises(HpcDdpError) as caught:
        choose_devices(DistEnv(1, 1, 2, 2, launched=True))
    assert caught.value.hint
    assert caught.value.hint.startswith("CUDA shows a process one MIG slice")


@pytest.mark.parametrize(
    ("kind", "hidden"),
    [
        ("cuda", ", or hide the GPUs with CUDA_VISIBLE_DEVICES=''"),
        ("xpu", ", or hide the GPUs with ONEAPI_DEVICE_SELECTOR='*:cpu'"),
    ],
)
def test_a_hint_names_a_variable_that_is_known_to_work(
    monkeypatch: pytest.MonkeyPatch, kind: str, hidden: str
) -> None:
    give_gpus(monkeypatch, 1, kind)
    with pytest.raises(HpcDdpError) as caught:
        choose_devices(DistEnv(0, 0, 2, 2, launched=True), 2)
    assert caught.value.hint == f"take fewer GPUs{hidden}"


@pytest.mark.parametrize(
    ("counts", "version", "message", "hint"),
    [
        ({"NVIDIA": 4}, "13.2", "which is built for NVIDIA, sees none", "look at the driver"),
        ({"NVIDIA": 4}, None, "which is built for CPUs, sees none", "install a torch for NVIDIA"),
        ({"AMD": 8, "NVIDIA": 1}, "13.2", "8 device(s) of AMD", "install a torch for AMD"),
    ],
)
def test_a_run_takes_no_cpus_where_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch,
    counts: dict[str, int],
    version: str | None,
    message: str,
    hint: str,
) -> None:
    give_gpus(monkeypatch, 0)
    assert choose_devices(DistEnv()) == [CPU]
    monkeypatch.setattr("hpc_ddp.core.accelerators.expected_devices", lambda environ: counts)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(HpcDdpError) as caught:
        choose_devices(DistEnv())
    assert message in caught.value.message
    words = caught.value.hint or ""
    assert words.startswith(hint)
    assert "hide them: " in words
    give_gpus(monkeypatch, 1, "mps")  # torch sees it, and has no backend for it
    monkeypatch.setattr("hpc_ddp.core.accelerators.expected_devices", lambda environ: counts)
    assert choose_devices(DistEnv()) == [CPU]


@pytest.mark.parametrize(
    ("option", "device", "backend"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda", "nccl"),
        (None, "xpu", "xccl"),
        ("gloo", "cuda", "gloo"),
        ("nccl", "cpu", "there is no GPU here"),
        ("mpi", "cpu", "this torch has nccl, gloo, xccl, and no mpi"),
        ("ucc", "cpu", "and no ucc"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),  # a dry run on the user's own machine
        ("cpu:gloo,cuda:nccl", "xpu", "it names none for xpu"),
        ("cpu:gloo,cuda:mpi", "cuda", "and no mpi"),
    ],
)
def test_the_backend_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, option: str | None, device: str, backend: str
) -> None:
    available = {"gloo", "nccl", "xccl"}
    monkeypatch.setattr(dist, "is_backend_available", available.__contains__)
    if " " in backend:
        with pytest.raises(HpcDdpError, match=backend):
            choose_backend(option, torch.device(device))
    else:
        assert choose_backend(option, torch.device(device)) == backend


@pytest.mark.parametrize(
    ("kind", "slower"), [("cuda", "; slower: HPC_DDP_BACKEND=gloo"), ("xpu", "")]
)
def test_gloo_is_hinted_at_where_it_carries_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, slower: str
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: False)
    with pytest.raises(HpcDdpError) as caught:
        choose_backend(None, torch.device(kind))
    assert caught.value.hint == f"install a torch that has it{slower}"


TRAINING = Path(devices.__file__).parent


def test_no_other_module_names_a_kind_of_device() -> None:
    """A branch for one vendor's devices is one that the others never take."""
    kinds = re.compile(r"""["'](cuda|hip|xpu|npu|mps|sim)["']|torch\.(cuda|xpu|npu|mps)\b""")
    named = [
        f"{path.name}: {line.strip()}"
        for path in sorted(TRAINING.rglob("*.py"))
        if path.name != "devices.py"
        for line in path.read_text().splitlines()
        if kinds.search(line)
    ]
    assert named == []


def test_new_tensors_have_a_type_and_a_device() -> None:
    """Without, they are as the script's ``set_default_dtype`` and ``set_default_device`` say."""
    factories = "zeros", "ones", "empty", "full", "tensor"
    missing = []
    for path in sorted(TRAINING.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
                continue
            name = ast.unparse(node.func).removeprefix("torch.")
            if name in factories and not {"dtype", "device"} <= {k.arg for k in node.keywords}:
                missing.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert missing == []


@pytest.mark.parametrize(
    ("kind", "backend", "options"),
    [
        ("cuda", "nccl", {"device_id": torch.device("cuda", 1)}),
        ("cuda", "gloo", {}),  # NCCL's alone can be bound
        ("cuda", "cpu:gloo,cuda:nccl", {"device_id": torch.device("cuda", 1)}),
        ("cuda", "cpu:gloo,cuda:gloo", {}),
        ("xpu", "xccl", {}),
        ("cpu", "gloo", {}),
    ],
)
def test_a_group_is_bound_to_its_device_if_the_backend_allows(
    kind: str, backend: str, options: dict[str, torch.device]
) -> None:
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 1)
    assert devices.binding(backend, device) == options


def test_backends_carry_tensors_of_their_devices() -> None:
    assert devices.carries("nccl", torch.device("cuda", 0))
    assert not devices.carries("nccl", torch.device("cpu"))
    assert devices.carries("gloo", torch.device("cpu"))
    assert not devices.carries("gloo", torch.device("xpu", 0))
    assert devices.carries("a plugin's", torch.device("xpu", 0))  # the plugin knows


@pytest.mark.parametrize(
    ("gpus", "per_worker", "local", "first"),
    [(1, 1, 3, 0), (4, 1, 3, 3), (4, 2, 3, 2), (3, 2, 1, 0), (1, 2, 0, "2 workers of 2 GPUs")],
)
def test_workers_of_a_developer_may_share_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, per_worker: int, local: int, first: int | str
) -> None:
    give_gpus(monkeypatch, gpus)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("HPC_DDP_DRY_RUN_DEVICES", "shared")
    info = DistEnv(local, local, 4 if isinstance(first, int) else 2, 2, launched=True)
    if isinstance(first, str):
        with pytest.raises(HpcDdpError, match=first):
            choose_devices(info, per_worker)
    else:
        expected = [torch.device("cuda", first + number) for number in range(per_worker)]
        assert choose_devices(info, per_worker) == expected


@pytest.mark.parametrize("shared", ["shared", "1"])
def test_ranks_that_share_a_gpu_are_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    monkeypatch.setenv("HPC_DDP_DRY_RUN_DEVICES", shared)
    monkeypatch.setenv("NCCL_HOSTID", "")  # so that it is put back
    monkeypatch.delenv("NCCL_HOSTID")
    devices.tell_sharers_apart(CPU, 3)
    assert os.environ.get("NCCL_HOSTID") == ("rank-3" if shared == "shared" else None)


def test_gpus_of_an_unknown_vendor_have_no_variable_that_hides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_gpus(monkeypatch, 2)
    monkeypatch.setattr(devices, "KINDS", {})
    assert devices.hiding_words() == ""
    with pytest.raises(HpcDdpError) as caught:
        choose_devices(DistEnv(2, 2, 3, 3, launched=True))
    assert caught.value.hint == "start 2 workers per node"


def test_a_device_that_does_not_tell_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, expected in (
        (SimpleNamespace(), True),
        (SimpleNamespace(is_initialized=lambda: False), False),
        (SimpleNamespace(is_initialized=lambda: True), True),
    ):
        monkeypatch.setattr(torch, "get_device_module", lambda device, of=module: of)
        assert devices.is_used(torch.device("xpu", 0)) is expected
    assert not devices.is_used(CPU)


def test_a_machine_without_accelerators_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, 0)
    assert devices.count() == 0
    assert devices.hiding_words() == ""
    assert devices.name(devices.CPU) == ""


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("xpu", 2), ("mps", 0), ("mtia", 0)])
def test_accelerators_without_a_backend_are_not_used(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    give_gpus(monkeypatch, 2, kind)
    assert devices.count() == count


def test_sums_use_a_type_that_the_device_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for has_fp64, wanted in ((True, torch.float64), (False, torch.float32)):
        properties = SimpleNamespace(has_fp64=has_fp64)
        module = SimpleNamespace(get_device_properties=lambda device, of=properties: of)
        monkeypatch.setattr(torch, "get_device_module", lambda device, of=module: of)
        assert devices.sum_type(torch.device("xpu", 0)) is wanted
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert devices.sum_type(devices.CPU) is torch.float64
    assert devices.sum_type(SimpleNamespace(type="npu")) is torch.float32  # type: ignore[arg-type]


def test_a_tensor_of_several_numbers_is_not_copied() -> None:
    """It is refused when it is read; on meta, which counts as a device."""
    several = torch.empty(3, device="meta")
    assert devices._start_copy(several) is several


def test_a_thread_takes_its_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = give_gpus(monkeypatch, 4)
    devices.use(torch.device("cuda", 3))
    devices.use(devices.CPU)
    assert current == [3]


def test_the_cpu_has_no_model_name() -> None:
    assert devices.name(CPU) == ""


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: False), False),
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: True), True),
        (
            SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation),
            False,
        ),
        (SimpleNamespace(is_bf16_supported=lambda: False), False),
        (SimpleNamespace(), True),
    ],
)
def test_an_emulated_bf16_does_not_count(
    monkeypatch: pytest.MonkeyPatch, module: SimpleNamespace, expected: bool
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert devices.has_bf16(torch.device("cuda", 0)) is expected


def test_a_device_may_have_no_times() -> None:
    """As torch_npu 2.9.0."""

    def refuse(end: object) -> float:
        raise RuntimeError("Backend doesn't support elapsedTime.")

    begin: Any = SimpleNamespace(elapsed_time=refuse)
    assert math.isnan(devices.elapsed_s(begin, begin))
    begin.elapsed_time = lambda end: 1500.0
    assert devices.elapsed_s(begin, begin) == 1.5
