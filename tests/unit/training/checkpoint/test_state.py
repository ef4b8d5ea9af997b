"""State is collected from tracked objects, and cut into the ranks' parts."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.testing._internal.two_tensor import TwoTensor

from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.training.checkpoint import optimizer_state, plain_state, rank_part, state
from hpc_ddp.training.checkpoint.storage import shards
from hpc_ddp.training.checkpoint.storage.layout import OWN
from hpc_ddp.training.checkpoint.storage.shards import StagingBuffer
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models.mesh import ParallelDims
from hpc_ddp.training.models.trained_parameters import TrainedParameters
from unit.training.fakes import Holds

Pair = namedtuple("Pair", "first second")


def shard_of(local: torch.Tensor) -> Any:
    """Return a DTensor of two ranks, this one's part of which is `local`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({(1, 2): 3}, r"a key of x\.value is a builtins\.tuple"),
        ([1, {"a": object()}], r"x\.value\.1\.a is a builtins\.object"),
        (torch.eye(2).to_sparse(), r"x\.value is a tensor of layout torch\.sparse_coo"),
        ({"seen": {torch.ones(1)}}, r"x\.value\.seen is a set of tensors, which has no order"),
        ([{(torch.ones(1), 2)}], r"x\.value\.0 is a set of tensors"),
        ({"a@rank": torch.ones(1)}, r"x\.value\.a@rank is a tensor with @rank at the end"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "is the second one of this name"),
    ],
)
def test_unsupported_state_is_refused_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(HpcDdpError, match=words):
        state.collect({"x": Holds(value)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # is deprecated
def test_a_quantized_tensor_is_refused() -> None:
    value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(HpcDdpError, match=r"x\.value is a quantized tensor"):
        state.collect({"x": Holds(value)})


def test_an_object_without_a_state_is_refused() -> None:
    with pytest.raises(UsageError, match=r"x is a builtins.int; accepted by run.track"):
        state.collect({"x": 5})


def test_trees_of_stages_are_joined() -> None:
    def tree(label: str, value: int, *params: str) -> dict[str, Any]:
        groups = [{"lr": 1, "params": list(params)}]
        return {"model": {label: value, "n": 5}, "o": {"state": {label: 2}, "groups": groups}}

    joined = tree("a", 1, "a", "b", "c")
    joined["model"]["b"], joined["o"]["state"]["b"] = 3, 2
    assert state.merge_trees(tree("a", 1, "a", "b"), tree("b", 3, "b", "c")) == joined
    assert state.merge_trees([1, 2], [3, 4]) == [1, 2]


def test_ranks_share_the_rows_and_keep_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST_SHARE", 1)
    model = nn.BatchNorm1d(4)
    result = state.collect({"m": model, "x": Holds(torch.ones(3))})
    first, second = (rank_part.parts_of_rank(result, ParallelDims(rank, 2)) for rank in (0, 1))
    assert "x.value" in first
    assert "x.value" not in second
    assert "m.running_mean" in first
    assert f"m.running_mean{OWN}" in second
    sizes = [
        {k: p.numbers.numel() for k, p in parts.items() if "@" not in k}
        for parts in (first, second)
    ]
    assert sizes[0]["m.weight"] + sizes[1].get("m.weight", 0) == 4
    assert sizes[0].get("m.bias", 0) + sizes[1]["m.bias"] == 4


def test_trained_tensors_and_buffers_are_told_apart() -> None:
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear, nn.BatchNorm1d(2, affine=False))
    scale = nn.Parameter(torch.ones(()))
    model.register_parameter("scale", scale)
    model.register_parameter("tied", scale)
    model.add_module("norm", model[1])
    linear.bias.requires_grad = False
    optimizer = torch.optim.Adam([linear.weight, scale])
    (model(torch.randn(3, 2)) * scale).sum().backward()
    optimizer.step()
    result = state.collect({"m": model, "o": optimizer, "x": Holds(torch.ones(2))})
    moments = {f"o.state.m.0.weight.{name}" for name in ("exp_avg", "exp_avg_sq")}
    assert result.trained == {"m.0.weight", "m.scale", "m.tied", *moments}
    assert result.replicated == {*result.trained, "m.0.bias"}
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert result.buffers == {f"m.{part}.{name}" for part in ("1", "norm") for name in names}


class Mean(nn.Module):
    """As a metric of torchmetrics, whose numbers are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.ones(1)
        self.register_buffer("count", torch.zeros(1))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "total"] = self.total


def test_an_optimizer_whose_state_has_another_form_is_refused() -> None:
    class Lookahead(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"fast_state": {}, "slow_state": {}, "param_groups": []}

    net = torch.nn.Linear(1, 1)
    objects = {"net": net, "opt": Lookahead(net.parameters())}
    with pytest.raises(UsageError, match=r"state_dict of a Lookahead has fast_state, slow_state"):
        state.collect(objects)


def test_a_sparse_buffer_is_saved_in_no_checkpoint() -> None:
    """A graph's matrix, which the script makes anew; a persistent one is refused."""
    net = nn.Linear(2, 2)
    net.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
    assert {*state.collect({"net": net}).tensors} == {"net.weight", "net.bias"}
    net.register_buffer("other", torch.eye(2).to_sparse())
    with pytest.raises(HpcDdpError, match=r"net\.other is a tensor of layout torch\.sparse_coo"):
        state.collect({"net": net})


def test_what_a_module_has_beside_buffers_is_compared_between_ranks() -> None:
    """It is rank 0's that is saved, as of other objects."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not state.collect({"m": model}).rank_0_objects
    things = {"m": model.append(Mean()), "mean": Mean(), "x": Holds(torch.ones(3))}
    result = state.collect(things)
    names = {name: [*tensors] for name, tensors in result.rank_0_objects.items()}
    assert names == {"m": ["m.2.total"], "mean": ["mean.total"], "x": ["x.value"]}
    assert [*state.collect(things, per_rank=("mean", "x")).rank_0_objects] == ["m"]


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper, offload_wrapper])
def test_a_wrapper_of_torch_changes_no_name(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A run goes on where a block has such a wrapper, or none, from now on."""

    def collect(wrap: Callable[[nn.Module], nn.Module]) -> tuple[state.State, Any]:
        blocks = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2)]
        model = nn.Sequential(wrap(blocks[0]), blocks[1].requires_grad_(False))
        optimizer = torch.optim.AdamW(model.parameters())
        trained = TrainedParameters()
        trained.add([model])
        model[0].eval()
        blocks[0][0].weight.requires_grad_(False)
        things = {"m": model, "o": optimizer}
        return state.collect(things, trained=trained), state.labels_of(things)

    (plain, labels), (wrapped, labels_of_wrapped) = collect(lambda block: block), collect(wrap)
    assert plain.tree == wrapped.tree
    assert {*wrapped.tree["m"]} > {*state.BESIDE}
    for names in ("tensors", "trained", "frozen", "buffers", "equal"):
        assert set(getattr(plain, names)) == set(getattr(wrapped, names)), names
    assert [*labels.values()] == [*labels_of_wrapped.values()]


