"""Where weights are from: files and hashes, formats, and what is strange about these."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.provenance import oddity, provenance_of
from specrt_export.plan.build_plan import resolve
from specrt_export.recipe.recipe import read_recipe
from support.quantized_folders import Tensors, container

BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def folder(place: Path, stored: dict[str, str], shards: int = 1) -> Path:
    """Write a checkpoint whose weights are zeros, of a type each."""
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"model_type": "llama"}')
    names = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]
    held = {shard: dict(list(stored.items())[n::shards]) for n, shard in enumerate(names)}
    for shard, weights in held.items():
        zeros: Tensors = {
            name: (dtype, np.zeros([4] if "norm" in name else [4, 8], f"V{BYTES[dtype]}"))
            for name, dtype in weights.items()
        }
        (place / shard).write_bytes(container(zeros))
    if shards > 1:
        index = {name: shard for shard, weights in held.items() for name in weights}
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return place


def named(layers: int = 4, **changed: str) -> dict[str, str]:
    """Return the types of a model's weights: all bf16, but for those named."""
    kinds = ("self_attn.q_proj", "mlp.down_proj", "input_layernorm")
    names = [f"model.layers.{n}.{kind}.weight" for n in range(layers) for kind in kinds]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    changes = {name.replace("__", "."): dtype for name, dtype in changed.items()}
    assert changes.keys() <= set(names)
    return {name: changes.get(name, "BF16") for name in names}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("shards", [1, 3])
def test_an_origin_has_every_file_of_weights_and_no_other(tmp_path: Path, shards: int) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path / "m", named(lm_head__weight="F32"), shards))
    found = provenance_of(checkpoint)
    paths = list((tmp_path / "m").glob("*.safetensors"))
    assert len(paths) == shards
    assert found.files == {path.name: sha256(path) for path in paths}
    assert (found.formats, found.hub, found.revision) == ("BF16 14, F32 1", "", "")


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(folder(tmp_path / "m", named()))
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        provenance_of(checkpoint)


def test_a_fetched_model_has_its_name_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    there = folder(tmp_path / "snapshots" / commit, named())
    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None, _: Any) -> Path:
        asked.append((name, revision))
        return there

    monkeypatch.setattr("specrt_export.checkpoint.checkpoint.download", download)
    local = folder(tmp_path / "recipes" / "own", named())
    recipe = tmp_path / "recipes" / "recipe.toml"
    recipe.write_text(
        '[target]\ncheckpoint = "org/model"\nrevision = "main"\n[draft]\ncheckpoint = "own"\n'
    )
    target, draft = resolve(read_recipe(recipe), tmp_path / "out").models
    assert asked == [("org/model", "main")]
    found = provenance_of(target.checkpoint, target.hub, "main")
    assert (found.hub, found.revision) == ("org/model", commit)
    assert (draft.checkpoint.folder, draft.hub) == (local, "")
    elsewhere = SimpleNamespace(
        folder=local, gguf=None, weights={}, origin=local, source=None, prequantized=None
    )
    assert provenance_of(elsewhere, "org/model", "main").revision == "main"  # type: ignore[arg-type]


ODD = {
    "one layer": (
        named(model__layers__2__mlp__down_proj__weight="F32"),
        ("model.layers.2.mlp.down_proj.weight", "F32", "3 like it as BF16"),
    ),
    "two layers": (
        named(
            model__layers__1__self_attn__q_proj__weight="F16",
            model__layers__2__input_layernorm__weight="F32",
        ),
        ("model.layers.1.self_attn.q_proj.weight", "F16", "BF16, and 1 more"),
    ),
    "what layers do not have": (
        named(lm_head__weight="F32"), ("lm_head.weight", "F32", "14 like it as BF16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("stored", "says"), ODD.values(), ids=ODD)
def test_a_mixture_names_the_tensor(
    stored: dict[str, str], says: tuple[str, ...], tmp_path: Path
) -> None:
    found = oddity(Checkpoint.open(folder(tmp_path / "m", stored)))
    assert found is not None
    assert "\n" not in found
    for part in says:
        assert part in found


def test_what_is_usual_is_no_mixture(tmp_path: Path) -> None:
    assert oddity(Checkpoint.open(folder(tmp_path / "m", named()))) is None
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": "F32" for n in range(4)}
    assert oddity(Checkpoint.open(folder(tmp_path / "old", {**named(), **buffers}))) is None


@pytest.mark.parametrize(
    ("formats", "odd"),
    [
        (("Q4_K", "Q6_K", "Q4_K", "Q5_K"), None),
        (("Q4_0", "Q4_0", "Q8_0", "Q4_0"), "layers.2."),
        (("F16", "Q4_0", "Q4_0", "Q4_0"), "layers.0."),
    ],
)
def test_some_formats_are_mixed_by_their_own_tools(
    formats: tuple[str, ...], odd: str | None
) -> None:
    weights = {
        f"model.layers.{n}.mlp.down_proj.weight": SimpleNamespace(dtype=form, shape=(4, 8))
        for n, form in enumerate(formats)
    }
    weights["model.embed_tokens.weight"] = SimpleNamespace(dtype="F16", shape=(4, 8))
    found = oddity(SimpleNamespace(weights=weights, gguf=None))  # type: ignore[arg-type]
    assert found is None if odd is None else odd in str(found)
