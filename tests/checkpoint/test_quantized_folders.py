"""Folders of quantized weights, read as they are: bit for bit, or refused in one line."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from specrt.cli.build import command as build
from specrt.errors import CheckpointError, SpecrtError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.provenance import provenance_of
from support.quantized_folders import FP8, Awq, Bytes, Format, Fp4, Gptq, PackQuantized, Written

SHAPES = {"a.q_proj": (72, 128), "a.k_proj": (40, 128), "a.up_proj": (64, 384)}
"""No multiples of slices, words or blocks, where the layouts allow it; q and k read one value."""

FORMATS: dict[str, Format] = {
    "gptq": Gptq(),
    "gptq asymmetric": Gptq(symmetric=False),
    "gptq of 8 bits asymmetric": Gptq(8, 128, symmetric=False, version=2, scale="BF16"),
    "gptq of rows": Gptq(group=-1, symmetric=False),
    "gptq in activation order": Gptq(ordered=True, symmetric=False),
    "awq": Awq(),
    "awq of rows": Awq(-1),
    "packed": PackQuantized(),
    "packed of 8 bits asymmetric": PackQuantized(8, 32, symmetric=False),
    "packed with a byte a zero": PackQuantized(symmetric=False, packs_zeros=False),
    "packed of 8 bits with a byte a zero": PackQuantized(8, 64, False, packs_zeros=False),
    "packed in activation order": PackQuantized(ordered=True, symmetric=False),
    "int8": Bytes(),
    "int8 asymmetric": Bytes(symmetric=False),
    "fp8": Bytes(fp8=True),
    "fp8 in odd blocks": Bytes(True, "block", "fp8", block=(48, 96)),
    "fp8 of a tensor": Bytes(True, "tensor", "fp8"),
    "nvfp4": Fp4(),
    "mxfp4": Fp4(nv=False),
    "mxfp4 with typed scales": Fp4(nv=False, scale_type="F8_E8M0"),
}


def write(folder: Path, format_: Format) -> Written:
    """Write some layers, and a norm in floats."""
    rng = np.random.default_rng(1)
    config = {"model_type": "llama", "quantization_config": format_.config}
    written = Written(folder, config, {})
    for stem, shape in SHAPES.items():
        shared = sum(stem.replace("k_proj", "q_proj").encode())
        tensors, weights = format_.layer(rng, shared, shape)
        written.tensors.update({f"{stem}.{key}": value for key, value in tensors.items()})
        written.weights[f"{stem}.weight"] = weights
    norm = rng.normal(size=96).astype(ml_dtypes.bfloat16)
    written.tensors["norm.weight"] = ("BF16", norm)
    written.weights["norm.weight"] = norm.astype(np.float32)
    written.save()
    return written


def opened(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.source is not None
    checkpoint.source.check_kept()
    return checkpoint


@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_weights_are_the_formats_own_bit_for_bit(format_: Format, tmp_path: Path) -> None:
    written = write(tmp_path, format_)
    checkpoint = opened(tmp_path)
    assert checkpoint.weights.keys() == written.weights.keys()
    assert "quantization_config" not in checkpoint.config
    for name, wanted in written.weights.items():
        assert checkpoint.floats(name).tobytes() == wanted.tobytes()
    for name, weight in checkpoint.coded.items():
        wanted, count = written.weights[name], weight.shape[0]
        assert checkpoint.weights[name].shape == weight.shape == wanted.shape
        cuts = [0, 1, 5, 29, count]  # slices that begin within a word
        parts = [weight.floats(*cut) for cut in pairwise(cuts)]
        assert np.concatenate(parts).tobytes() == wanted.tobytes()
        codes = weight.codes(3, 9)
        assert codes.format == weight.precision
        order = slice(None) if weight.inputs is None else weight.inputs
        assert (codes.floats() == wanted[3:9, order]).all()
        assert codes.scales.shape == (6, weight.shape[1] // weight.block)


Change = Callable[[Written], object]


def setting(key: str, value: Any) -> Change:
    """Change a key of quantization_config; dots lead into it."""

    def change(written: Written) -> None:
        place = written.config["quantization_config"]
        *outer, last = key.split(".")
        for part in outer:
            place = place[part]
        place[last] = value

    return change


def tensor(name: str, **said: Any) -> Change:
    """Change one tensor's type or values; None takes it away."""

    def change(written: Written) -> None:
        if said.get("values", name) is None:
            del written.tensors[name]
            return
        dtype, values = written.tensors.get(name, ("F32", np.zeros(1, np.float32)))
        written.tensors[name] = (said.get("dtype", dtype), said.get("values", values))

    return change


