"""Folders of quantized weights for tests: small random models, in the layouts that tools write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from support import gguf_files
from support.toy import byte_level

Tensor = tuple[str, NDArray[Any]]
"""Its type as safetensors calls it, and what it holds."""

Tensors = dict[str, Tensor]

Floats = NDArray[np.float32]

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each half byte of a word holds, the lowest first."""


def container(tensors: Mapping[str, Tensor], **changes: Any) -> bytes:
    """Return a safetensors file; `changes` replace what its header says of a tensor."""
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        there = np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(there)],
        }
        data += there
    for name, entry in changes.items():
        header[name] |= entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def packed(numbers: NDArray[Any], bits: int, axis: int) -> Tensor:
    """Return numbers in words of 32 bits along an axis, the first in the lowest bits."""
    per = 32 // bits
    moved = np.moveaxis(np.asarray(numbers, np.int64), axis, -1)
    lacking = -moved.shape[-1] % per
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, lacking)])
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // per), np.int64)
    for place in range(per):
        words |= moved[..., place::per] << (bits * place)
    return "I32", np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32)


def scales(rng: np.random.Generator, shape: tuple[int, ...], most: float, dtype: str) -> Tensor:
    """Return positive scales by which codes up to `most` come to about 0.3."""
    values = rng.uniform(0.1, 0.4, shape) / most
    kinds: dict[str, Any] = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    return dtype, values.astype(kinds[dtype])


def spread(values: NDArray[Any], group: int, inputs: int) -> Floats:
    """Return a number for each input [N, K] of one for each group [N, groups]."""
    return np.repeat(values.astype(np.float32), group, axis=1)[:, :inputs]


Layer = tuple[Tensors, Floats]
"""The tensors of a layer, by the last part of their names, and the weights they stand for."""


@dataclass(frozen=True)
class Gptq:
    """GPTQ, as GPTQModel writes it."""

    bits: int = 4
    group: int = 32
    symmetric: bool = True
    version: int = 1
    ordered: bool = False
    scale: str = "F16"

    @property
    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group,
            "sym": self.symmetric, "desc_act": self.ordered,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
        }  # fmt: skip

    def layer(self, rng: np.random.Generator, shared: int, shape: tuple[int, int]) -> Layer:
        outputs, inputs = shape
        group = inputs if self.group < 0 else self.group
        groups, most = inputs // group, 1 << self.bits
        codes = rng.integers(0, most, shape)
        zeros = np.full((outputs, groups), most // 2)
        if not self.symmetric:
            zeros = rng.integers(0, most, (outputs, groups))
            zeros[:2, 0] = 0, most - 1
        scale = scales(rng, (outputs, groups), most / 2, self.scale)
        index = np.arange(inputs) // group
        if self.ordered:
            index = np.random.default_rng(shared).permutation(index)
        stored = packed(zeros.T, self.bits, 1)[1].view(np.uint32)
        if self.version == 1:  # as one subtraction from the word
            stored = stored - np.uint32(sum(1 << at for at in range(0, 32, self.bits)))
        weights = scale[1].astype(np.float32)[:, index] * (codes - zeros[:, index]).astype(
            np.float32
        )
        return {
            "qweight": packed(codes.T, self.bits, 0),
            "qzeros": ("I32", stored.view(np.int32)),
            "scales": (scale[0], scale[1].T),
            "g_idx": ("I32", index.astype(np.int32)),
        }, weights


@dataclass(frozen=True)
class Awq:
    """AWQ in the layout of its matrix product, as AutoAWQ writes it."""

    group: int = 32
    order: tuple[int, ...] = AWQ_ORDER

    @property
    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": None,
        }  # fmt: skip

    def layer(self, rng: np.random.Generator, shared: int, shape: tuple[int, int]) -> Layer:
        outputs, inputs = shape
        group = inputs if self.group < 0 else self.group
        codes = rng.integers(0, 16, shape)
        zeros = rng.integers(0, 16, (outputs, inputs // group))
        scale = scales(rng, zeros.shape, 8, "F16")

        def words(numbers: NDArray[Any]) -> Tensor:
            turned = numbers.T.reshape(numbers.shape[1], -1, 8)[..., self.order]
            return packed(turned.reshape(numbers.shape[1], -1), 4, 1)

        return {
            "qweight": words(codes),
            "qzeros": words(zeros),
            "scales": (scale[0], scale[1].T),
        }, spread(scale[1], group, inputs) * (codes - spread(zeros, group, inputs)).astype(
            np.float32
        )


def compressed(kind: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": kind, "ignore": ["lm_head"],
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, **more}},
    }  # fmt: skip


