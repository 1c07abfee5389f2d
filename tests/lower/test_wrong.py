"""Each rewrite, made wrong on purpose, gives an engine that the comparison refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export.zoo import OFTEN, Exported
from lower.comparing import equal_on_cpu
from specrt.errors import SpecrtError
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.lower import attention, norm
from specrt_export.lower import attention as layers
from specrt_export.lower import canonical as fold
from specrt_export.lower import canonical as parts
from specrt_export.lower import canonical as recognise
from specrt_export.lower import canonical as rows
from specrt_export.lower import lazy_tensor as stored
from specrt_export.lower import projections as matrix
from specrt_export.lower.attention import surplus
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.projections import WeightMatrix, join_matrices
from specrt_export.lower.view import GraphView
from specrt_export.portable.graph import runs_here

pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(not runs_here(), reason="this ONNX Runtime cannot run portable graphs"),
]
MAX_LENGTH = 128
Patch = Callable[[pytest.MonkeyPatch], None]


def subtract_where_one_is_added(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(fold._ELEMENTWISE, "Add", np.subtract)


def lose_the_bias_before_a_norm(patch: pytest.MonkeyPatch) -> None:
    split = norm._without_bias
    patch.setattr(norm, "_without_bias", lambda view, add: (*split(view, add)[:2], []))


def give_a_norm_only_what_was_added_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(norm, "_without_bias", lambda view, add: (add.input[1], add.input[1], []))


def turn_the_heads_round(patch: pytest.MonkeyPatch) -> None:
    def turned(found: list[WeightMatrix], name: str | None = None) -> WeightMatrix:
        return join_matrices(found[::-1], name)

    patch.setattr(parts, "join_matrices", turned)


def forget_the_factor_of_the_queries(patch: pytest.MonkeyPatch) -> None:
    def forgotten(view: GraphView) -> None:
        layers.fold_query_scale(view)
        for node in view.nodes("Attention"):
            next(a for a in node.attribute if a.name == "scale").f = 1.0

    patch.setattr(recognise, "fold_query_scale", forgotten)


def take_every_part_from_the_start(patch: pytest.MonkeyPatch) -> None:
    def first(self: WeightMatrix, begin: int, end: int) -> WeightMatrix:
        return WeightMatrix(stored.taken(self.values, 0, end - begin))

    patch.setattr(WeightMatrix, "taken", first)


def leave_weights_as_they_lie(patch: pytest.MonkeyPatch) -> None:
    def lying(source: LazyTensor) -> LazyTensor:
        right = stored.transposed(source)
        shape = right.shape
        whole: Any = lambda begin, end: source.load().reshape(shape)[begin:end]  # noqa: E731
        return LazyTensor(right.name, right.onnx_type, shape, whole)

    patch.setattr(matrix, "transposed", lying)


def widen_half_floats_wrongly(patch: pytest.MonkeyPatch) -> None:
    right = stored.as_float

    def wrong(source: LazyTensor) -> LazyTensor:
        made = right(source)
        doubled: Any = lambda begin, end: made.rows(begin, end) * np.float32(1.1)  # noqa: E731
        return LazyTensor(made.name, made.onnx_type, made.shape, doubled)

    patch.setattr(fold, "as_float", wrong)


def see_one_position_less(patch: pytest.MonkeyPatch) -> None:
    def late(view: GraphView) -> list[str]:
        last, total = right(view)
        one = view.add_constant("one", np.array([1], np.int32))
        return [view.add("Sub", [last, one]), view.add("Sub", [total, one])]

    right = attention._lengths
    patch.setattr(attention, "_lengths", late)


def score_the_first_row(patch: pytest.MonkeyPatch) -> None:
    def first(view: GraphView) -> int:
        made = rows.fuse_row_selection(view)
        zero = view.add_constant("zero", np.array(0, np.int64))
        wrong = view.add("Mul", ["rows", zero])
        for node in view.nodes("Gather"):
            if view.depends_on(node.input[1], ["rows"]):
                node.input[1] = wrong
        return made

    patch.setattr(recognise, "fuse_row_selection", first)


def join_q_k_v_in_another_order(patch: pytest.MonkeyPatch) -> None:
    from specrt_export.lower.projections import join_projections as join

    patch.setattr(attention, "join_projections", lambda view, three: join(view, three[::-1]))


def count_the_window_beside_the_query(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "surplus", lambda: 1 - surplus())


WRONG: dict[str, tuple[str, Patch]] = {
    "fold": ("gemma2", subtract_where_one_is_added),
    "cast": ("llama3", widen_half_floats_wrongly),
    "transposed": ("gpt2", leave_weights_as_they_lie),
    "bias": ("starcoder2", lose_the_bias_before_a_norm),
    "skip": ("llama2", give_a_norm_only_what_was_added_last),
    "heads": ("gpt_neox", turn_the_heads_round),
    "parts": ("phi3", take_every_part_from_the_start),
    "scale": ("opt", forget_the_factor_of_the_queries),
    "lengths": ("qwen3", see_one_position_less),
    "window": ("mistral", count_the_window_beside_the_query),
    "rows": ("llama2", score_the_first_row),
    "qkv": ("gemma2", join_q_k_v_in_another_order),
}


@pytest.mark.parametrize(
    "what",
    [w if WRONG[w][0] in OFTEN else pytest.param(w, marks=pytest.mark.nightly) for w in WRONG],
)
def test_a_rewrite_made_wrong_is_found(
    what: str, exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, make_wrong = WRONG[what]
    make_wrong(monkeypatch)
    one = exported(name)
    compiled = compile_ort_cpu(one.graph.path, one.checkpoint.folder, tmp_path, MAX_LENGTH)
    assert onnx.load(tmp_path / "engine.onnx", load_external_data=False).graph.node
    source = one.graph.path, one.checkpoint.folder
    with pytest.raises(SpecrtError, match=r"differs from the portable graph|failed in a pass"):
        equal_on_cpu(source, compiled, MAX_LENGTH, [1, 4])
