"""Install packages at the versions that constraints.txt pins.

    python tools/install.py ENV PACKAGE…   into a virtual environment, made if it is not there
    python tools/install.py --renew        resolve constraints.txt anew

A pin that can't be had (another Python, another platform, a version that was withdrawn) is left out
with a line that says so, and pip takes the newest version that fits. The standard library is all
that there is when this runs.
"""

from __future__ import annotations

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
NO_ANSWER = re.compile(r"WARNING: Retrying|Could not fetch URL|Connection broken|Max retries")


def main(argv: list[str]) -> int:
    if argv == ["--renew"]:
        return renew()
    if len(argv) < 2 or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    return install(Path(argv[0]), argv[1:], CONSTRAINTS.read_text().splitlines())


def install(env: Path, packages: list[str], pins: list[str]) -> int:
    """Install packages, giving up pins until pip finds versions; return pip's exit code."""
    if not (env / "bin" / "python").exists():
        venv.create(env, with_pip=True)
    print(f"installing into {env} (PyTorch takes some minutes; log: {env}.log)", flush=True)
    while True:
        code, printed = run_pip(env, packages, pins)
        if code == 0:
            return 0
        unavailable = {normalize(name) for name in PIN_IN_REPORT.findall(printed)}
        kept = [pin for pin in pins if normalize(pin.partition("==")[0]) not in unavailable]
        # An index that does not answer looks like one that has no such version.
        if len(kept) == len(pins) or NO_ANSWER.search(printed):
            print(*printed.splitlines()[-20:], sep="\n", file=sys.stderr)
            return code
        for pin in pins:
            if pin not in kept:
                print(f"{pin} can't be had here with the rest: the newest that fits is taken")
        pins = kept


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
    """Write what pip installs without any pin into constraints.txt."""
    with tempfile.TemporaryDirectory(dir=REPO, prefix=".renew-") as name:
        env = Path(name) / "env"
        code = install(env, [EXTRAS], [])
        if code:
            return code
        freeze = [str(env / "bin" / "python"), "-m", "pip", "freeze", "--exclude", "hpc-ddp"]
        frozen = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    head = CONSTRAINTS.read_text().partition("\n\n")[0]
    CONSTRAINTS.write_text(f"{head}\n\n{frozen}")
    return 0


def normalize(name: str) -> str:
    """Return a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
