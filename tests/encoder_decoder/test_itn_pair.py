"""The pair that ships: right by rule on held-out texts, and the same text however it is drafted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

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
