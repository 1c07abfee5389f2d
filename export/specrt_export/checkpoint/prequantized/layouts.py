"""How each kind of checkpoint lays a quantized layer out: which tensors, of which shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specrt_export.checkpoint.codes import Floats, unpack_unsigned
from specrt_export.checkpoint.prequantized.packed_weight import (
    LayerTensors,
    PackedWeight,
    WeightLayout,
)
from specrt_export.checkpoint.prequantized.quantization_config import Scheme
from specrt_export.checkpoint.safetensors_file import FLOAT_TYPES

Words = NDArray[np.uint32]

Bytes = NDArray[np.uint8]

WORDS = ("I32",)

INDICES = ("I32", "I64")

Reader = Callable[[LayerTensors, Scheme], PackedWeight | None]


def packed_weight(module: LayerTensors, scheme: Scheme) -> tuple[PackedWeight, set[str]] | None:
    """Return a layer's weight if it is in codes, and the tensors that make it.

    Raises: CheckpointError for tensors that do not fit each other.
    """
    read, parts = LAYOUTS[scheme.method]
    found = read(module, scheme)
    if found is None:
        return None
    layout = found.layout
    return found, {layout.part, layout.groups, *parts}


def _gptq(module: LayerTensors, scheme: Scheme) -> PackedWeight | None:
    """Return a weight whose words hold inputs that follow one another, [K * bits / 32, N].

    Source: GPTQModel, nn_modules/qlinear/torch.py.
    """
    if "qweight" not in module.tensors:
        return None
    words, outputs = module.tensor("qweight", WORDS, rank=2).shape
    bits = scheme.bits[0]
    if scheme.mixed:
        inputs = module.tensor("g_idx", INDICES, rank=1).shape[0]
        bits = words * 32 // inputs
        if bits not in (4, 8):
            raise module.wrong("qweight", f"has {bits} bits for each of {inputs}; expected 4 or 8")
    inputs = words * 32 // bits
    group = scheme.group or inputs
    if scheme.mixed:
        group = inputs // module.tensor("scales", FLOAT_TYPES, rank=2).shape[0] or inputs
    _check_group(module, "qweight", inputs, group)
    module.tensor("scales", FLOAT_TYPES, (inputs // group, outputs))
    module.tensor("qzeros", WORDS, (inputs // group, -(-outputs * bits // 32)))
    ordered = "g_idx" in module.tensors
    if ordered:
        module.tensor("g_idx", INDICES, (inputs,))

    def codes(module: LayerTensors, begin: int, end: int) -> Bytes:
        return _unpacked(module.array("qweight")[:, begin:end].T, bits)

    def zeros(module: LayerTensors, begin: int, end: int) -> Bytes:
        per = 32 // bits
        part = module.array("qzeros")[:, begin // per : -(-end // per)]
        part = _raised(part, bits) if scheme.first_version else part
        numbers = _unpacked(part, bits)
        return numbers[:, begin % per : begin % per + end - begin].T

    layout = WeightLayout("qweight", codes, _turned_scales, zeros, "g_idx" if ordered else "")
    kind = f"GPTQ int{bits}"
    return PackedWeight(module, layout, (outputs, inputs), f"int{bits}", group, kind)


def _awq(module: LayerTensors, scheme: Scheme) -> PackedWeight | None:
    """Return a weight whose words hold eight outputs each, [K, N / 8].

    Source: AutoAWQ, modules/linear/gemm.py.
    """
    if "qweight" not in module.tensors:
        return None
    inputs, words = module.tensor("qweight", WORDS, rank=2).shape
    group = scheme.group or inputs
    _check_group(module, "qweight", inputs, group)
    module.tensor("scales", FLOAT_TYPES, (inputs // group, 8 * words))
    module.tensor("qzeros", WORDS, (inputs // group, words))

    def numbers(part: str, module: LayerTensors, begin: int, end: int) -> Bytes:
        found = _interleaved(module.array(part)[:, begin // 8 : -(-end // 8)])
        return found[:, begin % 8 : begin % 8 + end - begin].T

    layout = WeightLayout(
        "qweight", partial(numbers, "qweight"), _turned_scales, partial(numbers, "qzeros")
    )
    return PackedWeight(module, layout, (8 * words, inputs), "int4", group, "AWQ int4")


def _turned_scales(module: LayerTensors, begin: int, end: int) -> Floats:
    """Return scales that are stored [groups, N]."""
    return _as_floats(module.array("scales")[:, begin:end]).T


def _check_group(module: LayerTensors, part: str, inputs: int, group: int) -> None:
    if group > inputs or inputs % group:
        raise module.wrong(
            part, f"has {inputs} inputs in groups of {group}, which do not divide them"
        )


def _compressed(module: LayerTensors, scheme: Scheme) -> PackedWeight | None:
    """Source: compressed-tensors, compressors/."""
    packed = module.tensors.get("weight_packed")
    if packed is None:
        weight = module.tensors.get("weight")
        whole = weight is not None and weight.dtype in ("I8", "F8_E4M3")
        return _bytes(module, scheme, "weight_scale") if whole else None
    if packed.dtype == "U8":
        return _fp4(module)
    return _words(module, scheme)


def _words(module: LayerTensors, scheme: Scheme) -> PackedWeight:
    """Return a weight whose words hold inputs that follow one another, [N, K * bits / 32]."""
    outputs, words = module.tensor("weight_packed", WORDS, rank=2).shape
    module.tensor("weight_shape", INDICES, (2,))
    stated = tuple(int(n) for n in module.array("weight_shape"))
    fitting = [b for b in (4, 8) if b in scheme.bits and -(-stated[1] * b // 32) == words]
    if stated[0] != outputs or not fitting or stated[1] < 1:
        raise module.wrong(
            "weight_packed",
            f"has shape {[outputs, words]} for a weight of {list(stated)} in "
            f"{' or '.join(map(str, scheme.bits))} bits, which are not codes of 4 or 8 bits of it",
        )
    bits, inputs = fitting[0], stated[1]
    group, scales = _scales(module, scheme, "weight_scale", FLOAT_TYPES, (outputs, inputs))
    groups = -(-inputs // group)

    def codes(module: LayerTensors, begin: int, end: int) -> Bytes:
        return _unpacked(module.array("weight_packed")[begin:end], bits)[:, :inputs]

    zeros = None
    if "weight_zero_point" in module.tensors:
        places = -(-outputs * bits // 32)
        stored = module.tensor("weight_zero_point", ("I32", "I8"), rank=2)
        if stored.dtype == "I32":
            module.tensor("weight_zero_point", WORDS, (places, groups))
            zeros = partial(_packed_zeros, bits)
        else:
            module.tensor("weight_zero_point", ("I8",), (outputs, groups))
            zeros = partial(_signed_zeros, 1 << (bits - 1))
    elif not scheme.symmetric:
        module.tensor("weight_zero_point", ("I32", "I8"))
    ordered = _is_ordered(module, inputs)
    layout = WeightLayout("weight_packed", codes, scales, zeros, "weight_g_idx" if ordered else "")
    kind = f"pack-quantized int{bits}"
    return PackedWeight(module, layout, (outputs, inputs), f"int{bits}", group, kind)


def _packed_zeros(bits: int, module: LayerTensors, begin: int, end: int) -> Bytes:
    """Return zeros whose words hold outputs that follow one another, [N * bits / 32, groups]."""
    per = 32 // bits
    words = module.array("weight_zero_point")[begin // per : -(-end // per)]
    return _unpacked(words.T, bits).T[begin % per : begin % per + end - begin]


def _signed_zeros(middle: int, module: LayerTensors, begin: int, end: int) -> Bytes:
    signed = module.array("weight_zero_point")[begin:end]
    return signed.view(np.uint8) + np.uint8(middle)


def _is_ordered(module: LayerTensors, inputs: int) -> bool:
    """Tell whether a layer says which group each input is of; -1 for all says nothing."""
    if "weight_g_idx" not in module.tensors:
        return False
    module.tensor("weight_g_idx", INDICES, (inputs,))
    return bool((module.array("weight_g_idx").astype(np.int32) != -1).any())


def _bytes(module: LayerTensors, scheme: Scheme, scale: str) -> PackedWeight:
    """Return a weight that has a byte for each of its numbers, [N, K] int8 or FP8."""
    weight = module.tensor("weight", ("I8", "F8_E4M3"), rank=2)
    shape = weight.shape
    small = weight.dtype == "I8"
    types = FLOAT_TYPES if small else (*FLOAT_TYPES, "U8", "F8_E8M0")
    group, scales = _scales(module, scheme, scale, types, shape)
    zeros = None
    if "weight_zero_point" in module.tensors:
        inner = module.tensors[scale].shape
        module.tensor("weight_zero_point", ("I8",), inner)
        zeros = partial(_spread_rows, "weight_zero_point", shape, scheme.block_shape)
    elif small and not scheme.symmetric:
        module.tensor("weight_zero_point", ("I8",))

    def codes(module: LayerTensors, begin: int, end: int) -> Bytes:
        part = np.array(module.array("weight")[begin:end]).view(np.uint8)
        return part ^ np.uint8(128) if small else part

    def raised_zeros(module: LayerTensors, begin: int, end: int) -> Bytes:
        assert zeros is not None
        return np.ascontiguousarray(zeros(module, begin, end)).view(np.uint8) ^ np.uint8(128)

    layout = WeightLayout("weight", codes, scales, raised_zeros if zeros is not None else None)
    precision = "int8" if small else "fp8"
    kind = "int8" if small else "FP8"
    return PackedWeight(module, layout, shape, precision, group, kind)


def _scales(
    module: LayerTensors, scheme: Scheme, part: str, types: tuple[str, ...], shape: tuple[int, ...]
) -> tuple[int, Any]:
    """Return the inputs that share a scale, and what reads scales.

    They are of the tensor, [] or [1]; of each row, [N, 1] or [N]; of groups, [N, K / group]; or of
    blocks, [N / rows, K / columns].
    """
    outputs, inputs = shape
    stored = module.tensor(part, types)
    found = stored.shape
    read = partial(_spread_rows, part, shape, scheme.block_shape)
    if found in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
        return inputs, lambda *of: _as_floats(read(*of))
    if scheme.block_shape:
        high, wide = scheme.block_shape
        module.tensor(part, types, (-(-outputs // high), -(-inputs // wide)))
        return wide, lambda *of: _as_floats(read(*of))
    if len(found) != 2 or found[0] != outputs or not found[1] or inputs % found[1]:
        raise module.wrong(
            part,
            f"has shape {list(found)}; expected one scale, or {outputs} rows of as many as divide "
            f"{inputs}",
        )
    return inputs // found[1], lambda *of: _as_floats(read(*of))


def _spread_rows(
    part: str,
    shape: tuple[int, ...],
    block: tuple[int, ...],
    module: LayerTensors,
    begin: int,
    end: int,
) -> NDArray[Any]:
    """Return what some rows [n, groups] have of a tensor, as `_scales` lists them."""
    stored = module.array(part)
    outputs = shape[0]
    if stored.ndim == 2 and len(stored) == outputs:
        return stored[begin:end]
    if stored.size == 1:
        return np.broadcast_to(stored.reshape(1, 1), (end - begin, 1))
    if stored.ndim == 1:
        return stored[begin:end, None]
    return stored[np.arange(begin, end) // block[0]]


def _fp4(module: LayerTensors) -> PackedWeight:
    """Return a weight of two numbers a byte, [N, K / 2]: NVFP4, or MXFP4 where no scale is whole.

    Source: OCP Microscaling Formats (MX) 1.0; compressed-tensors, compressors/nvfp4 and mxfp4.
    """
    outputs, pairs = module.tensor("weight_packed", ("U8",), rank=2).shape
    inputs = 2 * pairs
    whole = "weight_global_scale" in module.tensors
    group = 16 if whole else 32
    _check_group(module, "weight_packed", inputs, group)
    types = ("F8_E4M3",) if whole else ("U8", "F8_E8M0")
    module.tensor("weight_scale", types, (outputs, inputs // group))
    if whole:
        module.tensor("weight_global_scale", ("F32",), (1,), ())

    def codes(module: LayerTensors, begin: int, end: int) -> Bytes:
        return unpack_unsigned(module.array("weight_packed")[begin:end])

    def scales(module: LayerTensors, begin: int, end: int) -> Floats:
        found = _as_floats(module.array("weight_scale")[begin:end])
        if not whole:
            return found
        with np.errstate(all="ignore"):  # what is not a number is refused
            return found / _as_floats(module.array("weight_global_scale").reshape(1, 1))

    layout = WeightLayout("weight_packed", codes, scales)
    kind = "NVFP4" if whole else "MXFP4"
    return PackedWeight(module, layout, (outputs, inputs), "fp4", group, kind)


def _fp8(module: LayerTensors, scheme: Scheme) -> PackedWeight | None:
    weight = module.tensors.get("weight")
    if weight is None or weight.dtype != "F8_E4M3":
        return None
    scale = "weight_scale" if "weight_scale" in module.tensors else "weight_scale_inv"
    return _bytes(module, scheme, scale)


def _as_floats(values: NDArray[Any]) -> Floats:
    """Return scales in fp32, which holds all of them; a byte without a sign is a power of two.

    Source: OCP Microscaling Formats (MX) 1.0, 5.4.1 (E8M0).
    """
    if values.dtype == np.uint8:
        values = values.view(ml_dtypes.float8_e8m0fnu)
    return values.astype(np.float32)


def _unpacked(words: NDArray[Any], bits: int) -> Bytes:
    """Return the numbers of 4 or 8 bits of words [.., n], [.., n * 32 / bits], the lowest first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return unpack_unsigned(data) if bits == 4 else data


