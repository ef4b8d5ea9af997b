"""Random job scripts, whose launch depends on variables in many ways, and what bash makes of them.

    PYTHONPATH=tests python -m unit.submission.job_script.random_scripts FIRST COUNT

plays COUNT scripts, from the seed FIRST on, and prints those whose import starts other words.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_ddp.submission.job_script.conversion import LOST
from hpc_ddp.submission.job_script.importer import import_script

NAMES = ("A", "B", "C")
VALUES = (
    "1", "'p q'", '"r s"', '"$A"', "$B", '"${C}x"', "$(cat a)", '"$(cat b)"', '"u $A v"', "~/d",
    "~root/d", '"~/d"', "*.pt", '"$B,$C"', "${A:-z}", '"${B:-d e}"', "${C#v}", "$((1+2))", '"a\'b"',
    r"a\ b", "''", '"--o $A"',
)  # fmt: skip
CONDITIONS = (
    "[ -e x ]", "[[ -f x ]]", '[ -n "$A" ]', "[[ $B == *p* ]]", "test -e y", "[ ! -e x ]",
    '[ "$C" = 1 ]',
)  # fmt: skip
# The program of a step, of torchrun, or of Python: it writes its arguments, one a line.
STUB = """#!/bin/bash
while [ $# -gt 0 ] && [[ $1 != *.py ]]; do
    case $1 in hostname | hostnames) echo n1; exit ;; bash | torchrun | env | python) break ;; esac
    shift
