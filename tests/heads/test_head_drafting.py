"""A head drafts what torch computes anew for each token, whatever was accepted before."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specrt
from heads.conftest import VOCABULARY
from shared import nightly_but
from specrt.engine.protocol import rows_of
from specrt.errors import BundleError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import BlockDrafter, HeadDrafter, ModelDrafter
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Round
from specrt_export.check.equivalence import Reference
from specrt_export.check.head_equivalence import entering, run_head
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.heads.eagle3_format import Head
from specrt_export.heads.eagle3_module import load_head

Draft = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def generator(bundle: Path) -> Iterator[Generator]:
    with specrt.load(bundle, threads=1, text_memory_bytes=0) as opened:
        yield opened


class Torch:
    """Drafts by computing everything anew, right or in a way that is wrong."""

    def __init__(
        self, target: Path, head: Head, inputs: Sequence[int] | None = None, shift: int = 1,
        normed: bool = False, absolute: bool = False,
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        self._reference = Reference(Checkpoint.open(target))
        self._feature, self._head = load_head(head)
        self._inputs = tuple(inputs or head.config.inputs)
        self._shift, self._normed = shift, normed
        assert head.entries is not None
        self._entries = head.entries
        if absolute:
            self._entries = head.entries - np.arange(len(head.entries))

    def __call__(self, tokens: Sequence[int], gamma: int) -> list[int]:
        text = np.array([tokens], np.int64)
        with torch.no_grad():
            features = self._feature(entering(self._reference, self._inputs, text)).numpy()
        hidden, fed = features[:, 1 - self._shift : len(tokens) - self._shift], text[:, 1:]
        drafted: list[int] = []
        while len(drafted) < gamma:
            logits, states, fed_back = run_head(self._head, fed, hidden)
            drafted.append(int(self._entries[logits[0, -1].argmax()]))
            state: Any = fed_back
            if self._normed:
                state = self._head.norm(torch.from_numpy(states)).detach().numpy()
            fed = np.append(fed, [drafted[-1:]], axis=1)
            hidden = np.concatenate([hidden, state[:, -1:]], axis=1)
        return drafted


class Rounds:
    """Random rounds over the engines of a bundle: any number of drafted tokens is accepted."""

    def __init__(self, generator: Generator, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        models = generator.models
        assert models.draft is not None
        self._target, self._cache = KVCache(models.target), KVCache(models.draft)
        self._models = models
        self.drafts: list[list[int]] = []
        """What the head drafted, round by round."""
        self.tokens = self.random(int(self._rng.integers(1, 30)))

    def random(self, count: int) -> list[int]:
        return [int(t) for t in self._rng.integers(0, VOCABULARY, count)]

    def _drafter(self, gamma: int) -> ModelDrafter:
        settings = self._cache, SamplingParams(), Noise(0), FixedGamma(gamma)
        if self._models.block is not None:
            return BlockDrafter(*settings, self._models.block, VOCABULARY)
        return HeadDrafter(*settings, VOCABULARY)

    def step(self, draft: Draft | None = None) -> bool:
        """Run a round; with `draft`, tell whether the head drafts the same tokens.

        Without, other tokens are drafted, as lookup does, or none.
        """
        gamma, same = int(self._rng.integers(1, 9)), True
        drafted = self.random(int(self._rng.integers(0, 9))) if self._target.length else []
        if draft is not None:
            drafter = self._drafter(gamma)
            drafted = list(run(drafter.propose(self.tokens, gamma)).tokens)
            self.drafts.append(drafted)
            same = drafted == draft(self.tokens, gamma)
        run(self._target.feed([*self.tokens[self._target.length :], *drafted], 1))
        accepted = int(self._rng.integers(0, len(drafted) + 1))
        committed = [*drafted[:accepted], *self.random(1)]
        self._target.length = len(self.tokens) + accepted
        self.tokens += committed
        if draft is not None:
            drafter.observe(self.tokens, Round(committed, len(drafted), accepted, 0, 0))
        return same


rows = lru_cache(rows_of)


def run(passes: Any) -> Any:
    """Run passes on the first row of engines; return their result."""
    output = None
    while True:
        try:
            pass_ = passes.send(output)
        except StopIteration as end:
            return end.value
        (output,) = rows(pass_.engine).forward_rows((pass_.feed(0),))


def agreement(generator: Generator, draft: Draft, seeds: range, rounds: int) -> list[bool]:
    """Return whether each of many random drafts is what `draft` says; some rounds draft none."""
    found = []
    for seed in seeds:
        text = Rounds(generator, seed)
        text.step()  # reads the prompt
        for number in range(rounds):
            if number % 5 == 2:
                text.step()
            found.append(text.step(draft))
    return found


@pytest.mark.parametrize("seeds", nightly_but([16], [16, 63]))
def test_drafts_are_those_of_torch_after_any_rounds(
    generator: Generator, target: Path, head: Head, seeds: int
) -> None:
    found = agreement(generator, Torch(target, head), range(seeds), 8)
    assert len(found) == 8 * seeds
    assert all(found)


@pytest.mark.parametrize(
    "wrong",
    [{"inputs": (0, 1, 2)}, {"shift": 0}, {"normed": True}, {"absolute": True}],
    ids=["layers off by one", "unshifted pairs", "recursion behind the norm", "absolute d2t"],
)
def test_a_wrong_head_drafts_otherwise(
    generator: Generator, target: Path, head: Head, wrong: dict[str, Any]
) -> None:
    found = agreement(generator, Torch(target, head, **wrong), range(2), 5)
    assert sum(found) < len(found) / 2


PROMPTS = [[5, 9, 17, 3, 5, 9], [40, 2, 7], [11] * 20, [60, 61, 62, 60, 61]]

SETTINGS = [
    {}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_k": 20, "seed": 3},
    {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 1, "logit_bias": {4: 3.0}},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_texts_are_those_of_plain_decoding(generator: Generator, settings: dict[str, Any]) -> None:
    """On all rows, whatever drafts beside the head, with the prompt cache of earlier texts."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, verifier="match", **settings)
    plain = [generator.generate(prompt, params, gamma=0).token_ids for prompt in PROMPTS]
    for drafter in ("model", "cascade", "ngram"):
        for gamma in (1, 4, "auto"):
            texts = generator.generate_many(PROMPTS, params, gamma=gamma, drafter=drafter)
            assert [text[0].token_ids for text in texts] == plain, (drafter, gamma)
    drafted = generator.generate(PROMPTS[0], params, gamma=4, drafter="model").speculation
    assert drafted.drafted > 0


