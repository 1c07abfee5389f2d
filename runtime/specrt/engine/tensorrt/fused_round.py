"""A whole greedy round as one CUDA graph: one launch, one wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from specrt.engine.head_engine import TrimmedEngine
from specrt.engine.protocol import Confidence, CudaGraphs, Drafted, Engine, Tokens
from specrt.engine.tensorrt.device import ALIGNMENT, CudaGraph, Field, Layout, Memory
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import PassShape, fixed, gammas
from specrt.engine.tensorrt.library import NATIVE
from specrt.engine.tensorrt.passes import CANDIDATES, Launcher, Scores, result_fields
from specrt.engine.tensorrt.plan import TrtContext
from specrt.errors import EngineError


def fused_rounds(target: Engine, draft: Engine | None) -> CapturedRounds | None:
    """Return what runs rounds of a pair in one launch; None where the pair cannot have them."""
    if isinstance(draft, TrimmedEngine):
        draft = draft.engine  # its tokens are the target's ids already, and nobody reads its scores
    if not isinstance(target, TensorRtEngine) or not isinstance(draft, TensorRtEngine):
        return None
    rounds = CapturedRounds(target, draft)
    return rounds if rounds.gammas else None


OWN = 2
"""Most tokens that the draft's cache lacks after a round of its own."""

TOKEN_BYTES = 8


