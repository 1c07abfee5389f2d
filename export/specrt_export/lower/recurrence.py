"""Layers with a recurrent state: for the CPU kernels one operator, else written out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, parser

from specrt.geometry import BASE, NEXT_BASE, RECURRENT, STATE, TAKEN_BACK, Geometry, LayerMemory
from specrt_export.lower.projections import PROJECTION, SPECRT
from specrt_export.lower.view import Counts, GraphView
from specrt_export.lower.window import Windows
from specrt_export.portable.state_function import RECURRENCE


def lower_recurrences(
    view: GraphView, geometry: Geometry, rows: str, positions: str, lag: int
) -> int:
    """Replace the function of portable graphs by the kernels' operator; return how many.

    ```
    q, k, v, g, beta, state.i, factors.i, start, base ─ StateRecurrence ─ y
    =>  q, k, v, g, beta, state.i, factors.i, base.i, rows, positions ─ Recurrence ─ y
    ```
    The operator itself keeps how far each layer's state holds a row. States lag `lag` positions.
    """
    nodes = view.nodes(RECURRENCE)
    for node in nodes:
        *fed, state, factors, _, _ = node.input
        index = int(state.removeprefix(f"{STATE}."))
        memory = geometry.memories[index]
        assert memory.kind == RECURRENT, "a state is of a recurrent layer"
        base = f"{BASE}.{index}"
        view.add(
            "Recurrence", [*fed, state, factors, base, rows, positions],
            outputs=[*node.output, f"present_{base}"], domain=SPECRT, lag=lag,
            num_heads=memory.kv_heads, key_heads=memory.key_heads, key_size=memory.key_width,
            value_size=memory.value_width, **view.attributes(node),
        )  # fmt: skip
        view.graph.input.append(helper.make_tensor_value_info(base, TensorProto.INT64, ["B"]))
        view.add_output(helper.make_tensor_value_info(f"present_{base}", TensorProto.INT64, ["B"]))
    if nodes:
        del view.model.functions[:]
        view.require_domain(SPECRT, 1)
        view.tidy()
    return len(nodes)


_TOKENS = 5
"""Inputs of a recurrence that its tokens make: q, k, v, g, beta."""


def write_out_recurrences(
    view: GraphView, counts: Counts, geometry: Geometry, windows: Windows, max_width: int
) -> set[str]:
    """Write recurrences out for passes of up to some tokens; return values to be kept in fp32.

    With a `max_width` of 0 tokens come one after another, as plain decoding has them.

    ```
    factors.i, state.i ──────┐
    q, k, v, g, beta ─────── chunk ─ y, present_state.i, factors ─ window ─ present_factors.i
    ```
    All tokens of a pass are computed together: what each adds to the state, u, solves a triangular
    system, and no state in between is made (Yang et al., Gated Delta Networks, arXiv:2412.06464).
    """
    nodes = view.nodes(RECURRENCE)
    if not max_width:
        return _write_out_in_order(view, counts, geometry, windows)
    exact = _since_projections(view, nodes)
    positions, there = windows.since_base()
    seen = _column(view, windows.positions, positions)
    folded = view.add("Less", [positions, NEXT_BASE])
    begun = view.add("Greater", [BASE, windows.number(0)])
    row = view.add("Reshape", [there, windows.number(1, 1, -1, 1)])
    masks = [begun, row, seen, folded, *_levels(view, windows, max_width)]
    for node in nodes:
        *fed, state, factors, _, _ = node.input
        memory = geometry.memories[int(state.removeprefix(f"{STATE}."))]
        function = parser.parse_function(chunk(memory, len(masks) - 5, **view.attributes(node)))
        added, old = view.fresh("added"), view.fresh("old")
        outputs = [*node.output[:2], added, old]
        exact |= {*view.inline(function, [*fed, state, factors, *masks], outputs)}
        exact |= {windows.move(factors, old, added), f"present_{factors}"}
    del view.model.functions[:]
    view.tidy()
    counts["recurrence"] = len(nodes), len(nodes)
    return exact


def _write_out_in_order(
    view: GraphView, counts: Counts, geometry: Geometry, windows: Windows
) -> set[str]:
    """Write recurrences out token by token, with the same bits at every width of a pass."""
    nodes = view.nodes(RECURRENCE)
    begun = view.add("Greater", [BASE, windows.number(0)])
    held = view.add("Add", [BASE, windows.number(*range(TAKEN_BACK))])
    least = windows.number(1)
    count = view.add("Max", [view.add("Sub", ["start", BASE]), least])
    masks = [begun, count]
    for end in ("start", NEXT_BASE):
        before = view.add("Less", [held, end])
        masks.append(view.add("Slice", [before, windows.number(0), count, windows.number(0)]))
    for node in nodes:
        *fed, state, factors, _, _ = node.input
        memory = geometry.memories[int(state.removeprefix(f"{STATE}."))]
        function = parser.parse_function(in_order(memory, **view.attributes(node)))
        added = view.fresh("added")
        view.inline(function, [*fed, state, factors, *masks], [*node.output[:2], added])
        windows.move(factors, factors, added)
    del view.model.functions[:]
    view.tidy()
    counts["recurrence"] = len(nodes), len(nodes)
    return set()


def in_order(memory: LayerMemory, delta: int, scale: float, epsilon: float) -> str:
    """Return the function of a layer's passes over one row, token by token.

    What the window holds is added to the state first, `count` positions, some of them to stay.
    Exponentials are taken step by step: of arrays of other sizes they may have other bits.
    """
    heads, key_heads = memory.kv_heads, memory.key_heads
    key_size, value_size = memory.key_width, memory.value_width
    parts = heads, key_heads * key_size, heads * value_size
    by_head = [1, -1, heads, key_size]
    state = f"float[1, {heads}, {key_size}, {value_size}]"
    row, key, value = f"float[1, {heads}]", f"float[1, {heads}, {key_size}]", ""
    value = f"float[1, {heads}, {value_size}]"
    off = """at_k_row = Unsqueeze (at_k, at_2)
      at_held_row = MatMul (at_k_row, at_less)
      at_held = Squeeze (at_held_row, at_2)
      at_off = Sub (at_v, at_held)""" if delta else "at_off = Identity (at_v)"  # fmt: skip
    return f"""
