"""Models in GGUF: the configuration and the weights that transformers would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytest.importorskip("gguf", exc_type=ImportError)


from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.gguf.model import GgufModel
from specrt_export.checkpoint.hub_cache import SINGLE
from specrt_export.checkpoint.provenance import provenance_of
from support import gguf_files
from support.gguf_files import MODELS, SCORED_VOCABULARY, quantized, write_model

NOT_SAID = {
    "_name_or_path", "architectures", "attention_dropout", "dtype", "initializer_range",
    "transformers_version",
}  # fmt: skip
"""What a configuration holds and a GGUF file does not, and no graph depends on."""

CHANGES: dict[str, dict[str, Any]] = {"mistral": {"general__name": "Tiny Mistral 7B v0.3"}}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest, models: dict[str, Any], tmp_path: Path) -> Any:
    """A model, and its file in fp32."""
    name = request.param
    model = models.setdefault(name, None) or gguf_files.made(name)
    models[name] = model
    return model, write_model(tmp_path / "tiny.gguf", model, **CHANGES.get(name, {}))


def test_the_configuration_is_transformers_own(family: Any) -> None:
    model, path = family
    checkpoint = Checkpoint.open(path, config_only=True)
    assert not checkpoint.weights
    read = transformers.AutoConfig.from_pretrained(checkpoint.folder).to_dict()
    wanted = model.config.to_dict()
    wanted["head_dim"] = wanted.get("head_dim") or model.config.hidden_size // 4
    keys = (set(read) | set(wanted)) - NOT_SAID
    assert {key: read.get(key) for key in keys} == {key: wanted.get(key) for key in keys}


def test_weights_are_the_models(family: Any) -> None:
    model, path = family
    gguf = GgufModel.open(path)
    gguf.unpack()
    read = transformers.AutoModelForCausalLM.from_pretrained(gguf.folder, dtype=torch.float32)
    wanted, found = model.state_dict(), read.state_dict()
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert {*gguf.weights} == {*wanted}
    for name, held in wanted.items():
        # Gemma's norms lose a bit by the 1 that was added.
        assert torch.allclose(found[name], held, rtol=0, atol=1e-6), name
    ids = torch.arange(60).reshape(2, 30) * 5 % 320
    with torch.no_grad():
        ours, theirs = read(ids).logits, model(ids).logits
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_places_name_formats(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", gguf_files.made("llama"), quantized)
    checkpoint = Checkpoint.open(path)
    kinds = {weight.dtype for weight in checkpoint.weights.values()}
    assert kinds == {"F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    assert checkpoint.gguf is not None
    assert checkpoint.gguf.file.formats().startswith(("F32 ", "Q"))
    assert set(provenance_of(checkpoint).files) == {"tiny.gguf"}
    assert (checkpoint.origin, checkpoint.files) == (path, [path])
    checkpoint.unpack()
    held = (checkpoint.folder / SINGLE).stat().st_size
    assert held < 20_000  # norms alone
    before = (checkpoint.folder / SINGLE).stat().st_mtime_ns
    checkpoint.unpack()
    assert (checkpoint.folder / SINGLE).stat().st_mtime_ns == before


def test_folders_of_killed_processes_go_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", gguf_files.made("llama"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, strange = tmp_path / "specrt-gguf-killed", tmp_path / "specrt-gguf-strange"
    for left in (killed / "tiny.gguf", strange):
        left.mkdir(parents=True)
        (left / SINGLE).write_bytes(b"weights")
    (killed / ".lock").touch()
    used = Checkpoint.open(path)
    assert not killed.exists()
    other = Checkpoint.open(path)
    assert all((one.folder / "config.json").is_file() for one in (used, other))
    assert (strange / SINGLE).is_file()  # without a lock it may be anything
    left = used.folder.parent
    del used
    assert not left.exists()
    assert other.folder.is_dir()


def test_fused_queries_keys_and_values_are_taken_apart(tmp_path: Path) -> None:
    model = gguf_files.made("llama")
    plain = GgufModel.open(write_model(tmp_path / "plain.gguf", model))
    tensors = gguf_files.tensors_of(model)
    for layer in range(3):
        parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    values = {**gguf_files.described(model), **gguf_files.BYTES_VOCABULARY}
    data = gguf_files.container(
        [gguf_files.plain(key, held) for key, held in values.items()],
        [(name, array.shape, 0, array.tobytes()) for name, array in tensors.items()],
    )
    (tmp_path / "fused.gguf").write_bytes(data)
    fused = GgufModel.open(tmp_path / "fused.gguf")
    assert set(fused.weights) == set(plain.weights)
    for name, weight in fused.weights.items():
        rows = weight.shape[0]
        assert np.array_equal(weight.floats(0, rows), plain.weights[name].floats(0, rows)), name


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general__architecture": "gemma3n"}, "'gemma3n'.*did you mean 'gem"),
    "no architecture": ({"general__architecture": None}, "has no general.architecture"),
    "experts": ({"llama__expert_count": 8}, r"llama\.expert_count is 8.*dense model"),
    "no heads": ({"llama__attention__head_count": 0}, r"head_count is 0; expected 1 to 64"),
    "keys unlike values": ({"llama__attention__value_length": 8}, "value_length is 8; expected 16"),
    "layers without end": ({"llama__block_count": 2**31}, "as many layers as the file holds"),
    "a layer more": ({"llama__block_count": 4}, r"no tensor for model\.layers\.3\.input_layernorm"),
    "a layer less": ({"llama__block_count": 2}, r"tensor blk\.2\..* has no place"),
    "another width": ({"llama__embedding_length": 128}, r"\.weight has shape \[.*expected \["),
    "another gate": ({"llama__feed_forward_length": 95}, r"ffn_.* has shape \[.*expected \[.*95"),
    "a strange rotation": ({"llama__rope__scaling__type": "su"}, "'su'; expected 'none', 'linear'"),
    "no epsilon": ({"llama__attention__layer_norm_rms_epsilon": None}, "has no llama.attention.la"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_metadata_that_do_not_fit_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path, models: dict[str, Any]
) -> None:
    model = models.setdefault("one", None) or gguf_files.made("llama")
    models["one"] = model
    path = write_model(tmp_path / "tiny.gguf", model, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(path)
    assert "\n" not in str(caught.value)


WRONG_LAYERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "two counts": ("lfm2", {"attention__head_count_kv": [0, 2, 4]}, "one number, and 0 for conv"),
    "a count short": ("lfm2", {"attention__head_count_kv": [0, 2]}, "for each of 3 layers"),
    "counts of text": ("lfm2", {"attention__head_count_kv": ["2"] * 3}, "a list of 3; expected"),
    "no convolution": ("lfm2", {"attention__head_count_kv": 2}, r"blk\.0\.shortconv\.\w+.* no pl"),
    "no attention": ("lfm2", {"attention__head_count_kv": 0}, r"blk\.1\.attn_\w+.* has no place"),
    "other taps": ("lfm2", {"shortconv__l_cache": 3}, r"conv\.weight has shape \[64, 4\]; exp"),
    "a width": ("gemma4", {"feed_forward_length": [96] * 5 + [192]}, "a list of 6.* kinds of its"),
    "half rotated": ("gemma4", {"rope__dimension_count_swa": 8}, "is 8; expected 16, a whole head"),
    "one kind": ("gemma4", {"attention__sliding_window_pattern": [True] * 6}, "of both kinds"),
    "all shared": ("gemma4", {"attention__shared_kv_layers": 9}, "of both kinds that hold k"),
    "one more owner": ("gemma4", {"attention__shared_kv_layers": 1}, "kinds of its layers"),
    "narrow extras": ("gemma4", {"embedding_length_per_layer_input": 4}, r"shape \[.*expected \["),
    "no extras": ("gemma4", {"embedding_length_per_layer_input": 0}, "has no place in"),
    "long heads": ("gemma4", {"attention__key_length_swa": 32}, "dimension_count_swa is 16; ex"),
    "no quotients": ("gemma4", {"attention__key_length": 64}, "expected|rope_freqs"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_LAYERS.values(), ids=WRONG_LAYERS)
def test_metadata_of_layers_that_do_not_fit_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, models: dict[str, Any]
) -> None:
    model = models.setdefault(name, None) or gguf_files.made(name)
    models[name] = model
    full = {f"{name}__{key}": held for key, held in changes.items()}
    path = write_model(tmp_path / "tiny.gguf", model, **full)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(path)
    assert "\n" not in str(caught.value)


def test_keys_of_layers_that_read_those_of_others_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published files have them, and neither llama.cpp nor transformers reads them."""
    model, tensors_of = gguf_files.made("gemma4"), gguf_files.tensors_of
    plain = GgufModel.open(write_model(tmp_path / "plain.gguf", model))
    more = {"blk.5.attn_k.weight": (64, 64), "blk.5.attn_k_norm.weight": (32,)}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in more.items()}
    monkeypatch.setattr(gguf_files, "tensors_of", lambda model: tensors_of(model) | zeros)
    full = GgufModel.open(write_model(tmp_path / "full.gguf", model))
    assert {*full.file.tensors} - {*plain.file.tensors} == {*more}
    assert {*full.weights} == {*plain.weights}


def test_frequencies_unlike_llama_3s_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    odd = np.linspace(1, 8, 16, dtype=np.float32)
    monkeypatch.setattr(gguf_files, "_quotients", lambda rope, head: odd)
    path = write_model(tmp_path / "tiny.gguf", gguf_files.made("llama3"))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight holds 16 quotients up to 8"):
        Checkpoint.open(path)


def test_more_tokens_than_the_model_scores_are_refused(tmp_path: Path) -> None:
    more = [*SCORED_VOCABULARY["tokenizer.ggml.tokens"], *(f"x{n}" for n in range(100))]
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": more}
    path = write_model(tmp_path / "tiny.gguf", gguf_files.made("llama"), vocabulary=values)
    with pytest.raises(CheckpointError, match=rf"has {len(more)} tokens, and the model scores 320"):
        Checkpoint.open(path)


def test_a_revision_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"revision 'main' given with the file"):
        Checkpoint.open(tmp_path / "tiny.gguf", "main")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf cannot be read: No such file"):
        Checkpoint.open(tmp_path / "tiny.gguf")
