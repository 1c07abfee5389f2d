"""A TensorRT plan as an engine: a context per width, one set of KV buffers, captured passes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import (
    CLOSED,
    CudaGraphs,
    Engine,
    EngineTraits,
    Tokens,
    check_bounds,
    pass_size,
)
from specrt.engine.state_bases import StateBases
from specrt.engine.tensorrt.device import CudaDevice, CudaGraph, Memory
from specrt.engine.tensorrt.engine_record import (
    AGAIN,
    FILE_NAME,
    HIDDEN,
    KV_LENGTH,
    RECORD,
    EngineRecord,
    PassShape,
    Profile,
    choose,
    difference,
    fixed,
    least_length,
    read_engine_record,
    this_device,
)
from specrt.engine.tensorrt.feature_buffer import FeatureBuffer
from specrt.engine.tensorrt.library import Library, open_library
from specrt.engine.tensorrt.passes import (
    ANY,
    Caches,
    FixedPass,
    Model,
    PassRows,
    PlanPass,
    Scores,
    SourceBuffer,
    WidePass,
    WideProfile,
    check_plan,
    nothing,
)
from specrt.engine.tensorrt.plan import TrtPlan, open_plan
from specrt.errors import BundleError, EngineError


class Closable(Protocol):
    """A user of the contexts of an engine, which is closed before it."""

    def close(self) -> None:
        """Give everything back."""


class Handover(Protocol):
    """What of each position a pass reads or leaves besides its KV buffers.

    Both are put on the stream, and the host waits for neither. Starts are those of the rows.
    """

    def before(self, bound: PlanPass, starts: Sequence[int], width: int) -> None:
        """Copy what the pass reads to where it reads it."""

    def after(self, bound: PlanPass, starts: Sequence[int], shape: PassShape) -> None:
        """Copy what the pass leaves to where it is kept."""


class _Finished(NamedTuple):
    """A pass that has run already, as part of something larger."""

    tokens: list[int]
    start: int
    scores: Scores


class TensorRtEngine:
    """A plan with its KV buffers on a GPU.

    Passes that have a profile of their own are captured as CUDA graphs on their first run; others
    go through a profile that takes many sizes, launched kernel by kernel. The plan belongs to the
    engine from here on, the device does not. Working memory is what the library asks
    for the whole plan, and all contexts share it.
    A pass that fails on the device ends the engine: the contents of its KV buffers are not known.
    Threads: forward passes of engines on one device must not overlap.
    Raises: EngineError where the plan is not the manifest's, or the device has too little memory;
        the plan is closed then.
    """

    def __init__(
        self, plan: TrtPlan, device: CudaDevice, record: EngineRecord, spec: EngineSpec, *,
        capture: bool = True,
    ) -> None:  # fmt: skip
        self.geometry = spec.geometry
        self.batch = spec.batch
        self.max_length = spec.max_length
        self.max_width = spec.max_width
        self._captures = capture
        self._starts = np.zeros(self.batch, np.int64)
        self._passes: dict[PassShape, PlanPass] = {}
        self._wide: dict[int, WideProfile] = {}
        self._scores: dict[tuple[int, int], PassRows] = {}
        self._dependents: list[Closable] = []
        self._finished: _Finished | None = None
        self._fault = ""
        self._closed = False
        self._memory = Memory(device)
        self._plan = plan
        self.handover: Handover | None = None
        """None for most plans."""
        try:
            self.model = self._open(plan, record)
        except BaseException:
            self.close()
            raise
        self._bases = StateBases(self.batch)
        self.traits = EngineTraits(scored=self.model.scored, rewind=self._bases.least)

    @property
    def max_rows(self) -> int:
        """Most positions that a pass scores."""
        return max(profile.rows.most for profile in self.model.record.profiles)

    def _open(self, plan: TrtPlan, record: EngineRecord) -> Model:
        check_plan(plan, record, self.geometry, self.batch, self.max_length)
        memory = self._memory
        caches = Caches(memory, record, self.geometry, self.batch, self.max_length)
        needed = plan.scratch_bytes
        scratch = memory.take(needed, "working memory") if needed else 0
        if record.feature:
            self.handover = FeatureBuffer(memory, self.batch, self.max_length, record.feature)
        sources = SourceBuffer(memory, record, self.geometry, self.batch) if record.source else None
        lengths = self._kv_lengths = record.kv_lengths
        unread = memory.take(lengths[-1] * np.dtype(np.int64).itemsize, KV_LENGTH) if lengths else 0
        return Model(
            plan, memory.device, record, self.geometry, self.batch, caches, memory, scratch, unread,
            sources,
        )  # fmt: skip

    def kv_length(self, reach: int) -> int:
        """Return how much a pass reads of the KV buffers that reaches so far; 0 for all."""
        return least_length(self._kv_lengths, reach) if self._kv_lengths else 0

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes taken of the device by purpose; weights belong to the plan, and are not here."""
        return dict(self._memory.bytes)

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """The passes that were captured, and why others are not; None where none is to be."""
        if not self._captures:
            return None
        bound = {key: one for key, one in self._passes.items() if isinstance(one, FixedPass)}
        return CudaGraphs(
            sum(one.captured for one in bound.values()),
            tuple(
                f"passes of width {shape.width} with {shape.rows} scored rows run kernel by "
                f"kernel: {one.refusal}"
                for shape, one in bound.items()
                if one.refusal
            ),
        )

    def captures(self, width: int, rows: int) -> bool:
        """Tell whether passes of one size are to be captured on their first run."""
        return self._captures and fixed(self.model.record, width, rows) is not None

    def graph(self, width: int, rows: int) -> CudaGraph | None:
        """Return the captured graph of passes of one size; None where none was captured yet.

        Where KV lengths differ, that of the shortest.
        """
        bound = [one for shape, one in sorted(self._passes.items()) if shape[:2] == (width, rows)]
        return next((one.graph for one in bound if isinstance(one, FixedPass)), None)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Scores:
        """Run one pass; see `Engine.forward`."""
        batch = np.asarray(tokens, np.int64)
        width, scored = pass_size(self, batch, rows)
        starts = self._starts
        starts[:] = start
        if self._finished is not None:
            done = self._recall(batch, scored)
            if done is not None:
                return done
        first = last = starts.item(0)
        if self.batch > 1:
            first, last = int(starts.min()), int(starts.max())
        check_bounds(self, width, first, last)
        self.require_sound()
        shape = PassShape(width, scored, self.kv_length(last + width))
        bound = self._passes.get(shape) or self._bind(shape)
        bound.tokens[:] = batch
        bound.start[:] = starts
        caches, held = self.model.caches, self._bases.next.copy()
        parity = caches.parity
        if bound.bases:
            self._bases.advance(0, first, width)
        try:
            told = self._bases.base, self._bases.next
            for place, known in zip(bound.bases, told, strict=False):
                place[:] = known
            if self.handover is None:
                bound.run(parity, nothing)
            else:
                self._hand_over(self.handover, bound, shape)
            caches.swap()
        except EngineError as error:
            self.end(error)
            raise
        except BaseException:  # Ctrl-C: states are as before in the set that was read
            if caches.parity == parity:
                self._bases.next[:] = held
            raise
        return bound.scores

    def _hand_over(self, handover: Handover, bound: PlanPass, shape: PassShape) -> None:
        """Run a pass between what it reads of each position and what it leaves there."""
        starts = self._starts.tolist()
        handover.before(bound, starts, shape.width)
        bound.run(self.model.caches.parity, lambda: handover.after(bound, starts, shape))

    def _recall(self, batch: Tokens, rows: int) -> Scores | None:
        """Return the scores of a pass that has run already, or forget them."""
        done = self._finished
        if (
            done is not None
            and rows == len(done.tokens)
            and self._starts.item(0) == done.start
            and batch[0].tolist() == done.tokens
        ):
            return done.scores
        self.forget()
        return None

    def _bind(self, shape: PassShape) -> PlanPass:
        """Bind a context for passes of one shape; done once, then reused."""
        model = self.model
        profile = choose(model.record, *shape)
        bound: PlanPass
        if model.record.profiles[profile].fixed:
            # The largest part comes first, and stays for the next try if others do not fit.
            scores = self.scores_of(shape.width, shape.rows)
            with self._memory.whole():
                bound = FixedPass(model, profile, shape, scores, self._captures)
        else:
            bound = WidePass(self._wide_profile(profile, shape), self.batch, shape)
        self._passes[shape] = bound
        return bound

    def _wide_profile(self, profile: int, shape: PassShape) -> WideProfile:
        """Return the one context of a profile of many sizes, bound for a first one."""
        if profile not in self._wide:
            with self._memory.whole():
                self._wide[profile] = WideProfile(self.model, profile, shape)
        return self._wide[profile]

    def scores_of(self, width: int, rows: int) -> PassRows:
        """Return where passes of one size leave their scores, alone or as part of a round."""
        if (width, rows) not in self._scores:
            scored = self.model.scored
            self._scores[width, rows] = PassRows(self._memory, self.batch, rows, scored)
        return self._scores[width, rows]

    def finish(self, tokens: list[int], start: int, scores: Scores) -> None:
        """Note that the pass of these tokens has run; the next `forward` of it gives its scores."""
        self._finished = _Finished(tokens, start, scores)

    def forget(self) -> None:
        """Drop the pass that has run already: the KV buffers are about to change."""
        self._finished = None

    def attach(self, dependent: Closable) -> None:
        """Close something before this engine is closed."""
        self._dependents.append(dependent)

    def require_sound(self) -> None:
        """Refuse to go on after a failure.

        Raises: EngineError with the first failure and the remedy.
        """
        if self._fault:
            raise EngineError(self._fault)

    def end(self, error: EngineError) -> None:
        """Note a failure on the device; every pass from now on is refused with it."""
        self.forget()
        self._fault = self._fault or (
            f"an earlier pass failed ({error}); what the KV buffers hold is not known: open the "
            "bundle again, in a new process where the device was lost"
        )

    def close(self) -> None:
        """Give graphs, contexts, plan and memory back, in this order; twice is once."""
        if self._closed:
            return
        self._closed = True
        self.forget()
        self._fault = CLOSED
        self._memory.settle()
        while self._dependents:
            self._dependents.pop().close()
        for bound in self._passes.values():
            bound.close()
        self._passes.clear()
        self._wide.clear()
        self._plan.close()
        self._memory.close()


