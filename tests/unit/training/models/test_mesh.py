"""Who is who among ranks, and what becomes of the trees of a pipeline's stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.checkpoint import loading, state
from hpc_ddp.training.checkpoint.shards import Reader, StagingBuffer
from hpc_ddp.training.models.mesh import ParallelDims


def test_neighbours_share_layers() -> None:
    ranks = [ParallelDims(rank, 12, tp=2, pp=3) for rank in range(12)]
    assert ranks[0].dp == 2
    places = [(each.pp_rank, each.dp_rank, each.tp_rank) for each in ranks]
    assert places == [(p, d, t) for p in range(3) for d in range(2) for t in range(2)]
    # Those of a stage write what it has; one of each copy of the model tells the loss.
    assert [each.stage_rank for each in ranks] == [0, 1, 2, 3] * 3
    assert [each.rank for each in ranks if each.counts] == [8, 10]
    # A tensor parallel group draws the same random numbers, all others others.
    assert [each.stream for each in ranks] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_plain_ranks_are_all_data_parallel() -> None:
    dims = ParallelDims(2, 4)
    assert (dims.dp, dims.dp_rank, dims.stage_rank, dims.stream, dims.counts) == (4, 2, 2, 2, True)


def test_sizes_have_to_divide_the_workers() -> None:
    with pytest.raises(UsageError, match="tp=2 and pp=2 with 6 workers") as caught:
        ParallelDims(0, 6, tp=2, pp=2)
    assert caught.value.hint == "start 4 workers, or a multiple of it"


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("ZBVZeroBubble", 4, "schedule is 'ZBVZeroBubble'; accepted: GPipe, 1F1B"),
        ("gpipe", 1, "n_microbatches is 1 for 2 stages; accepted: 2 or more"),
    ],
)
def test_schedules_are_checked(name: str, count: int, words: str) -> None:
    from hpc_ddp.training.models.sharding import (
        check_schedule,  # takes seconds: in one process only
    )

    with pytest.raises(UsageError, match=words):
        check_schedule(name, count, 2, torch.device("cpu"))


class Model(nn.Module):
    """Four layers, or those of one stage under the same names, with a buffer in each."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.BatchNorm1d(3) for i in layers})


def objects_of(layers: range) -> dict[str, Any]:
    torch.manual_seed(layers.start)
    model = Model(layers)
    scales = [each for name, each in model.named_parameters() if name.endswith("weight")]
    rest = [each for name, each in model.named_parameters() if name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": scales}, {"params": rest, "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    for each in model.parameters():
        each.data.normal_()
        each.grad = torch.randn_like(each)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_stages_make_a_whole_and_a_whole_makes_stages(tmp_path: Any) -> None:
    stages = [objects_of(range(2)), objects_of(range(2, 4))]
    trees, files = [], []
    for rank in range(4):
        found = state.collect(stages[rank // 2])
        trees.append(found.tree)
        buffer = StagingBuffer(torch.device("cpu"))
        buffer.fill(state.my_parts(found, ParallelDims(rank, 4, pp=2)))
        path = tmp_path / f"tensors-{rank}"
        path.write_bytes(b"".join(buffer.bytes))
        files.append((path, buffer.pieces))
    tree, reader = state.joined(trees[0], trees[2]), Reader(files)

    whole = objects_of(range(4))
    loading.put_back(whole, tree, reader, step=1)
    for stage in stages:
        weights = whole["model"].state_dict()
        assert all(weights[k].equal(v) for k, v in stage["model"].state_dict().items())
    assert [len(each["params"]) for each in whole["optimizer"].param_groups] == [4, 4]
    moments = [
        state.collect({n: each[n] for n in ("model", "optimizer")}).tensors for each in stages
    ]
    all_moments = state.collect({n: whole[n] for n in ("model", "optimizer")}).tensors
    assert all(all_moments[k].equal(v) for part in moments for k, v in part.items())
    assert len(all_moments) == sum(map(len, moments))

    other = objects_of(range(1, 3))  # cut elsewhere
    loading.put_back(other, tree, reader, step=1, stage=True)
    weights = whole["model"].state_dict()
    assert all(weights[k].equal(v) for k, v in other["model"].state_dict().items())


def test_what_is_the_same_in_all_stages_stays() -> None:
    tree = {"lrs": [0.1, 0.1], "groups": [{"params": ["a"], "lr": 0.1}], "names": {"a": 1}}
    other = {"lrs": [0.1, 0.1], "groups": [{"params": ["b"], "lr": 0.1}], "names": {"b": 2}}
    assert state.joined(tree, other) == {
        "lrs": [0.1, 0.1],
        "groups": [{"params": ["a", "b"], "lr": 0.1}],
        "names": {"a": 1, "b": 2},
    }
