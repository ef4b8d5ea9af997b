"""The interconnect of a node: chosen, journalled, and compared with the first node's."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.node.net import fabric_lookup
from hpc_ddp.node.net.comparison import FabricComparison
from hpc_ddp.node.net.fabric_lookup import Interconnect
from hpc_ddp.node.net.place import Place
from tests.raw_events import raw_events
from unit.node.fakes import place_of

INFINIBAND = Interconnect("infiniband", ("mlx5_0",))


def _comparison(attempt: AttemptFolder, **values: Any) -> FabricComparison:
    place = place_of(attempt, **values)
    return FabricComparison(place, place.run.journal(place.node, attempt.number))


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> list[Interconnect]:
    """The cards of this node: the first of the list."""
    result = [INFINIBAND]
    monkeypatch.setattr(fabric_lookup, "find_fabric", lambda: result[0])
    monkeypatch.setattr(Place, "fabric_env", lambda place, result: {"NCCL_NET": "IB"})
    return result


def test_the_first_node_notes_its_fabric_for_the_others(
    attempt: AttemptFolder, look: list[Interconnect], capsys: pytest.CaptureFixture[str]
) -> None:
    first = _comparison(attempt, fabric="auto")
    assert first.choose(is_reported=True) == {"NCCL_NET": "IB"}
    assert "fabric: n1: infiniband (mlx5_0); NCCL_NET=IB" in capsys.readouterr().err
    (event,) = raw_events(attempt.path.parents[1])
    assert (event["event"], event["node"], event["name"]) == ("fabric", "n1", "infiniband")
    assert event["env"] == {"NCCL_NET": "IB"}
    look[0] = Interconnect("roce", ("mlx5_1",))
    second = _comparison(attempt, index=1, fabric="auto")
    assert second.choose(is_reported=True) == {"NCCL_NET": "IB"}
    assert not capsys.readouterr().err
    second.compare()
    assert (
        "the interconnect of n2 is roce (mlx5_1), and of n1 infiniband (mlx5_0): NCCL"
        in capsys.readouterr().err
    )
    second.compare()  # it is said once
    look[0] = INFINIBAND
    third = _comparison(attempt, index=2, fabric="auto")
    third.choose(is_reported=True)
    third.compare()
    assert not capsys.readouterr().err


def test_a_node_waits_for_the_first_ones_fabric(
    attempt: AttemptFolder, look: list[Interconnect], capsys: pytest.CaptureFixture[str]
) -> None:
    second = _comparison(attempt, index=1, fabric="auto")
    second.choose(is_reported=True)
    second.compare()
    look[0] = Interconnect()
    _comparison(attempt, fabric="auto").choose(is_reported=True)
    assert not capsys.readouterr().err  # of a first node that has nothing
    second.compare()
    assert "of n1 none" in capsys.readouterr().err
    assert _comparison(attempt, fabric="ethernet").choose(is_reported=True) == {}


def test_only_one_supervisor_of_a_node_reports_its_fabric(
    attempt: AttemptFolder, look: list[Interconnect]
) -> None:
    for is_reported in (False, True):
        assert _comparison(attempt, index=1, fabric="auto").choose(is_reported) == {
            "NCCL_NET": "IB"
        }
    (event,) = raw_events(attempt.path.parents[1])
    assert event["node"] == "n2"
