"""Lookup: what is copied, what the policy is told, and that the output stays the plain one.

Seeds are fixed; see test_verify.py for what the chi-square tests hold.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.toy import Call, Run, TableEngine, plain
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import Match, NgramDrafter, Suffixes
from specrt.speculation.round import (
    NOTHING,
    Drafter,
    Passes,
    Proposal,
    Round,
    run_alone,
    run_rounds,
    speculate,
)
from specrt.speculation.target import VERIFIERS, EngineTarget
from speculation.test_verifiers import (
    ALPHA,
    LONG,
    SETTINGS,
    accepts_everything,
    chain,
    draws_the_correction_from_the_target,
    laws,
    pairs,
    surprise,
)

PROMPT = [3, 1, 4, 1, 5]
WARM = SamplingParams(temperature=1.0)
GREEDY = SamplingParams()


def loop(
    target: TableEngine,
    drafter: Drafter,
    prompt: Sequence[int],
    new: int,
    params: SamplingParams = GREEDY,
    seed: int = 0,
) -> Run:
    tokens = list(prompt)
    judge = EngineTarget(KVCache(target), params, Noise(seed))
    rounds = list(run_rounds(speculate(judge, drafter, tokens, len(prompt) + new)))
    return Run(tokens[len(prompt) :], rounds)


def proposed(tokens: Sequence[int], gamma: int = 8, room: int = 100, **lengths: int) -> list[int]:
    return list(run_alone(NgramDrafter(FixedGamma(gamma), **lengths).propose(tokens, room)).tokens)


class Script:
    """A policy that says what it was told to, and remembers what it was asked and told."""

    def __init__(self, gamma: int, *weights: DraftDecision) -> None:
        self.gamma = gamma
        self.weights = weights
        self.weighed: list[tuple[int, float]] = []
        self.seen: list[Round] = []

    def choose(self) -> int:
        return self.gamma

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        self.weighed.append((drafted, confidence))
        return self.weights[drafted - 1] if drafted <= len(self.weights) else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        self.seen.append(round_)


class Whim:
    """A policy without reason."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(self) -> int:
        return int(self._rng.integers(0, 7))

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        return list(DraftDecision)[int(self._rng.integers(3))]

    def observe(self, round_: Round) -> None:
        pass


