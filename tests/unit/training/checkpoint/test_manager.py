"""Tracked objects are saved and restored by one rank; see tests/ddp for several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.core import checkpoints
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.training.checkpoint import manager as manager_module
from hpc_ddp.training.checkpoint.manager import CheckpointManager
from hpc_ddp.training.checkpoint.rank_part import Content
from hpc_ddp.training.checkpoint.restore import Restored
from hpc_ddp.training.checkpoint.storage.frozen import FrozenWeights
from hpc_ddp.training.checkpoint.storage.index import Index, RankPart, dump
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.devices import CPU
from hpc_ddp.training.models import rng
from hpc_ddp.training.models.mesh import ParallelDims
from unit.training.checkpoint.fakes import (
    LoneRank,
    Make,
    break_publishing,
    checkpoint_names,
    events_named,
    make_manager,
)
from unit.training.fakes import Holds


def test_a_resumed_run_has_its_objects_and_its_position(run: RunFolder, make: Make) -> None:
    position, count = Position(step=4, epoch=2, samples=7), Holds(0)
    manager = make_manager(make(), position)
    manager.track({"count": count}, {"shuffle": True})
    count.value = 9
    assert manager.judge(0.5, higher=True)
    manager.save_surely()
    manager.save_surely()  # this position is saved already
    assert len(events_named(run, "checkpoint")) == 1
    assert events_named(run, "checkpoint")[0]["stall_s"] < 60
    manifest = checkpoints.read_manifest(run.checkpoints / "step-4")
    best = {"value": 0.5, "step": 4, "stale": 0, "higher": True}
    assert (manifest["epoch"], manifest["samples"], manifest["best"]) == (2, 7, best)
    resumed, fresh = Position(), Holds(0)
    again = make_manager(make(), resumed)
    again.track({"count": fresh}, {"shuffle": True})
    assert (fresh.value, resumed, vars(again.best)) == (9, position, best)
    again.save_surely()
    assert len(events_named(run, "checkpoint")) == 1  # it is the one that was restored
    with pytest.raises(HpcDdpError, match="called twice"):
        again.track({"count": fresh}, {})


def test_what_changes_behind_the_loop_is_saved_too(run: RunFolder, make: Make) -> None:
    """At a position that has a checkpoint; but the best one stays as it was judged."""
    count, checkpoints_made = Holds(1), make()
    manager = make_manager(checkpoints_made, Position(step=4))
    manager.track({"count": count}, {})
    values = []
    for value, is_judged in ((1, False), (2, False), (3, True), (4, False)):
        count.value = value
        if is_judged:
            manager.judge(0.5, higher=True)
        manager.save_surely(anew=True)
        fresh = Holds(0)
        make_manager(make(), Position()).track({"count": fresh}, {})
        values.append(fresh.value)
    assert values == [1, 2, 3, 3]


def test_a_checkpoint_from_before_the_order_of_buckets_was_kept_is_taken_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(make(), Position(step=4))
    manager.track({"count": Holds(9)}, {})
    manager.save_surely()
    later, count = make(), Holds(0)
    restore = later.restore

    def restore_older() -> Any:
        restored: Any = restore()
        del restored.index.shared["buckets"]
        return restored

    monkeypatch.setattr(later, "restore", restore_older)
    make_manager(later).track({"count": count}, {})
    assert count.value == 9


def test_an_object_that_is_new_on_purpose_begins_as_it_is_made(make: Make) -> None:
    manager = make_manager(make(), Position(step=4))
    manager.track({"count": Holds(9)}, {})
    manager.save_surely()
    with pytest.raises(HpcDdpError, match="it holds count, tracked are count, ema"):
        make_manager(make()).track({"count": Holds(0), "ema": Holds(3)}, {})
    for _ in range(2):  # the second time it is in the checkpoint, with another value
        count, ema, position = Holds(0), Holds(3), Position()
        again = make_manager(make(), position)
        again.track({"count": count, "ema": ema}, {}, added=("ema",))
        position.step += 1
        again.save_surely()
        assert count.value == 9
    assert (ema.value, position.step) == (3, 6)


@pytest.mark.parametrize(
    ("seed", "facts", "words"),
    [
        (2, {"shuffle": True}, "seed is 2, but 1"),
        (1, {"shuffle": False}, "shuffle is False, but True"),
    ],
)
def test_another_order_of_the_samples_is_refused(
    make: Make, seed: int, facts: dict[str, Any], words: str
) -> None:
    manager = make_manager(make())
    manager.track({"count": Holds(0)}, {"shuffle": True})
    manager.save_surely()
    with pytest.raises(HpcDdpError, match=words):
        make_manager(make(), seed=seed).track({"count": Holds(0)}, facts)


@pytest.mark.parametrize(
    ("higher", "values", "best", "stale"),
    [
        (True, (1.0, 3.0, 3.0, 2.0), [True, True, False, False], 2),
        (False, (3.0, 1.0, 1.0), [True, True, False], 1),
        (True, (float("nan"), 1.0, float("nan")), [False, True, False], 1),
    ],
)
def test_the_best_value_is_the_highest_or_lowest(
    make: Make, higher: bool, values: tuple[float, ...], best: list[bool], stale: int
) -> None:
    manager = make_manager(make())
    assert [manager.judge(value, higher) for value in values] == best
    assert manager.best.stale == stale


def test_a_best_step_is_recorded_once_it_is_saved(run: RunFolder, make: Make) -> None:
    saver, position = make(), Position(step=1)
    manager = make_manager(saver, position)
    manager.track({"count": Holds(0)}, {})
    manager.judge(1.0, higher=True)
    break_publishing(saver, OSError("away"))
    manager.save()
    assert not manager.settle()
    assert manager.best.step is None
    break_publishing(saver, None)
    manager.save_surely()
    assert checkpoint_names(run) == ["step-1"]
    assert vars(manager.best)["step"] == 1
    position.step = 2
    manager.save_surely()
    assert vars(manager.best)["step"] == 1
    position.step = 3
    break_publishing(saver, OSError("away"))
    manager.save()
    assert not manager.settle()
    assert vars(manager.best)["step"] == 1  # that one is there


def test_other_weights_are_not_the_best_where_those_could_not_be_saved(
    run: RunFolder, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    saver, position = make(), Position(step=1)
    manager = make_manager(saver, position)
    manager.track({"count": Holds(0)}, {})
    manager.judge(0.5, higher=True)
    manager.save()
    position.step = 2
    manager.judge(0.9, higher=True)
    manager.settle()
    break_publishing(saver, OSError("away"))
    manager.save()
    manager.settle()
    break_publishing(saver, None)
    position.step = 3
    manager.save_surely()
    assert vars(manager.best) == {"value": 0.5, "step": 1, "stale": 1, "higher": True}
    manifest = json.loads((run.checkpoints / "step-3" / "manifest.json").read_text())
    assert manifest["best"]["step"] == 1
    assert "the best value, 0.9, has no checkpoint" in capsys.readouterr().err


def test_a_save_that_fails_is_tried_again(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    saver = make()
    manager = make_manager(saver, Position(step=1))
    manager.track({"count": Holds(0)}, {})
    break_publishing(saver, OSError("away"))

    def wait(seconds: float) -> None:
        slept.append(seconds)
        break_publishing(saver, None)

    monkeypatch.setattr(manager_module.time, "sleep", wait)  # type: ignore[attr-defined]
    manager.save_surely()
    assert (slept, checkpoint_names(run)) == ([1.0], ["step-1"])


def test_a_save_that_has_failed_for_good_counts_for_nothing(
    run: RunFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script may catch the error, and call `finish`: then the run is not done."""
    saver = make()
    manager = make_manager(saver, Position(step=1))
    manager.track({"count": Holds(0)}, {})
    manager.judge(1.0, higher=True)
    break_publishing(saver, OSError("away"))
    manager.save()
    settle = saver.settle

    def fail() -> bool:
        settle()
        raise HpcDdpError("the third failure")

    monkeypatch.setattr(saver, "settle", fail)
    with pytest.raises(HpcDdpError, match="third failure"):
        manager.settle()
    assert manager.best.step is None
    monkeypatch.setattr(saver, "settle", settle)
    break_publishing(saver, None)
    manager.save_surely()
    assert checkpoint_names(run) == ["step-1"]


