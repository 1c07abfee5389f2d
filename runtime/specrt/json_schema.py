"""JSON Schemas: the schemas within one, where its references lead, and what its compiler reads."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import combinations
from reprlib import repr as short
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin

from specrt.errors import RequestError

Path = tuple[str | int, ...]
"""The names and numbers that lead to a place in a JSON value, from its root."""

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")

LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")

SCHEMAS = ("items", "additionalItems", "additionalProperties")

CHECKS = (
    "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "$ref",
)  # fmt: skip

ENFORCED = frozenset((*SCHEMAS_BY_NAME, *LISTS_OF_SCHEMAS, *SCHEMAS, *CHECKS))

_REMARKS = frozenset((
    "$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples",
    "example", "deprecated", "readOnly", "writeOnly", "discriminator",
))  # fmt: skip

_LONGEST_NAME = 60


class SchemaPart(NamedTuple):
    """A schema within a schema."""

    path: Path
    schema: Mapping[str, Any]
    depth: int
    """How many schemas are around it, and itself."""
    parent: int
    """The index of the part around it; -1 of the root."""

    @property
    def place(self) -> str:
        """The path as a person reads it."""
        return "/".join(("#", *map(_shown, self.path)))


def _shown(name: str | int) -> str:
    name = str(name)
    return name if name.isprintable() and len(name) < _LONGEST_NAME else short(name)


def schema_parts(schema: Any) -> list[SchemaPart]:
    """Return a schema and all within it, each after the one around it."""
    parts: list[SchemaPart] = []
    left: list[tuple[Path, Any, int, int]] = [((), schema, 1, -1)]
    while left:
        path, found, depth, parent = left.pop()
        if isinstance(found, Mapping):
            parts.append(SchemaPart(path, found, depth, parent))
            inner = [
                ((*path, *step), one, depth + 1, len(parts) - 1) for step, one in _inner(found)
            ]
            left += reversed(inner)
    return parts


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Go through the schemas right within a schema; each may be true or false."""
    for word in SCHEMAS_BY_NAME:
        if isinstance(schema.get(word), Mapping):
            yield from (((word, name), one) for name, one in schema[word].items())
    for word in LISTS_OF_SCHEMAS:
        if isinstance(schema.get(word), list):
            yield from (((word, at), one) for at, one in enumerate(schema[word]))
    for word in SCHEMAS:
        if not isinstance(schema.get(word, []), list):
            yield (word,), schema[word]


