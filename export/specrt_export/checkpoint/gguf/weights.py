"""The weights of a GGUF file, by the names and in the order that transformers gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.checkpoint.codes import Codes, Floats, TensorOrigin
from specrt_export.checkpoint.gguf.blocks import Bytes, Format
from specrt_export.checkpoint.gguf.configuration import Family, family_of
from specrt_export.checkpoint.gguf.reader import GgufFile, GgufTensor

Order = NDArray[np.int64]

_IN_CONFIGURATION = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight"
)
"""Tensors that are part of the configuration, or follow from it."""

_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+(?:\.\w+)?)\.(weight|bias)")


@dataclass(frozen=True)
class GgufWeight:
    """One weight: a tensor of the file, some of its rows, or its rows in another order."""

    name: str
    tensor: GgufTensor
    order: Order | None = None
    """Rows of the tensor, or numbers of a vector; None where they are all of them, in order."""
    shift: float = 0.0
    """Added to what is stored, which makes it fp32."""

    @property
    def format(self) -> Format:
        """How the file stores it."""
        return self.tensor.format

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the model."""
        if self.order is None:
            return self.tensor.shape
        return (len(self.order), *self.tensor.shape[1:])

    @property
    def quantized(self) -> bool:
        """Whether it is stored as whole numbers."""
        return self.format.decode is not None

    @property
    def precision(self) -> str:
        """See `CodedWeight`."""
        return self.format.precision

    @property
    def block(self) -> int:
        """See `CodedWeight`."""
        return self.format.block

    @property
    def origin(self) -> TensorOrigin:
        """See `CodedWeight`."""
        return TensorOrigin(self.tensor.file, self.tensor.name, self.format.name)

    @property
    def inputs(self) -> None:
        """See `CodedWeight`: a file has them in order."""
        return None

    def codes(self, begin: int, end: int) -> Codes:
        """Return rows `begin` to `end` as codes, their scales and minimums.

        Raises: CheckpointError for scales that are not finite numbers.
        """
        with np.errstate(invalid="ignore"):  # of infinite scales, which are refused
            codes = self.format.codes(self._rows(begin, end))
        self._check(codes.scales, begin, end)
        if codes.minimums is not None:
            self._check(codes.minimums, begin, end)
        return codes

    def floats(self, begin: int, end: int) -> Floats:
        """Return rows `begin` to `end` as fp32; a row of a vector is a number.

        Raises: CheckpointError for numbers that are not finite.
        """
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is refused
            values = self.format.floats(self._rows(begin, end))
        self._check(values, begin, end)
        values = values + np.float32(self.shift) if self.shift else values
        return values.reshape(-1) if len(self.shape) == 1 else values

    def stored(self, begin: int, end: int) -> bytes:
        """Return rows `begin` to `end` of floats as the bytes a checkpoint would hold of them.

        Raises: CheckpointError for numbers that are not finite.
        """
        values = self.floats(begin, end)
        return (values if self.dtype == "F32" else self._rows(begin, end)).tobytes()

    @property
    def dtype(self) -> str:
        """What `stored` returns, in safetensors' words."""
        return "F32" if self.shift else self.format.dtype or "F32"

    def _rows(self, begin: int, end: int) -> Bytes:
        if len(self.shape) == 1:
            whole = self.tensor.rows(0, 1).reshape(self.tensor.row_items, -1)
            return whole[slice(begin, end) if self.order is None else self.order[begin:end]]
        if self.order is None or begin == end:
            return self.tensor.rows(begin, end)
        chosen = self.order[begin:end]
        low = int(chosen.min())
        return self.tensor.rows(low, int(chosen.max()) + 1)[chosen - low]

    def _check(self, values: Floats, begin: int, end: int) -> None:
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self.tensor.file}: {self.tensor.name} holds values that are not finite numbers, "
                f"in rows {begin} to {end - 1}; fetch the file again, or another one"
            )


