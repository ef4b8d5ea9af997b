"""Tables of a project or site file count for one partition or QOS."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.cli.click_options import settings_of
from hpc_ddp.core.errors import UsageError
from hpc_ddp.submission.settings import config, sites
from hpc_ddp.submission.settings.config import Settings, load
from hpc_ddp.submission.settings.job import job_spec

SITE = """\
partition = "low"
time = "1:00:00"
[env]
A = "site"
[when.partition.low]
continue-by = "resubmit"
[when.partition."a.b"]
time = "2:00:00"
gpus-per-node = 4
[when.partition."a.b".env]
A = "table"
B = "table"
[when.qos.long]
time = "9:00:00"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ".config" / "hpc-ddp"
    folder.mkdir(parents=True)
    (folder / "site.toml").write_text(SITE)
    return tmp_path


def _values(home: Path, **options: Any) -> dict[str, Any]:
    keys = {name.replace("_", "-"): value for name, value in options.items()}
    return dict(load(keys, home, home).values)


def test_a_table_counts_for_its_partition_alone(home: Path) -> None:
    low = _values(home)
    assert (low["partition"], low["continue-by"], low["time"]) == ("low", "resubmit", "1:00:00")
    assert "when" not in low
    settings = _values(home, partition="a.b")
    assert "continue-by" not in settings
    assert (settings["time"], settings["gpus-per-node"]) == ("2:00:00", "4")
    assert settings["env"] == {"A": "table", "B": "table"}
    assert _values(home, partition="x,a.b")["time"] == "2:00:00"
    assert _values(home, partition="x")["time"] == "1:00:00"
    assert _values(home, partition="x", qos="long")["time"] == "9:00:00"


def test_settings_of_the_job_override_a_sites_table(home: Path) -> None:
    assert _values(home, continue_by="requeue")["continue-by"] == "requeue"
    (home / "hpc-ddp.toml").write_text('partition = "a.b"\n[when.partition."a.b"]\ntime = "3"\n')
    assert _values(home)["time"] == "3"
    assert _values(home, time="4")["time"] == "4"
    assert _values(home)["gpus-per-node"] == "4"


def test_an_array_is_no_chain_by_a_table(home: Path) -> None:
    assert "continue-by" not in _values(home, array="0-3")
    assert _values(home, array="0-3", continue_by="resubmit")["continue-by"] == "resubmit"


def test_the_file_of_a_refused_value_is_named(home: Path) -> None:
    (home / "train.py").touch()
    (home / "hpc-ddp.toml").write_text("cpus-per-task = 0\n")
    with pytest.raises(UsageError, match=r"hpc-ddp\.toml: cpus-per-task is 0; accepted: a whole"):
        job_spec(load({"script": "train.py"}, home, home), home)
    with pytest.raises(UsageError, match=r"^nodes is 0; accepted"):
        job_spec(load({"script": "train.py", "nodes": 0}, home, home), home)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("when = 1", "no table"),
        ("[when.account.x]", r"no table \[when.account"),
        ("[when.partition]\nx = 1", "1 must be a table"),
        ("[when.partition.x]\nnodse = 1", "unknown key 'nodse', did you mean 'nodes'"),
        ('[when.partition.x]\npartition = "y"', "unknown key 'partition'"),
        ('[when.partition.x]\nnodes = ["y"]', "nodes is"),
        ("[env]\nA = true", "env.A is True, but must be a string or a whole number"),
        ("[env]\nA = 1\nB = 1.50", "env.B is 1.5, but"),
        ("[env.A]\nB = 1", "env.A is"),
    ],
)
def test_malformed_tables_are_refused(home: Path, text: str, message: str) -> None:
    (home / "hpc-ddp.toml").write_text(text + "\n")
    with pytest.raises(UsageError, match=message):
        _values(home)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("time = 30", 'time = "30"'),
        ('setup = "module load cuda"', 'setup = ["module load cuda"]'),
        ("time = true", "see /"),
    ],
)
def test_a_value_of_another_type_has_its_line_as_a_hint(home: Path, text: str, hint: str) -> None:
    (home / "hpc-ddp.toml").write_text(text + "\n")
    with pytest.raises(UsageError) as caught:
        _values(home)
    assert (caught.value.hint or "").startswith(hint)


def test_a_file_may_begin_with_the_mark_of_its_encoding(home: Path) -> None:
    (home / "hpc-ddp.toml").write_text("[env]\nA = 4\n", encoding="utf-8-sig")
    assert _values(home)["env"] == {"A": "4"}


