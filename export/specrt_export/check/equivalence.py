"""Compares an engine, or a lowered graph, with the portable graph it was made from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.backends import open_engine
from specrt.engine.ort_cuda import OrtCudaEngine
from specrt.engine.protocol import (
    Candidates,
    Confidence,
    Engine,
    Feed,
    Logits,
    Output,
    PackedEngine,
    Tokens,
    check_bounds,
)
from specrt.errors import BuildError
from specrt_export.compile.engine_file import ENGINE, write_engine
from specrt_export.lower.lazy_tensor import LazyTensor, as_float, stored_weights
from specrt_export.lower.logits import CANDIDATES
from specrt_export.portable.graph import PASS_BYTES, GraphRun, repeated, runs_here

_FLOAT, _BF16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16

TOLERANCES = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Largest error of a logit over the spread of its row. fp32 only sums in another order; fp16 rounds
by up to 5e-4, bf16 by up to 4e-3; a pass rounds a few times a layer, in all directions. Seen: 8e-4
and 1e-3 on codelet's eight layers, 2e-3 and 1.4e-2 on random models whose scores hang on every bit.
A wrong rotation, length or scale moves logits by a tenth of the spread and more."""


def check_ort_cuda(
    graph: Path, weights: Path, engine: Path, geometry: Geometry, max_length: int,
    widths: Sequence[int],
) -> float | None:  # fmt: skip
    """Run engine and portable graph on the same tokens; return the largest relative error.

    The CPU provider runs an fp16 engine as it is, computing in fp32 where it has no kernel, and a
    bf16 one with its weights widened. Returns None where the ONNX Runtime installed is too old to
    run the portable graph.
    Raises: BuildError above the tolerance.
    """
    if not runs_here():
        return None
    plan = passes(geometry, max_length, widths)
    widest = max(width for _, width in plan)
    with on_cpu(engine, geometry, max_length, widest) as halved:
        return _hold(GraphRun(graph, weights), halved, plan, compute_type_of(engine))


def _hold(
    reference: GraphRun, engine: Engine, plan: Sequence[tuple[int, int]], compute: str
) -> float:
    """Run engine and portable graph through (start, width) passes; return the largest error.

    Raises: BuildError above the tolerance of what the engine computes in.
    """
    reach = max(start + width for start, width in plan)
    reference.reset(batch=1, length=reach)
    tokens = np.random.default_rng(0).integers(0, engine.geometry.vocab_size, (1, reach))
    tolerance, worst = TOLERANCES[compute], 0.0
    for start, width in plan:
        piece = tokens[:, start : start + width]
        expected = reference(piece, [start], range(width))[0]
        found = engine.forward(piece, start).logits
        error = float(np.abs(found - expected).max()) / (float(np.ptp(expected)) or 1.0)
        if not error <= tolerance:  # also when either is not a number
            raise BuildError(
                f"the ort-cuda engine differs from the portable graph by {error:.1e} of the "
                f"spread of the logits at position {start}, width {width}; expected below "
                f"{tolerance:.0e}. In fp16 the model may overflow: build with precision bf16"
            )
        worst = max(worst, error)
    return worst


@contextmanager
def on_cpu(engine: Path, geometry: Geometry, max_length: int, max_width: int) -> Iterator[Engine]:
    """Open the ort-cuda engine of a folder on the CPU provider."""
    with tempfile.TemporaryDirectory(dir=engine.parent) as scratch:
        folder = runnable(engine, Path(scratch))
        opened = OrtCudaEngine(
            folder / ENGINE, geometry, batch=1, max_length=max_length, max_width=max_width,
            device="cpu",
        )  # fmt: skip
        try:
            yield opened
        finally:
            opened.close()


def runnable(engine: Path, scratch: Path) -> Path:
    """Return the engine's folder, or one with a copy in fp32: bf16 has no CPU kernels."""
    if compute_type_of(engine) != "bf16":
        return engine
    model = onnx.load(engine / ENGINE, load_external_data=False)
    widened = {
        name: as_float(weight) if weight.onnx_type == _BF16 else weight
        for name, weight in stored_weights(model, engine).items()
    }
    write_engine(_widened(model, widened), widened, scratch)
    return scratch


def compute_type_of(engine: Path) -> str:
    """Return what the engine of a folder computes in: the type of its KV buffers."""
    model = onnx.load(engine / ENGINE, load_external_data=False)
    kinds = {i.type.tensor_type.elem_type for i in model.graph.input if i.name.startswith("key.")}
    return {_BF16: "bf16", _FLOAT: "fp32"}.get(kinds.pop(), "fp16")


