"""Portable graphs: their facts, their checkpoints, and running them as the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from specrt.engine.ort.ort_engine import silent_options
from specrt.errors import BuildError, ExportError
from specrt.geometry import BASE, Geometry, moves
from specrt.records import read
from specrt_export.heads.dflash_format import CONTEXT
from specrt_export.heads.eagle3_format import HIDDEN
from specrt_export.portable.external_data import (
    MappedWeight,
    external_tensors,
    location,
    map_weights,
)

ATTACHED = "specrt.attached"


GEOMETRY = "specrt.geometry"


MODEL_TYPE = "specrt.model_type"


PRECISION = "specrt.precision"
"""What a quantized graph stores its weights as; no other graph has it."""

PART = "specrt.part"
"""Of an encoder-decoder: "encoder" or "cross"; its decoder, like any other, has none."""

PARTS = ("cross", "encoder")

TASK = "specrt.task"

SOURCE = "specrt.source"
"""The sizes of what a decoder attends to besides its text."""

TIED = "specrt.tied"
"""Of a graph without weights: those that one is tied to, unless a checkpoint holds both."""

OPTIONAL = "specrt.optional"
"""Of a graph without weights: those that it holds itself, where a checkpoint leaves them out."""

STRIPS = "specrt.strips"
"""Of a graph without weights: those that a checkpoint may hold in strips of rows, and their names.
"""

EXACT = "specrt.exact"
"""Modules whose products fp16 is too small for, by the last part of their names."""

CODED = "coded"
"""Location of a weight that its checkpoint holds in codes; no file has this name."""


TYPES = {
    "F32": onnx.TensorProto.FLOAT,
    "F16": onnx.TensorProto.FLOAT16,
    "BF16": onnx.TensorProto.BFLOAT16,
}
"""What a checkpoint may store weights as, in safetensors' names and ONNX's numbers."""


@dataclass(frozen=True)
class SourceGeometry:
    """The sizes of what a decoder attends to besides its text."""

    max_source: int
    """Most positions of hidden states."""
    width: int
    """Of a hidden state."""
    heads: int
    """Of cross keys and values."""
    head_dim: int
    vocab_size: int = 0
    """Token ids that a source is of; 0 where it is features."""
    features: int = 0
    """Channels of a source of features; 0 where a source is token ids."""
    frames: int = 0
    """Of a source of features: how many it has, always."""

    def to_json(self) -> dict[str, int]:
        """Return the sizes as plain JSON types."""
        return asdict(self)


def source_of(model: onnx.ModelProto) -> SourceGeometry | None:
    """Return the sizes of a graph's source; None of a graph that has none.

    Raises: ExportError.
    """
    written = facts_of(model).get(SOURCE)
    if written is None:
        return None
    try:
        return read(SourceGeometry, json.loads(written), "source")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(
            f"the sizes of the graph's source cannot be read ({error}); export it again with "
            "`specrt export`"
        ) from error


def exact_modules(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the modules of a graph whose products fp16 is too small for."""
    return tuple(json.loads(facts_of(model).get(EXACT, "[]")))


def part_path(decoder: Path, part: str) -> Path:
    """Return where the encoder or the cross of a decoder's graph lies: next to it.

    Of `decoder.onnx` they are `encoder.onnx` and `cross.onnx`, of `target.onnx`
    `target.encoder.onnx` and `target.cross.onnx`.
    """
    stem = "" if decoder.stem == "decoder" else f"{decoder.stem}."
    return decoder.with_name(f"{stem}{part}{decoder.suffix}")


def parts_beside(decoder: Path) -> dict[str, Path]:
    """Return the graphs next to a decoder's that make what it attends to of a source, by part."""
    places = {part: part_path(decoder, part) for part in PARTS}
    return {part: path for part, path in places.items() if path.is_file()}


SOURCE_IDS = "source_ids"
"""What an encoder's token ids are called in a graph that holds a decoder, too."""


