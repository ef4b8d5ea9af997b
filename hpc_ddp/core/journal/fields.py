"""Reads the fields of a journal's lines: JSON values as the types of the records.

A line may be another version's or damaged: a missing field has its default, or else the empty value
of its type; a value of another type is an error, for which the line is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field
from functools import cache
from typing import Any, NamedTuple

from hpc_ddp.core.journal.enums import Action, Bound, Cause, EndKind, StopReason

_LARGEST = 1e15  # a larger number is damage
# The JSON types of each type of a record; the first one makes the empty value.
_TYPES: dict[str, tuple[type[Any], ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "Sequence": (list,),
    "Mapping": (dict,),
}
_PLAIN = {"int": (int,), "float": (float, int)}
# A missing word has no empty value: the line counts as damaged.
_WORDS = {
    **{"Action": Action, "Bound": Bound, "Cause": Cause, "EndKind": EndKind},
    "StopReason": StopReason,
}


def read_fields(declared: Iterable[Field[Any]], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a record from a JSON table, by the names of the fields `declared`. A
    missing field has its default, or else the empty value of its type.

    Raises
    ------
    ValueError
        an entry is of another type, no such word, or no possible number; or a word is missing
    """
    return {field.name: _read_field(field, table.get(field.name)) for field in declared}


def _read_field(declared: Field[Any], entry: Any) -> Any:
    """Return a JSON value as the type of a record's field. For None return the field's default;
    without a default, None if its type allows that, else the empty value of the type.

    Raise ValueError for a value that `checked` refuses, and where a word such as a cause is
    missing.
    """
    kind = _kind_of(str(declared.type))
    if entry is None and declared.default is not MISSING:
        return declared.default
    # None is none of the words, and refused by `checked`.
    if entry is not None or kind.name in _WORDS:
        return checked(entry, kind.name)
    return None if kind.is_optional else _TYPES[kind.outer][0]()


class _Kind(NamedTuple):
    """A type of the records in its parts: ``Sequence[str] | None`` is optional, and has the outer
    type ``Sequence``, the inner one ``str``, and the name ``Sequence[str]``. A type such as ``int``
    has the outer type ``int``, and the inner one ''."""

    name: str
    is_optional: bool
    outer: str
    inner: str


@cache  # read for each field of each line
def _kind_of(text: str) -> _Kind:
    """Return a type, written as in a record, in its parts."""
    name = text.removesuffix(" | None")
    outer, _, inner = name.removesuffix("]").partition("[")
    return _Kind(name, name != text, outer, inner)


def checked(entry: Any, type_name: str) -> Any:
    """Return a JSON value as the type `type_name` of the records, such as ``int`` or
    ``Sequence[str]``. A word, as ``Cause``, becomes a member of its enumeration. A bool passes as a
    number.

    Raises
    ------
    ValueError
        the value is of another type, no such word, NaN, or a number whose amount is 1e15 or more
    KeyError
        no record has such a type
    """
    if type(entry) in _PLAIN.get(type_name, ()) and -_LARGEST < entry < _LARGEST:  # most are
        return entry
    if type_name in _WORDS:
        return _WORDS[type_name](entry)
    _, _, outer, inner = _kind_of(type_name)
    if not isinstance(entry, _TYPES[outer]):
        raise ValueError(f"no {type_name}")
    if outer in ("int", "float") and not abs(entry) < _LARGEST:  # also for NaN
        raise ValueError("no possible number")
    if outer == "Sequence" and not _is_plain(entry, inner):
        return [checked(element, inner) for element in entry]
    return entry


def _is_plain(entries: list[Any], type_name: str) -> bool:
    """Return whether all entries are texts, or numbers that `checked` would accept, of the type
    `type_name`; False for other types. By sets: a look at each entry would take five times as long,
    and a list may have a thousand nodes."""
    kinds = set(map(type, entries))
    if type_name == "str":
        return kinds <= {str}
    if type_name not in ("int", "float") or not kinds <= set(_TYPES[type_name]):
        return False
    return all(map(_LARGEST.__gt__, map(abs, entries)))  # False for NaN


def to_number(entry: Any) -> float | None:
    """Return a number of the journal as a float, True and False as 1.0 and 0.0; None for anything
    else. A whole number too large for a float is inf or -inf."""
    try:
        return float(entry) if isinstance(entry, (int, float)) else None
    except OverflowError:  # a whole number of hundreds of digits
        return float("inf") if entry > 0 else float("-inf")
