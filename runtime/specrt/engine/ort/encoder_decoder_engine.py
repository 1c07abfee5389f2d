"""Encoder-decoders on ONNX Runtime with the CPU kernels: a decoder whose rows are texts of sources.

    source ── encoder ── hidden states ── cross projections ── cross keys and values of a row

That runs once a request, for one row and the exact length of its source; passes of the decoder then
read what it left, and are those of every other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from reprlib import repr as short
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from specrt.bundle import EncoderRecord
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.kernels import aligned_zeros, missing_kernels
from specrt.engine.ort.ort_engine import TILE, OrtEngine, RowScores, open_session, packed_shape
from specrt.engine.protocol import CLOSED, Feed, Source
from specrt.engine.sources import (
    check_row,
    check_shared_encoder,
    checked_features,
    checked_states,
    checked_tokens,
    no_target_source,
    require_source,
)
from specrt.errors import EngineError, first_line, shortage
from specrt.geometry import Geometry

NEEDS_KERNELS = "on a CPU encoder-decoders run on specrt's kernels alone"

Hidden = NDArray[np.float32]


class EncoderDecoderEngine(OrtEngine):
    """A decoder over the KV buffers of its rows, and the cross keys and values of their sources.

    `hidden` are the hidden states [E, W] of each row's source, which a draft without an encoder of
    its own reads. Such a draft without its target next to it has hidden states for sources.
    Shapes: cross keys of a layer are [batch, heads, E / 16, head_dim, 16] and its cross values
        [batch, heads, E, head_dim], E being `max_source` in whole groups of 16.
    """

    def __init__(
        self, session: Any, weights: tuple[Any, ...], spec: EngineSpec, *, record: EncoderRecord,
        cross: Any, encoder: Any, shared: EncoderDecoderEngine | None,
    ) -> None:  # fmt: skip
        super().__init__(session, weights, spec)
        self.max_source, self.hidden_width = record.max_source, record.width
        self.hidden: list[Hidden | None] = [None] * self.batch
        self._record = record
        self._cross, self._encoder, self._shared = cross, encoder, shared
        self._names = [output.name for output in cross.get_outputs()]
        self._lengths = np.zeros(self.batch, np.int64)
        self.read_only = {"source_lengths": self._lengths, **self._allocate_cross()}

    def _allocate_cross(self) -> dict[str, NDArray[np.float32]]:
        one = self._record
        shapes = {
            name: packed_shape(name, one.heads, one.head_dim, self.batch, self.max_source)
            for name in (f"cross_{own}" for own in self.geometry.buffers)
        }
        self.check_shapes(shapes)
        return {name: aligned_zeros(shape) for name, shape in shapes.items()}

    def condition(self, row: int, source: Source) -> None:
        """Read a source for a row; see `ConditionedEngine.condition`."""
        if self._session is None:
            raise EngineError(CLOSED)
        check_row(row, self.batch)
        hidden = self._read(source) if self._shared is None else _hidden_of(self._shared, row)
        pairs = _run(self._cross, self._names, {"hidden": hidden[None]}, len(hidden))
        for name, pair in zip(self._names, pairs, strict=True):
            self._keep(row, name, pair[0])
        self._lengths[row] = len(hidden)
        self.hidden[row] = hidden

    def _read(self, source: Source) -> Hidden:
        """Return the hidden states [E, W] of a source."""
        given: NDArray[Any] = np.asarray(source)
        if self._encoder is None:
            return checked_states(given, self.hidden_width, self.max_source)
        feeds: dict[str, NDArray[Any]]
        if self._record.features:
            feeds = {
                "input_features": checked_features(
                    given, self._record.features, self._record.frames
                )[None]
            }
        else:
            feeds = {"input_ids": checked_tokens(given, self.max_source)[None]}
        (hidden,) = _run(self._encoder, ["hidden"], feeds, given.shape[-1])
        states: Hidden = hidden[0]
        return states

    def _keep(self, row: int, name: str, pair: NDArray[np.float32]) -> None:
        """Put cross keys or values [heads, E, head_dim] of a layer into the row's buffers."""
        heads, length, size = pair.shape
        buffer = self.read_only[name]
        if name.startswith("cross_value"):
            buffer[row, :, :length, :size] = pair
            return
        groups = -(-length // TILE)
        whole = np.zeros((heads, groups * TILE, size), np.float32)
        whole[:, :length] = pair
        buffer[row, :, :groups] = whole.reshape(heads, groups, TILE, size).swapaxes(2, 3)

    def forward_rows(self, feeds: Sequence[Feed]) -> tuple[RowScores, ...]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`.

        Raises: EngineError also for a row without a source.
        """
        for feed in feeds:
            if feed.row in range(self.batch):
                require_source(feed.row, int(self._lengths[feed.row]))
        return super().forward_rows(feeds)

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a row, and its source, to another row."""
        super().copy_row(source, to, length)
        if source == to:
            return
        end = int(self._lengths[source])
        for name, buffer in self.read_only.items():
            if name.startswith("cross_"):
                count = end if name.startswith("cross_value") else -(-end // TILE)
                buffer[to, :, :count] = buffer[source, :, :count]
        self._lengths[to] = end
        self.hidden[to] = self.hidden[source]

    def close(self) -> None:
        """Drop the sessions, the binding and all buffers."""
        super().close()
        self._cross = self._encoder = self._shared = None
        self.read_only.clear()
        self.hidden = [None] * self.batch


def _hidden_of(target: EncoderDecoderEngine, row: int) -> Hidden:
    """Return the hidden states that a target has of a row's source."""
    hidden = target.hidden[row]
    if hidden is None:
        raise no_target_source(row)
    return hidden


def _run(session: Any, names: list[str], feeds: dict[str, NDArray[Any]], length: int) -> list[Any]:
    """Run a session once over a source.

    Raises: EngineError with the library's reason.
    """
    try:
        found: list[Any] = session.run(names, feeds)
    except Exception as error:  # the library raises its own pybind types
        reason = "; ".join(filter(None, (first_line(error), shortage(error))))
        raise EngineError(
            f"ONNX Runtime {ort.__version__} failed on a source of length {length}: {reason}"
        ) from error
    return found


def _names(part: str, record: EncoderRecord, geometry: Geometry) -> tuple[set[str], set[str]]:
    """Return the names of the inputs and outputs that a part of a model has."""
    if part == "encoder":
        return {"input_features" if record.features else "input_ids"}, {"hidden"}
    kinds = ("cross_key", "cross_value")
    return {"hidden"}, {f"{kind}.{i}" for kind in kinds for i in range(geometry.layers)}


def _check_part(path: Path, session: Any, takes: set[str], gives: set[str]) -> None:
    """Refuse a graph that is not the part that the manifest says.

    Raises: EngineError.
    """
    there = ({i.name for i in session.get_inputs()}, {o.name for o in session.get_outputs()})
    if there != (takes, gives):
        raise EngineError(
            f"{path} takes {_listed(there[0])} and gives {_listed(there[1])}, and the manifest's "
            f"model takes {_listed(takes)} and gives {_listed(gives)}; they do not belong "
            "together: build the bundle again"
        )


def _listed(names: set[str]) -> str:
    """Return the first few names."""
    return short(sorted(names))


def open_encoder_decoder(spec: EngineSpec) -> EncoderDecoderEngine:
    """Open a decoder and, from the same folder, what conditions it.

    Raises: EngineError, also where a draft is to read an encoder that its target does not have.
    """
    if lacks := missing_kernels():
        raise EngineError(f"{spec.path} cannot be opened: {NEEDS_KERNELS}: {lacks}")
    record, shared = spec.require_encoder(), None
    if not record.encoder and spec.target is not None:
        shared = spec.target if isinstance(spec.target, EncoderDecoderEngine) else None
        check_shared_encoder(spec.path, record, shared)
    opened = {}
    for part, name in (("cross", record.cross), ("encoder", record.encoder)):
        if name:
            place = spec.path.with_name(PurePosixPath(name).name)
            opened[part] = open_session(place, spec.files, spec.threads)
            _check_part(place, opened[part][0], *_names(part, record, spec.geometry))
    session, weights = open_session(spec.path, spec.files, spec.threads)
    held = (*weights, *(weight for _, own in opened.values() for weight in own))
    encoder = opened["encoder"][0] if "encoder" in opened else None
    return EncoderDecoderEngine(
        session, held, spec, record=record, cross=opened["cross"][0], encoder=encoder, shared=shared
    )
