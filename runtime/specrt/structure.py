"""What a request says of its whole text: a JSON Schema, an expression, a choice, a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

from specrt.errors import RequestError
from specrt.keywords import check_names, check_schema

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


class Structure(NamedTuple):
    """A constraint of the whole text, checked as far as that takes no vocabulary."""

    kind: str
    """One of KINDS."""
    text: str
    """The JSON of a schema, an expression (of a choice too), or a grammar."""


def structure_of(
    json_schema: Any, regex: str | None, choice: tuple[str, ...] | None, grammar: str | None
) -> Structure | None:
    """Return the one constraint that was given.

    Raises: RequestError for several, and for one that cannot be enforced.
    """
    given = dict(zip(KINDS, (json_schema, regex, choice, grammar), strict=True))
    asked = [kind for kind in KINDS if given[kind] is not None]
    if not asked:
        return None
    if len(asked) > 1:
        raise RequestError(f"{' and '.join(asked)} were given; expected one of them")
    kind = asked[0]
    if kind == "json_schema":
        return Structure(kind, json_schema)
    if kind == "choice":
        return Structure(kind, "|".join(map(re.escape, choice or ())))
    return Structure(kind, given[kind])


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
        raise RequestError(f"json_schema is a model without a schema: {error}") from None
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
    """Refuse what is no text, or half of one.

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
    """Refuse what is no text of an expression.

    Raises: RequestError.
    """
    check_text("regex", given)
    _check_length("regex", len(given))


def _check_length(name: str, length: int) -> None:
    if length > _LONGEST[name]:
        raise RequestError(f"{name} has {length} characters; expected up to {_LONGEST[name]}")


def check_grammar(text: Any) -> None:
    """Refuse what a grammar may say that would be ignored, and more than can be compiled.

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
        said = re.sub(_QUOTED, "", head[1])
        for word, why in _UNENFORCED.items():
            if re.search(rf"\b{word}\s*=", said):
                raise RequestError(f"grammar has {word} in {short(head[0].strip())}, {why}")
    for place in re.finditer(r"%json\b", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text[place.end() :].lstrip())
        except (ValueError, RecursionError):
            continue  # within a string, or what the compiler refuses
        if isinstance(schema, (bool, Mapping)):
            check_schema(schema)
            check_names(schema)
