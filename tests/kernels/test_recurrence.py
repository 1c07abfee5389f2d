"""Layers with a recurrent state, of the CPU kernels: a state that is folded late, and a ring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from support.kernels import session

Array = NDArray[Any]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
RING = 16
LENGTH = 90
"""Positions of each row in the end: several turns of the ring."""


@dataclass(frozen=True)
class Case:
    """One layer."""

    rows: int
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    delta: int = 1
    epsilon: float = 1e-6
    lag: int = 0

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the operator."""
        sizes = {n: getattr(self, n) for n in ("key_heads", "key_size", "value_size")}
        rule = {"delta": self.delta, "epsilon": self.epsilon, "scale": self.key_size**-0.5,
                "lag": self.lag}  # fmt: skip
        return {"num_heads": self.heads, **sizes, **rule}


CASES = [
    Case(1, 4, 2, 16, 32),
    Case(2, 6, 2, 24, 40, lag=5),
    Case(2, 4, 4, 7, 5, delta=0, epsilon=0.0),
    Case(1, 2, 1, 128, 64, epsilon=0.0, lag=15),
    Case(3, 3, 1, 33, 50, delta=0),
]
FIRST = CASES[0]


@dataclass(frozen=True)
class Pass:
    """The tokens of a pass, [T, ..] each."""

    slots: Array
    positions: Array
    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


TOKENS = "q", "k", "v", "g", "beta"