def _widened(model: onnx.ModelProto, weights: dict[str, LazyTensor]) -> onnx.ModelProto:
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == _BF16:
            value.type.tensor_type.elem_type = _FLOAT
    for tensor in model.graph.initializer:
        if tensor.data_type == _BF16 and tensor.name not in weights:
            upper = np.frombuffer(tensor.raw_data, np.uint16).astype(np.uint32)
            tensor.raw_data = (upper << 16).tobytes()
        if tensor.data_type == _BF16:
            tensor.data_type = _FLOAT
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == _BF16:
                attribute.i = _FLOAT
    return model


def passes(geometry: Geometry, max_length: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, width) of each pass: past the windows, then each width twice.

    The second time goes back to the positions of the first, over stale keys.
    """
    prefill = max(1, min(past_windows(geometry), max_length - max(widths)))
    starts = {width: min(prefill, max_length - width) for width in widths}
    passes = [(starts[width], width) for width in widths for _ in range(2)]
    return [(0, prefill), *passes]


TOLERANCE = 2e-4
"""Largest error of a logit over the spread of its row; fp32 sums in another order give 1e-6."""

_RAGGED = 4
"""Lengths that rows of a batch have."""

_RAGGED_PASSES = 6
"""Passes of some of the rows."""

_FP32 = 1
"""MatMulNBits' `accuracy_level` of sums and activations in fp32; 4 has int8 activations."""


def check_engine(
    graph: Path, checkpoint: Path, engine: Path, geometry: Geometry, max_length: int,
    widths: list[int], batch: int = 1,
) -> float | None:  # fmt: skip
    """Run engine and portable graph on the same tokens; return the largest relative error.

    A prefill that reaches past every sliding window of up to 512 positions, then a pass of each
    width, then the same positions again over stale keys. Rows of a batch are at lengths of their
    own, and then take part in some passes and not in others, each as wide as it is. Products of
    quantized weights are computed in fp32 here: the engine itself rounds activations too, which
    would hide a defect of the lowering. Returns None where the ONNX Runtime installed is too old to
    run the portable graph.
    Raises: BuildError above the tolerance.
    """
    if not runs_here():
        return None
    plan = _plan(geometry, max_length, widths)
    reach = max(start + width for start, width in plan)
    reference = GraphRun(graph, checkpoint)
    reference.reset(batch, reach)
    tokens = np.random.default_rng(0).integers(0, geometry.vocab_size, (batch, reach))
    with exact(engine / ENGINE) as path:
        compiled = open_engine(
            "ort-cpu", path, geometry, batch=batch, max_length=max_length,
            max_width=max(width for _, width in plan), threads=1,
        )  # fmt: skip
        try:
            errors = [
                _compare_engine(reference, compiled, tokens, start, width) for start, width in plan
            ]
            if isinstance(compiled, PackedEngine):
                errors += _compare_ragged(reference, compiled, tokens, max(widths))
        finally:
            compiled.close()
    return max(errors)


def _compare_engine(
    reference: GraphRun, compiled: Engine, tokens: Tokens, start: int, width: int
) -> float:
    """Run one pass with both; return the error, unless it is above the tolerance."""
    starts = [start - row % min(_RAGGED, start + 1) for row in range(len(tokens))]
    piece = np.stack([t[at : at + width] for t, at in zip(tokens, starts, strict=True)])
    scored = min(width, _most(compiled))
    expected = reference(piece, starts, range(width - scored, width))[0]
    return _error(expected, compiled.forward(piece, starts, scored).logits, start, width)


def _compare_ragged(
    reference: GraphRun, compiled: PackedEngine, tokens: Tokens, widest: int
) -> list[float]:
    """Run passes of some rows, of different widths, from where each of them is rolled back to.

    The reference runs all rows equally wide: what it writes beyond a row is overwritten before it
    is read, as each row goes on where its own tokens end.
    """
    rng, errors = np.random.default_rng(1), []
    batch, reach = tokens.shape
    widest = min(widest, _most(compiled), reach)
    lengths = rng.integers(0, reach - widest + 1, batch)
    for _ in range(_RAGGED_PASSES):
        fed = np.flatnonzero(rng.random(batch) < 0.7).tolist() or [0]
        piece = rng.integers(0, compiled.geometry.vocab_size, (batch, widest))
        feeds = []
        for row in rng.permutation(fed).tolist():
            width = int(rng.integers(1, widest + 1))
            feeds.append(Feed(row, piece[row, :width].tolist(), int(lengths[row]), width))
        expected = reference(piece, lengths.tolist(), range(widest))[0]
        for feed, made in zip(feeds, compiled.forward_rows(feeds), strict=True):
            wanted = expected[feed.row, : feed.rows]
            errors.append(_error(wanted, made.logits[0], feed.start, feed.rows))
            lengths[feed.row] = min(feed.start + feed.rows, reach - widest)
    return errors