def test_replicas_of_shards_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node would write the checkpoint of a model with a replica on each. Few bytes are the
    first one's, as those without any."""
    monkeypatch.setattr(rank_part, "is_sharded", lambda tensor: True)
    sizes = {"a": 5, "b": 5, "none": 0, "c": 3, "d": 3, "e": 4, "last": 0}
    result = state.State(tensors={name: torch.ones(size) for name, size in sizes.items()})

    def names_of(replica: int) -> set[str]:
        place = replica, 2
        monkeypatch.setattr(rank_part, "place_among_copies", lambda tensor, dims: place)
        return rank_part._copies_to_write(result, ParallelDims())

    for tensor in result.tensors.values():
        placement = SimpleNamespace(is_replicate=lambda: True)
        vars(tensor).update(device_mesh="mesh", placements=[placement], to_local=tensor.clone)
    assert [names_of(0), names_of(1)] == [{*sizes}, set()]
    monkeypatch.setattr(shards, "LEAST_SHARE", 1)
    assert [names_of(0), names_of(1)] == [{"a", "b", "none", "last"}, {"c", "d", "e"}]


def test_plain_state_of_shards_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an optimizer that takes ``to_local``; torch's own ones keep DTensors."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(optimizer_state, "is_sharded", lambda tensor: tensor is model.weight)
    result = state.collect({"m": model, "o": optimizer})
    assert result.private == {f"o.state.m.weight.{name}" for name in ("exp_avg", "exp_avg_sq")}


