"""Hold JSON to declared types, which a frozen dataclass says; show records in short."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from reprlib import Repr
from reprlib import repr as short
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specrt.errors import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Interval:
    """The whole numbers a field takes, both ends included."""

    first: int
    last: int


@dataclass(frozen=True)
class Words:
    """The texts a field takes next to an empty one, and what to do in the place of another."""

    words: tuple[str, ...]
    instead: str


Count = Annotated[int, Interval(1, 10**9)]
"""A size of something that must be there."""

_PLAIN = Interval(0, 2**63 - 1)

LONGEST_TEXT = 255


def read(kind: type[T], value: Any, name: str = "") -> T:
    """Read a dataclass, and what lies in it, from what `json.loads` returned.

    What has a default may be missing: records written before the field came to be. A class with a
    `current(record, name)` reads older forms by it.
    Raises: ValueError naming the first field that is missing, unknown or of another type.
    """
    record: T = _read(kind, value, name)
    return record


def _read(kind: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own = inner[1]
        return _word(value, name, own) if isinstance(own, Words) else _whole(value, name, own)
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {short(value)}; expected true or false")
        return value
    if kind is int:
        return _whole(value, name, _PLAIN)
    if kind is str:
        return _text(value, name)
    if kind is float:
        return _number(value, name)
    if origin in (Union, types.UnionType):
        return _one_of(inner[0], inner[1:], value, name)
    if origin is tuple:
        items = _held(value, list, name, "a list")
        return tuple(_read(inner[0], item, f"{name}[{at}]") for at, item in enumerate(items))
    if origin is dict:
        entries = _held(value, dict, name, "an object")
        return {
            _text(key, f"a key of {name}"): _read(inner[1], item, f"{name}[{short(key)}]")
            for key, item in entries.items()
        }
    assert is_dataclass(kind), kind
    return _record(kind, _held(value, dict, name, "an object"), name)


def _one_of(kind: Any, others: tuple[Any, ...], value: Any, name: str) -> Any:
    """Read a union of a type with None or with literal strings."""
    words = [word for other in others for word in get_args(other)]
    if value in words if isinstance(value, str) else value is None and type(None) in others:
        return value
    try:
        return _read(kind, value, name)
    except ValueError as error:
        raise ValueError(" or ".join([str(error), *map(repr, words)])) from error


def _record(kind: Any, values: Mapping[str, Any], name: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    if hasattr(kind, "current"):
        values = kind.current(values, name)
    known = {
        field.name: field.default is field.default_factory is MISSING for field in fields(kind)
    }
    for key in values:
        if key not in known:
            place = f"{name} has an" if name else "there is an"
            raise ValueError(f"{place} unknown key {short(key)}{did_you_mean(key, known)}")
    entries = {}
    for key, needed in known.items():
        inside = f"{name}.{key}" if name else key
        if key in values:
            entries[key] = _read(hints[key], values[key], inside)
        elif needed:
            raise ValueError(f"{inside} is missing")
    return kind(**entries)


def _whole(value: Any, name: str, span: Interval) -> int:
    if type(value) is int and span.first <= value <= span.last:
        return value
    raise ValueError(
        f"{name} is {short(value)}; expected a whole number from {span.first} to {span.last}"
    )


def _number(value: Any, name: str) -> float:
    if type(value) in (int, float) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ValueError(f"{name} is {short(value)}; expected a finite number, 0 or more")


def _text(value: Any, name: str) -> str:
    if isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_TEXT:
        return value
    raise ValueError(
        f"{name} is {short(value)}; expected up to {LONGEST_TEXT} printable characters"
    )


def _word(value: Any, name: str, known: Words) -> str:
    if isinstance(value, str) and value in ("", *known.words):
        return value
    words = " or ".join(map(repr, known.words))
    raise ValueError(f"{name} is {short(value)}; expected {words}, or {known.instead}")


def _held(value: Any, kind: type[T], name: str, words: str) -> T:
    if isinstance(value, kind):
        return value
    raise ValueError(f"{name} is {short(value)}; expected {words}")


class _Shortening(Repr):
    """Cuts long texts and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxlist, self.maxother = 80, 4, 1000

    def repr_float(self, number: float, level: int) -> str:
        return f"{number:.4g}"


def shown(record: object, *names: str) -> str:
    """Return a short representation of a record: some of its attributes, those that are not None.

    The others are there all the same; a notebook and a debugger print this.
    """
    values = ((name, getattr(record, name)) for name in names)
    told = [f"{name}={_SHORT.repr(value)}" for name, value in values if value is not None]
    return f"{type(record).__name__}({', '.join(told)})"


_SHORT = _Shortening()
