"""`specrt export`: writes the portable graph of a checkpoint."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from specrt.cli.options import progress
from specrt.doctor import missing_exporter
from specrt.errors import ExportError, how_to_install
from specrt.held_file import check_place
from specrt.system.memory import size

if TYPE_CHECKING:
    from specrt_export.check.equivalence import ParityReport
    from specrt_export.checkpoint.checkpoint import Checkpoint
    from specrt_export.portable.attachment import ExportedGraph


@click.command("export")
@click.argument("checkpoint")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The graph file to write, or a folder for decoder.onnx. Those of an encoder-decoder's "
    "encoder and cross keys and values are written next to it.",
)
@click.option(
    "--check", is_flag=True, help="Compare the graph with transformers; fail where it differs."
)
@click.option(
    "--config-only", is_flag=True, help="Export from config.json alone; --attach the weights later."
)
@click.option("--attach", is_flag=True, help="Add weights to --out, a graph of --config-only.")
@click.option("--revision", help="Branch, tag or commit of a hub name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    checkpoint: str,
    out: Path,
    check: bool,
    config_only: bool,
    attach: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Write the portable graph of CHECKPOINT, a local folder, a GGUF file or a hub name.

    Of an encoder-decoder there are up to three: of --out target.onnx, which is its decoder's,
    target.encoder.onnx and target.cross.onnx too; in a folder decoder.onnx, encoder.onnx and
    cross.onnx.
    """
    if out.is_dir() or not out.suffix:
        out /= "decoder.onnx"
    if config_only and (check or attach):
        raise click.UsageError("--config-only has no weights to check or attach")
    began = time.monotonic()
    absent = missing_exporter() if check or not attach else None
    if absent is not None:  # before a checkpoint is downloaded, and without importing any
        raise ExportError(f"exporting needs {absent}; install it with `{how_to_install('export')}`")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_place(out)
        folder = TemporaryDirectory(".part", f".{out.name}.", out.parent)
    except OSError as error:
        raise ExportError(f"cannot write {out} ({error.strerror}); choose another --out") from error
    with folder as aside, progress("export") as show:
        # A graph takes its place only once it has passed.
        graph, report = _export(
            checkpoint, out, Path(aside) / out.name, check, config_only, attach, revision,
            lambda stage: show(None, stage),
        )  # fmt: skip
    facts = _facts(graph, report, time.monotonic() - began)
    print(json.dumps(facts) if as_json else _lines(facts))


def _export(
    name: str,
    out: Path,
    place: Path,
    check: bool,
    config_only: bool,
    attach: bool,
    revision: str | None,
    show: Callable[[str], None],
) -> tuple[ExportedGraph, ParityReport | None]:
    from specrt_export.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(name, revision, config_only, weight_only=config_only)
    if (checkpoint.gguf is not None or checkpoint.coded) and not config_only:
        kind = "holds weights in codes" if checkpoint.gguf is None else "is a GGUF file"
        raise ExportError(
            f"{name} {kind}, and a graph points at the floats of a folder; export it with "
            "--config-only, or name it as `checkpoint` in a recipe and build that"
        )
    if check:
        checkpoint.check_numbers()
    if attach:
        from specrt_export.portable.attachment import attach_graph

        graph = attach_graph(out, checkpoint, place)
    else:
        # After the checkpoint was opened, because importing torch takes seconds.
        from specrt_export.portable.exporter import export_graph

        graph = export_graph(checkpoint, place, progress=show)
    if config_only:
        return _moved(graph, place, out), None
    from specrt_export.portable.attachment import check_weights

    check_weights(place, checkpoint)
    report = _compare(checkpoint, place, show) if check else None
    return _moved(graph, place, out), report


def _compare(checkpoint: Checkpoint, graph: Path, show: Callable[[str], None]) -> ParityReport:
    from specrt_export.check.equivalence import check_parity

    show("check")
    return check_parity(checkpoint, graph)


def _moved(graph: ExportedGraph, place: Path, out: Path) -> ExportedGraph:
    """Move a graph, and those next to it, to where they were asked for."""
    from specrt_export.portable.graph import PARTS, part_path

    places = {part_path(place, part): part_path(out, part) for part in PARTS}
    parts = tuple(replace(part, path=part.path.replace(places[part.path])) for part in graph.parts)
    return replace(graph, path=place.replace(out), parts=parts)


def _facts(graph: ExportedGraph, report: ParityReport | None, seconds: float) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts: dict[str, Any] = {
        "path": str(graph.path),
        "nodes": graph.nodes,
        "bytes": graph.bytes,
        "seconds": round(seconds, 1),
        # Linux counts in kibibytes, macOS in bytes.
        "peak_memory_bytes": peak if sys.platform == "darwin" else peak * 1024,
        "geometry": asdict(graph.geometry),
    }
    if graph.parts:
        facts["parts"] = [
            {"path": str(part.path), "nodes": part.nodes, "bytes": part.bytes}
            for part in graph.parts
        ]
    if report is not None:
        facts["parity"] = {**asdict(report), "error": report.error}
    return facts


def _lines(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['path']}: {facts['nodes']} nodes, {facts['bytes'] / 1e3:.0f} kB, "
        f"{facts['seconds']:.1f} s, peak memory {size(facts['peak_memory_bytes'])}"
    ]
    lines += [
        f"{part['path']}: {part['nodes']} nodes, {part['bytes'] / 1e3:.0f} kB"
        for part in facts.get("parts", ())
    ]
    parity = facts.get("parity")
    if parity:
        cases = parity["cases"]
        rows, equal = sum(c["rows"] for c in cases), sum(c["argmax_equal"] for c in cases)
        lines.append(
            f"parity: error {parity['error']:.1e} of the largest logit (tolerance "
            f"{parity['tolerance']:.0e}), argmax equal in {equal} of {rows} rows: "
            + ", ".join(c["name"] for c in cases)
        )
        lines += [f"window {w} is longer than the check goes" for w in parity["unreached"]]
    return "\n".join(lines)