def edited(name: str, edit: Callable[[Any], Any]) -> Change:
    return lambda written: tensor(name, values=edit(written.tensors[name][1].copy()))(written)


GROUP = "config_groups.group_0"

TOKENS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}

CONFIGURED: dict[str, tuple[Format, Change, str]] = {
    "no object": (Gptq(), lambda w: w.config.update(quantization_config=[1]), "expected an object"),
    "three bits": (Gptq(), setting("bits", 3), r"\.bits is 3; specrt keeps 4 and 8"),
    "bits in words": (Gptq(), setting("bits", "4"), r"\.bits is '4'; .* type int"),
    "marlin": (Gptq(), setting("checkpoint_format", "marlin"), r"checkpoint_format is 'marlin'"),
    "group of 0": (Gptq(), setting("group_size", 0), r"group_size is 0"),
    "vectors": (Awq(), setting("version", "gemv"), r"\.version is 'gemv'; specrt keeps the layout"),
    "awq of 8": (Awq(), setting("bits", 8), r"\.bits is 8; specrt keeps 4"),
    "sparse": (
        PackQuantized(), setting("sparsity_config", {"format": "sparse-24-bitmask"}),
        r"sparsity_config\.format is 'sparse-24-bitmask'",
    ),
    "a layout": (PackQuantized(), setting("format", "marlin-24"), r"\.format is 'marlin-24'"),
    "rotations": (
        PackQuantized(), setting("transform_config", {"config_groups": {"R1": {}}}),
        r"transform_config\.config_groups",
    ),
    "no groups": (PackQuantized(), setting("config_groups", {}), r"config_groups is \{\}"),
    "unfinished": (
        PackQuantized(), setting("quantization_status", "frozen"), "quantization_status is 'froz"
    ),
    "e5m2": (Bytes(True, "block", "fp8"), setting("fmt", "e5m2"), r"fmt is 'e5m2'"),
    "a block of words": (
        Bytes(True, "block", "fp8"), setting("weight_block_size", [0, 128]), "weight_block_size is"
    ),
    "floats after all": (
        Gptq(), lambda w: [w.tensors.pop(k) for k in [*w.tensors] if "norm" not in k],
        r"says that weights are quantized \(gptq\), and all of them are floats",
    ),
}  # fmt: skip

STORED: dict[str, tuple[Format, Change, str]] = {
    "no scales": (Gptq(), tensor("a.k_proj.scales", values=None), r"no a\.k_proj\.scales; fetch"),
    "uneven groups": (
        Gptq(), edited("a.k_proj.g_idx", lambda g: np.where(np.arange(128) == 127, 0, g)),
        r"a\.k_proj\.g_idx has 128 inputs in groups of 32; expected multiples of 16",
    ),
    "few indices": (Gptq(), edited("a.k_proj.g_idx", lambda g: g[:64]), r"expected \[128\]"),
    "no outputs": (Gptq(), edited("a.k_proj.qweight", lambda q: q[:, :0]), "expected 2 axes"),
    "no shape": (PackQuantized(), tensor("a.k_proj.weight_shape", values=None), "weight_shape"),
    "no zero": (
        PackQuantized(symmetric=False), tensor("a.k_proj.weight_zero_point", values=None),
        r"no a\.k_proj\.weight_zero_point",
    ),
    "zeros of rows": (
        PackQuantized(symmetric=False), edited("a.k_proj.weight_zero_point", lambda z: z[:2]),
        r"weight_zero_point has shape \[2, 4\]; expected \[5, 4\]",
    ),
    "odd scales": (
        Bytes(), edited("a.k_proj.weight_scale", lambda s: s[:7]),
        r"weight_scale has shape \[7, 1\]; expected one scale, or 40 rows",
    ),
}  # fmt: skip

