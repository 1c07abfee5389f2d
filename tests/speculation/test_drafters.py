"""Which drafter a completion gets, what is refused, and what policies keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.toy import Run, TableEngine, generator, near, plain
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import CascadeDrafter, ForcedDrafter, ModelDrafter, NoDrafter
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.pool import DecodingMode, DrafterPool, Models
from specrt.speculation.round import NOTHING, Drafter, Passes, Proposal, Round, run_alone
from specrt.speculation.target import VERIFIERS
from specrt.text import Tokenizer
from speculation.test_ngram import loop
from speculation.test_verifiers import (
    ALPHA,
    LONG,
    SETTINGS,
    accepts_everything,
    chain,
    laws,
    pairs,
    surprise,
)

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
    pool = DrafterPool(models(), COSTS)
    policies = pool.borrow()
    greedy = DecodingMode(greedy=True, processed=False)
    first = policies.adaptive("model", "model", greedy)
    pool.give_back(policies)
    policies = pool.borrow()
    assert policies.adaptive("cascade", "model", greedy) is first
    # Acceptance differs between drafters, between greedy decoding and sampling, and by processors.
    others = [
        policies.adaptive("ngram", "ngram", greedy),
        policies.adaptive("model", "model", DecodingMode(greedy=False, processed=False)),
        policies.adaptive("model", "model", DecodingMode(greedy=True, processed=True)),
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
    made = DrafterPool(models(draft=False), COSTS)
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


# What a grammar leaves no choice about is drafted for nothing


FORCED_PROMPT, EOS = list(b"is it?"), 263
FACT = "yes, the thing is in the"


class Inner(Drafter):
    """Proposes one token, and remembers what it heard."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.on_update: list[Round] = []

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        self.asked.append(room)
        return Proposal([7], None, "inner")

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        self.on_update.append(round_)


@pytest.mark.parametrize(
    ("must", "room", "gammas", "proposed"),
    [
        ([1, 2, 3], 8, range(5), [1, 2, 3]),
        ([1, 2, 3], 2, range(5), [1, 2]),
        ([1, 2, 3, 4, 5, 6], 8, range(5), [1, 2, 3, 4]),
        ([1, 2, 3], 8, (0, 2, 4), [1, 2]),
        ([1], 8, (0, 2, 4), None),
        ([], 8, range(5), None),
        ([1, 2], 0, range(5), None),
    ],
)
def test_proposes_what_passes_were_built_for(
    must: list[int], room: int, gammas: Sequence[int], proposed: list[int] | None
) -> None:
    inner = Inner()
    drafter = ForcedDrafter(inner, lambda tokens: must, gammas)
    found: Proposal = run_alone(drafter.propose([1], room))
    round_ = Round([9], len(found.tokens), 0, 0, 0, found.source)
    drafter.observe([1, 9], round_)
    if proposed is None:
        assert (found.tokens, inner.asked, inner.on_update) == ([7], [room], [round_])
    else:
        assert (found.tokens, found.source, found.distributions) == (proposed, "forced", None)
        assert not inner.asked
        assert not inner.on_update


@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade"])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_way_takes_few_rounds_and_no_draft(
    tokenizer: Tokenizer, drafter: str, verifier: str, temperature: float
) -> None:
    """The toy spells in bytes where it may; what must follow is spelled as the tokenizer would."""
    target, draft = TableEngine(1, vocab=272), TableEngine(2, vocab=272)
    spelled = tokenizer.encode(FACT)
    target.script = {len(FORCED_PROMPT) + i: token for i, token in enumerate(spelled)}
    one = generator(target, draft, tokenizer, eos=[EOS])
    params: dict[str, Any] = {"verifier": verifier, "temperature": temperature, "seed": 1}
    if temperature:  # all else is ruled out, whatever is drawn
        params["allowed_token_ids"] = [*spelled, EOS]
        params["top_k"] = 1
    asked = SamplingParams(choice=(FACT,), **params)
    done = one.generate(FORCED_PROMPT, asked, gamma=2, drafter=drafter)
    assert (done.text, done.token_ids[-1], done.finish_reason) == (FACT, EOS, "stop")
    drafted, accepted = done.speculation.sources["forced"]
    assert drafted == accepted
    assert done.speculation.rounds <= -(-len(spelled) // 9) + 1
    plain = one.generate(FORCED_PROMPT, asked, gamma=0)
    assert plain.token_ids == done.token_ids
    assert plain.speculation.drafted == 0


def test_without_speculation_nothing_is_forced(tokenizer: Tokenizer) -> None:
    one = generator(TableEngine(1, vocab=272), None, tokenizer, eos=[EOS])
    asked = SamplingParams(choice=(FACT,))
    how: dict[str, Any]
    for how in ({"gamma": 0}, {"gamma": 4, "drafter": "none"}):
        done = one.generate(FORCED_PROMPT, asked, **how)
        assert (done.text, done.speculation.drafted) == (FACT, 0)


# Two drafters in turn: who is asked, who learns what, and that the output stays the plain one


CASCADE_PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0)