done
case ${1-} in
*.py) shift; { printf '%q\\n' "$@"; echo END; } >> "$WORDS" ;;
*) "$@" ;;
esac
"""
STUBS = ("srun", "torchrun", "python", "module", "nvidia-smi", "scontrol")


class RandomScript(random.Random):
    """A script that is drawn by a seed: `text` returns it."""

    def value(self) -> str:
        return self.choice(VALUES)

    def condition(self) -> str:
        return self.choice(CONDITIONS)

    def addition(self, name: str, is_array: bool) -> str:
        """Return a statement that adds words to a variable, in most cases at its end."""
        if is_array:
            forms: tuple[str, ...] = (
                f"{name}+=(--k {self.value()})", f'{name}=("${{{name}[@]}}" --z $A)',
                f"{name}+=(--n)",
                f'{name}+=("--v=$B" "x y")', f'{name}+=("")', f'declare -a {name}+=(--da)',
                f'{name}[1]=other.py',
            )  # fmt: skip
        else:
            forms = (
                f'{name}="${name} --k {self.choice(["1", "$A", "${B}", "~/q"])}"',
                f'{name}+=" --g $C"', f"{name}+=' --s'", f'{name}="${{{name}}} --w $A $B"',
                f'{name}+=",c"',
                f'{name}="${name} --e \\"x y\\""', f'{name}="${name} $(echo --sub | cat)"',
                f'{name}="${name} \\\n    --nl"', f'{name}="env Q=1 ${name}"',
                f'{name}="${{{name}/1/2}}"',
                f"{name}+=\" --t 'a b'\"",
                f'{name}="${name} {"> log" if name == "CMD" else "--z"}"',
            )  # fmt: skip
        return self.choice(forms)

    def change(self) -> str:
        """Return a statement that changes a variable in its own way."""
        name, value = self.choice(NAMES), self.value()
        return self.choice((
            f"{name}={value}", f"export {name}={value}", f"{name}+={self.choice(('x', '$A'))}",
            f"unset {name}", f"{self.condition()} && {name}={value}", f"read -r {name} < a",
            f"if {self.condition()}; then {name}={value}; else {self.choice(NAMES)}=o; fi",
            f'for i in 1 2; do {name}="${name} $i"; done', f"printf -v {name} '%s-%s' \"$A\" $B",
            f'case "${name}" in 1|p*) A={value} ;; *) B=k ;; esac', f'echo "${name}"',
            f"set_{name}() {{ {name}={value}; }}; set_{name}", f"declare -i {name}=1+2",
            f"L=({value} {self.value()}); {name}=${{L[{self.choice('01')}]}}",
            f"{name}={value} L2={self.value()}", f"IFS=,\n{name}=(a,b $A)\nunset IFS",
            f"# it's {name}, ${name}",
        ))  # fmt: skip

    def block(self, is_array: bool) -> str:
        """Return an addition to the launch or its arguments, mostly under a condition, or another
        change."""
        if self.random() < 0.35:
            return self.change()
        addition = self.addition(self.choice(("CMD", "ARGS")), is_array)
        return self.choice((
            addition, f"if {self.condition()}; then\n  {addition}\nfi",
            f"{self.condition()} && {addition}",
            f"if {self.condition()}; then\n  # CMD grows\n  echo more\n  {addition}\nfi",
            f"for i in 1 2; do {addition}; done", f"add() {{ {addition}; }}; add",
            f"( {addition} )",
        ))  # fmt: skip

    def text(self) -> str:
        is_array = self.random() < 0.4
        lines = ["#!/bin/bash", "#SBATCH -N1 --gpus=4"]
        lines += [f"{self.choice(NAMES)}={self.value()}" for _ in range(self.randint(0, 2))]
        lines += [
            f"ARGS=(--a {self.value()})" if is_array else f'ARGS="--a {self.choice(("1", "$A"))}"'
        ]
        lines += [self.block(is_array) for _ in range(self.randint(0, 3))]
        forms = ('CMD=(torchrun train.py "${ARGS[@]}")', "CMD=(torchrun train.py --m 1)")
        if not is_array:
            forms = ('CMD="torchrun train.py $ARGS"', 'CMD="torchrun train.py --m 1"')
        lines += [self.choice(forms), *(self.block(is_array) for _ in range(self.randint(0, 3)))]
        launches: Sequence[str] = (
            "$CMD", "srun $CMD --t $A", "srun $CMD $ARGS", 'torchrun train.py $ARGS --q "$B"',
            "eval $CMD", 'eval "$CMD"', 'srun bash -c "$CMD"',
        )  # fmt: skip
        if is_array:
            launches = (
                '"${CMD[@]}"', 'srun "${CMD[@]}" --t $A', 'srun "${CMD[@]}" "${ARGS[@]}"',
                'torchrun train.py "${ARGS[@]}" --q "$B"', "srun ${CMD[@]}",
            )  # fmt: skip
        return "\n".join([*lines, self.choice(launches), ""])


def as_script(settings: dict[str, Any]) -> str:
    """Return a bash script that does what a job of these settings does: its variables, the lines of
    setup, and the program with its words."""
    lines = [
        f"export {name}={_quoted(text, settings)}" for name, text in settings.get("env", {}).items()
    ]
    lines += [line for key in ("setup", "node-setup") for line in settings.get(key, ())]
    words = [_quoted(word, settings) for word in settings.get("args", ())]
    program = [settings["script"]] if settings.get("no-python") else ["python", settings["script"]]
    return "\n".join([*lines, "set +eu; unset IFS", " ".join([*program, *words]), ""])


def _quoted(text: str, settings: dict[str, Any]) -> str:
    """Return a word for bash in which the names in ``expand`` are expanded, and nothing else."""
    if text.endswith("[@]}"):
        return f'"{text}"'
    pieces = re.split(r"(\$\{?\w+\}?)", text)
    expand = settings.get("expand", ())
    return (
        "".join(
            f'"{piece}"'
            if piece.strip("${}") in expand and piece[:1] == "$"
            else shlex.quote(piece)
            for piece in pieces
            if piece
        )
        or "''"
    )


def prepare(folder: Path, has_file: bool) -> None:
    """Write the programs that a script calls, and the files that it reads, into `folder`."""
    (folder / "bin").mkdir()
    for name in STUBS:
        (folder / "bin" / name).write_text(STUB)
        (folder / "bin" / name).chmod(0o755)
    for name in ("a", "b", "c", "1.pt", "2.pt", "train.py", *(["x"] if has_file else [])):
        (folder / name).write_text(f"v{name} w{name}\n")


def words_of(script: str, folder: Path) -> str:
    """Run a script of bash in `folder`; return the words that its launches get."""
    words = folder / "words"
    words.write_text("")
    of_job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "HOME": str(Path.home())}
    path = f"{folder}/bin:{os.environ['PATH']}"
    environ = {**of_job, "PATH": path, "WORDS": str(words)}
    (folder / "played.sh").write_text(script)
    subprocess.run(
        ["bash", "played.sh"], cwd=folder, env=environ, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    (folder / "played.sh").write_text("")
    return words.read_text()


def play(seed: int, folder: Path) -> str:
    """Import the script of a seed, and run it and what it becomes with stubs in `folder`, which is
    empty. Return what differs, '' if nothing does or if the import reports a line as lost."""
    generator = RandomScript(seed)
    prepare(folder, generator.random() < 0.6)
    text = generator.text()
    expected = words_of(text, folder)
    conversion = import_script(text, folder, folder, name="job.sbatch")
    settings = conversion.settings()
    if any(group == LOST for marks in conversion.marks.values() for group, _ in marks):
        return ""
    if "script" not in settings:
        return f"seed {seed}: no program, and nothing is reported as lost\n{text}"
    script = as_script(settings)
    words = words_of(script, folder)
    if words == expected or not expected:
        return ""
    return (
        f"seed {seed}:\n{text}bash: {expected!r}\nhere: {words!r}\n{json.dumps(settings, indent=1)}"
    )


def main() -> None:
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            if difference := play(seed, Path(folder)):
                print(difference, flush=True)


if __name__ == "__main__":
    main()
