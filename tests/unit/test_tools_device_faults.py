"""Which faults of device code the tool makes."""

from __future__ import annotations

import ast
import textwrap

from tools.device_faults import all_faults, faults
from tools.mutations import with_probes
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
