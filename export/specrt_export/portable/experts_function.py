"""The functions of portable graphs by which a token goes through some experts of a layer."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import parser

from specrt_export.portable.state_function import DOMAIN

EXPERTS = {"silu": "SiluExperts", "gelu": "GeluExperts"}
"""By the activation of gates, as the kernels name it."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
"""By what transformers calls them."""

_GATED = {
    "silu": """
      shown = Sigmoid (gate)
      active = Mul (gate, shown)""",
    "gelu": """
      active = Gelu <approximate = "tanh"> (gate)""",
}

BODY = """
<opset_import: ["": 24], domain: "%s">
%s <experts>
(x, named, shares, gate_up, down) => (y) {
  rest = Constant <value_ints = [-1]> ()
  first = Constant <value_ints = [0]> ()
  second = Constant <value_ints = [1]> ()
  third = Constant <value_ints = [2]> ()
  number = Constant <value_int : int = @experts> ()
  count = Unsqueeze (number, first)
  width = Shape <start = 1, end = 2> (x)
  inner = Shape <start = 1, end = 2> (down)
  gate_up_shape = Concat <axis = 0> (count, rest, width)
  down_shape = Concat <axis = 0> (count, width, inner)
  gates_and_ups = Reshape (gate_up, gate_up_shape)
  downs = Reshape (down, down_shape)
  y = Scan <num_scan_inputs = 3, body = token
    (float[h] row, int64[k] own, float[k] share) => (float[h] sum) {
      first_products = Gather (gates_and_ups, own)
      column = Unsqueeze (row, second)
      both = MatMul (first_products, column)
      gate, up = Split <axis = 1, num_outputs = 2> (both)%s
      hidden = Mul (active, up)
      second_products = Gather (downs, own)
      made = MatMul (second_products, hidden)
      flat = Squeeze (made, third)
      weight = Unsqueeze (share, second)
      counted = Mul (flat, weight)
      sum = ReduceSum <keepdims = 0> (counted, first)
    }> (x, named, shares)
}
"""
"""x [T, H]; named, shares [T, slots]: which experts a token takes, and what each counts; gate_up
[experts * 2 I, H], the gates of an expert before its ups; down [experts * H, I]; y [T, H]."""


@cache
def function(activation: str) -> onnx.FunctionProto:
    """Return the function, in standard operators."""
    return parser.parse_function(BODY % (DOMAIN, EXPERTS[activation], _GATED[activation]))


def mixes(model: onnx.ModelProto) -> bool:
    """Tell whether layers of a graph mix experts."""
    return any(node.op_type in EXPERTS.values() for node in model.graph.node)


def stack_experts(model: onnx.ModelProto) -> None:
    """Give the weights of experts two axes: rows of all experts, one after another."""
    names = {name for node in model.graph.node for name in node.input[3:5]
             if node.op_type in EXPERTS.values()}  # fmt: skip
    for tensor in model.graph.initializer:
        if tensor.name in names and len(tensor.dims) == 3:
            experts, rows, inputs = tensor.dims
            tensor.dims[:] = [experts * rows, inputs]
