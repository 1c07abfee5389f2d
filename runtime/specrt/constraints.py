"""What a whole completion must match: a JSON Schema, a regular expression, a choice, a grammar.

A schema that cannot be enforced in full is refused by the name of the keyword.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from fractions import Fraction
from math import lcm
from reprlib import repr as short
from typing import Any, NamedTuple

from specrt.errors import RequestError, first_line

KINDS = ("json_schema", "regex", "choice", "grammar")

_QUOTED = r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/'

_HEAD = re.compile(rf'^[ \t]*[?!]?\w+[ \t]*\[((?:{_QUOTED}|[^\]"/])*)\]', re.MULTILINE)

_UNENFORCED = {
    "max_tokens": "which is not enforced; leave it out, and use the request's own max_tokens",
    "temperature": "which is not enforced; leave it out, and use the request's own temperature",
    "stop": "which cannot be taken back where a drafted token is refused; use suffix",
}

_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+[^\n:\"/]*:|\(", re.MULTILINE)

_MOST_RULES = 1000
"""Rules and brackets of a grammar: the compiler goes through them by recursion, and some thousands
within each other are more than its stack holds."""

_LONGEST = {"regex": 10_000, "choice": 100_000, "grammar": 50_000}
"""Characters. Longer ones take more than a few seconds to compile."""


class Constraint(NamedTuple):
    """A constraint of the whole text, checked as far as that takes no vocabulary."""

    kind: str
    """One of KINDS."""
    text: str
    """The JSON of a schema, an expression (of a choice too), or a grammar."""


def constraint_of(
    json_schema: Any, regex: str | None, choice: tuple[str, ...] | None, grammar: str | None
) -> Constraint | None:
    """Return the one constraint that was given.

    Raises: RequestError for several, and for one that cannot be enforced.
    """
    given = dict(zip(KINDS, (json_schema, regex, choice, grammar), strict=True))
    kinds = [kind for kind in KINDS if given[kind] is not None]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise RequestError(f"{' and '.join(kinds)} were given; expected one of them")
    kind = kinds[0]
    if kind == "json_schema":
        return Constraint(kind, json_schema)
    if kind == "choice":
        return Constraint(kind, "|".join(map(re.escape, choice or ())))
    return Constraint(kind, given[kind])


def schema_text(given: Any) -> str | None:
    """Return the JSON of a schema: a mapping, a text of one, `true`, or a pydantic model.

    Raises: RequestError.
    """
    if given is None:
        return None
    try:
        if hasattr(given, "model_json_schema"):
            given = given.model_json_schema()
    except Exception as error:  # whatever the model raises
        reason = first_line(error)
        raise RequestError(f"json_schema is a model without a schema: {reason}") from None
    try:
        # As JSON has it: tuples are lists, and names are texts.
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        schema = _parsed(text)
        check_schema(schema)
        return json.dumps(schema, allow_nan=False, ensure_ascii=True)
    except (TypeError, ValueError) as error:
        if "Circular" not in str(error):
            raise RequestError(f"json_schema is no JSON: {error}") from None
        raise RequestError("json_schema is nested too deep, or within itself") from None
    except RecursionError:
        raise RequestError("json_schema is nested too deep, or within itself") from None


def _parsed(text: str) -> Any:
    """Read a schema's text; NaN and infinities, which Python reads, are no JSON."""

    def refuse(name: str) -> Any:
        raise ValueError(f"it holds {name}")

    return json.loads(text, parse_constant=refuse)


def check_choice(given: tuple[str, ...]) -> None:
    """Refuse a choice between nothing, and texts that cannot come."""
    if not given:
        raise RequestError("choice is empty; expected the texts to choose from")
    if "" in given:
        raise RequestError("choice holds an empty string; leave it out")
    for text in given:
        check_text("choice", text)
    _check_length("choice", sum(map(len, given)))


def check_text(name: str, given: Any) -> None:
    """Refuse another type than text, and half a character.

    Raises: RequestError.
    """
    if not isinstance(given, str) or not given:
        raise RequestError(f"{name} is {short(given)}; expected a text")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode at character {error.start}: {error.reason}"
        ) from None


