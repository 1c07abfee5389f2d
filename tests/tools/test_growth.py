"""Where old numbers go when a checkpoint grows, and what is refused; no model is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from growth.family import LLAMA
from growth.shards import Entry, write_shards
from inflate import main

CONFIG = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 80, "vocab_size": 97,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
SIZES = {"hidden": 48, "vocab": 97, "units": 80, "queries": 48, "attended": 48,
         "keys": 16, "values": 16}  # fmt: skip


def tiny(folder: Path, config: dict[str, Any], extra: dict[str, Any]) -> Path:
    """Write a checkpoint of 24 weights, all of them one."""
    arrays = {}
    for name in LLAMA.required({"layers": 2}, tied=False):
        kind = LLAMA.kind_of(name)
        assert kind is not None
        arrays[name] = np.ones([SIZES[axis] for axis in kind.axes], np.float32)
    arrays |= extra
    folder.mkdir()
    write_shards(
        folder,
        [Entry(n, "F32", a.shape, a.nbytes, lambda a=a: a) for n, a in arrays.items()],  # type: ignore[misc]
    )
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


FLOAT16 = ["--layers", 3, "--dtype", "float16"]
REFUSED: list[tuple[dict[str, Any], list[object], dict[str, float], str]] = [
    ({}, [], {}, "nothing grows"),
    ({"model_type": "gemma2"}, ["--layers", 3], {}, "of model_type 'gemma2'; only llama"),
    ({}, ["--to", "3B"], {}, "llama, mistral, qwen2 models grow to 200M, 1B, 8B"),
    ({}, ["--decoder-layers", 3], {}, "decoder_layers is 3, and the checkpoint has no encoder"),
    ({}, ["--layers", 3, "--hybrid", "recurrent"], {}, "hidden_size is 48, and heads of 64 share"),
    ({"quantization_config": {"bits": 4}}, ["--layers", 3], {}, "quantization_config"),
    ({}, FLOAT16, {"self_attn.q_norm.weight": 1.0}, "for which no growth is known"),
    ({}, FLOAT16, {"mlp.down_proj.bias": 1e6}, "holds 1e+06, beyond float16"),
]
"""Changes of config.json, options, weights of a layer, and what is said."""


@pytest.mark.parametrize(("config", "arguments", "weights", "message"), REFUSED)
def test_what_cannot_grow_is_refused_by_name_and_leaves_nothing(
    config: dict[str, Any], arguments: list[object], weights: dict[str, float], message: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    extra = {f"model.layers.1.{n}": np.full(48, v, np.float32) for n, v in weights.items()}
    folder = tiny(tmp_path / "small", config, extra)
    told = [str(each) for each in (folder, "--out", tmp_path / "grown", *arguments)]
    result = CliRunner().invoke(main, told)
    assert isinstance(result.exception, SystemExit)
    assert message in result.output.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