def test_rejection_draws_what_the_target_draws(generator: Generator) -> None:
    """Chi-square of the second token over many seeds; entries the head cannot score are drawn."""
    settings = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True}
    counts = np.zeros((2, VOCABULARY))
    for seed in range(700):
        for row, gamma in enumerate((0, 2)):
            params = SamplingParams(seed=seed, verifier="rejection", **settings)
            text = generator.generate(PROMPTS[0], params, gamma=gamma, drafter="model")
            counts[row, text.token_ids[1]] += 1
    often = counts.sum(0) >= 10
    rest = counts[:, ~often].sum(1, keepdims=True)
    table = np.hstack([counts[:, often], rest])
    expected = table.sum(0) / 2
    chi = float(((table - expected) ** 2 / expected).sum())
    assert chi < 2.5 * (table.shape[1] - 1)


def test_a_backend_that_runs_no_heads_is_told_with_those_that_do(
    bundle: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["draft"]["backend"] = "ort-cuda"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"ort-cuda does not run; build it for tensorrt or .*cpu"):
        specrt.load(folder)


def test_a_bundle_whose_parts_do_not_fit_is_refused(bundle: Path, tmp_path: Path) -> None:
    """A map of other entries, of fewer, and features that the manifest says otherwise."""
    for number, change in enumerate(("fewer", "falling", "width")):
        folder = tmp_path / str(number)
        shutil.copytree(bundle, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        entries = np.fromfile(folder / "draft" / "vocab_map.bin", "<i4")
        if change == "width":
            manifest["draft"]["features"] += 1
        made = entries[:-1] if change == "fewer" else entries[:: -1 if change == "falling" else 1]
        (folder / "draft" / "vocab_map.bin").write_bytes(made.tobytes())
        digest = hashlib.sha256(made.tobytes()).hexdigest()
        manifest["files"]["draft/vocab_map.bin"] = {"bytes": made.nbytes, "sha256": digest}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(BundleError, match=r"scores 40 entries|no rising ids|one width of both"):
            specrt.load(folder)
