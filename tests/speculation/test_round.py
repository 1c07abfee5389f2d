"""The loop: every way a round can end leaves the target's own greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrt.params import Callback, Row, SamplingParams
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import run_alone
from specrt.speculation.target import VERIFIERS
from specrt.text.tokenizer import Tokenizer
from speculation.support import PROMPT
from support.toy import Call, TableEngine, generator, near, plain, run

GAMMAS = (0, 1, 4, 8)


def pair(seed: int, closeness: float = 0.6, **options: object) -> tuple[TableEngine, TableEngine]:
    target = TableEngine(seed, **options)  # type: ignore[arg-type]
    return target, near(target, seed + 1000, closeness)


# Same tokens, and the passes they take


@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_different_draft_never_changes_the_output(gamma: int) -> None:
    seen: set[int] = set()
    for seed in range(25):
        target, draft = pair(seed, closeness=0.18 * (1 + seed % 5))
        prompt = [int(t) for t in np.random.default_rng(seed).integers(0, 29, 1 + seed % 16)]
        done = run(target, draft, prompt, gamma=gamma, new=50)
        assert done.tokens == plain(target, prompt, 50)
        seen |= {r.accepted for r in done.rounds if r.drafted == gamma}
        # A pass begins at the last committed token, and holds that and what was drafted.
        tokens, calls = len(prompt), iter(target.calls)
        for round_ in done.rounds:
            start = tokens - 1 if round_ is not done.rounds[0] else 0
            width = tokens + round_.drafted - start
            assert next(calls) == Call(start, width, round_.drafted + 1)
            assert round_.evaluated == min(round_.accepted + 1, round_.drafted)
            tokens += len(round_.tokens)
        assert next(calls, None) is None
        assert all(call.width in (1, 2) for call in draft.calls[1:])
    # The seeds must have met every place a rejection can fall, or the test showed nothing.
    assert seen == set(range(gamma + 1))


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_a_long_prompt_goes_in_by_chunks_and_all_scored_rows_come_from_one(rows: int) -> None:
    for length in range(rows, 23):
        tokens = [int(t) for t in np.random.default_rng(length).integers(0, 29, length)]
        engine, wide = TableEngine(9, max_width=7), TableEngine(9, max_width=100)
        cache = KVCache(engine)
        found = run_alone(cache.feed(tokens, rows)).logits
        assert (found == wide.forward([tokens], 0, rows).logits).all()
        assert cache.length == sum(call.width for call in engine.calls) == length
        assert len(engine.calls) == -(-length // 7) or rows > 1


# Limits


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("new", [1, 2, 5, 12])
def test_gamma_shrinks_so_that_no_committed_token_is_discarded(gamma: int, new: int) -> None:
    target, draft = pair(3, closeness=1.0)
    done = run(target, draft, PROMPT, gamma=gamma, new=new)
    assert done.tokens == plain(target, PROMPT, new)
    left = new - 1
    for round_ in done.rounds[1:]:
        assert round_.drafted == min(gamma, left - 1)
        left -= len(round_.tokens)
    assert left == 0


# Ends inside an accepted run

LETTERS = [int(t) for t in b"abcdefghijklmnopqrstuvwxyz0123456789"]


def spelled(
    tokenizer: Tokenizer, places: set[int] | None = None
) -> tuple[TableEngine, TableEngine]:
    """Return a pair whose text is LETTERS; the draft is wrong at some places of them."""
    target = TableEngine(0, vocab=tokenizer.size)
    target.script = {len(PROMPT) + i: letter for i, letter in enumerate(LETTERS)}
    draft = near(target, 1, 1.0)
    draft.script = {p: t for p, t in target.script.items() if p - len(PROMPT) not in (places or ())}
    return target, draft


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("kind", ["eos", "stop token", "stop string", "max_tokens"])
def test_an_end_cuts_wherever_it_falls(tokenizer: Tokenizer, gamma: int, kind: str) -> None:
    for end in range(12):
        letter, stop = LETTERS[end], bytes(LETTERS[end : end + 3]).decode()
        options: dict[str, Any] = {
            "eos": {},
            "stop token": {"stop_token_ids": (letter,)},
            "stop string": {"stop": ("never", stop)},
            "max_tokens": {"max_tokens": end + 1},
        }[kind]
        tokens = end + 3 if kind == "stop string" else end + 1
        text = end + 1 if kind == "max_tokens" else end
        made = generator(*spelled(tokenizer), tokenizer, eos=[letter] if kind == "eos" else ())
        done = made.generate(PROMPT, SamplingParams(**options), gamma=gamma)
        assert done.token_ids == LETTERS[:tokens]
        assert done.text == bytes(LETTERS[:text]).decode()
        assert done.finish_reason == ("length" if kind == "max_tokens" else "stop")
        assert done.stop_reason == {"stop token": letter, "stop string": stop}.get(kind)
        assert len(done.token_ids) == done.speculation.emitted + 1


def _fails_behind(length: int) -> Callback:
    def fail(tokens: Sequence[int], scores: Row) -> Row:
        if len(tokens) > length:
            raise ValueError("too far")
        return scores

    return fail


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("how", ["no numbers", "function", "match", "rejection"])
def test_what_fails_behind_the_end_of_a_text_is_no_error(
    tokenizer: Tokenizer, gamma: int, how: str
) -> None:
    """Where the text goes on it fails after the same tokens."""
    for tokens in range(2, 8):
        target, draft = spelled(tokenizer)
        most, options = len(PROMPT) + tokens - 1, dict[str, Any]()
        if how == "no numbers":
            target.no_numbers_from = most + 1
        else:
            options["logits_processors"] = (_fails_behind(most),)
        if how in VERIFIERS:
            options |= {"temperature": 0.01, "verifier": how, "seed": 3}
        made = generator(target, draft, tokenizer)
        for stop in (bytes(LETTERS[:tokens]).decode(), "never"):
            params = SamplingParams(stop=(stop,), **options)
            (done,) = made.generate_many([PROMPT], params, gamma=gamma)[0]
            assert done.token_ids == LETTERS[:tokens]
            assert done.finish_reason == ("error" if stop == "never" else "stop")


# Counts


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("stop", [(), (LETTERS[17],)])
def test_the_counts_add_up(tokenizer: Tokenizer, gamma: int, stop: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=33, stop_token_ids=stop)
    made = generator(*spelled(tokenizer, {4, 9, 10, 21, 30}), tokenizer)
    done = made.generate(PROMPT, params, gamma=gamma)
    counts = done.speculation
    assert (counts.gamma, counts.tokens_per_round) == (gamma, counts.emitted / counts.rounds)
    assert counts.draft_yield == counts.accepted / max(counts.drafted, 1)
    assert len(done.token_ids) == (18 if stop else 33) == counts.emitted + 1
    assert sum(counts.accepted_at) == counts.accepted
    assert sum(counts.evaluated_at) == counts.evaluated
    assert counts.accepted <= counts.evaluated <= counts.drafted <= gamma * counts.rounds
    # A round is rejected at most once.
    assert counts.evaluated - counts.accepted <= counts.rounds
    if not stop:
        assert counts.emitted == counts.accepted + counts.rounds
    if gamma == 0:
        assert (counts.rounds, counts.drafted) == (counts.emitted, 0)
    elif gamma == 8 and not stop:
        # By hand: the round from token 1 is wrong at 4, that from 5 at 9, that from 10 at once,
        # that from 11 is whole, that from 20 is wrong at 21, that from 22 whole, that from 31.
        assert (counts.rounds, counts.accepted_at) == (7, [6, 4, 4, 3, 2, 2, 2, 2])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.5, seed=3)])
@pytest.mark.parametrize(("target_size", "draft_size"), [(29, 60), (60, 29)])
def test_padding_of_one_vocabulary_changes_no_token(
    tokenizer: Tokenizer, params: SamplingParams, target_size: int, draft_size: int
) -> None:
    """Ids only one model knows are not drafted, and silence a draft that cannot read them."""
    target, draft = TableEngine(1, vocab=target_size), TableEngine(2, vocab=draft_size)
    expected = generator(target, None, tokenizer).generate([3, 4, 5], params, gamma=0)
    found = generator(target, draft, tokenizer).generate([3, 4, 5], params, gamma=4)
    assert found.token_ids == expected.token_ids
    assert found.speculation.drafted > 0 or draft_size < target_size