def values(value: Any) -> Iterator[Any]:
    """Go through a JSON value and all values within it."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, (Mapping, list)):
            left += one.values() if isinstance(one, Mapping) else one


# References


def references(parts: list[SchemaPart]) -> dict[Path, Path]:
    """Return the place that each reference leads to, by the place of its schema.

    `parts` are a root and all within it. A schema with `$id` is a root of its own.
    Source: JSON Schema 2020-12, core, section 8.2.
    Raises: RequestError for a reference that leads to no schema within the root.
    """
    named, bases = _names(parts)
    schemas = {part.path for part in parts}
    for part in parts:
        schemas |= {(*part.path, *to) for to, one in _inner(part.schema) if isinstance(one, bool)}
    targets = {}
    for part, base in zip(parts, bases, strict=True):
        reference = _text(part, "$ref")
        if reference is None:
            continue
        target = _target(parts[0].schema, named, base, reference)
        if target is None or target not in schemas:
            raise RequestError(
                f"json_schema has $ref {short(reference)} at {part.place}, which leads to no "
                "schema within it; expected one such as '#/$defs/name'"
            )
        targets[part.path] = target
    return targets


def _names(parts: list[SchemaPart]) -> tuple[dict[str, Path], list[str]]:
    """Return the places with a URI of their own, and the URI that is the base of each part."""
    named: dict[str, Path] = {"": ()}
    bases: list[str] = []
    until_7 = "draft-0" in str(parts[0].schema.get("$schema")) if parts else False
    for part in parts:
        base = bases[part.parent] if part.path else ""
        own, anchor, uris = _text(part, "$id"), _text(part, "$anchor"), list[str]()
        if until_7 and "$ref" in part.schema:
            own = None
        if own is not None and not own.startswith("#"):
            base = _joined(base, own).removesuffix("#")
            uris.append(base)
        elif own is not None:  # until draft 7
            anchor = own[1:]
        if anchor:
            uris.append(f"{base}#{anchor}")
        bases.append(base)
        for uri in uris:
            if named.setdefault(uri, part.path) != part.path:
                raise RequestError(f"json_schema has {short(uri)} at {part.place} a second time")
    return named, bases


def _text(part: SchemaPart, word: str) -> str | None:
    given = part.schema.get(word, "")
    if not isinstance(given, str):
        raise RequestError(f"json_schema has {word} {short(given)} at {part.place}; expected text")
    return given if word in part.schema else None


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # a host of brackets
        return reference


def _target(
    root: Mapping[str, Any], named: Mapping[str, Path], base: str, reference: str
) -> Path | None:
    """Return the place that a reference leads to, whatever stands there; None for none."""
    uri, _, fragment = reference.partition("#")
    uri, fragment = _joined(base, uri) if uri else base, unquote(fragment)
    if fragment and not fragment.startswith("/"):
        return named.get(f"{uri}#{fragment}")
    path = named.get(uri)
    if path is None:
        return None
    value: Any = root
    for step in path:
        value = value[step]
    for token in fragment.split("/")[1:]:
        step = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and _INDEX.fullmatch(step) and int(step) < len(value):
            path, value = (*path, int(step)), value[int(step)]
        elif isinstance(value, Mapping) and step in value:
            path, value = (*path, step), value[step]
        else:
            return None
    return path


_INDEX = re.compile("0|[1-9][0-9]{0,8}")


def rooted(schema: Any, root: Path = ()) -> Any:
    """Return a schema for a place of another: its references are pointers from the other's root.

    Raises: RequestError for a reference that leads to no schema within it.
    """
    try:
        schema = deepcopy(schema)
    except RecursionError:
        raise RequestError("json_schema is nested too deep, or within itself") from None
    parts = schema_parts(schema)
    targets = references(parts)
    for part in parts:
        own: dict[str, Any] = part.schema  # type: ignore[assignment]
        own.pop("$id", None)
        own.pop("$anchor", None)
        if part.path in targets:
            own["$ref"] = _pointer((*root, *targets[part.path]))
    return schema


def _pointer(path: Path) -> str:
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return "/".join(("#", *(quote(step, "$", errors="surrogatepass") for step in steps)))


# Keywords that say nothing


def says_nothing(word: str, schema: Mapping[str, Any]) -> bool:
    """Tell whether a keyword forbids nothing where it stands."""
    if word in _REMARKS or (word.startswith("x-") and word != "x-guidance"):
        return True
    empty = _EMPTY.get(word)
    return empty is not None and empty(schema[word], schema)


def _anything(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and schema.keys() <= _REMARKS)


def _any_name(schema: Any) -> bool:
    """Tell whether a schema admits every string, as the name of a property is one."""
    if not isinstance(schema, Mapping):
        return schema is True
    kinds = schema.get("type", "string")
    named = kinds if isinstance(kinds, list) else [kinds]
    return schema.keys() <= {*_REMARKS, "type"} and "string" in named


def _no_dependents(given: Any) -> bool:
    return isinstance(given, Mapping) and all(v == [] or _anything(v) for v in given.values())


_EMPTY: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    **dict.fromkeys(("uniqueItems", "nullable", "not"), lambda value, _: value is False),
    **dict.fromkeys(
        ("unevaluatedProperties", "unevaluatedItems"), lambda value, _: _anything(value)
    ),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"),
        lambda value, _: _no_dependents(value),
    ),
    **dict.fromkeys(("minContains", "maxContains"), lambda _, schema: "contains" not in schema),
    **dict.fromkeys(("then", "else"), lambda value, schema: "if" not in schema or _anything(value)),
    "if": lambda _, schema: all(_anything(schema.get(word, True)) for word in ("then", "else")),
    "propertyNames": lambda value, _: _any_name(value),
}
"""Keywords that may say nothing, and what tells it of their values."""


# Strings

_UNWRITTEN = frozenset(map(chr, range(32))) - {*"\b\f\n\r\t"} | {"\x7f"}
"""Characters that the compiler writes as escapes with u alone; without these it leaves them out."""

_HEX = "([0-9A-Fa-f]"
_STEP = re.compile(
    rf"\\(?:x{_HEX}{{2}})|u{_HEX}{{4}})|U{_HEX}{{8}})|[xuU]\{{{_HEX}+)\}}|[pP]\{{[^}}]*\}}|.)|.",
    re.DOTALL,
)
"""One step of an expression: an escape, or a character."""


def _steps(pattern: str) -> Iterator[tuple[str, str, bool]]:
    """Go through an expression's steps: each with its character, and whether a class goes on."""
    within = opened = False
    for step in _STEP.finditer(pattern):
        text, code = step[0], step[1] or step[2] or step[3] or step[4]
        character = chr(min(int(code, 16), sys.maxunicode)) if code else _ESCAPES.get(text, text)
        if text == "[" and not within:
            within = opened = True
        elif not (opened and text == "^"):
            if text == "]" and not opened:  # right after the opening one it is a member
                within = False
            opened = False
        yield text, character, within