@dataclass(frozen=True)
class PackQuantized:
    """Words of whole numbers of compressed-tensors."""

    bits: int = 4
    group: int = 32
    symmetric: bool = True
    ordered: bool = False
    packs_zeros: bool = True
    """Whether zeros are in words; else each is a byte."""

    @property
    def config(self) -> dict[str, Any]:
        by_group = self.group > 0
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.symmetric,
            "strategy": "group" if by_group else "channel",
            "group_size": self.group if by_group else None,
        }  # fmt: skip
        return compressed("pack-quantized", weights)

    def layer(self, rng: np.random.Generator, shared: int, shape: tuple[int, int]) -> Layer:
        outputs, inputs = shape
        group = inputs if self.group < 0 else self.group
        most = 1 << (self.bits - 1)
        codes = rng.integers(-most, most, shape)
        scale = scales(rng, (outputs, inputs // group), most, "BF16")
        index = np.arange(inputs) // group
        if self.ordered:
            index = np.random.default_rng(shared).permutation(index)
        zeros = np.zeros(scale[1].shape, np.int64)
        tensors: Tensors = {
            "weight_packed": packed(codes + most, self.bits, 1),
            "weight_scale": scale,
            "weight_shape": ("I64", np.array(shape)),
        }
        if not self.symmetric:
            zeros = rng.integers(-most, most, scale[1].shape)
            tensors["weight_zero_point"] = packed(zeros + most, self.bits, 0)
            if not self.packs_zeros:
                tensors["weight_zero_point"] = ("I8", zeros.astype(np.int8))
        if self.ordered:
            tensors["weight_g_idx"] = ("I32", index.astype(np.int32))
        apart = (codes - zeros[:, index]).astype(np.float32)
        return tensors, scale[1].astype(np.float32)[:, index] * apart


@dataclass(frozen=True)
class Bytes:
    """A byte for each weight: int8 or FP8, with a scale for the tensor, each row or each block."""

    fp8: bool = False
    by: str = "channel"
    method: str = "compressed-tensors"
    symmetric: bool = True
    block: tuple[int, int] = (128, 128)

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "fp8":
            block = {"weight_block_size": list(self.block)} if self.by == "block" else {}
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **block}
        weights: dict[str, Any] = {
            "num_bits": 8, "type": "float" if self.fp8 else "int", "strategy": self.by,
            "symmetric": self.symmetric,
        }  # fmt: skip
        if self.by == "block":
            weights["block_structure"] = list(self.block)
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        if self.fp8:
            return compressed("float-quantized", weights, input_activations=activations)
        return compressed("int-quantized", weights)

    def layer(self, rng: np.random.Generator, shared: int, shape: tuple[int, int]) -> Layer:
        outputs, inputs = shape
        high, wide = self.block
        shapes = {
            "tensor": (1,),
            "channel": (outputs, 1),
            "block": (-(-outputs // high), -(-inputs // wide)),
        }
        codes: NDArray[Any]
        if self.fp8:
            codes = rng.normal(0, 60, shape).clip(-448, 448).astype(FP8)
            codes.flat[:4] = 448, -448, 2.0**-9, -0.0
            scale = scales(rng, shapes[self.by], 200, "F32" if self.method == "fp8" else "BF16")
        else:
            codes = rng.integers(-128, 128, shape).astype(np.int8)
            scale = scales(rng, shapes[self.by], 128, "BF16")
        whole = scale[1].astype(np.float32)
        if self.by == "block":
            whole = spread(np.repeat(whole, high, axis=0)[:outputs], wide, inputs)
        name = "weight_scale_inv" if self.method == "fp8" else "weight_scale"
        tensors: Tensors = {"weight": ("F8_E4M3" if self.fp8 else "I8", codes), name: scale}
        apart = codes.astype(np.float32)
        if not self.symmetric:
            zeros = rng.integers(-128, 128, scale[1].shape).astype(np.int8)
            tensors["weight_zero_point"] = ("I8", zeros)
            apart -= zeros
        return tensors, whole * apart


@dataclass(frozen=True)
class Fp4:
    """Two numbers a byte: NVFP4, and MXFP4 where the scales are powers of two."""

    nv: bool = True
    scale_type: str = "U8"

    @property
    def config(self) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "float", "symmetric": True}
        if self.nv:
            weights |= {"strategy": "tensor_group", "group_size": 16}
            return compressed("nvfp4-pack-quantized", weights)
        return compressed(
            "mxfp4-pack-quantized", {**weights, "strategy": "group", "group_size": 32}
        )

    def layer(self, rng: np.random.Generator, shared: int, shape: tuple[int, int]) -> Layer:
        outputs, inputs = shape
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        pairs = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
        if self.nv:
            scale = rng.uniform(100, 448, (outputs, inputs // 16)).astype(FP8)
            whole = np.array([rng.uniform(5000, 7000)], np.float32)
            weights = E2M1[codes] * spread(scale.astype(np.float32) / whole, 16, inputs)
            return {
                "weight_packed": ("U8", pairs),
                "weight_scale": ("F8_E4M3", scale),
                "weight_global_scale": ("F32", whole),
            }, weights
        powers = rng.integers(121, 125, (outputs, inputs // 32)).astype(np.uint8)
        factors = np.float32(2) ** (powers.astype(np.float32) - np.float32(127))
        return {"weight_packed": ("U8", pairs), "weight_scale": (self.scale_type, powers)}, E2M1[
            codes
        ] * spread(factors, 32, inputs)


Format = Gptq | Awq | PackQuantized | Bytes | Fp4

READS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "w3": "w1"}
"""Layers that read what another does: their activation order is that one's."""


@dataclass(frozen=True)
class Written:
    """A folder that was written, and what its weights are."""

    folder: Path
    config: dict[str, Any]
    tensors: Tensors
    weights: dict[str, Floats] = field(default_factory=dict)
    """In fp32, by name: all of them."""

    def save(self, **changes: Any) -> Path:
        """Write config and tensors as they are now; `changes` are what the header says instead."""
        text = json.dumps(self.config)
        (self.folder / "config.json").write_text(text, encoding="utf-8")
        (self.folder / "model.safetensors").write_bytes(container(self.tensors, **changes))
        return self.folder


RECIPE = """
name = "tiny"
[target]
checkpoint = "target"
[engine]
max_length = 128
prefill = 32
gammas = [1, 3]
gamma = 3
"""
"""Of small models, which are next to it."""

WIDE = {"hidden_size": 128, "intermediate_size": 256}
LLAMA = {"head_dim": 32, "num_hidden_layers": 2}


def made(kind: str, **changes: Any) -> Any:
    """Return a random model whose rows hold whole blocks."""
    return gguf_files.made(kind, **{**WIDE, **(LLAMA if kind == "llama" else {}), **changes})


def save_model(folder: Path, kind: str) -> None:
    """Write the checkpoint of a model in floats."""
    made(kind).save_pretrained(folder)


def write_folder(
    folder: Path, format_: Format, *, kind: str = "llama",
    floats: Callable[[str], bool] | None = None, seed: int = 0, **changes: Any,
) -> Written:  # fmt: skip
    """Write a random model; of the layers for which `floats` says so, the weights are bf16."""
    model = made(kind, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(folder)
    rng = np.random.default_rng(seed)
    config = json.loads(model.config.to_json_string()) | {"quantization_config": format_.config}
    # The byte-level tokenizer ends texts with none of its tokens.
    config |= {"bos_token_id": None, "eos_token_id": None}
    written = Written(folder, config, {})
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = parameter.detach().numpy().astype(np.float32)
        stem, _, part = name.rpartition(".")
        own = stem.rpartition(".")[2]
        codes = part == "weight" and (own.endswith("_proj") or own in ("w1", "w2", "w3"))
        if codes and not (floats and floats(stem)):
            said = stem.removesuffix(own) + READS.get(own, own)
            tensors, weights = format_.layer(rng, sum(said.encode()), array.shape)
            written.tensors.update({f"{stem}.{key}": value for key, value in tensors.items()})
            written.weights[name] = weights
            continue
        half = array.astype(ml_dtypes.bfloat16)
        written.tensors[name] = ("BF16", half)
        written.weights[name] = half.astype(np.float32)
    written.save()
    return written