class Says:
    """Proposes what it was given, and remembers what it was asked and told."""

    def __init__(self, *tokens: int, source: str = "") -> None:
        self.proposal = Proposal(tokens, source=source) if tokens else NOTHING
        self.rooms: list[int] = []
        self.on_update: list[tuple[list[int], Round]] = []

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        self.rooms.append(room)
        return self.proposal

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        self.on_update.append((list(tokens), round_))


class Counts:
    """A policy that drafts equally far, and remembers which rounds it learned from."""

    def __init__(self, gamma: int, first: DraftDecision = DraftDecision.CONTINUE) -> None:
        self.gamma = gamma
        self.first = first
        self.seen: list[Round] = []

    def choose(self) -> int:
        return self.gamma

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        return self.first if drafted == 1 else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        self.seen.append(round_)


def cascade(
    draft: TableEngine,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    ngram: GammaPolicy | None = None,
    model: GammaPolicy | None = None,
) -> CascadeDrafter:
    lookup = NgramDrafter(ngram or FixedGamma(4))
    return CascadeDrafter(
        lookup, ModelDrafter(KVCache(draft), params, Noise(seed), model or FixedGamma(3))
    )


# Who is asked


@pytest.mark.parametrize(
    "policy", [Counts(0), Counts(4, DraftDecision.DISCARD)], ids=["a plain step", "nothing kept"]
)
def test_the_model_drafts_where_lookups_policy_would_not(policy: Counts) -> None:
    text = [1, 2, 3, 1, 2]
    made = cascade(TableEngine(1), ngram=policy)
    assert run_alone(made.propose(text, 9)).source == "model"
    assert run_alone(cascade(TableEngine(1)).propose(text, 9)).source == "ngram"


# Who learns what


ROUND = Round([1, 2, 9], 4, 2, 30, 40, "one", (0.5, 0.6, 0.7, 0.8))
PLAIN = Round([1], 0, 0, 30, 40)
"""What it was to a drafter that was asked, and had nothing to propose."""
AFTER = [5, 1, 2, 9]


def test_the_second_hears_nothing_of_a_round_it_was_not_asked_in() -> None:
    first, second = Says(1), Says(2)
    made = CascadeDrafter(first, second)
    run_alone(made.propose([5], 9))
    made.observe(AFTER, ROUND)
    assert (first.on_update, second.on_update) == ([(AFTER, ROUND)], [])


def test_a_round_that_the_second_drafted_was_a_plain_step_to_the_first() -> None:
    first, second = Says(), Says(2)
    made = CascadeDrafter(first, second)
    run_alone(made.propose([5], 9))
    made.observe(AFTER, ROUND)
    assert (first.on_update, second.on_update) == ([(AFTER, PLAIN)], [(AFTER, ROUND)])


def test_both_hear_of_a_plain_step_as_it_was() -> None:
    drafters = [Says(), Says()]
    made = CascadeDrafter(*drafters)
    run_alone(made.propose([5], 9))
    made.observe([5, 9], step := Round([9], 0, 0, 5, 6))
    assert [d.on_update for d in drafters] == [[([5, 9], step)]] * 2


def test_each_policy_learns_from_its_own_tokens_and_plain_steps() -> None:
    target, draft = mixed()
    ngram, model = Counts(4), Counts(3)
    done = loop(target, cascade(draft, ngram=ngram, model=model), CASCADE_PROMPT, 150)
    after = done.rounds[1:]
    assert {r.source for r in after} >= {"ngram", "model"}
    assert model.seen == [r for r in after if r.source != "ngram"]
    assert [s if s.drafted else None for s in ngram.seen] == [
        r if r.source == "ngram" else None for r in after
    ]
    assert all(len(s.tokens) == s.accepted + 1 for s in ngram.seen + model.seen)


# The draft's cache


def mixed(max_width: int = 16) -> tuple[TableEngine, TableEngine]:
    """Return a target whose text goes from new passages to copies and back, and a close draft."""
    target = TableEngine(7)
    passage = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
    for start in (0, 30, 60, 75, 110):
        target.script |= {len(CASCADE_PROMPT) + start + i: token for i, token in enumerate(passage)}
    draft = near(target, 8, 0.8)
    draft.max_width = max_width
    return target, draft


