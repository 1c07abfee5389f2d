"""Log-probabilities of real engines: those of one pass over the whole text."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from specrt.bundle import Bundle
from specrt.completion import Completion
from specrt.engine.backends import open_engine
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.distribution import Entry
from specrt.text import read_prompts

NEAR = 1e-4
"""Passes of other widths add in another order; what the documentation promises for fp32."""


@pytest.fixture(scope="module")
def prompts(generator: Generator, code_prompts: Path) -> list[list[int]]:
    return [generator.tokenizer.encode(p.text) for p in read_prompts(code_prompts)]


def forced(codelet: Path, text: list[int]) -> np.ndarray:
    """Return the log-probabilities after each token, from one pass over all of them."""
    manifest = Bundle.open(codelet).manifest
    engine = open_engine(
        manifest.backend,
        Bundle(codelet, manifest).file(manifest.target.engine),
        manifest.target.geometry,
        batch=manifest.batch,
        max_length=manifest.max_length,
        max_width=len(text),
        threads=1,
    )
    found: np.ndarray = log_softmax(engine.forward((text,), 0).logits[0].astype(np.float64), -1)
    engine.close()
    return found


def check(entries: list[Entry | None], text: list[int], first: int, rows: np.ndarray) -> None:
    """Hold entries of tokens from a position on to the rows before them."""
    assert entries
    for at, entry in enumerate(entries, first):
        assert entry is not None
        row = rows[at - 1]
        assert next(iter(entry)) == text[at]
        for token, told in entry.items():
            assert told.logprob == pytest.approx(row[token], abs=NEAR)
            above = (row > row[token] + NEAR).sum(), (row > row[token] - NEAR).sum()
            assert above[0] < told.rank <= above[1]


def emitted(done: Completion) -> list[Entry | None]:
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.token_ids)
    return list(done.logprobs)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 1},
        {"temperature": 0.9, "verifier": "rejection", "bad_words": ("return",), "seed": 1},
    ],
    ids=str,
)
def test_at_every_gamma_they_are_those_of_one_pass(
    generator: Generator, codelet: Path, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=48, ignore_eos=True, logprobs=5, **options)
    texts = set()
    for drafter, gamma in (("none", 0), ("model", 3), ("cascade", 4)):
        done = generator.generate(prompts[3], params, gamma=gamma, drafter=drafter)
        text = [*prompts[3], *done.token_ids]
        check(emitted(done), text, len(prompts[3]), forced(codelet, text))
        texts.add(tuple(text))
    assert len(texts) == 1 or params.verifier == "rejection"


def test_a_structure_masks_no_log_probability(
    generator: Generator, codelet: Path, prompts: list[list[int]]
) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=40, regex="(qua|zyx){4}", logprobs=2)
    done = generator.generate(prompts[0], params, gamma=3)
    text = [*prompts[0], *done.token_ids]
    entries = emitted(done)
    check(entries, text, len(prompts[0]), forced(codelet, text))
    ranks = [e[t].rank for e, t in zip(entries, done.token_ids, strict=True) if e]
    assert max(ranks) > 100  # what the mask forced was no favourite


def test_a_prompt_is_told_as_one_pass_tells_it(
    generator: Generator, codelet: Path, prompts: list[list[int]]
) -> None:
    prompt = list(chain.from_iterable(prompts))[:300]
    rows = forced(codelet, prompt)
    for length in (1, 65, 300):
        params = SamplingParams(max_tokens=2, prompt_logprobs=4, logprobs=0)
        done = generator.generate(prompt[:length], params, gamma=1)
        assert done.prompt_logprobs is not None
        assert (done.prompt_logprobs[0], len(done.prompt_logprobs)) == (None, length)
        if length > 1:
            check(done.prompt_logprobs[1:], prompt, 1, rows)
        assert done.cached_tokens == 0