@pytest.mark.parametrize("start", ["~", "~root", "~nosuchuser"])
@pytest.mark.parametrize("key", ["python", "image", "template"])
def test_a_path_below_a_home_folder(home: Path, key: str, start: str) -> None:
    (home / "hpc-ddp.toml").write_text(f'{key} = "{start}/a/b"\n')
    assert _values(home)[key].endswith(os.path.expanduser(f"{start}/a/b"))


def test_an_option_settles_the_variables_of_a_sites_network(
    tmp_path: Path, settings: Callable[..., Settings]
) -> None:
    site = settings(site="leonardo").get("env")
    assert site["NCCL_SOCKET_IFNAME"]
    env = settings(site="leonardo", interface="eth1").get("env")
    assert env == {k: text for k, text in site.items() if k != "NCCL_SOCKET_IFNAME"}
    assert "NCCL_NET" in settings(site="alps").get("env")
    merged = settings(site="alps", fabric="ethernet", env={"NCCL_DEBUG": "INFO"})
    names = [name for name in merged.get("env") if re.match("NCCL|FI_", name)]
    assert names == ["NCCL_DEBUG"]


def test_a_table_counts_for_a_partition_of_sbatchs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = home / ".config" / "hpc-ddp" / "site.toml"
    site.write_text(SITE.replace('partition = "low"', 'sbatch = ["--part=a.b", "--hint=x"]'))
    values = _values(home)
    assert (values["partition"], values["gpus-per-node"]) == ("a.b", "4")
    assert values["sbatch"] == ["--hint=x"]
    raw = settings_of({"sbatch": ("--qos=long",)})
    assert raw == {"qos": "long"}  # and a run that goes on keeps its own --sbatch
    assert _values(home, partition="x", **raw)["time"] == "9:00:00"
    site.write_text(SITE.replace('partition = "low"', ""))
    monkeypatch.setenv("SBATCH_PARTITION", "a.b")
    assert _values(home)["gpus-per-node"] == "4"
    assert "partition" not in _values(home)
    assert _values(home, partition="low")["continue-by"] == "resubmit"


def test_an_option_beside_its_raw_form_is_left_to_the_check_of_effects() -> None:
    raw = ["--time=5", "--time-min=2", "--exclude=n1"]
    assert settings_of({"time": "9", "sbatch": (*raw, "--qos=q")}) == {
        "time": "9",
        "qos": "q",
        "sbatch": raw,
    }


def test_names_of_variables_are_those_of_all_layers(home: Path) -> None:
    (home / "hpc-ddp.toml").write_text('env-names = ["KEY", "B"]\n[env]\nTOKEN = "file"\n')
    values = _values(home, env_names=["TOKEN", "KEY"], env={"B": "1"})
    assert values["env-names"] == ["KEY", "TOKEN"]
    assert values["env"] == {"A": "site", "B": "1"}


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ({"script": "train.py"}, ["--lr", "1"]),
        ({"script": "./x/../train.py"}, ["--lr", "1"]),
        ({"script": "new/train.py"}, []),
        ({"script": "train.py", "module": True}, []),
        ({"script": "train.py", "args": ("--lr", "2")}, ["--lr", "2"]),
        ({"script": "train.py", "args": ("--",)}, []),
        ({"script": "train.py", "args": ("--", "a")}, ["--", "a"]),
        ({}, ["--lr", "1"]),
    ],
)
def test_arguments_of_a_file_are_for_its_script(
    home: Path, words: dict[str, Any], args: list[str]
) -> None:
    (home / "train.py").touch()
    (home / "hpc-ddp.toml").write_text('script = "train.py"\nargs = ["--lr", "1"]\n')
    settings = load(settings_of(words), home, home)
    assert settings.get("args") == args


def test_a_table_of_a_partition_sets_no_other_partition(home: Path) -> None:
    (home / "hpc-ddp.toml").write_text(
        'partition = "gpu"\n[when.partition.gpu]\nsbatch = ["--partition=other"]\n'
    )
    values = _values(home)
    assert values["partition"] == "gpu"
    assert values["sbatch"] == ["--partition=other"]  # which the rendering refuses


def test_settings_that_may_not_be_looked_at_end_no_command_for_existing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a home behind an expired ticket, or a folder of another user above this one."""
    error = PermissionError(13, "Permission denied", "/home/me/hpc-ddp.toml")

    def refuse(*words: Any) -> Any:
        raise error

    monkeypatch.setattr(config, "find_project_file", refuse)
    monkeypatch.setattr(sites, "recognise", refuse)
    assert load({"time": "5"}, tmp_path, tmp_path, is_strict=False).values["time"] == "5"
    warning = f"warning: {error}; it does not count here"
    assert warning in capsys.readouterr().err
    with pytest.raises(PermissionError):
        load({}, tmp_path, tmp_path)
