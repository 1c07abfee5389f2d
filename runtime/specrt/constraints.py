"""What a whole completion must match: a JSON Schema, a regular expression, a choice, a grammar.

A schema that cannot be enforced in full is refused by the name of the keyword.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from math import gcd, lcm
from reprlib import repr as short
from typing import Any, NamedTuple

from specrt.errors import RequestError, first_line
from specrt.json_schema import (
    ENFORCED,
    Path,
    SchemaPart,
    escaped_characters,
    open_place,
    references,
    says_nothing,
    schema_parts,
    values,
)

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


_LARK = re.compile(rf"(?:#|//)[^\n]*|{_QUOTED}|<[^<>\s]+>|(%json\b\s*)|&")
"""What `%json` and `&` are part of and mean nothing, and they themselves."""

_MOST_MEETING = 8
"""Expressions that a text must match at once: the compiler's time doubles with each."""


def schemas_within(grammar: str) -> Iterator[tuple[slice, Any]]:
    """Go through the schemas of a Lark grammar: each with its place in the text."""
    at = 0
    while found := _LARK.search(grammar, at):
        at = found.end()
        if found[1]:
            with suppress(ValueError, RecursionError):  # what the compiler refuses
                schema, end = json.JSONDecoder().raw_decode(grammar, at)
                yield slice(at, end), schema
                at = end


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
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        check_unicode("json_schema", text)
        return text
    except (TypeError, ValueError) as error:
        if "Circular" not in str(error):
            raise RequestError(f"json_schema is not a JSON: {error}") from None
        raise RequestError("json_schema is nested too deep, or within itself") from None
    except RecursionError:
        raise RequestError("json_schema is nested too deep, or within itself") from None


def _parsed(text: str) -> Any:
    """Read a schema's text; NaN and infinities, which Python reads, are not JSON."""

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
    check_unicode(name, given)


def check_unicode(name: str, given: str) -> None:
    """Refuse half a character.

    Raises: RequestError.
    """
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
    meeting = sum(found[0] == "&" for found in _LARK.finditer(text))
    if meeting >= _MOST_MEETING:
        raise RequestError(f"grammar has {meeting} &; expected fewer than {_MOST_MEETING}")
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

    @property
    def side(self) -> int:
        """1 of what is below the numbers, -1 of what is above."""
        return 1 if self.word.endswith("inimum") else -1

    @property
    def whole_and_open(self) -> bool:
        """Whether the number itself is ruled out, and has no decimals."""
        return self.word.startswith("exclusive") and self.value.denominator == 1


def check_numbers(parts: Sequence[SchemaPart]) -> None:
    """Refuse numbers that would lose digits, and open bounds that would admit themselves.

    An open bound that is whole admits itself where another bound lies less than 1 away; in the same
    schema, or where schemas meet.
    Raises: RequestError.
    """
    for part in parts:
        for word in (*BOUNDS, "multipleOf", "const", "enum"):
            for number in values(part.schema.get(word)):
                if type(number) in (int, float) and abs(number) > MOST:
                    raise RequestError(
                        f"json_schema has {word} {short(number)} at {part.place}; expected numbers "
                        f"up to {MOST}"
                    )
    meet = any("allOf" in part.schema or "$ref" in part.schema for part in parts)
    each = [list(_bounds(part)) for part in parts]
    for bounds in [[b for own in each for b in own]] if meet else each:
        _check_open(bounds)


def _check_open(bounds: Sequence[Bound]) -> None:
    """Refuse a whole open bound whose nearest opposite one is less than 1 away."""
    for side in (1, -1):
        ends = sorted(b.value * side for b in bounds if b.side == -side)
        for bound in (b for b in bounds if b.side == side and b.whole_and_open):
            value = bound.value * side
            at = bisect_right(ends, value)
            if at < len(ends) and ends[at] - value < 1:
                raise RequestError(
                    f"json_schema has {bound.word} {float(bound.value):g} at {bound.place}, "
                    "which cannot be enforced next to a bound less than 1 away; use one that "
                    "is not whole"
                )


def _bounds(part: SchemaPart) -> Iterator[Bound]:
    schema = part.schema
    if schema.get("type") == "integer":
        return
    for word in BOUNDS:
        value = schema.get(word)
        if value is True:  # until draft 4: the other bound is open
            value = schema.get(word.replace("exclusiveM", "m"))
        if type(value) in (int, float):
            yield Bound(part.place, word, Fraction(str(value)))


FORMATS = (
    "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
)  # fmt: skip

_MOST_REMAINDERS = 20_000
"""Distinct remainders that a grammar has states for; compiling takes the square of their number."""

_MOST_LEVELS = 2000
"""The compiler follows them by recursion; half as many again overflow its stack."""

_MOST_OF = {"patternProperties": 100, "anyOf": 1000, "oneOf": 500, "allOf": 500, "required": 10_000}


def check_schema(schema: Any) -> None:
    """Refuse what the compiler would ignore or get wrong, and what is too much for it.

    The compiler refuses what a keyword cannot hold, references that lead nowhere, and most schemas
    that nothing satisfies.
    Raises: RequestError naming keyword and place.
    """
    if not isinstance(schema, (bool, Mapping)):
        raise RequestError(f"json_schema is {short(schema)}; expected an object or true")
    parts = schema_parts(schema)
    for part in parts:
        _check_keywords(part)
        _check_count(part)
    _check_characters(parts)
    check_numbers(parts)
    _check_remainders(parts)
    _check_size(parts)


