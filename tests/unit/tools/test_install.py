"""The versions of the test environment: pinned, and given up by name where they can't be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import install

REPORT = """
ERROR: Cannot install torch because these package versions have conflicting dependencies.
The conflict is caused by:
    The user requested torch
    The user requested (constraint) torch==2.15.0
"""


def test_a_pin_that_can_not_be_had_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def run_pip(env: Path, packages: list[str], pins: list[str]) -> tuple[int, str]:
        calls.append(pins)
        return (1, REPORT) if "torch==2.15.0" in pins else (0, "done")

    monkeypatch.setattr(install, "run_pip", run_pip)
    monkeypatch.setattr(install.venv, "create", lambda *_, **__: None)  # type: ignore[attr-defined]
    assert install.install(tmp_path / "env", ["torch"], ["torch==2.15.0", "click==8.5.1"]) == 0
    assert calls == [["torch==2.15.0", "click==8.5.1"], ["click==8.5.1"]]
    assert "torch==2.15.0 can't be had here" in capsys.readouterr().out


@pytest.mark.parametrize(
    "report", ["ERROR: no space left", f"WARNING: Retrying (Retry(…\n{REPORT}"]
)
def test_no_pin_is_given_up_for_another_failure(
    report: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(install, "run_pip", lambda *_: (1, report))
    monkeypatch.setattr(install.venv, "create", lambda *_, **__: None)  # type: ignore[attr-defined]
    assert install.install(tmp_path / "env", ["torch"], ["torch==2.15.0"]) == 1
    printed = capsys.readouterr()
    assert report.splitlines()[-1] in printed.err
    assert "can't be had" not in printed.out


def test_every_package_that_is_asked_for_is_pinned() -> None:
    """The packages that `make test` imports by name are in the list, and their requirements."""
    pinned = install.CONSTRAINTS.read_text()
    for name in ("torch", "torchvision", "submitit", "click", "pytest", "pytest-xdist", "mypy"):
        assert f"\n{name}==" in pinned


def test_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["env"]) == 2
    assert "python tools/install.py ENV PACKAGE" in capsys.readouterr().err


def test_a_pin_of_a_newer_python_is_left_out_before_pip_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def run_pip(env: Path, packages: list[str], pins: list[str]) -> tuple[int, str]:
        calls.append(pins)
        return 0, "done"

    pin = install.with_marker("networkx==3.6.1", {"NetworkX": "!=3.14.1,>=3.99"})
    older = install.with_marker("click==8.5.1", {"click": ">=3.10"})
    monkeypatch.setattr(install, "run_pip", run_pip)
    monkeypatch.setattr(install.venv, "create", lambda *_, **__: None)  # type: ignore[attr-defined]
    assert install.install(tmp_path / "env", ["torch"], [pin, older]) == 0
    assert calls == [["click==8.5.1"]]
    assert "networkx==3.6.1 can't be had here" in capsys.readouterr().out
