"""The pair that ships: right by rule on held-out texts, and the same text however it is drafted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import specrt
from itn.task import Pair, pairs
from shared import REPOSITORY, locked, shared_folder
from specrt.completion import SpeculationStats
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt_export.recipe.recipe import read_recipe
from support.builds import build, is_fresh

FOLDER = REPOSITORY / "engines" / "itn"
GREEDY = SamplingParams(max_tokens=200, temperature=0.0)
Assisted = Callable[[list[int]], list[int]]


@pytest.fixture(scope="session")
def itn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of engines/itn, built by whichever worker comes first."""
    shared = shared_folder(tmp_path_factory)
    recipe, bundle = read_recipe(FOLDER / "recipe.toml"), shared / "itn"
    with locked(shared / "itn.lock"):
        if not is_fresh(recipe, bundle):
            build(recipe, bundle)
    return bundle


@pytest.fixture(scope="module")
def normaliser(itn: Path) -> Iterator[Generator]:
    """The pair, opened on one core."""
    with specrt.load(itn, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def assisted() -> Assisted:
    """What transformers' assisted generation writes for a source, its end token last."""
    torch = pytest.importorskip("torch", reason="compared with transformers")
    transformers: Any = pytest.importorskip("transformers", reason="compared with transformers")
    target, draft = (
        transformers.AutoModelForSeq2SeqLM.from_pretrained(
            FOLDER / "checkpoint" / role, dtype=torch.float32
        ).eval()
        for role in ("target", "draft")
    )
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0

    def write(source: list[int]) -> list[int]:
        ids = torch.tensor([source])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.inference_mode():
            made = target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, assistant_model=draft,
                max_new_tokens=GREEDY.max_tokens,
            )  # fmt: skip
        torch.set_num_threads(threads)
        return list(made[0, 1:].tolist())

    return write


def held_out(count: int, seed: int = 5) -> list[Pair]:
    """Return held-out pairs of two or three sentences."""
    return list(islice(pairs(seed, held_out=True, sentences=(2, 3)), count))


def test_the_draft_reads_its_targets_states(itn: Path) -> None:
    manifest = json.loads((itn / "manifest.json").read_text())
    assert manifest["task"] == "text2text-generation"
    assert manifest["target"]["encoder"]["encoder"]
    assert not manifest["draft"]["encoder"]["encoder"]


def test_answers_are_right_by_rule_and_the_same_however_drafted(normaliser: Generator) -> None:
    drafts = {name: SpeculationStats(4, name) for name in ("model", "ngram", "cascade")}
    several, right = held_out(24), 0
    for number, pair in enumerate(several):
        plain = normaliser.generate(pair.source, GREEDY, gamma=0)
        right += plain.text == pair.answer
        drafter = list(drafts)[number % 3]
        done = normaliser.generate(pair.source, GREEDY, gamma=4, drafter=drafter)
        assert (done.token_ids, done.text) == (plain.token_ids, plain.text)
        drafts[drafter].merge(done.speculation)
    assert right >= 0.5 * len(several), f"{right} of {len(several)} are right"
    assert drafts["model"].acceptance_rate >= 0.6
    assert drafts["cascade"].tokens_per_round > drafts["ngram"].tokens_per_round


@pytest.mark.parametrize("tokens", [400, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_texts_are_those_of_assisted_generation(
    normaliser: Generator, assisted: Assisted, tokens: int
) -> None:
    """Sampled texts are held to their law by the tests of verifiers."""
    compared = 0
    endless = pairs(6, held_out=True, sentences=(2, 3))
    for number, pair in enumerate(endless):
        source = normaliser.tokenizer.encode(pair.source)
        done = normaliser.generate(source, GREEDY, gamma=(0, 1, 3, 8, 16)[number % 5])
        expected = assisted(source)
        found = list(done.token_ids)
        assert found == expected[: len(found)], f"text {number} leaves transformers' text"
        assert len(expected) - len(found) <= 1
        compared += len(found)
        if compared >= tokens:
            return