VALUES: dict[str, tuple[Format, Change, str]] = {
    "a scale that is none": (
        Gptq(), edited("a.k_proj.scales", lambda s: s * np.float16(np.nan)), r"qweight comes to"
    ),
    "a whole scale of 0": (
        Fp4(), edited("a.k_proj.weight_global_scale", lambda s: s * 0), "not finite"
    ),
    "fp8 that is none": (
        Bytes(fp8=True), edited("a.k_proj.weight", lambda w: np.full_like(w, np.nan, FP8)),
        r"a\.k_proj\.weight comes to numbers that are not finite, in rows 0 to 39",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("format_", "change", "message"),
    [*CONFIGURED.values(), *STORED.values()],
    ids=[*CONFIGURED, *STORED],
)
def test_what_is_not_kept_is_refused_in_one_line(
    format_: Format, change: Change, message: str, tmp_path: Path
) -> None:
    written = write(tmp_path, format_)
    change(written)
    written.save()
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("format_", "change", "message"), VALUES.values(), ids=VALUES)
def test_values_that_are_none_are_refused_when_rows_are_read(
    format_: Format, change: Change, message: str, tmp_path: Path
) -> None:
    written = write(tmp_path, format_)
    change(written)
    written.save()
    weight = opened(tmp_path).coded["a.k_proj.weight"]
    with pytest.raises(CheckpointError, match=message):
        weight.codes(0, 40)


def test_codes_that_nothing_describes_are_named(tmp_path: Path) -> None:
    written = write(tmp_path, Gptq())
    del written.config["quantization_config"]
    with pytest.raises(CheckpointError, match=r"a\.q_proj\.qweight .*has no quantization_config"):
        Checkpoint.open(written.save())


