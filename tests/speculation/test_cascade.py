"""Two drafters in turn: who is asked, who learns what, and that the output stays the plain one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.toy import Run, TableEngine, near, plain
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation import target as target_module
from specrt.speculation.drafters import CascadeDrafter, ModelDrafter, NoDrafter
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.round import NOTHING, Passes, Proposal, Round, run_alone
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

PROMPT = [3, 1, 4, 1, 5]
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


def test_the_first_drafter_goes_first() -> None:
    first, second = Says(1, 2), Says(3)
    assert run_alone(CascadeDrafter(first, second).propose([9], 7)) is first.proposal
    assert (first.rooms, second.rooms) == ([7], [])


def test_the_second_is_asked_where_the_first_has_nothing() -> None:
    first, second = Says(), Says(3)
    assert run_alone(CascadeDrafter(first, second).propose([9], 7)) is second.proposal
    assert (first.rooms, second.rooms) == ([7], [7])
    assert run_alone(CascadeDrafter(Says(), Says()).propose([9], 7)) is NOTHING


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


def test_a_cascade_within_a_cascade_tells_those_that_were_asked() -> None:
    for proposer in range(3):
        drafters = [Says(), Says(), Says()]
        drafters[proposer].proposal = Proposal((1,))
        inner_last = CascadeDrafter(drafters[0], CascadeDrafter(*drafters[1:]))
        inner_first = CascadeDrafter(CascadeDrafter(*drafters[:2]), drafters[2])
        for made in (inner_last, inner_first):
            run_alone(made.propose([5], 9))
            made.observe(AFTER, ROUND)
        on_update = [[r for _, r in drafter.on_update] for drafter in drafters]
        assert on_update[:proposer] == [[PLAIN] * 2] * proposer
        assert on_update[proposer] == [ROUND] * 2
        assert on_update[proposer + 1 :] == [[]] * (2 - proposer)


def test_each_policy_learns_from_its_own_tokens_and_plain_steps() -> None:
    target, draft = mixed()
    ngram, model = Counts(4), Counts(3)
    done = loop(target, cascade(draft, ngram=ngram, model=model), PROMPT, 150)
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
        target.script |= {len(PROMPT) + start + i: token for i, token in enumerate(passage)}
    draft = near(target, 8, 0.8)
    draft.max_width = max_width
    return target, draft


@pytest.mark.parametrize("max_width", [16, 3])
def test_the_draft_catches_up_in_one_pass_when_its_turn_comes(max_width: int) -> None:
    target, draft = mixed(max_width)
    done = loop(target, cascade(draft), PROMPT, 150)
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
        done = loop(target, drafter, PROMPT, 120, params, seed)
        assert done.tokens == loop(target, NoDrafter(), PROMPT, 120, params, seed).tokens
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


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sample_is_distributed_as_the_targets_own(setting: str) -> None:
    done = sample(setting, 6)
    assert likelihood(setting, done) > ALPHA
    for source in ("ngram", "model"):
        own = [r for r in done.rounds if r.source == source]
        assert len(own) > 100
        assert 0.2 < sum(r.accepted for r in own) / sum(r.evaluated for r in own) < 0.98


def test_a_wrong_rule_is_caught_by_the_same_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "rejection", accepts_everything)
    assert likelihood("warm", sample("warm", 6)) < ALPHA
