"""Other versions of Slurm for the test cluster: the packages of Debian's suites, unpacked.

    HPC_DDP_TEST_SLURM=trixie python -m pytest tests/slurm/test_submit.py

The programs find their own suite's C library by their interpreter and RPATH, not by a variable:
so what they start, the jobs, has the machine's libraries.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from cluster_machine import CACHE, ClusterError, ensure_packages, exclusive, sh

VARIABLE = "HPC_DDP_TEST_SLURM"  # names a suite; without it, the Slurm that apt installs here
SUITES = ("bullseye", "trixie", "sid")  # 20.11, 24.11 and, in November 2026, 26.05
PROGRAMS = (
    *("slurmctld", "slurmd", "slurmstepd", "slurmdbd", "sacctmgr", "scontrol", "sinfo"),
    *("srun", "sbatch", "salloc", "scancel", "squeue", "sacct", "sattach", "sprio", "sstat"),
)


class NotToBeHadError(ClusterError):
    """Debian's mirror can't be reached, or has no such suite any more."""


def wanted() -> str:
    """Return the suite that the caller's environment names; '' for the machine's own Slurm."""
    suite = os.environ.get(VARIABLE, "")
    if suite not in ("", *SUITES):
        raise ClusterError(f"{VARIABLE}={suite}: accepted are {', '.join(SUITES)}")
    return suite


def home_of(suite: str) -> Path:
    return CACHE / f"slurm-{suite}"


def ensure(suite: str) -> None:
    """Fetch a suite's Slurm, unless it was fetched before.

    Raises
    ------
    NotToBeHadError
        apt can't fetch it
    """
    home = home_of(suite)
    with exclusive(home.with_suffix(".lock")):
        if not home.exists():
            _make(suite, home)


def _make(suite: str, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="slurm-") as name:
        folder = Path(name)
        try:
            ensure_packages({"patchelf": "patchelf"})
            _fetch(suite, folder)
        except ClusterError as error:
            raise NotToBeHadError(f"the Slurm of Debian {suite} can't be had: {error}") from None
        for package in sorted((folder / "cache/archives").glob("*.deb")):
            sh("dpkg-deb", "-x", str(package), str(folder / "root"))
        _pick(folder / "root", folder / "home", home)
        (folder / "home").rename(home)


def _fetch(suite: str, folder: Path) -> None:
    """Have apt download Slurm with all that it needs, as for a machine that has nothing."""
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    source = f"deb {key} http://deb.debian.org/debian {suite} main\n"
    (folder / "sources.list").write_text(source)
    places = {
        "Dir::Etc::sourcelist": "sources.list",
        "Dir::Etc::sourceparts": "none",
        "Dir::State": "",
        "Dir::State::status": "status",
        "Dir::Cache": "cache",
    }
    options = [f"-o{option}={folder}/{place}" for option, place in places.items()]
    # apt's own user may not enter a home folder; and a mirror that is away is an error.
    options += ["-oAPT::Sandbox::User=root", "-oAPT::Update::Error-Mode=any"]
    apt = ["apt-get", "-qy", *options]
    sh(*apt, "update")
    packages = ("slurmctld", "slurmd", "slurm-client", "slurmdbd")
    sh(*apt, "install", "--no-install-recommends", "--download-only", *packages)


def _pick(root: Path, to: Path, home: Path) -> None:
    """Take the programs, plugins and libraries out of unpacked packages, to run below `home`."""
    (to / "bin").mkdir(parents=True)
    (to / "lib").mkdir()
    folders = [*root.glob("lib/*-linux-gnu*"), *root.glob("usr/lib/*-linux-gnu*")]
    for folder in folders:
        for library in folder.glob("*.so*"):
            if not (to / "lib" / library.name).is_symlink():
                shutil.copy2(library, to / "lib" / library.name, follow_symlinks=False)
    (plugins,) = (folder / "slurm-wlm" for folder in folders if (folder / "slurm-wlm").exists())
    shutil.copytree(plugins, to / "lib/slurm", symlinks=True)
    loader = next((to / "lib").glob("ld-linux*.so.*")).name
    rpath = ["--force-rpath", "--set-rpath", f"{home}/lib/slurm:{home}/lib"]
    for program in PROGRAMS:
        (found,) = {*root.glob(f"usr/*bin/{program}"), *root.glob(f"usr/*bin/{program}-wlm")}
        shutil.copy2(found, to / "bin" / program)
        interpreter = ["--set-interpreter", f"{home}/lib/{loader}"]
        sh("patchelf", *interpreter, *rpath, str(to / "bin" / program))
    for plugin in (to / "lib/slurm").glob("*.so*"):
        if not plugin.is_symlink():
            sh("patchelf", *rpath, str(plugin))
