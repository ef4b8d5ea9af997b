"""Where each line of a job's script comes from: an option, a file's key, a default, or us.

The script is rendered once more with marks around its values and its blocks. Marks are characters
that stand in no text (noncharacters of Unicode); without them it must be the same script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpc_ddp.launch.backends import BACKENDS
from hpc_ddp.launch.config import Settings, known_keys
from hpc_ddp.launch.fabric import fabric_env
from hpc_ddp.launch.prepare import Prepared
from hpc_ddp.launch.render import Rendering
from hpc_ddp.launch.resources import folder
from hpc_ddp.launch.template import CLOSE, NUMBER, OPEN, Marked, unmarked
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.spec import JobSpec

# The key that says an option of sbatch which has another name.
KEY_OF = {
    **dict.fromkeys(("gres", "gpus-per-task"), "gpus-per-node"),
    **dict.fromkeys(("requeue", "no-requeue"), "continue-by"),
    "no-kill": "elastic",
}
# Why we say what nobody has asked for: options of sbatch, and variables of the template.
WHY = {
    "ntasks-per-node": "how many tasks srun starts",
    "output": "in the run's folder",
    "open-mode": "keeps the log over a requeue",
    "comment": "finds its jobs in squeue",
    "run": "the run's folder",
    "code": "the snapshot of your code",
    "workdir": "where you called it",
    "host_python": "the Python of hpc-ddp",
    "step_options": "how nodes end, and what they share",
    "torchrun_options": "found out in the job",
    "version": "what wrote this",
}
# The key behind a variable of the template, where the name is another.
KEY_OF_VARIABLE = {"workdir": "chdir", "run": "runs-dir", "code": "snapshot", "points": "sweep"}
_TYPED = {"script": "command line", "args": "command line", "sweep": "--set"}


@dataclass(frozen=True)
class Origin:
    """Where a line comes from.

    `source` is option, project, site, operators, profile, fabric, run (one that is gone on with),
    default, template (the user's), submitit or hpc-ddp; `key` is the option's or the file's; `file`
    where it was said; `block` the template's block for what is said nowhere else; `why` for
    hpc-ddp's.
    """

    source: str
    key: str | None = None
    file: str | None = None
    block: str | None = None
    why: str | None = None

    @property
    def place(self) -> str:
        """Where it was said, short: ``hpc-ddp.toml``, ``site lumi``, ``default``."""
        if self.source in ("profile", "fabric"):
            return (
                f"{'site' if self.source == 'profile' else 'fabric'} {Path(self.file or '').stem}"
            )
        if self.source == "run":
            return f"run {Path(self.file or '').parent.name}"
        return _short(self.file) if self.file else self.source

    @property
    def told(self) -> str:
        """What was said there: a key, a block, or why."""
        return self.key or self.why or (f"block {self.block}" if self.block else "")


@dataclass(frozen=True)
class Line:
    """A line of the script; `origins` is never empty, and has several for one of several values."""

    text: str
    origins: tuple[Origin, ...]

    @property
    def label(self) -> str:
        """What a person reads, short: ``--time``, ``hpc-ddp.toml: time``, ``default: time``."""
        by_place: dict[str, list[str]] = {}
        for each in self.origins:
            if each.source == "option":
                by_place[_TYPED.get(each.key or "", f"--{each.key}")] = []
            else:
                by_place.setdefault(each.place, []).extend(filter(None, [each.told]))
        return ", ".join(
            f"{place}: {', '.join(told)}" if told else place for place, told in by_place.items()
        )

    def to_dict(self) -> dict[str, Any]:
        given = [{k: v for k, v in asdict(each).items() if v} for each in self.origins]
        return {"line": self.text, "origins": given}


def _short(path: str) -> str:
    """Return a path as a person at this place would write it."""
    for base, sign in ((Path.cwd(), ""), (Path.home(), "~/")):
        if Path(path).is_relative_to(base):
            return sign + str(Path(path).relative_to(base))
    return path


def explained(prepared: Prepared, settings: Settings) -> list[Line]:
    """Return the job's script by line, with the origins of each.

    Raises
    ------
    UsageError
        as for rendering it
    """
    backend = BACKENDS[prepared.spec.backend]
    plain = backend.script(prepared)
    # A user's template may do with a value what a mark does not survive; then its block has to do.
    for parts in (("values", "blocks"), ("blocks",)):
        trace = _Trace(prepared, settings, parts)
        with suppress(UsageError):
            text = backend.script(_Traced(**_fields(prepared), trace=trace))
            if unmarked(text) == plain:
                return list(_lines(text, trace))
    return list(_lines(plain, _Trace(prepared, settings, ())))


def _fields(prepared: Prepared) -> dict[str, Any]:
    return {each.name: getattr(prepared, each.name) for each in fields(prepared)}


@dataclass(frozen=True)
class _Trace:
    """The origins that marks stand for, by number, and where values come from."""

    prepared: Prepared
    settings: Settings
    parts: Sequence[str]
    known: list[Origin] = field(default_factory=list)

    def mark(self, origin: Origin) -> str:
        if origin not in self.known:
            self.known.append(origin)
        return f"{OPEN}{self.known.index(origin)}{NUMBER}"

    def of_block(self, name: str, file: str) -> str:
        ours = Path(file).parent == folder("templates")
        origin = Origin("hpc-ddp", block=name) if ours else Origin("template", None, file, name)
        return self.mark(origin)

    def of_key(self, key: str, name: str | None = None) -> Origin:
        """Return where a setting comes from."""
        layer = self.settings.layer(key, name)
        if not self.prepared.is_new and (layer is None or layer.kind != "option"):
            return self._of_run(key)
        if layer is None:
            return Origin("default", key)
        return Origin(layer.kind, key, str(layer.path) if layer.path else None)

    def _of_run(self, key: str) -> Origin:
        name = key.replace("-", "_")
        default = next((f.default for f in fields(JobSpec) if f.name == name), None)
        if getattr(self.prepared.spec, name, None) == default:
            return Origin("default", key)
        return Origin("run", key, str(self.prepared.run.job_json))

    def of_directive(self, name: str, value: str) -> Origin:
        """Return where a line of sbatch's options comes from."""
        spec = self.prepared.spec
        raw = f"--{name}={value}" if value else f"--{name}"
        if raw in spec.sbatch:
            return self.of_key("sbatch", raw)
        if raw in self.prepared.rendering.entry.sbatch:
            return self.of_key("image")
        key = KEY_OF.get(name, name)
        if name == "output" and self.settings.layer("runs-dir"):
            return self.of_key("runs-dir")
        return Origin("hpc-ddp", why=WHY[name]) if name in WHY else self.of_key(key)

    def of_variable(self, name: str) -> Origin:
        """Return where a variable of the template comes from that has one origin."""
        key = KEY_OF_VARIABLE.get(name, name.replace("_", "-"))
        if name in WHY and key not in self.settings.values:
            return Origin("hpc-ddp", why=WHY[name])
        return self.of_key(key) if key in (*known_keys(), "sweep") else Origin("hpc-ddp")

    def of_env(self, name: str) -> Origin:
        spec = self.prepared.spec
        if name not in spec.env and name in fabric_env(spec.fabric):
            file = folder("templates") / "fabrics" / f"{spec.fabric}.toml"
            return Origin("fabric", "env", str(file))
        return self.of_key("env", name)

    def of_torchrun(self, word: str) -> Origin:
        if word in self.prepared.spec.torchrun:
            return self.of_key("torchrun")
        said = self.prepared.spec.nproc_per_node is not None
        key = {
            "--nproc-per-node": "nproc-per-node" if said else "gpus-per-node",
            "--max-restarts": "max-restarts",
        }.get(word.partition("=")[0])
        return self.of_key(key) if key else self.of_variable("torchrun_options")

    def marked(self, name: str, value: Any) -> Any:
        """Return a variable's value, with each string in it marked."""
        spec = self.prepared.spec
        if "values" not in self.parts:
            return value
        if name == "directives":
            pairs = zip(value, self.prepared.rendering.header, strict=True)
            return [Marked(line, self.mark(self.of_directive(*pair))) for line, pair in pairs]
        if name == "env":
            return {key: Marked(each, self.mark(self.of_env(key))) for key, each in value.items()}
        if name == "torchrun_options":
            return [Marked(word, self.mark(self.of_torchrun(word))) for word in value]
        if name in ("srun", "container", "container_srun"):
            default = self.of_key("image" if spec.image else "container")
            of = {word: self.of_key("srun", word) for word in spec.srun}
            return [Marked(word, self.mark(of.get(word, default))) for word in value]
        if name == "setup":  # a site's lines, and then the job's
            return [Marked(line, self.mark(self.of_key(name, line))) for line in value]
        return self._each(value, self.of_variable(name))

    def _each(self, value: Any, origin: Origin) -> Any:
        if isinstance(value, str):
            return Marked(value, self.mark(origin))
        if isinstance(value, (list, tuple)):
            return [self._each(each, origin) for each in value]
        return value


class _TracedRendering(Rendering):
    def __init__(self, prepared: Prepared, trace: _Trace) -> None:
        super().__init__(prepared.spec, prepared.run, prepared.code, prepared.script)
        self._marker = trace.of_block if "blocks" in trace.parts else None
        self._context = {name: trace.marked(name, v) for name, v in self._context.items()}


@dataclass(frozen=True)
class _Traced(Prepared):
    trace: _Trace

    @property
    def rendering(self) -> Rendering:
        return _TracedRendering(self, self.trace)


def _lines(text: str, trace: _Trace) -> Iterator[Line]:
    """Cut a marked text into its lines."""
    directives = dict(trace.prepared.rendering.header)
    open_marks: list[Origin] = []
    for line in _whole_lines(text):
        seen, plain = [*open_marks], ""
        for begun, number, end, piece in _PIECES.findall(line):
            if begun:
                open_marks.append(trace.known[int(number)])
                seen.append(open_marks[-1])
            elif end:
                if not plain:  # what ends before the line's first character is of the line before
                    seen.pop()
                open_marks.pop()
            plain += piece
        yield Line(plain, _origins(plain, seen, trace, directives))


def _whole_lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines if unmarked(lines[-1]) else lines[:-1]  # the last one ends with a line break, too


_PIECES = re.compile(f"({OPEN})([0-9]+){NUMBER}|({CLOSE})|([^{OPEN}{NUMBER}{CLOSE}]+)")


def _origins(
    line: str, seen: Sequence[Origin], trace: _Trace, directives: Mapping[str, str]
) -> tuple[Origin, ...]:
    """Return a line's origins: the user's own block, else its values, else the block it is in."""
    blocks = [origin for origin in seen if origin.block]
    if blocks and blocks[-1].source == "template":
        return (blocks[-1],)
    values = tuple(dict.fromkeys(origin for origin in seen if not origin.block))
    if values or blocks:
        return values or (blocks[-1],)
    spec = trace.prepared.spec
    name = re.match(r"#SBATCH --([a-z-]+)", line)
    if spec.backend == "submitit":  # which writes the lines of sbatch by itself
        known = name and name[1] in directives
        return (
            (trace.of_directive(name[1], directives[name[1]]),)
            if name and known
            else (Origin("submitit"),)
        )
    if spec.template and not trace.parts:
        return (Origin("template", file=spec.template),)
    return (Origin("hpc-ddp"),)
