"""Declares how the user sets a field of a job: once, beside the field.

From the declaration follow the option of the command line, its heading in ``--help``, the key of
``hpc-ddp.toml`` and the type of its value, what is passed to sbatch, and the table in
``docs/reference.md``.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from hpc_ddp.core.errors import UsageError, closest

COMMON = "Common options"
RESOURCES = "Resources, as sbatch has them"
ENVIRONMENT = "The cluster, and the environment of the job"
WORKERS = "Starting the workers"
CONTINUATION = "After an attempt"
GROUPS = (COMMON, RESOURCES, ENVIRONMENT, WORKERS, CONTINUATION)


@dataclass(frozen=True)
class Kind:
    """A type of values: its Python types in a TOML file, and its name in an error, `text`."""

    types: tuple[type, ...]
    text: str

    @property
    def is_list(self) -> bool:
        return self.types == (list,)

    def line_for(self, key: str, entry: object) -> str:
        """Return the line of a TOML file that sets `key` to an entry of another type, turned into
        this one; '' where the entry can't be turned."""
        if isinstance(entry, (str, int, float)) and not isinstance(entry, bool):
            text = json.dumps(str(entry), ensure_ascii=False).replace("\x7f", "\\u007f")
            if self.is_list:
                return f"{key} = [{text}]"
            if self.types == (str,):
                return f"{key} = {text}"
        return ""


TEXT = Kind((str,), "a string")
NUMBER = Kind((int,), "a whole number")
AMOUNT = Kind((int, float), "a number")
FLAG = Kind((bool,), "true or false")
LIST = Kind((list,), "a list of strings")
TABLE = Kind((dict,), "a table")
NODES = Kind((int, str), 'a whole number, or a range like "1-4"')
GPUS = Kind((int, str), 'a number or "type:number"')
# By the annotation of the field.
_KINDS = {
    "str": TEXT,
    "int": NUMBER,
    "float": AMOUNT,
    "bool": FLAG,
    "tuple[str, ...]": LIST,
    "Mapping[str, str]": TABLE,
}


@dataclass(frozen=True)
class Option:
    """The declaration of one setting.

    Attributes
    ----------
    help
        for ``--help`` and the reference
    group
        the heading in ``--help``
    letter
        of the short option, as ``N``
    metavar
        of the value in ``--help``; by default the accepted values
    accepted
        the values that a text may have; empty for any
    least
        the smallest whole number
    kind
        the type of the value
    is_file_only
        files can set it, the command line can't
    is_sbatch
        it is an option of sbatch with this name, and passed on unchanged
    is_local
        it also means something for processes on this machine, such as those of a drill
    is_joined
        a site's values come before the job's: neither replaces the other
    """

    help: str
    group: str = RESOURCES
    letter: str = ""
    metavar: str | None = None
    accepted: tuple[str, ...] = ()
    least: int | None = None
    kind: Kind = TEXT
    is_file_only: bool = False
    is_sbatch: bool = False
    is_local: bool = False
    is_joined: bool = False

    def check(self, key: str, value: Any) -> None:
        """Raise UsageError for a value that is not among `accepted`, where any are, or that is no
        whole number from `least` on, where `least` is given. None is never refused for `least`.
        `key` names the setting in an error.

        Raises
        ------
        UsageError
            names the key, the value, and what is accepted
        """
        if self.accepted and value not in self.accepted:
            raise UsageError(
                f"{key} {value!r} is unknown; accepted: {', '.join(self.accepted)}"
                + closest(str(value), self.accepted),
                hint=f"--{key} {self.accepted[0]}",
            )
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if self.least is not None and value is not None and not (is_number and value >= self.least):
            raise UsageError(
                f"{key} is {value!r}; accepted: a whole number from {self.least}",
                hint=f"--{key} {max(self.least, 1)}",
            )


def option(default: Any, help: str, **declared: Any) -> Any:
    """Return a dataclass's field that carries its declaration; `declared` are attributes of
    `Option`. With a dict as default each instance has an empty dict of its own."""
    metadata = {"option": Option(help, **declared)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(*settings: type[Any]) -> dict[str, Option]:
    """Return the declared options of some dataclasses by key, in the order of the fields, each with
    the kind of its field's annotation. Fields without a declaration are left out."""
    return {
        key_of(declared): _with_kind(declared)
        for settings_class in settings
        for declared in fields(settings_class)
        if "option" in declared.metadata
    }


def key_of(declared: Field[Any] | str) -> str:
    """Return the key of a field, or of a field's name, with dashes for underscores:
    ``cpus-per-task``."""
    name = declared if isinstance(declared, str) else declared.name
    return name.replace("_", "-")


def default_of(declared: Field[Any]) -> Any:
    """Return the default of a field, as its factory makes it if it has one; MISSING without any."""
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


def _with_kind(declared: Field[Any]) -> Option:
    """Return a field's declaration, with the kind that `_KINDS` has for the annotation. Where
    `_KINDS` has none, or `TEXT`, the declared kind stays."""
    declaration: Option = declared.metadata["option"]
    kind = _KINDS.get(str(declared.type).removesuffix(" | None"))
    is_same = kind in (None, TEXT)
    return declaration if is_same else Option(**{**vars(declaration), "kind": kind})
