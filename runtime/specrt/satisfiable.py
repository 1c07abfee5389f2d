"""Whether a JSON Schema admits any finite value, where its references run in circles."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import unquote

HOLDERS = frozenset({"object", "array"})
"""Types whose values hold others."""


def admits_anything(schema: Any, references: Collection[str]) -> bool:
    """Tell whether a schema admits a finite value, as far as structure decides that.

    `references` are all that the schema holds. Each is taken for impossible until it is found
    possible with what was found before: the least fixed point. What bounds of numbers and lengths
    rule out is not looked at.
    """
    found: set[str] = set()
    while True:
        more = {r for r in references if r not in found and _target(schema, r, found)}
        if not more:
            return _admits(schema, found)
        found |= more


def _target(root: Any, reference: str, found: Collection[str]) -> bool:
    """Tell whether what a reference points to is possible; one that cannot be followed is."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    at = root
    for step in reference[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and key.isdecimal() and int(key) < len(at):
            at = at[int(key)]
        elif isinstance(at, Mapping) and key in at:
            at = at[key]
        else:
            return True
    return _admits(at, found)


def _admits(schema: Any, found: Collection[str]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    if "$ref" in schema and schema["$ref"] not in found:
        return False
    if not all(_admits(inner, found) for inner in _list(schema, "allOf")):
        return False
    for word in ("anyOf", "oneOf"):
        choices = _list(schema, word)
        if choices and not any(_admits(inner, found) for inner in choices):
            return False
    types = _texts(schema.get("type", "null"))
    if not types:
        return bool(schema["type"] != [])
    if "enum" in schema or "const" in schema or not HOLDERS.issuperset(types):
        return True
    return ("object" in types and _object(schema, found)) or (
        "array" in types and _array(schema, found)
    )


def _object(schema: Mapping[str, Any], found: Collection[str]) -> bool:
    known = schema.get("properties")
    known = known if isinstance(known, Mapping) else {}
    return all(_admits(known.get(name), found) for name in _texts(schema.get("required")))


def _array(schema: Mapping[str, Any], found: Collection[str]) -> bool:
    least, items = schema.get("minItems"), schema.get("items")
    least = least if isinstance(least, int) else 0
    first = _list(schema, "prefixItems") or _list(schema, "items")
    rest = schema.get("additionalItems") if isinstance(items, list) else items
    needed = first[: max(least, 0)]
    return all(_admits(inner, found) for inner in needed) and (
        least <= len(first) or _admits(rest, found)
    )


def _list(schema: Mapping[str, Any], word: str) -> list[Any]:
    held = schema.get(word)
    return held if isinstance(held, list) else []


def _texts(held: Any) -> list[str]:
    """Return a text, or the texts of a list; what is neither is the compiler's to refuse."""
    return [item for item in (held if isinstance(held, list) else [held]) if isinstance(item, str)]
