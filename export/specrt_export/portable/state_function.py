"""The function of portable graphs by which a layer reads and changes its recurrent state."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import parser

DOMAIN, RECURRENCE = "specrt", "StateRecurrence"

BODY = """
<opset_import: ["": 24], domain: "%s">
%s <delta, scale, epsilon>
(query, key, value, decay, beta, state, factors, start, base)
=> (read, next_state, next_factors) {
  batch = Shape <start = 0, end = 1> (value)
  width = Shape <start = 1, end = 2> (value)
  heads = Shape <start = 2, end = 3> (value)
  key_heads = Shape <start = 2, end = 3> (key)
  key_size = Shape <start = 3, end = 4> (key)
  value_size = Shape <start = 3, end = 4> (value)
  shared = Div (heads, key_heads)
  none = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  rest = Constant <value_ints = [-1]> ()
  first = Constant <value_ints = [1]> ()
  second = Constant <value_ints = [2]> ()
  third = Constant <value_ints = [3]> ()
  last_two = Constant <value_ints = [2, 3]> ()
  all_but_first = Constant <value_ints = [1, 2, 3]> ()
  nothing = Constant <value_float = 0.0> ()

  sum_epsilon = Constant <value_float : float = @epsilon> ()
  normed = Greater (sum_epsilon, nothing)
  key_squares = ReduceSumSquare (key, rest)
  key_sum = Add (key_squares, sum_epsilon)
  key_norm = Sqrt (key_sum)
  key_divided = Div (key, key_norm)
  keys = Where (normed, key_divided, key)
  query_squares = ReduceSumSquare (query, rest)
  query_sum = Add (query_squares, sum_epsilon)
  query_norm = Sqrt (query_sum)
  query_divided = Div (query, query_norm)
  queries = Where (normed, query_divided, query)
  factor = Constant <value_float : float = @scale> ()
  scaled = Mul (queries, factor)
  decays = Exp (decay)
  by_delta = Constant <value_int : int = @delta> ()
  deltas = Cast <to = 1> (by_delta)

  ring = Shape <start = 2, end = 3> (factors)
  later = Sub (start, base)
  most = ReduceMax <keepdims = 0> (later)
  count = Max (most, one)
  steps = Range (none, count, one)
  base_column = Unsqueeze (base, first)
  start_column = Unsqueeze (start, first)
  positions = Add (base_column, steps)
  there = Less (positions, start_column)
  places = Mod (positions, ring)
  place_column = Unsqueeze (places, second)
  rows = Squeeze (factors, first)
  kept = GatherND <batch_dims = 1> (rows, place_column)
  key_items = Mul (key_heads, key_size)
  value_items = Mul (heads, value_size)
  sizes = Concat <axis = 0> (heads, key_items, value_items)
  kept_decays, kept_keys, kept_adds = Split <axis = 2> (kept, sizes)
  key_shape = Concat <axis = 0> (batch, rest, key_heads, first, key_size)
  shared_shape = Concat <axis = 0> (first, first, first, shared, first)
  head_shape = Concat <axis = 0> (batch, rest, heads, key_size)
  add_shape = Concat <axis = 0> (batch, rest, heads, value_size)
  kept_apart = Reshape (kept_keys, key_shape)
  kept_shared = Expand (kept_apart, shared_shape)
  kept_by_head = Reshape (kept_shared, head_shape)
  kept_added = Reshape (kept_adds, add_shape)
  keys_apart = Reshape (keys, key_shape)
  keys_shared = Expand (keys_apart, shared_shape)
  keys_by_head = Reshape (keys_shared, head_shape)
  queries_apart = Reshape (scaled, key_shape)
  queries_shared = Expand (queries_apart, shared_shape)
  queries_by_head = Reshape (queries_shared, head_shape)

  begun = Greater (base, none)
  begun_wide = Unsqueeze (begun, all_but_first)
  known = Where (begun_wide, state, nothing)
  next_state = Scan <num_scan_inputs = 4, scan_input_axes = [1, 1, 1, 1], body = fold
    (float[b, h, d, e] s, float[b, h] a, float[b, h, d] k, float[b, h, e] u, bool[b] is_there)
    => (float[b, h, d, e] after) {
      a_wide = Unsqueeze (a, last_two)
      less = Mul (a_wide, s)
      k_wide = Unsqueeze (k, third)
      u_wide = Unsqueeze (u, second)
      added = Mul (k_wide, u_wide)
      changed = Add (less, added)
      is_there_wide = Unsqueeze (is_there, all_but_first)
      after = Where (is_there_wide, changed, s)
    }> (known, kept_decays, kept_by_head, kept_added, there)
  last, read, adds = Scan <num_scan_inputs = 5, scan_input_axes = [1, 1, 1, 1, 1],
    scan_output_axes = [1, 1], body = step
    (float[b, h, d, e] s, float[b, h] a, float[b, h, d] k, float[b, h, d] q, float[b, h, e] v,
     float[b, h] c)
    => (float[b, h, d, e] after, float[b, h, e] y, float[b, h, e] u) {
      a_wide = Unsqueeze (a, last_two)
      less = Mul (a_wide, s)
      k_row = Unsqueeze (k, second)
      held_row = MatMul (k_row, less)
      held = Squeeze (held_row, second)
      counted = Mul (deltas, held)
      off = Sub (v, counted)
      c_wide = Unsqueeze (c, second)
      u = Mul (c_wide, off)
      k_wide = Unsqueeze (k, third)
      u_wide = Unsqueeze (u, second)
      added = Mul (k_wide, u_wide)
      after = Add (less, added)
      q_row = Unsqueeze (q, second)
      y_row = MatMul (q_row, after)
      y = Squeeze (y_row, second)
    }> (next_state, decays, keys_by_head, queries_by_head, value, beta)

  flat = Concat <axis = 0> (batch, width, rest)
  keys_flat = Reshape (keys, flat)
  adds_flat = Reshape (adds, flat)
  factor_rows = Concat <axis = 2> (decays, keys_flat, adds_flat)
  update = Unsqueeze (factor_rows, first)
  begin = Mod (start, ring)
  next_factors = TensorScatter <axis = -2, mode = "circular"> (factors, update, begin)
}
"""
"""See `hook.Recurrence`. The state holds what lies before `base` [B]; tokens from there up to
`start` are folded into it from the ring of factors: their decays, keys, and what they add. A state
whose base is 0 counts as zero. What the tokens of a pass come to is computed from it and not kept,
so that a rejected token leaves nothing."""


@cache
def function() -> onnx.FunctionProto:
    """Return the function, in standard operators."""
    return parser.parse_function(BODY % (DOMAIN, RECURRENCE))


def define(model: onnx.ModelProto, function: onnx.FunctionProto) -> None:
    """Define a function in a graph that calls it."""
    if any(node.op_type == function.name for node in model.graph.node):
        model.functions.append(function)
        if all(one.domain != DOMAIN for one in model.opset_import):
            model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
