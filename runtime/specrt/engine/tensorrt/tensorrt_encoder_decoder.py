"""Encoder-decoders on TensorRT: a decoder whose rows are texts of sources, and what reads those.

    source ── encoder ── hidden states of a row ── cross ── cross keys and values of the row

Three plans on one device. The first two run once a request, for one row; nothing of what they make
comes to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.bundle import EncoderRecord
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Feed, Output, PaddedRows, RowsEngine, SingleRow, Source
from specrt.engine.sources import (
    check_row,
    check_shared_encoder,
    checked_features,
    checked_tokens,
    no_target_source,
    require_source,
)
from specrt.engine.tensorrt.device import Field, Layout, Memory, aligned
from specrt.engine.tensorrt.engine import Lease, LeasedEngine, open_recorded, read_plan_record
from specrt.engine.tensorrt.engine_record import (
    AGAIN,
    CROSS,
    ENCODER,
    FEATURES,
    HIDDEN,
    LENGTH,
    EngineRecord,
    SourceShape,
)
from specrt.engine.tensorrt.passes import ANY, check_plan, cross_names, cross_row_bytes
from specrt.engine.tensorrt.plan import TrtPlan
from specrt.errors import BundleError, EngineError
from specrt.geometry import Geometry

FLOAT_BYTES = 4


class OpenedPlan(NamedTuple):
    """A plan and its record."""

    plan: TrtPlan
    record: EngineRecord


class HiddenStates:
    """The hidden states of each row's source.

    Shapes: [batch, positions, width] f32, rows aligned.
    """

    def __init__(self, memory: Memory, batch: int, source: SourceShape) -> None:
        self.width = source.width
        self._row_bytes = aligned(FLOAT_BYTES * source.positions * source.width)
        self._device = memory.device
        self._address = memory.take(batch * self._row_bytes, "hidden states of sources")

    def at(self, row: int) -> int:
        """Return where a row's lie."""
        return self._address + row * self._row_bytes

    def copy_row(self, source: int, to: int) -> None:
        """Copy a row's to another."""
        self._device.copy(self.at(to), self.at(source), self._row_bytes)


class SourceReader:
    """Runs an encoder and cross projections; each has one context, enqueued kernel by kernel."""

    def __init__(
        self, memory: Memory, geometry: Geometry, cross: OpenedPlan, encoder: OpenedPlan | None
    ) -> None:
        source = cross.record.source
        assert source is not None, "a record of cross projections has the sizes of a source"
        self.source = source
        plans = [one for one in (cross, encoder) if one is not None]
        for one in plans:
            check_plan(one.plan, one.record, geometry, 1, 0)
        scratch = max(one.plan.scratch_bytes for one in plans)
        place = memory.take(scratch, "working memory of the encoder") if scratch else 0
        given = Field("input_ids", np.int64, (1, source.positions))
        if source.features:
            given = Field(FEATURES, np.float32, (1, source.features, source.frames))
        self._fed = Layout([given, Field(LENGTH, np.int64, (1,))])
        self._feed = memory.stage(self._fed.size, "feeds of the encoder")
        self._given = given
        at = self._fed.addresses(self._feed)
        row_bytes = cross_row_bytes(cross.record)
        made = Layout([Field(name, np.uint8, (row_bytes,)) for name in cross_names(geometry)])
        address = memory.take(made.size, "cross keys and values of one source")
        self.made = {name: address + offset for name, offset in made.offsets.items()}
        self._cross = cross.plan.context(0, place)
        for name, where in {**self.made, LENGTH: at[LENGTH]}.items():
            self._cross.set_address(name, where)
        self._encoder = encoder and encoder.plan.context(0, place)
        self._sized = encoder is not None and ANY in encoder.plan.tensors[given.name].shape
        if self._encoder is not None:
            self._encoder.set_address(given.name, at[given.name])
        self._plans = [one.plan for one in plans]

    def checked(self, source: Source) -> NDArray[Any]:
        """Return a source as it is read.

        Raises: EngineError for one that cannot be read.
        """
        one = self.source
        if one.features:
            return checked_features(source, one.features, one.frames)
        tokens = checked_tokens(source, one.positions)
        if one.vocabulary and not 0 <= tokens.min() <= tokens.max() < one.vocabulary:
            raise EngineError(
                f"a source with token ids from {tokens.min()} to {tokens.max()} was given; "
                f"expected 0 to {one.vocabulary - 1}"
            )
        return tokens

    def encode(self, source: NDArray[Any], to: int) -> int:
        """Put the hidden states of a source on the stream; return how many positions it has."""
        assert self._encoder is not None, "what has no encoder reads the target's states"
        self._fed.view(self._feed, self._given.name, (1, *source.shape))[0] = source
        self._feed.send()
        if self._sized:
            self._encoder.set_shape(self._given.name, (1, *source.shape))
        self._encoder.set_address(HIDDEN, to)
        self._encoder.enqueue()
        return self.source.positions if self.source.features else len(source)

    def project(self, hidden: int, length: int) -> None:
        """Put the cross keys and values of a source on the stream, which go to `made`."""
        self._fed.view(self._feed, LENGTH)[0] = length
        self._feed.send()
        self._cross.set_address(HIDDEN, hidden)
        self._cross.enqueue()

    def close(self) -> None:
        """Give the plans back, after their contexts."""
        for plan in self._plans:
            plan.close()


