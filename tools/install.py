"""Install packages at the versions that constraints.txt pins.

    python tools/install.py ENV PACKAGE…   into a virtual environment, made if it is not there
    python tools/install.py --renew        resolve constraints.txt anew

A pin that can't be had (another Python, another platform, a version that was withdrawn) is left out
with a line that says so, and pip takes the newest version that fits. The standard library is all
that there is when this runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REPO = Path(__file__).parents[1]
CONSTRAINTS = REPO / "constraints.txt"
EXTRAS = ".[test,docs,dev]"
# How pip's report of a conflict names a line of a constraints file.
PIN_IN_REPORT = re.compile(r"\(constraint\) ([A-Za-z0-9._-]+)==")
# A pinned version that has no build for an older Python carries the oldest that it has one for:
# without it, pip tries all old versions of other packages before it reports the conflict.
OLDEST = 10  # minor version of Python
MARKER = re.compile(r' ; python_version >= "3\.(\d+)"$')
REQUIRED = """
import json
from importlib.metadata import distributions
required = {package.name: package.metadata["Requires-Python"] for package in distributions()}
print(json.dumps({name: versions or "" for name, versions in required.items()}))
"""
NO_ANSWER = re.compile(r"WARNING: Retrying|Could not fetch URL|Connection broken|Max retries")


def main(argv: list[str]) -> int:
    if argv == ["--renew"]:
        return renew()
    if len(argv) < 2 or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    return install(Path(argv[0]), argv[1:], CONSTRAINTS.read_text().splitlines())


def install(env: Path, packages: list[str], pins: list[str]) -> int:
    """Install packages into an environment, which is made if it is missing. Pins that pip can't
    meet are given up, one try after the other. Return pip's exit code."""
    if not (env / "bin" / "python").exists():
        # Python 3.10 comes with a pip that tries old versions for an hour.
        venv.create(env, with_pip=True, upgrade_deps=True)
    print(f"installing into {env} (PyTorch takes some minutes; log: {env}.log)", flush=True)
    newer = [pin for pin in pins if is_for_newer_python(pin, sys.version_info.minor)]
    pins = leave_out(pins, newer)
    while True:
        code, printed = run_pip(env, packages, pins)
        if code == 0:
            return 0
        unavailable = {normalize(name) for name in PIN_IN_REPORT.findall(printed)}
        refused = [pin for pin in pins if normalize(pin.partition("==")[0]) in unavailable]
        # An index that does not answer looks like one that has no such version.
        if not refused or NO_ANSWER.search(printed):
            print(*printed.splitlines()[-20:], sep="\n", file=sys.stderr)
            return code
        pins = leave_out(pins, refused)


def is_for_newer_python(pin: str, minor: int) -> bool:
    marker = MARKER.search(pin)
    return marker is not None and int(marker[1]) > minor


def leave_out(pins: list[str], refused: list[str]) -> list[str]:
    """Return the pins without those in `refused`; each of these is printed."""
    for pin in refused:
        print(f"{MARKER.sub('', pin)} can't be had here: the newest version that fits is taken")
    return [pin for pin in pins if pin not in refused]


def run_pip(env: Path, packages: list[str], pins: list[str]) -> tuple[int, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins) + "\n")
        file.flush()
        pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--constraint", file.name]
        log = Path(f"{env}.log")
        with open(log, "w") as out:
            done = subprocess.run([*pip, *packages], cwd=REPO, stdout=out, stderr=out)
    return done.returncode, log.read_text()


def renew() -> int:
    """Install all packages without a pin, and write the versions into constraints.txt. Return pip's
    exit code."""
    with tempfile.TemporaryDirectory(dir=REPO, prefix=".renew-") as name:
        env = Path(name) / "env"
        code = install(env, [EXTRAS], [])
        if code:
            return code
        freeze = [str(env / "bin" / "python"), "-m", "pip", "freeze", "--exclude", "hpc-ddp"]
        frozen = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
        required = json.loads(
            subprocess.run(
                [freeze[0], "-c", REQUIRED], capture_output=True, text=True, check=True
            ).stdout
        )
    head = CONSTRAINTS.read_text().partition("\n\n")[0]
    pins = [with_marker(pin, required) for pin in frozen.splitlines()]
    CONSTRAINTS.write_text("\n".join([head, "", *pins, ""]))
    return 0


def with_marker(pin: str, required: dict[str, str]) -> str:
    """Return a pin with a marker for the oldest Python that its version has a build for, where that
    is newer than Python 3.10.

    Parameters
    ----------
    required
        Requires-Python of each package, by its name
    """
    by_name = {normalize(name): versions for name, versions in required.items()}
    versions = by_name.get(normalize(pin.partition("==")[0]), "")
    minor = max([int(minor) for minor in re.findall(r">=\s*3\.(\d+)", versions)], default=0)
    return f'{pin} ; python_version >= "3.{minor}"' if minor > OLDEST else pin


def normalize(name: str) -> str:
    """Return a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
