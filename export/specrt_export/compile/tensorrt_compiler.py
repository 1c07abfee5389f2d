"""Compiles a portable graph for TensorRT or TensorRT for RTX: lower, then build the plan."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.head_engine import HeadEngine
from specrt.engine.ort import check_hidden, silent_options, widths
from specrt.engine.protocol import (
    Candidates,
    Confidence,
    Engine,
    Feed,
    Logits,
    Tokens,
    check_bounds,
)
from specrt.engine.tensorrt.engine_record import FILE_NAME, KV_LENGTH, PLAN, least_length
from specrt.engine.tensorrt.library import NATIVE, Library, open_library, parse_version
from specrt.errors import BuildError, first_line
from specrt.speculation.drafters import PENDING
from specrt.system.gpu import survey
from specrt.system.memory import available_bytes
from specrt_export.compile.compiler import (
    KV_BYTES,
    CompiledModel,
    GraphSource,
    LoweredModel,
    MadeUpTarget,
    Progress,
)
from specrt_export.compile.network import CURRENT, check_options, profiles
from specrt_export.compile.plan_builder import SUFFIX, build_plan
from specrt_export.heads.eagle3_format import HIDDEN, KIND
from specrt_export.lint import lint
from specrt_export.lower.half import widened_folder
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS, stored_weights, write_engine
from specrt_export.lower.logits import CANDIDATES
from specrt_export.lower.tensorrt_lowering import (
    TensorRtTarget,
    form_of,
    lower_tensorrt,
    mark_decomposable,
)
from specrt_export.portable.graph import (
    MODEL_TYPE,
    check_length,
    facts_of,
    feature_width,
    geometry_of,
    read_graph,
    repeated,
    runs_here,
    scored_entries,
)
from specrt_export.recipe import Recipe

CAPABLE = {"fp8": (8, 9), "bf16": (8, 0)}
"""The first compute capability that has a type."""


def compute_type(precision: str) -> str:
    """Return what a plan computes in, from what the weights of its layers are stored as."""
    return precision if precision in KV_BYTES else "fp16"


class TensorRtCompiler:
    """The compiler of `tensorrt` and `tensorrt-rtx`; see `Compiler`."""

    def __init__(self, recipe: Recipe, backend: str, library: Library | None = None) -> None:
        self.recipe = recipe
        self.library = library or open_library(backend)

    @property
    def parser(self) -> tuple[int, ...]:
        """The version of TensorRT that decides about the form."""
        if self.recipe.tensorrt.version:
            return parse_version(self.recipe.tensorrt.version)
        # TensorRT for RTX counts its own versions; its parser is that of TensorRT 11.
        return (11, 0) if self.library.native else self.library.number

    @property
    def kv_lengths(self) -> tuple[int, ...]:
        """How much passes may read of the KV buffers, the last one all; none where all read all."""
        lengths = self.recipe.tensorrt.kv_lengths
        return (*lengths, self.recipe.engine.max_length) if lengths else ()

    def check(self, role: str, *, measured: bool) -> None:
        """Refuse settings that the library does not offer here; what takes long comes later."""
        options = self.recipe.tensorrt.plan
        try:
            check_options(options, self.library, gpu=not survey().problem)
            self._check_capabilities(options.capabilities, self.recipe.precisions[role].names)
        except BuildError as error:
            raise BuildError(f"{self.recipe.path}: [tensorrt] {error}") from error
        if self.kv_lengths and form_of(self.parser) != NATIVE:
            raise BuildError(
                f"{self.recipe.path}: [tensorrt] kv_lengths is "
                f"{list(self.recipe.tensorrt.kv_lengths)}, and passes of {self.library.title} "
                "write whole KV buffers; remove it"
            )
        if measured and form_of(self.parser) == NATIVE and not runs_here():
            raise BuildError(
                f"onnxruntime {ort.__version__} cannot run the graph that the plan is made "
                "of, and quality.calibration asks for its quality; build with onnxruntime 1.25 or "
                "later, which needs Python 3.11 or later"
            )

    def _check_capabilities(
        self, capabilities: tuple[str, ...], precisions: tuple[str, ...]
    ) -> None:
        for name, least in CAPABLE.items():
            named = [c for c in capabilities if c != CURRENT]
            lacking = [c for c in named if parse_version(c)[:2] < least]
            if name in precisions and lacking:
                first = ".".join(map(str, least))
                raise BuildError(
                    f"capabilities holds {', '.join(lacking)}, and {name} needs {first} or later; "
                    "remove it, or take another precision"
                )

    def versions(self) -> dict[str, str]:
        """Return the versions of ONNX Runtime, which checks the graph, and of the library."""
        return {"onnxruntime": ort.__version__, self.library.backend: self.library.version}

    def lower(self, role: str, source: GraphSource, folder: Path) -> LoweredModel:
        """Write the lowered graph, which ONNX Runtime runs too."""
        options = self.recipe.engine
        portable = read_graph(source.graph)
        geometry = geometry_of(portable)
        compute = compute_type(self.recipe.precisions[role].layers)
        check_length(geometry, options.max_length, source.weights)
        target = TensorRtTarget(
            geometry, options.max_length, options.batch, compute, form_of(self.parser),
            # What a draft of some entries finds likeliest is read from the scores, which are few.
            candidates=0 if scored_entries(portable) is not None else self._candidates(geometry),
            confidence=role == "draft",
            grouped_queries=self.recipe.tensorrt.grouped_queries,
            reads_prefix=bool(self.kv_lengths),
        )  # fmt: skip
        lowered = lower_tensorrt(portable, stored_weights(portable, source.weights), target)
        folder.mkdir(parents=True)
        write_engine(lowered.model, lowered.weights, folder)
        kind = facts_of(portable).get(MODEL_TYPE, "unknown")
        return LoweredModel(
            role, folder, geometry, compute, kind, lowered.fused,
            features=feature_width(portable), warning=self._memory_warning(geometry, compute),
        )  # fmt: skip

    def _candidates(self, geometry: Geometry) -> int:
        return min(self.recipe.tensorrt.candidates, geometry.vocab_size)

    def _memory_warning(self, geometry: Geometry, compute: str) -> str:
        """Say that the check of the lowered graph may lack memory; empty where it has enough.

        It holds KV buffers twice: those a pass reads, and those it makes.
        """
        options = self.recipe.engine
        needed = 2 * geometry.kv_bytes(options.batch, options.max_length, KV_BYTES[compute])
        free = available_bytes()
        if not runs_here() or free is None or needed <= free:
            return ""
        return (
            f"checking the lowered graph takes {needed >> 20} MiB for KV buffers of "
            f"{options.max_length} positions, and {free >> 20} MiB are free; if it fails, lower "
            "max_length, or build on a machine with more memory"
        )

    @contextmanager
    def score(
        self, lowered: LoweredModel, max_width: int, *, exact: bool = False
    ) -> Iterator[Engine]:
        """Open the lowered graph; one in bf16, which has no CPU kernels, in fp32."""
        options = self.recipe.engine
        with tempfile.TemporaryDirectory(dir=lowered.folder.parent) as scratch:
            path = widened_folder(lowered.folder, Path(scratch)) / ENGINE
            engine = LoweredEngine(
                path, lowered.geometry, batch=options.batch, max_length=options.max_length,
                kv_lengths=self.kv_lengths,
            )  # fmt: skip
            try:
                yield self._as_head(engine, lowered) if lowered.model_type == KIND else engine
            finally:
                engine.close()

    def _as_head(self, engine: LoweredEngine, lowered: LoweredModel) -> LoweredHead:
        """Return a head with something to read, as there is no target beside it."""
        options = self.recipe.engine
        target = MadeUpTarget((options.batch, options.max_length, lowered.features))
        return LoweredHead(engine, target.features)

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        """Build the plan, write its record beside it, and keep its timing cache."""
        path = lowered.folder / ENGINE
        graph = onnx.load(path, load_external_data=False)
        mark_decomposable(graph)
        _check(graph, self.parser, lowered.folder)
        path.write_bytes(graph.SerializeToString(deterministic=True))
        out.mkdir(parents=True, exist_ok=True)
        timing = (out / PLAN).with_suffix(SUFFIX)
        if (previous / timing.name).is_file():
            shutil.copyfile(previous / timing.name, timing)
        recipe = self.recipe
        options = replace(
            recipe.tensorrt.plan,
            candidates=next((_last(o) for o in graph.graph.output if o.name == CANDIDATES[0]), 0),
            capabilities=self._capabilities(graph),
        )
        report = build_plan(
            path, out / PLAN, self.library,
            profiles(
                lowered.role, recipe.engine.prefill, recipe.engine.gammas, self.kv_lengths,
                self._catch_up(lowered),
            ),
            options, progress, form=form_of(self.parser), timing_cache=timing,
        )  # fmt: skip
        (out / FILE_NAME).write_text(report.record.to_json(), encoding="utf-8")
        if options.stripped:  # what the plan is filled from, on the device
            for name in (ENGINE, WEIGHTS):
                shutil.move(lowered.folder / name, out / name)
        return CompiledModel(PLAN, report.record.weight_bytes)

    def _catch_up(self, lowered: LoweredModel) -> int:
        """Return how many tokens a draft lacks at most after a round of its own."""
        most = max(self.recipe.engine.gammas, default=0) + 1
        return max(PENDING, most) if lowered.model_type == KIND else PENDING

    def _capabilities(self, graph: onnx.ModelProto) -> tuple[str, ...]:
        """Return what to build for; where the recipe names none, all that has a graph's types.

        TensorRT for RTX leaves others out of its own accord, but the plan lists them all the same.
        """
        named = self.recipe.tensorrt.capabilities
        known: tuple[str, ...] = tuple(self.library.capabilities)
        if named or not known:
            return named
        kinds = {t.data_type for t in graph.graph.initializer}
        if onnx.TensorProto.FLOAT8E4M3FN not in kinds:
            return ()
        return tuple(c for c in known if parse_version(c)[:2] >= CAPABLE["fp8"])


def _last(value: onnx.ValueInfoProto) -> int:
    """Return the last dimension of a value."""
    return int(value.type.tensor_type.shape.dim[-1].dim_value)


def _check(graph: onnx.ModelProto, version: tuple[int, ...], folder: Path) -> None:
    """Refuse a graph that TensorRT would refuse or misread.

    Raises: BuildError with the first reason and remedy.
    """
    major, minor = version[:2]
    findings = [f for f in lint(graph, (major, minor), folder) if f.severity != "slow"]
    if findings:
        one = findings[0]
        more = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
        raise BuildError(
            f"TensorRT {major}.{minor} would not take the lowered graph: "
            f"{one.node}: {one.reason}; {one.remedy}{more}"
        )


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

    @property
    def state(self) -> NDArray[np.float32] | None:
        """What a head goes on from, [B, R, H] f32."""
        return self.values.get("state")


class LoweredEngine:
    """An engine over a lowered graph of standard operators; slow, and exact about what it means.

    KV buffers are handed in and taken back in every pass, so both forms of caches run here.
    `kv_lengths` are what passes may read of them, where they say so. `features` are those that a
    target leaves, [B, M, H] f32; None where it has no head.
    """

    def __init__(
        self, path: Path, geometry: Geometry, *, batch: int, max_length: int,
        kv_lengths: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.batch = batch
        self.max_length = self.max_width = max_length
        self._path, self._kv_lengths = path, kv_lengths
        options = silent_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Only checks run here, beside other work: waiting threads must not take its cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with _blamed(path):
            self._session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self._names = [output.name for output in self._session.get_outputs()]
        left = widths(self._session.get_outputs()).get("feature")
        self.features = np.zeros((batch, max_length, left), np.float32) if left else None
        self._caches = {
            value.name: np.zeros(value.shape, _TYPES[value.type])
            for value in self._session.get_inputs()
            if value.name.partition(".")[0] in ("key", "value")
        }

    def forward(
        self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> _Output:  # fmt: skip
        """Run one pass; see `Engine.forward`.

        Shapes: `hidden` is [B, S, H], of a head.
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
        if self._kv_lengths:
            length = least_length(self._kv_lengths, int(starts.max()) + width)
            feed[KV_LENGTH] = np.zeros(length, np.int64)
        if hidden is not None:
            feed[HIDDEN] = hidden
        with _blamed(self._path):
            values = dict(zip(self._names, self._session.run(self._names, feed), strict=True))
        self._caches = {name: values[f"present_{name}"] for name in self._caches}
        if self.features is not None:
            for row, at in enumerate(starts.tolist()):
                self.features[row, at : at + width] = values["feature"][row]
        return _Output(values)

    def repeat(self, filled: int) -> None:
        """Fill the KV buffers with copies of their first positions, whatever is there."""
        self._caches = {name: repeated(one, filled) for name, one in self._caches.items()}

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first positions of a row's KV buffers to another row's."""
        for cache in self._caches.values():
            cache[to, :, :length] = cache[source, :, :length]

    def close(self) -> None:
        """Drop the session and the KV buffers."""
        self._caches = {}
        self._session = None


class LoweredRows:
    """A lowered head whose rows are fed together, each what it reads beside its tokens."""

    def __init__(self, engine: LoweredEngine) -> None:
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self.close = engine.close
        self.forward = engine.forward
        self._engine = engine

    def forward_rows(self, feeds: Sequence[Feed]) -> list[_Output]:
        """Run one pass; see `PackedEngine.forward_rows`."""
        rows = [feed.row for feed in feeds]
        assert rows == [*range(self.batch)], "a check feeds all rows"
        tokens = np.stack([np.array(feed.tokens, np.int64) for feed in feeds])
        hidden = np.stack([check_hidden(feed) for feed in feeds])
        output = self._engine.forward(tokens, [f.start for f in feeds], feeds[0].rows, hidden)
        return [
            _Output({name: value[row : row + 1] for name, value in output.values.items()})
            for row in rows
        ]

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first positions of a row; see `PackedEngine.copy_row`."""
        self._engine.copy_row(source, to, length)


class LoweredHead(HeadEngine):
    """A lowered head, all rows in passes of one width."""

    def __init__(self, engine: LoweredEngine, features: NDArray[np.float32]) -> None:
        super().__init__(LoweredRows(engine), features)
        self.repeat = engine.repeat


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Say of a graph that ONNX Runtime refuses whose fault it is."""
    try:
        yield
    except Exception as error:  # the library's exceptions have no common class
        raise BuildError(
            f"ONNX Runtime {ort.__version__} does not run the lowered graph {path.name}: "
            f"{first_line(error)[:300]}. This is a defect of the lowering: please report "
            "the architecture"
        ) from error
