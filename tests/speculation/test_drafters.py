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
from specrt.speculation.drafters import DRAFTERS, DrafterSpec
from specrt.speculation.gamma import DraftDecision
from specrt.speculation.pool import DecodingMode, DrafterPool, Models
from specrt.speculation.round import NOTHING, Drafter, Passes, Proposal, Round, run_alone
from specrt.speculation.target import VERIFIERS
from specrt.text.tokenizer import Tokenizer
from speculation.support import PROMPT, Script, Whim, drafter_named, loop
from support.rows import packed
from support.toy import TableEngine, generator, near, plain

COSTS = Costs(tuple(100.0 + 5 * g for g in range(9)), tuple(4.0 * g for g in range(9)))
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
GAMMAS = tuple(range(9))
SOURCES = {"model": {"model"}, "ngram": {"ngram"}, "cascade": {"model", "ngram"}, "none": set()}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.2, "typical_p": 0.7},
    {"verifier": "rejection", "top_p": 0.5},  # at temperature 0 every rule is greedy
]


def models(draft: bool = True, closeness: float = 0.9, **options: Any) -> Models:
    target = TableEngine(3)
    found = near(target, 4, closeness) if draft else None
    return Models(target, found, GAMMAS, costs=COSTS, **options)


# The contract


class Watched:
    """Holds another drafter's proposals to the protocol, and notes them."""

    def __init__(self, inner: Drafter) -> None:
        self.observe = inner.observe
        self._inner = inner
        self.proposals: list[tuple[list[int], int, Proposal]] = []
        """The text, the room and what was proposed."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        before = list(tokens)
        proposal = yield from self._inner.propose(tokens, room)
        assert tokens == before, "a drafter writes nothing to the text"
        count, drawn_from = len(proposal.tokens), proposal.distributions
        assert count <= max(room, 0)
        assert len(proposal.confidences) in (0, count)
        assert bool(proposal.source) is bool(count)
        if drawn_from is not None:
            pairs = zip(drawn_from, proposal.tokens, strict=True)
            assert all(law.prob(token) > 0 for law, token in pairs)
        self.proposals.append((before, room, proposal))
        return proposal


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
    if not DRAFTERS[name].needs_model:  # a text that does not continue the one before it
        for text in ([1, 2, 9, 1, 2], [7, 8], [1, 2, 9, 8, 5, 0, 1, 2]):
            fresh = drafter_named(name, near(target, 50, 0.6), Script(5), params)
            assert run_alone(drafter.propose(text, 9)) == run_alone(fresh.propose(text, 9))


@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("decision", DraftDecision)
@pytest.mark.parametrize("name", ["model", "ngram"])
def test_what_the_policy_decides_about_a_token_is_done(
    name: str, place: int, decision: DraftDecision
) -> None:
    def proposed(policy: Script) -> Proposal:
        text = [*range(10, 20), 10, 11]
        return run_alone(drafter_named(name, TableEngine(1), policy).propose(text, 100))

    policy = Script(7, *[DraftDecision.CONTINUE] * (place - 1), decision)
    found, goes_on = proposed(policy), decision is DraftDecision.CONTINUE
    kept = 7 if goes_on else place - (decision is DraftDecision.DISCARD)
    assert list(found.tokens) == list(proposed(Script(7)).tokens[:kept])
    assert [drafted for drafted, _ in policy.weighed] == [*range(1, (7 if goes_on else place) + 1)]
    assert list(found.confidences) == [c for _, c in policy.weighed][:kept]
    assert kept or found is NOTHING


class Fills:
    """Proposes a token more than there is room for."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        return Proposal([1] * (room + 1), None, "fills")

    def observe(self, tokens: Sequence[int], round_: Round) -> None: ...


