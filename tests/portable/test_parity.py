"""What is wrong in a portable graph is found against the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from portable.zoo import WINDOW, Exported
from specrt.errors import ExportError
from specrt_export.check.equivalence import check_parity

pytestmark = pytest.mark.export


def set_initializer(model: onnx.ModelProto, name: str, value: Any) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(value, name))


def widen_window(model: onnx.ModelProto) -> None:
    """Let every query see all keys before it."""
    set_initializer(model, f"INT64({WINDOW})", np.array(1000, np.int64))


def unmask(model: onnx.ModelProto) -> None:
    """Hide nothing."""
    set_initializer(model, "FLOAT(-3.4028235e+38)", np.array(0, np.float32))


def bend_rope(model: onnx.ModelProto) -> None:
    """Turn a little too fast."""
    for tensor in model.graph.initializer:
        if tensor.name.endswith("inv_freq"):
            turned = numpy_helper.to_array(tensor) * np.float32(1.02)
            tensor.CopyFrom(numpy_helper.from_array(turned, tensor.name))


def drop_offset(model: onnx.ModelProto) -> None:
    """Count positions from the start of the pass."""
    node = next(n for n in model.graph.node if n.op_type == "Unsqueeze" and n.input[0] == "start")
    zero = helper.make_node("Sub", ["start", "start"], ["zero"])
    node.input[0] = "zero"
    model.graph.node.insert(0, zero)


def write_at_zero(model: onnx.ModelProto) -> None:
    """Write every pass over the first keys."""
    for node in model.graph.node:
        if node.op_type == "TensorScatter":
            del node.input[2:]


@pytest.mark.parametrize("fault", [widen_window, unmask, bend_rope, drop_offset, write_at_zero])
def test_parity_finds_a_broken_graph(
    fault: Callable[[onnx.ModelProto], None], exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case = "offset" if fault in (drop_offset, write_at_zero) else "prefill"
    one = exported("gemma2")
    model = onnx.load(one.graph, load_external_data=False)
    fault(model)
    broken = tmp_path / "broken.onnx"
    onnx.save(model, broken)
    with pytest.raises(ExportError, match=f"disagrees with the model at '{case}'"):
        check_parity(one.checkpoint, broken)
