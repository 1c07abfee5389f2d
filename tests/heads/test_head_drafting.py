"""A head drafts what torch computes anew for each round, whatever was accepted before."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specrt
from heads.assistants import KINDS, Transformers, save_pair
from heads.blocks import BLOCK, run_block, save_block_head
from heads.conftest import RECIPE, VOCABULARY, save_qwen
from portable.zoo import InDoubles
from shared import nightly_but
from specrt.bundle import BLOCK_HEAD, Bundle
from specrt.engine.backends import BACKENDS
from specrt.engine.ort.block_engine import BLOCK as BLOCK_FACTS
from specrt.engine.ort.block_engine import read_block
from specrt.engine.protocol import BlockShape, Feed, PackedEngine, rows_of
from specrt.errors import BundleError, EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import DRAFT_KINDS, BlockDrafter, ModelDrafter
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Round
from specrt_export.check.equivalence import Reference
from specrt_export.check.head_equivalence import entering, run_head
from specrt_export.check.roofline import measure_kernels
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.heads.assistant_format import Assistant
from specrt_export.heads.dflash_format import BlockHead
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.heads.head_formats import HEAD_FORMATS, load_head
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

Draft = Callable[[Sequence[int], int], list[int]]

BLOCKS = ["dspark", "speculators", "markov"]
FORMS = ["eagle3", "mtp", "gemma4", *BLOCKS, "gemma4_unified"]
"""Heads that feed on themselves, one of them in its target's checkpoint, and two that read its
keys; block heads: with a confidence head, one that scores some entries, one with a Markov head,
too."""
ALWAYS = FORMS[:4]


def forms(*some: str) -> pytest.MarkDecorator:
    """Run a test with heads of some forms only."""
    named = nightly_but(ALWAYS, some)
    return pytest.mark.parametrize("form", named, indirect=True, scope="module")


@pytest.fixture(scope="module", params=nightly_but(ALWAYS, FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def own(form: str, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the target of a form of heads."""
    if form == "mtp":
        return save_qwen(tmp_path_factory.mktemp(form) / "head")
    if form not in KINDS:
        return target
    return save_pair(tmp_path_factory.mktemp(form), form)[0]


