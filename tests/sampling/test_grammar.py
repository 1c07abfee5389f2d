"""What a schema, an expression or a grammar says holds after any path, or is refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrt.constraints import Constraint
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.json_schema import rooted
from specrt.params import SamplingParams
from specrt.sampling.grammar import GrammarProcessor, Grammars
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.target import VERIFIERS
from specrt.text.tokenizer import Tokenizer
from support.schemas import SCHEMAS, STRUCTURES, Asked
from support.toy import TableEngine, byte_level, generator, near, sentencepiece

pytest.importorskip("llguidance", reason="needs the structured extra")

VOCABULARY, EOS, TOOL = 272, 263, 264
PROMPT = [65, 66]


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [EOS, 9999], VOCABULARY)


def processor(
    grammars: Grammars, *committed: int, stops: tuple[int, ...] = (), **option: Any
) -> GrammarProcessor:
    """Return what keeps to a structure after a prompt and some tokens."""
    structure = SamplingParams.of(**option).constraint
    assert structure is not None
    made = grammars.processor(structure, stops)
    made.commit(PROMPT)
    if committed:
        made.commit(committed)
    return made


def allowed(made: GrammarProcessor, *path: int) -> list[int]:
    """Return the tokens that may follow a path; what is left has the score it had."""
    row = np.arange(VOCABULARY, dtype=np.float32)
    made.edit(row, path)
    kept: NDArray[np.int64] = np.flatnonzero(row > -np.inf)
    assert (row[kept] == kept).all()
    return [int(token) for token in kept]


@given(asked=STRUCTURES, data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_mask_behind_any_path_is_that_of_a_fresh_matcher(
    grammars: Grammars, asked: Asked, data: st.DataObject
) -> None:
    """Rows in any order, paths that branch, leave the grammar and go past its end."""
    made, text = processor(grammars, **asked.option), list[int]()
    for _ in range(4):
        for _ in range(data.draw(st.integers(0, 4))):
            path = list[int]()
            for _ in range(data.draw(st.integers(0, 5))):
                ways = allowed(processor(grammars, *text, **asked.option), *path)
                stray = st.integers(0, VOCABULARY - 1)
                path.append(data.draw(st.one_of(st.sampled_from(ways), stray)))
            fresh = processor(grammars, *text, **asked.option)
            assert allowed(made, *path) == allowed(fresh, *path)
        ways = [t for t in allowed(made) if t != EOS]
        if not ways:
            break
        token = data.draw(st.sampled_from(ways))
        made.commit([token])
        text.append(token)


EVERYTHING = list(range(VOCABULARY))
A, B, C = b"abc"
BEHIND: list[tuple[dict[str, Any], tuple[int, ...], list[int]]] = [
    ({"regex": "ab?"}, (), [A]),
    ({"regex": "ab?"}, (A,), [B, EOS]),
    ({"regex": "ab?"}, (A, B), [EOS]),
    # After the end, and on a drafted path outside the grammar, nothing is ruled out.
    ({"regex": "ab?"}, (A, EOS), EVERYTHING),
    ({"regex": "ab?"}, (A, B, EOS, A), EVERYTHING),
    # The model scores more ids than the tokenizer has, and special tokens are not text.
    ({"regex": "[\\x00-\\x7f]*"}, (), [*range(128), *range(256, 261), EOS]),
    # Special tokens among the stops end where the end may come.
    ({"regex": "ab?", "stops": (TOOL, B)}, (A,), [B, EOS, TOOL]),
    ({"regex": "ab?", "stops": (TOOL, B)}, (A, B), [EOS, TOOL]),
    ({"regex": "ab?", "stops": (TOOL, B)}, (A, TOOL), EVERYTHING),
    # A special token may be part of a grammar, and an end may not.
    ({"grammar": 'start: "a" <|tool|> "b"'}, (A,), [TOOL]),
    ({"grammar": 'start: "b" | "c" <[263]>'}, (C,), []),
]


@pytest.mark.parametrize(("option", "path", "ways"), BEHIND, ids=lambda v: str(v)[:40])
def test_what_may_follow(
    grammars: Grammars, option: dict[str, Any], path: tuple[int, ...], ways: list[int]
) -> None:
    assert allowed(processor(grammars, **option), *path) == ways
    made = processor(grammars, *path, **option)
    assert allowed(made) == ways
    assert ways != EVERYTHING or not made.forced()


def test_a_text_that_leaves_its_grammar_fails_and_a_drafted_path_does_not(
    grammars: Grammars,
) -> None:
    made = processor(grammars, regex="ab?")
    assert allowed(made, C) == allowed(made, A, C) == allowed(made, A, B, A) == EVERYTHING
    assert allowed(made) == [A]
    for text, wrong in (([C], C), ([A, C], C), ([A, A, EOS], A), ([A, B, C, A], C)):
        with pytest.raises(RequestError, match=f"constraint at token {wrong}"):
            processor(grammars, *text, regex="ab?")
    made.commit([A, EOS, C])
    assert allowed(made) == EVERYTHING


def test_a_matcher_that_gave_up_is_replaced(grammars: Grammars) -> None:
    """The limit is met after one path; after another the text goes on."""
    rules = "\n".join(f"r{i}: r{i + 1}? r{i + 1}?" for i in range(40))
    hard = f'start: "b" | "a" r0\n{rules}\nr40: "a"'
    made = processor(grammars, grammar=hard)
    for _ in range(2):
        with pytest.raises(RequestError, match="became too complex to follow: ") as raised:
            [allowed(made, *[A] * depth) for depth in range(1, 60)]
        assert "\n" not in str(raised.value)
        assert (allowed(made), allowed(made, B)) == ([A, B], [EOS])


def test_where_nothing_can_follow_that_is_told(grammars: Grammars) -> None:
    """Every name of the pattern is a property, so none is left once that stands there."""
    schema = OBJECT | {"properties": {"a": NULL}, "patternProperties": {"^a$": NULL}}
    made = processor(grammars, json_schema={**schema, "additionalProperties": False})
    for _ in range(2):
        with pytest.raises(RequestError, match="nothing that the constraint admits"):
            allowed(made, *b'{"a":null,  ')
        assert allowed(made, *b'{"a":null}') == [EOS]


def test_a_text_whose_grammar_takes_too_long_fails_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every mask seems to take 30 ms of the processor."""
    clock = count(step=30_000_000)
    monkeypatch.setattr("specrt.sampling.grammar.thread_time_ns", lambda: next(clock))
    one = generator(TableEngine(3, vocab=VOCABULARY, batch=2), None, tokenizer, eos=[EOS])
    asked = [SamplingParams(max_tokens=40, regex="[a-z]{40}"), SamplingParams(max_tokens=40)]
    (slow,), (free,) = one.generate_many([PROMPT] * 2, asked)
    assert (slow.finish_reason, free.finish_reason) == ("error", "length")
    assert "the constraint took 2" in str(slow.error)
    assert 0 < len(slow.token_ids) < 20