def check_names(schema: Any) -> None:
    """Refuse a schema within a grammar that a name spelt with escapes would go past.

    Raises: RequestError.
    """
    place = open_place(schema_parts(schema))
    if place is not None:
        raise RequestError(
            f"grammar has %json with properties at {place} and others next to them; expected "
            "additionalProperties false and no patternProperties, or json_schema in the place of "
            "a grammar"
        )


def _check_keywords(part: SchemaPart) -> None:
    for word in part.schema:
        if word not in ENFORCED and not says_nothing(word, part.schema):
            raise RequestError(
                f"json_schema has {short(word)} at {part.place}, which cannot be enforced; leave "
                "it out, or say it with other keywords"
            )
    if "prefixItems" in part.schema and isinstance(part.schema.get("items"), list):
        raise RequestError(
            f"json_schema has a list of items next to prefixItems at {part.place}; leave one out"
        )
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


def _check_characters(parts: list[SchemaPart]) -> None:
    """Refuse texts that take escapes where these could spell a name past its schema."""
    place = open_place(parts)
    if place is None:
        return
    for part in parts:
        for word, character in escaped_characters(part.schema):
            raise RequestError(
                f"json_schema has {word} with U+{ord(character):04X} at {part.place}, which takes "
                f"an escape that could spell a name past the properties at {place}; expected "
                "additionalProperties false there and no patternProperties"
            )


def _check_meeting(parts: list[SchemaPart], leads: Mapping[Path, Path]) -> None:
    """Refuse more expressions than a text may have to match at once, where schemas meet."""
    met = _met(parts, leads)
    names: list[str | int | None] = []
    found: Counter[str | int | None] = Counter()
    for part in parts:
        step = part.path[len(parts[part.parent].path) :] if part.path else (None,)
        in_place = step[0] in ("allOf", "anyOf", "oneOf")
        alone = step[0] in ("$defs", "definitions", "patternProperties", "additionalProperties")
        names.append(names[part.parent] if in_place else None if alone else step[-1])
        if part.path in met:
            dated = part.schema.get("format") in ("date", "date-time")
            found[names[-1]] += ("pattern" in part.schema) + ("format" in part.schema) + dated
    anywhere = found.pop(None, 0)
    most = anywhere + max(found.values(), default=0)
    if most > _MOST_MEETING:
        raise RequestError(
            f"json_schema has {most} expressions (pattern, format) that may meet through allOf, "
            f"anyOf or $ref; expected up to {_MOST_MEETING}"
        )


def _met(parts: list[SchemaPart], leads: Mapping[Path, Path]) -> set[Path]:
    """Return the places within schemas that the compiler makes one of several."""
    within: dict[Path, list[Path]] = {}
    for part in parts[1:]:
        within.setdefault(parts[part.parent].path, []).append(part.path)
    left = [part.path for part in parts if _meets(part.schema)]
    met: set[Path] = set()
    while left:
        path = left.pop()
        if path not in met:
            met.add(path)
            left += within.get(path, [])
            left += [leads[path]] if path in leads else []
    return met


def _meets(schema: Mapping[str, Any]) -> bool:
    words = schema.keys() & ENFORCED - {"$defs", "definitions", "type"}
    every = schema.get("allOf")
    joining = words & {"allOf", "anyOf", "oneOf", "$ref"}
    return bool(joining) and (len(words) > 1 or (isinstance(every, list) and len(every) > 1))


def _check_remainders(parts: list[SchemaPart]) -> None:
    """Refuse multiples that take more than a moment to compile, alone or where they meet."""
    given: list[Any] = [p.schema.get("multipleOf") for p in parts]
    numbers = [v for v in given if type(v) in (int, float)]
    steps = {Fraction(str(v)) for v in numbers if 0 < v <= sys.float_info.max}
    above = below = 1
    shared = 0
    for step in steps:
        above, below = lcm(above, step.numerator), lcm(below, step.denominator)
        shared = gcd(shared, step.denominator)
        if above * (below // shared) > _MOST_REMAINDERS:
            raise RequestError(
                f"json_schema has multipleOf {short(float(step))}: remainders to tell apart beyond "
                f"{_MOST_REMAINDERS}; use a smaller one"
            )


def _check_size(parts: list[SchemaPart]) -> None:
    """Refuse what takes the compiler more than a few seconds, or more stack than there is."""
    lowest = [part.depth for part in parts]
    for number in reversed(range(1, len(parts))):
        around = parts[number].parent
        lowest[around] = max(lowest[around], lowest[number])
    levels_at = {p.path: low - p.depth + 1 for p, low in zip(parts, lowest, strict=True)}
    leads = references(parts)
    _check_meeting(parts, leads)
    targets = set(leads.values())
    levels = levels_at.get((), 0) + sum(levels_at.get(target, 0) for target in targets)
    if levels > _MOST_LEVELS:
        raise RequestError(
            f"json_schema has {len(targets)} references, with up to {levels} levels within "
            f"each other; expected up to {_MOST_LEVELS}"
        )
    for part in parts:
        for word, most in _MOST_OF.items():
            items = part.schema.get(word)
            if isinstance(items, (list, Mapping)) and len(items) > most:
                raise RequestError(
                    f"json_schema has {len(items)} {word} at {part.place}; expected up to {most}"
                )