class Remembering:
    """Notes what another drafter proposes."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.drafted: list[list[int]] = []

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        proposal = yield from self._inner.propose(tokens, room)
        if proposal.tokens:
            self.drafted.append(list(proposal.tokens))
        return proposal

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        self._inner.observe(tokens, round_)


# What is copied


def test_it_drafts_what_followed_the_match() -> None:
    text = [10, 11, 12, 13, 14, 15, 16, 99, 10, 11, 12]
    assert proposed(text, gamma=3) == [13, 14, 15]
    assert proposed(text, gamma=8, room=2) == [13, 14]


def test_the_longest_match_goes_before_a_more_recent_one() -> None:
    text = [1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3]
    assert proposed(text, gamma=1) == [7]
    assert proposed(text, gamma=1, most=2) == [8]


def test_a_draft_that_reaches_the_end_of_the_text_copies_itself() -> None:
    assert proposed([9, 1, 2, 1, 2], gamma=7) == [1, 2, 1, 2, 1, 2, 1]
    assert proposed([5, 5, 5], gamma=4) == [5, 5, 5, 5]
    # Whatever the period, the text goes on as it did.
    for period in range(2, 9):
        text = [i % period for i in range(3 * period)]
        assert proposed(text, gamma=20) == [i % period for i in range(20)]


@pytest.mark.parametrize("text", [[1], [1, 2, 3, 4], [1, 1], [1, 2, 3, 9, 3]], ids=str)
def test_a_miss_proposes_nothing(text: list[int]) -> None:
    assert run_alone(NgramDrafter(FixedGamma(4)).propose(text, 9)) is NOTHING


def test_a_miss_costs_a_plain_step() -> None:
    # Whatever text comes, 29 tokens in falling order have no pair twice.
    target = TableEngine(1)
    target.script = {len(PROMPT) + i: 28 - i for i in range(29)}
    done = loop(target, NgramDrafter(FixedGamma(8)), PROMPT, new=20)
    assert [r.drafted for r in done.rounds] == [0] * 20
    assert target.calls[1:] == [Call(len(PROMPT) + i, 1, 1) for i in range(19)]
    assert all(r.source == "" for r in done.rounds)


@pytest.mark.parametrize("least", range(1, 7))
def test_shorter_matches_than_least_do_not_count(least: int) -> None:
    for length in range(1, 8):
        text = [*range(100, 110), 50, *range(110 - length, 110)]
        assert bool(proposed(text, least=least)) == (length >= least)


@pytest.mark.parametrize("room", [0, -1])
def test_no_room_is_no_draft(room: int) -> None:
    assert run_alone(NgramDrafter(FixedGamma(4)).propose([1, 2, 1, 2], room)) is NOTHING


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    gamma=st.integers(0, 12),
    room=st.integers(0, 12),
    least=st.integers(1, 3),
)
def test_a_draft_is_a_copy_of_what_the_text_would_be_if_it_went_on(
    text: list[int], gamma: int, room: int, least: int
) -> None:
    drafted = proposed(text, gamma, room, least=least, most=4)
    if not drafted:
        return
    assert len(drafted) == min(gamma, room)
    # There is a distance at which the text and the draft repeat: from `least` tokens before.
    whole = [*text, *drafted]
    assert any(
        all(whole[i] == whole[i - back] for i in range(len(text) - least, len(whole)))
        for back in range(1, len(text) - least + 1)
    )


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(RequestError, match="suffixes of 5 to 4 tokens"):
        NgramDrafter(FixedGamma(4), least=5, most=4)


# The policy


class Unread(list[int]):
    """Tokens that must not be looked at."""

    def __getitem__(self, at: object) -> NoReturn:
        raise AssertionError("the tokens were read")

    __iter__ = __getitem__  # type: ignore[assignment]


def test_a_policy_that_chose_a_plain_step_has_nothing_looked_up() -> None:
    assert run_alone(NgramDrafter(Script(0)).propose(Unread([1, 2, 1, 2]), 9)) is NOTHING
    with pytest.raises(AssertionError, match="were read"):
        run_alone(NgramDrafter(Script(1)).propose(Unread([1, 2, 1, 2]), 9))


def test_tokens_of_plain_rounds_are_read_later() -> None:
    policy = Script(0)
    drafter = NgramDrafter(policy)
    text = [1, 2, 3, 4, 5, 6, 7]
    run_alone(drafter.propose(text, 9))
    policy.gamma = 2
    run_alone(drafter.propose(text, 9))
    policy.gamma = 0
    run_alone(drafter.propose([*text, 8, 9, 2, 3], 9))
    policy.gamma = 2
    assert run_alone(drafter.propose([*text, 8, 9, 2, 3], 9)).tokens == [4, 5]


@pytest.mark.parametrize("place", range(1, 6))
def test_what_the_policy_says_of_a_token_is_done(place: int) -> None:
    text = [*range(10, 20), 10, 11]
    before = (DraftDecision.CONTINUE,) * (place - 1)
    for weight, kept in (
        (DraftDecision.DISCARD, place - 1),
        (DraftDecision.STOP, place),
        (DraftDecision.CONTINUE, 7),
    ):
        policy = Script(7, *before, weight)
        proposal = run_alone(NgramDrafter(policy).propose(text, 100))
        assert list(proposal.tokens) == [*range(12, 12 + kept)]
        assert len(proposal.confidences) == kept
        assert [drafted for drafted, _ in policy.weighed] == [
            *range(1, (7 if weight is DraftDecision.CONTINUE else place) + 1)
        ]
        if kept == 0:
            assert proposal is NOTHING
        else:
            assert (proposal.source, proposal.distributions) == ("ngram", None)


def test_confidence_grows_with_the_tokens_that_agree() -> None:
    first = []
    for length in range(1, 20):
        text = [*range(100, 150), 50, *range(150 - 30 - length, 150 - 30)]
        policy = Script(8)
        proposal = run_alone(NgramDrafter(policy, least=1).propose(text, 100))
        assert list(proposal.confidences) == [confidence for _, confidence in policy.weighed]
        assert all(0 < a < b < 1 for a, b in pairwise(proposal.confidences))
        first.append(proposal.confidences[0])
    # A match longer than the 16 tokens looked at is worth no more than one of 16.
    assert all(a < b for a, b in pairwise(first[:16]))
    assert first[15:] == [16 / 18] * 4


def test_the_policy_learns_of_every_round() -> None:
    policy = Script(2)
    drafter = NgramDrafter(policy)
    rounds = [Round([1], 0, 0, 5, 5), Round([1, 2], 2, 1, 5, 5, "ngram", (0.5, 0.6))]
    for round_ in rounds:
        drafter.observe([1, 2, 3], round_)
    assert policy.seen == rounds


# A text that does not continue the one before


def test_a_shorter_text_is_a_new_one() -> None:
    drafter = NgramDrafter(FixedGamma(2))
    assert run_alone(drafter.propose([1, 2, 3, 4, 5, 1, 2], 9)).tokens == [3, 4]
    assert run_alone(drafter.propose([1, 2, 9, 1, 2], 9)).tokens == [9, 1]
    assert run_alone(drafter.propose([7, 8], 9)) is NOTHING


def test_a_text_with_another_token_where_the_last_one_ended_is_a_new_one() -> None:
    drafter = NgramDrafter(FixedGamma(2))
    assert run_alone(drafter.propose([1, 2, 3, 4, 1, 2], 9)).tokens == [3, 4]
    assert run_alone(drafter.propose([1, 2, 9, 8, 5, 0, 1, 2], 9)).tokens == [9, 8]


@given(texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=6))
def test_a_drafter_may_be_handed_any_texts(texts: list[list[int]]) -> None:
    drafter = NgramDrafter(FixedGamma(3))
    for text in texts:
        proposal = run_alone(drafter.propose(text, 9))
        assert len(proposal.tokens) in (0, 3)
        assert set(proposal.tokens) <= {0, 1, 2, 3}


# The output


@pytest.mark.parametrize("gamma", [1, 2, 4, 8, None])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [{}, {"least": 1}, {"least": 1, "most": 1}], ids=str)
def test_lookup_never_changes_the_output(
    lengths: dict[str, int], params: SamplingParams, gamma: int | None
) -> None:
    accepted = evaluated = 0
    for seed in range(8):
        # What comes next depends on two tokens, so texts repeat now and then, and break off.
        policy = FixedGamma(gamma) if gamma else Whim(seed)
        target = TableEngine(seed, vocab=9, memory=2 + seed % 2, scale=2.0)
        drafter = NgramDrafter(policy, **lengths)
        done = loop(target, drafter, PROMPT, 120, params, seed)
        run_alone = loop(target, NgramDrafter(FixedGamma(0)), PROMPT, 120, params, seed)
        assert done.tokens == run_alone.tokens
        if params.greedy:
            assert done.tokens == plain(target, PROMPT, 120)
        accepted += sum(r.accepted for r in done.rounds)
        evaluated += sum(r.evaluated for r in done.rounds)
    # Both outcomes happened, often.
    assert accepted > 30
    assert evaluated - accepted > 10


def test_a_copied_passage_takes_few_rounds() -> None:
    target = TableEngine(1, vocab=400)
    passage = [*range(10, 110)]
    target.script = {101 + i: token for i, token in enumerate(passage[1:])}
    prompt = [*passage, passage[0]]
    done = loop(target, NgramDrafter(FixedGamma(8)), prompt, 99)
    assert done.tokens == passage[1:]
    # The prefill, then nine tokens a round, in a match that is there from the first one on.
    assert len(done.rounds) == 1 + 11
    assert all(r.accepted == r.drafted for r in done.rounds)


def test_drafted_tokens_that_were_refused_are_never_found() -> None:
    # 1 2 is always followed by something new: what is drafted after it is refused each time, and
    # what is drafted next must be what was committed instead.
    target = TableEngine(1, vocab=400)
    text = [1, 2, *(token for i in range(30) for token in (100 + i, 1, 2))]
    target.script = dict(enumerate(text))
    drafter = Remembering(NgramDrafter(FixedGamma(1)))
    done = loop(target, drafter, text[:5], len(text) - 5)
    assert [*text[:5], *done.tokens] == text
    # The prefill gives 101, the first round with a match stands behind the second 1 2.
    assert drafter.drafted == [[100 + i] for i in range(1, 29)]
    assert sum(r.accepted for r in done.rounds) == 0


# The distribution


def sample(setting: str, policy: GammaPolicy, least: int) -> tuple[float, float]:
    """Return the p-value of a long sample under the target's law, and the acceptance rate."""
    target, _ = chain()
    params = SamplingParams(verifier="rejection", **SETTINGS[setting])  # type: ignore[arg-type]
    drafter = NgramDrafter(policy, least=least, most=6)
    done = loop(target, drafter, [0], LONG, params, seed=least)
    evaluated = sum(r.evaluated for r in done.rounds)
    accepted = sum(r.accepted for r in done.rounds)
    return surprise(pairs([0, *done.tokens]), laws(target, params)), accepted / evaluated


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "gamma", "least"),
    [("warm", gamma, least) for gamma in (1, 3) for least in (1, 2, 4)]
    + [(setting, 3, 2) for setting in ("cool", "top-k", "top-p")],
)
def test_a_sample_is_distributed_as_the_targets_own(setting: str, gamma: int, least: int) -> None:
    likelihood, acceptance = sample(setting, FixedGamma(gamma), least)
    assert likelihood > ALPHA
    assert 0.2 < acceptance < 0.95


