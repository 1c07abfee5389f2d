"""One alignment: a recipe and traces of its target become a draft, and what it is worth."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrt.bundle import TOKENIZER
from specrt.errors import BuildError, RequestError
from specrt.speculation.costs import Costs
from specrt.text.tokenizer import Tokenizer
from specrt.traces import TraceIndex, TraceText, read_index, read_texts
from specrt_export.align.draft_sources import (
    DraftSource,
    head_source,
    layers_source,
    likeliest_entries,
    model_source,
    require_floats,
    stored_weights,
)
from specrt_export.align.prediction import (
    MeasuredCosts,
    Prediction,
    TextAcceptance,
    accepted,
    predictions,
)
from specrt_export.align.trace_batches import TraceWindow, cut, split
from specrt_export.align.trainer import LOOKED_AT, Show, Trainer, TrainingOptions, TrainingState
from specrt_export.atomic_folder import atomic_folder
from specrt_export.check.equivalence import Reference
from specrt_export.checkpoint.provenance import provenance_of
from specrt_export.heads.eagle3_format import Head
from specrt_export.plan.build_plan import BuildPlan
from specrt_export.plan.model_plan import ModelPlan
from specrt_export.plan.pair_vocabulary import check_vocabulary

KINDS = ("draft", "head", "layers")

DRAFTERS = ("model", "cascade")

TRAINED, MEASURED = 256, 512
"""Tokens of a text that are trained on, and measured on."""

MOST_MEASURED = 400
"""Held-out texts that are measured, spread over all."""

RECORD, PLOT = "alignment.json", "alignment.svg"


@dataclass(frozen=True)
class AlignmentOptions:
    """What is made of the traces."""

    kind: str = KINDS[0]
    """`draft` goes on training the recipe's draft model; `head` its head, or a new one; `layers` a
    draft model of some of the target's own layers."""
    depth: int = 0
    """Of `layers`: how many of the target's; a quarter of them when 0."""
    reads: tuple[int, ...] = ()
    """Of a new `head`: the target's layers whose inputs it reads; the usual ones when empty."""
    entries: int = 0
    """How many entries of the vocabulary are kept, the likeliest; all when 0."""
    drafter: str = DRAFTERS[0]
    """What the draft is for: `model`, to draft every round, or `cascade`, to draft what lookup
    leaves."""
    training: TrainingOptions = field(default_factory=TrainingOptions)


@dataclass(frozen=True)
class Outcome:
    """What was expected of decoding before, and is of the new draft; all texts, then each domain.

    `before` is of the recipe's draft; where it has none, of plain decoding, or of lookup alone if
    the new draft is for `cascade`.
    """

    before: tuple[Prediction, ...]
    after: tuple[Prediction, ...]

    @property
    def faster(self) -> bool:
        """Whether the new draft makes decoding faster, over all texts."""
        return self.after[0].speed > self.before[0].speed