def test_what_a_model_or_an_installation_lacks_is_told(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="this model has no end token to end its text with"):
        processor(Grammars(tokenizer, [], VOCABULARY), regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="llguidance, which is not installed here; install"):
        processor(Grammars(tokenizer, [EOS], VOCABULARY), regex="a")


def test_what_was_compiled_for_another_salt_is_compiled_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long it takes tells no one what others' requests were constrained to."""
    import llguidance

    grammars, compiled = Grammars(tokenizer, [EOS], VOCABULARY), list[str]()
    honest = llguidance.LLMatcher.grammar_from_regex

    def compiling(expression: str) -> str:
        compiled.append(expression)
        return honest(expression)

    monkeypatch.setattr(llguidance.LLMatcher, "grammar_from_regex", compiling)
    for salt in ("a", "a", "b", "", "b"):
        grammars.processor(Constraint("regex", "x+"), salt=salt)
    assert len(compiled) == 3


# Output


WORDS = list(b"the thing in")


Pair = Callable[[int], Generator]


@pytest.fixture(scope="module")
def pair(tokenizer: Tokenizer) -> Pair:
    """Makes a generator whose draft is like its target, or knows fewer tokens."""

    def made(seed: int) -> Generator:
        target = TableEngine(seed, vocab=VOCABULARY, memory=3)
        draft = near(target, seed + 1, 0.8) if seed % 4 else TableEngine(seed, vocab=120)
        return generator(target, draft, tokenizer, eos=[EOS])

    return made


