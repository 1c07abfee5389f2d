"""A drafter, a verifier and a logits processor from outside the package, one entry each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import Row, SamplingParams
from specrt.sampling.processors import PROCESSORS, ProcessorContext
from specrt.speculation.drafters import DRAFTERS, DrafterSpec, NoDrafter
from specrt.speculation.round import NOTHING, Passes, Proposal
from specrt.text.tokenizer import Tokenizer
from support.toy import TableEngine, generator, near

PROMPT = [1, 2, 3, 4]
SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=40)


@pytest.fixture
def toy(tokenizer: Tokenizer) -> Generator:
    target = TableEngine(5, memory=2)
    return generator(target, near(target, 6, 0.8), tokenizer)


class EchoDrafter(NoDrafter):
    """Proposes the last token, over and over."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        count = min(2, room)
        return Proposal([tokens[-1]] * count, None, "echo") if count else NOTHING


def test_a_drafter(toy: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"drafter 'echo' is unknown; known: [\w, ]+$"):
        toy.generate(PROMPT, SAMPLED, drafter="echo")
    monkeypatch.setitem(DRAFTERS, "echo", DrafterSpec(lambda _: EchoDrafter(), ("echo",)))
    done = toy.generate(PROMPT, SAMPLED, gamma=2, drafter="echo")
    assert done.token_ids == toy.generate(PROMPT, SAMPLED, gamma=0).token_ids
    assert set(done.speculation.sources) == {"echo"}
    assert done.speculation.drafted > 0


class OddOnly:
    """Rules out even tokens above a limit; it needs no history."""

    def __init__(self, limit: int, _: ProcessorContext) -> None:
        self._limit = limit

    def commit(self, tokens: Sequence[int]) -> None: ...

    def edit(self, row: Row, path: Sequence[int]) -> None:
        row[self._limit :: 2] = -np.inf


def test_a_processor(toy: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(SAMPLED, extra_args={"odd_only": 4})
    with pytest.raises(RequestError, match="extra_args has 'odd_only'"):
        toy.generate(PROMPT, params)
    monkeypatch.setitem(PROCESSORS, "odd_only", OddOnly)
    done = toy.generate(PROMPT, params)
    assert done.token_ids == toy.generate(PROMPT, params, gamma=0).token_ids
    assert any(token > 4 for token in done.token_ids)
    assert not any(token >= 4 and token % 2 == 0 for token in done.token_ids)