def check_regex(given: Any) -> None:
    """Refuse another type than text, and a text that is too long.

    Raises: RequestError.
    """
    check_text("regex", given)
    _check_length("regex", len(given))


def _check_length(name: str, length: int) -> None:
    if length > _LONGEST[name]:
        raise RequestError(f"{name} has {length} characters; expected up to {_LONGEST[name]}")


def check_grammar(text: Any) -> None:
    """Refuse attributes that would be ignored, and more rules than can be compiled.

    Raises: RequestError.
    """
    check_text("grammar", text)
    _check_length("grammar", len(text))
    rules = len(_RULE.findall(text))
    if rules > _MOST_RULES:
        raise RequestError(
            f"grammar has {rules} rules and brackets; expected up to {_MOST_RULES} together"
        )
    for head in _HEAD.finditer(text):
        attributes = re.sub(_QUOTED, "", head[1])
        for word, why in _UNENFORCED.items():
            if re.search(rf"\b{word}\s*=", attributes):
                raise RequestError(f"grammar has {word} in {short(head[0].strip())}, {why}")
    for place in re.finditer(r"%json\b", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text[place.end() :].lstrip())
        except (ValueError, RecursionError):
            continue  # within a string, or what the compiler refuses
        if isinstance(schema, (bool, Mapping)):
            check_schema(schema)
            check_names(schema)


MOST = 1 << 53
"""Whole numbers above lose their last digits in the compiler."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Bound(NamedTuple):
    """A bound of a number, and where it stands."""

    place: str
    word: str
    value: Fraction


def check_numbers(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse numbers that would lose digits, and open bounds that would admit themselves.

    `parts` are all schemas within a schema, with their places. An open bound that is whole admits
    itself where another bound lies less than 1 away; in the same schema, or where schemas meet.
    Raises: RequestError.
    """
    for place, schema in parts:
        for word in (*BOUNDS, "multipleOf", "const", "enum"):
            for number in _numbers(schema.get(word)):
                if abs(number) > MOST:
                    raise RequestError(
                        f"json_schema has {word} {short(number)} at {place}; expected numbers up "
                        f"to {MOST}"
                    )
    meet = any("allOf" in schema or "$ref" in schema for _, schema in parts)
    each = [list(_bounds(place, schema)) for place, schema in parts]
    for bounds in [[b for own in each for b in own]] if meet else each:
        _check_open(bounds)


def _check_open(bounds: Sequence[Bound]) -> None:
    for low in (b for b in bounds if b.word in ("minimum", "exclusiveMinimum")):
        for high in (b for b in bounds if b.word in ("maximum", "exclusiveMaximum")):
            for bound in (low, high):
                whole = bound.word.startswith("exclusive") and bound.value.denominator == 1
                if whole and 0 < high.value - low.value < 1:
                    raise RequestError(
                        f"json_schema has {bound.word} {float(bound.value):g} at {bound.place}, "
                        "which cannot be enforced beside a bound less than 1 away; use one that "
                        "is not whole"
                    )


def _bounds(place: str, schema: Mapping[str, Any]) -> Iterator[Bound]:
    if schema.get("type") == "integer":
        return
    for word in BOUNDS:
        value = schema.get(word)
        if type(value) in (int, float):
            yield Bound(place, word, Fraction(str(value)))


def _numbers(value: Any) -> Iterator[int | float]:
    """Go through the numbers of a JSON value."""
    stack = [value]
    while stack:
        one = stack.pop()
        if type(one) in (int, float):
            yield one
        elif isinstance(one, Mapping):
            stack.extend(one.values())
        elif isinstance(one, list):
            stack.extend(one)


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
"""Distinct remainders that a grammar has states for; compiling takes the square of their number."""

_LONGEST_NAME = 60

_MOST_LEVELS = 2000
"""The compiler follows them by recursion; half as many again overflow its stack."""

_MOST_OF = {"patternProperties": 100, "anyOf": 1000, "oneOf": 500, "allOf": 500, "required": 10_000}


_YEAR = r"([1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"

_LEAP_YEAR = (
    r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"  # never 0000
)

_REAL_DATE = rf"^({_YEAR}-(0[13-9]|1[0-2])-|{_YEAR}-02-([01]\d|2[0-8])|{_LEAP_YEAR}-02-29)"


