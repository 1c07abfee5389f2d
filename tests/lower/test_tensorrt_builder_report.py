"""What is read out of the messages and the plan, and shown."""

from __future__ import annotations

import pytest

from specrt.engine.tensorrt.engine_record import (
    writes_weight,
)
from specrt.engine.tensorrt.library import Message
from specrt_export.compile.monitor import compiled, highlights, read_header
from specrt_export.compile.network import profiles

RTX, ENTERPRISE = "tensorrt-rtx", "tensorrt"


def listing(*kernels: tuple[str, int, str, str]) -> Message:
    lines = [
        f"Name: {name}_myl{profile}_{at}, LayerType: {kind}, Inputs: [ {{ Name: a }}], "
        f"Constants: [], Outputs: [], TacticName: {tactic}, StreamId: 0, Metadata: "
        for at, (name, profile, kind, tactic) in enumerate(kernels)
    ]
    return Message("verbose", "\n".join(["Engine Layer Information:", *lines]))


LISTED = [
    Message("verbose", "Constructing optimization profile number 0 [1/2]."),
    Message("info", "Total Activation Memory: 100 bytes"),
    Message("verbose", "Constructing optimization profile number 1 [2/2]."),
    Message("info", "Total Activation Memory: 7 bytes"),
    listing(
        ("__mye1_0", 0, "shape_call", ""),
        ("__mye9", 0, "signal", ""),
        ("0.q_U3+0.k_U4", 0, "gemm", "__myelin_CASK_STUB"),
        ("1.q_U8+1.k_U9", 0, "gemm", "__myelin_CASK_STUB"),
        ("_gemm_mha_v2", 0, "kgen", "_gemm_mha_v2_0xab12"),
        ("__myl_CastMulCastFc", 0, "runtime_fusion", ""),
        ("_gemv_mha_v1", 1, "kgen", "_gemv_mha_v1_0xed73"),
        ("__myl_CastMulCast", 1, "kgen", "__myl_CastMulCast_0x1003"),
        ("__myl_ReplCastMulCast", 1, "kgen", "__myl_ReplCastMulCast_0x1"),
    ),
]


def test_kernels_are_read_out_of_the_messages() -> None:
    wide, narrow = compiled(LISTED, profiles("target", 8, ()))
    assert [(k.name, k.kind, k.count) for k in wide.kernels] == [
        ("#.q+#.k", "gemm", 2),
        ("_gemm_mha_v2", "kgen", 1),
        ("__myl_CastMulCastFc", "runtime_fusion", 1),
    ]
    assert (wide.launches, wide.attention, wide.dequantising) == (4, "gemm", 0)
    assert (narrow.launches, narrow.attention, narrow.dequantising) == (3, "gemv", 2)
    assert (wide.activation_bytes, narrow.activation_bytes) == (100, 7)
    silent = compiled([], profiles("target", 8, ()))
    assert [(one.launches, one.attention) for one in silent] == [(0, "none"), (0, "none")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("__myl_CastMulCast", True),
        ("__myl_ReplCastMulCast", True),
        ("__myl_ReplReshCastMulCastTran", True),
        ("__myl_CastMulCastFc", False),
        ("__myl_CastMulCastMulSumAdd", False),
        ("__myl_CastMulCastSiluMulReshMulSum", False),
        ("__myl_CastMulMean", False),
        ("__myl_MulReshCast", False),
        ("__myl_CastReshCast", False),
        ("_gemv_mha_v1", False),
    ],
)
def test_kernels_that_only_write_out_a_weight(name: str, expected: bool) -> None:
    assert writes_weight(name) is expected


def test_the_head_of_a_plan() -> None:
    head = bytearray(64)
    head[:4], head[32] = b"vtrt", 0x7E
    assert read_header(bytes(head)).capabilities == ("8.0", "8.6", "8.9", "12.0", "12.1")
    head[:4] = b"ptrt"
    assert read_header(bytes(head)).capabilities == ()
    assert read_header(b"").magic == b""


def test_warnings_are_kept_once_and_fit_a_record() -> None:
    said = [
        Message("warning", "ModelImporter: Make sure input rows has Int64 binding."),
        Message("warning", "slow\x00 path " + "x" * 400),
        Message("warning", "slow\x00 path " + "x" * 400),
        Message("info", "nothing"),
    ]
    kept = highlights(said)
    assert len(kept) == 1
    assert kept[0].isprintable()
    assert len(kept[0]) <= 255
