"""A block head drafts what torch computes anew for each block, whatever was accepted before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specrt
from heads.blocks import BLOCK, save_block_head
from heads.conftest import RECIPE, VOCABULARY
from heads.test_head_drafting import PROMPTS, SETTINGS, agreement, run
from shared import nightly_but
from specrt.engine.backends import BACKENDS
from specrt.engine.ort.block_engine import BLOCK as BLOCK_FACTS
from specrt.engine.ort.block_engine import read_block
from specrt.engine.protocol import BlockShape, Feed, PackedEngine
from specrt.errors import BundleError, EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import BlockDrafter
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt_export.check.block_equivalence import run_block
from specrt_export.check.equivalence import Reference
from specrt_export.check.head_equivalence import entering
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.heads.dflash_format import BlockHead, read_block_head
from specrt_export.heads.dflash_module import load_block_head
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

FORMS = ("speculators", "dspark", "markov")
"""A head that scores some entries, one with a confidence head, and one with a Markov head, too."""


@pytest.fixture(scope="module", params=nightly_but(["dspark"], FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(form: str, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(form)
    text = RECIPE.format(target=target, head=save_block_head(folder / "head", form))
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    build(read_recipe(folder / "recipe.toml"), folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def generator(bundle: Path) -> Iterator[Generator]:
    with specrt.load(bundle, threads=1, text_memory_bytes=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def head(bundle: Path, target: Path) -> BlockHead:
    return read_block_head(Checkpoint.open(bundle.parent / "head"), Checkpoint.open(target))


class Torch:
    """Drafts by computing everything anew, right or in a way that is wrong."""

    def __init__(
        self, target: Path, head: BlockHead, inputs: Sequence[int] | None = None, shift: int = 0,
        causal: bool = False,
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)
        self._reference = Reference(Checkpoint.open(target))
        self._feature, self._model = load_block_head(head)
        self._inputs, self._shift = tuple(inputs or head.config.inputs), shift
        if causal:
            layers = (True,) * head.config.layers
            self._model.flags = replace(head.config, causal=layers)
        self._entries = np.arange(VOCABULARY) if head.entries is None else head.entries
        self.confidences: list[float] = []

    def __call__(self, tokens: Sequence[int], gamma: int) -> list[int]:
        text = np.array([tokens], np.int64)
        with torch.no_grad():
            features = self._feature(entering(self._reference, self._inputs, text))[0].numpy()
        context = features[self._shift : len(tokens) - 1 + self._shift]
        found = run_block(self._model, tokens[-1], context)
        self.confidences = found.get("confidence", np.zeros(0))[:gamma].tolist()
        return [int(self._entries[i]) for i in found["logits"].argmax(-1)[:gamma]]


@pytest.mark.parametrize("seeds", nightly_but([10], [10, 32]))
def test_drafts_are_those_of_torch_after_any_rounds(
    generator: Generator, target: Path, head: BlockHead, seeds: int
) -> None:
    found = agreement(generator, Torch(target, head), range(seeds), 8)
    assert len(found) == 8 * seeds
    assert all(found)


@pytest.mark.parametrize(
    "wrong",
    [{"inputs": (0, 1, 2)}, {"shift": 1}, {"causal": True}],
    ids=["layers off by one", "features of the next position", "causal in the block"],
)
def test_a_wrong_head_drafts_otherwise(
    generator: Generator, target: Path, head: BlockHead, wrong: dict[str, Any]
) -> None:
    found = agreement(generator, Torch(target, head, **wrong), range(2), 5)
    assert sum(found) < len(found) / 2


def test_the_head_tells_how_sure_it_is(
    generator: Generator, target: Path, head: BlockHead, form: str
) -> None:
    """The confidences of a proposal are those of the confidence head, where there is one."""
    models, tokens = generator.models, PROMPTS[0]
    assert models.draft is not None
    assert models.block is not None
    run(KVCache(models.target).feed(tokens, 1))
    for params in (SamplingParams(), SamplingParams(temperature=1.0, verifier="rejection")):
        drafter = BlockDrafter(
            KVCache(models.draft), params, Noise(0), FixedGamma(5), models.block, VOCABULARY
        )
        proposal = run(drafter.propose(tokens, 20))
        reference = Torch(target, head)
        reference(tokens, 5)
        told = list(proposal.confidences)
        assert len(told) == 5
        if form == "dspark" or (form == "markov" and params.greedy):
            assert np.allclose(told, reference.confidences, atol=1e-4)
        else:
            assert all(0 < confidence < 1 for confidence in told)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_texts_are_those_of_plain_decoding(generator: Generator, settings: dict[str, Any]) -> None:
    """On all rows, whatever drafts beside the head, with the prompt cache of earlier texts."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, verifier="match", **settings)
    plain = [generator.generate(prompt, params, gamma=0).token_ids for prompt in PROMPTS]
    for drafter in ("model", "cascade"):
        for gamma in (1, 5, 8, "auto"):
            texts = generator.generate_many(PROMPTS, params, gamma=gamma, drafter=drafter)
            assert [text[0].token_ids for text in texts] == plain, (drafter, gamma)
    stats = generator.generate(PROMPTS[0], params, gamma=8, drafter="model").speculation
    assert stats.drafted > 0