def weights(file: GgufFile, config: Mapping[str, Any]) -> dict[str, GgufWeight]:
    """Return each weight of a file's model by its name in transformers.

    Raises: CheckpointError for a tensor that is missing, misshapen or has no place.
    """
    family = family_of(file)
    found: dict[str, GgufWeight] = {}
    for tensor in file.tensors.values():
        if not _IN_CONFIGURATION.fullmatch(tensor.name):
            found |= {one.name: one for one in _placed(file, family, config, tensor)}
    missing = next((name for name in _expected(family, config) if name not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"{file.path} holds no tensor for {missing}; fetch the file again, with all its parts"
        )
    return found


def _expected(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a model has at least; biases are there or not."""
    lacks = {"output.weight", *family.lacks(config, 0)}
    yield from (name for tensor, name in family.outer.items() if tensor not in lacks)
    for layer in range(config["num_hidden_layers"]):
        lacks = {*family.lacks(config, layer)}
        parts = (module for part, module in family.parts.items() if part not in lacks)
        yield from (_name(layer, module, "weight") for module in parts)


def _name(layer: int, module: str, kind: str) -> str:
    """Return what transformers calls a weight or a bias of a layer; its scale has no module."""
    return f"model.layers.{layer}.{module}.{kind}".replace("layer_scalar.weight", "layer_scalar")


def _placed(
    file: GgufFile, family: Family, config: Mapping[str, Any], tensor: GgufTensor
) -> Iterator[GgufWeight]:
    """Yield the weights that a tensor holds: one, or queries, keys and values."""
    shift = -1.0 if family.shifted_norms and tensor.name.endswith("norm.weight") else 0.0
    if tensor.name in family.outer and tensor.name not in family.lacks(config, 0):
        name = family.outer[tensor.name]
        _check_shape(file, tensor, name.split(".")[-2], "weight", config, tensor.shape)
        yield GgufWeight(name, tensor, shift=shift)
        return
    match = _LAYER.fullmatch(tensor.name)
    if match is None or int(match[1]) >= config["num_hidden_layers"]:
        raise _homeless(file, family, tensor)
    layer, part, kind = int(match[1]), match[2], match[3]
    config = family.of_layer(config, layer)
    if part in family.lacks(config, layer):
        if part not in family.unread:
            raise _homeless(file, family, tensor)
        return
    if part in family.parts:
        module = family.parts[part]
        _check_shape(file, tensor, module.split(".")[-1], kind, config, tensor.shape)
        if module == "conv.conv" and kind == "weight":
            tensor = replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
        weight = GgufWeight(_name(layer, module, kind), tensor, shift=shift)
        yield _in_halves(weight, config) if family.interleaved else weight
        return
    if part != "attn_qkv" or "attn_q" not in family.parts:
        raise _homeless(file, family, tensor)
    # Written with --fuse-qkv.
    _check_shape(file, tensor, "qkv_proj", kind, config, tensor.shape)
    begin = 0
    for part in ("attn_q", "attn_k", "attn_v"):
        module = family.parts[part]
        end = begin + _shapes(config)[module.split(".")[-1]][0]
        weight = GgufWeight(_name(layer, module, kind), tensor, np.arange(begin, end))
        yield _in_halves(weight, config) if family.interleaved else weight
        begin = end


def _homeless(file: GgufFile, family: Family, tensor: GgufTensor) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file}: tensor {tensor.name} has no place in a model of {file.architecture} with "
        f"{file.whole(f'{file.architecture}.block_count')} layers; take a file of the text model "
        "alone, without adapters or other parts"
    )


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each kind of module's weight, by the last part of its name."""
    hidden, inner, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    return {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "qkv_proj": (queries + 2 * keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (head,),
        "k_norm": (head,),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
        **_gemma4_shapes(config),
        **_lfm2_shapes(config, queries),
    }


def _gemma4_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width = config["hidden_size"], config.get("hidden_size_per_layer_input", 0)
    widths = config["num_hidden_layers"] * width
    return {
        "embed_tokens_per_layer": (config.get("vocab_size_per_layer_input", 0), widths),
        "per_layer_model_projection": (widths, hidden),
        "per_layer_projection_norm": (width,),
        "per_layer_input_gate": (width, hidden),
        "per_layer_projection": (hidden, width),
        "layer_scalar": (1,),
    }


def _lfm2_shapes(config: Mapping[str, Any], queries: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        "q_layernorm": (config["head_dim"],),
        "k_layernorm": (config["head_dim"],),
        "out_proj": (hidden, queries),
        "conv": (hidden, config.get("conv_L_cache", 0)),
        "in_proj": (3 * hidden, hidden),
        "w1": (inner, hidden),
        "w3": (inner, hidden),
        "w2": (hidden, inner),
    }


def _check_shape(
    file: GgufFile, tensor: GgufTensor, module: str, kind: str, config: Mapping[str, Any],
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    """Hold what a tensor is to what the metadata say; norms are as wide as the model."""
    expected = _shapes(config).get(module, (config["hidden_size"],))
    expected = expected if kind == "weight" else expected[:1]
    if shape != expected:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has shape {list(shape)}; expected {list(expected)}, by "
            f"the sizes in {file.architecture}.*. Fetch the file again, or convert the model again"
        )


def _in_halves(weight: GgufWeight, config: Mapping[str, Any]) -> GgufWeight:
    """Return queries or keys with the halves of each head apart, as transformers rotates them.

    stored  h0: a0 b0 a1 b1 a2 b2 …    rotated in pairs (a, b)
    wanted  h0: a0 a1 a2 … b0 b1 b2 …
    """
    if weight.name.split(".")[-2] not in ("q_proj", "k_proj"):
        return weight
    order = np.arange(weight.shape[0]) if weight.order is None else weight.order
    pairs = order.reshape(-1, config["head_dim"] // 2, 2)
    return replace(weight, order=pairs.swapaxes(1, 2).reshape(-1))
