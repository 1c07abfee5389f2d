"""Quantized weights stay quantized in an engine, and mean there what they meant in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest

from export.zoo import MODELS, Exported, architectures
from lower.comparing import equal_on_cpu
from lower.quantized import quantize
from specrt.errors import BuildError
from specrt_export.compile import LoweredModel
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.lower import projections as matrix
from specrt_export.lower.lazy_tensor import LazyTensor, unsigned
from specrt_export.portable.graph import runs_here

pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(not runs_here(), reason="this ONNX Runtime cannot run portable graphs"),
]
MAX_LENGTH = 128
WIDTHS = [1, 2, 4, 9]
EXACT = 0
"""Accuracy level at which activations stay fp32."""


@dataclass(frozen=True)
class Made:
    """A compiled engine, and how far it is from the graph it stands for."""

    compiled: LoweredModel
    engine: onnx.ModelProto
    error: float

    def count(self) -> Counter[str]:
        return Counter(node.op_type for node in self.engine.graph.node)

    def place(self, name: str) -> tuple[str, ...]:
        """Return where a weight lies."""
        tensor = next(t for t in self.engine.graph.initializer if t.name == name)
        return tuple(e.value for e in tensor.external_data)


Make = Callable[..., Made]


@pytest.fixture
def make(exported: Callable[[str], Exported], tmp_path: Path) -> Make:
    """Quantizes an architecture, compiles it, and compares it with the same weights in fp32."""

    def made(
        name: str,
        bits: Callable[[str], int],
        block: Callable[[str], int] = lambda name: 16,
        level: int = EXACT,
    ) -> Made:
        one = exported(name)
        graph, exact = quantize(one.graph.path, one.checkpoint.folder, tmp_path, bits, block)
        out = tmp_path / "engine"
        compiled = compile_ort_cpu(graph, tmp_path, out, MAX_LENGTH, accuracy_level=level)
        error = equal_on_cpu((exact, tmp_path), compiled, MAX_LENGTH, WIDTHS)
        engine = onnx.load(out / "engine.onnx", load_external_data=False)
        return Made(compiled, engine, error)

    return made


# Architecture: its joined projections, and its quantized tables.
QUANTIZED = {
    "llama2": (9, 1),
    "llama3": (9, 1),
    "qwen2": (9, 1),
    "qwen3": (9, 1),
    "mistral": (9, 1),
    "phi3": (9, 1),
    "gemma2": (9, 1),
    "gemma3": (9, 1),
    "gpt2": (9, 2),
    "gpt_neox": (9, 1),
    "opt": (9, 2),
    "smollm3": (9, 1),
    "starcoder2": (9, 1),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", architectures(*QUANTIZED))
def test_every_architecture_stays_quantized_and_equal(name: str, bits: int, make: Make) -> None:
    made = make(name, lambda weight: bits)
    assert made.error < 1e-5
    projections, tables = QUANTIZED[name]
    both = projections + tables
    assert made.compiled.fused["quantized"] == f"{both}/{both}"
    found = made.count()
    assert found["MatMulNBits"] == projections
    assert found["GatherBlockQuantized"] == tables
    assert not found.keys() & {"FusedMatMul", "MatMul", "Gemm", "DequantizeLinear"}


def test_every_architecture_of_the_zoo_is_quantized() -> None:
    assert set(QUANTIZED) == set(MODELS)


def levels(made: Made) -> set[int]:
    found = [
        attribute.i
        for node in made.engine.graph.node
        if node.op_type == "MatMulNBits"
        for attribute in node.attribute
        if attribute.name == "accuracy_level"
    ]
    return set(found)


@pytest.mark.parametrize("level", [0, 1, 4])
def test_activations_are_read_as_the_accuracy_level_says(level: int, make: Make) -> None:
    assert levels(make("qwen3", lambda weight: 8, lambda weight: 32, level)) == {level}


@pytest.mark.parametrize("bits", [8, 4])
def test_a_tied_table_is_stored_once(bits: int, make: Make) -> None:
    made = make("llama3", lambda weight: bits)
    gather, head = (
        next(n for n in nodes if n.op_type == kind)
        for nodes, kind in (
            (made.engine.graph.node, "GatherBlockQuantized"),
            (reversed(made.engine.graph.node), "MatMulNBits"),
        )
    )
    assert gather.input[0] != head.input[1]
    assert made.place(gather.input[0]) == made.place(head.input[1])
    assert gather.input[2] == head.input[2]


def of(part: str, yes: int, no: int) -> Callable[[str], int]:
    return lambda weight: yes if part in weight else no


@pytest.mark.parametrize(
    ("bits", "block"),
    [
        (of("v_proj", 4, 8), of("", 16, 16)),
        (of("v_proj", 32, 8), of("", 16, 16)),
        (of("", 8, 8), of("v_proj", 32, 16)),
    ],
    ids=["bits", "fp32", "block"],
)
def test_mixed_precisions_are_not_joined(
    bits: Callable[[str], int], block: Callable[[str], int], make: Make
) -> None:
    made = make("gemma2", bits, block)
    assert made.error < 1e-5
    assert made.compiled.fused["qkv"] == "0/2"
    assert made.compiled.fused["gate_up"] == "2/2"


def test_blocks_that_no_kernel_takes_become_fp32(make: Make) -> None:
    made = make("llama2", lambda weight: 8, of("mlp", 8, 16))
    assert made.error < 1e-5
    assert made.compiled.fused["quantized"] == "6/10"
    assert made.count()["FusedMatMul"] == 4


def test_codes_without_their_zero_in_the_middle_are_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unraised(codes: LazyTensor) -> LazyTensor:
        right = unsigned(codes)
        rows = lambda begin, end: right.rows(begin, end) ^ 0x80  # noqa: E731
        return LazyTensor(right.name, right.onnx_type, right.shape, rows)

    monkeypatch.setattr(matrix, "unsigned", unraised)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        make("llama2", lambda weight: 8)


def test_parts_joined_in_another_order_are_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrt_export.lower import projections as join
    from specrt_export.lower.projections import WeightMatrix, join_matrices

    def turned(parts: list[WeightMatrix]) -> WeightMatrix:
        return join_matrices(parts[::-1])

    monkeypatch.setattr(join, "join_matrices", turned)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        make("gemma2", lambda weight: 4)
