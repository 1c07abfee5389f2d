"""Masks behind any drafted path; a constrained text keeps to its grammar and is the plain one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.grammar import GrammarProcessor, Grammars
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.target import VERIFIERS
from specrt.text import Tokenizer
from support.schemas import NESTED, STRUCTURES, Asked
from support.toy import TableEngine, byte_fallback, generator, near

pytest.importorskip("llguidance", reason="needs the structured extra")

VOCABULARY, EOS, TOOL = 272, 263, 264
PROMPT = [65, 66]


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [EOS, 9999], VOCABULARY)


def processor(grammars: Grammars, *committed: int, **option: Any) -> GrammarProcessor:
    """Return what keeps to a structure behind a prompt and some tokens."""
    structure = SamplingParams.of(**option).constraint
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
@settings(deadline=None, max_examples=40)
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


def test_a_model_without_an_end_is_told(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="this model has no end token to end its text with"):
        processor(Grammars(tokenizer, [], VOCABULARY), regex="a")


def test_without_the_library_the_remedy_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'specrt\[structured\]'"):
        processor(Grammars(tokenizer, [EOS], VOCABULARY), regex="a")


# Output


WORDS = list(b"the thing in")


@pytest.fixture
def pair(tokenizer: Tokenizer) -> Callable[[int], Generator]:
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
@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_text_keeps_to_its_grammar_and_speculation_changes_no_token(
    pair: Callable[[int], Generator], asked: Asked, more: dict[str, Any], seed: int, gamma: int,
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


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize(
    "more", [{"min_tokens": 9}, {"allowed_token_ids": [1, 2]}, {"bad_words": ["b"]}], ids=str
)
def test_a_dead_end_is_said(
    pair: Callable[[int], Generator], gamma: int, more: dict[str, Any]
) -> None:
    one = pair(0)
    with pytest.raises(RequestError, match="no token is left that the request allows"):
        one.generate(WORDS, SamplingParams(max_tokens=20, regex="ab", **more), gamma=gamma)
    assert one.generate(WORDS, SamplingParams(regex="ab"), gamma=gamma).text == "ab"


@pytest.mark.parametrize("gamma", [0, 3, 8])
def test_stops_and_limits_cut_a_constrained_text(
    pair: Callable[[int], Generator], gamma: int
) -> None:
    for more, text, reason, stop in (
        ({"stop": ("cd",)}, "ab", "stop", "cd"),
        ({"stop_token_ids": (99,)}, "ab", "stop", 99),
        ({"max_tokens": 3}, "abc", "length", None),
    ):
        params: Any = {"choice": ["abcdef"], **more}
        cut = pair(1).generate(WORDS, SamplingParams(**params), gamma=gamma)
        assert (cut.text, cut.finish_reason, cut.stop_reason) == (text, reason, stop)


def test_rows_of_a_batch_keep_to_structures_of_their_own(tokenizer: Tokenizer) -> None:
    """One comes to a dead end, one is free; none disturbs the others."""
    target = TableEngine(3, vocab=VOCABULARY, memory=3, batch=3)
    draft = TableEngine(3, vocab=VOCABULARY, memory=2, batch=3)
    one = generator(target, draft, tokenizer, eos=[EOS])
    asked = [
        SamplingParams(max_tokens=40, json_schema={"enum": ["the thing", 12345]}),
        SamplingParams(max_tokens=40, regex="[a-z]{9,12}", temperature=0.9, seed=4),
        SamplingParams(max_tokens=40, regex="abcd", bad_words=("c",)),
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=40, grammar=NESTED, temperature=0.9, seed=5),
    ]
    found = [done for (done,) in one.generate_many([WORDS] * 5, asked, gamma=4)]
    for params, done in zip(asked, found, strict=True):
        if done.error is None:
            assert done.token_ids == one.generate(WORDS, params, gamma=0).token_ids
    assert [done.finish_reason for done in found][2:4] == ["error", "length"]
    assert "no token is left" in str(found[2].error)


def test_a_vocabulary_of_pieces_and_bytes_keeps_to_it(tmp_path: Path) -> None:
    """Llama 2's way: spaces are within pieces, and rare characters are bytes."""
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    target = TableEngine(1, vocab=tokenizer.size + 7, memory=3)
    one = generator(target, near(target, 2, 0.8), tokenizer, eos=[2])
    expression = "[a-e](hello|[a-e ]|é|😀){5,9}"
    for seed in range(8):
        params = SamplingParams(max_tokens=80, temperature=1.0, seed=seed, regex=expression)
        plain, found = (one.generate([5, 6], params, gamma=gamma) for gamma in (0, 4))
        assert found.token_ids == plain.token_ids
        assert re.fullmatch(expression, found.text)