<opset_import: ["": 21], domain: "{SPECRT}">
in_order (query, key, value, decay, beta, state, factors, begun, count, there, stays)
=> (read, next_state, added) {{
  nothing = Constant <value_float = 0.0> ()
  axis1 = Constant <value_ints = [1]> ()
  axis2 = Constant <value_ints = [2]> ()
  begin = Constant <value_ints = [0]> ()
  {_normed("key", epsilon)}
  {_normed("query", epsilon)}
  scale = Constant <value_float = {scale!r}> ()
  scaled = Mul (normed_query, scale)
  window = Squeeze (factors, axis1)
  held = Slice (window, begin, count, axis1)
  parts = Constant <value_ints = [{", ".join(map(str, parts))}]> ()
  old_decays, old_key, old_value = Split <axis = 2> (held, parts)
  keys_of = Constant <value_ints = [1, -1, {key_heads}, 1, {key_size}]> ()
  times = Constant <value_ints = [1, 1, 1, {heads // key_heads}, 1]> ()
  by_head = Constant <value_ints = [{", ".join(map(str, by_head))}]> ()
  values_of = Constant <value_ints = [1, -1, {heads}, {value_size}]> ()
  old_apart = Reshape (old_key, keys_of)
  old_repeated = Expand (old_apart, times)
  old_keys = Reshape (old_repeated, by_head)
  old_values = Reshape (old_value, values_of)
  key_apart = Reshape (normed_key, keys_of)
  key_repeated = Expand (key_apart, times)
  k = Reshape (key_repeated, by_head)
  query_apart = Reshape (scaled, keys_of)
  query_repeated = Expand (query_apart, times)
  q = Reshape (query_repeated, by_head)
  known = Where (begun, state, nothing)
  last, next_state = Scan <num_scan_inputs = 5, scan_input_axes = [1, 1, 1, 0, 0], body = fold
    ({state} at_s, {state} at_n, {row} at_a, {key} at_k, {value} at_u, bool at_there, bool at_stays)
    => ({state} at_after, {state} at_kept) {{
      at_1 = Constant <value_ints = [1]> ()
      at_2 = Constant <value_ints = [2]> ()
      at_3 = Constant <value_ints = [3]> ()
      at_23 = Constant <value_ints = [2, 3]> ()
      at_wide = Unsqueeze (at_a, at_23)
      at_less = Mul (at_wide, at_s)
      at_k_wide = Unsqueeze (at_k, at_3)
      at_u_wide = Unsqueeze (at_u, at_2)
      at_added = Mul (at_k_wide, at_u_wide)
      at_changed = Add (at_less, at_added)
      at_after = Where (at_there, at_changed, at_s)
      at_kept = Where (at_stays, at_changed, at_n)
    }}> (known, known, old_decays, old_keys, old_values, there, stays)
  end, y, decays, adds = Scan <num_scan_inputs = 5, scan_input_axes = [1, 1, 1, 1, 1],
    scan_output_axes = [1, 1, 1], body = step
    ({state} at_s, {row} at_g, {key} at_k, {key} at_q, {value} at_v, {row} at_c)
    => ({state} at_after, {value} at_y, {row} at_a, {value} at_u) {{
      at_2 = Constant <value_ints = [2]> ()
      at_3 = Constant <value_ints = [3]> ()
      at_23 = Constant <value_ints = [2, 3]> ()
      at_a = Exp (at_g)
      at_wide = Unsqueeze (at_a, at_23)
      at_less = Mul (at_wide, at_s)
      {off}
      at_c_wide = Unsqueeze (at_c, at_2)
      at_u = Mul (at_c_wide, at_off)
      at_k_wide = Unsqueeze (at_k, at_3)
      at_u_wide = Unsqueeze (at_u, at_2)
      at_added = Mul (at_k_wide, at_u_wide)
      at_after = Add (at_less, at_added)
      at_q_row = Unsqueeze (at_q, at_2)
      at_y_row = MatMul (at_q_row, at_after)
      at_y = Squeeze (at_y_row, at_2)
    }}> (last, decay, k, q, value, beta)
  read = Identity (y)
  flat = Constant <value_ints = [1, -1, {parts[1]}]> ()
  flat_u = Constant <value_ints = [1, -1, {parts[2]}]> ()
  new_keys = Reshape (normed_key, flat)
  new_u = Reshape (adds, flat_u)
  joined = Concat <axis = 2> (decays, new_keys, new_u)
  added = Unsqueeze (joined, axis1)
}}"""


def _since_projections(view: GraphView, nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return what the tokens of some layers are made of, from its projections on."""
    exact, stack = set[str](), [name for node in nodes for name in node.input[:_TOKENS]]
    while stack:
        name = stack.pop()
        maker = view.maker(name)
        if maker is not None and name not in exact and maker.op_type != PROJECTION:
            exact.add(name)
            stack.extend(maker.input)
    return exact


def _column(view: GraphView, fed: str, positions: str) -> str:
    """Return which positions [W + S] each token sees, [S, W + S]."""
    column = view.add("Reshape", [fed, view.add_constant("column", np.array([-1, 1]))])
    return view.add("LessOrEqual", [positions, column])


def _levels(view: GraphView, windows: Windows, max_width: int) -> Iterator[str]:
    """Yield masks [S, S] of pairs of tokens: first of each with itself.

    Then of those that lie in neighbouring blocks of 1, 2, 4 .. tokens, the later one first. Each
    pair of different tokens is in one mask.
    """
    places = np.arange(max_width)
    apart = places[:, None] ^ places
    level = np.frexp(apart)[1] - 1
    table = view.add_constant(
        "levels", np.where(places[:, None] < places, -2, level).astype(np.int32)
    )
    step = view.add("Sub", [windows.positions, "start"])
    steps = view.add("Reshape", [step, windows.number(-1)])
    own = view.add("Gather", [view.add("Gather", [table, steps], axis=0), steps], axis=1)
    for number in range(-1, (max_width - 1).bit_length()):
        is_of = view.add("Equal", [own, view.add_constant("level", np.array(number, np.int32))])
        yield view.add("Cast", [is_of], to=TensorProto.FLOAT)


def chunk(memory: LayerMemory, levels: int, delta: int, scale: float, epsilon: float) -> str:
    """Return the function of a layer's passes over one row, in standard operators.

    Positions of the window come first, W, and then the S tokens of the pass. What a state keeps
    from one position to another is the exponential of a difference of sums of decays. The inverse
    of the triangular system is put together from those of its blocks on the diagonal: of two of
    them, A and C, with B below, it is -inv(C) B inv(A) there.
    Shapes: state [1, H, D, E], factors [1, 1, W, H + Hk D + H E]; there [1, 1, W, 1], seen
        [S, W + S], folded [W + S]; own and the levels [S, S].
    """
    heads, key_heads = memory.kv_heads, memory.key_heads
    key_size, value_size = memory.key_width, memory.value_width
    parts = heads, key_heads * key_size, heads * value_size
    masks = ", ".join(
        ["begun", "there", "seen", "folded", "own", *(f"level{i}" for i in range(levels))]
    )
    return f"""
<opset_import: ["": 24], domain: "{SPECRT}">
chunk (query, key, value, decay, beta, state, factors, {masks}) => (read, next_state, added, old) {{
  nothing = Constant <value_float = 0.0> ()
  never = Constant <value_float = -10000.0> ()
  time = Constant <value_int = 2> ()
  axis1 = Constant <value_ints = [1]> ()
  axis2 = Constant <value_ints = [2]> ()
  axis3 = Constant <value_ints = [3]> ()
  begin = Constant <value_ints = [0]> ()
  window = Constant <value_ints = [{TAKEN_BACK}]> ()
  end = Constant <value_ints = [{2**31 - 1}]> ()
  {_normed("key", epsilon)}
  {_normed("query", epsilon)}
  scale = Constant <value_float = {scale!r}> ()
  scaled = Mul (normed_query, scale)

  old = Where (there, factors, nothing)
  parts = Constant <value_ints = [{", ".join(map(str, parts))}]> ()
  old_decay, old_key, old_value = Split <axis = 3> (old, parts)
  decays_of = Constant <value_ints = [1, -1, {heads}]> ()
  keys_of = Constant <value_ints = [1, -1, {key_heads}, {key_size}]> ()
  values_of = Constant <value_ints = [1, -1, {heads}, {value_size}]> ()
  old_decays = Reshape (old_decay, decays_of)
  old_keys = Reshape (old_key, keys_of)
  old_values = Reshape (old_value, values_of)
  old_u = Transpose <perm = [0, 2, 1, 3]> (old_values)
  all_decays = Concat <axis = 1> (old_decays, decay)
  g = Transpose <perm = [0, 2, 1]> (all_decays)
  all_keys = Concat <axis = 1> (old_keys, normed_key)
  {_by_head("all_keys", "k", memory)}
  {_by_head("scaled", "q", memory)}
  across = Transpose <perm = [0, 1, 3, 2]> (k)
  values = Transpose <perm = [0, 2, 1, 3]> (value)
  betas = Transpose <perm = [0, 2, 1]> (beta)
  b = Unsqueeze (betas, axis3)

  sums = CumSum (g, time)
  own_sums = Slice (sums, window, end, axis2)
  own_column = Unsqueeze (own_sums, axis3)
  row_of_sums = Unsqueeze (sums, axis2)
  apart = Sub (own_column, row_of_sums)
  seen_apart = Where (seen, apart, never)
  kept = Exp (seen_apart)
  kept_state = Exp (own_column)
  known = Where (begun, state, nothing)
  {_delta(levels) if delta else "u = Mul (b, values)"}
  all_u = Concat <axis = 2> (old_u, u)
  read_state = MatMul (q, known)
  state_part = Mul (kept_state, read_state)
  products = MatMul (q, across)
  shares = Mul (products, kept)
  token_part = MatMul (shares, all_u)
  y = Add (state_part, token_part)
  read = Transpose <perm = [0, 2, 1, 3]> (y)

  folded_decays = Where (folded, g, nothing)
  total = ReduceSum <keepdims = 1> (folded_decays, axis2)
  behind = Sub (total, sums)
  folded_behind = Where (folded, behind, never)
  folded_kept = Exp (folded_behind)
  kept_column = Unsqueeze (folded_kept, axis3)
  column = Constant <value_ints = [-1, 1]> ()
  is_folded = Reshape (folded, column)
  kept_u = Mul (kept_column, all_u)
  folded_u = Where (is_folded, kept_u, nothing)
  folded_keys = Where (folded, across, nothing)
  gained = MatMul (folded_keys, folded_u)
  total_column = Unsqueeze (total, axis3)
  total_kept = Exp (total_column)
  left = Mul (total_kept, known)
  next_state = Add (left, gained)

  flat = Constant <value_ints = [1, 1, -1, {parts[1]}]> ()
  flat_u = Constant <value_ints = [1, 1, -1, {parts[2]}]> ()
  new_keys = Reshape (normed_key, flat)
  turned_u = Transpose <perm = [0, 2, 1, 3]> (u)
  new_u = Reshape (turned_u, flat_u)
  new_decays = Unsqueeze (decay, axis1)
  added = Concat <axis = 3> (new_decays, new_keys, new_u)
}}"""


def _normed(name: str, epsilon: float) -> str:
    """Divide by the length of a vector, where there is an epsilon."""
    if not epsilon:
        return f"normed_{name} = Identity ({name})"
    return f"""{name}_squared = Mul ({name}, {name})
  rest_{name} = Constant <value_ints = [-1]> ()
  {name}_sum = ReduceSum <keepdims = 1> ({name}_squared, rest_{name})
  epsilon_{name} = Constant <value_float = {epsilon!r}> ()
  {name}_more = Add ({name}_sum, epsilon_{name})
  {name}_length = Sqrt ({name}_more)
  normed_{name} = Div ({name}, {name}_length)"""


def _by_head(source: str, name: str, memory: LayerMemory) -> str:
    """Put heads before positions, and repeat each head of keys for those that share it."""
    shared = memory.kv_heads // memory.key_heads
    if shared == 1:
        return f"{name} = Transpose <perm = [0, 2, 1, 3]> ({source})"
    return f"""{name}_turned = Transpose <perm = [0, 2, 1, 3]> ({source})
  {name}_apart = Unsqueeze ({name}_turned, axis2)
  {name}_times = Constant <value_ints = [1, 1, {shared}, 1, 1]> ()
  {name}_repeated = Expand ({name}_apart, {name}_times)
  {name}_shape = Constant <value_ints = [1, {memory.kv_heads}, -1, {memory.key_width}]> ()
  {name} = Reshape ({name}_repeated, {name}_shape)"""


def _delta(levels: int) -> str:
    """Return how u is computed by the delta rule, with the masks of so many levels."""
    inverse = ["first = Mul (system, level0)", "inverse0 = Sub (own, first)"] if levels else []
    inverse = inverse or ["inverse0 = Identity (own)"]
    for level in range(1, levels):
        before = f"inverse{level - 1}"
        inverse += [
            f"below{level} = Mul (system, level{level})",
            f"left{level} = MatMul ({before}, below{level})",
            f"both{level} = MatMul (left{level}, {before})",
            f"inverse{level} = Sub ({before}, both{level})",
        ]
    return "\n  ".join(
        [
            "own_k = Slice (k, window, end, axis2)",
            "overlaps = MatMul (own_k, across)",
            "held_shares = Mul (overlaps, kept)",
            "old_shares = Slice (held_shares, begin, window, axis3)",
            "own_shares = Slice (held_shares, window, end, axis3)",
            "held_state = MatMul (own_k, known)",
            "held_of_state = Mul (kept_state, held_state)",
            "held_of_old = MatMul (old_shares, old_u)",
            "held = Add (held_of_state, held_of_old)",
            "off = Sub (values, held)",
            "right = Mul (b, off)",
            "system = Mul (b, own_shares)",
            *inverse,
            f"u = MatMul (inverse{max(levels, 1) - 1}, right)",
        ]
    )
