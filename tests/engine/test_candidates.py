"""What need not be read: logits in a greedy round, and rows whose best tokens tell it all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import ArrayLike, NDArray

from runtime.toy import TableEngine, TableOutput, best, near, plain, run
from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, distribution_of, process
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import REACH, ModelDrafter
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import run_alone

PROMPT = [3, 1, 4, 1, 5]
KNOWN = 16
"""Candidates of the toy engines: of 29 tokens."""

Row = NDArray[np.float32]


@dataclass(frozen=True)
class Sealed:
    """An output whose logits nobody may read."""

    argmax: NDArray[np.int64]
    candidates: Any = None
    confidence: Any = None

    @property
    def logits(self) -> Row:
        raise AssertionError("logits were read")


class SealedEngine(TableEngine):
    """An engine that leaves its logits on the device."""

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Any:
        made = super().forward(tokens, start, rows)
        return Sealed(made.argmax, made.candidates, made.confidence)


def told(row: Row, k: int, *, sealed: bool = False) -> Any:
    """Return an output of one row, with its k best tokens."""
    logits = row[None, None]
    peak = logits.max(-1)
    argmax = np.where(np.isfinite(peak), logits.argmax(-1), -1)
    if sealed:
        return Sealed(argmax, best(logits, k))
    return TableOutput(logits, argmax, np.ones((1, 1), np.float32), best(logits, k))


def assert_same(found: Distribution, wanted: Distribution) -> None:
    """Hold two distributions to the same bits."""
    np.testing.assert_array_equal(found.ids, wanted.ids)
    np.testing.assert_array_equal(found.probs, wanted.probs)
    assert found.ids.dtype == wanted.ids.dtype


# Rows and options

_ITEMS = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from(np.float32([0.0, -0.0, 1.0, 2.0, -3e38, 3e38, -np.inf]).tolist()),
)
_TIES = st.integers(-3, 3).map(float)
_BAD = st.one_of(_ITEMS, st.sampled_from([np.inf, np.nan]))


def rows(items: st.SearchStrategy[float]) -> st.SearchStrategy[Row]:
    return hnp.arrays(np.float32, st.integers(1, 60), elements=items)


ROWS = st.one_of(rows(_ITEMS), rows(_TIES), rows(_BAD), rows(st.just(-np.inf)))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(
        st.floats(0.05, 4.0), st.sampled_from([5e-324, 1e-30, 1e-3, 1.0, 1e30, 1e300])
    ),
    top_k=st.one_of(st.just(0), st.integers(1, 70)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0), st.sampled_from([1e-6])),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-6, 1e-308, 5e-324])),
)

CUT = SamplingParams(temperature=1.0, top_p=0.6, min_p=0.1)
"""What min-p leaves is among the best tokens, and how much of it top-p leaves depends on all."""


@settings(max_examples=1500, deadline=None)
@given(ROWS, PARAMS, st.integers(1, 60), st.one_of(st.none(), st.integers(1, 60)))
@example(np.float32([3, 2, 2, 2, 1]), SamplingParams(temperature=1.0, top_k=2), 3, None)
@example(np.float32([3, 2, 2, 1, 1]), SamplingParams(temperature=1.0, top_k=2, top_p=0.9), 4, None)
@example(np.float32([0, -744.5, -744.5]), SamplingParams(temperature=1.0, min_p=5e-324), 2, None)
@example(np.float32([0, -0.5, -1, *[-3] * 50]), CUT, 4, None)
@example(np.float32([0, -744.4, -745, -746]), SamplingParams(temperature=1.0), 2, None)
def test_the_distribution_of_candidates_is_that_of_the_row(
    row: Row, params: SamplingParams, k: int, vocabulary: int | None
) -> None:
    k = min(k, len(row))
    output = told(row, k)
    if output.argmax[0, 0] < 0:
        with pytest.raises(EngineError, match="not numbers"):
            process(row, params)
        with pytest.raises(EngineError, match="not numbers"):
            distribution_of(output, 0, params)
        return
    assert_same(distribution_of(output, 0, params), process(row, params))
    if vocabulary is not None and np.isfinite(row[:vocabulary].max()):
        found = distribution_of(output, 0, params, vocabulary=vocabulary)
        assert_same(found, process(row[:vocabulary], params))


@settings(max_examples=500, deadline=None)
@given(rows(_TIES), st.floats(0.05, 4.0), st.integers(1, 20), st.floats(0.05, 1.0), st.data())
def test_logits_are_not_read_where_candidates_tell_all(
    row: Row, temperature: float, top_k: int, top_p: float, data: st.DataObject
) -> None:
    """So it is once all that ties with the k-th best is there, and a worse one after it."""
    falling = np.sort(row)[::-1]
    behind = int((row >= falling[min(top_k, len(row)) - 1]).sum()) + 1
    if behind > len(row):
        return
    k = data.draw(st.integers(behind, len(row)))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.01)
    assert_same(distribution_of(told(row, k, sealed=True), 0, params), process(row, params))
    with pytest.raises(AssertionError, match="logits were read"):
        distribution_of(told(row, behind - 1, sealed=True), 0, replace(params, min_p=0.0))


@settings(deadline=None)
@given(rows(_ITEMS), st.floats(0.05, 2.0), st.floats(1e-6, 1.0))
def test_min_p_alone_is_told_once_the_last_candidate_weighs_too_little(
    row: Row, temperature: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, min_p=min_p)
    if not np.isfinite(row.max()):
        return
    kept = process(row, params).ids
    gaps = (np.sort(row)[::-1].astype(float) - float(row.max())) / temperature
    k = int((gaps >= np.log(min_p) - 1e-5).sum()) + 1
    if k <= len(row):
        assert_same(distribution_of(told(row, k, sealed=True), 0, params), process(row, params))
        assert len(kept) < k


@settings(deadline=None)
@given(rows(_ITEMS), PARAMS, st.integers(1, 60), st.integers(1, 60))
def test_a_draft_never_reads_logits(row: Row, params: SamplingParams, k: int, known: int) -> None:
    """Its distribution is that of its candidates, and where they suffice that of the row."""
    output = told(row, min(k, len(row)), sealed=True)
    values, ids = (a[0, 0] for a in output.candidates)
    if output.argmax[0, 0] < 0 or not (np.isfinite(values) & (ids < known)).any():
        return
    found = distribution_of(output, 0, params, REACH, known)
    assert (np.diff(found.ids) > 0).all()
    assert set(found.ids) <= set(ids[ids < known])
    assert found.probs.sum() == pytest.approx(1.0, abs=1e-12)
    assert (found.probs > 0).all()
    if len(ids) == len(row):
        assert_same(found, process(row[:known], params, REACH))


def test_a_row_whose_argmax_is_none_is_refused_without_its_logits() -> None:
    """Candidates do not show a NaN that is somewhere else in the row."""
    values, ids = best(np.float32([[[3, 2, 1, 0]]]), 3)
    broken = Sealed(np.array([[-1]]), (values, ids))
    for reach in (np.inf, REACH):
        with pytest.raises(EngineError, match=r"not numbers .* Check the checkpoint"):
            distribution_of(broken, 0, SamplingParams(temperature=1.0, top_k=1), reach)


@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_a_greedy_round_reads_no_logits(gamma: int) -> None:
    target = SealedEngine(3)
    draft = SealedEngine(4)
    draft.table = (0.7 * target.table + 0.3 * draft.table).astype(np.float32)
    done = run(target, draft, PROMPT, gamma=gamma, new=60)
    assert done.tokens == plain(target, PROMPT, 60)
    assert gamma == 0 or sum(r.accepted for r in done.rounds) > 10


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
@pytest.mark.parametrize("row", range(5))
def test_a_greedy_row_that_is_no_numbers_is_refused_where_it_counts(value: float, row: int) -> None:
    """The second pass verifies four tokens, and the draft is wrong about the third."""

    def corrupt(call: int, logits: Row) -> None:
        if call == 2:
            logits[0, row] = value

    target = SealedEngine(3)
    draft = near(target, 1, 1.0)
    draft.wrong_at = {len(PROMPT) + 1 + 2}
    expected = plain(target, PROMPT, 40)
    target.corrupt = corrupt
    if row <= 2:  # rows 3 and 4 lie behind the rejection
        with pytest.raises(EngineError, match=r"not numbers .* Check the checkpoint"):
            run(target, draft, PROMPT, gamma=4, new=40)
    else:
        assert run(target, draft, PROMPT, gamma=4, new=40).tokens == expected


@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_k": 5, "top_p": 0.8}, {"min_p": 0.6}, {"top_k": 1}], ids=str
)
def test_sampled_rounds_are_the_same_with_candidates_and_without(
    verifier: str, options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=1.1, verifier=verifier, **options)
    # Nothing in the draft's reach is left out by 29 candidates, so that both drafts are the same.
    for seed in range(5):
        whole = TableEngine(2, scale=2.0)
        told = SealedEngine(2, scale=2.0, candidates=KNOWN)
        wanted = run(whole, near(whole, 9, 0.8), PROMPT, gamma=4, params=params, seed=seed)
        draft = near(whole, 9, 0.8, candidates=29)
        found = run(told, draft, PROMPT, gamma=4, params=params, seed=seed)
        assert found.tokens == wanted.tokens
        assert [r.accepted for r in found.rounds] == [r.accepted for r in wanted.rounds]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=str)
def test_candidates_that_do_not_tell_all_change_no_token(options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.1, **options)
    wanted = run(TableEngine(2), None, PROMPT, params=params).tokens
    told = TableEngine(2, candidates=4)
    draft = SealedEngine(2, candidates=4)
    done = run(told, draft, PROMPT, gamma=4, params=params)
    assert done.tokens == wanted
    assert sum(r.accepted for r in done.rounds) > 10


def drafter(engine: TableEngine, vocabulary: int | None = None, **options: Any) -> ModelDrafter:
    return ModelDrafter(
        KVCache(engine), SamplingParams(**options), Noise(0), FixedGamma(4), vocabulary
    )


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}], ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
def test_a_draft_stops_where_its_scores_are_no_numbers(
    value: float, options: dict[str, float]
) -> None:
    def corrupt(call: int, logits: Row) -> None:
        if call == 3:
            logits[...] = value

    engine = SealedEngine(3, candidates=KNOWN, corrupt=corrupt)
    assert len(run_alone(drafter(engine, **options).propose(PROMPT, 4)).tokens) == 2


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}], ids=str)
def test_a_draft_proposes_no_token_that_the_target_does_not_know(
    options: dict[str, float],
) -> None:
    found: set[int] = set()
    for seed in range(20):
        engine = TableEngine(seed, candidates=3)
        found |= set(run_alone(drafter(engine, 6, **options).propose(PROMPT, 4)).tokens)
    assert found <= set(range(6))
    assert len(found) > 3