class RoundBuffers:
    """The memory that the rounds of a pair share, whatever their gamma.

    Each drafted token, its confidence and each start have a place of their own where a tensor may
    be bound, so that no address depends on gamma. The draft's logits and candidates all go to one
    place that is never read.
    """

    def __init__(self, target: TensorRtEngine, draft: TensorRtEngine, most: int) -> None:
        self.memory = memory = Memory(target.model.device)
        record, vocabulary = draft.model.record, draft.model.scored
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
        outputs = [
            Field("drafted", np.int64, (most, ALIGNMENT // 8)),
            Field("confidences", np.float32, (most, ALIGNMENT // 4)),
        ]
        self.layout = Layout([*outputs, *result_fields(target.model.record, 1, width)])
        with memory.whole():
            self._unread = {"logits": memory.take(4 * vocabulary, "the draft's scores")}
            if record.candidates:
                for name, size in zip(CANDIDATES, (4, 8), strict=True):
                    self._unread[name] = memory.take(size * record.candidates, "candidates")
            self.feed = memory.stage(self._fed.size, "feeds of rounds")
            self.results = memory.stage(self.layout.size, "results of rounds")
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
        self.drafted: Tokens = self.layout.view(self.results, "drafted")[:, 0]
        self.confidences: Confidence = self.layout.view(self.results, "confidences")[:, 0]
        self._inputs = self._fed.addresses(self.feed)
        self._outputs = self.layout.addresses(self.results)

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


UNKNOWN = 1.0
"""The confidence of a draft that computes none."""


class RoundShape(NamedTuple):
    """The sizes of one round; KV lengths as in `PassShape`."""

    gamma: int
    pending: int
    draft_length: int
    target_length: int


@dataclass
class _Round:
    """The passes of one shape of round, and where their scores lie."""

    launcher: Launcher
    scores: Scores


class CapturedRounds:
    """Greedy rounds of a draft and a target on one device, captured whole.

    A graph for each gamma and number of pending tokens, and for how much each model reads of its KV
    buffers, captured on its first run. Their contexts
    are their own and never get other addresses, so that the passes that the engines run alone stay
    as they are. Closed with either engine, before it.
    Raises: EngineError where the device has too little memory.
    """

    def __init__(
        self, target: TensorRtEngine, draft: TensorRtEngine, *, capture: bool = True
    ) -> None:
        self._target, self._draft = target, draft
        self._captures = capture
        self.gammas = frozenset(self._possible())
        fed = draft.model.record
        self._pending = tuple(n for n in range(1, OWN + 1) if fixed(fed, n, 1) is not None)
        self._buffers: RoundBuffers | None = None
        self._steps: dict[tuple[int, PassShape], TrtContext] = {}
        self._verify: dict[PassShape, tuple[TrtContext, Scores]] = {}
        self._rounds: dict[RoundShape, _Round] = {}
        self._device = target.model.device
        self._closed = False
        target.attach(self)
        draft.attach(self)

    def _possible(self) -> list[int]:
        """Return the gammas that rounds can have, none where the pair cannot have rounds."""
        target, draft = self._target.model, self._draft.model
        fit = (
            target.device is draft.device
            and target.record.form == draft.record.form == NATIVE
            and target.batch == draft.batch == 1
            and not (target.geometry.recurs or draft.geometry.recurs)  # their buffers swap
            and not (target.record.feature or draft.record.hidden)  # those are copied in between
            # What the draft says is fed to the target unseen, which must know it.
            and draft.geometry.vocab_size <= target.geometry.vocab_size
            and fixed(draft.record, 1, 1) is not None
        )
        return gammas(target.record) if fit else []

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes taken of the device by purpose, besides what the engines took."""
        return dict(self._buffers.memory.bytes) if self._buffers else {}

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """The rounds that were captured, and why others are not; None where none is to be."""
        if not self._captures:
            return None
        launchers = {key: one.launcher for key, one in self._rounds.items()}
        return CudaGraphs(
            sum(launcher.graph is not None for launcher in launchers.values()),
            tuple(
                f"rounds of gamma {shape.gamma} with {shape.pending} pending tokens run kernel by "
                f"kernel: {launcher.refusal}"
                for shape, launcher in launchers.items()
                if launcher.refusal
            ),
        )

    def graph(self, gamma: int, pending: int) -> CudaGraph | None:
        """Return the captured graph of rounds of one size; None where none was captured yet.

        Where KV lengths differ, that of the shortest.
        """
        rounds = [one for s, one in sorted(self._rounds.items()) if s[:2] == (gamma, pending)]
        return rounds[0].launcher.graph if rounds else None

    def fits(self, gamma: int, pending: int, draft_start: int, target_start: int) -> bool:
        """Tell whether a round can be run; if not, its passes can be, one by one."""
        target, draft = self._target, self._draft
        return (
            gamma in self.gammas
            and not self._closed
            and pending in self._pending
            and 0 <= draft_start <= draft.max_length - pending - gamma + 1
            and 0 <= target_start <= target.max_length - gamma - 1
        )

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """Draft `gamma` tokens and let the target score them, in one launch.

        `pending` are the tokens that the draft's cache lacks, the last committed one included;
        `last` is that one. The target has then run the pass of `last` and what was drafted: its
        next `forward` of just them gives the scores. Not so after a drafted -1: the target was fed
        what is not a token.
        Raises: EngineError for a round that does not fit, or where the device fails; the latter
            ends both engines.
        """
        target, draft, count = self._target, self._draft, len(pending)
        if not self.fits(gamma, count, draft_start, target_start):
            raise self._unfit(gamma, count, draft_start, target_start)
        target.require_sound()
        draft.require_sound()
        target.forget()
        draft.forget()
        buffers = self._buffers or self._prepare()
        buffers.pending[:count] = pending
        buffers.starts[0] = draft_start
        np.add(buffers.steps, draft_start + count, out=buffers.later_starts)
        buffers.verified[0] = last
        buffers.target_start[0] = target_start
        scores = self._launch(
            RoundShape(
                gamma,
                count,
                draft.kv_length(draft_start + count + gamma - 1),
                target.kv_length(target_start + gamma + 1),
            )
        )
        tokens = buffers.drafted[:gamma].tolist()
        if min(tokens) >= 0:
            target.finish([last, *tokens], target_start, scores)
        if draft.model.record.confidence:
            return Drafted(tokens, buffers.confidences[:gamma].tolist())
        return Drafted(tokens, [UNKNOWN] * gamma)

    def _unfit(self, gamma: int, count: int, draft_start: int, target_start: int) -> EngineError:
        return EngineError(
            f"a round of gamma {gamma} with {count} pending tokens, from position {draft_start} "
            f"of the draft and {target_start} of the target, cannot be one graph; gammas that can "
            f"be: {', '.join(map(str, sorted(self.gammas))) or 'none'}; run its passes one by one"
        )

    def _prepare(self) -> RoundBuffers:
        self._buffers = RoundBuffers(self._target, self._draft, max(self.gammas))
        return self._buffers

    def _launch(self, shape: RoundShape) -> Scores:
        """Run a round, and wait for it."""
        round_ = self._rounds.get(shape) or self._bind(shape)
        round_.scores.forget()
        try:
            round_.launcher.run()
        except EngineError as error:
            self._target.end(error)
            self._draft.end(error)
            raise
        return round_.scores

    def _put(self, steps: Sequence[TrtContext], verify: TrtContext) -> None:
        buffers = self._buffers
        assert buffers is not None
        buffers.feed.send()
        for step, context in enumerate(steps):
            context.enqueue()
            self._device.copy(buffers.verified_at(step), buffers.drafted_at(step), TOKEN_BYTES)
        verify.enqueue()
        buffers.results.fetch()

    def _bind(self, shape: RoundShape) -> _Round:
        steps = [
            self._step(i, PassShape(1 if i else shape.pending, 1, shape.draft_length))
            for i in range(shape.gamma)
        ]
        width = shape.gamma + 1
        verify, scores = self._verified(PassShape(width, width, shape.target_length))
        launcher = Launcher(
            self._device, [*steps, verify], partial(self._put, steps, verify),
            captures=self._captures,
        )  # fmt: skip
        round_ = self._rounds[shape] = _Round(launcher, scores)
        return round_

    def _step(self, step: int, shape: PassShape) -> TrtContext:
        """Return the context of one pass of the draft, the same for every gamma."""
        if (step, shape) not in self._steps:
            buffers, model = self._buffers, self._draft.model
            profile = fixed(model.record, *shape)
            assert buffers is not None
            assert profile is not None
            addresses = buffers.draft_addresses(step, shape.width)
            self._steps[step, shape] = model.context(profile, shape, addresses)
        return self._steps[step, shape]

    def _verified(self, shape: PassShape) -> tuple[TrtContext, Scores]:
        """Return the context of a verify pass; its logits go where the engine's own go."""
        if shape not in self._verify:
            buffers, model, width = self._buffers, self._target.model, shape.width
            profile = fixed(model.record, *shape)
            assert buffers is not None
            assert profile is not None
            rows = self._target.scores_of(width, width)
            context = model.context(profile, shape, buffers.target_addresses(rows.address))
            scores = Scores(buffers.layout, buffers.results, rows, 1, width)
            self._verify[shape] = context, scores
        return self._verify[shape]

    def close(self) -> None:
        """Give graphs, contexts and memory back; twice is once."""
        self._closed = True
        if self._buffers is not None:
            self._buffers.memory.settle()
        for round_ in self._rounds.values():
            round_.launcher.close()
        self._rounds.clear()
        self._steps.clear()
        self._verify.clear()
        if self._buffers is not None:
            self._buffers.memory.close()
            self._buffers = None