@pytest.mark.nightly
def test_dropping_tokens_leaves_the_distribution() -> None:
    assert sample("warm", Whim(5), 2)[0] > ALPHA


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [accepts_everything, draws_the_correction_from_the_target])
def test_a_wrong_rule_is_caught_by_the_same_sample(
    rule: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = VERIFIERS["rejection"]._replace(accept=rule)
    monkeypatch.setitem(VERIFIERS, "rejection", wrong)
    assert sample("warm", FixedGamma(3), 2)[0] < ALPHA


def test_a_proposal_is_what_the_protocol_asks_for() -> None:
    drafter: Drafter = NgramDrafter(FixedGamma(2))
    assert run_alone(drafter.propose([4, 5, 6, 4, 5], 9)) == Proposal(
        [6, 4], None, "ngram", [2 / 4, 3 / 5]
    )


# The suffix structure against a search of the whole text, after every token


def searched(text: list[int], least: int, most: int) -> Match | None:
    """Find the most recent earlier occurrence of the longest suffix by looking everywhere."""
    size = len(text)
    for length in range(min(most, size - 1), least - 1, -1):
        for end in range(size - 1, length - 1, -1):
            if text[end - length : end] == text[size - length :]:
                return Match(length, end)
    return None


def check(text: list[int], least: int, most: int) -> set[int]:
    """Hold every prefix of a text to the search; return the lengths that matched."""
    suffixes = Suffixes(least, most)
    lengths = set()
    for size, token in enumerate(text, 1):
        suffixes.extend([token])
        found = suffixes.longest()
        assert found == searched(text[:size], least, most)
        lengths.add(found.length if found else 0)
    assert len(suffixes) == len(text)
    return lengths


BOUNDS = st.tuples(st.integers(1, 5), st.integers(0, 8)).map(lambda b: (b[0], b[0] + b[1]))
LETTERS = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=80))
PIECES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=3)
"""Texts made of a few pieces over and over: matches far longer than `most`, and their ends."""
COPIES = PIECES.flatmap(
    lambda pieces: st.lists(st.sampled_from(pieces), max_size=14).map(
        lambda chosen: [token for piece in chosen for token in piece]
    )
)


