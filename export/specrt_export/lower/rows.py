"""Pick rows before the last projection with one node."""

from __future__ import annotations

from specrt_export.lower.view import GraphView


def fuse_row_selection(view: GraphView) -> int:
    """Replace an indexing by `rows` that goes through GatherND; return how many.

    ```
    x ─ Transpose ─ GatherND(rows) ─ Transpose ─ y      =>      x ─ Gather(rows, axis 1) ─ y
    ```
    """
    fused = 0
    for gather in view.nodes("GatherND"):
        before = view.maker(gather.input[0], "Transpose")
        after = view.only_reader(gather.output[0], "Transpose")
        if before is None or after is None or not view.depends_on(gather.input[1], ["rows"]):
            continue
        if all(list(t.attribute[0].ints) == [1, 0, 2] for t in (before, after)):
            view.add("Gather", [before.input[0], "rows"], outputs=[after.output[0]], axis=1)
            fused += 1
    return fused