@pytest.mark.parametrize("max_width", [16, 3])
def test_the_draft_catches_up_in_one_pass_when_its_turn_comes(max_width: int) -> None:
    target, draft = mixed(max_width)
    done = loop(target, cascade(draft), CASCADE_PROMPT, 150)
    assert done.tokens == plain(target, CASCADE_PROMPT, 150)
    calls = iter(draft.calls)
    committed, held, behind = len(CASCADE_PROMPT) + 1, 0, set()
    for round_ in done.rounds[1:]:
        assert round_.caught_up == (round_.source == "model" and committed - held > 2)
        if round_.source == "model":
            behind.add(committed - held)
            while held < committed:
                call = next(calls)
                assert call.start == held
                # As wide as it may be, and no token twice.
                assert call.width in (committed - held, max_width, max_width - 1)
                held += call.width
            assert held == committed
            drafting = [next(calls) for _ in range(round_.drafted - 1)]
            assert drafting == [(committed + i, 1, 1) for i in range(round_.drafted - 1)]
            held = min(held + round_.drafted - 1, committed + len(round_.tokens) - 1)
        committed += len(round_.tokens)
    # No pass was run in rounds that lookup drafted, and the draft was well behind at times.
    assert next(calls, None) is None
    assert {1, 2} <= behind
    assert max(behind - {len(CASCADE_PROMPT) + 1}) > 8


def test_near_the_end_of_the_context_neither_drafts_beyond_it() -> None:
    for prompt_length in range(20, 25):
        target = TableEngine(2, vocab=5, memory=2, max_length=24)
        draft = near(target, 3, 0.9)
        prompt = [i % 5 for i in range(prompt_length)]
        new = 24 + 1 - prompt_length
        assert loop(target, cascade(draft), prompt, new).tokens == plain(target, prompt, new)
        assert max(c.start + c.width for c in [*target.calls, *draft.calls]) <= 24


# The output


@pytest.mark.parametrize("gammas", [(1, 1), (4, 2), (8, 3), (2, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_cascade_never_changes_the_output(
    params: SamplingParams, gammas: tuple[int, int]
) -> None:
    sources: set[str] = set()
    refused = 0
    for seed in range(8):
        target = TableEngine(seed, vocab=9, memory=2 + seed % 2, scale=2.0)
        drafter = cascade(near(target, seed + 50, 0.7), params, seed, *map(FixedGamma, gammas))
        done = loop(target, drafter, CASCADE_PROMPT, 120, params, seed)
        assert done.tokens == loop(target, NoDrafter(), CASCADE_PROMPT, 120, params, seed).tokens
        sources |= {r.source for r in done.rounds[1:] if r.drafted}
        refused += sum(r.evaluated - r.accepted for r in done.rounds)
    assert sources == {name for name, g in zip(("ngram", "model"), gammas, strict=True) if g}
    assert refused > 10


def sample(setting: str, least: int) -> Run:
    """Return a long sample that both drafted, by turns."""
    target, draft = chain()
    params = SamplingParams(verifier="rejection", **SETTINGS[setting])  # type: ignore[arg-type]
    model = ModelDrafter(KVCache(draft), params, Noise(least), FixedGamma(2))
    drafter = CascadeDrafter(NgramDrafter(FixedGamma(3), least=least), model)
    return loop(target, drafter, [0], LONG, params, least)


def likelihood(setting: str, done: Run) -> float:
    """Return the p-value of a sample under the target's law."""
    params = SamplingParams(verifier="rejection", **SETTINGS[setting])  # type: ignore[arg-type]
    return surprise(pairs([0, *done.tokens]), laws(chain()[0], params))


@pytest.mark.nightly
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sample_is_distributed_as_the_targets_own(setting: str) -> None:
    done = sample(setting, 6)
    assert likelihood(setting, done) > ALPHA
    for source in ("ngram", "model"):
        own = [r for r in done.rounds if r.source == source]
        assert len(own) > 100
        assert 0.2 < sum(r.accepted for r in own) / sum(r.evaluated for r in own) < 0.98


@pytest.mark.nightly
def test_a_wrong_rule_is_caught_by_the_same_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        VERIFIERS, "rejection", VERIFIERS["rejection"]._replace(accept=accepts_everything)
    )
    assert likelihood("warm", sample("warm", 6)) < ALPHA