_ESCAPES = {r"\a": "\a", r"\v": "\v"}


def escaped_characters(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Go through characters that a schema's own texts want and only an escape writes.

    Each comes with the keyword. In a class of an expression it is one of several: others may come.
    """
    for word in ("const", "enum"):
        texts = (one for one in values(schema.get(word)) if isinstance(one, str))
        yield from ((word, c) for text in texts for c in text if c in _UNWRITTEN)
    patterns = [("pattern", schema.get("pattern"))]
    if isinstance(schema.get("patternProperties"), Mapping):
        patterns += [("patternProperties", name) for name in schema["patternProperties"]]
    for word, pattern in patterns:
        if isinstance(pattern, str):
            verbose = _VERBOSE.search(pattern)
            for _, character, within in _steps(pattern):
                if character in _UNWRITTEN and (verbose or not within):
                    yield word, character


_VERBOSE = re.compile(r"\(\?\w*x")
"""Lets an expression have comments, in which brackets open no class."""


def open_place(parts: list[SchemaPart]) -> str | None:
    """Return where properties are named and others may come, with schemas of their own."""
    for part in parts:
        closed = part.schema.get("additionalProperties", True) is False
        named = "properties" in part.schema or {"required", "minProperties"} <= part.schema.keys()
        if "patternProperties" in part.schema or (named and not closed):
            return part.place
    return None


def _compiler_pattern(pattern: str) -> str:
    """Return an expression as ECMA-262 has it, in the compiler's syntax.

    The compiler has classes within classes, and operators on them; in ECMA-262 these are members.
    It takes a class of one unwritable character for nothing, rather than for what nothing can
    match: two more unwritable characters in each class change no other.
    """
    steps = list(_steps(pattern))
    more = r"\x00\x01" * any(character in _UNWRITTEN for _, character, _ in steps)
    parts, around = [""], False
    for text, _, within in steps:
        operates = around and (text == "[" or (text == parts[-1] and text in "&-~"))
        parts += [more * (around and not within), "\\" * operates + text]
        around = within
    return "".join(parts)


# What the compiler reads

_YEAR = r"([1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"

_LEAP_YEAR = (
    r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"  # never 0000
)

_REAL_DATE = rf"^({_YEAR}-(0[13-9]|1[0-2])-|{_YEAR}-02-([01]\d|2[0-8])|{_LEAP_YEAR}-02-29)"


def compiler_form(schema: Any) -> Any:
    """Return a checked schema in words that the compiler reads as they are meant.

    References are pointers. What says nothing is left out; the compiler would refuse some of it,
    and take others for a reason to pass over `prefixItems` or `const`. Dates are of the calendar:
    its own pattern has four digits and the days of each month.
    """
    schema = rooted(schema)
    parts = schema_parts(schema)
    places = {_pointer(part.path): part.schema for part in parts}
    leads = references(parts)
    referred = {to[:at] for to in leads.values() for at in range(len(to) + 1)}
    for part in parts:
        own: dict[str, Any] = part.schema  # type: ignore[assignment]
        for word in own.keys() - ENFORCED:
            del own[word]
        free = "anyOf" not in own and (*part.path, "oneOf") not in referred
        if free and _told_apart(own.get("oneOf"), places):
            own["anyOf"] = own.pop("oneOf")
        if not isinstance(own.get("items"), list):
            own.pop("additionalItems", None)
        _bound_integers(own)
        if isinstance(own.get("pattern"), str):
            own["pattern"] = _compiler_pattern(own["pattern"])
        if isinstance(own.get("patternProperties"), Mapping):
            named = own["patternProperties"].items()
            own["patternProperties"] = {_compiler_pattern(name): one for name, one in named}
        if own.get("format") in ("date", "date-time") and isinstance(own.get("allOf", []), list):
            own["allOf"] = [*own.get("allOf", ()), {"pattern": _REAL_DATE}]
    return schema


_MOST_ALTERNATIVES = 64
"""Each is told from each other one."""

Places = Mapping[str, Mapping[str, Any]]
"""Schemas by the references to them."""


def _told_apart(alternatives: Any, places: Places) -> bool:
    """Tell whether no value is of two alternatives; the compiler does not look through references.

    As far as types tell, values, and what a required property may be.
    """
    if not isinstance(alternatives, list) or not 1 < len(alternatives) <= _MOST_ALTERNATIVES:
        return False
    found = [_looked_up(one, places) for one in alternatives]
    return all(_apart(one, other, places) for one, other in combinations(found, 2))


def _apart(one: Mapping[str, Any], other: Mapping[str, Any], places: Places) -> bool:
    first, second = _own_values(one), _own_values(other)
    if first is not None and second is not None:
        return first.isdisjoint(second)
    kinds, others = _kinds(one), _kinds(other)
    if not kinds & others:
        return True
    if not kinds == others == {"object"}:
        return False
    properties = [_looked_up(each.get("properties"), places) for each in (one, other)]
    for name in _required(one) | _required(other):
        values = [_own_values(_looked_up(named.get(name), places)) for named in properties]
        if None not in values and frozenset.isdisjoint(*values):  # type: ignore[arg-type]
            return True
    return False


def _looked_up(schema: Any, places: Places) -> Mapping[str, Any]:
    """Return what a schema says, and what it refers to says besides."""
    found = schema if isinstance(schema, Mapping) else {}
    for _ in range(_MOST_ALTERNATIVES):
        if not isinstance(found.get("$ref"), str):
            break
        rest = {word: found[word] for word in found.keys() - {"$ref"}}
        found = {**rest, **places.get(found["$ref"], {})}
    return found


def _own_values(schema: Mapping[str, Any]) -> frozenset[tuple[bool, Any]] | None:
    """Return the values that a schema lists; None where any is more than a name, or none are."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not all(isinstance(v, str | int | None) for v in listed):
        return None
    return frozenset((isinstance(value, bool), value) for value in listed)


_KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    kinds = schema.get("type", [*_KINDS])
    named = kinds if isinstance(kinds, list) else [kinds]
    return frozenset("number" if kind == "integer" else kind for kind in named)


def _required(schema: Mapping[str, Any]) -> set[str]:
    required = schema.get("required")
    return (
        {name for name in required if isinstance(name, str)}
        if isinstance(required, list)
        else set()
    )


_MOST_INTEGER = (1 << 63) - 1024
"""The largest float below 2^63, which is as far as the compiler counts."""


def _bound_integers(schema: dict[str, Any]) -> None:
    """Bound an integer where the schema does not: a small model may write digits for ever."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds and "number" not in kinds:
        for word, most in (("inimum", -_MOST_INTEGER), ("aximum", _MOST_INTEGER)):
            if f"exclusiveM{word}" not in schema:
                schema.setdefault(f"m{word}", most)