class TensorRtEncoderDecoder(LeasedEngine):
    """A decoder with the sources of its rows on a GPU; see `ConditionedEngine`.

    Rows of several are padded to one width, as those of other plans are. A draft without an encoder
    of its own reads what its target's left on the device.
    Threads: as for `TensorRtEngine`.
    """

    def __init__(
        self, lease: Lease, plan: TrtPlan, record: EngineRecord, spec: EngineSpec, *,
        cross: OpenedPlan, encoder: OpenedPlan | None, shared: TensorRtEncoderDecoder | None,
    ) -> None:  # fmt: skip
        super().__init__(lease, plan, record, spec)
        self.traits = replace(self.traits, padded=True)
        try:
            memory = self.model.memory
            self._reader = SourceReader(memory, self.geometry, cross, encoder)
            self.attach(self._reader)
            source = self._reader.source
            self.max_source = source.positions
            self._shared = shared
            own = shared.hidden if shared else HiddenStates(memory, self.batch, source)
            self.hidden: HiddenStates = own
            self.hidden_width = own.width
        except BaseException:
            self.close()
            raise
        self._padded = PaddedRows(self) if self.batch > 1 else None
        self._row_passes: RowsEngine = self._padded or SingleRow(self)

    @property
    def lengths(self) -> Sequence[int]:
        """Positions of the source of each row; 0 of one without."""
        assert self.model.sources is not None, "a plan of a decoder has sources"
        return list(self.model.sources.lengths.tolist())

    def condition(self, row: int, source: Source) -> None:
        """Read a source for a row; see `ConditionedEngine.condition`."""
        self.require_sound()
        check_row(row, self.batch)
        given, length = None, 0
        if self._shared is None:
            given = self._reader.checked(source)
        else:
            length = _source_length(self._shared, row)
        self.forget()
        try:
            if given is not None:
                length = self._reader.encode(given, self.hidden.at(row))
                self.model.device.wait()  # what is fed is staged in one place
            self._reader.project(self.hidden.at(row), length)
            assert self.model.sources is not None
            self.model.sources.keep(row, self._reader.made, length)
            self.model.device.wait()
        except EngineError as error:
            self.end(error)
            raise
        if self._padded is not None:
            self._padded.clear(row)

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`.

        Raises: EngineError also for a row without a source.
        """
        lengths = self.lengths
        for feed in feeds:
            if feed.row in range(self.batch):
                require_source(feed.row, lengths[feed.row])
        return self._row_passes.forward_rows(feeds)

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy a row and its source to another row; see `PackedEngine.copy_row`."""
        self.require_sound()
        if source == to:
            return
        self.forget()
        try:
            self.model.caches.copy_row(source, to)
            assert self.model.sources is not None
            self.model.sources.copy_row(source, to)
            if self._shared is None:
                self.hidden.copy_row(source, to)
            self.model.device.wait()
        except EngineError as error:
            self.end(error)
            raise
        if self._padded is not None:
            self._padded.copy_row(source, to, length)


def _source_length(target: TensorRtEncoderDecoder, row: int) -> int:
    """Return the positions of the source that a target has read for a row."""
    target.require_sound()
    length = target.lengths[row]
    if not length:
        raise no_target_source(row)
    return length


def open_encoder_decoder(spec: EngineSpec) -> TensorRtEncoderDecoder:
    """Open the plan of a decoder and, from the same folder, those that condition it.

    Raises: EngineError, also where a draft is to read an encoder that its target does not have;
        BundleError for a record that cannot be read.
    """
    record, path, shared = spec.require_encoder(), spec.path, None
    if not record.encoder:
        shared = spec.target if isinstance(spec.target, TensorRtEncoderDecoder) else None
        check_shared_encoder(path, record, shared)
    names = {CROSS: record.cross, ENCODER: record.encoder}
    places = {"": path, **{p: path.with_name(PurePosixPath(n).name) for p, n in names.items() if n}}
    read = {part: read_plan_record(place, spec) for part, place in places.items()}
    for part, (own, _) in read.items():
        _check_source(places[part], part, own, record)
    lease, plans = Lease.of(spec.target), dict[str, OpenedPlan]()
    try:
        for part, (own, library) in read.items():
            opened = open_recorded(places[part], spec, own, library, lease.device)
            plans[part] = OpenedPlan(opened, own)
        return TensorRtEncoderDecoder(
            lease, *plans[""], spec, cross=plans[CROSS], encoder=plans.get(ENCODER), shared=shared
        )
    except BaseException:
        for other in plans.values():
            other.plan.close()
        lease.close_unused()
        raise


def _check_source(path: Path, part: str, plan: EngineRecord, record: EncoderRecord) -> None:
    """Refuse a plan whose source differs from the manifest's.

    Raises: BundleError.
    """
    one = plan.source
    if one is not None and plan.part == part:
        own = one.positions, one.width, one.heads, one.head_dim, one.features, one.frames
        if own == (
            record.max_source, record.width, record.heads, record.head_dim, record.features,
            record.frames,
        ):  # fmt: skip
            return
    raise BundleError(
        f"{path} is not the plan that the manifest says: its record tells of another source, or of "
        f"none; {AGAIN}"
    )