MORE: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "presence_penalty": 1.0},
    {"no_repeat_ngram_size": 5},
    {"logit_bias": {99: 50.0, EOS: 50.0}},
    {"logits_processors": [lambda tokens, row: row * 0 + len(tokens) % 3]},
    {"allowed_token_ids": [*range(262), EOS]},  # all that a forced text is spelled in
    {"min_tokens": 1},
    {"top_k": 2},
]


@given(
    asked=STRUCTURES,
    more=st.sampled_from(MORE),
    seed=st.integers(0, 9),
    gamma=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    drafter=st.sampled_from(list(DRAFTERS)),
    verifier=st.sampled_from(list(VERIFIERS)),
    most=st.integers(1, 120),
)
@settings(deadline=None, max_examples=20)
def test_a_text_keeps_to_its_grammar_and_speculation_changes_no_token(
    pair: Pair, asked: Asked, more: dict[str, Any], seed: int, gamma: int,
    temperature: float, drafter: str, verifier: str, most: int,
) -> None:  # fmt: skip
    options: dict[str, Any] = {**asked.option, **more, "max_tokens": most, "verifier": verifier}
    params = SamplingParams(temperature=temperature, seed=seed, **options)
    one = pair(seed)
    try:
        found = one.generate(WORDS, params, gamma=gamma, drafter=drafter)
    except RequestError:  # nothing is left where both together rule out all
        if not more.keys() & {"no_repeat_ngram_size", "min_tokens"}:
            raise
        return
    assert found.finish_reason in ("stop", "length")
    if found.finish_reason == "stop":
        assert found.token_ids[-1] == EOS
        assert asked.holds(found.text), found.text
    if verifier == "match" or params.greedy:
        plain = one.generate(WORDS, params, gamma=0)
        assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
        assert plain.speculation.drafted == 0


@pytest.mark.parametrize("vocabulary", [byte_level, sentencepiece])
@pytest.mark.parametrize("name", ["<s>", "</s>"])
def test_the_name_of_a_control_token_is_text(
    tmp_path: Path, vocabulary: Callable[[Path], Path], name: str
) -> None:
    """A grammar wants what it spells, and not the token, which is not a text."""
    tokenizer = Tokenizer(vocabulary(tmp_path))
    assert tokenizer.encode(name, special=False)[0] in tokenizer.special
    target = TableEngine(1, vocab=tokenizer.size + 7, memory=3)
    (end,) = tokenizer.encode("</s>", special=False)
    one = generator(target, near(target, 2, 0.8), tokenizer, eos=[end])
    for option in (
        {"choice": [f"a{name}b"]}, {"regex": f"a{name}b"}, {"grammar": f'start: "a" "{name}" "b"'},
        {"json_schema": {"const": f"a{name}b"}},
    ):  # fmt: skip
        params = SamplingParams.of(max_tokens=80, temperature=1.0, seed=1, **option)
        texts = [one.generate([5, 6], params, gamma=gamma).text for gamma in (0, 4)]
        wanted = f'"a{name}b"' if "json_schema" in option else f"a{name}b"
        assert texts == [wanted, wanted]


# What is enforced, and what is refused


