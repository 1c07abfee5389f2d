"""Compiles a portable graph for TensorRT or TensorRT for RTX: lower, then build the plan."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import CHAIN_HEAD, EncoderRecord
from specrt.engine.head_engine import HeadEngine
from specrt.engine.ort.ort_engine import check_hidden, silent_options, widths
from specrt.engine.protocol import (
    Candidates,
    Confidence,
    Engine,
    EngineTraits,
    Feed,
    Logits,
    Source,
    Tokens,
    check_bounds,
)
from specrt.engine.state_bases import StateBases
from specrt.engine.tensorrt.engine_record import (
    CROSS,
    ENCODER,
    FEATURES,
    KV_LENGTH,
    LENGTH,
    PLAN,
    SOURCE_LENGTH,
    EngineRecord,
    Profile,
    SourceShape,
    least_length,
)
from specrt.engine.tensorrt.library import NATIVE, Library, open_library, parse_version
from specrt.errors import BuildError, first_line
from specrt.geometry import BASE, NEXT_BASE, Geometry
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
    encoder_record,
)
from specrt_export.compile.network import CURRENT, check_options, profiles, source_profiles
from specrt_export.compile.plan_builder import SUFFIX, build_plan
from specrt_export.heads.eagle3_format import HIDDEN
from specrt_export.lint import lint
from specrt_export.lower.half import widened_folder
from specrt_export.lower.lazy_tensor import ENGINE, stored_weights, write_engine
from specrt_export.lower.logits import CANDIDATES
from specrt_export.lower.tensorrt_encoder import lower_tensorrt_encoder
from specrt_export.lower.tensorrt_lowering import (
    TensorRtTarget,
    form_of,
    lower_tensorrt,
    mark_decomposable,
)
from specrt_export.portable.experts_function import mixes
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
    source_of,
)
from specrt_export.recipe.model_options import ModelOptions

CAPABLE = {"fp8": (8, 9), "bf16": (8, 0)}
"""The first compute capability that has a type."""


def compute_type(precision: str) -> str:
    """Return what a plan computes in, from what the weights of its layers are stored as."""
    return precision if precision in KV_BYTES else "fp16"


class TensorRtCompiler:
    """The compiler of `tensorrt` and `tensorrt-rtx`; see `Compiler`."""

    def __init__(self, model: ModelOptions, library: Library | None = None) -> None:
        self.model = model
        self.library = library or open_library(model.backend)

    @property
    def parser(self) -> tuple[int, ...]:
        """The version of TensorRT that decides about the form."""
        if self.model.tensorrt.version:
            return parse_version(self.model.tensorrt.version)
        # TensorRT for RTX counts its own versions; its parser is that of TensorRT 11.
        return (11, 0) if self.library.native else self.library.number

    @property
    def kv_lengths(self) -> tuple[int, ...]:
        """How much passes may read of the KV buffers, the last one all; none where all read all."""
        lengths = self.model.tensorrt.kv_lengths
        return (*lengths, self.model.engine.max_length) if lengths else ()

    def check(self, *, measured: bool) -> None:
        """Refuse settings that the library does not offer here; what takes long comes later."""
        options = self.model.tensorrt.plan
        try:
            check_options(options, self.library, gpu=not survey().problem)
            self._check_capabilities(options.capabilities, self.model.precision.names)
        except BuildError as error:
            raise BuildError(f"{self.model.recipe}: [tensorrt] {error}") from error
        if self.kv_lengths and form_of(self.parser) != NATIVE:
            raise BuildError(
                f"{self.model.recipe}: [tensorrt] kv_lengths is "
                f"{list(self.model.tensorrt.kv_lengths)}, and passes of {self.library.title} "
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

    def lower(self, source: GraphSource, folder: Path) -> LoweredModel:
        """Write the lowered graph, which ONNX Runtime runs too."""
        options = self.model.engine
        portable = read_graph(source.graph)
        geometry = geometry_of(portable)
        compute = compute_type(self.model.precision.layers)
        check_length(geometry, options.max_length, source.weights)
        self.model.check_layers(geometry, mixes=mixes(portable))
        sources = source_of(portable)
        positions = 0
        if sources is not None:
            positions = options.source_positions(
                sources.max_source, features=bool(sources.features)
            )
        target = TensorRtTarget(
            geometry, options.max_length, options.batch, compute, form_of(self.parser),
            # What a draft of some entries finds likeliest is read from the scores, which are few.
            candidates=0 if scored_entries(portable) is not None else self._candidates(geometry),
            confidence=self.model.role == "draft",
            grouped_queries=self.model.tensorrt.grouped_queries,
            reads_prefix=bool(self.kv_lengths), max_source=positions, max_width=options.max_width,
        )  # fmt: skip
        lowered = lower_tensorrt(portable, stored_weights(portable, source.weights), target)
        folder.mkdir(parents=True)
        write_engine(lowered.model, lowered.weights, folder)
        fused, encoder = lowered.fused, None
        if sources is not None:
            for part, path in source.parts.items():
                own = read_graph(path)
                made = lower_tensorrt_encoder(own, stored_weights(own, source.weights), target)
                write_engine(made.model, made.weights, folder, part)
                fused |= {f"{part} {rewrite}": ratio for rewrite, ratio in made.fused.items()}
            encoder = encoder_record(sources, positions, source.parts)
        kind = facts_of(portable).get(MODEL_TYPE, "unknown")
        return LoweredModel(
            self.model.role, folder, geometry, compute, kind, fused,
            features=feature_width(portable), encoder=encoder,
            warning=self._memory_warning(geometry, compute),
        )  # fmt: skip

    def _candidates(self, geometry: Geometry) -> int:
        return min(self.model.tensorrt.candidates, geometry.vocab_size)

    def _memory_warning(self, geometry: Geometry, compute: str) -> str:
        """Say that the check of the lowered graph may lack memory; empty where it has enough.

        It holds KV buffers twice: those a pass reads, and those it makes.
        """
        options = self.model.engine
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
        options = self.model.engine
        with tempfile.TemporaryDirectory(dir=lowered.folder.parent) as scratch:
            path = widened_folder(lowered.folder, Path(scratch)) / ENGINE
            make: Callable[..., LoweredEngine] = LoweredEngine
            if lowered.encoder is not None:
                make = partial(LoweredEncoderDecoder, lowered.encoder)
            engine = make(
                path, lowered.geometry, batch=options.batch, max_length=options.max_length,
                kv_lengths=self.kv_lengths, max_width=options.max_width,
            )  # fmt: skip
            try:
                is_head = lowered.engine_kind == CHAIN_HEAD
                yield self._as_head(engine, lowered) if is_head else engine
            finally:
                engine.close()

    def _as_head(self, engine: LoweredEngine, lowered: LoweredModel) -> LoweredHead:
        """Return a head with something to read, as there is no target next to it."""
        options = self.model.engine
        target = MadeUpTarget((options.batch, options.max_length, lowered.features))
        return LoweredHead(engine, target.features)

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        """Build the plan, write its record next to it, and keep its timing cache.

        Of an encoder-decoder the plans of its encoder and cross projections, too.
        """
        encoder, engine = lowered.encoder, self.model.engine
        parts = {"engine": profiles(
            lowered.role, engine.prefill, engine.gammas, self.kv_lengths,
            self._catch_up(lowered),
        )}  # fmt: skip
        shape = None
        if encoder is not None:
            shape = _source_shape(encoder, lowered.folder)
            names = (CROSS, ENCODER) if encoder.encoder else (CROSS,)
            parts |= {part: source_profiles(part, shape) for part in names}
        weight_bytes = 0
        for number, (part, listed) in enumerate(parts.items()):

            def part_of(stage: str, done: float, number: int = number) -> None:
                progress(stage, (number + done) / len(parts))

            place = _Place(lowered.folder / f"{part}.onnx", out, previous)
            built = self._compile(place, listed, part_of, shape, lowered.compute)
            weight_bytes += built.weight_bytes
        if encoder is not None:
            own = f"{ENCODER}.plan" if encoder.encoder else ""
            encoder = replace(encoder, cross=f"{CROSS}.plan", encoder=own)
        return CompiledModel(PLAN, weight_bytes, encoder)

    def _compile(
        self, place: _Place, listed: tuple[Profile, ...], progress: Progress,
        source: SourceShape | None, compute: str,
    ) -> EngineRecord:  # fmt: skip
        """Build the plan of one lowered graph, and write its record; return that."""
        path, out = place.graph, place.out
        graph = onnx.load(path, load_external_data=False)
        mark_decomposable(graph)
        _check(graph, self.parser, path.parent)
        path.write_bytes(graph.SerializeToString(deterministic=True))
        out.mkdir(parents=True, exist_ok=True)
        plan = out / f"{path.stem}.plan"
        timing = plan.with_suffix(SUFFIX)
        if (place.previous / timing.name).is_file():
            shutil.copyfile(place.previous / timing.name, timing)
        options = replace(
            self.model.tensorrt.plan,
            candidates=next((_last(o) for o in graph.graph.output if o.name == CANDIDATES[0]), 0),
            capabilities=self._capabilities(graph),
        )
        record = build_plan(
            path, plan, self.library, listed, options, progress, form=form_of(self.parser),
            timing_cache=timing, source=source, compute=compute,
        ).record  # fmt: skip
        plan.with_suffix(".json").write_text(record.to_json(), encoding="utf-8")
        if options.stripped:  # what the plan is filled from, on the device
            for name in (path.name, f"{path.stem}.data"):
                shutil.move(path.with_name(name), out / name)
        return record

    def _catch_up(self, lowered: LoweredModel) -> int:
        """Return how many tokens a draft lacks at most after a round of its own."""
        most = max(self.model.engine.gammas, default=0) + 1
        return max(PENDING, most) if lowered.engine_kind == CHAIN_HEAD else PENDING

    def _capabilities(self, graph: onnx.ModelProto) -> tuple[str, ...]:
        """Return what to build for; where the recipe names none, all that has a graph's types.

        TensorRT for RTX leaves others out of its own accord, but the plan lists them all the same.
        """
        named = self.model.tensorrt.capabilities
        known: tuple[str, ...] = tuple(self.library.capabilities)
        if named or not known:
            return named
        kinds = {t.data_type for t in graph.graph.initializer}
        if onnx.TensorProto.FLOAT8E4M3FN not in kinds:
            return ()
        return tuple(c for c in known if parse_version(c)[:2] >= CAPABLE["fp8"])


class _Place(NamedTuple):
    """A lowered graph, the folder of its plan, and where an older one may be."""

    graph: Path
    out: Path
    previous: Path


def _source_shape(encoder: EncoderRecord, folder: Path) -> SourceShape:
    """Return the sizes of a source, given what conditions a decoder in a folder."""
    source = source_of(onnx.load(folder / encoder.cross, load_external_data=False))
    assert source is not None, "a lowered graph keeps the facts of the portable one"
    return SourceShape(
        encoder.max_source, encoder.width, encoder.heads, encoder.head_dim, source.vocab_size,
        encoder.features, encoder.frames,
    )  # fmt: skip


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
    target leaves, [B, M, H] f32; None where it has no head. With states passes have up to
    `max_width` tokens, others any number.
    """

    def __init__(
        self, path: Path, geometry: Geometry, *, batch: int, max_length: int,
        kv_lengths: Sequence[int] = (), max_width: int = 0,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.batch = batch
        self.max_length = max_length
        self.max_width = self.max_rows = max_width if geometry.recurs else max_length
        self._bases = StateBases(batch)
        self._path, self._kv_lengths = path, kv_lengths
        self._session = _session(path)
        self._names = [output.name for output in self._session.get_outputs()]
        left = widths(self._session.get_outputs()).get("feature")
        self.features = np.zeros((batch, max_length, left), np.float32) if left else None
        self.traits = EngineTraits(features=self.features, rewind=self._bases.least)
        self._caches = {
            value.name: np.zeros(value.shape, _TYPES[value.type])
            for value in self._session.get_inputs()
            if value.name in geometry.buffers
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
            **self._beside(),
        }
        if self.geometry.recurs:
            for row, at in enumerate(starts.tolist()):
                self._bases.advance(row, at, width)
            feed |= {BASE: self._bases.base, NEXT_BASE: self._bases.next}
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

    def _beside(self) -> dict[str, NDArray[Any]]:
        """Return what a pass reads besides its tokens and KV buffers."""
        return {}

    def repeat(self, filled: int, base: int) -> None:
        """Fill the KV buffers as `GraphRun.repeat` does."""
        self._caches = repeated(self.geometry, self._caches, filled)
        self._bases.next[:] = base

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first positions of a row's KV buffers to another row's."""
        for cache in self._caches.values():
            cache[to, :, :length] = cache[source, :, :length]

    def close(self) -> None:
        """Drop the session and the KV buffers."""
        self._caches = {}
        self._session = None


class LoweredEncoderDecoder(LoweredEngine):
    """A lowered decoder whose rows are texts of sources, and what conditions it."""

    def __init__(
        self, record: EncoderRecord, path: Path, geometry: Geometry, *, batch: int,
        max_length: int, kv_lengths: Sequence[int] = (), max_width: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            path, geometry, batch=batch, max_length=max_length, kv_lengths=kv_lengths,
            max_width=max_width,
        )  # fmt: skip
        self.max_source = record.max_source
        self._record = record
        self._parts = {
            name: _session(path.with_name(name)) for name in (record.cross, record.encoder) if name
        }
        kinds = {i.name: _TYPES[i.type] for i in self._session.get_inputs() if i.type in _TYPES}
        shape = batch, record.heads, record.max_source, record.head_dim
        self._conditions = {
            SOURCE_LENGTH: np.zeros(batch, np.int64),
            **{n: np.zeros(shape, kind) for n, kind in kinds.items() if n.startswith("cross_")},
        }

    def condition(self, row: int, source: Source) -> None:
        """Read a source for a row; see `ConditionedEngine.condition`.

        Without an encoder a source is hidden states [E, W].
        """
        hidden, record = np.asarray(source, np.float32), self._record
        if record.encoder:
            feed: dict[str, NDArray[Any]] = {"input_ids": np.asarray(source)[None]}
            if record.features:
                feed = {FEATURES: hidden[None]}
            hidden = self._run(record.encoder, feed)["hidden"][0]
        length = len(hidden)
        # What lies after a source may be anything.
        whole = np.full((1, record.max_source, record.width), np.nan, np.float32)
        whole[0, :length] = hidden
        pairs = self._run(record.cross, {"hidden": whole, LENGTH: np.array([length])})
        for name, pair in pairs.items():
            self._conditions[name][row] = pair[0]
        self._conditions[SOURCE_LENGTH][row] = length

    def _run(self, name: str, feed: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        session = self._parts[name]
        names = [output.name for output in session.get_outputs()]
        with _blamed(self._path.with_name(name)):
            return dict(zip(names, session.run(names, feed), strict=True))

    def _beside(self) -> dict[str, NDArray[Any]]:
        return self._conditions

    def forward_rows(self, feeds: Sequence[Feed]) -> list[_Output]:
        """Run a pass of each of some rows; see `PackedEngine.forward_rows`."""
        outputs = []
        for feed in feeds:
            kept = self._caches
            tokens = np.broadcast_to(np.array(feed.tokens), (self.batch, len(feed.tokens)))
            values = self.forward(tokens, feed.start, feed.rows).values
            only = np.arange(self.batch) == feed.row
            self._caches = {
                name: np.where(only[:, None, None, None], made, kept[name])
                for name, made in self._caches.items()
            }
            outputs.append(_Output({n: v[feed.row : feed.row + 1] for n, v in values.items()}))
        return outputs

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first positions of a row and its source; see `PackedEngine.copy_row`."""
        super().copy_row(source, to, length)
        for value in self._conditions.values():
            value[to] = value[source]

    def close(self) -> None:
        """Drop the sessions and all buffers."""
        super().close()
        self._parts.clear()
        self._conditions.clear()


class LoweredRows:
    """A lowered head whose rows are fed together, each what it reads next to its tokens."""

    def __init__(self, engine: LoweredEngine) -> None:
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self.max_rows, self.traits = engine.max_rows, engine.traits
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


def _session(path: Path) -> ort.InferenceSession:
    """Open a lowered graph as it is."""
    options = silent_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Only checks run here, next to other work: waiting threads must not take its cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with _blamed(path):
        return ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])


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