def test_what_another_object_has_is_stored_once() -> None:
    """As an agent's networks: its ranks share them as they share a module's."""
    model = nn.Linear(2, 2)
    agent = Holds({"net": model.state_dict()})
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    result = state.collect({"agent": agent, "o": optimizer})
    assert not result.buffers
    assert not [name for name in result.tensors if optimizer_state.PARAMETERS in name]
    assert "o.state.parameter 0.exp_avg" in result.trained


def test_shards_of_another_object_are_shared_as_a_modules(two_ranks: None) -> None:
    """Rank 0's parts would stand for those of all."""
    weight: Any = nn.Parameter(shard_of(torch.ones(4)))
    optimizer = torch.optim.Adam([weight])
    weight.grad = shard_of(torch.ones(4))
    optimizer.step()
    result = state.collect(
        {"agent": Holds({"net": weight, "count": torch.ones(2)}), "o": optimizer}
    )
    assert list(result.rank_0_objects["agent"]) == ["agent.value.count"]
    assert not [name for name in result.tensors if optimizer_state.PARAMETERS in name]


def test_sharded_parameters_that_ddp_ignores_are_saved_as_shards(two_ranks: None) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(shard_of(torch.ones(2, 2)))
    model._ddp_params_and_buffers_to_ignore = ["weight", "bias"]  # type: ignore[assignment]
    assert [name for name, _ in state.ignored_by_ddp({"m": model})] == ["m.bias"]


def test_a_shard_of_8_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchao's: the numbers would come back as fp32, and its next step fail."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    shard = TwoTensor(torch.ones(2), torch.ones(2))
    local = torch.ones(2)
    local.to_local = lambda: shard  # type: ignore[attr-defined]
    optimizer.state[weight]["codes"] = local
    monkeypatch.setattr(state, "is_sharded", lambda tensor: tensor is local)
    with pytest.raises(HpcDdpError, match=r"parameter 0\.codes is a DTensor of a .*TwoTensor"):
        state.collect({"o": optimizer})


def test_a_sharded_state_of_another_shape_than_its_parameter_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Dion's: it would come back as a plain tensor, and the next step fail."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight])
    factor, number, average = torch.ones(2), torch.ones(()), torch.ones(2, 2)
    for tensor in (factor, number, average):
        tensor.to_local = lambda: torch.ones(1)  # type: ignore[attr-defined]
    optimizer.state[weight] |= {"average": average, "number": number}
    monkeypatch.setattr(state, "is_sharded", lambda tensor: hasattr(tensor, "to_local"))
    monkeypatch.setattr(state, "untracked_parameters", lambda objects, labels: {"o": {}})
    state.collect({"o": optimizer})
    optimizer.state[weight]["factor"] = factor
    with pytest.raises(HpcDdpError, match=r"0\.factor is a DTensor of another shape"):
        state.collect({"o": optimizer})


def test_zeros_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    optimizer.consolidate_state_dict = None  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"o is a .*, which has its state on one rank alone"):
        state.collect({"o": optimizer})


@pytest.mark.parametrize(
    "value",
    [
        *(numpy.float32(1), object(), {"a": [1, numpy.zeros(2)]}),
        *(defaultdict(int, a=1), [Pair(1, 2)]),
        *(b"", {b"": 1}, [1 << 2039], {-(1 << 2039): 1}, plain_state.TENSOR),
    ],
    ids=lambda value: str(value)[:20],
)
def test_state_that_could_not_be_loaded_is_not_saved(value: Any) -> None:
    with pytest.raises(HpcDdpError, match="accepted in a state_dict"):
        state.collect({"thing": Holds(value)})


