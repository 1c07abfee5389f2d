"""Which drafter a completion gets, what is refused, and what policies keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.toy import TableEngine, generator, near
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.costs import Costs
from specrt.speculation.pool import DecodingMode, DrafterPool, Models
from specrt.text import Tokenizer

COSTS = Costs(tuple(100.0 + 5 * g for g in range(9)), tuple(4.0 * g for g in range(9)))
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
GAMMAS = tuple(range(9))
PROMPT = [3, 1, 4, 1, 5]


def models(draft: bool = True, closeness: float = 0.9) -> Models:
    target = TableEngine(3)
    found = near(target, 4, closeness) if draft else None
    return Models(target, found, GAMMAS, measure=lambda _: COSTS)


@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade", "none"])
@pytest.mark.parametrize("gamma", [0, 1, 4, "auto"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_no_drafter_changes_the_output(
    tokenizer: Tokenizer, drafter: str, gamma: int, options: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, **options)  # type: ignore[arg-type]
    made = Generator(models(), tokenizer)
    plain = made.generate(PROMPT, params, gamma=0)
    found = made.generate(PROMPT, params, gamma=gamma, drafter=drafter)
    assert found.token_ids == plain.token_ids
    counts = found.speculation
    assert (counts.gamma, counts.drafter) == (gamma, drafter)
    allowed = {"model": {"model"}, "ngram": {"ngram"}, "cascade": {"model", "ngram"}, "none": set()}
    assert set(counts.sources) <= allowed[drafter]
    if drafter == "model" and gamma:
        assert counts.sources["model"][0] > 0


def test_costs_are_measured_once_and_only_where_gamma_is_left_open(tokenizer: Tokenizer) -> None:
    asked: list[Models] = []

    def measure(given: Models) -> Costs:
        asked.append(given)
        return COSTS

    given = replace(models(), measure=measure)
    made = Generator(given, tokenizer)
    made.generate(PROMPT, PARAMS, gamma=3)
    assert not asked
    for temperature in (0.0, 1.0):
        made.generate(PROMPT, SamplingParams(max_tokens=9, temperature=temperature), gamma="auto")
    assert asked == [given]


def test_what_a_policy_learned_is_kept_for_the_next_completion() -> None:
    made = DrafterPool(models(), lambda: COSTS)
    greedy = DecodingMode(greedy=True, ruled=False)
    first = made._policy("model", "auto", greedy)
    assert made._policy("model", "auto", greedy) is first
    # Acceptance differs between drafters, between greedy decoding and sampling, and under rules.
    others = [
        made._policy("ngram", "auto", greedy),
        made._policy("model", "auto", DecodingMode(greedy=False, ruled=False)),
        made._policy("model", "auto", DecodingMode(greedy=True, ruled=True)),
    ]
    assert len({id(one) for one in (first, *others)}) == 4


def test_a_hopeless_draft_is_said_to_be_off_in_the_statistics(tokenizer: Tokenizer) -> None:
    made = Generator(models(closeness=0.0), tokenizer)
    for _ in range(30):
        counts = made.generate(PROMPT, PARAMS, gamma="auto").speculation
    assert counts.fallback is not None
    assert "times as long" in counts.fallback
    assert made.generate(PROMPT, PARAMS, gamma=2).speculation.drafted > 0


def test_a_fixed_gamma_is_never_said_to_be_off(tokenizer: Tokenizer) -> None:
    dear = Costs(tuple(1e6 * (1 + g) for g in GAMMAS), tuple(1e6 * g for g in GAMMAS))
    made = Generator(replace(models(), measure=lambda _: dear), tokenizer)
    auto = made.generate(PROMPT, PARAMS, gamma="auto").speculation
    assert "times as long" in (auto.fallback or "")
    for gamma in (4, 0):
        counts = made.generate(PROMPT, PARAMS, gamma=gamma).speculation
        assert (counts.drafted > 0, counts.fallback) == (gamma > 0, None)


def test_a_drafter_that_was_asked_for_is_not_said_to_be_off_for_want_of_another(
    tokenizer: Tokenizer,
) -> None:
    given = replace(models(draft=False), absent="the draft model is not opened: too large")
    made = Generator(given, tokenizer)
    for drafter in ("ngram", "none"):
        counts = made.generate([1, 2] * 20, PARAMS, gamma=4, drafter=drafter).speculation
        assert counts.fallback is None


@pytest.mark.parametrize("built", [(0, 8), (0, 1, 4), (0, 3, 5, 6)])
def test_auto_drafts_only_so_far_as_was_built(tokenizer: Tokenizer, built: tuple[int, ...]) -> None:
    made = Generator(replace(models(closeness=0.7), gammas=built), tokenizer)
    drafted = set()
    for first in range(20):
        stream = made.stream([3, first], PARAMS, gamma="auto")
        log = stream.finish().speculation.log
        left = 60 - len(stream.completion.token_ids) + sum(len(r.tokens) for r in log)
        for round_ in log:
            left -= len(round_.tokens)
            if left > max(built):  # near the end there is no room
                drafted.add(round_.drafted)
    assert drafted <= set(built)
    assert max(drafted) > 0


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_a_draft_of_no_numbers_ends_no_completion(tokenizer: Tokenizer, verifier: str) -> None:
    def break_after(calls: int, logits: NDArray[np.float32]) -> None:
        if calls > 4:
            logits[...] = np.nan

    target = TableEngine(3)
    given = Models(target, near(target, 4, 0.9, corrupt=break_after), GAMMAS)
    params = replace(PARAMS, temperature=1.0, seed=1, verifier=verifier)
    done = Generator(given, tokenizer).generate(PROMPT, params, gamma=3)
    assert len(done.token_ids) == 60
    assert 0 < done.speculation.drafted <= 4
    if verifier == "match":
        plain = Generator(given, tokenizer).generate(PROMPT, params, gamma=0)
        assert done.token_ids == plain.token_ids


def test_without_a_draft_lookup_is_the_default_and_the_model_is_refused() -> None:
    made = DrafterPool(models(draft=False), lambda: COSTS)
    assert made.check_drafter(None) == "ngram"
    for name in ("model", "cascade"):
        with pytest.raises(RequestError, match="needs a draft model: this bundle has no draft"):
            made.check_drafter(name)


def test_a_draft_without_room_is_off_and_says_why(tokenizer: Tokenizer) -> None:
    why = "the draft model is not opened: too large"
    given = replace(models(draft=False), absent=why)
    assert DrafterPool(given).check_drafter(None) == "none"
    with pytest.raises(RequestError, match="too large"):
        DrafterPool(given).check_drafter("model")
    done = Generator(given, tokenizer).generate(PROMPT, PARAMS)
    assert (done.speculation.drafted, done.speculation.fallback) == (0, why)


def test_an_unknown_drafter_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"drafter 'modle' is unknown.*'model'"):
        DrafterPool(models()).check_drafter("modle")


@pytest.mark.parametrize("gamma", ["fast", 1.0, True, -1, 9])
def test_a_gamma_that_is_none_is_refused(gamma: object) -> None:
    with pytest.raises(RequestError, match="choose one of them or 'auto'"):
        DrafterPool(models()).check_gamma(gamma)  # type: ignore[arg-type]


def test_a_gamma_of_the_recipe_is_the_default(tokenizer: Tokenizer) -> None:
    made = generator(TableEngine(3), near(TableEngine(3), 4, 0.9), tokenizer, gamma=5)
    assert made.generate(PROMPT, PARAMS).speculation.gamma == 5
