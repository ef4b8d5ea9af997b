"""What is asked of devices, and where: one module knows them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_ddp.training import devices
from hpc_ddp.training.data.order import derive
from hpc_ddp.training.models import rng
from unit.training.fakes import give_gpus

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


@pytest.mark.parametrize(
    ("kind", "backend", "options"),
    [
        ("cuda", "nccl", {"device_id": torch.device("cuda", 1)}),
        ("cuda", "gloo", {}),  # NCCL's alone can be bound
        ("xpu", "xccl", {}),
        ("cpu", "gloo", {}),
    ],
)
def test_a_group_is_bound_to_its_device_where_its_backend_can_be(
    kind: str, backend: str, options: dict[str, torch.device]
) -> None:
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 1)
    assert devices.bound(backend, device) == options


def test_backends_are_known_by_what_they_carry() -> None:
    assert devices.carries("nccl", torch.device("cuda", 0))
    assert not devices.carries("nccl", torch.device("cpu"))
    assert devices.carries("gloo", torch.device("cpu"))
    assert not devices.carries("gloo", torch.device("xpu", 0))
    assert devices.carries("a plugin's", torch.device("xpu", 0))  # the plugin knows


def test_without_an_accelerator_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, 0)
    assert devices.count() == 0
    assert devices.hiding_words() == ""
    assert devices.name(devices.CPU) == ""


def test_each_device_of_a_worker_has_a_generator_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one's numbers are not the first one's, and both are put back."""
    states: dict[torch.device, int] = {}
    monkeypatch.setattr(devices, "seed", states.__setitem__)
    monkeypatch.setattr(devices, "random_state", states.__getitem__)
    monkeypatch.setattr(devices, "put_random_state", states.__setitem__)
    places = [torch.device("cuda", index) for index in (2, 3)]
    with rng.untouched():
        rng.seed_all(7, places)
        assert states == dict(zip(places, (7, derive(7, 1)), strict=True))
        saved = rng.snapshot(places)
        states.clear()
        rng.restore(saved, places)
        assert states == dict(zip(places, (7, derive(7, 1)), strict=True))
        assert "devices" not in rng.snapshot([devices.CPU])


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("xpu", 2), ("mps", 0), ("mtia", 0)])
def test_only_what_a_backend_can_send_is_trained_on(
    monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    give_gpus(monkeypatch, 2, kind)
    assert devices.count() == count


def test_numbers_are_added_up_in_a_type_that_the_device_has(
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
