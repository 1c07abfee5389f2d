"""Passes of one width and so many rows: captured once and launched, or enqueued each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specrt.engine.protocol import Confidence, Logits, Tokens
from specrt.engine.tensorrt.device import (
    CudaDevice,
    CudaGraph,
    CudaStaging,
    Field,
    Layout,
    Memory,
    aligned,
)
from specrt.engine.tensorrt.engine_record import (
    ENCODER,
    FEATURE,
    FEATURES,
    HIDDEN,
    KV_LENGTH,
    LENGTH,
    SOURCE_LENGTH,
    STATE,
    EngineRecord,
    PassShape,
    kv_sets,
)
from specrt.engine.tensorrt.library import DECOMPOSED, NATIVE
from specrt.engine.tensorrt.plan import ITEM_BYTES, Tensor, TrtContext, TrtPlan
from specrt.errors import EngineError
from specrt.geometry import Geometry, is_exact

KV_TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

CANDIDATES = ("candidates.values", "candidates.ids")

ANY = -1


def cross_names(geometry: Geometry) -> list[str]:
    """Return the names of cross keys and values, of a decoder inputs."""
    return [f"cross_{name}" for name in geometry.buffers]


def cross_row_bytes(record: EngineRecord) -> int:
    """Return the bytes of the cross keys, or the values, that a layer has of one source."""
    source = record.source
    assert source is not None, "only plans of encoder-decoders have sources"
    item = ITEM_BYTES[KV_TYPES[record.compute]]
    return prod((source.heads, source.positions, source.head_dim)) * item


def state_widths(record: EngineRecord) -> dict[str, int]:
    """Return the tensors that only a target with a head has, or only a head, and their widths.

    Shapes: feature and hidden [B, S, width] f32, state [B, R, width] f32.
    """
    widths = {FEATURE: record.feature, HIDDEN: record.hidden, STATE: record.hidden}
    return {name: width for name, width in widths.items() if width}


def expected(
    record: EngineRecord, geometry: Geometry, batch: int, max_length: int
) -> dict[str, Tensor]:
    """Return the tensors that a plan of this record must have."""
    if record.part:
        return _expected_of_part(record, geometry)
    rows = (batch, ANY)
    tensors = {
        "input_ids": Tensor(rows, "int64", True),
        "start": Tensor((batch,), "int64", True),
        "rows": Tensor((ANY,), "int64", True),
        "argmax": Tensor(rows, "int64", False),
        "logits": Tensor((*rows, record.scored or geometry.vocab_size), "float32", False),
    }
    for name, width in state_widths(record).items():
        tensors[name] = Tensor((*rows, width), "float32", name == HIDDEN)
    if record.kv_lengths:
        tensors[KV_LENGTH] = Tensor((ANY,), "int64", True)
    if record.confidence:
        tensors["confidence"] = Tensor(rows, "float32", False)
    if record.candidates:
        for name, kind in zip(CANDIDATES, ("float32", "int64"), strict=True):
            tensors[name] = Tensor((*rows, record.candidates), kind, False)
    tensors |= _expected_buffers(record, geometry, batch, max_length)
    if record.source is not None:
        source = record.source
        shape = batch, source.heads, source.positions, source.head_dim
        tensors[SOURCE_LENGTH] = Tensor((batch,), "int64", True)
        for name in cross_names(geometry):
            tensors[name] = Tensor(shape, KV_TYPES[record.compute], True)
    return tensors


def _expected_buffers(
    record: EngineRecord, geometry: Geometry, batch: int, max_length: int
) -> dict[str, Tensor]:
    """Return the tensors of what the layers remember."""
    tensors = dict.fromkeys(geometry.bases, Tensor((batch,), "int64", True))
    for name, shape in geometry.shapes(batch, max_length).items():
        for bound, is_input in ((name, True), (f"present_{name}", False)):
            tensors[bound] = Tensor(shape, _kv_type(record, name), is_input)
    return tensors


def _kv_type(record: EngineRecord, name: str) -> str:
    return "float32" if is_exact(name) else KV_TYPES[record.compute]


def _expected_of_part(record: EngineRecord, geometry: Geometry) -> dict[str, Tensor]:
    """Return the tensors of an encoder, or of cross projections."""
    source = record.source
    assert source is not None, "the record of a part has the sizes of its source"
    if record.part == ENCODER:
        length = source.positions if source.features else ANY
        given = {"input_ids": Tensor((1, ANY), "int64", True)}
        if source.features:
            given = {FEATURES: Tensor((1, source.features, source.frames), "float32", True)}
        return {**given, HIDDEN: Tensor((1, length, source.width), "float32", False)}
    shape = (1, source.heads, source.positions, source.head_dim)
    made = {n: Tensor(shape, KV_TYPES[record.compute], False) for n in cross_names(geometry)}
    return {
        HIDDEN: Tensor((1, source.positions, source.width), "float32", True),
        LENGTH: Tensor((1,), "int64", True),
        **made,
    }


def check_plan(
    plan: TrtPlan, record: EngineRecord, geometry: Geometry, batch: int, max_length: int
) -> None:
    """Refuse a plan that is not what its record and the manifest say.

    Raises: EngineError with both.
    """
    if record.compute not in KV_TYPES or record.form not in (NATIVE, DECOMPOSED):
        raise _mismatch(f"computes in {record.compute}, form {record.form}", "fp16, bf16 or fp32, "
                     "native or decomposed")  # fmt: skip
    wanted = expected(record, geometry, batch, max_length)
    for name, tensor in wanted.items():
        actual = plan.tensors.get(name)
        if actual is None:
            raise _mismatch(f"has no tensor {name}", _description(tensor))
        if not _matches(actual, tensor):
            raise _mismatch(f"has {name} as {_description(actual)}", _description(tensor))
    unknown = sorted(plan.tensors.keys() - wanted.keys())
    if unknown:
        raise _mismatch(f"has a tensor {unknown[0]}", "that there is none")
    if record.form == NATIVE and not record.part:
        _check_aliases(plan, geometry)


def _check_aliases(plan: TrtPlan, geometry: Geometry) -> None:
    for name in geometry.in_place:
        alias = plan.aliases(f"present_{name}")
        if alias not in ("", name):
            raise _mismatch(f"writes present_{name} into {alias}", f"that it goes into {name}")


def _matches(actual: Tensor, wanted: Tensor) -> bool:
    """Compare; a plan whose profiles all have one size may have it where others have none."""
    return (
        (actual.type, actual.is_input, len(actual.shape))
        == (wanted.type, wanted.is_input, len(wanted.shape))
    ) and all(w in (f, ANY) for f, w in zip(actual.shape, wanted.shape, strict=True))


def _description(tensor: Tensor) -> str:
    side = "input" if tensor.is_input else "output"
    return f"{side} {list(tensor.shape)} of {tensor.type}"


def _mismatch(actual: str, wanted: str) -> EngineError:
    return EngineError(
        f"the plan {actual}, and its record and the manifest say {wanted}; they do not belong "
        "together: build the bundle again"
    )


PURPOSE = "KV buffers"


class Caches:
    """One set of KV buffers that every context updates in place, or two that swap after a pass.

    Of plans that update keys in place, two of what is next to states. `parity` says which set the
    next pass reads; where there is one set it stays 0. Both sets are cleared, because attention may
    read what it then multiplies by 0.
    """

    def __init__(
        self, memory: Memory, record: EngineRecord, geometry: Geometry, batch: int, max_length: int
    ) -> None:
        self._row_bytes = {
            name: prod(shape) * ITEM_BYTES[_kv_type(record, name)]
            for name, shape in geometry.shapes(1, max_length).items()
        }
        self._device = memory.device
        in_place = geometry.in_place if kv_sets(record.form) == 1 else ()
        swapped = [name for name in self._row_bytes if name not in in_place]
        self.sets = 2 if swapped else 1
        self.parity = 0
        sizes = {name: aligned(batch * size) for name, size in self._row_bytes.items()}
        at = memory.take(sum(sizes.values()) + sum(sizes[name] for name in swapped), PURPOSE)
        self._places: list[dict[str, int]] = [{}]
        for name, size in sizes.items():
            self._places[0][name] = at
            at += size
        if swapped:
            self._places.append(dict(self._places[0]))
        for name in swapped:
            self._places[1][name] = at
            at += sizes[name]

    def bind(self, context: TrtContext, parity: int) -> None:
        """Let a context read one set and write the other, or the same where there is one."""
        written = self._places[(parity + 1) % self.sets]
        for name, place in self._places[parity].items():
            context.set_address(name, place)
            context.set_address(f"present_{name}", written[name])

    def copy_row(self, source: int, to: int) -> None:
        """Copy a row of what the next pass reads to another; wait for `CudaDevice.wait`."""
        for name, place in self._places[self.parity].items():
            size = self._row_bytes[name]
            self._device.copy(place + to * size, place + source * size, size)

    def swap(self) -> None:
        """Note that a pass has written the other set."""
        self.parity = (self.parity + 1) % self.sets


class SourceBuffer:
    """What passes of a decoder read of the sources of its rows.

    Shapes: cross keys and values of each layer [batch, heads, positions, head_dim], in the type of
        KV buffers; lengths [batch] int64, 0 of a row without a source.
    """

    def __init__(
        self, memory: Memory, record: EngineRecord, geometry: Geometry, batch: int
    ) -> None:
        self.row_bytes = cross_row_bytes(record)
        names, each = cross_names(geometry), aligned(batch * self.row_bytes)
        at = memory.take(each * len(names), "cross keys and values")
        self._places = {name: at + number * each for number, name in enumerate(names)}
        layout = Layout([Field(SOURCE_LENGTH, np.int64, (batch,))])
        self._staged = memory.stage(layout.size, "lengths of sources")
        self.lengths: Tokens = layout.view(self._staged, SOURCE_LENGTH)
        self._device = memory.device

    def addresses(self) -> dict[str, int]:
        """Return where passes find all of it."""
        return {**self._places, SOURCE_LENGTH: self._staged.address}

    def keep(self, row: int, made: Mapping[str, int], length: int) -> None:
        """Copy the cross keys and values of a source to its row; wait for `CudaDevice.wait`."""
        for name, place in self._places.items():
            self._device.copy(place + row * self.row_bytes, made[name], self.row_bytes)
        self._tell(row, length)

    def copy_row(self, source: int, to: int) -> None:
        """Copy the source of a row to another row; wait for `CudaDevice.wait`."""
        size = self.row_bytes
        for place in self._places.values():
            self._device.copy(place + to * size, place + source * size, size)
        self._tell(to, int(self.lengths[source]))

    def _tell(self, row: int, length: int) -> None:
        self.lengths[row] = length
        self._staged.send()


@dataclass(frozen=True)
class Model:
    """One plan over one set of KV buffers."""

    plan: TrtPlan
    device: CudaDevice
    record: EngineRecord
    geometry: Geometry
    batch: int
    caches: Caches
    memory: Memory
    scratch: int
    """Where all contexts have their working memory: they run one after the other."""
    kv_length: int = 0
    """Where the input of that name lies, which is never read; 0 where there is none."""
    sources: SourceBuffer | None = None
    """Of an encoder-decoder."""

    @property
    def scored(self) -> int:
        """Entries of the vocabulary that logits are of."""
        return self.record.scored or self.geometry.vocab_size

    def context(
        self, profile: int, shape: PassShape, addresses: Mapping[str, int], parity: int = 0
    ) -> TrtContext:
        """Return a context with all its shapes and addresses set."""
        context = self.plan.context(profile, self.scratch)
        self.shape(context, shape)
        for name, address in addresses.items():
            context.set_address(name, address)
        if self.kv_length:
            context.set_address(KV_LENGTH, self.kv_length)
        if self.sources is not None:
            for name, address in self.sources.addresses().items():
                context.set_address(name, address)
        self.caches.bind(context, parity)
        return context

    def shape(self, context: TrtContext, shape: PassShape) -> None:
        """Tell a context the sizes of a pass, of the inputs that may have several."""
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": (self.batch, shape.width),
            "rows": (shape.rows,),
        }
        if self.record.hidden:
            shapes[HIDDEN] = (self.batch, shape.width, self.record.hidden)
        if self.kv_length:
            shapes[KV_LENGTH] = (shape.kv_length,)
        for name, sizes in shapes.items():
            if ANY in self.plan.tensors[name].shape:
                context.set_shape(name, sizes)


class TopCandidates(NamedTuple):
    """The best scores of each row, falling, and whose they are.

    Shapes: values [B, R, K] f32; ids [B, R, K] int64.
    """

    values: NDArray[np.float32]
    ids: Tokens


def result_fields(record: EngineRecord, batch: int, rows: int) -> list[Field]:
    """Return the outputs that every pass brings to the host."""
    fields = [Field("argmax", np.int64, (batch, rows))]
    if record.confidence:
        fields.append(Field("confidence", np.float32, (batch, rows)))
    if record.candidates:
        shape = (batch, rows, record.candidates)
        fields.append(Field(CANDIDATES[0], np.float32, shape))
        fields.append(Field(CANDIDATES[1], np.int64, shape))
    return fields


class PassRows:
    """Scores of up to `most` rows on the device, and one array they are copied to when read.

    Shapes: [batch, rows, vocab] f32, as many rows as the pass had.
    """

    def __init__(self, memory: Memory, batch: int, most: int, vocabulary: int) -> None:
        self.address = memory.take(batch * most * vocabulary * 4, "scores")
        self._memory = memory
        self._shape = batch, most, vocabulary
        self._host: NDArray[np.float32] | None = None

    def read(self, rows: int) -> Logits:
        """Copy the rows of the latest pass to the host."""
        batch, most, vocabulary = self._shape
        if self._host is None:
            self._host = np.empty(batch * most * vocabulary, np.float32)
        part = self._host[: batch * rows * vocabulary].reshape(batch, rows, vocabulary)
        self._memory.read(self.address, part)
        return part


class Scores:
    """What one shape of pass left; views that the next pass of its profile overwrites."""

    argmax: Tokens
    confidence: Confidence | None
    candidates: TopCandidates | None

    def __init__(
        self, layout: Layout, staging: CudaStaging, scores: PassRows, batch: int, rows: int
    ):
        def view(name: str, *more: int) -> Any:
            return layout.view(staging, name, (batch, rows, *more))

        self.argmax = view("argmax")
        self.confidence = view("confidence") if "confidence" in layout else None
        self.candidates = None
        if CANDIDATES[0] in layout:
            count = layout.view(staging, CANDIDATES[0]).shape[-1]
            self.candidates = TopCandidates(*(view(name, count) for name in CANDIDATES))
        self._scores = scores
        self._rows = rows
        self._logits: Logits | None = None

    @property
    def logits(self) -> Logits:
        """The scores, [B, R, V] f32; copied from the device only here, once."""
        if self._logits is None:
            self._logits = self._scores.read(self._rows)
        return self._logits

    def forget(self) -> None:
        """Drop what was read: a pass is about to overwrite the outputs."""
        self._logits = None


class PlanPass(Protocol):
    """One shape of pass; its feed is written before it runs, and its scores are there after."""

    tokens: Tokens
    start: Tokens
    scores: Scores
    bases: Sequence[Tokens]
    """Of models with states: see `StateBases`; of others there are none."""
    states: Mapping[str, int]
    """Where what it reads and leaves for each position lies on the device; see `state_widths`."""

    def run(self, parity: int, after: Callable[[], object]) -> None:
        """Run the pass and wait for its results; `parity` says which KV buffers it reads.

        `after` puts more on the stream after it, before the host waits.
        """

    def close(self) -> None:
        """Give captured graphs back, and let go of contexts."""


class Ports:
    """Where passes of up to some width and rows have their feed, results and scores."""

    def __init__(self, model: Model, width: int, rows: int, scores: PassRows) -> None:
        batch, memory = model.batch, model.memory
        self.scores = scores
        bases = model.geometry.bases
        self._inputs = Layout(
            [
                Field("input_ids", np.int64, (batch, width)),
                Field("start", np.int64, (batch,)),
                Field("rows", np.int64, (rows,)),
                *(Field(name, np.int64, (batch,)) for name in bases),
            ]
        )
        self._outputs = Layout(result_fields(model.record, batch, rows))
        self.feed = memory.stage(self._inputs.size, "feeds")
        self.results = memory.stage(self._outputs.size, "results")
        self.bases: list[Tokens] = [self.fed(name) for name in bases]
        self._batch = batch
        counts = {FEATURE: width, HIDDEN: width, STATE: rows}
        self.states = {
            name: memory.take(4 * batch * counts[name] * size, "features of passes")
            for name, size in state_widths(model.record).items()
        }

    def addresses(self) -> dict[str, int]:
        """Return where every tensor lies but the KV buffers."""
        return {
            **self._inputs.addresses(self.feed),
            **self._outputs.addresses(self.results),
            "logits": self.scores.address,
            **self.states,
        }

    def fed(self, name: str, *shape: int) -> Any:
        """Return an input on the host, or its beginning."""
        return self._inputs.view(self.feed, name, shape or None)

    def scores_of(self, rows: int) -> Scores:
        """Return the outputs of a pass of so many rows."""
        return Scores(self._outputs, self.results, self.scores, self._batch, rows)


def nothing() -> None:
    """Put nothing more on the stream."""


class Launcher:
    """Runs the same work again and again: kernel by kernel first, then as a captured graph.

    TensorRT may allocate on a first run, so that it is captured afterwards. Where that or a launch
    is refused, and the device still works, all runs are like the first, and `refusal` says why.
    """

    def __init__(
        self,
        device: CudaDevice,
        contexts: Sequence[TrtContext],
        put: Callable[[], None],
        *,
        captures: bool,
    ) -> None:
        self._device, self._contexts, self._put = device, contexts, put
        self._captures = captures
        self.graph: CudaGraph | None = None
        """What was captured; None before that, and where it cannot be."""
        self.refusal = ""

    def run(self, after: Callable[[], object] = nothing) -> None:
        """Run the work, and what `after` puts after it, and wait for both."""
        if self.graph is not None and self._launch(self.graph, after):
            return
        self._put()
        after()
        self._device.wait()
        if self._captures:
            self._captures = False
            self._capture()

    def _capture(self) -> None:
        if not all(context.capturable() for context in self._contexts):
            self.refusal = "the library says that it cannot be captured"
            return
        try:
            with self._device.capture() as recording:
                self._put()
        except EngineError as error:
            self._give_up(error)
        else:
            self.graph = recording.graph

    def _launch(self, graph: CudaGraph, after: Callable[[], object]) -> bool:
        """Tell whether the graph ran; one that cannot be launched is given back."""
        try:
            graph.launch()
        except EngineError as error:
            self._give_up(error)
            self.close()
            return False
        after()
        self._device.wait()
        return True

    def _give_up(self, error: EngineError) -> None:
        """Note why there is no graph; raise the error where the device is lost."""
        try:
            self._device.recover()
        except EngineError:
            raise error from None
        self.refusal = str(error)

    def close(self) -> None:
        """Give the graph back."""
        if self.graph is not None:
            self.graph.free()
            self.graph = None


class FixedPass:
    """The pass of a profile that has one size, with a context and a graph for each parity."""

    def __init__(
        self, model: Model, profile: int, shape: PassShape, scores: PassRows, captures: bool
    ) -> None:
        width, rows, _ = shape
        self._ports = ports = Ports(model, width, rows, scores)
        self.tokens: Tokens = ports.fed("input_ids")
        self.start: Tokens = ports.fed("start")
        ports.fed("rows")[:] = np.arange(width - rows, width)
        self.scores = ports.scores_of(rows)
        self.bases: Sequence[Tokens] = ports.bases
        self.states: Mapping[str, int] = ports.states
        addresses = ports.addresses()
        contexts = [
            model.context(profile, shape, addresses, parity) for parity in range(model.caches.sets)
        ]
        self._launchers = [
            Launcher(model.device, [context], partial(self._put, context), captures=captures)
            for context in contexts
        ]

    @property
    def graph(self) -> CudaGraph | None:
        """What was captured, of the first set of KV buffers."""
        return self._launchers[0].graph

    @property
    def captured(self) -> int:
        """How many graphs there are: one, or one for each set of KV buffers."""
        return sum(launcher.graph is not None for launcher in self._launchers)

    @property
    def refusal(self) -> str:
        """Why the pass is not captured; empty where it is, or was not run yet."""
        return next(filter(None, (launcher.refusal for launcher in self._launchers)), "")

    def run(self, parity: int, after: Callable[[], object]) -> None:
        """Launch what was captured; see `PlanPass.run`."""
        self.scores.forget()
        self._launchers[parity].run(after)

    def _put(self, context: TrtContext) -> None:
        self._ports.feed.send()
        context.enqueue()
        self._ports.results.fetch()

    def close(self) -> None:
        """Give captured graphs back; see `PlanPass.close`."""
        for launcher in self._launchers:
            launcher.close()
        self._launchers.clear()


class WideProfile:
    """A profile of many sizes: one context, told its shapes whenever they change."""

    def __init__(self, model: Model, profile: int, shape: PassShape) -> None:
        sizes = model.record.profiles[profile]
        most = sizes.rows.most
        scores = PassRows(model.memory, model.batch, most, model.scored)
        self.ports = Ports(model, sizes.width.most, most, scores)
        self._model = model
        self._shape = shape
        self._parity = 0
        self._context: TrtContext | None = model.context(profile, shape, self.ports.addresses())

    def run(self, shape: PassShape, parity: int, after: Callable[[], object]) -> None:
        """Enqueue one pass, and what `after` puts after it, and wait for both."""
        context, model = self._context, self._model
        assert context is not None, "the profile was closed"
        if shape != self._shape:
            model.shape(context, shape)
            self._shape = shape
        if parity != self._parity:
            model.caches.bind(context, parity)
            self._parity = parity
        self.ports.feed.send()
        context.enqueue()
        self.ports.results.fetch()
        after()
        model.device.wait()

    def close(self) -> None:
        """Let go of the context."""
        self._context = None


class WidePass:
    """One size of a profile that takes many, such as a chunk of a prompt."""

    def __init__(self, profile: WideProfile, batch: int, shape: PassShape) -> None:
        ports, (width, rows, _) = profile.ports, shape
        self.tokens: Tokens = ports.fed("input_ids", batch, width)
        self.start: Tokens = ports.fed("start")
        self.scores = ports.scores_of(rows)
        self.bases: Sequence[Tokens] = ports.bases
        self.states: Mapping[str, int] = ports.states
        self._wanted: Tokens = ports.fed("rows", rows)
        self._profile = profile
        self._shape = shape

    def run(self, parity: int, after: Callable[[], object]) -> None:
        """Enqueue the pass; see `PlanPass.run`."""
        self.scores.forget()
        width, rows, _ = self._shape
        self._wanted[:] = range(width - rows, width)
        self._profile.run(self._shape, parity, after)

    def close(self) -> None:
        """Let the profile go; see `PlanPass.close`."""
        self._profile.close()