@settings(max_examples=300, deadline=None)
@given(text=LETTERS | COPIES, bounds=BOUNDS)
def test_the_match_is_the_longest_and_of_those_the_most_recent(
    text: list[int], bounds: tuple[int, int]
) -> None:
    check(text, *bounds)


@pytest.mark.parametrize("letters", [1, 2, 3, 20])
@pytest.mark.parametrize("bounds", [(1, 1), (1, 4), (2, 16), (3, 3), (5, 40)], ids=str)
def test_long_texts_match_at_every_length(letters: int, bounds: tuple[int, int]) -> None:
    rng = random.Random(letters)
    text = [rng.randrange(letters) for _ in range(150)]
    text += text[20:100] + [rng.randrange(letters) for _ in range(30)] + text[90:180]
    assert check(text, *bounds) >= set(range(bounds[0], bounds[1] + 1))


@given(text=COPIES, bounds=BOUNDS, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_it_does_not_matter_how_many_tokens_come_at_once(
    text: list[int], bounds: tuple[int, int], cuts: list[int]
) -> None:
    suffixes = Suffixes(*bounds)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(edges):
        suffixes.extend(text[start:end])
        assert suffixes.longest() == searched(text[:end], *bounds)


def test_a_text_without_repetition_matches_nothing() -> None:
    suffixes = Suffixes(1, 8)
    assert suffixes.longest() is None
    suffixes.extend(range(1000))
    assert suffixes.longest() is None
    suffixes.extend([500])
    assert suffixes.longest() == Match(1, 501)
    suffixes.extend([501])
    assert suffixes.longest() == Match(2, 502)


def test_recency_decides_among_matches_of_the_full_length() -> None:
    # The first occurrence agrees on five tokens, the later one on three: with three asked for,
    # the later one is taken.
    text = [1, 2, 3, 4, 5, 9, 7, 3, 4, 5, 8, 1, 2, 3, 4, 5]
    for most, found in ((5, Match(5, 5)), (4, Match(4, 5)), (3, Match(3, 10))):
        suffixes = Suffixes(2, most)
        suffixes.extend(text)
        assert suffixes.longest() == found


class Counted(Suffixes):
    """Counts the transitions looked up and made."""

    work = 0

    def _after(self, state: int, token: int) -> int:
        self.work += 1
        return super()._after(state, token)

    def _lead(self, state: int, token: int, to: int) -> None:
        self.work += 1
        super()._lead(state, token, to)


def texts(size: int) -> dict[str, list[int]]:
    rng = random.Random(0)
    block = [rng.randrange(5000) for _ in range(size // 4)]
    return {
        "one letter": [7] * size,
        "two letters": [rng.randrange(2) for _ in range(size)],
        "words": [min(int(rng.paretovariate(0.7)), 5000) for _ in range(size)],
        "copies": block * 4,
        "period": [1, 2, 3] * (size // 3),
        # The classic worst case of the automaton, a b^n: splits at every turn.
        "abbb": [0] + [1] * (size - 1),
    }


@pytest.mark.parametrize("name", texts(4))
def test_a_token_costs_as_much_in_a_long_text_as_in_a_short_one(name: str) -> None:
    def work(size: int) -> float:
        suffixes = Counted(2, 16)
        suffixes.extend(texts(size)[name])
        return suffixes.work / size

    # At most 3 transitions and 2 states a token are ever made; each is looked up a few times.
    assert work(8000) <= 10
    assert work(8000) <= 1.2 * work(1000)


@pytest.mark.parametrize("name", texts(4))
def test_a_token_takes_a_few_hundred_bytes_at_most(name: str) -> None:
    text = texts(8000)[name]
    tracemalloc.start()
    try:
        suffixes = Suffixes(2, 16)
        suffixes.extend(text)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 500 * len(suffixes)


@pytest.mark.parametrize(("least", "most"), [(0, 4), (-1, 4), (5, 4), (0, 0)])
def test_suffixes_of_impossible_lengths_are_refused(least: int, most: int) -> None:
    with pytest.raises(RequestError, match=rf"suffixes of {least} to {most} tokens .* at least 1"):
        Suffixes(least, most)
