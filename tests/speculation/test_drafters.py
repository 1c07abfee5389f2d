"""Drafters leave the output as it is; what they propose, what policies learn, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import DRAFTERS, CascadeDrafter, DrafterSpec, ForcedDrafter
from specrt.speculation.gamma import DraftDecision
from specrt.speculation.pool import DecodingMode, DrafterPool, Models
from specrt.speculation.round import NOTHING, Passes, Proposal, Round, run_alone
from specrt.speculation.target import VERIFIERS
from specrt.text import Tokenizer
from speculation.support import PROMPT, Script, Watched, Whim, drafter_named, loop
from support.rows import packed
from support.toy import TableEngine, generator, near, plain

COSTS = Costs(tuple(100.0 + 5 * g for g in range(9)), tuple(4.0 * g for g in range(9)))
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
GAMMAS = tuple(range(9))
SOURCES = {"model": {"model"}, "ngram": {"ngram"}, "cascade": {"model", "ngram"}, "none": set()}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "typical_p": 0.7},
    {"verifier": "rejection", "top_p": 0.5},  # at temperature 0 every rule is greedy
]


def models(draft: bool = True, closeness: float = 0.9, **options: Any) -> Models:
    target = TableEngine(3)
    found = near(target, 4, closeness) if draft else None
    return Models(target, found, GAMMAS, measure=lambda _: COSTS, **options)


# The contract


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_and_no_policy_changes_the_output(name: str, options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    judged = [0, 0]
    for seed, gamma in enumerate((1, 3, 8, "whim", 4)):
        # What comes next depends on a few tokens, so texts repeat now and then, and break off.
        target = TableEngine(seed, vocab=9, memory=2 + seed % 2, scale=2.0)
        policy: Any = Whim(seed) if gamma == "whim" else gamma
        drafter = Watched(drafter_named(name, near(target, 50, 0.7), policy, params, seed))
        done = loop(target, drafter, PROMPT, 100, params, seed)
        alone = loop(target, drafter_named("none", target, 0), PROMPT, 100, params, seed)
        assert done.tokens == alone.tokens
        if params.greedy:
            assert done.tokens == plain(target, PROMPT, 100)
        assert {r.source for r in done.rounds if r.drafted} <= SOURCES[name]
        if isinstance(policy, Whim) and name != "cascade":
            assert policy.seen == (done.rounds[1:] if SOURCES[name] else [])
        judged[0] += sum(r.accepted for r in done.rounds)
        judged[1] += sum(r.evaluated - r.accepted for r in done.rounds)
    assert min(judged) > 10 or not SOURCES[name], "both outcomes, often"


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_proposal_depends_on_the_text_alone(name: str, verifier: str) -> None:
    """Not on what was drafted before and refused, nor on rounds that others drafted."""
    params = SamplingParams(temperature=1.0, verifier=verifier)
    target = TableEngine(2, vocab=9, memory=2, scale=2.0)
    policy = Script(5)
    drafter = Watched(drafter_named(name, near(target, 50, 0.6), policy, params))
    loop(target, drafter, PROMPT, 120, params)
    for text, room, proposal in drafter.proposals[::3]:
        fresh = drafter_named(name, near(target, 50, 0.6), Script(5), params)
        assert run_alone(fresh.propose(text, room)).tokens == proposal.tokens
    # A text that does not continue the one before it.
    if not DRAFTERS[name].needs_model:
        for text in ([1, 2, 9, 1, 2], [7, 8], [1, 2, 9, 8, 5, 0, 1, 2]):
            fresh = drafter_named(name, near(target, 50, 0.6), Script(5), params)
            assert run_alone(drafter.propose(text, 9)) == run_alone(fresh.propose(text, 9))


@pytest.mark.parametrize("gamma", [1, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_context_is_filled_to_its_last_position(name: str, gamma: int) -> None:
    for length in range(13, 25):
        target = TableEngine(2, vocab=5, memory=2, max_length=24)
        draft, prompt = near(target, 3, 0.9), [i % 5 for i in range(length)]
        drafter = Watched(drafter_named(name, draft, gamma))
        found = loop(target, drafter, prompt, 99).tokens
        assert found == plain(target, prompt, 99)
        assert len(found) == 25 - length
        assert max(c.start + c.width for c in target.calls) == 24
        assert max((c.start + c.width for c in draft.calls), default=0) <= 24


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("gamma", [0, 3, "auto"])
def test_a_generator_uses_the_drafter_that_is_named(
    tokenizer: Tokenizer, name: str, gamma: Any
) -> None:
    made = Generator(models(), tokenizer)
    prompt = PROMPT * 3
    done = made.generate(prompt, PARAMS, gamma=gamma, drafter=name)
    assert done.token_ids == made.generate(prompt, PARAMS, gamma=0).token_ids
    counts = done.speculation
    assert (counts.gamma, counts.drafter) == (gamma, name)
    assert set(counts.sources) <= SOURCES[name]
    assert bool(counts.drafted) is bool(gamma and SOURCES[name])


class Fills:
    """Proposes as many tokens as there is room for, and some more."""

    def __init__(self, excess: int) -> None:
        self._excess = excess

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        return Proposal([1] * (room + self._excess), None, "fills")

    def observe(self, tokens: Sequence[int], round_: Round) -> None: ...


@pytest.mark.parametrize("excess", [0, 1, 40])
def test_the_room_of_a_drafter_is_what_a_pass_verifies(
    tokenizer: Tokenizer, excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that takes more of it harms no other request."""
    monkeypatch.setitem(DRAFTERS, "fills", DrafterSpec(lambda _: Fills(excess), ("fills",)))
    target, draft = (packed(TableEngine(3, max_width=8), 2) for _ in range(2))
    made = Generator(Models(target, draft, (0, 1, 2, 3), 3), tokenizer)
    plain = made.generate(PROMPT, PARAMS, gamma=0).token_ids
    other, stream = made.stream(PROMPT, PARAMS), made.stream(PROMPT, PARAMS, drafter="fills")
    next(other)
    if excess:
        with pytest.raises(RequestError, match=rf"'fills' proposed {7 + excess} tokens.* up to 7"):
            stream.finish()
    else:
        assert stream.finish().token_ids == plain
    assert other.finish().token_ids == plain


