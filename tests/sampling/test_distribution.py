"""From logits to a distribution: what transformers' warpers keep, and what may never be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, distribution_of, process
from specrt.speculation.drafters import REACH
from support.toy import TableEngine, TableOutput, best, near, plain, run

Row = NDArray[np.float32]
Weights = NDArray[np.float64]

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.31},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.07},
    {"temperature": 1.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.7, "typical_p": 0.9},
    {"temperature": 1.5, "typical_p": 0.2},
]


def warped(logits: Row, params: SamplingParams) -> Weights:
    torch = pytest.importorskip("torch")
    generation = pytest.importorskip("transformers.generation.logits_process")
    warpers = [
        (generation.TemperatureLogitsWarper, params.temperature, True),
        (generation.TopKLogitsWarper, params.top_k, params.top_k > 0),
        (generation.TopPLogitsWarper, params.top_p, params.top_p < 1),
        (generation.MinPLogitsWarper, params.min_p, params.min_p > 0),
        (generation.TypicalLogitsWarper, params.typical_p, params.typical_p < 1),
    ]
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for warper, value, is_set in warpers:
        scores = warper(value)(None, scores) if is_set else scores
    probs: Weights = scores.softmax(-1)[0].numpy()
    return probs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_distribution_is_that_of_transformers(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    rng = np.random.default_rng(0)
    for size in (2, 50, 500):
        for scale in (0.5, 3.0, 12.0):
            logits = (rng.standard_normal(size) * scale).astype(np.float32)
            logits[rng.random(size) < 0.1] = -np.inf
            logits[0] = 1.0
            found = process(logits, params)
            assert (np.diff(found.ids) > 0).all()
            assert found.probs.sum() == pytest.approx(1.0, abs=1e-12)
            probs, left = warped(logits, params), np.setdiff1d(np.arange(size), found.ids)
            np.testing.assert_allclose(found.probs, probs[found.ids], rtol=1e-9, atol=1e-15)
            assert (probs[left] <= 1e-15).all()


# Rows with hand-made answers: the options, and the ids that are left.
KEPT: list[tuple[dict[str, Any], list[float], list[int]]] = [
    ({"top_k": 2}, [1, 3, 2, 2, 2, 0], [1, 2, 3, 4]),  # what ties with the last one
    ({"top_k": 3}, [-np.inf, 1, -np.inf, 1], [1, 3]),
    ({"top_p": 1e-300}, [0, 1, 5, 2], [2]),
    ({"min_p": 1.0}, [0, 1, 5, 2], [2]),
    ({"top_p": 0.9, "temperature": 0.5}, [3e38, 3e38, -3e38], [0, 1]),
    ({"temperature": 5e-324}, [-3e38, 1, 5, 2, -np.inf], [2]),
    ({"top_p": 0.9, "temperature": 1e300}, [0, -np.inf, 0, 0], [0, 2, 3]),
    ({"typical_p": 0.9, "temperature": 0.05}, [0, 0, 0, -37.24], [0, 1, 2]),
]


@pytest.mark.parametrize(("options", "row", "ids"), KEPT, ids=str)
def test_what_is_kept_of_a_row(options: dict[str, Any], row: list[float], ids: list[int]) -> None:
    logits = np.array(row, np.float32)
    logits.setflags(write=False)
    found = process(logits, SamplingParams(**{"temperature": 1.0, **options}))
    assert found.ids.tolist() == ids
    assert found.probs.sum() == pytest.approx(1.0)
    assert [token for token in range(len(row)) if found.prob(token) > 0] == ids


BROKEN = ([0, np.nan, 1], [0, np.inf, 1], [-np.inf, np.inf, 1], [-np.inf] * 3)


@pytest.mark.parametrize("values", BROKEN, ids=str)
def test_what_is_not_a_number_is_never_sampled_from(values: list[float]) -> None:
    for options in OPTIONS:
        with pytest.raises(EngineError, match=r"not numbers .* Check the checkpoint"):
            process(np.array(values, np.float32), SamplingParams(**options))


# Filters against a sort of everything, as their definitions read


def sorted_typical(weights: Weights, mass: float) -> NDArray[np.bool_]:
    total = weights.sum()
    probs = weights / total
    surprise = np.log(total) - np.log(weights)
    away = np.abs(surprise - (probs * surprise).sum())
    order = np.argsort(away, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    count = max(1, int(np.count_nonzero(before < mass)))
    mask: NDArray[np.bool_] = away <= away[order[count - 1]]
    return mask


def sorted_nucleus(weights: Weights, mass: float) -> NDArray[np.bool_]:
    """Mark the nucleus by sorting all tokens; of those that tie the lower ids stay."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    mask = np.zeros(len(weights), bool)
    mask[order[: max(1, int(np.count_nonzero(before < mass * weights.sum())))]] = True
    return mask


def shaped(shape: str, seed: int, size: int) -> Row:
    """Return logits of a kind that is hard on sums or on order."""
    rng = np.random.default_rng(seed)
    ends = [0.0, -0.0, 1.0, 2.0, -3e38, 3e38, -np.inf]
    made: dict[str, ArrayLike] = {
        "normal": rng.standard_normal(size) * rng.choice([0.1, 1, 10, 300]),
        "ties": rng.integers(-3, 4, size),
        "uniform": np.zeros(size),
        "one-hot": np.where(np.arange(size) == 0, rng.choice([50.0, 500.0, 5e4]), 0.0),
        "two values": rng.integers(0, 2, size) * rng.choice([1e-6, 1.0, 700.0]),
        "underflow": rng.random(size) * -744.0,
        "zipf": np.log1p(np.arange(size)) * -rng.choice([0.5, 1, 2]),
        "halves": np.log(2.0) * -np.arange(size),
        "ends": rng.choice(ends, size),
        "broken": rng.choice([*ends, np.inf, np.nan], size),
        "nothing": np.full(size, -np.inf),
    }
    return np.asarray(made[shape], np.float32)


