"""Turn a checkpoint into its portable graph."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir as ir

from specrt.errors import ExportError
from specrt.geometry import Geometry
from specrt_export.checkpoint import Checkpoint
from specrt_export.portable import ATTACHED, GEOMETRY, MODEL_TYPE
from specrt_export.support import check_support
from specrt_export.tidy import tidy
from specrt_export.trace import Traced, quiet, trace
from specrt_export.weights import attach, detach

FORMAT = "1"
IR_VERSION = 11

EXPORTERS = ("torch", "transformers", "onnx-ir", "onnxscript")
"""Distributions whose versions can change the graph."""


@dataclass(frozen=True)
class ExportedGraph:
    """A portable graph on disk."""

    path: Path
    geometry: Geometry
    nodes: int
    bytes: int


def export_graph(
    checkpoint: Checkpoint, out: Path, *, progress: Callable[[str], None] | None = None
) -> ExportedGraph:
    """Write the portable graph of a checkpoint to `out`, replacing what is there.

    A checkpoint opened with `config_only` gives a graph for `attach_graph` to complete.
    Raises: ExportError if the model cannot be exported, CheckpointError if its weights do not fit.
    """
    tell = progress or (lambda stage: None)
    check_support(checkpoint.config)
    tell("trace")
    traced = trace(checkpoint.folder)
    tell("tidy")
    with quiet():
        tidy(traced.model, traced.geometry.layers)
    detach(traced.model)
    describe(traced)
    # Through the serialised form, so that attaching now and attaching later give the same bytes.
    model = ir.from_proto(_proto(traced.model))
    if checkpoint.weights:
        tell("attach")
        attach(model, checkpoint)
    tell("save")
    return _save(model, out)


def attach_graph(graph: Path, checkpoint: Checkpoint, out: Path | None = None) -> ExportedGraph:
    """Complete a graph exported from a config alone, in place or at `out`.

    Raises: ExportError if the graph has its weights already, CheckpointError if they do not fit.
    """
    model = ir.from_proto(onnx.load(graph, load_external_data=False))
    if model.metadata_props.get(ATTACHED) != "false":
        raise ExportError(
            f"{graph} is not a graph without weights (its {ATTACHED} is "
            f"{model.metadata_props.get(ATTACHED)!r}); export one with --config-only"
        )
    attach(model, checkpoint)
    return _save(model, out or graph)


def describe(traced: Traced) -> None:
    """Write what a build has to know about the graph into its metadata."""
    model = traced.model
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "specrt", None
    model.graph.name = traced.model_type
    model.metadata_props.update(
        {
            "specrt.format": FORMAT,
            GEOMETRY: json.dumps(traced.geometry.to_json()),
            MODEL_TYPE: traced.model_type,
            "specrt.exporter": json.dumps(exporter()),
        }
    )


def exporter() -> dict[str, str]:
    """Return the versions of what shapes a graph, without build tags such as `+cpu`."""
    return {name: version(name).partition("+")[0] for name in EXPORTERS}


def _save(model: ir.Model, out: Path) -> ExportedGraph:
    data = _proto(model).SerializeToString(deterministic=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ExportError(
            f"cannot write {out} ({error.strerror}); free space or choose another --out"
        ) from error
    geometry = Geometry.from_json(json.loads(model.metadata_props[GEOMETRY]))
    return ExportedGraph(out, geometry, len(model.graph), len(data))


def _proto(model: ir.Model) -> onnx.ModelProto:
    """Serialise a model without the shapes of what lies between its inputs and outputs."""
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    return proto