OBJECT = {"type": "object"}
NULL = {"type": "null"}
LOOP = {**OBJECT, "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
SHAPES: dict[str, Any] = {
    "cat": {**OBJECT, "properties": {"is": {"const": "cat"}}, "required": ["is"],
            "additionalProperties": False},
    "dog": {**OBJECT, "required": ["is"], "additionalProperties": False,
            "properties": {"is": {"$ref": "#/$defs/kind"}, "age": {"$ref": "#/$defs/age"}}},
    "perhaps": {**OBJECT, "properties": {"is": {"const": "cat"}}, "additionalProperties": False},
    "kind": {"type": "string", "enum": ["dog", "wolf"]},
    "age": {"type": "integer"},
    "number": {"type": "number"},
    "any": {"title": "anything"},
    "loop": {"$ref": "#/$defs/loop"},
}  # fmt: skip
ENFORCED: list[tuple[Any, list[str], list[str]]] = [
    ({"properties": {"at": {"format": "date-time"}}}, ['{"at":"2024-02-29T10:00:00Z"}', '{"at":3}'],
     ['{"at":"2023-02-29T10:00:00Z"}', '{"at":"0000-01-01T10:00:00Z"}']),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 11}, ["3", "10"], ["2", "11", "-5"]),
    ({"exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", '"a"'], ["0"]),
    ({"type": "number", "multipleOf": 0.5}, ["1.5"], ["1.25"]),
    ({"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, NULL], "$defs": SHAPES},
     ['{"is":"cat"}', '{"is":"dog","age":3}', '{"is":"wolf"}', "null"],
     ['{"is":"cow"}', '{"is":"cat","age":3}', "{}", "3"]),
    ({"oneOf": [{"$ref": "#/$defs/dog"}, {"$ref": "#/$defs/perhaps"}], "$defs": SHAPES},
     ['{"is":"dog"}', '{"is":"cat"}', "{}"], ['{"is":"cow"}']),
    # Alternatives that a text of a property tells apart, as pydantic writes them.
    ({"discriminator": {"propertyName": "is"}, "$defs": {
        k: {**OBJECT, "properties": {"is": {"const": k}, k: NULL}, "required": ["is"],
            "additionalProperties": False} for k in "ab"},
      "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
     ['{"is":"a","a":null}', '{"is":"b"}'], ['{"is":"a","b":null}', '{"is":"c"}', "{}"]),
    ({"$ref": "#/definitions/x", "minimum": 8, "definitions": {"x": {"type": "integer"}}},
     ["9"], ["7", '"a"']),
    ({"anyOf": [NULL, {"type": "array", "items": {"$ref": "#"}}]}, ["[[null],[]]"], ["[1]"]),
    ({"properties": {"$ref": {"enum": [{"$ref": "#/a"}]}}, "additionalProperties": False,
      "default": {"$ref": "x"}, "examples": [{"$id": 3}]},
     ['{"$ref":{"$ref":"#/a"}}'], ['{"$ref":1}']),
    ({"properties": {"x": rooted(LOOP, ("properties", "x"))}, "additionalProperties": False},
     ['{"x":{"next":{"next":{}}}}'], ['{"x":{"next":{"x":{}}}}']),
    ({"title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c",
      "deprecated": True, "readOnly": True, "x-mine": 1, **NULL}, ["null"], ["1"]),
    # What says nothing, and what the compiler would take for a reason to pass over something else.
    ({"not": False, "uniqueItems": False, "nullable": False, "if": {}, "unevaluatedItems": True,
      "then": True, "minContains": 3, "dependentRequired": {"a": []}, "dependentSchemas": {},
      "unevaluatedProperties": {}, "discriminator": {"propertyName": "a"}, **NULL},
     ["null"], ["1"]),
    *((OBJECT | {"propertyNames": any_, "additionalProperties": NULL}, ['{"a":null}'], ['{"a":1}'])
      for any_ in ({"type": "string"}, {"type": ["null", "string"], "title": "t"}, True, {})),
    ({"prefixItems": [NULL], "additionalItems": False}, ["[null,1]"], ["[1]"]),
    ({"$schema": "https://json-schema.org/draft/2019-09/schema", "prefixItems": [NULL]}, ["[]"],
     ["[1]"]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, ["5"], ["6"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://a.example/b/",
      "allOf": [{"$id": "http://a.example/", "$ref": "c"}], "definitions": {
          "x": {"$id": "http://a.example/c", "type": "string"}, "y": {"$id": "c", **NULL}}},
     ["null"], ['"a"']),
    ({"type": "integer"}, ["-9223372036854774784", "1234567890123456789"], ["1" * 20]),
    # Characters that JSON strings have as escapes alone.
    *((schema, [f'"a\\u00{ord(character):02x}b"'], ['"ab"', '"a\x7fb"', '"a\\u0062"'])
      for character in "\0\x1b\x7f"
      for schema in ({"const": f"a{character}b"}, {"enum": [f"a{character}b"]},
                     {"type": "string", "pattern": f"^a\\x{ord(character):02x}b$"},
                     {"type": "string", "pattern": f"^a{character}b$"})),
    ({"const": {"\x01": ["\x02\x03"]}}, ['{"\\u0001":["\\u0002\\u0003"]}'], ['{"":[""]}']),
    ({"enum": ["\x80\x9f\u2028𝄞\"\\/"]}, ['"\x80\x9f\u2028𝄞\\"\\\\/"'], ['"\\u0080"']),
    ({"properties": {"a\x01": NULL}}, ['{"a\\u0001":null}', '{"a":1}'], ['{"a\\u0001":1}']),
    *(({"type": "string", "pattern": f"^a{part}$"}, good, bad) for part, good, bad in (
        ("[^\\x00-\\x1f\\x7f]", ['"ab"'], ['"a"']), ("[\\x00-\\x7f]b", ['"acb"'], ['"ab"']),
        ("([\\x7f]c|b)", ['"ab"'], ['"ac"', '"a"']), ("[]\\x01]", ['"a]"'], ['"a"']),
        # Brackets and operators within classes are members, whatever the compiler has them for.
        ("[^[\\x01b]]", ['"ac]"'], ['"ac"', '"a[]"']), ("[[b]c]", ['"a[c]"', '"abc]"'], ['"ab"']),
        ("[^[\\]]", ['"ab"'], ['"a["', '"a]"']), ("[b&&[c]]", ['"a&]"', '"a[]"'], ['"ab"', '"ac"']),
        ("[+--]", ['"a+"', '"a,"', '"a-"'], ['"a."']), ("[b~~c]", ['"ab"', '"a~"'], ['"a"']))),
    ({"type": "string", "minLength": 2, "maxLength": 2, "enum": ["a\x01", "\x01"]},
     ['"a\\u0001"'], ['"a"', '"\\u0001"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda v: str(v)[:60])
def test_keywords_hold(grammars: Grammars, schema: Any, good: list[str], bad: list[str]) -> None:
    def accepts(text: str) -> bool:
        made, path = processor(grammars, json_schema=schema), [*text.encode(), EOS]
        return all(token in allowed(made, *path[:depth]) for depth, token in enumerate(path))

    assert [text for text in (*good, *bad) if accepts(text)] == good


A_KEY: dict[str, Any] = {"a": {"type": "null"}}
UNENFORCED: dict[str, Any] = {
    "uniqueItems": True, "contains": {}, "not": {}, "propertyNames": {"maxLength": 3},
    "dependentRequired": {"a": ["b"]}, "dependentSchemas": A_KEY, "dependencies": A_KEY,
    "unevaluatedProperties": False, "unevaluatedItems": A_KEY["a"], "$dynamicRef": "#a",
    "$recursiveRef": "#", "contentEncoding": "base64", "contentMediaType": "text/html",
    "nullable": True, "minumum": 3, "x-guidance": {}, "$vocabulary": {},
}  # fmt: skip


@pytest.mark.parametrize("place", ["#", "#/properties/a", "#/anyOf/1/items", "#/$defs/b"])
def test_keywords_that_do_not_hold_are_named(place: str) -> None:
    for keyword, value in UNENFORCED.items():
        schema: Any = {keyword: value}
        for step in reversed(place.split("/")[1:]):
            schema = [{}, schema] if step == "1" else {step: schema}
        with pytest.raises(RequestError) as raised:
            SamplingParams(json_schema=schema)
        assert f"json_schema has {keyword!r} at {place}, which cannot" in str(raised.value)


def referring(draw: Callable[[st.SearchStrategy[Any]], Any], schema: Any) -> Any:
    """Return a schema that admits the same, with schemas in other places, by any reference."""
    defs: dict[str, Any] = {}
    names = iter("abcdefgh")

    def moved(inner: Any) -> Any:
        if isinstance(inner, dict):
            inner = {
                word: {n: moved(v) for n, v in one.items()} if word == "properties"
                else [moved(v) for v in one] if word == "anyOf"
                else moved(one) if word == "items" else one
                for word, one in inner.items()
            }  # fmt: skip
        name = next(names, None)
        form = draw(st.sampled_from(["none", "pointer", "anchor", "id", "nested"]))
        if name is None or form == "none":
            return inner
        key = draw(st.sampled_from(["a/b~", "%25", "é ", "<$ref>", "$id"])) + name
        pointer = quote("/$defs/" + key.replace("~", "~0").replace("/", "~1"), safe="/$")
        if form == "pointer":
            defs[key] = inner
            return {"$ref": f"root.json#{pointer}", "title": "t"}
        if form == "anchor":
            defs[key] = {"$anchor": f"anchor-{name}", "anyOf": [inner]}
            return {"$ref": f"root.json#anchor-{name}"}
        # In a root of its own a pointer begins at that root.
        own = {"$id": f"{name}.json", "$defs": {key: {"anyOf": [inner]}}}
        defs[name] = own | {"$ref": f"#{pointer}"}
        return {"$ref": f"{name}.json" + (f"#{pointer}" if form == "nested" else "")}

    return {"$id": "https://a.example/root.json", "anyOf": [moved(schema)], "$defs": defs}


@given(schema=SCHEMAS, data=st.data())
@settings(deadline=None, max_examples=15)
def test_references_lead_where_the_standard_says(
    grammars: Grammars, schema: Any, data: st.DataObject
) -> None:
    """Also within another schema, as a forced call has its tool's."""
    other = referring(data.draw, schema)
    for one in (other, {"prefixItems": [NULL, rooted(other, ("prefixItems", 1))]}):
        plain = {"prefixItems": [NULL, schema]} if one is not other else schema
        made, path = processor(grammars, json_schema=one), list[int]()
        for _ in range(12):
            ways = allowed(processor(grammars, *path, json_schema=plain))
            assert allowed(made, *path) == ways
            path.append(data.draw(st.sampled_from(ways)))
            if path[-1] == EOS:
                break


def test_schemas_within_a_grammar_are_read_alike(grammars: Grammars) -> None:
    """What only looks like one stays as it is."""
    schema = '{"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}'
    grammar = f'start: "%json [ ]" /%json [ ]/ <|tool|> %json {schema} // %json [ ]'
    path = [*b"%json [ ]%json  ", TOOL, *b"5"]
    made = processor(grammars, grammar=grammar)
    assert all(token in allowed(made, *path[:depth]) for depth, token in enumerate(path))
    assert allowed(made, *path[:-1]) == [ord("5")]


class Broken:
    def model_json_schema(self) -> None:
        raise ValueError("no")


CYCLIC: dict[str, Any] = {}
CYCLIC["items"] = CYCLIC
REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]},
                                      "b": {"allOf": [{}, {"$ref": "#"}]}}}, "it admits nothing"),
    ({"properties": {"a": {"const": "\x01"}}}, "has const with U+0001 at #/properties/a, which"),
    ({"properties": {"a": {"pattern": "(?x)[\\a]"}}}, "has pattern with U+0007 at #/properties/a"),
    ({"patternProperties": {"\x7f": {}}}, "has patternProperties with U+007F at #, which takes"),
    ({"type": "string", "pattern": "^[\\x7f]$"}, "it admits nothing"),
    ({"const": "a\ud800"}, "json_schema is not valid Unicode at character"),
    *(({"$ref": to, "x-a": {}, "default": {}, "$defs": {"a": {"$id": "b", "$defs": {"c": {}}}}},
       f"has $ref {to!r} at #, which leads to no schema within it")
      for to in ("#/$defs/b", "#/$defs", "#/default", "#/x-a", "#a", "c", "https://a.example/b#",
                 "b#/$defs/d", "http://[")),
    ({"$ref": 5}, "has $ref 5 at #; expected text"),
    ({"$defs": {"a": {"$id": "b"}, "c": {"$id": "b"}}}, "has 'b' at #/$defs/c a second time"),
    ({"prefixItems": [{}], "items": [{}]}, "has a list of items next to prefixItems at #"),
    ({"type": "string", "format": "idn-email"}, "format 'idn-email' at #; expected one of d"),
    ({**OBJECT, "minProperties": 2}, "minProperties 2 at #; expected at most one more than it"),
    ({"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(40)]},
     "40 expressions (pattern, format) that may meet through allOf"),
    ({"multipleOf": 999983}, "multipleOf 999983.0: remainders to tell apart beyond 20000"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "write anyOf where alternatives may"),
    *(({"oneOf": [{"$ref": f"#/$defs/{one}"}, {"$ref": f"#/$defs/{other}"}], "$defs": SHAPES},
       "write anyOf where alternatives may")
      for one, other in (("cat", "cat"), ("cat", "any"), ("any", "kind"), ("age", "number"),
                         ("perhaps", "perhaps"), ("loop", "cat"))),
    ({"properties": {"a\nb": {"not": {}}}}, "at #/properties/'a\\nb'"),
    ({"allOf": [{"anyOf": [{"required": [f"{a}{i}"]} for a in "ab"]} for i in range(14)]},
     "too large"),
    ({"$ref": "#/$defs/d0", "$defs": {
        f"d{i}": {"items": {"$ref": f"#/$defs/d{(i + 1) % 5000}"}} for i in range(5000)}},
     "5000 references, with up to "),
    ({"anyOf": [{"const": i} for i in range(4000)]}, "4000 anyOf at #; expected up to 1000"),
    ([], "json_schema is []; expected an object or true"),
    ('{"const": NaN}', "json_schema is not a JSON: it holds NaN"),
    ('{"items":' * 100_000, "json_schema is nested too deep"),
    ('{"items":' * 300 + "{}" + "}" * 300, "json_schema cannot be enforced: recursion limit"),
    (CYCLIC, "nested too deep, or within"),
    (Broken(), "a model without a schema: no"),
    ({"enum": [1, [2**53 + 1]]}, "has enum 9007199254740993 at #; expected numbers up to"),
    ({"exclusiveMinimum": 1, "maximum": 1.5}, "has exclusiveMinimum 1 at #, which cannot be"),
    ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, "exclusiveMinimum 2 at #/allOf/0"),
    ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "exclusiveMinimum 1 at #, which"),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"json_schema": schema}, message) for schema, message in REFUSED_SCHEMAS),
    ({"regex": "(a"}, "regex cannot be enforced: unclosed group"),
    ({"regex": "(" * 4000 + "a" + ")" * 4000}, "regex cannot be enforced: "),
    ({"regex": "a*" * 9000}, "regex has 18000 characters; expected up to 10000"),
    ({"regex": ""}, "regex is ''; expected a text"),
    ({"regex": "a\udc00"}, "regex is not valid Unicode at character 1"),
    ({"grammar": "root ::= x"}, "grammar cannot be read: Rule 'x' not found"),
    ({"grammar": 'start: "a"\nfoo: ('}, "grammar cannot be enforced: line 2: "),
    ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "'x-guidance' at #, which"),
    ({"grammar": 'start: %json {"properties": {"a": {}}}'}, "has %json with properties at #"),
    ({"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(2000))},
     "grammar has 2001 rules and brackets; expected up to 1000 together"),
    ({"grammar": "start: A\nA: <[3]> | " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(30))},
     "grammar has 29 &; expected fewer than 8"),
    ({"grammar": 'start: x\n x[max_tokens=3]: "a"'}, "grammar has max_tokens in"),
    ({"choice": []}, "choice is empty"),
    ({"choice": ["a", ""]}, "choice holds an empty string"),
    ({"choice": ["x" * 300_000, "y" * 300_000]}, "choice has 600000 characters"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice were given; expected one of them"),
    ({"regex": "a", "ignore_eos": True}, "regex and ignore_eos were given"),
    ({"guided_regex": "a", "regex": "b"}, "regex was given twice"),
    ({"guided_jsn": "a"}, "unknown option 'guided_jsn'"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "message"), REFUSED, ids=lambda v: str(v)[:60])
def test_what_cannot_be_enforced_is_refused_in_a_line(
    grammars: Grammars, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as raised:
        processor(grammars, **option)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 420


def test_models_are_schemas_and_aliases_are_read() -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return NULL

    given: Any = Model
    for params in (SamplingParams(json_schema=given), SamplingParams.of(guided_json=given)):
        assert json.loads(str(params.json_schema)) == NULL
    assert SamplingParams.of(guided_regex="a+") == SamplingParams(regex="a+")
    assert SamplingParams.of(guided_choice="yes").choice == ("yes",)
    assert SamplingParams(json_schema={}) == SamplingParams(json_schema="{ }")
