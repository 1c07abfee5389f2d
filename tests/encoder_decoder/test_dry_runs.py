"""What a bundle of an encoder-decoder takes, from configs alone: equal to what is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from encoder_decoder.recipes import held_bytes
from specrt.bundle import Bundle
from specrt.cli.inspect import command as inspect
from specrt.cli.inspect import memory
from specrt.errors import SpecrtError
from specrt_export.estimate.encoder_decoder_shape import FAMILIES, EncoderDecoderShape
from specrt_export.estimate.estimate import estimate
from specrt_export.recipe.recipe import read_recipe

pytestmark = pytest.mark.export

Built = Callable[..., Path]

BUNDLES = [
    ("bart",), ("marian",), ("m2m_100",), ("t5", "t5"), ("bart", "mbart"),
    ("whisper", "whisper_draft"), ("bart", "int8"), ("whisper", "whisper_draft", "int8"),
    *(
        pytest.param(names, marks=pytest.mark.nightly)
        for names in (
            ("t5", "t5", "int8"), ("t5_untied", "int4"), ("umt5", "int4"), ("marian_apart", "int8"),
        )
    ),
]  # fmt: skip

LARGE: dict[str, dict[str, Any]] = {
    "T5Config": {
        "d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 24, "num_heads": 16,
        "feed_forward_proj": "gated-gelu",
    },
    "UMT5Config": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
    "BartConfig": {},
    "MBartConfig": {"vocab_size": 250027},
    "MT5Config": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
    "PLBartConfig": {"vocab_size": 50005},
    "BlenderbotConfig": {"encoder_layers": 2, "decoder_layers": 24},
    "BlenderbotSmallConfig": {},
    "PegasusConfig": {"vocab_size": 96103},
    "M2M100Config": {"vocab_size": 256206},
    "MarianConfig": {"vocab_size": 58101, "decoder_vocab_size": 58101},
    "WhisperConfig": {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 2, "num_mel_bins": 128,
        "encoder_attention_heads": 20, "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": 51866,
    },
}  # fmt: skip


@pytest.mark.parametrize("names", BUNDLES, ids="-".join)
def test_a_bundle_takes_what_is_estimated(names: tuple[str, ...], built: Built) -> None:
    precision = names[-1] if names[-1].startswith("int") else "fp32"
    bundle = built(*(name for name in names if name != precision), precision=precision)
    manifest, found = Bundle.open(bundle).manifest, estimate(read_recipe(recipe_of(bundle)))
    for said, model in zip(found.models, manifest.models, strict=True):
        files = {path.stem: held_bytes(path) for path in (bundle / said.role).glob("*.onnx")}
        parts, parameters = dict(said.parts), said.parameters
        if said.encoder_of == "target or own" and "encoder" not in files:
            del parts["encoder"]  # only the weights tell that both are the same
            parameters = model.parameters
        assert parts == files
        assert parameters == model.parameters
        assert said.cross_bytes == model.cross_bytes(manifest.batch)
        assert (said.encoder_of != "") == (len(files) < 3)
    assert found.kv_bytes == manifest.kv_bytes() == memory(bundle, manifest)["kv_bytes"]
    assert manifest.target.encoder is not None
    assert found.max_source == manifest.target.encoder.max_source


def recipe_of(bundle: Path) -> Path:
    return bundle.parent / "recipe.toml"


def test_both_name_the_same_parts(built: Built) -> None:
    bundle = built("t5", "t5")
    shown = CliRunner().invoke(inspect, [str(bundle)]).output
    said = "\n".join(estimate(read_recipe(recipe_of(bundle))).lines())
    for noun in ("encoder", "cross projections", "decoder", "KV buffers", "cross keys and values"):
        assert noun in shown
        assert noun in said
    assert "if its encoder is the target's" in said


def said_of(folder: Path, engine: str, **config: Any) -> Any:
    (folder / "model").mkdir(parents=True)
    sizes = {
        "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
        "num_heads": 4, "vocab_size": 100, **config,
    }  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    recipe = folder / "recipe.toml"
    text = f'[target]\ncheckpoint = "model"\n[engine]\nmax_length = 64\nprefill = 8\n{engine}\n'
    recipe.write_text(text, encoding="utf-8")
    return estimate(read_recipe(recipe))


LLAMA = {
    "model_type": "llama", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 1,
    "intermediate_size": 9,
}  # fmt: skip
BART = {"model_type": "bart", "max_position_embeddings": 8}
BART |= {
    f"{part}_{size}": 4
    for part in ("encoder", "decoder")
    for size in ("layers", "attention_heads", "ffn_dim")
}


@pytest.mark.parametrize(
    ("engine", "config", "said"),
    [
        ("backend = 'ort-cuda'\nprecision = 'fp16'", {}, "ort-cuda does not run yet"),
        ("max_source = 5", LLAMA, "reads no source"),
        ("max_source = 9", BART, "more than the 8 positions"),
        ("", {"d_ff": "wide"}, "d_ff is 'wide'; expected a whole number"),
    ],
)
def test_what_is_not_built_is_not_estimated(
    engine: str, config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecrtError, match=said):
        said_of(tmp_path, engine, **config)


@pytest.mark.parametrize("name", LARGE)
def test_parameters_are_those_of_transformers_models(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**LARGE[name])
    kind = config.model_type
    with torch.device("meta"):
        model = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(
            type(config), transformers.WhisperForConditionalGeneration
        )(config)
    shape = EncoderDecoderShape.from_config(config.to_dict(), Path("config.json"))
    computed = shape.decoder.vocab_size * FAMILIES[kind].logits_bias  # a buffer there
    if FAMILIES[kind].positions == "sinusoidal":
        computed -= sum(p.numel() for n, p in model.named_parameters() if "embed_positions" in n)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) + computed
