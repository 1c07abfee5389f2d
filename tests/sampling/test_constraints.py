"""What a JSON Schema, an expression or a grammar says holds, or it is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sampling.test_grammar import EOS, VOCABULARY, allowed, processor
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.sampling.grammar import Grammars
from specrt.text import Tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [EOS], VOCABULARY)


def accepts(grammars: Grammars, schema: Any, text: str) -> bool:
    made, path = processor(grammars, json_schema=schema), list(text.encode())
    for depth, token in enumerate(path):
        if token not in allowed(made, *path[:depth]):
            return False
    return EOS in allowed(made, *path)


OBJECT = {"type": "object"}
ENFORCED: list[tuple[Any, list[str], list[str]]] = [
    (True, ["1", '{"a": [null, "x"]}', "[]", '"é😀"'], ["{", "01", "nul", "[1,]"]),
    ({}, ["1.5e3"], ["'a'"]),
    ({"type": ["integer", "null"]}, ["3", "null"], ['"a"', "3.5", "1e2"]),
    ({"type": "number"}, ["-0.5e-3", "7"], ["01", ".5", "+1", "NaN", "Infinity"]),
    ({"enum": [1, "a", {"x": [None]}]}, ["1", '"a"', '{"x":[null]}'], ["2", '"b"', "null"]),
    ({"const": {"a": [1]}}, ['{"a": [1]}'], ['{"a": [2]}', "{}"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"😀é\\n"'], ['"a"', '"abcd"']),
    ({"pattern": "^a+$"}, ['"aa"', "3"], ['"b"', '"ab"']),
    ({"type": "string", "pattern": "a", "maxLength": 3}, ['"xay"'], ['"xyz"', '"xxay"']),
    ({"type": "string", "format": "date"}, ['"2020-02-29"'], ['"2020-13-01"', '"2020-02-30"']),
    ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"1.2.3.256"']),
    ({"type": "string", "format": "uuid"}, [f'"{"0a" * 4}{"-0a0a" * 3}-{"0a" * 6}"'], ['"0a"']),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 11}, ["3", "10"], ["2", "11", "-5"]),
    ({"type": "number", "exclusiveMinimum": 3.5, "maximum": 4}, ["3.6", "4"], ["3.5", "4.01"]),
    ({"minimum": 3}, ["3", '"a"'], ["2"]),
    ({"type": "integer", "multipleOf": 7}, ["14", "0", "-21"], ["15"]),
    ({"type": "number", "multipleOf": 0.5}, ["1.5"], ["1.25"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1}, ["[null]"], ["[]", "[1]"]),
    ({"prefixItems": [{"type": "null"}], "items": False}, ["[null]", "[]"], ["[1]", "[null,1]"]),
    ({**OBJECT, "properties": {"a": {"type": "null"}}}, ['{"b":1}', '{"a":null}'], ['{"a":1}']),
    ({**OBJECT, "required": ["b"]}, ['{"b":1}'], ["{}", '{"a":1}']),
    ({**OBJECT, "additionalProperties": {"type": "null"}}, ['{"b":null}'], ['{"b":1}']),
    ({**OBJECT, "additionalProperties": False}, ["{}"], ['{"b":1}']),
    ({**OBJECT, "patternProperties": {"^a": {"type": "null"}}}, ['{"ab":null}'], ['{"ab":1}']),
    ({**OBJECT, "minProperties": 1, "maxProperties": 1}, ['{"a":1}'], ["{}", '{"a":1,"b":1}']),
    ({**OBJECT, "minProperties": 2, "required": ["a"]}, ['{"a":1,"b":1}'], ['{"a":1,"a":1}']),
    ({"anyOf": [{"type": "null"}, {"const": 3}]}, ["null", "3"], ["4"]),
    ({"oneOf": [{"type": "null"}, {"const": 3}]}, ["null", "3"], ["4"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 8}]}, ["9"], ["7", '"a"']),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#/definitions/x", "minimum": 8, "definitions": {"x": {"type": "integer"}}},
     ["9"], ["7", '"a"']),
    ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
     ["[[null],[]]"], ["[1]"]),
    ({"title": "t", "description": "d", "default": 1, "examples": [2], "$comment": "c",
      "deprecated": True, "readOnly": True, "x-mine": 1, "type": "null"}, ["null"], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda v: str(v)[:60])
def test_keywords_hold(grammars: Grammars, schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammars, schema, text)] == []
    assert [text for text in bad if accepts(grammars, schema, text)] == []


REFUSED: dict[str, Any] = {
    "uniqueItems": True, "contains": {}, "minContains": 1, "maxContains": 2, "not": {}, "if": {},
    "then": {}, "else": {}, "propertyNames": {}, "dependentRequired": {}, "dependentSchemas": {},
    "dependencies": {}, "unevaluatedProperties": False, "unevaluatedItems": False,
    "$dynamicRef": "#", "$recursiveRef": "#", "contentEncoding": "base64",
    "contentMediaType": "text/html", "nullable": True, "discriminator": {}, "minumum": 3,
    "x-guidance": {"lenient": True}, "$vocabulary": {},
}  # fmt: skip


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("place", ["#", "#/properties/a", "#/anyOf/1/items", "#/$defs/b"])
def test_keywords_that_do_not_hold_are_named(keyword: str, place: str) -> None:
    schema: Any = {keyword: REFUSED[keyword]}
    for step in reversed(place.split("/")[1:]):
        schema = [{}, schema] if step == "1" else {step: schema}
    with pytest.raises(RequestError) as raised:
        SamplingParams(json_schema=schema)
    assert f"json_schema has {keyword!r} at {place}, which cannot" in str(raised.value)


REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    (False, "cannot be enforced"),
    ({"$ref": "#"}, "it admits nothing"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]},
                                      "b": {"allOf": [{}, {"$ref": "#"}]}}}, "nothing"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable schema: minLength (3)"),
    ({"enum": [1], "type": "string"}, "cannot be enforced: Unsatisfiable schema"),
    ({"const": "\x01"}, "it admits nothing"),
    ({"type": "string", "format": "idn-email"}, "format 'idn-email' at #; expected one of d"),
    ({"type": "integer", "format": "int32"}, "format 'int32' at #"),
    ({"$ref": "http://a.b/c.json"}, "'http://a.b/c.json' is not present"),
    ({"$ref": "#/$defs/no"}, "Pointer '/$defs/no' does not exist"),
    ({"$ref": 3}, "$ref must be a string, got 3"),
    ({**OBJECT, "minProperties": 2}, "minProperties 2 at #; expected at most one more than it"),
    ({"multipleOf": 999983}, "multipleOf 999983.0: remainders to tell apart beyond 20000"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf constraints are not supported"),
    ({"type": "nope"}, "Invalid type: nope"),
    ({"pattern": "(?=a)"}, "json_schema cannot be enforced: "),
    ({"properties": 3}, "properties must be an object"),
    ({"properties": {"a\nb": {"not": {}}}}, "at #/properties/'a\\nb'"),
    ({"minItems": "x", "type": "array"}, "cannot be enforced"),
    ({"allOf": [{"anyOf": [{"required": [f"{a}{i}"]} for a in "ab"]} for i in range(14)]},
     "too large"),
    ({"$ref": "#/$defs/d0", "$defs": {
        f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)}},
     "5001 references, with up to "),
    ({"patternProperties": {f"^k{i}_": {} for i in range(300)}}, "300 patternProperties at #"),
    ({"anyOf": [{"const": i} for i in range(4000)]}, "4000 anyOf at #; expected up to 1000"),
    ([], "json_schema is []; expected an object or true"),
    (3, "json_schema is 3; expected an object or true"),
    ("{", "json_schema is no JSON: "),
    ('{"const": NaN}', "json_schema is no JSON: it holds NaN"),
    ({"const": float("inf")}, "json_schema is no JSON: "),
    ('{"items":' * 100_000, "json_schema is nested too deep"),
    ('{"items":' * 300 + "{}" + "}" * 300, "json_schema cannot be enforced: recursion limit"),
    ({"minimum": 1e30}, "has minimum 1e"),
    ({"const": 2**53 + 1}, "has const 9007199254740993 at #; expected numbers up to"),
    ({"enum": [1, [2**64]]}, "has enum 18446744073709551616"),
    ({"exclusiveMinimum": 1, "maximum": 1.5}, "has exclusiveMinimum 1 at #, which cannot be"),
    ({"minimum": -0.5, "exclusiveMaximum": 0}, "has exclusiveMaximum 0"),
    ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, "exclusiveMinimum 2 at #/allOf/0"),
    ({1: 2}, "has '1' at #, which cannot be enforced"),
]  # fmt: skip
REFUSED_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "regex cannot be enforced: unclosed group"),
    ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supp"),
    ({"regex": "a\\bb"}, "lookarounds not supported yet"),
    ({"regex": "(" * 4000 + "a" + ")" * 4000}, "regex cannot be enforced: "),
    ({"grammar": "start: x"}, 'line 1: unknown name: "x"'),
    ({"grammar": "root ::= x"}, "grammar cannot be read: Rule 'x' not found"),
    ({"grammar": 'start: "a"\nfoo: ('}, "grammar cannot be enforced: line 2: "),
    ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "'x-guidance' at #, which"),
    ({"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(2000))},
     "grammar has 2001 rules and brackets; expected up to 1000 together"),
    ({"grammar": "start: " + "a " * 30_000}, "grammar has 60007 characters; expected up to 50"),
    ({"regex": "a*" * 9000}, "regex has 18000 characters; expected up to 10000"),
    ({"choice": ["x" * 300_000, "y" * 300_000]}, "choice has 600000 characters"),
    ({"grammar": 'start[temperature=0.5]: "a"'}, "grammar has temperature in 'start[temper"),
    ({"grammar": 'start: x\n x[max_tokens=3]: "a"'}, "grammar has max_tokens in"),
    ({"grammar": 'start: a\na[stop="q"]: /[a-p]*/'}, "has stop in "),
    ({"grammar": 'start: %json {"properties": {"a": {}}}'}, "has %json with properties at #"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice were given; expected one of them"),
    ({"regex": "a", "ignore_eos": True}, "regex and ignore_eos were given, and a structure"),
    ({"choice": []}, "choice is empty"),
    ({"choice": ["a", ""]}, "choice holds an empty string"),
    ({"choice": ["\ud800"]}, "choice is not valid Unicode at character 0"),
    ({"regex": ""}, "regex is ''; expected a text"),
    ({"regex": "a\udc00"}, "regex is not valid Unicode at character 1"),
    ({"grammar": b"start: x"}, "grammar is b'start: x'; expected a text"),
    ({"guided_regex": "a", "regex": "b"}, "regex was given twice"),
    ({"guided_jsn": "a"}, "unknown option 'guided_jsn'"),
]  # fmt: skip
REFUSED_OPTIONS += [({"json_schema": schema}, message) for schema, message in REFUSED_SCHEMAS]
LARGE: list[Any] = [
    ({"enum": [*range(100_000)]}, "cannot be enforced: initial lexer configuration"),
    ({"properties": {f"k{i}": {"type": "string"} for i in range(3000)}, **OBJECT},
     "cannot be enforced: Parser Error: Current row has"),
]  # fmt: skip
REFUSED_OPTIONS += [
    pytest.param({"json_schema": schema}, message, marks=pytest.mark.nightly)  # type: ignore[misc]
    for schema, message in LARGE
]


@pytest.mark.parametrize(("option", "message"), REFUSED_OPTIONS, ids=lambda v: str(v)[:60])
def test_what_cannot_be_enforced_is_refused_in_a_line(
    grammars: Grammars, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as raised:
        processor(grammars, **option)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 420


def test_bounds_that_hold_are_taken() -> None:
    for schema in (
        {"exclusiveMinimum": 0, "maximum": 1},
        {"exclusiveMinimum": 0.5, "maximum": 0.75},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5 + 1},
        {"const": "é\n\t"},
        {"anyOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]},
    ):
        assert SamplingParams(json_schema=schema).constraint is not None


def test_models_are_schemas_and_aliases_are_read() -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "null"}

    class Broken:
        def model_json_schema(self) -> None:
            raise ValueError("no")

    given: Any = Model
    for params in (SamplingParams(json_schema=given), SamplingParams.of(guided_json=given)):
        assert json.loads(str(params.json_schema)) == {"type": "null"}
    assert SamplingParams.of(guided_regex="a+") == SamplingParams(regex="a+")
    assert SamplingParams.of(guided_choice="yes").choice == ("yes",)
    assert len({SamplingParams(json_schema={}), SamplingParams(json_schema="{ }")}) == 1
    cyclic: dict[str, Any] = {}
    cyclic["items"] = cyclic
    broken: Any = Broken()
    refused = ((cyclic, "nested too deep, or within"), (broken, "a model without a schema: no"))
    for wrong, message in refused:
        with pytest.raises(RequestError, match=message):
            SamplingParams(json_schema=wrong)