def test_a_drafter_that_takes_more_than_its_room_harms_no_other_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DRAFTERS, "fills", DrafterSpec(lambda _: Fills(), ("fills",)))
    target, draft = (packed(TableEngine(3, max_width=8), 2) for _ in range(2))
    made = Generator(Models(target, draft, (0, 1, 2, 3), 3), tokenizer)
    other, stream = made.stream(PROMPT, PARAMS), made.stream(PROMPT, PARAMS, drafter="fills")
    next(other)
    with pytest.raises(RequestError, match=r"'fills' proposed 8 tokens.* up to 7"):
        stream.finish()
    assert other.finish().token_ids == made.generate(PROMPT, PARAMS, gamma=0).token_ids


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_of_no_numbers_ends_no_completion(
    tokenizer: Tokenizer, verifier: str, temperature: float, value: float
) -> None:
    def break_after(calls: int, logits: NDArray[np.float32]) -> None:
        if calls > 4:
            logits[...] = value

    target = TableEngine(3)
    given = Models(target, near(target, 4, 0.9, corrupt=break_after), GAMMAS)
    params = replace(PARAMS, temperature=temperature, seed=1, verifier=verifier)
    done = Generator(given, tokenizer).generate(PROMPT, params, gamma=3)
    assert len(done.token_ids) == 60
    assert 0 < done.speculation.drafted <= 4
    if verifier == "match" or params.greedy:
        alone = Generator(given, tokenizer).generate(PROMPT, params, gamma=0)
        assert done.token_ids == alone.token_ids


# Policies and costs


def test_only_drafts_that_run_passes_pay_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a drafter from outside, whose policy has the name of another's, learns by itself."""
    monkeypatch.setitem(DRAFTERS, "paid", DrafterSpec(DRAFTERS["none"].make, ("ngram", "mine")))
    costs = Costs((100.0, 101.0, 102.0, 103.0, 104.0), (0.0, 900.0, 1800.0, 2700.0, 3600.0))
    policies = DrafterPool(replace(models(), costs=costs)).borrow()
    mode = DecodingMode(greedy=False, processed=False)
    sources = [("model", "model"), ("ngram", "ngram"), ("cascade", "lookup"), ("paid", "ngram")]
    gammas = [policies.policy(*source, "auto", mode).choose() for source in sources]
    assert gammas == [0, max(GAMMAS), max(GAMMAS), 0]
    with pytest.raises(RequestError, match=r"'other'.* 'ngram', 'mine'"):
        policies.policy("paid", "other", "auto", mode)


def test_statistics_say_that_drafting_does_not_pay_and_why(tokenizer: Tokenizer) -> None:
    dear = Costs(tuple(1e6 * (1 + g) for g in GAMMAS), tuple(1e6 * g for g in GAMMAS))
    made = Generator(replace(models(), costs=dear), tokenizer)
    counts = made.generate(PROMPT, PARAMS, gamma="auto").speculation
    assert "times as long" in (counts.fallback or "")
    for gamma in (4, 0):  # a fixed gamma is used whatever it costs
        counts = made.generate(PROMPT, PARAMS, gamma=gamma).speculation
        assert (counts.drafted > 0, counts.fallback) == (gamma > 0, None)


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
            assert (counts.gamma, counts.drafter, counts.fallback) == (4, name, None)
    counts = made.generate(PROMPT, PARAMS).speculation
    assert (counts.drafter, counts.fallback) == ("none" if absent else "ngram", absent)


# What a grammar leaves no choice about is drafted for nothing


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 1}], ids=str)
def test_one_way_takes_few_rounds_and_no_draft(
    tokenizer: Tokenizer, name: str, options: dict[str, Any]
) -> None:
    """The toy spells in bytes where it may; what must follow is spelled as the tokenizer would."""
    pytest.importorskip("llguidance", reason="needs the structured extra")
    prompt, fact, end = list(b"is it?"), "yes, the thing is in the", 263
    target, spelled = TableEngine(1, vocab=272), tokenizer.encode(fact)
    target.script = {len(prompt) + i: token for i, token in enumerate(spelled)}
    one = generator(target, TableEngine(2, vocab=272), tokenizer, eos=[end])
    # All else is ruled out, whatever is drawn.
    params = SamplingParams(choice=(fact,), allowed_token_ids=(*spelled, end), **options)
    done = one.generate(prompt, params, gamma=2, drafter=name)
    assert (done.text, done.token_ids[-1], done.finish_reason) == (fact, end, "stop")
    assert done.token_ids == one.generate(prompt, params, gamma=0).token_ids
    if DRAFTERS[name].policies:
        drafted, accepted = done.speculation.sources["forced"]
        assert drafted == accepted
        assert done.speculation.rounds <= -(-len(spelled) // 9) + 1