def _most(compiled: Engine) -> int:
    """Return how many positions of every row are scored in a pass."""
    return max(1, PASS_BYTES // (4 * compiled.batch * compiled.geometry.vocab_size))


def _error(expected: Logits, found: Logits, start: int, width: int) -> float:
    """Return how far logits are from what was expected of them.

    Raises: BuildError above the tolerance.
    """
    spread = float(expected.max() - expected.min()) or 1.0
    error = float(np.abs(found - expected).max()) / spread
    if not error <= TOLERANCE:  # also when either is not a number
        raise BuildError(
            f"the compiled engine differs from the portable graph by {error:.1e} of the spread of "
            f"the logits at position {start}, width {width}; expected below {TOLERANCE:.0e}. This "
            "is a defect of the lowering: please report the architecture"
        )
    return error


@contextmanager
def exact(engine: Path) -> Iterator[Path]:
    """Give a copy of an engine that computes products of quantized weights in fp32.

    The copy reads the engine's own weights, and is gone afterwards.
    """
    model = onnx.load(engine, load_external_data=False)
    levels = [a for node in model.graph.node for a in node.attribute if a.name == "accuracy_level"]
    if not levels:
        yield engine
        return
    for level in levels:
        level.i = _FP32
    copy = engine.with_name("exact.onnx")
    copy.write_bytes(model.SerializeToString())
    try:
        yield copy
    finally:
        copy.unlink()


def past_windows(geometry: Geometry) -> int:
    """Return how many positions lie past every sliding window of up to 512.

    Going past wider ones takes too long; their layers are compared only within them.
    """
    return max((w for w in geometry.windows if w <= 512), default=0) + 24


def _plan(geometry: Geometry, max_length: int, widths: list[int]) -> list[tuple[int, int]]:
    """Return the (start, width) of each pass: past the windows, then each width twice."""
    prefill = max(1, min(past_windows(geometry), max_length - sum(widths)))
    passes = [(prefill + again * width, width) for width in widths for again in (0, 1)]
    return [(0, prefill), *((at, width) for at, width in passes if at + width <= max_length)]


_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class _Output:
    values: Mapping[str, NDArray[Any]]

    @property
    def argmax(self) -> Tokens:
        """The most likely next tokens, [B, R] int64."""
        return self.values["argmax"]

    @property
    def logits(self) -> Logits:
        """The scores, [B, R, V] f32."""
        return self.values["logits"]

    @property
    def confidence(self) -> Confidence | None:
        """Probability of each row's likeliest token, where the graph computes it."""
        return self.values.get("confidence")

    @property
    def candidates(self) -> Candidates | None:
        """The best scores of each row and their ids, where the graph cuts them out."""
        scores, ids = (self.values.get(name) for name in CANDIDATES)
        return None if scores is None or ids is None else (scores, ids)


class LoweredEngine:
    """An engine over a lowered graph of standard operators; slow, and exact about what it means.

    KV buffers are handed in and taken back in every pass, so both forms of caches run here.
    """

    def __init__(self, path: Path, geometry: Geometry, *, batch: int, max_length: int) -> None:
        self.geometry = geometry
        self.batch = batch
        self.max_length = self.max_width = max_length
        self._path = path
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        # Only checks run here, beside other work: waiting threads must not take its cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with _blamed(path):
            self._session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self._names = [output.name for output in self._session.get_outputs()]
        self._caches = {
            value.name: np.zeros(value.shape, _TYPES[value.type])
            for value in self._session.get_inputs()
            if value.name.partition(".")[0] in ("key", "value")
        }

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> _Output:
        """Run one pass; see `Engine.forward`.

        Raises: BuildError for a graph that does not run.
        """
        fed = np.asarray(tokens, np.int64)
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,))
        width = fed.shape[1]
        check_bounds(self, width, int(starts.min()), int(starts.max()))
        feed = {
            "input_ids": fed,
            "start": starts,
            "rows": np.arange(width - (rows or width), width),
            **self._caches,
        }
        with _blamed(self._path):
            found = dict(zip(self._names, self._session.run(self._names, feed), strict=True))
        self._caches = {name: found[f"present_{name}"] for name in self._caches}
        return _Output(found)

    def repeat(self, filled: int) -> None:
        """Fill the KV buffers with copies of their first positions, whatever is there."""
        self._caches = {name: repeated(one, filled) for name, one in self._caches.items()}

    def close(self) -> None:
        """Drop the session and the KV buffers."""
        self._caches = {}
        self._session = None


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Say of a graph that ONNX Runtime refuses whose fault it is."""
    try:
        yield
    except Exception as error:  # the library's exceptions have no common class
        raise BuildError(
            f"ONNX Runtime {ort.__version__} does not run the lowered graph {path.name}: "
            f"{str(error).splitlines()[0][:300]}. This is a defect of the lowering: please report "
            "the architecture"
        ) from error


@contextmanager
def lowered_engine(
    folder: Path, geometry: Geometry, *, batch: int, max_length: int
) -> Iterator[LoweredEngine]:
    """Open the lowered graph of a folder; one in bf16, which has no CPU kernels, in fp32."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = runnable(folder, Path(scratch)) / ENGINE
        engine = LoweredEngine(place, geometry, batch=batch, max_length=max_length)
        try:
            yield engine
        finally:
            engine.close()


