"""The memory that the rounds of a pair share, and where each of their passes finds it."""

from __future__ import annotations

import numpy as np

from specrt.engine import Confidence, Tokens
from specrt.engines.tensorrt.contract import CANDIDATES
from specrt.engines.tensorrt.device import ALIGNMENT
from specrt.engines.tensorrt.engine import TensorRtEngine
from specrt.engines.tensorrt.layout import Field, Layout
from specrt.engines.tensorrt.memory import Memory
from specrt.engines.tensorrt.results import result_fields

OWN = 2
"""Most tokens that the draft's cache lacks after a round of its own."""
TOKEN_BYTES = 8


class Ground:
    """The memory that the rounds of a pair share, whatever their gamma.

    Each drafted token, its confidence and each start have a place of their own where a tensor may
    be bound, so that no address depends on gamma. The draft's logits and candidates all go to one
    place that nobody reads.
    """

    def __init__(self, target: TensorRtEngine, draft: TensorRtEngine, most: int) -> None:
        self.memory = memory = Memory(target.model.device)
        record, vocabulary = draft.model.record, draft.geometry.vocab_size
        width = most + 1
        self._fed = Layout(
            [
                Field("pending", np.int64, (OWN,)),
                Field("starts", np.int64, (most, ALIGNMENT // 8)),
                Field("target_start", np.int64, (1,)),
                Field("verified", np.int64, (width,)),
                Field("rows", np.int64, (max(width, OWN),)),
                Field("second", np.int64, (1,)),
            ]
        )
        found = [
            Field("drafted", np.int64, (most, ALIGNMENT // 8)),
            Field("confidences", np.float32, (most, ALIGNMENT // 4)),
        ]
        self.found = Layout([*found, *result_fields(target.model.record, 1, width)])
        with memory.whole():
            self._unread = {"logits": memory.take(4 * vocabulary, "the draft's scores")}
            if record.candidates:
                for name, size in zip(CANDIDATES, (4, 8), strict=True):
                    self._unread[name] = memory.take(size * record.candidates, "candidates")
            self.feed = memory.stage(self._fed.size, "feeds of rounds")
            self.results = memory.stage(self.found.size, "results of rounds")
        self._confident = record.confidence
        self._view()

    def _view(self) -> None:
        def fed(name: str) -> Tokens:
            view: Tokens = self._fed.view(self.feed, name)
            return view

        self.pending = fed("pending")
        self.starts = fed("starts")[:, 0]
        self.later_starts = self.starts[1:]
        self.steps = np.arange(len(self.later_starts))
        self.target_start = fed("target_start")
        self.verified = fed("verified")
        fed("rows")[:] = np.arange(len(fed("rows")))
        fed("second")[0] = 1
        self.drafted: Tokens = self.found.view(self.results, "drafted")[:, 0]
        self.confidences: Confidence = self.found.view(self.results, "confidences")[:, 0]
        self._inputs = self._fed.addresses(self.feed)
        self._outputs = self.found.addresses(self.results)

    def drafted_at(self, step: int) -> int:
        """Return where a step leaves its token."""
        return self._outputs["drafted"] + step * ALIGNMENT

    def verified_at(self, step: int) -> int:
        """Return where the verify pass reads the token of a step."""
        return self._inputs["verified"] + (1 + step) * TOKEN_BYTES

    def draft_addresses(self, step: int, width: int) -> dict[str, int]:
        """Return the addresses of one pass of the draft; the first reads what is pending."""
        at = {
            **self._unread,
            "input_ids": self.drafted_at(step - 1) if step else self._inputs["pending"],
            "start": self._inputs["starts"] + step * ALIGNMENT,
            "rows": self._inputs["rows" if width == 1 else "second"],
            "argmax": self.drafted_at(step),
        }
        if self._confident:
            at["confidence"] = self._outputs["confidences"] + step * ALIGNMENT
        return at

    def target_addresses(self, logits: int) -> dict[str, int]:
        """Return the addresses of the verify pass."""
        ours = ("drafted", "confidences")
        return {
            **{name: at for name, at in self._outputs.items() if name not in ours},
            "input_ids": self._inputs["verified"],
            "start": self._inputs["target_start"],
            "rows": self._inputs["rows"],
            "logits": logits,
        }
