"""Objects that `run.track` was given or not, against those of the script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.models.tracked_objects import (
    GradientWatch,
    LivingModels,
    add_hook_tables,
    check_models,
    check_place,
    find_inner_optimizer,
    warn_of_stateless,
    warn_of_untracked,
)
from hpc_ddp.training.models.trained_parameters import TrainedParameters


class Nested(torch.optim.SGD):
    """As davda54/sam has it: the inner optimizer has the groups of the outer one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)


class Saving(Nested):
    def state_dict(self) -> Any:
        return {}


def test_an_optimizer_inside_another_one_is_named_unless_it_is_saved() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    outer = Nested(parameters)
    assert find_inner_optimizer(outer, [outer]) == "base"
    assert find_inner_optimizer(outer, [outer, outer.base]) == ""
    assert find_inner_optimizer(outer.base, []) == ""
    saving = Saving(parameters)
    assert find_inner_optimizer(saving, [saving]) == ""
    outer.base.state = outer.state
    assert find_inner_optimizer(outer, [outer]) == ""


def test_an_optimizer_with_a_parameter_twice_is_refused() -> None:
    net = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([*net.parameters(), net.weight])
    with pytest.raises(UsageError, match=r"SGD has the parameter net\.weight twice") as caught:
        check_models({"net": net, "optimizer": optimizer}, [])
    assert caught.value.hint == "SGD(dict.fromkeys(PARAMETERS), …)"


class FullyShardedDataParallel(nn.Module):
    """As torch's first one, of which each rank has plain tensors of its own."""


def test_a_model_whose_shards_look_like_a_whole_model_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), FullyShardedDataParallel())
    with pytest.raises(UsageError, match="net is a FullyShardedDataParallel, each rank's shard"):
        check_models({"opt": torch.optim.SGD(net.parameters()), "net": net}, [])


