"""What a build is expected to take, held to what was measured."""

from __future__ import annotations

import onnx
import pytest

from specrt.errors import BuildError
from specrt_export.compile.network import profiles
from specrt_export.compile.plan_builder import Room, Weights, check_memory, need, weights_of
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


def test_a_refusal_says_what_would_fit() -> None:
    weights, made = Weights(14 << 30, 0, 0), profiles("target", 128, (4,))
    needed = need(weights, made, PlanOptions(), RTX)
    with pytest.raises(BuildError) as caught:
        check_memory(needed, weights, made, RTX, Room(20 << 30))
    text = str(caught.value)
    assert "GiB of memory, and 20.0 GiB is free" in text
    assert "precision int8 or int4 would fit" in text
    assert "tensorrt-rtx needs no GPU to build" in text
    with pytest.raises(BuildError) as caught:
        check_memory(needed, weights, made, RTX, Room(1 << 30))
    assert "would fit" not in str(caught.value)
    check_memory(needed, weights, made, RTX, Room(needed.host_bytes))
    check_memory(needed, weights, made, RTX, Room(None))


def test_a_gpu_that_is_too_small_is_refused_and_shared_memory_counts_once() -> None:
    weights, made = Weights(1 << 30, 0, 0), profiles("target", 128, ())
    needed = need(weights, made, PlanOptions(), ENTERPRISE)
    with pytest.raises(BuildError, match="of GPU memory, and 512 MiB is free"):
        check_memory(needed, weights, made, ENTERPRISE, Room(None, 512 * MIB))
    both = needed.host_bytes + needed.device_bytes
    check_memory(needed, weights, made, ENTERPRISE, Room(both, both, shared=True))
    with pytest.raises(BuildError, match="of memory, and"):
        check_memory(needed, weights, made, ENTERPRISE, Room(both - 1, both, shared=True))