FAR_BYTES = 1 << 30
"""Most memory that the portable graph's KV buffers take for passes at the end of the context."""

_SHARE_ERROR = 1e-3

_DEFECT = "This is a defect of the lowering: please report the architecture"

_OVERFLOW = "In fp16 the model may overflow: build with precision bf16"


def check_lowered(
    reference: GraphRun, engine: LoweredEngine, widths: Sequence[int], compute: str, name: str
) -> float:
    """Run both through the same passes; return the largest error of a logit over the spread.

    Past the windows, each width twice, then each width once more at the end of the context, over
    copies of the keys written so far. Rows of a batch are at lengths of their own.
    Raises: BuildError above the tolerance, or where argmax, confidence or candidates are not those
    of the logits beside them.
    """
    near = passes(reference.geometry, engine.max_length, widths)
    reach = _reach(reference, engine, max(start + width for start, width in near))
    reference.reset(batch=engine.batch, length=reach)
    shape = engine.batch, reach
    tokens = np.random.default_rng(0).integers(0, reference.geometry.vocab_size, shape)
    errors = [_compare_lowered(reference, engine, tokens, at, compute, name) for at in near]
    filled = near[0][1]
    reference.repeat(filled)
    engine.repeat(filled)
    for width in widths:
        far = reach - width, width
        errors.append(_compare_lowered(reference, engine, tokens, far, compute, name))
    return max(errors)


def _reach(reference: GraphRun, engine: LoweredEngine, least: int) -> int:
    """Return the length of buffers that the portable graph has memory for."""
    one = reference.geometry
    position = 2 * 4 * engine.batch * one.layers * one.kv_heads * one.head_dim
    return min(engine.max_length, max(least, FAR_BYTES // position))


def _compare_lowered(
    reference: GraphRun, engine: LoweredEngine, tokens: Tokens, at: tuple[int, int], compute: str,
    name: str,
) -> float:  # fmt: skip
    start, width = at
    starts = [start - row % min(_RAGGED, start + 1) for row in range(len(tokens))]
    piece = np.stack([t[s : s + width] for t, s in zip(tokens, starts, strict=True)])
    scored = min(width, max(1, PASS_BYTES // (4 * len(tokens) * reference.geometry.vocab_size)))
    expected = reference(piece, starts, range(width - scored, width))[0]
    found = engine.forward(piece, starts, scored)
    error = float(np.abs(found.logits - expected).max()) / (float(np.ptp(expected)) or 1.0)
    place = f"at position {start}, width {width}"
    if not error <= TOLERANCES[compute]:  # also when either is not a number
        raise BuildError(
            f"the graph lowered for {name} differs from the portable graph by {error:.1e} of the "
            f"spread of the logits {place}; expected below {TOLERANCES[compute]:.0e}. "
            f"{_OVERFLOW if compute == 'fp16' else _DEFECT}"
        )
    wrong = _misread(found)
    if wrong:
        raise BuildError(
            f"the graph lowered for {name} says a wrong {wrong} of its logits {place}. {_DEFECT}"
        )
    return error


def _misread(found: Output) -> str:
    """Name what a graph reads from its logits wrongly; empty where all is right."""
    logits = found.logits.astype(np.float64)
    if (found.argmax != logits.argmax(-1)).any():
        return "argmax"
    if found.confidence is not None:
        shares = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        if not np.allclose(found.confidence, shares, atol=_SHARE_ERROR):
            return "confidence"
    if found.candidates is None:
        return ""
    scores, ids = found.candidates
    best = -np.sort(-found.logits, axis=-1)[..., : scores.shape[-1]]
    named = np.take_along_axis(found.logits, ids, axis=-1)
    right = np.array_equal(scores, best) and np.array_equal(named, best)
    return "" if right and _apart(ids) else "list of candidates"


def _apart(ids: NDArray[np.int64]) -> bool:
    """Tell whether no row names an id twice."""
    return bool((np.diff(np.sort(ids, axis=-1), axis=-1) > 0).all())