def test_an_optimizer_without_its_model_is_refused() -> None:
    """Without a wrapper its weights would be saved, and the means of batch norm would not."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(UsageError, match=r"opt trains a \w+ that run\.track was not given"):
        check_models({"opt": optimizer}, [])
    check_models({"opt": optimizer, "net": net}, [])
    agent: Any = SimpleNamespace(state_dict=net.state_dict, load_state_dict=net.load_state_dict)
    check_models({"opt": optimizer, "agent": agent}, [])
    alone = torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # as SAC's temperature
    check_models({"alone": alone}, [])
    with pytest.raises(UsageError, match="alone trains a tensor of no tracked object"):
        check_models({"alone": alone}, [], is_stage=True)


def drop_first(model: Any, entries: Any, prefix: str, metadata: Any) -> None:
    """A hook that drops the weights of part 0."""
    for key in [key for key in entries if key.startswith(f"{prefix}0.")]:
        del entries[key]


def changed(net: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the keys of a state to be saved that the net's own state dict has not, after a
    step."""
    check_models({"opt": optimizer, "net": net}, [])
    trained = TrainedParameters()
    trained.add([optimizer, net])
    assert trained.state_of(net).keys() >= net.state_dict().keys()
    sum(p.sum() for p in net.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    return trained.state_of(net).keys() - net.state_dict().keys()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_that_a_model_leaves_out_of_its_state_are_saved_once_they_change(kind: Any) -> None:
    """Frozen ones may be left out, as by adapters beside a base model."""
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.register_state_dict_post_hook(drop_first)
    optimizer = kind(net.parameters(), weight_decay=0)
    assert changed(net, optimizer) == {"0.weight", "0.bias"}
    net[0].requires_grad_(False)
    optimizer = kind(net.parameters(), weight_decay=0)
    assert changed(net, optimizer) == set()
    trained = TrainedParameters()
    trained.add([optimizer, net])
    with torch.no_grad():
        net[0].bias.add_(1)  # in the loop, in which it was thawed for a while
    assert trained.state_of(net).keys() - net.state_dict().keys() == {"0.bias"}
    state = trained.state_of(nn.Linear(1, 1))
    assert state.keys() == {"weight", "bias"}


def test_a_class_that_loads_by_itself_decides_what_is_saved() -> None:
    class Net(nn.Sequential):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            entries = super().state_dict(*args, **options)
            return {key: entry for key, entry in entries.items() if not key.startswith("1.")}

    class Loads(Net):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            return super().load_state_dict(*args, **{**options, "strict": False})

    for kind, keys in ((Net, {"1.weight", "1.bias"}), (Loads, set[str]())):
        net = kind(nn.Linear(2, 2), nn.Linear(2, 2))
        assert changed(net, torch.optim.SGD(net.parameters())) == keys


def test_weights_may_have_another_name_that_the_model_loads() -> None:
    def rename(model: Any, entries: Any, prefix: str, metadata: Any) -> None:
        for key in list(entries):
            entries[f"old.{key}"] = entries.pop(key).clone()

    def name_back(model: Any, entries: Any, *_: Any) -> None:
        for key in list(entries):
            entries[key.removeprefix("old.")] = entries.pop(key)

    renamed: Any = nn.Linear(2, 2)
    renamed.register_state_dict_post_hook(rename)
    with pytest.raises(UsageError, match=r"net saves bias by another name, old\.weight, and"):
        check_models({"opt": torch.optim.SGD(renamed.parameters()), "net": renamed}, [])
    renamed.register_load_state_dict_pre_hook(name_back)
    check_models({"opt": torch.optim.SGD(renamed.parameters()), "net": renamed}, [])


@pytest.mark.parametrize("is_head_first", [False, True])
def test_a_tied_weight_may_be_saved_by_either_name(is_head_first: bool) -> None:
    def drop(model: Any, entries: Any, prefix: str, metadata: Any) -> None:
        del entries[f"{prefix}head.weight"]

    head, embed = nn.Linear(2, 3, bias=False), nn.Embedding(3, 2)
    embed.weight = head.weight
    parts = {"head": head, "embed": embed}
    net: Any = nn.ModuleDict(parts if is_head_first else dict(reversed(parts.items())))
    net.register_state_dict_post_hook(drop)
    assert changed(net, torch.optim.SGD(net.parameters())) == set()


def untracked(*objects: Any) -> list[str]:
    lines: list[str] = []
    warn_of_untracked(objects, lines.append)
    assert all(line.endswith("; name it in run.track(…)") for line in lines)
    return [line.removeprefix("WARNING: ").partition(", is in")[0] for line in lines]


def test_a_scheduler_of_a_tracked_optimizer_is_missed() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    parts: list[Any] = [LinearLR(optimizer), SequentialLR(optimizer, [StepLR(optimizer, 3)], [])]
    whole = SequentialLR(optimizer, parts, [4])
    plateau = ReduceLROnPlateau(optimizer)
    assert untracked(optimizer, whole, plateau) == []
    assert untracked(optimizer, whole) == ["a scheduler, ReduceLROnPlateau"]
    assert untracked(SimpleNamespace(parts={"a": {"b": (optimizer, whole, plateau)}})) == []
    assert untracked(SimpleNamespace(state=[optimizer, whole, plateau])) == []
    assert untracked() == []


def test_an_optimizer_with_a_state_is_missed() -> None:
    net = nn.Linear(1, 1)
    net.weight.grad = torch.ones(1, 1)
    groups = (net.parameters(), [nn.Parameter(torch.ones(1))], net.parameters())
    optimizer, inner, shared = (torch.optim.SGD(group, momentum=0.9) for group in groups)
    inner.param_groups[0]["params"][0].grad = torch.ones(1)  # of a clone, as in MAML
    for one in (optimizer, inner):
        one.step()
    assert untracked(net) == ["an optimizer, SGD"]
    assert untracked(SimpleNamespace(net=nn.DataParallel(net))) == ["an optimizer, SGD"]
    assert untracked(net, optimizer) == untracked() == []
    shared.state = optimizer.state  # as of a Lookahead
    assert untracked(net, optimizer) == []


def test_a_scaler_of_gradients_is_missed() -> None:
    scaler, disabled = (torch.amp.GradScaler("cpu", enabled=on) for on in (True, False))
    assert untracked() == []  # no loss has gone through it
    scaler.scale(torch.ones(1))
    assert untracked() == ["a scaler, GradScaler"]
    assert untracked(SimpleNamespace(scaler=scaler)) == []
    assert not disabled.is_enabled()


def test_an_average_is_missed() -> None:
    net = nn.Linear(1, 1)
    average = AveragedModel(net)
    assert untracked(net) == ["an average, AveragedModel"]
    assert untracked(net, average) == []


class Agent:
    """As of reinforcement learning: its state has copies."""

    def __init__(self, net: nn.Module) -> None:
        self.parts = {"actors": [net]}
        self.parts["self"] = [self]  # type: ignore[list-item]

    def state_dict(self) -> dict[str, torch.Tensor]:
        (net,) = self.parts["actors"]
        return {key: tensor.double() for key, tensor in net.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise AssertionError


def test_an_agent_may_have_the_state_of_its_models() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_models({"agent": Agent(net), "opt": torch.optim.SGD(net.parameters())}, [])


@pytest.mark.parametrize(
    ("updates", "count"),
    [([0, 1, 0, 1], 1), ([1, 0, 1, 0], 1), ([0, 0, 1, 1], 0), ([1, 1, 1, 1], 0), ([0, 0, 0, 0], 0)],
)
def test_gradients_that_are_kept_over_a_step_are_warned_of(updates: list[int], count: int) -> None:
    """A scaler of gradients may leave out the first updates."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    lines: list[str] = []
    watch = GradientWatch([model, optimizer], lines.append)
    for has_updated in updates:
        model(torch.ones(1)).backward()
        watch.has_updated = bool(has_updated)
        watch.end_step()
    assert len(lines) == count
    replayed = torch.optim.Adam(model.parameters(), capturable=True)  # by a CUDA graph
    watch = GradientWatch([model, replayed], lines.append)
    for has_updated in updates:
        watch.has_updated = bool(has_updated)
        watch.end_step()
    assert len(lines) == count
    assert all(line.startswith("WARNING: run.step without an optimizer's") for line in lines)
    watch = GradientWatch([model, optimizer], lines.append)
    model.zero_grad()  # as GAN's, whose optimizers take turns
    for has_updated in updates:
        watch.has_updated = bool(has_updated)
        watch.end_step()
    assert len(lines) == count


@pytest.mark.parametrize(("drops", "count"), [(False, 0), (True, 1)])
def test_gradients_that_are_dropped_within_a_step_are_warned_of(drops: bool, count: int) -> None:
    """As by the ``optimizer.zero_grad()`` with which loops begin."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    lines: list[str] = []
    watch = GradientWatch([model, optimizer], lines.append)
    watch.begin_backward(False, 0)  # the step's last micro-batch has none: its loss is not finite
    watch.end_step()
    watch.begin_backward(False, 0)  # the loop of an epoch is left amid a step
    optimizer.zero_grad()
    for ends_step in (False, True) * 3:
        if drops:
            optimizer.zero_grad()
        watch.begin_backward(ends_step, 1)
        model(torch.ones(1)).backward()
        if ends_step:
            optimizer.step()
            optimizer.zero_grad()
            watch.end_step()
    assert len(lines) == count
    assert all("the last one alone counts; drop that line" in line for line in lines)


def test_an_optimizer_that_is_not_set_up_can_be_hooked() -> None:
    """As Lookahead of torch_optimizer, which leaves out ``Optimizer.__init__``."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = dict(vars(inner))["_optimizer_step_pre_hooks"]
    for optimizer in (Lookahead(inner), inner):
        add_hook_tables(optimizer)
        optimizer.register_step_pre_hook(print)
        optimizer.register_step_post_hook(print)
    assert inner._optimizer_step_pre_hooks is hooks


class Metric(nn.Module):
    """As one of torchmetrics, whose states are in no state dict until `persistent` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1), persistent=False)

    def persistent(self, mode: bool) -> None:
        self._non_persistent_buffers_set.clear()


def test_a_metric_of_which_nothing_is_saved_is_named() -> None:
    lines: list[str] = []
    kept = Metric()
    kept.persistent(True)
    warn_of_stateless({"metric": Metric(), "kept": kept, "loss": nn.MSELoss()}, lines.append)
    (line,) = lines
    assert "metric, a Metric, has nothing in its state_dict" in line


def test_a_model_is_not_moved_behind_track() -> None:
    """At a resume its optimizer's state would be where the weights were before."""
    model, elsewhere = nn.Linear(2, 2), torch.device("meta")
    check_place(model, elsewhere, is_tracked=False)
    check_place(model, torch.device("cpu"), is_tracked=True)
    with pytest.raises(UsageError, match=r"run\.wrap was called after run\.track, and moves"):
        check_place(model, elsewhere, is_tracked=True)


def test_models_live_as_long_as_the_script_keeps_them() -> None:
    models = LivingModels[nn.Module]()
    first, second = nn.Linear(1, 1), nn.Linear(2, 2)
    for model in (first, second, first):
        models.add(model)
    assert [*models] == [first, second]
    del model, first
    assert [*models] == [second]
    models.clear()
    assert not [*models]
