"""The switch to another version of Slurm; the tests beside this one run with what it gives."""

from __future__ import annotations

from pathlib import Path

import cluster_versions
import pytest
from cluster import Cluster, ClusterError, available
from cluster_versions import SUITES, VARIABLE, NotToBeHadError, ensure, wanted


def test_the_environment_names_a_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert wanted() == ""
    monkeypatch.setenv(VARIABLE, "trixie")
    assert wanted() == "trixie"
    monkeypatch.setenv(VARIABLE, "24.11")
    with pytest.raises(ClusterError, match=f"24.11: accepted are {', '.join(SUITES)}"):
        wanted()


@pytest.mark.skipif(available() is not None, reason="apt, as root, is needed")
def test_without_the_mirror_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_versions, "CACHE", tmp_path)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(NotToBeHadError, match="the Slurm of Debian trixie can't be had"):
        ensure("trixie")
    assert not list(tmp_path.iterdir())


def test_the_cluster_has_the_wanted_version(cluster: Cluster) -> None:
    """The controller that answers, and what a job finds on its PATH."""
    suite = cluster.suite
    first = {"": (), "bullseye": (20, 11), "trixie": (24, 11), "sid": (26,)}[suite]
    assert cluster.version()[: len(first)] == first
    said = ".".join(map(str, cluster.version()))
    assert said in cluster.run("scontrol", "show", "config").stdout
    assert said in cluster.run("srun", "--nodes=1", "srun", "--version").stdout