ACTIVATIONS: dict[str, tuple[Format, Change, str]] = {
    "int8": (Bytes(), setting(f"{GROUP}.input_activations", TOKENS), "inputs in int8"),
    "outputs": (PackQuantized(), setting(f"{GROUP}.output_activations", TOKENS), "outputs in int8"),
    "keys": (
        Gptq(), tensor("a.attention.k_scale"), "tensors k_scale",
    ),
    "keys and values": (
        PackQuantized(), setting("kv_cache_scheme", {"num_bits": 8, "type": "float"}),
        "keys and values in FP8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("format_", "change", "left_out"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_weights_alone_are_kept_where_that_is_asked_for(
    format_: Format, change: Change, left_out: str, tmp_path: Path
) -> None:
    written = write(tmp_path, format_)
    change(written)
    for part in ("input_scale", "input_global_scale"):
        written.tensors[f"a.q_proj.{part}"] = ("F32", np.ones(1, np.float32))
    if left_out.startswith("tensors"):
        left_out = "tensors input_global_scale, tensors input_scale, tensors k_scale"
    written.save()
    with pytest.raises(CheckpointError, match="--weight-only"):
        opened(tmp_path)
    checkpoint = Checkpoint.open(tmp_path, weight_only=True)
    for name, wanted in written.weights.items():
        assert checkpoint.floats(name).tobytes() == wanted.tobytes()
    assert checkpoint.weights.keys() == written.weights.keys()
    assert provenance_of(checkpoint).left_out == left_out
    assert Checkpoint.open(tmp_path, config_only=True, weight_only=True).source is not None


def test_floats_of_any_type_are_read(tmp_path: Path) -> None:
    values = {"a": ("F64", np.array([0.5, 3])), "b": ("BOOL", np.array([True, False]))}
    written = Written(tmp_path, {"model_type": "llama"}, values)
    checkpoint = Checkpoint.open(written.save())
    assert [checkpoint.floats(name).tolist() for name in values] == [[0.5, 3], [1, 0]]


def test_layers_with_sizes_of_their_own_are_read(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: bits and groups by layer, which the tensors say."""
    written = write(tmp_path, Gptq(4, 32))
    tensors, weights = Gptq(8, 64).layer(np.random.default_rng(2), 0, (40, 128))
    written.tensors.update({f"a.k_proj.{key}": value for key, value in tensors.items()})
    written.config["quantization_config"]["dynamic"] = {r"+:.*k_proj": {"bits": 8}}
    checkpoint = opened(written.save())
    assert checkpoint.floats("a.k_proj.weight").tobytes() == weights.tobytes()
    wanted = written.weights["a.q_proj.weight"]
    assert checkpoint.floats("a.q_proj.weight").tobytes() == wanted.tobytes()


def test_whatever_is_done_to_a_folder_it_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Random damage to headers, configs and bytes; no allocation beyond what is there."""
    dice = random.Random(7)
    folders = {}
    for number, format_ in enumerate((Gptq(ordered=True), Awq(), PackQuantized(symmetric=False),
                                      Bytes(True, "block", "fp8"), Fp4())):  # fmt: skip
        (tmp_path / str(number)).mkdir()
        folders[number] = write(tmp_path / str(number), format_)
    read, refused = 0, list[str]()
    for _ in range(120):
        written = folders[dice.randrange(len(folders))]
        damaged = Written(written.folder, json.loads(json.dumps(written.config)), {})
        damaged.tensors.update(written.tensors)
        said = _damage(damaged, dice)
        path = damaged.save(**said) / "model.safetensors"
        if dice.random() < 0.2:
            path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])
        tracemalloc.start()
        try:
            checkpoint = opened(written.folder)
            for weight in checkpoint.coded.values():
                weight.codes(0, weight.shape[0])
            read += 1
        except SpecrtError as error:
            refused.append(str(error))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * path.stat().st_size + (4 << 20)
    assert read > 10 < len(refused)
    assert not any("\n" in message for message in refused)


def _damage(written: Written, dice: random.Random) -> Mapping[str, Any]:
    """Change one thing in the config, or what is said of a tensor, or some of its bytes."""
    name = dice.choice([*written.tensors])
    dtype, values = written.tensors[name]
    odd = dice.choice([0, -1, 1, 3, 7, 31, 1 << 31, 1 << 62, None, "x", [], {}, 2.5, True])
    kind = dice.randrange(6)
    if kind == 0:
        place = written.config["quantization_config"]
        while isinstance(place, dict) and place:
            key = dice.choice([*place])
            if not isinstance(place[key], dict) or dice.random() < 0.3:
                place[key] = odd
                break
            place = place[key]
    elif kind == 1:
        shape = list(values.shape) or [1]
        shape[dice.randrange(len(shape))] = odd
        return {name: {"shape": shape}}
    elif kind == 2:
        return {name: {"dtype": dice.choice(["I32", "F16", "I8", "U8", "BOOL", "F8_E4M3", "Q4"])}}
    elif kind == 3:
        other = dice.choice([*written.tensors])
        written.tensors[name] = written.tensors[other]
    elif kind == 4:
        raw = bytearray(np.ascontiguousarray(values).tobytes())
        for _ in range(8):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        changed = np.frombuffer(bytes(raw), values.dtype).reshape(values.shape)
        written.tensors[name] = (dtype, changed)
    else:
        del written.tensors[name]
    return {}


def test_a_build_ends_with_what_is_wrong_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    written = write(tmp_path / "model", Gptq(ordered=True))
    tensor("a.k_proj.g_idx", values=np.full(128, 9, np.int32))(written)
    written.save()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[target]\ncheckpoint = "model"\n', encoding="utf-8")
    done = CliRunner().invoke(build, [str(recipe), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, CheckpointError)
    assert "a.k_proj.g_idx names groups 9 to 9" in str(done.exception)
    assert not (tmp_path / "out").exists()