@pytest.mark.parametrize("kind", [int, float])
def test_a_long_list_of_numbers_is_copied_at_once(
    kind: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(plain_state, "_check_atom", lambda value, where: calls.append(where))
    row = list(map(kind, range(999)))
    tree = state.collect({"thing": Holds(row)}).tree["thing"]
    assert tree["value"] == row
    assert tree["value"] is not row
    assert calls == ["a key of thing"]


def test_private_objects_and_weights_are_kept_for_each_rank() -> None:
    """An empty tensor is private as well; no other rank's is read for it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    objects = {"optimizer": optimizer, "model": model, "loader": Holds(torch.empty(0))}
    collected = state.collect(objects, ("loader",))
    of_adam = {f"optimizer.state.model.1.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert collected.private == {"model.1.weight", "loader.value", *of_adam}
    assert sorted(collected.tree) == ["model", "optimizer"]
    assert sorted(collected.private_tree) == ["loader", "optimizer"]
    assert "model.1.weight" not in collected.tree["optimizer"]["state"]
    assert collected.shared.keys() | collected.private == collected.tensors.keys()
    assert "model.0.weight" in collected.equal
    assert not collected.equal.keys() & collected.private
    for rank in (0, 1):
        parts = rank_part.parts_of_rank(collected, ParallelDims(rank, 2))
        assert {name for name in parts if OWN in name} == {f"{n}{OWN}" for n in collected.private}
    buffer = StagingBuffer(CPU)
    buffer.fill(parts)
    assert buffer.is_finite(collected.trained)
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(torch.inf)
    buffer.fill(rank_part.parts_of_rank(collected, ParallelDims(1, 2)))
    assert not buffer.is_finite(collected.trained)


def test_a_frozen_mask_of_infinities_counts_as_finite() -> None:
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
    collected = state.collect({"model": model})
    buffer = StagingBuffer(CPU)
    buffer.fill(rank_part.parts_of_rank(collected, ParallelDims()))
    assert buffer.is_finite(collected.trained)
    assert not buffer.is_finite(collected.replicated)


def test_joined_trees_keep_equal_entries_once() -> None:
    tree = {"lrs": [0.1, 0.1], "groups": [{"params": ["a"], "lr": 0.1}], "names": {"a": 1}}
    second = {"lrs": [0.1, 0.1], "groups": [{"params": ["b"], "lr": 0.1}], "names": {"b": 2}}
    assert state.merge_trees(tree, second) == {
        "lrs": [0.1, 0.1],
        "groups": [{"params": ["a", "b"], "lr": 0.1}],
        "names": {"a": 1, "b": 2},
    }


def test_a_tensor_of_several_is_refused_by_name() -> None:
    """As torchao's weights in 8 bits: they have no memory of their own."""
    model = nn.Linear(2, 2)
    pair = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    model.weight = nn.Parameter(pair, requires_grad=False)
    with pytest.raises(HpcDdpError, match=r"m\.weight is a .*TwoTensor"):
        state.collect({"m": model})


def test_numbers_of_numpy_are_saved_as_pythons() -> None:
    """A learning rate by ``np.cos``, say; one of fewer bits would compute otherwise."""
    numbers = [numpy.float64(0.1), numpy.int64(3), numpy.bool_(True)]
    saved = state.collect({"thing": Holds(numbers)}).tree["thing"]["value"]
    assert saved == [0.1, 3, True]
    assert list(map(type, saved)) == [float, int, bool]


def test_an_evaluation_has_the_compiled_model_without_ddp() -> None:
    net = nn.Linear(2, 2)
    compiled: Any = torch.compile(net)
    assert state.without_ddp(nn.DataParallel(compiled)) is compiled
    assert state.without_ddp(compiled) is compiled
    around: Any = torch.compile(nn.DataParallel(net))
    assert state.without_ddp(around) is net
    assert state.without_ddp(net) is net
