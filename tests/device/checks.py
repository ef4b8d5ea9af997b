"""Whether the stand-in device is what it says: the CPU's numbers, and a report for each mistake.

``SIM_DEVICES=2 PYTHONPATH=tests/device python tests/device/checks.py`` prints a line for each
check, and ends with 1 if one has failed. One process for all: a start of torch takes seconds.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim import backend
from torch import nn
from torch._C._distributed_c10d import HashStore  # torch.distributed re-exports it untyped
from torch.nn import functional

SIM = torch.device("sim:0")
REPORTS: Callable[[], list[str]] = backend.C.take_reports
checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    checks.append(function)
    return function


def both(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return output and gradients of a function, on the CPU and on the stand-in."""
    values = []
    for device in (torch.device("cpu"), SIM):
        own = [value.detach().to(device) for value in inputs]
        own = [value.requires_grad_(value.is_floating_point()) for value in own]
        output = function(*own)
        torch.manual_seed(1)
        output.backward(torch.randn(output.shape).to(device))  # type: ignore[no-untyped-call]
        grads = [value.grad for value in own if value.grad is not None]
        values.append([value.detach().cpu() for value in (output, *grads)])
    return values


def assert_equal_bits(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    cpu, sim = both(function, *inputs)
    assert all(map(torch.equal, cpu, sim)), function


# --- numbers ------------------------------------------------------------------------------------


@check
def operators_have_the_cpus_bits() -> None:
    image, rows = torch.randn(4, 3, 8, 8), torch.randn(4, 10)
    labels = torch.randint(10, (4,))
    weight, bias = torch.randn(8, 3, 3, 3), torch.randn(8)
    assert_equal_bits(lambda x, w, b: functional.conv2d(x, w, b, padding=1), image, weight, bias)
    scale, shift = torch.randn(3), torch.randn(3)
    assert_equal_bits(
        lambda x, a, b: functional.batch_norm(x, None, None, a, b, True), image, scale, shift
    )
    assert_equal_bits(lambda x, a: functional.layer_norm(x, (8,), a), image, torch.randn(8))
    assert_equal_bits(functional.linear, rows, torch.randn(3, 10), torch.randn(3))
    assert_equal_bits(lambda x: functional.cross_entropy(x, labels.to(x.device)), rows)
    for function in (functional.relu, functional.gelu, functional.silu):
        assert_equal_bits(function, image)
    assert_equal_bits(lambda x: x.softmax(1).cumsum(1), rows)
    assert_equal_bits(lambda x: functional.embedding(labels.to(x.device), x), torch.randn(10, 3))


@check
def attention_and_recurrent_cells_are_close() -> None:
    heads = [torch.randn(2, 2, 5, 8) for _ in range(3)]
    cell = nn.LSTM(4, 3, batch_first=True)

    def recurrent(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = cell.to(x.device)(x)[0]
        return output

    for values in (
        both(functional.scaled_dot_product_attention, *heads),
        both(recurrent, torch.randn(2, 5, 4)),
    ):
        for cpu, sim in zip(*values, strict=True):
            torch.testing.assert_close(cpu, sim)


@check
def optimizers_have_the_cpus_bits_with_foreach_and_without() -> None:
    def train(device: torch.device, make: Callable[..., Any], **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        x = torch.randn(8, 6).to(device)
        optimizer = make(model.to(device).parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for make in (torch.optim.AdamW, torch.optim.SGD):
        for foreach in (True, False):
            cpu, sim = (
                train(device, make, foreach=foreach) for device in (torch.device("cpu"), SIM)
            )
            assert all(map(torch.equal, cpu, sim)), (make, foreach)


@check
def random_numbers_are_those_of_a_cpu_generator() -> None:
    torch.get_device_module("sim").manual_seed(7)
    torch.default_generator.manual_seed(7)
    assert torch.equal(torch.randn(5, device=SIM).cpu(), torch.randn(5))
    state = torch.get_device_module("sim").get_rng_state(SIM)
    first = torch.rand(3, device=SIM).cpu()
    torch.get_device_module("sim").set_rng_state(state, SIM)
    assert torch.equal(torch.rand(3, device=SIM).cpu(), first)
    before = torch.get_rng_state()
    torch.rand(3, device="sim:1")
    assert torch.equal(torch.get_rng_state(), before)


@check
def a_parameter_stays_the_same_object() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    assert model.to(SIM).weight is weight
    assert weight.device == SIM


# --- what a GPU refuses -------------------------------------------------------------------------


def assert_refused(act: Callable[[], object], words: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=re.escape(words)):
        act()


@check
def mixed_devices_are_refused() -> None:
    there = torch.ones(3, device=SIM)
    assert_refused(lambda: there + torch.ones(3), "on the same device")
    assert_refused(lambda: there + torch.ones(3, device="sim:1"), "on the same device")
    assert_refused(there.numpy, "Tensor.cpu()")
    assert_refused(lambda: torch.ones(3, device="sim:2"), "invalid device ordinal 2")
    assert (there + torch.tensor(1.0)).sum().item() == 6
    ids = torch.tensor([0, 2])
    assert there[ids].sum().item() == 2  # indices may lie on the host
    assert_refused(lambda: functional.embedding(ids, there[:, None]), "on the same device")
    assert_refused(lambda: torch.rand(2, device=SIM, generator=torch.Generator()), "for generator")


@check
def new_memory_is_not_a_number_and_there_is_a_limit() -> None:
    assert torch.empty(4, device=SIM).isnan().all()
    backend.C.set_limit(0, backend.C.bytes_held(0) + 1000)
    assert_refused(lambda: torch.ones(1000, device=SIM), "sim out of memory")
    backend.C.set_limit(0, 1 << 40)


# --- order --------------------------------------------------------------------------------------


@check
def a_copy_to_pinned_memory_arrives_when_the_host_has_waited() -> None:
    host = torch.zeros(4, pin_memory=True)
    host.copy_(torch.ones(4, device=SIM), non_blocking=True)
    assert host.isnan().all()
    torch.accelerator.synchronize()
    assert torch.equal(host, torch.ones(4))
    assert REPORTS() == []


@check
def so_does_a_copy_to_another_layout_or_type() -> None:
    there = torch.arange(96.0, device=SIM).reshape(2, 3, 4, 4)
    wide = torch.zeros(2, 3, 4, 8, pin_memory=True)
    for value, host in (
        (there.to(memory_format=torch.channels_last), torch.zeros(2, 3, 4, 4, pin_memory=True)),
        (there, torch.zeros(2, 4, 4, 3, pin_memory=True).permute(0, 3, 1, 2)),
        (there.half(), torch.zeros(2, 3, 4, 4, pin_memory=True)),
        (there, wide[..., ::2]),
    ):
        host.copy_(value, non_blocking=True)
        assert host.isnan().all()
        torch.accelerator.synchronize()
        assert torch.equal(host.flatten(), torch.arange(96.0))
    assert not wide[..., 1::2].any()  # what lies between is not the copy's
    assert REPORTS() == []


@check
def copies_through_one_buffer_in_one_stream_are_in_order() -> None:
    host, there = torch.zeros(4, pin_memory=True), torch.ones(4, device=SIM)
    filled = host.to(SIM, non_blocking=True)
    host.copy_(there, non_blocking=True)
    torch.accelerator.synchronize()
    assert host.sum().item() == 4
    assert filled.sum().item() == 0
    assert REPORTS() == []


@check
def a_forked_process_is_refused() -> None:
    torch.ones(1, device=SIM)
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device=SIM)
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@check
def a_change_of_pinned_memory_under_way_is_reported() -> None:
    host = torch.zeros(4, pin_memory=True)
    there = host.to(SIM, non_blocking=True)
    host += 1
    torch.accelerator.synchronize()
    assert there.sum().item() == 0
    (report,) = REPORTS()
    assert "the host changed pinned memory" in report


@check
def so_is_one_that_no_wait_follows() -> None:
    """The same in another layout and another type; what is done when nobody waits any more."""
    images = torch.zeros(2, 4, 4, 3, pin_memory=True).permute(0, 3, 1, 2)
    for host, dtype in ((images, torch.float32), (torch.zeros(4, pin_memory=True), torch.half)):
        host.to(SIM, dtype, non_blocking=True)
        assert REPORTS() == []
        host += 1
        (report,) = REPORTS()
        assert "the host changed pinned memory" in report
    torch.accelerator.synchronize()


@check
def streams_without_an_event_between_them_are_reported() -> None:
    side = torch.Stream(SIM)
    value = torch.ones(4, device=SIM)
    with side:
        value + 1
    assert any("reads what" in report for report in REPORTS())
    event = torch.Event(SIM)
    event.record()
    with side:
        side.wait_event(event)
        later = value + 1
    later.record_stream(torch.accelerator.current_stream())
    torch.accelerator.current_stream().wait_stream(side)
    assert later.sum().item() == 8
    assert REPORTS() == []


@check
def memory_that_is_freed_too_early_is_reported() -> None:
    side = torch.Stream(SIM)
    value = torch.ones(64, device=SIM)
    event = torch.Event(SIM)
    event.record()
    with side:
        side.wait_event(event)
        value * 2
    del value
    torch.ones(64, device=SIM)
    assert any("freed while" in report for report in REPORTS())
    torch.accelerator.synchronize()


@check
def an_event_is_not_over_at_the_first_look() -> None:
    first, last = (torch.Event(SIM, enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    assert_refused(lambda: first.elapsed_time(last), "must be completed")
    torch.accelerator.synchronize()
    assert first.elapsed_time(last) >= 0
    first.record()
    assert [first.query() for _ in range(2)] == [False, True]


@check
def a_delay_keeps_a_stream_and_what_waits_for_it() -> None:
    side = torch.Stream(SIM)
    backend.C.set_stream_delay(200)
    began = time.monotonic()
    event = torch.Event(SIM)
    event.record()
    side.wait_event(event)
    backend.C.set_stream_delay(1)
    side.synchronize()
    assert time.monotonic() - began >= 0.1  # half of the delay, or more
    backend.C.set_stream_delay(0)


@check
def a_collective_that_is_not_waited_for_is_reported() -> None:
    dist.init_process_group(store=HashStore(), rank=0, world_size=1, device_id=SIM)
    value = torch.ones(4, device=SIM)
    work = dist.all_reduce(value, async_op=True)
    value + 1
    assert any("reads what sim:0 collectives writes" in report for report in REPORTS())
    assert work is not None
    work.wait()
    assert (value + 1).sum().item() == 8
    assert REPORTS() == []
    dist.destroy_process_group()


def main() -> int:
    failed = 0
    backend.C.set_stream_delay(0)  # whatever the environment says: one check sets its own
    for function in checks:
        try:
            function()
            left = REPORTS()
            assert not left, left
        except Exception:
            failed += 1
            print(f"FAILED {function.__name__}", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok {function.__name__}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
