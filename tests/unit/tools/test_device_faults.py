"""The tool removes calls and arguments of device code one by one."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tools.device_branches import all_branches, branches
from tools.device_faults import all_faults, faults
from tools.mutations import Mutation, with_probes
from tools.store import REPO

PROGRAM = textwrap.dedent(
    """\
    def go(self, batch, device):
        with torch.accelerator.device_index(1), open("x"):
            devices.wait(devices)
        self._known.wait()
        event.record(stream)
        batch = batch.to(device, torch.half, non_blocking=True)
        batch.to(device)
        self.to(device)
        state["devices"] = [devices.random_state(device) for device in own]
        model.require_backward_grad_sync = on
        generator = torch.Generator().manual_seed(3)
        torch.zeros(2, device=device, pin_memory=pinned)
        torch.zeros(2, device="meta")
        return {"pin_memory": pinned, "size": 3}
    """
)


def test_each_call_and_argument_of_a_device_is_removed_once() -> None:
    assert [fault.change for fault in faults(PROGRAM)] == [
        "torch.accelerator.device_index(1) -> __import__('contextlib').nullcontext()",
        "devices.wait(devices) -> pass",
        "event.record(stream) -> pass",
        "batch.to(device, torch.half, non_blocking=True) -> batch.to(torch.half)",
        "True -> False",
        "batch.to(device) -> batch",
        'state["devices"] = [devices.random_state(device) for device in own] -> pass',
        "model.require_backward_grad_sync = on -> pass",
        "torch.Generator().manual_seed(3) -> torch.Generator()",
        "device -> None",
        "pinned -> False",
        "pinned -> False",
    ]


def test_each_fault_and_each_probe_leaves_a_program() -> None:
    for number, fault in enumerate(all_faults()):
        source = (REPO / fault.file).read_bytes()
        ast.parse(fault.apply(source))
        ast.parse(with_probes(source.decode(), {number: fault}, REPO))


CONDITIONS = textwrap.dedent(
    """\
    def go(device, many):
        "A docstring."
        if device == "sim" and many:
            return [each for each in many if each.dtype]
        few = 1 if len(many) > 9 else 2
        return device != "cpu"


    def unused():
        raise RuntimeError(f"{2}")


    class Kind:
        dtype = None
    """
)


def outcomes(places: list[Mutation]) -> list[tuple[str, str]]:
    return [(place.before, place.kind) for place in places]


def test_each_condition_on_a_device_has_two_outcomes() -> None:
    conditions = ['device == "sim"', "each.dtype", 'device != "cpu"']
    places = [(text, kind) for text in conditions for kind in ("is true", "is false")]
    assert sorted(outcomes(branches(CONDITIONS))) == sorted(places)


def test_in_device_code_all_conditions_and_functions_count() -> None:
    places = set(outcomes(branches(CONDITIONS, whole=True)))
    more = places - set(outcomes(branches(CONDITIONS)))
    assert more == {
        ("many", "is true"),
        ("many", "is false"),
        ("len(many) > 9", "is true"),
        ("len(many) > 9", "is false"),
        ('device == "sim" and many', "is entered"),
        ('RuntimeError(f"{2}")', "is entered"),
    }


def test_a_probe_records_which_outcomes_occurred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a.py::b (call)")
    places = dict(enumerate(branches(CONDITIONS, whole=True)))
    names: dict[str, Any] = {}
    exec(with_probes(CONDITIONS, places, tmp_path), names)
    assert names["go"]("sim", [names["Kind"]]) == []
    assert names["go"]("sim", []) is True
    never = [places[number] for number in places if not (tmp_path / str(number)).exists()]
    assert sorted(outcomes(never)) == [
        ('RuntimeError(f"{2}")', "is entered"),
        ('device != "cpu"', "is false"),
        ('device == "sim"', "is false"),
        ("each.dtype", "is true"),
        ("len(many) > 9", "is true"),
    ]


def test_each_branch_leaves_a_program() -> None:
    places: dict[str, dict[int, Mutation]] = {}
    for number, place in enumerate(all_branches()):
        places.setdefault(place.file, {})[number] = place
    for file, numbered in places.items():
        ast.parse(with_probes((REPO / file).read_text(), numbered, REPO))
