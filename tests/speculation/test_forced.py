"""What a grammar leaves no choice about is drafted for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runtime.toy import TableEngine, generator
from specrt.params import SamplingParams
from specrt.speculation.drafters import ForcedDrafter
from specrt.speculation.round import Drafter, Passes, Proposal, Round, run_alone
from specrt.text import Tokenizer

PROMPT, EOS = list(b"is it?"), 263
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
    target.script = {len(PROMPT) + i: token for i, token in enumerate(spelled)}
    one = generator(target, draft, tokenizer, eos=[EOS])
    params: dict[str, Any] = {"verifier": verifier, "temperature": temperature, "seed": 1}
    if temperature:  # all else is ruled out, whatever is drawn
        params["allowed_token_ids"] = [*spelled, EOS]
        params["top_k"] = 1
    asked = SamplingParams(choice=(FACT,), **params)
    done = one.generate(PROMPT, asked, gamma=2, drafter=drafter)
    assert (done.text, done.token_ids[-1], done.finish_reason) == (FACT, EOS, "stop")
    drafted, accepted = done.speculation.sources["forced"]
    assert drafted == accepted
    assert done.speculation.rounds <= -(-len(spelled) // 9) + 1
    plain = one.generate(PROMPT, asked, gamma=0)
    assert plain.token_ids == done.token_ids
    assert plain.speculation.drafted == 0


def test_without_speculation_nothing_is_forced(tokenizer: Tokenizer) -> None:
    one = generator(TableEngine(1, vocab=272), None, tokenizer, eos=[EOS])
    asked = SamplingParams(choice=(FACT,))
    how: dict[str, Any]
    for how in ({"gamma": 0}, {"gamma": 4, "drafter": "none"}):
        done = one.generate(PROMPT, asked, **how)
        assert (done.text, done.speculation.drafted) == (FACT, 0)
