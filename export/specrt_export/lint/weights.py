"""Rules about weights: how they lie in a product, and where their bytes are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from onnx import external_data_helper

from specrt_export.lint.facts import Facts
from specrt_export.lint.finding import Fault, Rule, each

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
LARGE_ELEMENTS = 1 << 14
"""Weights from which on storing them twice is worth a word."""


def _layout(facts: Facts, node: onnx.NodeProto) -> str | None:
    if len(node.input) < 2 or (node.op_type == "Gemm" and facts.integer(node, "transB")):
        return None
    name = facts.through(node.input[1], "Cast", "Identity")
    tensor = facts.tensors.get(name)
    if tensor is None or tensor.data_type not in FLOATS or len(tensor.dims) != 2:
        return None
    if math.prod(tensor.dims) < LARGE_ELEMENTS or 1 in tensor.dims:
        return None
    return f"its weight {name} lies as [K, N], and a plan with a profile of width 1 stores it twice"


def _external(facts: Facts) -> Iterator[onnx.TensorProto]:
    for tensor in facts.tensors.values():
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def _place(tensor: onnx.TensorProto) -> str:
    return next((e.value for e in tensor.external_data if e.key == "location"), "")


def _outside(facts: Facts) -> Iterator[Fault]:
    for tensor in _external(facts):
        if not _place(tensor) and facts.folder is None:
            continue  # its bytes are still to be written, or handed over
        place = PurePosixPath(_place(tensor).replace("\\", "/"))
        if not place.name or place.is_absolute() or ".." in place.parts:
            yield tensor.name, f"its bytes lie in {str(place)!r}, which is not below the graph"


def _missing(facts: Facts) -> Iterator[Fault]:
    if facts.folder is None:
        return
    absent: dict[str, list[str]] = defaultdict(list)
    outside = {name for name, _ in _outside(facts)}
    for tensor in _external(facts):
        place = _place(tensor)
        if tensor.name not in outside and _size(facts.folder / place) is None:
            absent[place].append(tensor.name)
    for place, names in absent.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}", f"{place!r} is not beside the graph"


def _size(path: Path) -> int | None:
    """Return the bytes of a file; None where there is none of that name."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None


def _span(tensor: onnx.TensorProto) -> tuple[int, int | None] | None:
    """Return where a weight begins and how long it says it is; None when that is no number."""
    try:
        info = external_data_helper.ExternalDataInfo(tensor)
        return int(info.offset or 0), int(info.length) if info.length is not None else None
    except (ValueError, TypeError):
        return None


def _short(facts: Facts) -> Iterator[Fault]:
    outside = {name for name, _ in _outside(facts)}
    for tensor in _external(facts):
        span, bits = _span(tensor), _bits(tensor.data_type)
        if tensor.name in outside or bits is None:
            continue
        wanted = -(-math.prod(tensor.dims) * bits // 8)
        offset, stated = span or (-1, None)
        found = wanted if stated is None else stated
        size = _size(facts.folder / _place(tensor)) if facts.folder is not None else None
        if size is not None:
            rest = size - offset
            found = min(found, rest) if stated is not None else rest
        if offset < 0 or found != wanted:
            yield tensor.name, f"its shape asks for {wanted} bytes, and {max(found, 0)} are there"


def _bits(kind: int) -> int | None:
    sizes: dict[int, int] = {
        onnx.TensorProto.INT4: 4,
        onnx.TensorProto.UINT4: 4,
        onnx.TensorProto.FLOAT4E2M1: 4,
    }
    try:
        return sizes.get(kind) or onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize * 8
    except (KeyError, ValueError):
        return None


RULES = (
    Rule(
        "weight-layout",
        "slow",
        each("MatMul", "Gemm", fault=_layout),
        "store it as [N, K] and put a Transpose before the product",
    ),
    Rule(
        "weight-outside",
        "refused",
        _outside,
        "put the file beside the graph, under a relative path, or hand the parser the bytes",
    ),
    Rule("weight-missing", "refused", _missing, "put the file there, or hand the parser the bytes"),
    Rule("weight-size", "refused", _short, "write the file again"),
)
