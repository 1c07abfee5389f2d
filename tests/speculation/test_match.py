"""Same seed, same text: with `match`, speculation cannot be seen in what is emitted."""

from __future__ import annotations

import pytest

from runtime.toy import TableEngine, generator, near, plain, run
from specrt.params import SamplingParams
from specrt.text import Tokenizer

PROMPT = [3, 1, 4, 1, 5]
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_the_same_seed_gives_the_same_tokens_for_every_gamma_and_draft(
    options: dict[str, float],
) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    accepted = 0
    for seed in (0, 1, -7):
        target = TableEngine(2, scale=2.0)
        expected = run(target, None, PROMPT, params=params, seed=seed, new=60).tokens
        assert expected != plain(target, PROMPT, 60)
        for gamma in range(1, 9):
            for closeness in (0.0, 0.8):
                draft = near(target, 50, closeness, scale=2.0)
                done = run(target, draft, PROMPT, gamma=gamma, params=params, seed=seed, new=60)
                assert done.tokens == expected
                accepted += sum(r.accepted for r in done.rounds)
    assert accepted > 500


def test_another_seed_gives_another_text() -> None:
    target = TableEngine(2)
    params = SamplingParams(temperature=1.0)
    texts = {
        tuple(run(target, None, PROMPT, params=params, seed=seed).tokens) for seed in range(50)
    }
    assert len(texts) == 50


def test_a_cold_draw_is_the_most_likely_token() -> None:
    target = TableEngine(2)
    params = SamplingParams(temperature=1e-4)
    for seed in range(5):
        done = run(target, near(target, 9, 0.8), PROMPT, gamma=4, params=params, seed=seed)
        assert done.tokens == plain(target, PROMPT)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("options", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=str)
def test_one_candidate_is_greedy(verifier: str, options: dict[str, float]) -> None:
    target = TableEngine(2)
    params = SamplingParams(temperature=1.0, verifier=verifier, **options)  # type: ignore[arg-type]
    done = run(target, near(target, 9, 0.8), PROMPT, gamma=4, params=params)
    assert done.tokens == plain(target, PROMPT)


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_temperature_zero_is_greedy_under_either_rule(verifier: str) -> None:
    target = TableEngine(2)
    params = SamplingParams(verifier=verifier, top_k=5, top_p=0.5, seed=3)
    done = run(target, near(target, 9, 0.6), PROMPT, gamma=4, params=params)
    assert done.tokens == plain(target, PROMPT)


def test_drawing_with_the_targets_noise_accepts_more_than_drawing_alone() -> None:
    target = TableEngine(2, scale=1.5)
    params = SamplingParams(temperature=1.0)
    shared = run(target, near(target, 9, 0.85), PROMPT, gamma=4, params=params, new=200)
    alone = run(target, near(target, 9, 0.0), PROMPT, gamma=4, params=params, new=200)
    assert shared.tokens == alone.tokens
    assert sum(r.accepted for r in shared.rounds) > 2 * sum(r.accepted for r in alone.rounds)


def test_a_draft_equal_to_the_target_is_always_kept() -> None:
    target = TableEngine(2, scale=1.5)
    params = SamplingParams(temperature=1.0)
    done = run(target, near(target, 9, 1.0), PROMPT, gamma=4, params=params, new=41)
    assert [r.accepted for r in done.rounds] == [0] + [4] * 8


def test_the_text_and_the_reported_seed_say_the_same_whatever_gamma(tokenizer: Tokenizer) -> None:
    target = TableEngine(2, vocab=tokenizer.size, max_length=400)
    made = generator(target, near(target, 5, 0.7), tokenizer)
    for stop in ((), ("th", "a")):
        params = SamplingParams(temperature=1.0, max_tokens=100, stop=stop)
        drawn = made.generate("hello", params, gamma=3)
        again = SamplingParams(temperature=1.0, max_tokens=100, stop=stop, seed=drawn.seed)
        for gamma in range(9):
            done = made.generate("hello", again, gamma=gamma)
            assert (done.text, done.token_ids) == (drawn.text, drawn.token_ids)
            assert (done.finish_reason, done.stop_reason) == (
                drawn.finish_reason,
                drawn.stop_reason,
            )
