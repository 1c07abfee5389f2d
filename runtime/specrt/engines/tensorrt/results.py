"""What a pass leaves behind: small results that it brings to the host, and scores it leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Confidence, Logits, Tokens
from specrt.engines.tensorrt.contract import CANDIDATES
from specrt.engines.tensorrt.device import Staging
from specrt.engines.tensorrt.layout import Field, Layout
from specrt.engines.tensorrt.memory import Memory
from specrt.engines.tensorrt.record import EngineRecord


class Candidates(NamedTuple):
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


class Rows:
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
    """What one shape of pass left behind; views that the next pass of its profile overwrites."""

    argmax: Tokens
    confidence: Confidence | None
    candidates: Candidates | None

    def __init__(self, layout: Layout, staging: Staging, scores: Rows, batch: int, rows: int):
        def view(name: str, *more: int) -> Any:
            return layout.view(staging, name, (batch, rows, *more))

        self.argmax = view("argmax")
        self.confidence = view("confidence") if "confidence" in layout else None
        self.candidates = None
        if CANDIDATES[0] in layout:
            count = layout.view(staging, CANDIDATES[0]).shape[-1]
            self.candidates = Candidates(*(view(name, count) for name in CANDIDATES))
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