class Alignment:
    """A run from traces to a checkpoint.

    Raises: SpecrtError for inputs that do not fit together, before any work.
    """

    def __init__(
        self, plan: BuildPlan, traces: Path, options: AlignmentOptions,
        costs: MeasuredCosts | None, state: Path,
    ) -> None:  # fmt: skip
        self._options, self._state = options, state
        self._plan, self._target, self._draft = plan, plan.target, plan.draft
        _check(plan, options)
        self.index = read_index(traces)
        _check_tokenizer(self.index, traces, self._target)
        self.kept, self.held = split([*read_texts(traces, self.index)])
        self._most = max(plan.engine.gammas, default=1)
        self._costs = costs
        self.state = TrainingState()

    @cached_property
    def _model(self) -> Any:
        return Reference(self._target.checkpoint).model

    @cached_property
    def _measured(self) -> list[TraceWindow]:
        held = self.held[1::2] or self.held
        places = np.linspace(0, len(held) - 1, min(len(held), MOST_MEASURED))
        return [self._cut(held[round(float(at))], MEASURED) for at in places]

    def _cut(self, text: TraceText, most: int) -> TraceWindow:
        return cut(text, most, self._most if self._options.drafter == "cascade" else 0)

    def run(self, show: Show) -> tuple[DraftSource, Outcome]:
        """Train a draft, and tell what it and the one before it are worth.

        Goes on from the state of a run that was killed. Raises: BuildError.
        """
        show(0.0, "measure the draft there is")
        before, measured = self._before()
        source = self._begun()
        options = self._options.training
        if options.steps or options.minutes:
            windows = [self._cut(text, TRAINED) for text in self.kept]
            held = self.held[::2]  # the others are measured
            looked_at = [self._cut(text, MEASURED) for text in held[:LOOKED_AT]]
            trainer = Trainer(
                source.draft, windows, looked_at, source.maps(self.index.vocabulary),
                self.index.temperature, options, self._state, self._identity(source),
            )  # fmt: skip
            if trainer.resume():
                show(None, f"warning: goes on from step {trainer.state.step} of {self._state}")
            trainer.run(show)
            self.state = trainer.state
        source.round()
        show(1.0, "measure the new draft")
        after = self._accepted(source)
        costs = self._costs_of(source, measured)
        return source, Outcome(before, predictions(after, costs, self._most))

    def _before(self) -> tuple[tuple[Prediction, ...], int | None]:
        """Return what the recipe's draft is worth, and how many weights it reads for a token."""
        source = self._of_recipe()
        texts = self._accepted(source) if source is not None else _nothing(self._measured)
        read = None if source is None else source.read
        costs = self._costs_of(source, read)
        drafted = source is not None or self._options.drafter == "cascade"
        return predictions(texts, costs, self._most if drafted else 0), read

    def _costs_of(self, source: DraftSource | None, measured: int | None) -> Costs:
        """Return what passes cost with a draft; `measured` is what the recipe's own reads."""
        known = self._costs
        if known is None:  # what was assumed of a draft was measured of none
            target = stored_weights(self._target.checkpoint)
            known, measured = MeasuredCosts(Costs.assume(self._most), target), None
        return known.costs if source is None else known.of_draft(source.read, measured)

    def _accepted(self, source: DraftSource) -> list[TextAcceptance]:
        maps = source.maps(self.index.vocabulary)
        return accepted(source.draft, self._measured, self._most, maps, self.index.temperature)

    def _of_recipe(self) -> DraftSource | None:
        if self._draft is None:
            return None
        head = self._draft.head
        if head is not None:
            assert isinstance(head, Head), "checked before"
            return head_source(self._target.checkpoint, self._model, head, (), None)
        return model_source(self._draft.checkpoint)

    def _begun(self) -> DraftSource:
        """Return the draft that training begins with."""
        options, target = self._options, self._target.checkpoint
        torch.manual_seed(options.training.seed)  # of a new head
        kept = self._likeliest() if options.entries else None
        if options.kind == "head":
            head = self._draft.head if self._draft is not None else None
            assert head is None or isinstance(head, Head), "checked before"
            return head_source(target, self._model, head, options.reads, kept)
        if options.kind == "layers":
            depth = options.depth or max(1, self._model.config.num_hidden_layers // 4)
            source = layers_source(target, self._model, depth)
        else:
            assert self._draft is not None, "checked before"
            source = model_source(self._draft.checkpoint)
        return source if kept is None else source.trimmed(kept)

    def _likeliest(self) -> NDArray[np.int64]:
        """Return the entries that the target's distributions weigh most in what is trained on."""
        weights = np.zeros(self.index.vocabulary)
        for text in self.kept:
            np.add.at(weights, text.ids.ravel(), np.exp(text.logprobs.astype(np.float64)).ravel())
        return likeliest_entries(weights, self._options.entries, self._plan.ends)

    def _identity(self, source: DraftSource) -> str:
        """Hash what a run must have in common with the one that it goes on from."""
        options = asdict(self._options)
        for name in ("minutes", "steps", "save_every", "look_every"):
            del options["training"][name]
        models = [self._target, *([self._draft] if self._draft is not None else [])]
        files = [provenance_of(model.checkpoint).files for model in models]
        shards = [shard.sha256 for shard in self.index.shards]
        entries = None if source.entries is None else source.entries.tolist()
        return hashlib.sha256(json.dumps([options, files, shards, entries]).encode()).hexdigest()

    def write(self, source: DraftSource, outcome: Outcome, out: Path) -> None:
        """Put the checkpoint, the record and the plot in their place, and drop the state."""
        with atomic_folder(out) as folder:
            source.write(folder)
            text = json.dumps(self.record(outcome), indent=1) + "\n"
            (folder / RECORD).write_text(text, encoding="utf-8")
            if self.state.losses:
                plot(self.state, self._options.training.loss, folder / PLOT)
        shutil.rmtree(self._state, ignore_errors=True)

    def record(self, outcome: Outcome) -> dict[str, Any]:
        """Return what was done and what came of it, as plain JSON types."""
        own = {name: value for name, value in vars(self.index).items() if name != "shards"}
        return {
            "options": asdict(self._options),
            "traces": {**own, "texts": self.index.texts, "tokens": self.index.tokens},
            "held_out": len(self.held),
            "measured": len(self._measured),
            "costs": "assumed" if self._costs is None else "measured",
            "steps": self.state.step,
            "seconds": round(self.state.seconds, 1),
            "looks": self.state.looks,
            "before": [one.to_json() for one in outcome.before],
            "after": [one.to_json() for one in outcome.after],
        }


def plot(state: TrainingState, loss: str, path: Path) -> None:
    """Draw loss and held-out acceptance over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    number = len(state.losses)
    width = max(1, number // 200)
    means = [float(np.mean(state.losses[at : at + width])) for at in range(0, number, width)]
    left.plot([min(at + width, number) for at in range(0, number, width)], means, color="C0")
    left.set(xlabel="step", ylabel=f"loss ({loss})", ylim=(0, None))
    right.plot(*zip(*state.looks, strict=True), color="C1", marker="o")
    right.set(ylabel="held-out tokens a round", ylim=(1, None))
    figure.savefig(path)


def _nothing(windows: Sequence[TraceWindow]) -> list[TextAcceptance]:
    """Return what is accepted of no draft."""
    nothing = [np.zeros((0, len(one.ids)), bool) for one in windows]
    pairs = zip(nothing, windows, strict=True)
    return [TextAcceptance(none, one.domain, one.looked_up) for none, one in pairs]


def _check(plan: BuildPlan, options: AlignmentOptions) -> None:
    """Refuse what cannot be trained.

    Raises: BuildError, CheckpointError.
    """
    target, draft = plan.target, plan.draft
    head = None if draft is None else draft.head
    if head is not None and not isinstance(head, Head):
        raise BuildError(
            f"{plan.recipe} has a head of {head.KIND} in [draft], and heads of {Head.KIND} alone "
            "are trained here; name one, or leave [draft] out for a new one"
        )
    there = draft is not None and head is None
    if options.kind == "draft" and not there:
        has = "no [draft]" if draft is None else "a head in [draft]"
        raise BuildError(
            f"{plan.recipe} has {has}, and kind 'draft' trains a draft model; name one there, or "
            "take --kind head or --kind layers"
        )
    for name, kind in (("depth", "layers"), ("reads", "head")):
        if getattr(options, name) and options.kind != kind:
            raise BuildError(f"--{name} is of --kind {kind}, and the kind is {options.kind}")
    if options.reads and draft is not None and draft.head is not None:
        raise BuildError(
            f"--reads is of a new head, and {plan.recipe} names one; set `layers` in its [draft], "
            "or remove that"
        )
    if options.kind != "draft":
        require_floats(target.checkpoint, "what is made of its layers")
    if draft is not None and draft.head is None:
        require_floats(draft.checkpoint, "a draft model")
        check_vocabulary(target.checkpoint, draft.checkpoint)


def _check_tokenizer(index: TraceIndex, traces: Path, target: ModelPlan) -> None:
    """Refuse traces of other tokens than the target's.

    Raises: RequestError.
    """
    own = Tokenizer(target.checkpoint.folder / TOKENIZER).sha256
    if own != index.tokenizer:
        raise RequestError(
            f"{traces} holds traces of {index.name}, whose tokenizer ({index.tokenizer[:12]}) is "
            f"not that of {target.checkpoint.origin} ({own[:12]}); collect traces with a bundle of "
            "this target"
        )
    scored = target.checkpoint.config.get("vocab_size")
    if scored != index.vocabulary:
        raise RequestError(
            f"{traces} holds traces over {index.vocabulary} entries, and "
            f"{target.checkpoint.origin} has {scored}; collect traces with a bundle of this target"
        )