def test_texts_go_on_to_the_end_of_the_buffers(generator: Generator) -> None:
    """Where a block does not fit any more nothing is drafted."""
    room = generator.models.target.max_length - len(PROMPTS[0])
    params = SamplingParams(max_tokens=room, ignore_eos=True)
    plain = generator.generate(PROMPTS[0], params, gamma=0)
    drafted = generator.generate(PROMPTS[0], params, gamma=4, drafter="model")
    assert drafted.token_ids == plain.token_ids
    assert len(plain.token_ids) == room


def test_rejection_draws_what_the_target_draws(generator: Generator) -> None:
    """Chi-square of the second token over many seeds; entries the head cannot score are drawn."""
    settings = {"temperature": 1.0, "max_tokens": 3, "ignore_eos": True}
    counts = np.zeros((2, VOCABULARY))
    for seed in range(500):
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


def test_rows_beside_each_other_are_scored_as_they_are_alone(generator: Generator) -> None:
    """Whatever another row has in the same pass, and between two of them."""
    models, (one, two) = generator.models, PROMPTS[:2]
    target, draft, block = models.target, models.draft, models.block
    assert isinstance(target, PackedEngine)
    assert isinstance(draft, PackedEngine)
    assert block is not None
    target.forward_rows((Feed(0, one, 0, 1), Feed(1, two, 0, 1)))
    own, other = Feed(0, one, 0, 5), Feed(1, two, 0, 3)
    alone = draft.forward_rows((own,))[0].logits.copy()
    assert np.array_equal(draft.forward_rows((other, own))[1].logits, alone)
    if block.chained:
        nexts = [Feed(0, [7], len(one) - 1 + i, 1, recursive=True) for i in (1, 2)]
        alone = np.concatenate([draft.forward_rows((feed,))[0].logits for feed in nexts])
        together = [draft.forward_rows(feeds) for feeds in ((nexts[0], other), (other, nexts[1]))]
        assert np.array_equal(np.concatenate([together[0][0].logits, together[1][1].logits]), alone)
        with pytest.raises(EngineError, match="not behind the last block"):
            draft.forward_rows((nexts[0]._replace(start=len(one) + 5),))


def test_passes_that_no_block_has_are_refused(generator: Generator) -> None:
    draft: Any = generator.models.draft
    end = draft.max_length
    for tokens, start, rows in (([1], end - BLOCK + 2, 1), ([1], 0, BLOCK), ([1] * 50, 0, 1)):
        feed = Feed(0, tokens, start, rows)
        with pytest.raises(EngineError, match=r"would be written|to be drafted|built for widths"):
            draft.forward_rows((feed,))


def test_a_backend_that_drafts_no_blocks_refuses_them_by_name(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other heads it runs."""
    monkeypatch.setitem(BACKENDS, "ort-cpu", replace(BACKENDS["ort-cpu"], blocks=False))
    with pytest.raises(BundleError, match=r"drafts blocks \(dflash\), which ort-cpu does not run"):
        specrt.load(bundle)


class Session:
    """What a session tells of its graph."""

    def __init__(self, block: object) -> None:
        self.custom_metadata_map = {BLOCK_FACTS: json.dumps(block)}

    def get_modelmeta(self) -> Session:
        return self

    def get_inputs(self) -> list[Any]:
        return []


GOOD = {"block_size": 8, "mask_token_id": 95, "drafts": 7, "chained": False}


def test_what_no_block_can_be_is_refused() -> None:
    assert read_block(Session(GOOD), VOCABULARY) == BlockShape(8, 95, 7)
    wrong: list[Any] = [
        {},
        [],
        None,
        {"more": 1},
        {"mask_token_id": 96},
        {"mask_token_id": -1},
        {"drafts": 9},
    ]
    wrong += [{"drafts": 0}, {"block_size": "8"}, {"block_size": 10**12}, {"chained": True}]
    for change in wrong:
        told = {**GOOD, **change} if isinstance(change, dict) and change else change
        with pytest.raises(EngineError, match="build the bundle again"):
            read_block(Session(told), VOCABULARY)