class Lease:
    """A device that is closed with the last engine on it."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._holders = set[int]()

    @classmethod
    def of(cls, engine: Engine | None) -> Lease:
        """Return the lease of an engine of TensorRT, or of a device of its own."""
        return engine.lease if isinstance(engine, LeasedEngine) else cls(CudaDevice())

    def close_unused(self) -> None:
        """Close the device unless it has a holder."""
        if not self._holders:
            self.device.close()

    def take(self, holder: object) -> None:
        """Keep the device open for a holder."""
        self._holders.add(id(holder))

    def drop(self, holder: object) -> None:
        """Close the device if this was the last one; twice is once."""
        if id(holder) in self._holders:
            self._holders.discard(id(holder))
            if not self._holders:
                self.device.close()


class LeasedEngine(TensorRtEngine):
    """An engine that holds its device open."""

    def __init__(self, lease: Lease, plan: TrtPlan, record: EngineRecord, spec: EngineSpec) -> None:
        self.lease = lease
        lease.take(self)
        super().__init__(plan, lease.device, record, spec)

    def close(self) -> None:
        """Give everything back, the device too if it has no other holder."""
        super().close()
        self.lease.drop(self)


def open_tensorrt(spec: EngineSpec) -> LeasedEngine:
    """Open a plan, on the device of its target where that is one of TensorRT too.

    Raises: EngineError saying what differs from where it was built, or what is missing; BundleError
        for a record that cannot be read.
    """
    record, library = read_plan_record(spec.path, spec)
    lease = Lease.of(spec.target)
    try:
        plan = open_recorded(spec.path, spec, record, library, lease.device)
    except BaseException:
        lease.close_unused()
        raise
    return LeasedEngine(lease, plan, record, spec)


def read_plan_record(path: Path, spec: EngineSpec) -> tuple[EngineRecord, Library]:
    """Read the record next to a plan, hold it to this machine, and return its library, too.

    Raises: BundleError for one that cannot be read; EngineError saying what differs from where the
        plan was built.
    """
    place = path.with_suffix(RECORD)
    if place.name not in spec.files:
        raise BundleError(
            f"{place} cannot be read (it is missing, or not in the manifest's list); {AGAIN}"
        )
    record = read_engine_record(place, bytes(spec.files[place.name].data))
    library = open_library(spec.backend)
    differs = difference(record.device, this_device(library))
    if differs:
        raise EngineError(f"{path} does not run here: {differs}")
    return record, library


def open_recorded(
    path: Path, spec: EngineSpec, record: EngineRecord, library: Library, device: CudaDevice
) -> TrtPlan:
    """Open a plan that has the profiles of its record."""
    plan = open_plan(path, library, device, record.wants, spec.files)
    try:
        check_profiles(path, plan, record.profiles)
    except BaseException:
        plan.close()
        raise
    return plan


def check_profiles(path: Path, plan: TrtPlan, profiles: Sequence[Profile]) -> None:
    """Refuse a plan whose profiles differ from its record, before a pass finds out.

    Raises: EngineError naming the first that differs.
    """
    again = f"they do not belong together: {AGAIN}"
    if plan.profiles != len(profiles):
        raise EngineError(
            f"{path} has {plan.profiles} profiles, and {FILE_NAME} says {len(profiles)}; {again}"
        )
    for number, profile in enumerate(profiles):
        ranges = plan.ranges(number)
        for name, sizes, axis in (
            ("input_ids", profile.width, 1), (HIDDEN, profile.width, 1), ("rows", profile.rows, 0),
            (KV_LENGTH, profile.kv_length, 0),
        ):  # fmt: skip
            if sizes is None or name not in ranges or ANY not in plan.tensors[name].shape:
                continue  # tensors are held to the manifest elsewhere; one size needs no range
            actual = [shape[axis] for shape in ranges[name]]
            wanted = [sizes.least, sizes.best, sizes.most]
            if actual != wanted:
                raise EngineError(
                    f"{path} takes {name} of {_listed(actual)} in profile {number}, and "
                    f"{FILE_NAME} says {_listed(wanted)} ({profile.name!r}); {again}"
                )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
