"""A small random T5 and a draft of it, from checkpoints to texts: what transformers writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors

import specrt
from portable.zoo import Exported
from specrt.engine.protocol import ConditionedEngine
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.drafters import DRAFTERS
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

RECIPE = """
name = "small"

[target]
checkpoint = "target"
graph = "target.onnx"

[draft]
checkpoint = "draft"
graph = "draft.onnx"

[engine]
max_length = 64
max_source = 48
prefill = 8
batch = 3
gammas = [1, 2, 4]
"""

NEW = 40
SOURCES = [
    [7, 8, 9, 1], [5] * 48, [*range(10, 40), 1], [90, 33, 90, 33, 90, 33, 90, 1], [1],
    [7, 8, 10, 1],
]  # fmt: skip
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)


def words() -> str:
    """Return a tokenizer of 160 words, whose texts end with </s>."""
    names = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(3, 160))]
    made = RawTokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    made.add_special_tokens(names[:3])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return str(made.to_str())


def near(folder: Path, to: Path) -> None:
    """Write a checkpoint whose weights are nearly those of another one."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    model = library.T5ForConditionalGeneration.from_pretrained(folder)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.03 * parameter.data.std() * torch.randn_like(parameter)
    model.save_pretrained(to)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[str], Exported]) -> Path:
    """A recipe of both checkpoints; a graph knows names and shapes alone, so one is both's."""
    folder, t5 = tmp_path_factory.mktemp("pair"), exported("t5_even")
    shutil.copytree(t5.checkpoint.folder, folder / "target")
    near(folder / "target", folder / "draft")
    for role in ("target", "draft"):
        (folder / role / "tokenizer.json").write_text(words())
        for graph in t5.graph.parent.glob("graph*.onnx"):
            shutil.copy(graph, folder / graph.name.replace("graph", role))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


@pytest.fixture(scope="module")
def bundle(recipe: Path) -> Path:
    built = recipe.parent / "bundle"
    build(read_recipe(recipe), built)
    return built


@pytest.fixture(scope="module")
def made(bundle: Path) -> Iterator[Generator]:
    with specrt.load(bundle, threads=1) as opened:
        yield opened


def of_transformers(recipe: Path, source: list[int], *, assisted: bool = False) -> list[int]:
    """Return the greedy text of a source, without its first token."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    load = library.T5ForConditionalGeneration.from_pretrained
    model = load(recipe.parent / "target").eval()
    options: dict[str, Any] = {"assistant_model": load(recipe.parent / "draft").eval()}
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=NEW,
            eos_token_id=None, **(options if assisted else {}),
        )  # fmt: skip
    return [int(token) for token in found[0, 1:]]


@pytest.fixture(scope="module")
def texts(recipe: Path) -> list[list[int]]:
    """What transformers writes of each source, alone."""
    return [of_transformers(recipe, source) for source in SOURCES]


def test_sources_of_different_lengths_in_rows_have_the_texts_of_transformers(
    made: Generator, recipe: Path, texts: list[list[int]]
) -> None:
    assert isinstance(made.models.target, ConditionedEngine)
    assert made.rows == 3
    assert texts[2] == of_transformers(recipe, SOURCES[2], assisted=True)
    assert len({tuple(text) for text in texts}) > 4
    for drafter in DRAFTERS:
        for gamma in (0, 1, 4, "auto"):
            made.forget()
            done = made.generate_many(SOURCES, PARAMS, drafter=drafter, gamma=gamma)
            assert [one.token_ids for (one,) in done] == texts
            if (drafter, gamma) == ("model", 4):
                counts = [one.speculation for (one,) in done]
                assert sum(c.accepted for c in counts) > 0.2 * sum(c.drafted for c in counts) > 0


def test_a_row_is_read_again_for_another_source_only(
    made: Generator, texts: list[list[int]]
) -> None:
    made.forget()
    for turn in range(2):
        for source, text in zip(SOURCES, texts, strict=True):
            done = made.generate(source, PARAMS, drafter="model")
            assert done.token_ids == text
            again = made.generate(source, PARAMS, drafter="model")
            assert (again.token_ids, again.cached_tokens) == (text, len(source)), turn


def test_drawn_texts_are_the_same_with_and_without_drafts(made: Generator) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=4, ignore_eos=True)
    plain, *others = (
        [one.token_ids for (one,) in made.generate_many(SOURCES, params, drafter=d, gamma=g)]
        for d, g in (("none", 0), ("model", 4), ("ngram", 2), ("cascade", "auto"))
    )
    assert all(other == plain for other in others)


def test_the_source_of_a_text_is_its_tokens_and_ends_like_them(
    bundle: Path, texts: list[list[int]]
) -> None:
    llm = specrt.LLM(model=bundle, num_speculative_tokens=2)
    (answer,) = llm.generate(["w7 w8 w9"], PARAMS)
    assert answer.prompt_token_ids == SOURCES[0]
    assert list(answer.outputs[0].token_ids) == texts[0]


def test_scores_are_those_of_transformers(made: Generator, recipe: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    model = library.T5ForConditionalGeneration.from_pretrained(recipe.parent / "target").eval()
    for source in SOURCES[:3]:
        done = made.generate(source, SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True))
        ids = [0, *done.token_ids]
        with torch.inference_mode():
            scores = model(torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits[0]
        wanted = scores.log_softmax(-1)[range(8), ids[1:]].numpy()
        assert done.logprobs is not None
        found = [entry[token].logprob for entry, token in zip(done.logprobs, ids[1:], strict=True)]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_what_the_checkpoint_asks_for_is_done(recipe: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    asked = {
        "forced_bos_token_id": 33, "forced_eos_token_id": 1, "no_repeat_ngram_size": 2,
        "suppress_tokens": [50, 51], "begin_suppress_tokens": [9], "min_length": 6, "num_beams": 4,
        "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    for name in ("recipe.toml", "target.onnx", "draft.onnx"):
        shutil.copy(recipe.parent / name, tmp_path / name)
    for graph in recipe.parent.glob("*.*.onnx"):
        shutil.copy(graph, tmp_path / graph.name)
    for role in ("target", "draft"):
        shutil.copytree(recipe.parent / role, tmp_path / role)
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(asked))
    build(read_recipe(tmp_path / "recipe.toml"), tmp_path / "bundle")
    load = library.T5ForConditionalGeneration.from_pretrained
    model = load(tmp_path / "target").eval()
    with specrt.load(tmp_path / "bundle", threads=1) as made:
        assert any("4 beams" in notice for notice in made.notices)
        for source in SOURCES[:3]:
            with torch.inference_mode():
                (wanted,) = model.generate(
                    torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=20
                )
            for drafter in DRAFTERS:
                done = made.generate(source, SamplingParams(max_tokens=20), drafter=drafter)
                assert done.token_ids == wanted[1:].tolist()
