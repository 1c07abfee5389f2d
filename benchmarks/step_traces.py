"""Texts of several rows on which the gamma policy of shared steps can be ridden without an engine.

A company of rows has the texts of its requests, which take a row each until they are over, and what
steps take: by rows, drafted tokens, draft passes and rows that draft. What a policy would have
gained is then arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gamma_traces import FOLDER as TRACES
from gamma_traces import (
    H200,
    LARGEST,
    MACHINES,
    TEXT,
    Drafts,
    Trace,
    alone,
    beginnings,
    draft,
    recorded,
)

from specrt.speculation.auto_gamma import AutoGamma
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.round import Round
from specrt.speculation.shared_step import DraftingRow, SharedStep

ROWS = 4
FOLDER = TRACES / "steps"


class Regret(NamedTuple):
    """The most that `auto` may fall behind the best fixed gamma."""

    mean: float
    worst: float


REGRETS = {"made": Regret(0.02, 0.25), "recorded": Regret(0.04, 0.30)}
"""By where the costs come from."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """What steps take on one machine, in nanoseconds."""

    verify_ns: Sequence[Sequence[float]]
    """By rows less one and drafted tokens of all, a step besides drafting."""
    draft_ns: Sequence[Sequence[float]]
    """By rows that draft less one and passes, drafting."""
    jitter: Sequence[float] = (1.0,)

    @classmethod
    def of(cls, costs: Costs, rows: int = ROWS) -> StepCosts:
        """Return those of a machine that was measured with one row: passes cost by their width."""
        wider = [costs.verify(n) / costs.verify(0) for n in range(rows)]
        return cls(
            [[costs.verify(w) + costs.outside_ns * n for w in range(n - 1, n * (LARGEST + 1))]
             for n in range(1, rows + 1)],
            [[costs.draft(g) * times for g in range(LARGEST + 1)] for times in wider],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Company:
    """Texts that run at once, what steps take, and what is known of that before."""

    name: str
    texts: Sequence[Trace]
    costs: StepCosts
    tuned: Costs


class Row:
    """The policies of a row, and the text that they are on."""

    def __init__(self, company: Company, step: SharedStep, gamma: int | None) -> None:
        costs, self._copied = company.tuned, False
        self._model: GammaPolicy = AutoGamma(costs, LARGEST, step=step)
        self._first: GammaPolicy = self._model
        if gamma is not None:
            self._first = self._model = FixedGamma(gamma)
        elif company.texts[0].second is not None:
            free = replace(costs, draft_ns=(0.0,) * len(costs.draft_ns))
            self._first = AutoGamma(free, LARGEST, self._model, step)

    def begin(self, text: Trace) -> None:
        """Go on with another text."""
        self._text, self._position = text, 0

    @property
    def over(self) -> bool:
        """Whether the text has come to its end."""
        return self._position + LARGEST >= self._text.length

    @property
    def drafting(self) -> list[DraftingRow]:
        """What plans a step, where it is planned."""
        return [DraftingRow(self._model)] if isinstance(self._model, AutoGamma) else []

    def begin_draft(self) -> None:
        """Copy where the first drafter does; else see how far the model may draft."""
        self.passes, self.kept, self._copied = 0, 0, False
        if self._text.second is not None:
            _, self.kept, _ = draft(self._first, self._text.drafts, self._position)
            self._copied = self.kept > 0
        self.most = 0 if self._copied else min(self._model.choose(), len(self._proposed))

    @property
    def _drafts(self) -> Drafts:
        second = self._text.second
        return self._text.drafts if second is None or self._copied else second

    @property
    def _proposed(self) -> Sequence[float]:
        return self._drafts.confidence[self._position]

    @property
    def accepted(self) -> int:
        """How many of the tokens kept are right."""
        return min(self.kept, self._drafts.right[self._position])

    def draft_one(self) -> None:
        """Draft a token."""
        self.passes += 1
        decision = self._model.decide(self.passes, self._proposed[self.passes - 1])
        if decision is not DraftDecision.DISCARD:
            self.kept = self.passes
        if decision is not DraftDecision.CONTINUE:
            self.most = self.passes

    def observe(self, round_: Round) -> None:
        """Let the policies learn, and go on."""
        self._position += len(round_.tokens)
        if self._first is not self._model and not self._copied:
            self._model.observe(round_)
            round_ = Round([0], 0, 0, round_.draft_ns, round_.verify_ns)
        self._first.observe(round_)


def ride(company: Company, gamma: int | None = None) -> float:
    """Return the tokens per second of `auto`, or of a fixed gamma.

    The policy sees passes as they vary. What they come to is summed as they usually are: a pass
    that another program held up for 30 steps is chance, whoever ran it.
    """
    step, costs = SharedStep(company.tuned, LARGEST), company.costs
    waiting, rows = list(company.texts), list[Row]()
    free = [Row(company, step, gamma) for _ in range(ROWS)]
    tokens, spent, number = 0, 0.0, 0
    while waiting or rows:
        while waiting and free:
            rows.append(free.pop())
            rows[-1].begin(waiting.pop(0))
        step.begin(len(rows), [each for row in rows for each in row.drafting])
        for row in rows:
            row.begin_draft()
        drafting, number = sum(row.most > 0 for row in rows), number + 1
        while drafts := [row for row in rows if row.passes < row.most]:
            for row in drafts:
                row.draft_one()
        passes = max(row.passes for row in rows)
        kept, accepted = [row.kept for row in rows], [row.accepted for row in rows]
        slower = costs.jitter[number % len(costs.jitter)]
        usual = (
            costs.draft_ns[max(0, drafting - 1)][passes],
            costs.verify_ns[len(rows) - 1][sum(kept)],
        )
        draft_ns, verify_ns = (round(slower * ns) for ns in usual)
        for row, drafted, right in zip(rows, kept, accepted, strict=True):
            row.observe(Round([0] * (right + 1), drafted, right, draft_ns, verify_ns))
        made = sum(accepted) + len(rows)
        if len(rows) > 1 and gamma is None:
            step.settle(made, kept, draft_ns, verify_ns, passes, drafting)
        tokens, spent = tokens + made, spent + sum(usual)
        free += [row for row in rows if row.over]
        rows = [row for row in rows if not row.over]
    return tokens / spent * 1e9


def regret(company: Company) -> float:
    """Return by what share `auto` falls behind the best fixed gamma."""
    return 1 - ride(company) / max(ride(company, gamma) for gamma in range(LARGEST + 1))


def companies() -> dict[str, list[Company]]:
    """Return companies of recorded texts: on machines that were recorded, and on made ones."""
    found: dict[str, list[Company]] = {"made": [], "recorded": []}
    machines = {
        name: ("made", StepCosts.of(costs), costs) for name, costs in (MACHINES | H200).items()
    }
    for path in sorted(FOLDER.glob("*.npz")):
        machines[path.stem] = ("recorded", *read(path))
    for trace in map(recorded, sorted(TRACES.glob("codelet-*.npz"))):
        for drafter in (trace, alone(trace, "model")):
            texts = beginnings(drafter, TEXT - LARGEST)
            for name, (kind, costs, tuned) in machines.items():
                for count in (1, 2, 4, 8):
                    for known in (tuned, Costs.assume(LARGEST)):
                        label = "untuned" if known.assumed else "tuned"
                        title = f"{name}, {count} of {drafter.name}, {label}"
                        found[kind].append(Company(title, texts[:count], costs, known))
    return found


def save(path: Path, costs: StepCosts, tuned: Costs) -> None:
    """Write what steps take on a machine, and what was tuned for one row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {f"verify_{n}": ns for n, ns in enumerate(costs.verify_ns)}
    np.savez_compressed(
        path, **arrays, draft=costs.draft_ns, jitter=np.array(costs.jitter, np.float32),
        tuned_verify=tuned.verify_ns, tuned_draft=tuned.draft_ns, tuned_outside=tuned.outside_ns,
    )  # fmt: skip


def read(path: Path) -> tuple[StepCosts, Costs]:
    """Return what `save` wrote."""
    arrays = np.load(path)
    verify = [rising(arrays[f"verify_{n}"]) for n in range(ROWS)]
    drafting = [rising(ns) for ns in arrays["draft"]]
    costs = StepCosts(verify, drafting, arrays["jitter"].tolist())
    passes, drafts = (tuple(arrays[f"tuned_{name}"].tolist()) for name in ("verify", "draft"))
    return costs, Costs(passes, drafts, float(arrays["tuned_outside"]))


def rising(ns: Any) -> list[float]:
    """Return medians of few passes without what noise makes of them: a wider pass takes longer.

    Each is the mean of the most before it and the least that follows.
    """
    least = np.minimum.accumulate(ns[::-1])[::-1]
    return [float(each) for each in (np.maximum.accumulate(ns) + least) / 2]
