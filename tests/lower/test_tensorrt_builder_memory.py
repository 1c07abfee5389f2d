"""What a build is expected to take, held to what was measured."""

from __future__ import annotations

import onnx
import pytest

from specrt_export.compile.network import profiles
from specrt_export.compile.plan_builder import Room, Weights, memory_warning, need, weights_of
from specrt_export.recipe import PlanOptions

RTX, ENTERPRISE = "tensorrt-rtx", "tensorrt"

MIB = 1 << 20


MEASURED = [  # MiB: floats, codes, int4, gammas (None: prefill alone), peak
    (88, 0, 0, None, 478),
    (88, 0, 0, (4,), 572),
    (424, 0, 0, None, 1286),
    (424, 0, 0, (4,), 1779),
    (641, 0, 0, None, 1875),
    (641, 0, 0, (4,), 2563),
    (0, 48, 0, (4,), 395),
    (0, 228, 0, (1, 4, 8), 859),
    (0, 0, 30, (4,), 354),
    (0, 0, 142, (1, 4, 8), 896),
    (30, 0, 0, (1, 2, 4), 460),
    (0, 15, 0, (1, 2, 4), 378),
    (1, 3, 6, (1, 2, 4), 389),
    (2, 0, 0, (), 275),
]


@pytest.mark.parametrize(("floats", "codes", "halves", "gammas", "peak"), MEASURED)
def test_the_estimate_is_above_what_was_measured_and_near(
    floats: int, codes: int, halves: int, gammas: tuple[int, ...] | None, peak: int
) -> None:
    made = profiles("target", 128, gammas or ())
    if gammas is None:
        made = made[:1]
    weights = Weights(floats * MIB, codes * MIB, halves * MIB)
    needed = need(weights, made, PlanOptions(), RTX)
    taken = peak * MIB - weights.stored  # mapped weights can be dropped
    assert taken <= needed.host_bytes <= 1.4 * taken + 140 * MIB
    assert needed.device_bytes == 0
    assert need(weights, made, PlanOptions(workspace_mib=5), ENTERPRISE).device_bytes > 0


def test_weights_are_added_up_by_type() -> None:
    kinds = (("FLOAT16", 10), ("FLOAT", 10), ("INT8", 10), ("FLOAT8E4M3FN", 5), ("INT4", 7))
    tensors = [
        onnx.TensorProto(data_type=onnx.TensorProto.DataType.Value(kind), dims=[count])
        for kind, count in kinds
    ]
    assert weights_of(tensors) == Weights(60, 15, 4)


def test_too_little_memory_is_a_warning_with_a_remedy() -> None:
    weights, made = Weights(14 << 30, 0, 0), profiles("target", 128, (4,))
    needed = need(weights, made, PlanOptions(), RTX)
    text = memory_warning(needed, Room(20 << 30), RTX)
    assert "GiB of memory, and 20.0 GiB is free" in text
    assert "tensorrt-rtx needs no GPU to build" in text
    for room in (Room(needed.host_bytes), Room(None)):
        assert memory_warning(needed, room, RTX) == ""


def test_a_gpu_counts_alone_and_shared_memory_once() -> None:
    weights, made = Weights(1 << 30, 0, 0), profiles("target", 128, ())
    needed = need(weights, made, PlanOptions(), ENTERPRISE)
    alone = memory_warning(needed, Room(None, 512 * MIB), ENTERPRISE)
    assert "of GPU memory, and 512 MiB is free" in alone
    both = needed.host_bytes + needed.device_bytes
    assert memory_warning(needed, Room(both, both, shared=True), ENTERPRISE) == ""
    assert "of memory, and" in memory_warning(needed, Room(both - 1, both, shared=True), ENTERPRISE)
