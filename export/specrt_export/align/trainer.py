"""Training: AdamW over batches of traces, a state that a killed run goes on from.

Sources: Loshchilov and Hutter; AdamW, arXiv:1711.05101, and the cosine, arXiv:1608.03983.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrt.errors import BuildError
from specrt.held_file import replacing
from specrt_export.align.prediction import accepted, rounds_of, tokens_per_round
from specrt_export.align.sparse_loss import sparse_loss
from specrt_export.align.trace_batches import TraceBatch, TraceWindow, batches
from specrt_export.align.trained_drafts import TrainedDraft

WARMUP = 30
"""Steps."""

FINAL = 0.03
"""Learning rate at the end, as a share of its peak."""

DECAY = 0.8
"""Weight of a position's loss, as a share of the position before."""

LOOKED_UP = 0.1
"""Share of the places where lookup drafts already that drafts are trained to begin at."""

PAUSE = 60.0
"""Seconds; a step that takes longer was a stopped process, and counts as one second."""

SHOWN_EVERY = 5.0
"""Seconds between two figures of the loss."""

LOOKED_AT = 128
"""Held-out texts that the acceptance on the way is measured on."""


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how is trained."""

    loss: str = "lk_hybrid"
    minutes: float = 30.0
    steps: int = 0
    """End after as many; by `minutes` alone when 0."""
    rate: float = 1e-3
    positions: int = 4
    """Of a draft that are trained."""
    batch: int = 4096
    """Tokens of a step."""
    seed: int = 1
    save_every: float = 60.0
    """Seconds between saved states."""
    look_every: float = 60.0
    """Seconds between measurements of acceptance."""


@dataclass
class TrainingState:
    """Where a run is. What is not here follows from the options."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    looks: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out tokens a round at as many positions as are trained)."""


Show = Callable[[float | None, str], None]


class Trainer:
    """One run over traces."""

    def __init__(
        self, draft: TrainedDraft, kept: Sequence[TraceWindow], held: Sequence[TraceWindow],
        entries: tuple[Tensor, Tensor] | None, temperature: float, options: TrainingOptions,
        place: Path, identity: str,
    ) -> None:  # fmt: skip
        self.state = TrainingState()
        self._draft, self._kept, self._entries = draft, kept, entries
        self._held, self._temperature = held, temperature
        self._options, self._place, self._identity = options, place, identity
        weights = [p for p in draft.trained.parameters() if p.requires_grad]
        matrices = [p for p in weights if p.ndim > 1]
        others = [p for p in weights if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.01},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95))
        self._best: dict[str, Tensor] = {}

    def resume(self) -> bool:
        """Go on from a saved state; return False where there is none.

        Raises: BuildError for a state of another run.
        """
        path = self._place / "state.pt"
        if not path.exists():
            return False
        try:
            saved = torch.load(path, weights_only=True)
            identity = saved["identity"]
        except Exception as error:  # of many types, whatever is in the file
            raise BuildError(f"{path} is damaged; remove {self._place} to begin anew") from error
        if identity != self._identity:
            raise BuildError(
                f"{self._place} is of a run with other options, traces or checkpoints; give the "
                "same ones to go on, remove it to begin anew, or name another --out"
            )
        self._draft.trained.load_state_dict(saved["weights"], strict=False)
        self._optimizer.load_state_dict(saved["optimizer"])
        self._best = saved["best"]
        self.state = TrainingState(**saved["state"])
        return True

    def run(self, show: Show) -> None:
        """Train until the time or the steps are spent; the draft is then the best on the way.

        The best is that of the most tokens a round on held-out texts, which the draft as it came
        is among. Raises: BuildError for a loss that is not a number.
        """
        state, options = self.state, self._options
        if not state.looks:
            self._look()
        entry_of = None if self._entries is None else self._entries[1]
        source = batches(self._kept, options.batch, entry_of, options.seed, state.step)
        saved = looked = began = time.monotonic()
        told, said = -SHOWN_EVERY, ""
        while (done := self._done()) < 1:
            loss = self._step(next(source), done)
            if not math.isfinite(loss):
                raise BuildError(
                    f"the loss is {loss} at step {state.step + 1}; take a lower --learning-rate"
                )
            now = time.monotonic()
            state.seconds += now - began if now - began < PAUSE else 1.0
            began = now
            state.step += 1
            state.losses.append(loss)
            if now - looked >= options.look_every:
                looked = now
                self._look()
            if now - saved >= options.save_every:
                saved = now
                self.save()
            if now - told >= SHOWN_EVERY:
                told, said = now, self._told()
            show(self._done(), said)
        self._look()
        self.save()
        self._draft.trained.load_state_dict(self._best, strict=False)

    def _done(self) -> float:
        """Return the share that is done."""
        options, state = self._options, self.state
        shares = [state.seconds / (60 * options.minutes) if options.minutes > 0 else 1.0]
        if options.steps:
            shares = [state.step / options.steps]
        return min(1.0, max(shares))

    def _step(self, batch: TraceBatch, done: float) -> float:
        options, state = self._options, self.state
        rate = min(1.0, (state.step + 1) / WARMUP)
        rate *= FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = options.rate * rate
        self._draft.trained.train()
        losses: list[Tensor] = []
        with _faster():
            begins = _begins(batch, options.seed, state.step)
            for states, places in self._draft.steps(batch, begins, options.positions):
                if len(places):
                    logits = self._draft.logits(states)
                    losses.append(sparse_loss(logits, batch.target.rows(places), options.loss))
        weights = [DECAY**number for number in range(len(losses))]
        loss = torch.stack([w * one for w, one in zip(weights, losses, strict=True)]).sum()
        loss = loss / sum(weights)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._draft.trained.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def _look(self) -> None:
        gamma = self._options.positions
        found = accepted(self._draft, self._held, gamma, self._entries, self._temperature)
        held, looks = tokens_per_round(rounds_of(found, gamma)), self.state.looks
        if not looks or held > max(each for _, each in looks):
            self._best = {name: weight.clone() for name, weight in self._weights().items()}
        looks.append((self.state.step, held))

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights that change."""
        frozen = {n for n, p in self._draft.trained.named_parameters() if not p.requires_grad}
        weights = self._draft.trained.state_dict()
        return {name: weight for name, weight in weights.items() if name not in frozen}

    def _told(self) -> str:
        last = self.state.losses[-20:]
        told = f"step {self.state.step}, loss {sum(last) / len(last):.3f}"
        if self.state.looks:
            told += f", held-out tokens a round {self.state.looks[-1][1]:.3f}"
        return told

    def save(self) -> None:
        """Write the state aside, and put it in its place whole."""
        self._place.mkdir(parents=True, exist_ok=True)
        saved: dict[str, Any] = {
            "identity": self._identity,
            "weights": self._weights(),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
            "state": vars(self.state),
        }
        with replacing(self._place / "state.pt") as file:
            torch.save(saved, file)


def _begins(batch: TraceBatch, seed: int, step: int) -> Tensor:
    """Return where drafts begin that are trained on.

    That is where lookup leaves it to the draft, some of the other places, and the last one.
    Shapes: [N] bool, of the batch's places.
    """
    chances = np.random.default_rng([seed, step]).random(len(batch.asked))
    begins = batch.asked | torch.from_numpy(chances < LOOKED_UP)
    begins[-1] = True
    return begins


def _faster() -> Any:
    """Return a context in which products are in bf16, where the processor has them."""
    there = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast("cpu", torch.bfloat16) if there else nullcontext()
