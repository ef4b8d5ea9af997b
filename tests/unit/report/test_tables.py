"""Tables of the journal's events."""

from __future__ import annotations

from hpc_ddp.core.journal.events import PreflightEnded
from hpc_ddp.node.preflight.blame import MOST_SHOWN, NodeReport, outcome
from hpc_ddp.report.tables import preflight_table
from unit.node.preflight.fakes import reports_of


def test_a_preflights_table_has_a_line_for_each_node() -> None:
    reports = reports_of(2)
    reports["a"].values |= {"interface": "eth0", "address": "10.0.0.1", "all_reduce_mb_s": 85.0}
    reports["b"].faults.append(("tmpdir", "full"))
    lines = preflight_table(PreflightEnded(**outcome(reports), seconds=1.0)).splitlines()
    assert " ".join(lines[1].split()) == "a eth0 10.0.0.1 - - - - 1.0 GB/s 85 MB/s good"
    assert lines[2].endswith("tmpdir")


def test_a_large_preflights_table_has_the_odd_nodes_and_what_is_usual() -> None:
    reports = {
        f"n{n}": NodeReport(values={"torch": "2.9", "exchange_mb_s": 100.0 + n}) for n in range(101)
    }
    reports["n77"].faults.append(("tmpdir", "full"))
    lines = preflight_table(PreflightEnded(**outcome(reports), seconds=1.0)).splitlines()
    assert len(lines) == 1 + MOST_SHOWN + 3
    assert any(line.startswith("n77 ") and line.endswith("tmpdir") for line in lines)
    assert lines[-3].split() == ["(lowest", "of", "101)", *"----", "-", "100", "MB/s", "-", "-"]
    assert [line.split()[8] for line in lines[-3:]] == ["100", "150", "200"]
