"""A portable graph next to the model that transformers makes of the same checkpoint."""

from __future__ import annotations

from importlib.util import find_spec

from specrt.errors import one_line
from specrt.system.memory import available_bytes
from specrt_export.check.equivalence import Reference, check_parity
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.compile.compiler import GraphSource, Progress
from specrt_export.heads.head_formats import HEAD_FORMATS
from specrt_export.plan.model_plan import ModelPlan
from specrt_export.portable.graph import runs_here


def compare_with_model(
    model: ModelPlan, source: GraphSource, parameters: int, progress: Progress
) -> None:
    """Compare the portable graph with transformers, where that is installed and has room."""
    if not (runs_here() and all(map(find_spec, ("torch", "transformers")))):
        return
    if model.kind:
        progress("compare draft with torch", 0.1)
        check_graph_of = HEAD_FORMATS[model.kind].part("check_graph")
        check_graph_of(model.head, source.graph, source.weights)
        return
    reference, reason = _open_reference(model.checkpoint, parameters)
    if reference is None:
        progress(f"warning: {model.role} is not compared with transformers: {reason}", 0.1)
        return
    progress(f"compare {model.role} with transformers", 0.1)
    check_parity(model.checkpoint, source.graph, reference=reference, folder=source.weights)
    if model.head is not None:
        from specrt_export.check.head_equivalence import check_feature

        check_feature(model.head, reference, source.graph, source.weights)


def _open_reference(checkpoint: Checkpoint, parameters: int) -> tuple[Reference | None, str]:
    """Open a checkpoint with transformers; None and the reason where that cannot be."""
    needed, free = 4 * parameters, available_bytes()
    if free is not None and needed > free:
        return None, f"it takes {needed / 1e9:.1f} GB there, and {free / 1e9:.1f} GB are free"
    try:
        return Reference(checkpoint), ""
    except Exception as error:  # a release that lacks this model raises anything
        return None, f"it cannot open it: {one_line(str(error))}"
