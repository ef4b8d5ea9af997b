"""Settings that lines of a script change a second time at a resume are put back."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import StepLR

from hpc_ddp.training.data.rerun_lines import Settings


def test_settings_and_schedulers_are_put_back_with_a_line_for_each() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    rate = torch.tensor(0.5)
    groups = [{"params": [weights[0]], "lr": rate}, {"params": [weights[1]], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    plain = torch.optim.SGD(weights, lr=1.0)
    scheduler = StepLR(plain, 1)
    settings = Settings({"opt": optimizer, "plain": plain, "sched": scheduler, "x": 3})
    lines: list[str] = []
    settings.put_back(lines.append)
    assert lines == []
    rate.fill_(0.1)
    optimizer.param_groups[1]["lr"] *= 0.1
    plain.step()
    scheduler.step()
    settings.put_back(lines.append)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert (optimizer.param_groups[1]["lr"], plain.param_groups[0]["lr"]) == (0.25, 1.0)
    assert (scheduler.last_epoch, scheduler.get_last_lr()) == (0, [1.0])
    assert [line.partition(" is ")[0] for line in lines] == [
        "opt: lr",
        "plain: lr",
        "sched: last_epoch",
    ]