def test_the_best_weights_come_back(make: Make) -> None:
    model, position = torch.nn.Linear(2, 2), Position(step=1)
    manager = make_manager(make(), position)
    manager.track({"model": model}, {})
    with pytest.raises(HpcDdpError, match="the run has no best checkpoint"):
        manager.load_best(model)
    with pytest.raises(HpcDdpError, match="the model is none"):
        manager.load_best(torch.nn.Linear(2, 2))
    before = model.weight.detach().clone()
    manager.judge(1.0, higher=True)
    manager.save_surely()
    position.step = 2
    with torch.no_grad():
        model.weight.zero_()
    assert manager.load_best(model) == 1
    assert torch.equal(model.weight, before)


def begin(manager: CheckpointManager) -> None:
    ways = {"is_checkpoints": True, "is_over": False, "is_in_epoch": False}
    manager.generators.begin_loop(manager._position.step, **ways)


def test_random_numbers_continue_after_a_resume(make: Make) -> None:
    with rng.preserve_generators():
        manager = make_manager(make(), Position(step=1))
        manager.track({"count": Holds(0)}, {})
        begin(manager)
        first = torch.rand(()).item()
        begin(manager)
        assert torch.rand(()).item() == first  # the seed is of the step
        manager.save_surely()
        expected = torch.rand(()).item()
        again = make_manager(make())
        again.track({"count": Holds(0)}, {})
        torch.rand(9)
        begin(again)
        assert torch.rand(()).item() == expected
        again._position.step = 2
        again.save_surely()
        expected = torch.rand(()).item()
        third = make_manager(make())
        third.track({"count": Holds(0)}, {})
        begin(third)
        assert torch.rand(()).item() == expected