SHAPES = ("normal", "ties", "uniform", "one-hot", "two values", "underflow", "zipf", "halves")
SEEDS = st.integers(0, 2**32)
MASSES = st.sampled_from([1e-9, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 0.999, 1 - 1e-12])


def rows(*more: str) -> st.SearchStrategy[Row]:
    return st.builds(shaped, st.sampled_from((*SHAPES, *more)), SEEDS, st.integers(1, 60))


@given(
    st.builds(shaped, st.sampled_from(SHAPES), SEEDS, st.sampled_from([1, 2, 3, 10, 64, 700])),
    st.sampled_from([0.05, 0.7, 1.0, 3.0, 100.0]),
    MASSES,
    st.sampled_from(["top_p", "typical_p"]),
)
@example(shaped("normal", 0, 50_000), 0.9, 0.999, "top_p")
@example(shaped("normal", 1, 50_000), 0.9, 0.2, "typical_p")
@settings(deadline=None, max_examples=100)
def test_a_filter_keeps_what_a_sort_of_everything_finds(
    logits: Row, temperature: float, mass: float, name: str
) -> None:
    """The same tokens, and probabilities to the bit."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    ids = np.flatnonzero(weights)
    if name == "top_p":
        ids = ids[sorted_nucleus(weights, mass)[ids]]
    else:
        ids = ids[sorted_typical(weights[ids], mass)]
    found = process(logits, SamplingParams(temperature=temperature, **{name: mass}))
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.probs, weights[ids] / weights[ids].sum())


# What need not be read: logits in a greedy round, and rows whose best tokens tell it all


PROMPT = [3, 1, 4, 1, 5]


@dataclass(frozen=True)
class Sealed:
    """An output whose logits may not be read."""

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


def output_of(row: Row, k: int, *, sealed: bool = False) -> Any:
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


@settings(max_examples=100, deadline=None)
@given(
    rows("ends", "broken", "nothing"),
    PARAMS,
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(1, 60)),
)
@example(np.float32([3, 2, 2, 2, 1]), SamplingParams(temperature=1.0, top_k=2), 3, None)
@example(np.float32([3, 2, 2, 1, 1]), SamplingParams(temperature=1.0, top_k=2, top_p=0.9), 4, None)
@example(np.float32([0, -744.5, -744.5]), SamplingParams(temperature=1.0, min_p=5e-324), 2, None)
@example(np.float32([0, -0.5, -1, *[-3] * 50]), CUT, 4, None)
@example(np.float32([0, -744.4, -745, -746]), SamplingParams(temperature=1.0), 2, None)
def test_the_distribution_of_candidates_is_that_of_the_row(
    row: Row, params: SamplingParams, k: int, vocabulary: int | None
) -> None:
    output = output_of(row, min(k, len(row)))
    if output.argmax[0, 0] < 0:
        for refused in (lambda: process(row, params), lambda: distribution_of(output, 0, params)):
            with pytest.raises(EngineError, match="not numbers"):
                refused()
        return
    assert_same(distribution_of(output, 0, params), process(row, params))
    if vocabulary is not None and np.isfinite(row[:vocabulary].max()):
        found = distribution_of(output, 0, params, vocabulary=vocabulary)
        assert_same(found, process(row[:vocabulary], params))


@settings(deadline=None)
@given(rows("ends", "broken"), PARAMS, st.integers(1, 60), st.integers(1, 60))
def test_a_draft_never_reads_logits(row: Row, params: SamplingParams, k: int, known: int) -> None:
    """Its distribution is that of its candidates, and where they suffice that of the row."""
    output = output_of(row, min(k, len(row)), sealed=True)
    values, ids = (a[0, 0] for a in output.candidates)
    if output.argmax[0, 0] < 0:  # also where its candidates are numbers
        with pytest.raises(EngineError, match=r"not numbers .* Check the checkpoint"):
            distribution_of(output, 0, params, REACH, known)
        return
    if not (np.isfinite(values) & (ids < known)).any():
        return
    found = distribution_of(output, 0, params, REACH, known)
    assert (np.diff(found.ids) > 0).all()
    assert set(found.ids) <= set(ids[ids < known])
    assert found.probs.sum() == pytest.approx(1.0, abs=1e-12)
    assert (found.probs > 0).all()
    if len(ids) == len(row):
        assert_same(found, process(row[:known], params, REACH))


# Rounds


@pytest.mark.parametrize("gamma", [0, 4])
def test_a_greedy_round_reads_no_logits(gamma: int) -> None:
    target, draft = SealedEngine(3), SealedEngine(4)
    draft.table = (0.7 * target.table + 0.3 * draft.table).astype(np.float32)
    done = run(target, draft, PROMPT, gamma=gamma, new=60)
    assert done.tokens == plain(target, PROMPT, 60)
    assert gamma == 0 or sum(r.accepted for r in done.rounds) > 10


@pytest.mark.parametrize("value", [np.inf, np.nan], ids=str)
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
    if row == 0:  # rows 1 and 2 are run again as first ones; 3 and 4 lie after the rejection
        with pytest.raises(EngineError, match=r"not numbers .* Check the checkpoint"):
            run(target, draft, PROMPT, gamma=4, new=40)
    else:
        assert run(target, draft, PROMPT, gamma=4, new=40).tokens == expected