@pytest.mark.parametrize("verifier", VERIFIERS)
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
        assert (
            done.token_ids
            == Generator(given, tokenizer).generate(PROMPT, params, gamma=0).token_ids
        )


# Policies and costs


def test_costs_are_measured_once_and_only_where_gamma_is_left_open(tokenizer: Tokenizer) -> None:
    measured: list[Models] = []
    given = replace(models(), measure=lambda m: measured.append(m) or COSTS)  # type: ignore[func-returns-value]
    made = Generator(given, tokenizer)
    made.generate(PROMPT, PARAMS, gamma=3)
    assert not measured
    for temperature in (0.0, 1.0):
        made.generate(PROMPT, SamplingParams(max_tokens=9, temperature=temperature), gamma="auto")
    assert measured == [given]


def test_what_a_policy_learned_stays_for_requests_of_its_kind() -> None:
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


def test_statistics_say_that_drafting_does_not_pay_and_why(tokenizer: Tokenizer) -> None:
    dear = Costs(tuple(1e6 * (1 + g) for g in GAMMAS), tuple(1e6 * g for g in GAMMAS))
    made = Generator(replace(models(), measure=lambda _: dear), tokenizer)
    counts = made.generate(PROMPT, PARAMS, gamma="auto").speculation
    assert "times as long" in (counts.fallback or "")
    for gamma in (4, 0):  # a fixed gamma is used whatever it costs
        counts = made.generate(PROMPT, PARAMS, gamma=gamma).speculation
        assert (counts.drafted > 0, counts.fallback) == (gamma > 0, None)


@pytest.mark.parametrize("built", [(0, 8), (0, 3, 5, 6)])
def test_auto_drafts_only_so_far_as_was_built(tokenizer: Tokenizer, built: tuple[int, ...]) -> None:
    made = Generator(replace(models(closeness=0.7), gammas=built), tokenizer)
    drafted = set()
    for first in range(8):
        left = 60 - 1
        for round_ in made.generate([3, first], PARAMS, gamma="auto").speculation.log:
            if left > max(built):  # near the end there is no room
                drafted.add(round_.drafted)
            left -= len(round_.tokens)
    assert drafted <= set(built)
    assert max(drafted) > 0


# What is refused, and what is used instead


def test_names_and_gammas_that_there_are_not_are_refused(tokenizer: Tokenizer) -> None:
    pool = DrafterPool(models())
    with pytest.raises(RequestError, match=r"drafter 'modle' is unknown.*'model'"):
        pool.check_drafter("modle")
    wrong: Any
    for wrong in ("fast", 1.0, True, -1, 9):
        with pytest.raises(RequestError, match="choose one of them or 'auto'"):
            pool.check_gamma(wrong)
    made = generator(TableEngine(3), near(TableEngine(3), 4, 0.9), tokenizer, gamma=5)
    assert made.generate(PROMPT, PARAMS).speculation.gamma == 5


@pytest.mark.parametrize("absent", [None, "the draft model is not opened: too large"])
def test_without_a_draft_model_another_drafter_is_the_default(
    tokenizer: Tokenizer, absent: str | None
) -> None:
    made = Generator(models(draft=False, absent=absent), tokenizer)
    for name, spec in DRAFTERS.items():
        if spec.needs_model:
            with pytest.raises(RequestError, match=absent or "this bundle has no draft model") as e:
                made.generate(PROMPT, drafter=name)
            assert "'ngram'" in str(e.value)
        else:  # nothing is missing to one that was named
            counts = made.generate([1, 2] * 20, PARAMS, gamma=4, drafter=name).speculation
            assert counts.fallback is None
    counts = made.generate(PROMPT, PARAMS).speculation
    assert (counts.drafter, counts.fallback) == ("none" if absent else "ngram", absent)


# Two drafters in turn


