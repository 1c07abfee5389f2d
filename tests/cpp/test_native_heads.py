"""Heads, and drafts that score some entries: the native library generates what Python does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from cpp.conftest import Library
from cpp.test_replay import Requests, case, replay
from heads.assistants import save_pair
from heads.conftest import RECIPE, VOCABULARY, save_head, save_mtp, target
from shared import nightly_but
from specrt.bundle import Bundle, hash_file
from specrt.errors import BundleError
from specrt.generator import Generator
from specrt.speculation.drafters import DRAFTERS
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

__all__ = ["target"]

LENGTH = 160
PROMPTS = [[5, 9, 17, 3, 5, 9], [40], [5, 9, 17, 3, 5, 10, 4, 4], [11] * 20, [60, 61, 62] * 15]
"""Two that begin alike and follow each other, one of one token, one of several prefill passes."""
WAYS: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.9, "seed": 2, "verifier": "rejection"},
    {"temperature": 1.2, "top_p": 0.9, "seed": 4, "verifier": "rejection"},
    {"repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 1, "logit_bias": {"4": 3.0}},
)


@pytest.fixture(scope="module")
def pair(
    target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """A bundle of one row, as a session has it: a head that scores some entries, MTP, or one that
    reads its target's keys, which lie in rings."""
    folder = tmp_path_factory.mktemp("pair")
    form = getattr(request, "param", "eagle3")
    if form == "eagle3":
        text = RECIPE.format(target=target, head=save_head(folder / "head"))
    elif form == "gemma4":
        own, head = save_pair(folder, form)
        text = RECIPE.format(target=own, head=head)
    else:
        text = RECIPE.format(target=save_mtp(folder / "model", target), head="")
        text = text.replace('checkpoint = ""', 'kind = "mtp"')
    recipe = folder / "recipe.toml"
    recipe.write_text(text.replace("batch = 2", "batch = 1"), encoding="utf-8")
    build(read_recipe(recipe), folder / "bundle")
    return folder / "bundle"


@pytest.fixture
def generator(pair: Path) -> Iterator[Generator]:
    """The same in Python."""
    with specrt.open(pair, threads=1) as opened:
        yield opened


@pytest.fixture
def folder(pair: Path, tmp_path: Path) -> Path:
    """A bundle whose files may be written to."""
    return shutil.copytree(pair, tmp_path / "bundle")


def requests(generator: Generator) -> Requests:
    """Return requests, one after another in one session, and what came of each."""
    made, gammas = Requests(), generator.models.gammas
    for number, (way, drafter) in enumerate(product(WAYS, DRAFTERS)):
        for prompt in PROMPTS[number % 2 :: 2]:
            gamma: Any = gammas[(5 * len(made)) % len(gammas)]
            if len(made) % 5 == 1 and "verifier" not in way:  # whose text depends on gamma
                gamma = "auto"
            options = {"max_tokens": 40, "ignore_eos": True, "gamma": gamma, "drafter": drafter}
            ends: dict[str, int] = {"cancel_after": 3} if len(made) % 9 == 3 else {}
            if len(made) % 9 == 5 and drafter == "ngram":
                ends = {"fail_at": len(prompt) + 6}
            made.append(case(generator, prompt, {**options, **way}, **ends))
    options = {"max_tokens": 40, "ignore_eos": True, "gamma": 8, "drafter": "model"}
    for left in (1, 2, 5):  # hardly any room is left
        made.append(case(generator, ([7, 3, 50] * LENGTH)[: LENGTH - left], options))
    return made


def told(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return what there is of an outcome but text, which native makes of no such tokenizer."""
    return {name: outcome[name] for name in ("ids", "finish_reason", "cached_tokens", "rounds")}


@pytest.mark.parametrize(
    "pair", nightly_but(["eagle3", "gemma4"], ["eagle3", "mtp", "gemma4"]), indirect=True
)
def test_what_python_generates_with_a_head_is_generated(
    native: Library, pair: Path, generator: Generator, tmp_path: Path
) -> None:
    generator.forget()
    made = requests(generator)
    found = replay(native, pair, made, tmp_path)
    for outcome, one in zip(found, made, strict=True):
        assert told(outcome) == told(one["expected"]), (one["prompt"], one["params"])
    # Under `rejection` a text depends on every number that the head drew from.
    counts = [one["completion"]["speculation"]["sources"].get("model", {}) for one in found]
    assert sum(count.get("drafted", 0) for count in counts) > 1000
    assert sum(count.get("accepted", 0) for count in counts) > 50
    draft = Bundle.open(pair).manifest.draft
    in_rings = draft is not None and draft.geometry.lent  # which forget how a prompt began
    assert sum(one["cached_tokens"] > 0 for one in found) > (2 if in_rings else 10)


def listed(folder: Path, name: str, data: bytes) -> None:
    """Put a file into a bundle, and into the list of its manifest."""
    (folder / name).write_bytes(data)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    manifest["files"][name] = asdict(hash_file(folder / name))
    path.write_text(json.dumps(manifest))


def test_a_map_that_is_none_is_refused_as_in_python(
    native: Library, folder: Path, tmp_path: Path
) -> None:
    draft = Bundle.open(folder).manifest.draft
    assert draft is not None
    entries = np.fromfile(folder / draft.vocab_map, "<i4")
    sound = entries.tobytes()
    more = [np.append(entries, last).astype("<i4") for last in (VOCABULARY, 2**31 - 1)]
    for data in (b"", sound[:-1], entries[::-1].tobytes(), (entries - 50).tobytes(), *more):
        listed(folder, draft.vocab_map, bytes(data))
        with pytest.raises(BundleError, match=f"has no rising ids from 0 to {VOCABULARY - 1}; b"):
            specrt.open(folder, threads=1)
        (line,) = native.run("opening", bundle=folder)
        assert line.startswith("SPECRT_BUNDLE|")
        assert f"has no rising ids from 0 to {VOCABULARY - 1}; build the bundle again" in line
    listed(folder, draft.vocab_map, sound)
    assert native.run("opening", bundle=folder) == ["SPECRT_OK|"]
