"""What a JSON Schema says holds, or it is refused by name."""

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
    ({"type": "array", "maxItems": 2}, ["[]", "[1,2]"], ["[1,2,3]"]),
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
    ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "null"}}}, ["null"], ["1"]),
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


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "cannot be enforced"),
        ({"$ref": "#"}, "it admits nothing"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]},
                                          "b": {"allOf": [{}, {"$ref": "#"}]}}}, "nothing"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable schema: minLength (3)"),
        ({"enum": [1], "type": "string"}, "cannot be enforced: Unsatisfiable schema"),
        ({"enum": []}, "Unsatisfiable"),
        ({"const": "\x01"}, "it admits nothing"),
        ({"type": "string", "format": "idn-email"}, "format 'idn-email' at #; expected one of d"),
        ({"type": "integer", "format": "int32"}, "format 'int32' at #"),
        ({"$ref": "http://a.b/c.json"}, "'http://a.b/c.json' is not present"),
        ({"$ref": "other.json#/x"}, "is not present in a registry"),
        ({"$ref": "#/$defs/no"}, "Pointer '/$defs/no' does not exist"),
        ({"$ref": 3}, "$ref must be a string, got 3"),
        ({**OBJECT, "minProperties": 2}, "minProperties 2 at #; expected at most one more than it"),
        ({"multipleOf": 999983}, "multipleOf 999983.0: remainders to tell apart beyond 20000"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "remainders"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf constraints are not supported"),
        ({"type": "nope"}, "Invalid type: nope"),
        ({"pattern": "(?=a)"}, "json_schema cannot be enforced: "),
        ({"pattern": "(a"}, "json_schema cannot be enforced: "),
        ({"properties": 3}, "properties must be an object"),
        ({"properties": {"a\nb": {"not": {}}}}, "at #/properties/'a\\nb'"),
        ({"type": {"a": 1}}, "cannot be enforced"),
        ({"required": [[1]]}, "cannot be enforced"),
        ({"minItems": "x", "type": "array"}, "cannot be enforced"),
        ({"allOf": [{"anyOf": [{"required": [f"{a}{i}"]} for a in "ab"]} for i in range(14)]},
         "too large"),
        ({"$ref": "#/$defs/d0", "$defs": {
            f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)}},
         "5001 references, with up to "),
        ({"patternProperties": {f"^k{i}_": {} for i in range(300)}}, "300 patternProperties at #"),
        ({"anyOf": [{"const": i} for i in range(4000)]}, "4000 anyOf at #; expected up to 1000"),
        ({"properties": {f"k{i}": {"type": "string"} for i in range(3000)}, **OBJECT},
         "cannot be enforced: Parser Error: Current row has"),
        ({"enum": list(range(100_000))}, "cannot be enforced: initial lexer configuration"),
        ([], "json_schema is []; expected an object or true"),
        (3, "json_schema is 3; expected an object or true"),
        ("{", "json_schema is no JSON: "),
        ("", "json_schema is no JSON: "),
        ('{"const": NaN}', "json_schema is no JSON: it holds NaN"),
        ({"const": float("inf")}, "json_schema is no JSON: "),
        ({"const": {1, 2}}, "json_schema is no JSON: "),
        ('{"items":' * 100_000, "json_schema is nested too deep"),
        ('{"items":' * 300 + "{}" + "}" * 300, "json_schema cannot be enforced: recursion limit"),
    ],
    ids=lambda v: str(v)[:60],
)  # fmt: skip
def test_schemas_that_cannot_be_are_refused(grammars: Grammars, schema: Any, said: str) -> None:
    with pytest.raises(RequestError) as raised:
        processor(grammars, json_schema=schema)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_schema_within_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(RequestError, match="nested too deep, or within itself"):
        SamplingParams(json_schema=schema)


def test_a_pydantic_model_is_a_schema() -> None:
    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "null"}

    given: Any = Model
    assert json.loads(str(SamplingParams(json_schema=given).json_schema)) == {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"minimum": 1e30}, "has minimum 1e"),
        ({"const": 2**53 + 1}, "has const 9007199254740993 at #; expected numbers up to"),
        ({"enum": [1, [2**64]]}, "has enum 18446744073709551616"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "has exclusiveMinimum 1 at #, which cannot be"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.001}, "has exclusiveMinimum 0"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "has exclusiveMaximum 0"),
        ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, "exclusiveMinimum 2 at #/allOf/0"),
    ],
)
def test_numbers_and_characters_that_would_come_out_otherwise_are_refused(
    schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(json_schema=schema)


def test_bounds_that_hold_are_taken() -> None:
    for schema in (
        {"exclusiveMinimum": 0, "maximum": 1},
        {"exclusiveMinimum": 0.5, "maximum": 0.75},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5 + 1},
        {"const": "é\n\t"},
        {"anyOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]},
    ):
        assert SamplingParams(json_schema=schema).constraint is not None


def test_what_python_calls_a_schema_is_read_as_json() -> None:
    with pytest.raises(RequestError, match="has '1' at #, which cannot be enforced"):
        SamplingParams(json_schema={1: 2})
    with pytest.raises(RequestError, match="has 'uniqueItems' at #/anyOf/0"):
        SamplingParams(json_schema={"anyOf": ({"uniqueItems": True},)})

    class Broken:
        def model_json_schema(self) -> None:
            raise ValueError("no")

    with pytest.raises(RequestError, match="a model without a schema: no"):
        SamplingParams(json_schema=Broken())


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: a\na[stop="q"]: /[a-p]*/', "has stop in .*; use suffix"),
        ('start: a\na[suffix="]", temperature=0.5]: /[a-p]*/', "has temperature in"),
        ('start: %json {"properties": {"a": {}}}', "grammar has %json with properties at #"),
        ('start: %json {"patternProperties": {"^a": false}}', "grammar has %json with properties"),
    ],
)
def test_grammars_that_would_break_off_or_be_gone_past_are_refused(grammar: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(grammar=grammar)
