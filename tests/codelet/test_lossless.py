"""Codelet's real engines: speculation changes speed, never the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

import specrt
from specrt.bench.lossless import first_difference, plain_margin
from specrt.bundle import Bundle
from specrt.cli import run
from specrt.completion import SpeculationStats
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Engine
from specrt.errors import CapacityError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.distribution import Entry
from specrt.text.prompt_file import read_prompts
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

ACCEPTANCE_FLOOR = 0.35
"""At gamma 3. A draft that knows nothing of the target is right one time in 8192."""


@pytest.fixture(scope="module")
def prompts(generator: Generator, code_prompts: Path) -> list[list[int]]:
    return [generator.tokenizer.encode(p.text) for p in read_prompts(code_prompts)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def open_target(folder: Path, max_width: int | None = None) -> Engine:
    """Open the target's engine of a bundle, apart from the one the generator uses."""
    bundle = Bundle.open(folder)
    spec = EngineSpec.of(bundle, bundle.manifest.target)
    return open_engine(replace(spec, max_width=max_width or spec.max_width))


# Nightly 5,040 tokens, each held to plain decoding.
@pytest.mark.parametrize(
    ("several", "tokens", "gammas"),
    [(3, 48, (3,)), pytest.param(16, 105, (1, 3, 8), marks=pytest.mark.nightly)],
)
def test_speculative_greedy_is_plain_greedy(
    generator: Generator,
    prompts: list[list[int]],
    several: int,
    tokens: int,
    gammas: tuple[int, ...],
) -> None:
    counts = {gamma: SpeculationStats(gamma) for gamma in gammas}
    for number, prompt in enumerate(prompts[:several]):
        expected = generator.generate(prompt, greedy(tokens), gamma=0).token_ids
        for gamma in gammas:
            done = generator.generate(prompt, greedy(tokens), gamma=gamma)
            counts[gamma].merge(done.speculation)
            at = first_difference(expected, done.token_ids)
            assert at is None, (
                f"prompt {number} leaves the plain output at token {at}; the plain margin is "
                f"{plain_margin(generator, prompt + expected[:at]):.2e}"
            )
    assert counts[3].acceptance_rate >= ACCEPTANCE_FLOOR


@pytest.mark.nightly
def test_a_prompt_may_fill_the_context(generator: Generator, prompts: list[list[int]]) -> None:
    context = generator.models.target.max_length
    text = (list(chain.from_iterable(prompts)) * 3)[: context + 1]
    full = generator.generate(text[:context], greedy(8), gamma=3)
    assert (len(full.token_ids), full.finish_reason) == (1, "length")
    near = [generator.generate(text[: context - 9], greedy(50), gamma=g) for g in (0, 3, 8)]
    assert [len(done.token_ids) for done in near] == [10, 10, 10]
    assert near[0].token_ids == near[1].token_ids == near[2].token_ids
    with pytest.raises(CapacityError, match=f"{context + 1} tokens.*context.* is {context}"):
        generator.generate(text, greedy(1))


@pytest.mark.nightly
def test_the_output_is_that_of_transformers(
    generator: Generator, engines: Path, prompts: list[list[int]]
) -> None:
    import torch
    import transformers

    folder = engines / "codelet" / "checkpoint" / "target"
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # spinning on cores that other workers use costs tens of seconds
    try:
        found = [
            model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False, max_new_tokens=32, eos_token_id=None, pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt in prompts[:3]
        ]  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    for prompt, other in zip(prompts, found, strict=False):
        expected = generator.generate(prompt, greedy(32), gamma=0).token_ids
        assert first_difference(expected, other) is None


# Several completions at once

ROWS = 3


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Iterator[Generator]:
    out = tmp_path_factory.mktemp("batch") / "bundle"
    recipe = read_recipe(engines / "codelet" / "recipe.toml")
    build(replace(recipe, engine=replace(recipe.engine, batch=ROWS)), out)
    with specrt.load(out) as generator:
        yield generator


# Log-probabilities

NEAR = 1e-4
"""Passes of other widths add in another order; what the documentation promises for fp32."""


def forced(codelet: Path, text: list[int]) -> np.ndarray:
    """Return the log-probabilities after each token, from one pass over all of them."""
    engine = open_target(codelet, len(text))
    found: np.ndarray = log_softmax(engine.forward((text,), 0).logits[0].astype(np.float64), -1)
    engine.close()
    return found


def check(entries: Sequence[Entry | None], text: list[int], first: int, rows: np.ndarray) -> None:
    """Hold entries of tokens from a position on to the rows before them."""
    for at, entry in enumerate(entries, first):
        assert entry is not None
        row = rows[at - 1]
        assert next(iter(entry)) == text[at]
        for token, told in entry.items():
            assert told.logprob == pytest.approx(row[token], abs=NEAR)
            above = (row > row[token] + NEAR).sum(), (row > row[token] - NEAR).sum()
            assert above[0] < told.rank <= above[1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.9, "verifier": "rejection", "bad_words": ("return",)},
        {"regex": "(qua|zyx){12}"},
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_one_pass_at_every_gamma(
    generator: Generator, codelet: Path, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    if "regex" in options:
        pytest.importorskip("llguidance", reason="needs the structured extra")
    params = SamplingParams(max_tokens=24, logprobs=5, prompt_logprobs=2, seed=1, **options)
    prompt = list(chain.from_iterable(prompts))[:90]
    for drafter, gamma in (("none", 0), ("cascade", 4)):
        done = generator.generate(prompt, params, gamma=gamma, drafter=drafter)
        text = [*prompt, *done.token_ids]
        rows = forced(codelet, text)
        assert done.prompt_logprobs is not None
        assert done.logprobs is not None
        assert (done.prompt_logprobs[0], len(done.prompt_logprobs)) == (None, len(prompt))
        check(done.prompt_logprobs[1:], text, 1, rows)
        assert len(done.logprobs) == len(done.token_ids) > 0
        check(done.logprobs, text, len(prompt), rows)


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "drafter"), [("head", "model"), ("aligned", "cascade")])
def test_trained_drafts_pass_verify(
    engines: Path, code_prompts: Path, tmp_path: Path, recipe: str, drafter: str
) -> None:
    """The head and the draft that are in the repository, built by their recipes."""
    build(read_recipe(engines / "codelet" / f"{recipe}.toml"), tmp_path / recipe)
    named = ["--prompts", str(code_prompts), "--limit", "2", "--max-tokens", "40", "--json"]
    more = ["--gammas", "3", "--drafter", drafter, "--threads", "1"]
    assert run(["verify", str(tmp_path / recipe), *named, *more]) == 0
    with specrt.load(tmp_path / recipe, threads=1, text_memory_bytes=0) as opened:
        done = opened.generate("def area(width, height):\n", greedy(60), gamma=3, drafter="model")
    assert done.speculation.acceptance_rate > ACCEPTANCE_FLOOR