def test_empty_tensors_come_back(make: Make) -> None:
    saved, loaded = Holds(0), Holds(0)
    saved.value, loaded.value = torch.empty(0, 3), torch.empty(5)
    manager = make_manager(make(), Position(step=1))
    manager.track({"x": saved}, {})
    manager.save_surely()
    make_manager(make()).track({"x": loaded}, {})
    assert loaded.value.shape == (0, 3)


class RecordingSaver:
    """A saver that keeps the content of a rank's save."""

    def __init__(self) -> None:
        self.content: Content | None = None
        self.good = True
        self.saves, self.in_flight = 0, False
        self.control = LoneRank()
        self.frozen = FrozenWeights()

    def restore(self) -> None:
        return None

    def settle(self) -> bool:
        self.saves += self.good and self.in_flight
        self.in_flight = False
        return self.good

    def begin(self, content: Content) -> None:
        self.content, self.in_flight = content, True


@pytest.mark.parametrize(
    ("rank", "tells"), [(0, False), (1, False), (2, True), (3, False), (4, True)]
)
def test_the_first_rank_of_each_later_stage_saves_its_objects(rank: int, tells: bool) -> None:
    """Rank 0 saves what the ranks of its own stage share."""
    begun: Any = RecordingSaver()
    manager = CheckpointManager(
        begun, Position(), [CPU], 1, ParallelDims(rank, 6, pp=3), only_finite=True
    )
    manager.track({"count": Holds(0)}, {})
    manager.save()
    assert ("tree" in begun.content.rank_values) is tells
    inventory = begun.content.inventory()
    assert (inventory.stage, inventory.objects) == (rank // 2, ["count"])


@pytest.mark.parametrize(("ranks", "names"), [(1, set()), (2, {"model.weight", "model.bias"})])
def test_weights_are_compared_ever_more_seldom_and_at_the_last_save(
    ranks: int, names: set[str]
) -> None:
    begun: Any = RecordingSaver()
    position = Position()
    manager = CheckpointManager(begun, position, [CPU], 1, ParallelDims(0, ranks), only_finite=True)
    manager.track({"model": torch.nn.Linear(2, 2)}, {})
    compared = []
    for good in (False, True, True, True, True, True):  # one that failed does not count
        manager.save()
        compared.append(begun.content.inventory().checksums.keys())
        begun.good = good
        position.step += 1
        assert manager.settle() is good
        assert manager.settle() is good
    assert compared == [names, names, names, set(), names, set()]
    manager.save_surely()
    assert begun.content.inventory().checksums.keys() == names


@pytest.mark.parametrize("rank", [0, 1])
def test_optimizer_state_of_an_expert_is_kept_for_each_rank(tmp_path: Path, rank: int) -> None:
    """Rank 0 may have none: no token went to its expert."""
    begun: Any = RecordingSaver()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
    optimizer = torch.optim.Adam(model.parameters())
    model[: rank + 1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(
        begun, Position(), [CPU], 1, ParallelDims(rank, 2), only_finite=True
    )
    manager.track({"model": model, "optimizer": optimizer}, {})
    manager.save()
    shared, private = begun.content.shared["tree"]["optimizer"]["state"], begun.content.rank_values
    assert shared.keys() == {"model.0.weight", "model.0.bias"}
    (tmp_path / "step-1").mkdir()
    content = dump(private)
    (tmp_path / "step-1" / "rank-0.bin").write_bytes(content)
    part = RankPart("rank-0.bin", 0, 0, len(content), (), (), 0, False)
    index = Index(begun.content.shared, [part, part], [], ["optimizer"])
    tree = manager._tree_of(Restored(tmp_path / "step-1", index, rank, 2))
    assert len(tree["optimizer"]["state"]) == 2 + 2 * rank


@pytest.mark.parametrize("only_finite", [True, False])
def test_non_finite_weights_are_saved_only_on_request(
    run: RunFolder, make: Make, only_finite: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    manager = CheckpointManager(make(), Position(step=1), [CPU], 1, ParallelDims(), only_finite)
    manager.track({"model": model}, {})
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    manager.save()
    if only_finite:
        with pytest.raises(HpcDdpError, match="NaN"):
            manager.settle()
    else:
        assert manager.settle()
    assert checkpoint_names(run) == ([] if only_finite else ["step-1"])


def test_state_that_can_not_be_saved_is_refused_before_the_training(make: Make) -> None:
    count = Holds(0)
    count.value = object()
    with pytest.raises(HpcDdpError, match=r"count\.value is a builtins\.object"):
        make_manager(make()).track({"count": count}, {})


def test_a_model_without_stages_needs_all_saved_weights(make: Make) -> None:
    manager, model = make_manager(make(), Position(step=1)), torch.nn.Linear(2, 2)
    manager.track({"model": model}, {})
    manager.judge(1.0, higher=True)
    manager.save_surely()
    model.register_parameter("bias", None)
    with pytest.raises(HpcDdpError, match="bias is not in the model"):
        manager.load_best(model)
    with pytest.raises(HpcDdpError, match="bias is not in the model"):
        make_manager(make()).track({"model": torch.nn.Linear(2, 2, bias=False)}, {})


def test_the_current_state_is_saved_before_the_best_is_loaded(run: RunFolder, make: Make) -> None:
    model, position = torch.nn.Linear(2, 2), Position(step=1)
    manager = make_manager(make(), position)
    manager.track({"model": model}, {})
    manager.judge(1.0, higher=True)
    assert manager.load_best(model) == 1  # not saved before
    position.step = 2
    assert manager.load_best(model) == 1
    assert checkpoint_names(run) == ["step-1", "step-2"]
    position.step = 3  # in a loop: its last checkpoint stays the newest
    assert manager.load_best(model, saves=False) == 1
    manager.judge(2.0, higher=True)
    assert manager.load_best(model, saves=False) == 3  # it has that state
    assert checkpoint_names(run) == ["step-1", "step-2"]


def test_no_file_of_a_checkpoint_stays_open(run: RunFolder, make: Make) -> None:
    """Loader workers that are forked later would keep its space when it has been removed."""
    models = [torch.nn.Linear(2, 2) for _ in range(2)]
    for model, position in zip(models, (Position(step=4), Position()), strict=True):
        manager = make_manager(make(), position)
        manager.track({"model": model}, {})
        manager.save_surely()
        assert not any("/step-" in link for link in open_files())
    assert position.step == 4
    torch.nn.init.zeros_(model.weight)  # as lines behind run.track do
    again = make_manager(make(), Position())
    again.track({"model": model}, {})
    torch.nn.init.zeros_(model.weight)
    assert len(again.put_back(accepts_settings=False)) == 1
    assert not any("/step-" in link for link in open_files())


def open_files() -> list[str]:
    """Return the paths of the files that this process has open."""
    return [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