@pytest.fixture(scope="module")
def bundle(form: str, own: Path, request: pytest.FixtureRequest) -> Path:
    if form == "eagle3":
        return Path(request.getfixturevalue("bundle"))
    folder: Path = request.getfixturevalue("tmp_path_factory").mktemp(form)
    if form == "mtp":
        folder = own.parent
        text = RECIPE.format(target=own, head="").replace('[draft]\ncheckpoint = ""', "")
    elif form in KINDS:
        folder = own.parent
        text = RECIPE.format(target=own, head=folder / "head")
    else:
        text = RECIPE.format(target=own, head=save_block_head(folder / "head", form))
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    build(read_recipe(folder / "recipe.toml"), folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def generator(bundle: Path) -> Iterator[Generator]:
    with specrt.load(bundle, threads=1, text_memory_bytes=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def head(bundle: Path, own: Path) -> HeadCheckpoint:
    """The checkpoint that the bundle's head is from."""
    draft = Bundle.open(bundle).manifest.draft
    assert draft is not None
    checkpoint = Checkpoint.open(bundle.parent / "head")
    return HEAD_FORMATS[draft.kind].read(checkpoint, Checkpoint.open(own), ())


CHAIN = ["layers off by one", "next position", "recursion on the other side of the norm"]
FAULTS = {
    "eagle3": [*CHAIN, "absolute d2t"], "mtp": [*CHAIN, "parts in the other order"],
    "dflash": ["layers off by one", "next position", "causal in the block"],
    "gemma4_assistant": ["keys of another layer", "next position", "state of the token before"],
}  # fmt: skip
"""What may be wrong in a head of each format."""


def drafting(target: Path, head: HeadCheckpoint, fault: str = "") -> Any:
    """Return what drafts as a head does, right or with a fault."""
    if isinstance(head, Assistant):
        return Transformers(target, head.checkpoint.folder, fault)
    return Torch(target, head, fault)


class Torch:
    """Drafts by computing everything anew, right or with a fault."""

    def __init__(self, target: Path, head: Any, fault: str = "") -> None:
        torch.set_num_threads(1)
        self._reference = Reference(Checkpoint.open(target))
        self._blocks, self._fault = isinstance(head, BlockHead), fault
        self._feature, self._model = load_head(head)
        off = fault == "layers off by one"
        self._inputs = tuple(i - off for i in head.config.inputs)
        self._entries = np.arange(VOCABULARY) if head.entries is None else head.entries
        if fault == "absolute d2t":
            self._entries = head.entries - np.arange(len(head.entries))
        if fault == "causal in the block":
            layers = (True,) * head.config.layers
            self._model.flags = replace(head.config, causal=layers)
        if fault == "parts in the other order":
            joined = self._model.fc.weight.data
            joined.copy_(joined.roll(joined.shape[1] // 2, 1))
        self._feeds_normed = (head.KIND == "mtp") != fault.startswith("recursion")
        self.confidences: list[float] = []

    def __call__(self, tokens: Sequence[int], gamma: int) -> list[int]:
        text, begin = np.array([tokens], np.int64), int(self._fault == "next position")
        with torch.no_grad():
            features = self._feature(entering(self._reference, self._inputs, text)).numpy()
        read = features[:, begin : len(tokens) - 1 + begin]
        return self._block(tokens, read, gamma) if self._blocks else self._chain(text, read, gamma)

    def _block(self, tokens: Sequence[int], read: Any, gamma: int) -> list[int]:
        found = run_block(self._model, tokens[-1], read[0])
        self.confidences = found.get("confidence", np.zeros(0))[:gamma].tolist()
        return [int(self._entries[i]) for i in found["logits"].argmax(-1)[:gamma]]

    def _chain(self, text: Any, hidden: Any, gamma: int) -> list[int]:
        fed, drafted = text[:, 1:], list[int]()
        while len(drafted) < gamma:
            logits, state, _ = run_head(self._model, fed, hidden)
            drafted.append(int(self._entries[logits[0, -1].argmax()]))
            if self._feeds_normed:
                state = self._model.norm(torch.from_numpy(state)).detach().numpy()
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
        settings = self._cache, SamplingParams(), Noise(0), FixedGamma(gamma), VOCABULARY
        return DRAFT_KINDS[self._models.draft_kind](*settings)

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


@pytest.mark.parametrize("seeds", nightly_but([10], [10, 63]))
def test_drafts_are_those_of_torch_after_any_rounds(
    generator: Generator, own: Path, head: Any, seeds: int
) -> None:
    found = agreement(generator, drafting(own, head), range(seeds), 8)
    assert len(found) == 8 * seeds
    assert all(found)


def test_a_wrong_head_drafts_otherwise(generator: Generator, own: Path, head: Any) -> None:
    for fault in FAULTS[head.KIND]:
        found = agreement(generator, drafting(own, head, fault), range(2), 5)
        assert sum(found) < len(found) / 2, fault


@forms(*KINDS)
def test_scores_round_no_more_than_those_of_transformers(
    generator: Generator, own: Path, head: Any
) -> None:
    """On two rows in the same passes, of texts longer than a ring, with rejected tokens in it."""
    models, rng = generator.models, np.random.default_rng(4)
    target, draft = rows(models.target), rows(models.draft)
    texts, held = rng.integers(0, VOCABULARY, (2, 80)).tolist(), [0, 0]
    eager, exact = drafting(own, head), Transformers(own, head.checkpoint.folder, "", torch.float64)
    scores: list[Any] = []
    for _ in range(12):
        fed = []
        for row, text in enumerate(texts):
            begin, end = held[row], held[row] + int(rng.integers(1, 8))
            rejected = rng.integers(0, VOCABULARY, rng.integers(0, 5)).tolist()
            fed.append(Feed(row, [*text[begin:end], *rejected], begin, 1))
            held[row] = end
        target.forward_rows(fed)
        fed = [Feed(row, [text[held[row]]], held[row], 1) for row, text in enumerate(texts)]
        drafted = []
        for _ in range(3):
            made = draft.forward_rows(fed)
            drafted.append([output.logits[0, 0].copy() for output in made])
            fed = [feed._replace(tokens=output.argmax[0].tolist(), recursive=True)
                   for feed, output in zip(fed, made, strict=True)]  # fmt: skip
        for row, text in enumerate(texts):
            with InDoubles():
                right = exact(text[: held[row] + 1], 3)
            assert eager(text[: held[row] + 1], 3) == right
            scores.append(([one[row] for one in drafted], eager.logits, exact.logits))
    ours, theirs, right = (np.array(part) for part in zip(*scores, strict=True))
    assert right.dtype == np.float64
    distances = [np.sqrt(np.mean((each - right) ** 2)) for each in (ours, theirs)]
    assert distances[0] < max(2e-6 * np.abs(right).max(), 1.25 * distances[1])


@forms(*KINDS)
def test_after_the_furthest_way_back_a_head_scores_as_over_a_fresh_row(
    generator: Generator,
) -> None:
    """The key that it sees beyond its target's window is not overwritten either."""
    models, rng = generator.models, np.random.default_rng(0)
    target, draft = rows(models.target), rows(models.draft)

    def read(row: int, text: list[int], begin: int, end: int) -> None:
        while begin < end:
            some = text[begin : min(end, begin + int(rng.integers(1, 13)))]
            target.forward_rows((Feed(row, some, begin, 1),))
            begin += len(some)

    for _ in range(60):
        text = rng.integers(0, VOCABULARY, 100).tolist()
        read(0, text, 0, int(rng.integers(50, 90)))
        back = models.target.traits.rewind(0)
        assert back > 0
        for row, begin in ((0, back), (1, 0)):
            read(row, text, begin, back + 1)
        one, other = draft.forward_rows([Feed(r, [text[back + 1]], back + 1, 1) for r in (0, 1)])
        assert np.array_equal(one.logits, other.logits)


@forms(*BLOCKS)
def test_the_head_tells_how_sure_it_is(
    generator: Generator, target: Path, head: Any, form: str
) -> None:
    """The confidences of a proposal are those of the confidence head, where there is one."""
    models, tokens = generator.models, PROMPTS[0]
    assert models.draft is not None
    run(KVCache(models.target).feed(tokens, 1))
    for params in (SamplingParams(), SamplingParams(temperature=1.0, verifier="rejection")):
        drafter = BlockDrafter(KVCache(models.draft), params, Noise(0), FixedGamma(5), VOCABULARY)
        proposal = run(drafter.propose(tokens, 20))
        reference = Torch(target, head)
        reference(tokens, 5)
        told = list(proposal.confidences)
        assert len(told) == 5
        if form == "dspark" or (form == "markov" and params.greedy):
            assert np.allclose(told, reference.confidences, atol=1e-4)
        else:
            assert all(0 < confidence < 1 for confidence in told)


PROMPTS = [[5, 9, 17, 3, 5, 9], [40, 2, 7], [11] * 20, [60, 61, 62, 60, 61]]

SETTINGS = [
    {}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_k": 20, "seed": 3},
    {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 1, "logit_bias": {4: 3.0}},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_texts_are_those_of_plain_decoding(generator: Generator, settings: dict[str, Any]) -> None:
    """On all rows, with the prompt cache of earlier texts."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, verifier="match", **settings)
    plain = [generator.generate(prompt, params, gamma=0).token_ids for prompt in PROMPTS]
    for drafter, gamma in (("model", 1), ("model", 8), ("model", "auto"), ("cascade", 5)):
        texts = generator.generate_many(PROMPTS, params, gamma=gamma, drafter=drafter)
        assert [text[0].token_ids for text in texts] == plain, (drafter, gamma)
    stats = generator.generate(PROMPTS[0], params, gamma=8, drafter="model").speculation
    assert stats.drafted > 0


def test_texts_go_on_to_the_end_of_the_buffers(generator: Generator) -> None:
    """Where a draft does not fit any more nothing is drafted."""
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


@forms(*BLOCKS)
def test_rows_beside_each_other_are_scored_as_they_are_alone(generator: Generator) -> None:
    """Whatever another row has in the same pass, and between two of them."""
    models, (one, two) = generator.models, PROMPTS[:2]
    target, draft = models.target, models.draft
    assert isinstance(target, PackedEngine)
    assert isinstance(draft, PackedEngine)
    block = draft.traits.block
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
        with pytest.raises(EngineError, match="not after the last block"):
            draft.forward_rows((nexts[0]._replace(start=len(one) + 5),))


@forms("dspark")
def test_passes_that_no_block_has_are_refused(generator: Generator) -> None:
    draft: Any = generator.models.draft
    end = draft.max_length
    for tokens, start, rows in (([1], end - BLOCK + 2, 1), ([1], 0, BLOCK), ([1] * 50, 0, 1)):
        feed = Feed(0, tokens, start, rows)
        with pytest.raises(EngineError, match=r"would be written|to be drafted|built for widths"):
            draft.forward_rows((feed,))


@forms("dspark")
def test_a_backend_that_drafts_no_blocks_refuses_them_by_name(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other heads it runs."""
    runs = BACKENDS["ort-cpu"].runs
    without = {kind: opened for kind, opened in runs.items() if kind != BLOCK_HEAD}
    monkeypatch.setitem(BACKENDS, "ort-cpu", replace(BACKENDS["ort-cpu"], runs=without))
    with pytest.raises(BundleError, match=r"drafts blocks .* which ort-cpu does not run"):
        specrt.load(bundle)


@forms("eagle3")
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


@forms("mtp")
def test_passes_of_layers_with_states_are_timed(bundle: Path) -> None:
    for width in measure_kernels(bundle, 1, laps=1, widths=(1, 9, 12)).widths:
        assert width.recurrence is not None
        assert width.whole.least_ms > 0