class SchemaPart(NamedTuple):
    """A schema within a schema, the JSON pointer that leads there, and how deep it lies."""

    place: str
    schema: Mapping[str, Any]
    depth: int


def check_schema(schema: Any) -> None:
    """Refuse what the compiler would ignore or get wrong, and what is too much for it.

    The compiler refuses what a keyword cannot hold, references that lead nowhere, and most schemas
    that nothing satisfies.
    Raises: RequestError naming keyword and place.
    """
    if not isinstance(schema, (bool, Mapping)):
        raise RequestError(f"json_schema is {short(schema)}; expected an object or true")
    parts = list(schema_parts(schema, "#"))
    for part in parts:
        _check_keywords(part)
        _check_count(part)
    draft = str(schema.get("$schema")) if isinstance(schema, Mapping) else ""
    for part in parts:
        if "draft-0" in draft and "prefixItems" in part.schema:
            raise _unenforced(f"prefixItems, which {short(draft)} has not,", part.place)
    check_numbers([(part.place, part.schema) for part in parts])
    _check_remainders(parts)
    _check_size(parts)


def check_names(schema: Any) -> None:
    """Refuse a schema within a grammar that a name spelt with escapes would go past.

    Raises: RequestError.
    """
    for part in schema_parts(schema, "#"):
        closed = part.schema.get("additionalProperties", True) is False
        if "patternProperties" in part.schema or ("properties" in part.schema and not closed):
            raise RequestError(
                f"grammar has %json with properties at {part.place} and others beside them; "
                "expected additionalProperties false and no patternProperties, or json_schema in "
                "the place of a grammar"
            )


def schema_parts(schema: Any, place: str, depth: int = 1) -> Iterator[SchemaPart]:
    """Go through a schema and all within it."""
    if not isinstance(schema, Mapping):
        return
    yield SchemaPart(place, schema, depth)
    depth += 1
    for word in SCHEMAS_BY_NAME:
        if isinstance(schema.get(word), Mapping):
            for name, inner in schema[word].items():
                yield from schema_parts(inner, f"{place}/{word}/{_shown(name)}", depth)
    for word in LISTS_OF_SCHEMAS:
        if isinstance(schema.get(word), list):
            for at, inner in enumerate(schema[word]):
                yield from schema_parts(inner, f"{place}/{word}/{at}", depth)
    for word in SCHEMAS:
        yield from schema_parts(schema.get(word), f"{place}/{word}", depth)


def with_real_dates(schema: Any) -> Any:
    """Return a schema whose dates are of the calendar: no year 0, February 29 in leap years only.

    The compiler's own pattern of a date has four digits and the days of each month.
    """
    schema = deepcopy(schema)
    for part in schema_parts(schema, "#"):
        if part.schema.get("format") in ("date", "date-time"):
            dated: dict[str, Any] = part.schema  # type: ignore[assignment]
            dated["allOf"] = [*dated.get("allOf", ()), {"pattern": _REAL_DATE}]
    return schema


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) < _LONGEST_NAME else short(name)


def _check_keywords(part: SchemaPart) -> None:
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


def _check_count(part: SchemaPart) -> None:
    """Refuse counts that names which come twice would satisfy."""
    least, required = part.schema.get("minProperties"), part.schema.get("required")
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        raise RequestError(
            f"json_schema has minProperties {least} at {part.place}; expected at most one more "
            f"than it has required properties, {named + 1}: name them in `required`"
        )


def _check_remainders(parts: list[SchemaPart]) -> None:
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


def _check_size(parts: list[SchemaPart]) -> None:
    """Refuse what takes the compiler more than a few seconds, or more stack than there is."""
    references = {str(p.schema["$ref"]) for p in parts if "$ref" in p.schema}
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
            items = part.schema.get(word)
            if isinstance(items, (list, Mapping)) and len(items) > most:
                raise RequestError(
                    f"json_schema has {len(items)} {word} at {part.place}; expected up to {most}"
                )


def _unenforced(word: str, place: str) -> RequestError:
    return RequestError(
        f"json_schema has {word} at {place}, which cannot be enforced; leave it out, or say it "
        "with other keywords"
    )