class Says:
    """Proposes what it was given, and remembers what it observed."""

    def __init__(self, *tokens: int, source: str = "says") -> None:
        self.proposal = Proposal(tokens, source=source) if tokens else NOTHING
        self.rooms: list[int] = []
        self.seen: list[tuple[list[int], Round]] = []

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        self.rooms.append(room)
        return self.proposal

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        self.seen.append((list(tokens), round_))


ROUND = Round([1, 2, 9], 4, 2, 30, 40, "one", (0.5, 0.6, 0.7, 0.8))
PLAIN = Round([1], 0, 0, 30, 40)
STEP = Round([9], 0, 0, 5, 6)


@pytest.mark.parametrize(
    ("first", "second", "round_", "seen"),
    [
        ((1,), (2,), ROUND, [[ROUND], []]),
        ((), (2,), ROUND, [[PLAIN], [ROUND]]),
        ((), (), STEP, [[STEP], [STEP]]),
    ],
)
def test_each_of_two_drafters_learns_from_rounds_of_its_own_and_plain_steps(
    first: tuple[int, ...], second: tuple[int, ...], round_: Round, seen: list[list[Round]]
) -> None:
    drafters = Says(*first), Says(*second)
    made = CascadeDrafter(*drafters)
    run_alone(made.propose([5], 9))
    made.observe([5, *round_.tokens], round_)
    text = [5, *round_.tokens]
    assert [d.seen for d in drafters] == [[(text, r) for r in rounds] for rounds in seen]


def mixed(max_width: int = 16) -> tuple[TableEngine, TableEngine]:
    """Return a target whose text goes from new passages to copies and back, and a close draft."""
    target = TableEngine(7)
    passage = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
    for start in (0, 30, 60, 75, 110):
        target.script |= {len(PROMPT) + start + i: token for i, token in enumerate(passage)}
    draft = near(target, 8, 0.8)
    draft.max_width = max_width
    return target, draft


@pytest.mark.parametrize("max_width", [16, 3])
def test_the_draft_catches_up_in_one_pass_when_its_turn_comes(max_width: int) -> None:
    target, draft = mixed(max_width)
    policies = {"lookup": Script(4), "model": Script(3)}
    drafter = drafter_named("cascade", draft, policies.__getitem__)
    done = loop(target, drafter, PROMPT, 150)
    assert done.tokens == plain(target, PROMPT, 150)
    calls = iter(draft.calls)
    committed, held, behind = len(PROMPT) + 1, 0, set()
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
    assert max(behind - {len(PROMPT) + 1}) > 8


@pytest.mark.parametrize("policy", [Script(0), Script(4, DraftDecision.DISCARD)])
def test_the_model_drafts_where_the_policy_of_lookup_would_not(policy: Script) -> None:
    policies = {"lookup": policy, "model": Script(3)}
    drafter = drafter_named("cascade", TableEngine(1), policies.__getitem__)
    assert run_alone(drafter.propose([1, 2, 3, 1, 2], 9)).source == "model"


# What a grammar leaves no choice about is drafted for nothing


FORCED_PROMPT, EOS = list(b"is it?"), 263
FACT = "yes, the thing is in the"


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
def test_forced_tokens_are_proposed_as_far_as_passes_were_built(
    must: list[int], room: int, gammas: Sequence[int], proposed: list[int] | None
) -> None:
    inner = Says(7)
    drafter = ForcedDrafter(inner, lambda tokens: must, gammas)
    found: Proposal = run_alone(drafter.propose([1], room))
    drafter.observe([1, 9], STEP)
    if proposed is None:
        assert (found.tokens, inner.rooms, inner.seen) == ((7,), [room], [([1, 9], STEP)])
    else:
        assert (found.tokens, found.source, found.distributions) == (proposed, "forced", None)
        assert not inner.rooms + inner.seen


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_way_takes_few_rounds_and_no_draft(
    tokenizer: Tokenizer, name: str, verifier: str, temperature: float
) -> None:
    """The toy spells in bytes where it may; what must follow is spelled as the tokenizer would."""
    pytest.importorskip("llguidance", reason="needs the structured extra")
    target, draft = TableEngine(1, vocab=272), TableEngine(2, vocab=272)
    spelled = tokenizer.encode(FACT)
    target.script = {len(FORCED_PROMPT) + i: token for i, token in enumerate(spelled)}
    one = generator(target, draft, tokenizer, eos=[EOS])
    options: dict[str, Any] = {"verifier": verifier, "temperature": temperature, "seed": 1}
    if temperature:  # all else is ruled out, whatever is drawn
        options |= {"allowed_token_ids": [*spelled, EOS], "top_k": 1}
    params = SamplingParams(choice=(FACT,), **options)
    done = one.generate(FORCED_PROMPT, params, gamma=2, drafter=name)
    assert (done.text, done.token_ids[-1], done.finish_reason) == (FACT, EOS, "stop")
    without = one.generate(FORCED_PROMPT, params, gamma=0)
    assert (without.token_ids, without.speculation.drafted) == (done.token_ids, 0)
    if not DRAFTERS[name].sources:
        assert done.speculation.drafted == 0
        return
    drafted, accepted = done.speculation.sources["forced"]
    assert drafted == accepted
    assert done.speculation.rounds <= -(-len(spelled) // 9) + 1
