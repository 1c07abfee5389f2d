"""Look tokens up in a quantized table without expanding the table."""

from __future__ import annotations

from specrt_export.lower.linear import MICROSOFT
from specrt_export.lower.matrix import find_matrix
from specrt_export.lower.stored import unsigned
from specrt_export.lower.view import GraphView


def emit_embeddings(view: GraphView) -> tuple[int, int]:
    """Gather from codes; return how many tables, and of how many quantized ones.

    ```
    codes, scales ─ DequantizeLinear ─┐
    tokens ──────────────────────── Gather ─ y
      =>  codes, tokens, scales ─ GatherBlockQuantized ─ y
    ```
    The codes are the bytes that MatMulNBits reads, so a tied table is stored once.
    """
    found = emitted = 0
    for node in view.nodes("Gather"):
        matrix = find_matrix(view, node.input[0])
        if matrix is None or matrix.scales is None or view.attributes(node).get("axis", 0) != 0:
            continue
        found += 1
        if not matrix.is_in_blocks:
            continue
        codes = view.add_stored(unsigned(matrix.values))
        view.require_domain(MICROSOFT, 1)
        view.add(
            "GatherBlockQuantized",
            [codes, node.input[1], view.add_stored(matrix.scales)],
            outputs=[node.output[0]],
            domain=MICROSOFT,
            bits=matrix.bits,
            block_size=matrix.block,
            gather_axis=0,
            quantize_axis=1,
        )
        emitted += 1
    view.tidy()
    return emitted, found
