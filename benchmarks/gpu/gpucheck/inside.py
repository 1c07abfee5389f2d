"""What only plans of TensorRT are held to: their KV buffers, whole rounds, both forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpucheck.passes import Pass, alive, feed, fitted, relative, require_same, run_shapes, text
from gpucheck.step import CheckError, Facts
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.engine.tensorrt.library import NATIVE
from specrt.engine.tensorrt.passes import KV_TYPES, cache_names
from specrt.engine.tensorrt.plan import ITEM_BYTES


def aliasing(engine: TensorRtEngine) -> Facts:
    """Hold a pass to have written its positions of every KV buffer, in place, and no others.

    Raises: CheckError.
    """
    model = engine.model
    if model.record.form != NATIVE:
        raise CheckError(f"the plan is {model.record.form}: its buffers are not updated in place")
    names = cache_names(engine.geometry)
    said = {name: model.plan.aliases(f"present_{name}") for name in names}
    wrong = {name: alias for name, alias in said.items() if alias not in ("", name)}
    if wrong:
        raise CheckError(f"the plan writes other inputs than its own: {wrong}", {"aliases": said})
    tokens = text(engine, 32, seed=2)
    start, width = 12, 3
    feed(engine, tokens[:, :start], 0, 1)
    before = _buffers(engine, names)
    feed(engine, tokens[:, start : start + width], start, 1)
    after = _buffers(engine, names)
    written, kept = slice(start, start + width), [*range(start), *range(start + width, 32)]
    for name in names:
        changed = (before[name] != after[name]).any((0, 1, 3))
        if not changed[written].all():
            raise CheckError(f"{name} was not written in place at positions {start} to "
                             f"{start + width - 1}", {"aliases": said})  # fmt: skip
        outside = np.flatnonzero(changed)
        if changed[kept].any() or len(outside) != width:
            raise CheckError(f"a pass at {start} changed positions {outside.tolist()} of {name}")
    told = sum(bool(alias) for alias in said.values())
    return {
        "buffers": len(names),
        "plan_tells_of": told,
        "bound_in_place": _bound_in_place(engine, names),
        "positions_written": width,
    }


def _buffers(engine: TensorRtEngine, names: Sequence[str]) -> dict[str, Any]:
    """Read KV buffers as bytes [1, heads, positions, bytes of a position]."""
    model, g = engine.model, engine.geometry
    item = ITEM_BYTES[KV_TYPES[model.record.compute]]
    shape = (1, g.kv_heads, engine.max_length, g.head_dim * item)
    found = {}
    for name in names:
        into = np.empty(shape, np.uint8)
        model.device.read(model.caches._places[0][name], into)
        found[name] = into
    return found


def _bound_in_place(engine: TensorRtEngine, names: Sequence[str]) -> bool:
    """Tell whether input and output of every buffer are bound to one address."""

    class Seen:
        def __init__(self) -> None:
            self.at: dict[str, int] = {}

        def set_address(self, name: str, address: int) -> None:
            self.at[name] = address

    seen: Any = Seen()
    engine.model.caches.bind(seen, 0)
    return all(seen.at[name] == seen.at[f"present_{name}"] for name in names)


def rounds(target: TensorRtEngine, draft: TensorRtEngine, gammas: Sequence[int]) -> Facts:
    """Hold whole rounds to the same passes one by one, each round twice: launched, then replayed.

    Raises: CheckError where tokens, confidences or scores differ, or no round could be had.
    """
    whole = CapturedRounds(target, draft)
    tokens, start = text(draft, 24), min(20, target.max_width, draft.max_width)
    for engine in (target, draft):
        feed(engine, tokens[:, :start], 0, 1)
    compared, confidences = 0, 0.0
    for gamma in gammas:
        for pending in (1, 2):
            at = start - pending + 1
            given = tokens[0, at : start + 1].tolist()
            if not whole.fits(gamma, pending, at, start):
                raise CheckError(f"no round of gamma {gamma} with {pending} pending tokens fits")
            for _ in range(2):
                done = whole.run(given, at, given[-1], start, gamma)
                fed = np.array([[given[-1], *done.tokens]])
                found = feed(target, fed, start)
                target.forget()
                singly, sure = _singly(draft, given, at, gamma)
                if singly != done.tokens:
                    raise CheckError(
                        f"gamma {gamma}: a round drafted {done.tokens}, passes {singly}"
                    )
                confidences = max(confidences, _furthest(sure, done.confidences))
                require_same([found], [feed(target, fed, start)], f"gamma {gamma}: verify passes")
                compared += 1
    facts = {"rounds": compared, "gammas": list(gammas), "confidence_apart": confidences}
    if confidences:
        raise CheckError(f"confidences differ by up to {confidences:.1e}", facts)
    return facts


def _furthest(found: Sequence[float], wanted: Sequence[float]) -> float:
    return max((abs(f - w) for f, w in zip(found, wanted, strict=True)), default=0.0)


def _singly(
    draft: TensorRtEngine, pending: list[int], start: int, gamma: int
) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    sure: list[float] = []
    for _ in range(gamma):
        done = draft.forward([pending], start, 1)
        start += len(pending)
        tokens.append(int(done.argmax.item()))
        sure.append(1.0 if done.confidence is None else float(done.confidence.item()))
        pending = [tokens[-1]]
    return tokens, sure


def forms(native: TensorRtEngine, decomposed: TensorRtEngine, tolerance: float) -> Facts:
    """Hold the decomposed form to the native one, stale keys included.

    Raises: CheckError above the tolerance.
    """
    kinds = [one.model.record.form for one in (native, decomposed)]
    if kinds[0] == kinds[1]:
        raise CheckError(f"both plans are {kinds[0]}")
    shapes = fitted(native)
    tokens = text(native, sum(width for width, _ in shapes))
    runs: list[list[Pass]] = []
    for engine in (native, decomposed):
        feed(engine, text(engine, 9, seed=3), 0)  # to be overwritten
        runs.append(run_shapes(engine, tokens, shapes))
    alive(runs[0])
    errors = [relative(d.logits, n.logits) for n, d in zip(*runs, strict=True)]
    facts = {"passes": len(errors), "largest_relative_error": max(errors), "tolerance": tolerance}
    if not max(errors) <= tolerance:
        raise CheckError(f"the two forms are {max(errors):.1e} of the spread apart", facts)
    return facts