def whole_graph(decoder: Path) -> onnx.ModelProto:
    """Read a decoder's graph with those that condition it before it, as one graph.

    ```
    source_ids ─ encoder ─ hidden ─ cross ─ cross_key.i, cross_value.i ─ decoder ─ logits
    ```
    An encoder's `length` is `source_length`. Weights and what joins the graphs keep their names. A
    decoder of no source is returned as it is; one without an encoder reads `hidden`.
    Raises: ExportError.
    """
    whole = read_graph(decoder)
    if source_of(whole) is None:
        return whole
    joints = {"input_features", "hidden", *(value.name for value in whole.graph.input)}
    found = parts_beside(decoder)
    parts = [_apart(read_graph(found[part]), part, joints) for part in reversed(PARTS)
             if part in found]  # fmt: skip
    graphs = [*parts, whole.graph]
    one = onnx.GraphProto(name=whole.graph.name, output=whole.graph.output)
    one.node.extend(node for graph in graphs for node in graph.node)
    made = {name for node in one.node for name in node.output}
    inputs = {value.name: value for graph in graphs for value in graph.input}
    one.input.extend(value for name, value in inputs.items() if name not in made)
    tensors = {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
    one.initializer.extend(tensors.values())
    whole.graph.CopyFrom(one)
    return whole


def _apart(model: onnx.ModelProto, part: str, joints: set[str]) -> onnx.GraphProto:
    """Return a graph whose names are its own, except weights and `joints`."""
    kept = joints | {tensor.name for tensor in external_tensors(model)} | {""}
    known = {name: name for name in kept} | {"input_ids": SOURCE_IDS, "length": "source_length"}
    graph = model.graph
    for node in graph.node:
        node.name = f"{part}/{node.name}"
        for names in (node.input, node.output):
            names[:] = [known.get(name, f"{part}/{name}") for name in names]
    for one in (*graph.input, *graph.initializer):
        one.name = known.get(one.name, f"{part}/{one.name}")
    return graph


Tokens = NDArray[np.int64]


Logits = NDArray[np.float32]


def load_graph(path: Path) -> onnx.ModelProto:
    """Read an ONNX graph without its weights.

    Raises: ExportError.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except MemoryError:
        raise
    except Exception as error:  # the library passes on whatever its parser raises
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ExportError(
            f"{path} is not an ONNX graph ({reason}); make it with `specrt export`"
        ) from error


def read_graph(path: Path) -> onnx.ModelProto:
    """Read a portable graph without its weights.

    Raises: ExportError when the file is not a portable graph, or has no weights to it yet.
    """
    model = load_graph(path)
    if GEOMETRY not in facts_of(model):
        raise ExportError(
            f"{path} does not describe its geometry; make it with `specrt export`, because other "
            "ONNX graphs do not follow the same contract"
        )
    if facts_of(model).get(ATTACHED) != "true":
        raise ExportError(
            f"{path} was exported from a config and has no weights yet; give it a checkpoint with "
            f"`specrt export CHECKPOINT --attach --out {path}`"
        )
    return model


def facts_of(model: onnx.ModelProto) -> dict[str, str]:
    """Return what the exporter wrote about a graph."""
    return {entry.key: entry.value for entry in model.metadata_props}


def geometry_of(model: onnx.ModelProto) -> Geometry:
    """Return the geometry of a graph that `read_graph` read."""
    try:
        return read(Geometry, json.loads(facts_of(model)[GEOMETRY]), "geometry")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(
            f"the graph's geometry cannot be read ({error}); export it again with `specrt export`"
        ) from error


def feature_width(model: onnx.ModelProto) -> int:
    """Return the width of what a graph leaves for a head, or reads as one; 0 of others."""
    values = [o for o in model.graph.output if o.name == "feature"]
    values += [i for i in model.graph.input if i.name in (HIDDEN, CONTEXT)]
    widths = [int(value.type.tensor_type.shape.dim[-1].dim_value) for value in values]
    return max(widths, default=0)


def check_length(geometry: Geometry, max_length: int, checkpoint: Path) -> None:
    """Refuse more positions than a model was trained for.

    Raises: BuildError.
    """
    if max_length > geometry.max_positions:
        raise BuildError(
            f"max_length {max_length} is more than the {geometry.max_positions} positions "
            f"{checkpoint} was trained for; lower `max_length` in the recipe"
        )


PASS_BYTES = 64 << 20
"""Logits of one pass; a larger vocabulary is scored in narrower passes."""


LARGE_BYTES = 1 << 30
"""Weights from which on no fp32 copy of all of them is made to run a graph."""


def runs_here() -> bool:
    """Tell whether the ONNX Runtime installed here can run a portable graph (opset 24)."""
    major, minor = (int(part) for part in ort.__version__.split(".")[:2])
    return (major, minor) >= (1, 25)


def check_name(folder: Path) -> None:
    """Refuse a folder whose name ONNX Runtime does not take.

    Raises: BuildError.
    """
    try:
        str(folder).encode("utf-8")
    except UnicodeEncodeError:
        raise BuildError(
            f"{str(folder)!r} is not UTF-8, which ONNX Runtime takes alone for a folder that it "
            "reads; build elsewhere with --out, or rename what lies there"
        ) from None


def open_session(
    model: onnx.ModelProto, folder: Path
) -> tuple[ort.InferenceSession, dict[str, Any]]:
    """Open a graph on the CPU provider; also return the mapped weights that it may read.

    Raises: BuildError, CheckpointError.
    """
    check_name(folder)
    weights = map_weights(model, folder)
    linked = _linked(model, weights, folder)
    options = silent_options()
    # ONNX Runtime maps files that it opens itself, and copies what it is handed.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    options.add_external_initializers(list(linked), list(linked.values()))
    # Folding would cast and transpose every weight into memory of its own.
    large = sum(weight.array.nbytes for weight in weights) > LARGE_BYTES
    options.enable_cpu_mem_arena = not large
    session = ort.InferenceSession(
        model.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["ConstantFolding"] if large else [],
    )
    return session, linked


class SourceRun:
    """What makes the cross keys and values of sources, on the CPU provider."""

    def __init__(
        self, cross: onnx.ModelProto, encoder: onnx.ModelProto | None, folder: Path
    ) -> None:
        geometry = source_of(cross)
        assert geometry is not None, "a cross graph has the sizes of its source"
        self.geometry = geometry
        self._cross, self._weights = open_session(cross, folder)
        self._encoder = None if encoder is None else open_session(encoder, folder)

    @classmethod
    def beside(cls, decoder: Path, folder: Path) -> SourceRun:
        """Open the graphs that lie next to a decoder's.

        Raises: ExportError.
        """
        encoder = part_path(decoder, "encoder")
        cross = read_graph(part_path(decoder, "cross"))
        return cls(cross, read_graph(encoder) if encoder.is_file() else None, folder)

    @property
    def encodes(self) -> bool:
        """Whether it has an encoder; without one, hidden states are its sources."""
        return self._encoder is not None

    def __call__(
        self, sources: Sequence[NDArray[Any]]
    ) -> tuple[dict[str, NDArray[np.float32]], Tokens]:
        """Return cross keys and values by name, each [B, H, E, D], and the length of each source.

        Sources are token ids, or features; without an encoder of its own, hidden states [E, W].
        """
        hidden, lengths = self.hidden(sources)
        names = [output.name for output in self._cross.get_outputs()]
        found = self._cross.run(names, {"hidden": hidden})
        return dict(zip(names, found, strict=True)), lengths

    def hidden(self, sources: Sequence[NDArray[Any]]) -> tuple[NDArray[np.float32], Tokens]:
        """Return the hidden states [B, E, W] of sources, and how many of each are not padding."""
        if self._encoder is None:
            return padded(sources), np.array([len(one) for one in sources], np.int64)
        session, _ = self._encoder
        if self.geometry.features:
            (hidden,) = session.run(["hidden"], {"input_features": np.stack(sources)})
            return hidden, np.full(len(sources), hidden.shape[1], np.int64)
        lengths = np.array([len(one) for one in sources], np.int64)
        feed = {"input_ids": padded(sources), "length": lengths}
        return session.run(["hidden"], feed)[0], lengths

    def states(self, sources: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
        """Return the hidden states [E, W] of each source, read one by one."""
        return [self.hidden([source])[0][0] for source in sources]


def padded(sources: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return sources [E, ...] as one array, each with copies of its first position after it."""
    longest = max(len(one) for one in sources)
    filled: NDArray[Any] = np.stack(
        [np.concatenate([one, np.repeat(one[:1], longest - len(one), axis=0)]) for one in sources]
    )
    return filled


class GraphRun:
    """A portable graph on the CPU provider, its weights mapped from the folders that hold them.

    Of an encoder-decoder it is the decoder's, and `condition` comes before the first pass.
    """

    def __init__(
        self, graph: Path | onnx.ModelProto, folder: Path, source: SourceRun | None = None
    ) -> None:
        model = graph if isinstance(graph, onnx.ModelProto) else read_graph(graph)
        self.geometry = geometry_of(model)
        self.entries = scored_entries(model)
        if source is None and isinstance(graph, Path) and source_of(model) is not None:
            source = SourceRun.beside(graph, folder)
        self.source = source
        # Held as long as the session is: it may read the mapped bytes in place.
        self._session, self._weights = open_session(model, folder)
        self.lent: dict[str, NDArray[np.float32]] = {}
        """What a head reads of its target, by its inputs: rings, or all positions."""
        self._buffers: dict[str, NDArray[np.float32]] = {}
        self._base = np.zeros(0, np.int64)
        self._conditions: dict[str, NDArray[Any]] = {}

    def condition(self, sources: Sequence[NDArray[Any]]) -> None:
        """Read a source for each row of the passes that follow; see `SourceRun`."""
        assert self.source is not None, "only an encoder-decoder has sources"
        pairs, lengths = self.source(sources)
        self._conditions = {"source_length": lengths, **pairs}

    def reset(self, batch: int, length: int) -> None:
        """Start over with KV buffers of `batch` rows and `length` positions."""
        # Not zero: what lies beyond a row's length must not matter.
        self._buffers = self.geometry.filled(batch, length, 3.0)
        for name, buffer in self.lent.items():
            self._buffers[name] = _copies(buffer, buffer.shape[2], length)
        self._base = np.zeros(batch, np.int64)

    def repeat(self, filled: int, base: int) -> None:
        """Fill the KV buffers with copies of their first positions, whatever is there.

        States, and the rings next to them, begin anew at `base`.
        """
        self._buffers = repeated(self.geometry, self._buffers, filled)
        self._base[:] = base

    def __call__(
        self, tokens: Tokens, start: Sequence[int], rows: Sequence[int]
    ) -> tuple[Logits, Tokens]:
        """Feed tokens [B, S] at `start` of each row; return logits [B, R, V] and argmax [B, R]."""
        logits, argmax = self.outputs(("logits", "argmax"), tokens, start, rows)
        return logits, argmax

    def outputs(
        self, wanted: Sequence[str], tokens: Tokens, start: Sequence[int], rows: Sequence[int],
        **beside: NDArray[Any] | None,
    ) -> list[Any]:  # fmt: skip
        """Feed tokens, and what a head reads `beside`, by its input; return outputs by name."""
        feed = {
            "input_ids": tokens,
            "start": np.array(start, np.int64),
            "rows": np.array(rows, np.int64),
            **self._conditions,
            **self._buffers,
        }
        if self.geometry.recurs:
            # Rings hold all positions here, so that a row may go back, and its state begin anew.
            feed[BASE] = np.where(feed["start"] < self._base, 0, self._base)
            self._base = feed["start"]
        feed |= {name: value for name, value in beside.items() if value is not None}
        written = self.geometry.buffers
        found = self._session.run([*wanted, *(f"present_{n}" for n in written)], feed)
        self._buffers |= zip(written, found[len(wanted) :], strict=True)
        return list(found[: len(wanted)])


def scored_entries(model: onnx.ModelProto) -> Tokens | None:
    """Return the id of each entry that a graph scores; None where it scores all.

    The graph looks up what `argmax` is, in ids after which there is one for no number.
    """
    made = next((n for n in model.graph.node if "argmax" in n.output), None)
    if made is None or made.op_type != "Gather":
        return None
    found = next((t for t in model.graph.initializer if t.name == made.input[0]), None)
    ids: Tokens | None = None if found is None else onnx.numpy_helper.to_array(found)[:-1]
    return ids


def repeated(
    geometry: Geometry, buffers: Mapping[str, NDArray[Any]], filled: int
) -> dict[str, NDArray[Any]]:
    """Return KV buffers of copies of their first positions; zeros of states and rings there."""
    return {
        name: np.zeros_like(one)
        if geometry.recurs and moves(name)
        else _copies(one, filled, one.shape[2])
        for name, one in buffers.items()
    }


def _copies(buffer: NDArray[Any], filled: int, length: int) -> NDArray[Any]:
    """Return a KV buffer [B, Hkv, length, D] of copies of the first positions of another."""
    copied: NDArray[Any] = buffer[:, :, np.arange(length) % filled]
    return copied


def divergences(one: Logits, other: Logits) -> NDArray[np.float64]:
    """Return the KL divergence of each row [R, V] of logits, in nats; infinite for no numbers."""
    first, second = _log_softmax(one), _log_softmax(other)
    weight = np.exp(first)
    with np.errstate(invalid="ignore"):  # -inf in both, of a token that cannot be
        terms = np.where(weight != 0, weight * (first - second), 0.0).sum(-1)
    return np.where(np.isnan(terms), np.inf, terms)


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _linked(
    model: onnx.ModelProto, weights: Sequence[MappedWeight], folder: Path
) -> dict[str, Any]:
    """Wrap the weights of files that are links, as in hub caches: ONNX Runtime follows none."""
    places = {tensor.name: location(tensor) for tensor in external_tensors(model)}
    links = {place for place in places.values() if (folder / place).is_symlink()}
    return {
        weight.name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(weight.array, weight.onnx_type)
        for weight in weights
        if places[weight.name] in links
    }
