"""What of a JSON Schema can be enforced: every keyword is, or the schema is refused by its name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import lcm
from reprlib import repr as short
from typing import Any, NamedTuple

from specrt.bounds import check_numbers
from specrt.errors import RequestError
from specrt.satisfiable import admits_anything

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SCHEMAS = ("items", "additionalItems", "additionalProperties")
CHECKS = (
    "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "$ref",
)  # fmt: skip
REMARKS = (
    "$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
)  # fmt: skip
"""Keywords that allow and forbid nothing."""
FORMATS = (
    "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
)  # fmt: skip
_KNOWN = frozenset((*SCHEMAS_BY_NAME, *LISTS_OF_SCHEMAS, *SCHEMAS, *CHECKS, *REMARKS))
_MOST_REMAINDERS = 20_000
"""Numbers are told apart by their remainder; compiling takes the square of how many there are."""

_LONGEST_NAME = 60
_MOST_LEVELS = 2000
"""The compiler follows them by recursion; half as many again overflow its stack."""
_MOST_OF = {"patternProperties": 100, "anyOf": 1000, "oneOf": 500, "allOf": 500, "required": 10_000}


class Part(NamedTuple):
    """A schema within a schema, the JSON pointer that leads there, and how deep it lies."""

    place: str
    schema: Mapping[str, Any]
    depth: int


def check_schema(schema: Any) -> None:
    """Refuse what would be ignored, what lies elsewhere, and what nothing satisfies.

    What a keyword may hold is left to the compiler.
    Raises: RequestError naming keyword and place.
    """
    if not isinstance(schema, (bool, Mapping)):
        raise RequestError(f"json_schema is {short(schema)}; expected an object or true")
    parts = list(_parts(schema, "#"))
    for part in parts:
        _check_keywords(part)
        _check_texts(part)
        _check_count(part)
        _check_reference(part, schema)
    draft = str(schema.get("$schema")) if isinstance(schema, Mapping) else ""
    for part in parts:
        if "draft-0" in draft and "prefixItems" in part.schema:
            raise _unenforced(f"prefixItems, which {short(draft)} has not,", part.place)
    check_numbers([(part.place, part.schema) for part in parts])
    _check_remainders(parts)
    _check_size(parts)
    if not admits_anything(schema, {p.schema["$ref"] for p in parts if "$ref" in p.schema}):
        raise RequestError("json_schema admits nothing: no finite JSON value satisfies it")


def check_names(schema: Any) -> None:
    """Refuse a schema within a grammar that a name spelt otherwise, with escapes, would go past.

    Raises: RequestError.
    """
    for part in _parts(schema, "#"):
        closed = part.schema.get("additionalProperties", True) is False
        if "patternProperties" in part.schema or ("properties" in part.schema and not closed):
            raise RequestError(
                f"grammar has %json with properties at {part.place} and others beside them; "
                "expected additionalProperties false and no patternProperties, or json_schema in "
                "the place of a grammar"
            )


def _parts(schema: Any, place: str, depth: int = 1) -> Iterator[Part]:
    """Go through a schema and all within it."""
    if not isinstance(schema, Mapping):
        return
    yield Part(place, schema, depth)
    depth += 1
    for word in SCHEMAS_BY_NAME:
        if isinstance(schema.get(word), Mapping):
            for name, inner in schema[word].items():
                yield from _parts(inner, f"{place}/{word}/{_shown(name)}", depth)
    for word in LISTS_OF_SCHEMAS:
        if isinstance(schema.get(word), list):
            for at, inner in enumerate(schema[word]):
                yield from _parts(inner, f"{place}/{word}/{at}", depth)
    for word in SCHEMAS:
        yield from _parts(schema.get(word), f"{place}/{word}", depth)


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) < _LONGEST_NAME else short(name)


def _check_keywords(part: Part) -> None:
    for word in part.schema:
        extension = word.startswith("x-") and word != "x-guidance"
        if word not in _KNOWN and not extension:
            raise _unenforced(short(word), part.place)
    form = part.schema.get("format")
    if form is not None and form not in FORMATS:
        raise RequestError(
            f"json_schema has format {short(form)} at {part.place}; expected one of "
            f"{', '.join(FORMATS)}, or a pattern"
        )


def _check_texts(part: Part) -> None:
    """Refuse characters that JSON can only write as numbers, which are not allowed."""
    for word in ("const", "enum", "properties", "required"):
        written = json.dumps(part.schema.get(word))
        found = re.search(r"\\u00[01][0-9a-f]", written.replace("\\\\", ""))
        if found:
            raise RequestError(
                f"json_schema has the character {found[0]} in {word} at {part.place}, which cannot "
                "be written"
            )


def _check_count(part: Part) -> None:
    """Refuse counts that names which come twice would satisfy."""
    least, required = part.schema.get("minProperties"), part.schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        raise RequestError(
            f"json_schema has minProperties {least} at {part.place}; expected at most one more "
            f"than it has required properties, {named + 1}: name them in `required`"
        )


def _check_reference(part: Part, root: Any) -> None:
    to = part.schema.get("$ref")
    if to is None:
        return
    if not isinstance(to, str):
        raise RequestError(f"json_schema has $ref {short(to)} at {part.place}; expected a text")
    if not to.startswith("#") and "$id" not in root:
        raise RequestError(
            f"json_schema has $ref {short(to)} at {part.place}, which lies elsewhere, and nothing "
            "is fetched; put it under $defs and write '#/$defs/name'"
        )


def _check_remainders(parts: list[Part]) -> None:
    """Refuse multiples that take more than a moment to compile, alone or where they meet."""
    given: list[Any] = [p.schema.get("multipleOf") for p in parts]
    numbers = [v for v in given if type(v) in (int, float)]
    steps = [Fraction(str(v)) for v in numbers if 0 < v <= sys.float_info.max]
    whole = lcm(*(step.denominator for step in steps))
    remainders = lcm(*(int(step * whole) for step in steps))
    if remainders > _MOST_REMAINDERS:
        known = ", ".join(short(float(step)) for step in steps[:4])
        raise RequestError(
            f"json_schema has multipleOf {known}: remainders to tell apart beyond "
            f"{_MOST_REMAINDERS}; use a smaller one"
        )


def _check_size(parts: list[Part]) -> None:
    """Refuse what takes the compiler more than a few seconds, or more stack than there is."""
    references = {p.schema["$ref"] for p in parts if "$ref" in p.schema}
    deepest = max((p.depth for p in parts), default=0)
    own: dict[str, int] = {}
    for part in parts:
        steps = part.place.split("/")
        if steps[1:2] in (["$defs"], ["definitions"]):
            name = "/".join(steps[:3])
            own[name] = max(own.get(name, 0), part.depth - 1)
    levels = deepest + sum(own.get(to, deepest) for to in references)
    if levels > _MOST_LEVELS:
        raise RequestError(
            f"json_schema has {len(references)} references, with up to {levels} levels within "
            f"each other; expected up to {_MOST_LEVELS}"
        )
    for part in parts:
        for word, most in _MOST_OF.items():
            held = part.schema.get(word)
            if isinstance(held, (list, Mapping)) and len(held) > most:
                raise RequestError(
                    f"json_schema has {len(held)} {word} at {part.place}; expected up to {most}"
                )


def _unenforced(word: str, place: str) -> RequestError:
    return RequestError(
        f"json_schema has {word} at {place}, which cannot be enforced; leave it out, or say it "
        "with other keywords"
    )