_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight columns of a word are, in AWQ."""


def _interleaved(words: Words) -> Bytes:
    """Return the numbers of AWQ's words [.., n], [.., 8 n]: columns 0 2 4 6 1 3 5 7 of each.

    Source: AutoAWQ, awq/utils/packing_utils.py (AWQ_ORDER).
    """
    numbers = _unpacked(words, 4)
    return numbers.reshape(*words.shape, 8)[..., _PLACES].reshape(numbers.shape)


def _raised(words: Words, bits: int) -> Words:
    """Return words of numbers each of which is one more.

    As one sum over the word, which undoes the difference by which GPTQModel writes version 1.
    """
    ones = sum(1 << at for at in range(0, 32, bits))
    return words + np.uint32(ones)


_COMPRESSED_PARTS = (
    "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
)  # fmt: skip

LAYOUTS: dict[str, tuple[Reader, tuple[str, ...]]] = {
    "gptq": (_gptq, ("qzeros", "scales", "g_idx")),
    "awq": (_awq, ("qzeros", "scales")),
    "compressed-tensors": (_compressed, _COMPRESSED_PARTS),
    "fp8": (_fp8, ("weight_scale", "weight_scale_inv")),
}
"""What reads a layer of each method, and the tensors it has besides the codes; those that are there
have been checked."""

PARTS = frozenset(part for _, parts in LAYOUTS.values() for part in parts)
PARTS |= {"qweight", "weight_packed", "weight_scale_2"}
"""Tensors that only a quantized layer has; its codes may also be called `weight`."""
