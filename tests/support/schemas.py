"""Random structures for requests, and whether a text keeps to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Asked(NamedTuple):
    """A structure as a request names it, and how to tell a text that keeps to it."""

    option: dict[str, Any]
    holds: Callable[[str], bool]


def valid(schema: Any, value: Any) -> bool:
    """Hold a value to a schema of the keywords that `schemas` makes."""
    if isinstance(schema, bool):
        return schema
    if "anyOf" in schema:
        return any(valid(inner, value) for inner in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "string":
        least, most = schema["minLength"], schema["maxLength"]
        return isinstance(value, str) and least <= len(value) <= most
    if kind == "integer":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and bool(schema["minimum"] <= value <= schema["maximum"])
    if kind == "array":
        if not isinstance(value, list):
            return False
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(valid(schema["items"], item) for item in value)
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(known)
            and all(valid(known[name], item) for name, item in value.items())
        )
    return bool({"null": value is None, "boolean": isinstance(value, bool)}[kind])


def _lengths(least: str, most: str, longest: int) -> st.SearchStrategy[dict[str, int]]:
    pair = st.tuples(st.integers(0, longest), st.integers(0, longest))
    return pair.map(lambda p: {least: min(p), most: max(p)})


_NAMES = st.sampled_from(["a", "the", "id", "é", 'q"', "in the", "\n"])
_SIMPLE = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    _lengths("minLength", "maxLength", 4).map(lambda d: {"type": "string", **d}),
    st.tuples(st.integers(-200, 200), st.integers(0, 300)).map(
        lambda t: {"type": "integer", "minimum": t[0], "maximum": t[0] + t[1]}
    ),
    st.lists(
        st.one_of(st.none(), st.integers(-50, 50), st.sampled_from(["the", "thing", "😀", "\\"])),
        min_size=1, max_size=3,
    ).map(lambda values: {"enum": values}),
)  # fmt: skip


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.tuples(inner, _lengths("minItems", "maxItems", 3)).map(
        lambda t: {"type": "array", "items": t[0], **t[1]}
    )
    objects = st.tuples(st.dictionaries(_NAMES, inner, max_size=3), st.randoms()).map(
        lambda t: {
            "type": "object",
            "properties": t[0],
            "required": [name for name in t[0] if t[1].random() < 0.6],
            "additionalProperties": False,
        }
    )
    return st.one_of(
        arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda s: {"anyOf": s})
    )


SCHEMAS = st.recursive(_SIMPLE, _grown, max_leaves=5)
# No \d: which digits there are depends on the Unicode that a library knows; re knows less.
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "the", "é", "[0-9]", "[^a-z]", "\\s", "in", "(ing|n)", "😀", "\\."]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["?", "{2}", "{1,3}", "{0,2}"])).map(
            lambda t: f"({t[0]}){t[1]}"
        ),
    ),
    max_leaves=5,
)
CHOICES = st.lists(
    st.sampled_from(["yes", "no", "the thing", "a|b", "x\ny", '"', "😀é", "\\d", "yes, the in"]),
    min_size=1, max_size=4, unique=True,
)  # fmt: skip
NESTED = 'start: "(" part{0,2} ")"\npart: start | WORD\nWORD: /[a-c]{1,3}/'
"""Brackets within brackets: no expression can tell them."""


def nested(text: str) -> bool:
    """Tell what NESTED derives, by taking out what is innermost."""
    word = r"(?:[a-c]{1,3}|N)"
    while text != (text := re.sub(rf"\({word}{{0,2}}\)", "N", text)):
        pass
    return text == "N"


def _of_schema(schema: Any) -> Asked:
    return Asked({"json_schema": schema}, lambda text: valid(schema, json.loads(text)))


STRUCTURES = st.one_of(
    SCHEMAS.map(_of_schema),
    EXPRESSIONS.map(lambda e: Asked({"regex": e}, lambda text: bool(re.fullmatch(e, text)))),
    CHOICES.map(lambda texts: Asked({"choice": texts}, lambda text: text in texts)),
    st.just(Asked({"grammar": NESTED}, nested)),
)