class Layer:
    """The operator, and its memory, which is what it is before anything is written."""

    def __init__(self, case: Case, threads: int = 2) -> None:
        self.case = case
        numbers = case.heads + case.key_heads * case.key_size + case.heads * case.value_size
        shape = case.rows, case.heads, case.key_size, -(-case.value_size // 16) * 16
        self.state = np.full(shape, np.nan, np.float32)
        self.base = np.full(case.rows, 77)
        self.factors = np.full((case.rows, 1, RING, -(-numbers // 16) * 16), np.nan, np.float32)
        row, rows = (FLOAT, [1, "T", None]), (INT64, ["T"])
        inputs: dict[str, tuple[int, list[Any]]] = dict.fromkeys(TOKENS, row)
        inputs |= {"state": (FLOAT, [None] * 4), "factors": (FLOAT, [None] * 4)}
        inputs |= {"base": (INT64, [None]), "slots": rows, "positions": rows}
        outputs = dict.fromkeys(("y", "new_state", "new_factors"), FLOAT) | {"new_base": INT64}
        self._session = session("Recurrence", inputs, outputs, threads=threads, **case.attributes)

    def run(self, fed: Pass) -> Array:
        """Run a pass; return y [T, heads * value_size]."""
        feeds = {n: v[None] if n in TOKENS else v for n, v in vars(fed).items()}
        feeds |= {"state": self.state, "factors": self.factors, "base": self.base}
        y, self.state, self.factors, self.base = self._session.run(None, feeds)
        output: Array = y[0]
        return output

    def states(self) -> Array:
        """Return the states, [rows, heads, key_size, value_size]."""
        heads = self.state.reshape(*self.state.shape[:2], -1)
        size, columns = self.state.shape[2:]
        starts = range(0, columns, 32)
        panels = np.split(heads, [size * start for start in starts[1:]], axis=-1)
        made = [panel.reshape(*heads.shape[:2], size, -1) for panel in panels]
        return np.concatenate(made, -1)[..., : self.case.value_size]


def tokens_of(case: Case, count: int, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    keys, heads = case.key_heads * case.key_size, case.heads
    sizes = zip(TOKENS, (keys, keys, heads * case.value_size, heads, heads), strict=True)
    made = {n: rng.standard_normal((count, size)).astype("f4") for n, size in sizes}
    shrink = 1 if case.epsilon else case.key_size**-0.5  # keys of length 1, or nearly
    made |= {"k": made["k"] * np.float32(shrink), "g": -np.abs(made["g"]) / 4}
    return made | {"beta": 1 / (1 + np.exp(-made["beta"]))}


class Text:
    """What each row reads, and what the operator should make of it: the formula in float64."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tokens = [tokens_of(case, LENGTH, seed) for seed in range(case.rows)]
        self.y, self.states = zip(*(self._computed(t) for t in self.tokens), strict=True)

    def _computed(self, tokens: dict[str, Array]) -> tuple[Array, Array]:
        """Return y [T, heads * value_size], and the states before each position."""
        case, states, y = self.case, [], []
        q, k, v, g, beta = (tokens[n].astype("f8") for n in TOKENS)
        q, k = (a.reshape(LENGTH, case.key_heads, -1) for a in (q, k))
        if case.epsilon:
            q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + case.epsilon) for a in (q, k))
        q, k = (np.repeat(a, case.heads // case.key_heads, axis=1) for a in (q, k))
        v = v.reshape(LENGTH, case.heads, -1)
        state = np.zeros((case.heads, case.key_size, case.value_size))
        for at in range(LENGTH):
            states.append(state)
            state = state * np.exp(g[at])[:, None, None]
            seen = np.einsum("hd,hde->he", k[at], state) if case.delta else 0
            u = beta[at][:, None] * (v[at] - seen)
            state = state + k[at][:, :, None] * u[:, None]
            y.append(np.einsum("hd,hde->he", q[at], state).reshape(-1) * case.key_size**-0.5)
        return np.array(y), np.array([*states, state])

    def fed(self, *spans: tuple[int, int, int]) -> Pass:
        """Return a pass over spans, (row, start, width) each."""
        places = [(row, start + i) for row, start, width in spans for i in range(width)]
        slots, positions = np.array(places, np.int64).reshape(-1, 2).T.copy()
        rows = {n: np.stack([self.tokens[r][n][p] for r, p in places]) for n in TOKENS}
        return Pass(slots, positions, **rows)

    def expected(self, fed: Pass) -> Array:
        return np.stack([self.y[r][p] for r, p in zip(fed.slots, fed.positions, strict=True)])


def rounds(text: Text, layer: Any, seed: int, widest: int = 40) -> Iterator[Pass]:
    """Read all rows by passes of random widths, of which a random part is kept."""
    rng, rows = np.random.default_rng(seed), text.case.rows
    starts = np.zeros(rows, np.int64)
    while starts.min() < LENGTH:
        spans = []
        for row in rng.permutation(rows):
            width = int(
                rng.choice([0, 1, int(rng.integers(1, 10)), int(rng.integers(1, widest + 1))])
            )
            width = min(width, LENGTH - starts[row])
            spans += [(row, starts[row], width)] if width else []
        if not spans:
            continue
        yield text.fed(*spans)
        for row, start, width in spans:
            after = layer.base[row]
            assert 0 <= after <= max(start, start + width - RING)
            least = max(after, start) if rng.random() < 0.8 else after
            starts[row] = rng.integers(least, start + width + 1)


def one_at_a_time(case: Case, text: Text, threads: int = 1) -> list[Array]:
    """Return y of each row."""
    layer = Layer(case, threads)
    return [
        np.array([layer.run(text.fed((row, at, 1)))[0] for at in range(LENGTH)])
        for row in range(case.rows)
    ]


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_of_the_formula_with_the_same_bits_in_all_rounds(case: Case) -> None:
    text = Text(case)
    alone = one_at_a_time(case, text)
    for seed in range(8):
        layer = Layer(case, threads=1 + seed % 2)
        for fed in rounds(text, layer, seed):
            y = layer.run(fed)
            assert np.abs(y - text.expected(fed)).max() < 5e-6
            own = np.stack([alone[r][p] for r, p in zip(fed.slots, fed.positions, strict=True)])
            assert np.array_equal(y, own)
            if np.bincount(fed.slots).max() <= RING:  # it can be run again
                assert np.array_equal(layer.run(fed), y)
        for row, at in enumerate(layer.base):
            found = layer.states()[row]
            assert not at or np.abs(found - text.states[row][at]).max() < 5e-6


@pytest.mark.parametrize("wrong", ["one too many", "one too few", "the decay of another token"])
def test_a_state_that_is_folded_wrongly_is_seen(wrong: str) -> None:
    text, layer = Text(FIRST), Layer(FIRST)
    layer.run(text.fed((0, 0, 4)))
    layer.run(text.fed((0, 4, 5)))
    layer.base = layer.base + {"one too many": -1, "one too few": 1}.get(wrong, 0)
    if layer.base[0] == 4:
        layer.factors[0, 0, 5, : FIRST.heads] = layer.factors[0, 0, 4, : FIRST.heads]
    fed = text.fed((0, 6, 3))
    assert np.abs(layer.run(fed) - text.expected(fed)).max(1).min() > 1e-3


def test_what_is_not_a_number_reaches_no_token_before_it_and_can_be_taken_back() -> None:
    text, layer, clean = Text(FIRST), Layer(FIRST), Layer(FIRST)
    fed, after = text.fed((0, 0, 9)), text.fed((0, 5, 4))
    expected = clean.run(fed)
    for values in (fed.q, fed.k, fed.v, fed.g, fed.beta):
        values[5:] = [[np.nan], [np.inf], [-np.inf], [np.nan]]
    assert np.array_equal(layer.run(fed)[:5], expected[:5])
    assert np.array_equal(layer.run(after), clean.run(after))


def test_a_pass_without_tokens_changes_nothing() -> None:
    text, layer = Text(FIRST), Layer(FIRST)
    layer.run(text.fed((0, 0, 9)))
    state, factors, base = layer.state, layer.factors, layer.base
    none = {n: zeros(0, v.shape[1]) for n, v in text.tokens[0].items()}
    places = {n: np.zeros(0, np.int64) for n in ("slots", "positions")}
    y = layer.run(replace(text.fed((0, 9, 1)), **none, **places))
    assert y.shape == (0, FIRST.heads * FIRST.value_size)
    assert np.array_equal(layer.state, state, equal_nan=True)
    assert np.array_equal(layer.factors, factors, equal_nan=True)
    assert np.array_equal(layer.base, base)


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("start", "changed", "said"),
    [
        (3, {"base": np.array([-1])}, "base -1 of row 0 and lag 0 for positions 3 to 4"),
        (3, {"base": np.array([4])}, "expected at most 3"),
        (20, {"base": np.array([1])}, "less than 16"),
        (3, {"slots": np.array([0, 1])}, "it has 1 rows"),
        (3, {"positions": np.array([-1, 0])}, "it has 1 rows"),
        (3, {"positions": np.array([3, 5])}, "expected the tokens of a row one after"),
        (3, {"base": np.array([3, 3])}, "inputs of other sizes"),
        *((3, {n: np.zeros((2, 5), "f4")}, "inputs of other sizes") for n in TOKENS),
        *(
            (3, {"state": np.zeros(shape, "f4")}, "inputs of other sizes")
            for shape in ((2, 4, 16, 32), (1, 4, 16, 16))
        ),
        *(
            (3, {"factors": np.zeros(shape, "f4")}, "inputs of other sizes")
            for shape in ((1, 1, 16, 160), (1, 1, 17, 176), (1, 1, 0, 176), (2, 1, 16, 176))
        ),
    ],
)
def test_what_does_not_fit_a_layer_is_refused(
    start: int, changed: dict[str, Array], said: str
) -> None:
    layer, fed = Layer(FIRST), Text(FIRST).fed((0, start, 2))
    layer.base = np.array([2])
    for name, value in changed.items():
        if name in vars(layer):
            setattr(layer, name, value)
        else:
            fed = replace(fed, **{name: value})
    with pytest.raises(Exception, match=said):
        layer.run(fed)


@pytest.mark.parametrize("wrong", [{"key_heads": 3}, {"value_size": 0}, {"epsilon": -1.0}])
def test_sizes_that_make_no_layer_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="expected a multiple"):
        Layer(replace(FIRST, **wrong))
