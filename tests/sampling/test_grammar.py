"""Masks behind any path: right whatever was asked before, and harmless where nobody looks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.schemas import STRUCTURES, Asked
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.sampling.grammar import GrammarProcessor, Grammars
from specrt.text import Tokenizer

pytest.importorskip("llguidance", reason="needs the structured extra")

VOCABULARY, EOS, TOOL = 272, 263, 264
PROMPT = [65, 66]


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [EOS, 9999], VOCABULARY)


def processor(grammars: Grammars, *committed: int, **option: Any) -> GrammarProcessor:
    """Return what keeps to a structure behind a prompt and some tokens."""
    structure = SamplingParams(**option).constraint
    assert structure is not None
    made = grammars.processor(structure)
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
@settings(deadline=None, max_examples=60)
def test_a_mask_behind_any_path_is_that_of_a_fresh_matcher(
    grammars: Grammars, asked: Asked, data: st.DataObject
) -> None:
    """Rows in any order, paths that branch, leave the grammar and go past its end."""
    made, text = processor(grammars, **asked.option), list[int]()
    for _ in range(4):
        for _ in range(data.draw(st.integers(0, 4))):
            path = list[int]()
            for _ in range(data.draw(st.integers(0, 5))):
                ways = allowed(processor(grammars, *text, *path, **asked.option))
                stray = st.integers(0, VOCABULARY - 1)
                path.append(data.draw(st.one_of(st.sampled_from(ways), stray)))
            fresh = processor(grammars, *text, *path, **asked.option)
            assert allowed(made, *path) == allowed(fresh)
        ways = [t for t in allowed(made) if t != EOS]
        if not ways:
            break
        token = data.draw(st.sampled_from(ways))
        made.commit([token])
        text.append(token)


def test_nothing_is_ruled_out_behind_the_end_or_outside_the_grammar(grammars: Grammars) -> None:
    everything = list(range(VOCABULARY))
    made = processor(grammars, regex="ab?")
    a, b, c = b"abc"
    assert allowed(made) == [a]
    assert allowed(made, a) == [b, EOS]
    for path in [(a, EOS), (a, EOS, EOS), (a, b, EOS, a), (c,), (c, a), (a, c, b)]:
        assert allowed(made, *path) == everything
    assert allowed(made, a, b) == [EOS]
    made.commit([a, EOS])
    assert allowed(made) == allowed(made, EOS, a) == everything
    assert made.forced() == []


def test_tokens_that_there_are_not_never_come(grammars: Grammars) -> None:
    """The model scores more ids than the tokenizer has, and special tokens are no text."""
    assert max(allowed(processor(grammars, regex="(?s:.)*"))) == EOS
    assert 262 not in allowed(processor(grammars, regex="(?s:.)*"))


def test_special_tokens_among_the_stops_end_where_the_end_may_come(grammars: Grammars) -> None:
    structure = SamplingParams(regex="ab?").constraint
    assert structure is not None
    made = grammars.processor(structure, [TOOL, 98])
    made.commit(PROMPT)
    a, b = b"ab"
    assert allowed(made) == [a]
    assert allowed(made, a) == [b, EOS, TOOL]
    assert allowed(made, a, TOOL) == list(range(VOCABULARY))


def test_an_end_token_is_no_part_of_a_grammar(grammars: Grammars) -> None:
    made = processor(grammars, grammar='start: "a" <|tool|> "b" | "c" <[263]>')
    assert allowed(made, ord("a")) == [TOOL]
    assert allowed(made, ord("c")) == []


def test_what_must_come_is_told(grammars: Grammars) -> None:
    word = list(b"yes, it is")
    made = processor(grammars, choice=["yes, it is", "yes, it was"])
    assert made.forced() == word[: len("yes, it ")]
    assert processor(grammars, *word[:8], choice=["yes, it is", "yes, it was"]).forced() == []
    assert processor(grammars, *word, choice=["yes, it is"]).forced() == []


def test_a_matcher_that_gave_up_is_replaced(grammars: Grammars) -> None:
    """The limit is met behind one path; behind another the text goes on."""
    rules = "\n".join(f"r{i}: r{i + 1}? r{i + 1}?" for i in range(40))
    hard = f'start: "b" | "a" r0\n{rules}\nr40: "a"'
    made, (a, b) = processor(grammars, grammar=hard), b"ab"
    for _ in range(2):
        with pytest.raises(RequestError, match="became too complex to follow: ") as raised:
            [allowed(made, *[a] * depth) for depth in range(1, 60)]
        assert "\n" not in str(raised.value)
        assert allowed(made) == [a, b]
        assert allowed(made, b) == [EOS]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"regex": "(a"}, "regex cannot be enforced: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supp"),
        ({"regex": "a\\bb"}, "lookarounds not supported yet"),
        ({"regex": "(" * 4000 + "a" + ")" * 4000}, "regex cannot be enforced: "),
        ({"regex": "[a&&b]"}, "regex cannot be enforced: "),
        ({"grammar": "start: x"}, 'line 1: unknown name: "x"'),
        ({"grammar": "root ::= x"}, "grammar cannot be read: Rule 'x' not found"),
        ({"grammar": 'start: "a"\nfoo: ('}, "grammar cannot be enforced: line 2: "),
        ({"grammar": "start: " + "(" * 900 + '"a"' + ")" * 900}, "too deeply nested"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "'x-guidance' at #, which"),
        ({"grammar": 'start: %json {"not": {}}'}, "json_schema has 'not' at #"),
        ({"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(2000))},
         "grammar has 2001 rules and brackets; expected up to 1000 together"),
        ({"grammar": "start: " + "a " * 30_000}, "grammar has 60007 characters; expected up to 50"),
        ({"regex": "a*" * 9000}, "regex has 18000 characters; expected up to 10000"),
        ({"choice": ["x" * 300_000, "y" * 300_000]}, "choice has 600000 characters"),
        ({"grammar": 'start[temperature=0.5]: "a"'}, "grammar has temperature in 'start[temper"),
        ({"grammar": 'start: x\n x[max_tokens=3]: "a"'}, "grammar has max_tokens in"),
    ],
    ids=lambda v: str(v)[:60],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_in_a_line(
    grammars: Grammars, option: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as raised:
        processor(grammars, **option)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 320


@pytest.mark.parametrize(
    "expression",
    [
        "(a|b)*a(a|b){200}c", ".*x.{0,5000}y", "(a*)*b", "(.*a){30}", "(a{1,1000}){1,1000}",
        "a" * 10_000, "|".join(f"w{i}x" for i in range(1000)), "(ab?c|d)?" * 100,
        "\\p{L}{3,90}(?i:strasse)",
    ],
    ids=lambda e: e[:20],
)  # fmt: skip
def test_hard_expressions_are_followed(grammars: Grammars, expression: str) -> None:
    made = processor(grammars, regex=expression)
    path = list[int]()
    for depth in range(40):
        ways = allowed(made, *path)
        assert ways
        path.append(ways[depth * 7 % len(ways)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice were given; expected one of them"),
        ({"json_schema": True, "grammar": "x"}, "json_schema and grammar were given"),
        ({"regex": "a", "ignore_eos": True}, "regex and ignore_eos were given, and a structure"),
        ({"choice": []}, "choice is empty"),
        ({"choice": ["a", ""]}, "choice holds an empty string"),
        ({"choice": ["a", 3]}, "choice holds 3; expected str values"),
        ({"choice": ["\ud800"]}, "choice is not valid Unicode at character 0"),
        ({"regex": ""}, "regex is ''; expected a text"),
        ({"regex": 3}, "regex is 3; expected a text"),
        ({"regex": "a\udc00"}, "regex is not valid Unicode at character 1"),
        ({"grammar": b"start: x"}, "grammar is b'start: x'; expected a text"),
        ({"guided_regex": "a", "regex": "b"}, "regex was given twice"),
        ({"guided_jsn": "a"}, "unknown option 'guided_jsn'"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams.of(**options)
    assert said in str(raised.value)


def test_names_people_know_are_read() -> None:
    assert SamplingParams.of(guided_regex="a+") == SamplingParams(regex="a+")
    assert SamplingParams.of(guided_choice="yes").choice == ("yes",)
    assert SamplingParams.of(guided_json={"type": "null"}).json_schema == '{"type": "null"}'
    assert len({SamplingParams(json_schema={}), SamplingParams(json_schema="{ }")}) == 1


def test_a_model_without_an_end_is_told(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="this model has no end token to end its text with"):
        processor(Grammars(tokenizer, [], VOCABULARY), regex="a")


def test_without_the_library_the_remedy_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'specrt\[structured\]'"):
        processor(Grammars(tokenizer, [EOS], VOCABULARY), regex="a")


def test_the_library_is_imported_when_a_structure_is_asked_for() -> None:
    code = (
        "import sys, specrt\nspecrt.SamplingParams(json_schema={}), specrt.Generator\n"
        "sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
