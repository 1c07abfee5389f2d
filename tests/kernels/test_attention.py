"""Attention of the CPU kernels, over KV buffers of several rows that are changed in place."""

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


@dataclass(frozen=True)
class Case:
    """One layer: sizes, and what it has besides."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    positions: int
    angles: int = 0
    window: int = 0
    softcap: float = 0.0
    joined: bool = True
    reach: int = 0
    """Distances that have a bias of their own; 0 without biases."""
    ahead: bool = False
    """Whether tokens that follow each other see all of these."""
    ring: bool = False


CASES = [
    Case(1, 4, 2, 16, 64, angles=16),
    Case(2, 8, 2, 64, 96, angles=64, joined=False),
    Case(3, 4, 4, 24, 64, angles=8, window=10),
    Case(1, 6, 1, 128, 80, angles=128, softcap=30.0, joined=False),
    Case(2, 2, 1, 40, 48, window=17, softcap=5.0),
    Case(2, 4, 4, 16, 96, joined=False, reach=21),
    Case(1, 4, 2, 8, 64, angles=8, window=30, softcap=5.0, reach=64),
    Case(3, 2, 2, 33, 48, reach=1),
]
AHEAD = [replace(case, ahead=True) for case in CASES if not case.reach]
"""The same where each pass is a block whose tokens see each other."""
FIRST = CASES[0]


class Layer:
    """A layer's operator, its buffers, and the passes it is fed."""

    def __init__(self, case: Case, threads: int = 2) -> None:
        self.case = case
        stride = -(-case.size // 16) * 16
        groups = case.rows, case.kv_heads, case.positions // 16, case.size, 16
        self.keys = np.full(groups, np.nan, np.float32)
        self.values = np.zeros((case.rows, case.kv_heads, case.positions, stride), np.float32)
        self.values[..., : case.size] = np.nan  # what was never written is never read
        angles = np.random.default_rng(1).random((case.positions, case.angles // 2))
        self.tables = [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
        # What is added for a distance; the operator has the furthest first.
        self.biases = np.random.default_rng(2).uniform(-4, 4, (case.heads, case.reach))
        self.stored_biases = self.biases[:, ::-1].astype(np.float32)
        rows, left_out = (FLOAT, [1, "T", None]), (0, list[Any]())
        inputs: dict[str, tuple[int, list[Any]]] = {"q": rows}
        inputs |= {"": left_out, " ": left_out} if case.joined else {"k": rows, "v": rows}
        inputs |= {"key": (FLOAT, [None] * 5), "value": (FLOAT, [None] * 4)}
        inputs |= {"slots": (INT64, ["T"]), "positions": (INT64, ["T"])}
        if case.angles:
            inputs |= {n: (FLOAT, [None, case.angles // 2]) for n in ("cos", "sin")}
        elif case.reach:
            inputs |= {"   ": left_out, "    ": left_out}
        if case.reach:
            inputs |= {"biases": (FLOAT, [case.heads, case.reach])}
        self._session = session(
            "Attention", inputs, {"y": FLOAT, "new_key": FLOAT, "new_value": FLOAT},
            threads=threads, num_heads=case.heads, kv_num_heads=case.kv_heads,
            head_size=case.size, scale=case.size**-0.5, softcap=case.softcap,
            local_window_size=case.window, **({"bidirectional": 1} if case.ahead else {}),
            **({"ring": 1} if case.ring else {}),
        )  # fmt: skip

    def run(self, fed: Pass) -> Array:
        """Run a pass; return y [T, heads * size]."""
        rows = {"q": fed.q[None], "k": fed.k[None], "v": fed.v[None]}
        if self.case.joined:
            rows = {"q": np.concatenate([fed.q, fed.k, fed.v], -1)[None]}
        feeds = {**rows, "key": self.keys, "value": self.values, "slots": fed.slots,
                 "positions": fed.positions}  # fmt: skip
        if self.case.angles:
            feeds |= dict(zip(("cos", "sin"), self.tables, strict=True))
        if self.case.reach:
            feeds["biases"] = self.stored_biases
        y, self.keys, self.values = self._session.run(None, feeds)
        output: Array = y[0]
        return output


@dataclass(frozen=True)
class Pass:
    """The tokens of a pass."""

    slots: Array
    positions: Array
    q: Array
    k: Array
    v: Array

    def taken(self, index: Any) -> Pass:
        """Return some of its tokens."""
        return replace(self, **{name: value[index] for name, value in vars(self).items()})


def passes(case: Case) -> Iterator[Pass]:
    """Fill all rows by passes of random widths; some go back before they go on."""
    rng, lengths = np.random.default_rng(0), [0] * case.rows
    while min(lengths) < case.positions:
        places = []
        for row in range(case.rows):
            lengths[row] = max(0, lengths[row] - int(rng.integers(0, 3)))
            count = min(int(rng.integers(0, 14)), case.positions - lengths[row])
            places += [(row, lengths[row] + i) for i in range(count)]
            lengths[row] += count
        if places:
            slots, positions = np.array(places, np.int64).T.copy()
            heads = case.heads, case.kv_heads, case.kv_heads
            q, k, v = (
                rng.standard_normal((len(places), n * case.size)).astype("f4") for n in heads
            )
            yield Pass(slots, positions, q, k, v)


def one_token(case: Case) -> Pass:
    return next(passes(case)).taken(slice(0, 1))


@pytest.mark.parametrize("rejected", [9, 10])
def test_a_ring_holds_what_a_query_sees_and_what_was_rejected(rejected: int) -> None:
    """At every offset around its ends; with one token more it is a position too small."""
    case = Case(1, 2, 1, 16, 16, window=8, joined=False, ring=True)
    rng, ends = np.random.default_rng(0), range(case.positions, 50)
    differing: list[int] = []
    length = ends.stop + rejected
    q, k, v = (rng.standard_normal((length, n * case.size)).astype("f4") for n in (2, 1, 1))
    text = Pass(np.zeros(length, np.int64), np.arange(length), q, k, v)
    tokens = [text.taken([at]) for at in range(length)]
    wrong = [replace(token, k=token.k * np.nan, v=token.v * np.nan) for token in tokens]
    whole, layer = Layer(replace(case, positions=64, ring=False)), Layer(case)
    right = [whole.run(token) for token in tokens]
    for end in ends:
        for token in (*tokens[:end], *wrong[end : end + rejected]):
            layer.run(token)
        differing += [] if np.array_equal(layer.run(tokens[end]), right[end]) else [end]
    assert differing == ([] if rejected == 9 else [*ends])
    layer.run(text.taken(slice(0, 9)))
    with pytest.raises(Exception, match="over a ring of 16"):
        layer.run(text.taken(slice(0, 10)))


def rotated(case: Case, tables: list[Array], x: Array, position: int) -> Array:
    """Rotate heads [heads, size] in halves."""
    half = case.angles // 2
    cos, sin = (table[position] for table in tables)
    low, high, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)


def attended(query: Array, keys: Array, values: Array, softcap: float, biases: Any = 0) -> Array:
    """Attend by the formula: a scaled query [H, D] to keys and values [S, H or fewer, D]."""
    k, v = (np.repeat(a, len(query) // a.shape[1], axis=1) for a in (keys, values))
    scores = np.einsum("hd,khd->hk", query, k) + biases
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hk,khd->hd", weights, v).reshape(-1))


@pytest.mark.parametrize("case", CASES + AHEAD)
def test_attention_is_that_of_the_formula(case: Case) -> None:
    layer, bound = Layer(case), 3e-5 if case.softcap else 5e-6
    keys = np.zeros((case.rows, case.positions, case.kv_heads, case.size))
    values = np.zeros_like(keys)
    for fed in passes(case):
        y = layer.run(fed)
        places = list(zip(fed.slots.tolist(), fed.positions.tolist(), strict=True))
        for i, (row, at) in enumerate(places):
            keys[row, at] = rotated(case, layer.tables, fed.k[i].reshape(case.kv_heads, -1), at)
            values[row, at] = fed.v[i].reshape(case.kv_heads, -1)
        for i, (row, at) in enumerate(places):
            query = rotated(case, layer.tables, fed.q[i].reshape(case.heads, -1), at)
            end = max(there for of, there in places if of == row) if case.ahead else at
            seen = slice(max(0, at + 1 - case.window) if case.window else 0, end + 1)
            distances = np.minimum(at - np.arange(seen.start, seen.stop), case.reach - 1)
            biases = layer.biases[:, distances] if case.reach else 0
            scaled = query * case.size**-0.5
            expected = attended(scaled, keys[row, seen], values[row, seen], case.softcap, biases)
            assert np.abs(expected - y[i]).max() < bound


@pytest.mark.parametrize("case", [case for case in CASES + AHEAD if not case.joined])
def test_tokens_without_queries_leave_keys_and_values(case: Case) -> None:
    """Queries of the last tokens alone: a block after what a target left, of the same rows."""
    whole, some = Layer(case), Layer(case)
    for fed in passes(case):
        # Those without a query come first, of whichever row; the order of a pass is its caller's.
        starts = np.array([fed.positions[fed.slots == slot].min() for slot in fed.slots])
        asks = fed.positions >= starts + 3
        order = np.argsort(asks, kind="stable")
        turned, first = fed.taken(order), len(asks) - int(asks.sum())
        expected = whole.run(fed)[order][first:]
        assert np.array_equal(some.run(replace(turned, q=turned.q[first:])), expected)
    check_buffers(whole, some)


def check_buffers(one: Layer, other: Layer) -> None:
    assert np.array_equal(one.keys, other.keys, equal_nan=True)
    assert np.array_equal(one.values, other.values, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_same_bits_alone_and_with_others(case: Case) -> None:
    together, alone = Layer(case), Layer(case, threads=1)
    for fed in passes(case):
        y = together.run(fed)
        for i in range(len(y)):
            assert np.array_equal(alone.run(fed.taken(slice(i, i + 1)))[0], y[i])
    assert together.run(fed.taken(slice(0, 0))).shape == (0, case.heads * case.size)
    check_buffers(together, alone)


def test_a_value_that_is_no_number_reaches_no_token_before_it() -> None:
    fed = next(p for p in passes(FIRST) if len(p.slots) > 5).taken(slice(0, 6))
    fed = replace(fed, positions=np.arange(6))
    wrong = fed.v.copy()
    wrong[5] = np.nan
    spoiled = Layer(FIRST).run(replace(fed, v=wrong))
    assert np.array_equal(spoiled[:5], Layer(FIRST).run(fed)[:5])


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("case", "layer", "fed", "said"),
    [
        (FIRST, {}, {"slots": np.array([1])}, "it has 1 rows of 64"),
        (FIRST, {}, {"positions": np.array([64])}, "it has 1 rows of 64"),
        (FIRST, {}, {"positions": np.array([-1])}, "it has 1 rows of 64"),
        (FIRST, {"tables": [zeros(8, 8)] * 2}, {"positions": np.array([8])}, "it has 1 rows of 8"),
        (CASES[1], {}, {"q": zeros(2, 512)}, "inputs of other sizes"),  # more queries than tokens
        # As many numbers, and no whole group; rows of keys alone.
        (FIRST, {"keys": zeros(1, 2, 17, 16, 1), "values": zeros(1, 2, 17, 16)}, {}, "KV buffers"),
        (FIRST, {"keys": zeros(2, 2, 1, 16, 16), "values": zeros(1, 2, 32, 16)}, {}, "KV buffers"),
        *((CASES[5], {"stored_biases": zeros(*shape)}, {}, "biases|rank|dimensions")
          for shape in ((3, 21), (4, 0), (4,))),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_layer_is_refused(
    case: Case, layer: dict[str, Any], fed: dict[str, Array], said: str
) -> None:
    opened = Layer(case)
    vars(opened).update(layer)
    with pytest.raises(Exception, match=said):
        opened.run(replace(one_token(case), **fed))


def test_keys_without_values_are_refused() -> None:
    rows, place = (FLOAT, [1, "T", None]), (INT64, ["T"])
    buffers = {"key": (FLOAT, [1, 1, 1, 1, 16]), "value": (FLOAT, [1, 1, 16, 16])}
    inputs = {"q": rows, "k": rows, " ": (0, []), **buffers, "slots": place, "positions": place}
    opened = session(
        "Attention", inputs, {"y": FLOAT, "k2": FLOAT, "v2": FLOAT},
        num_heads=1, kv_num_heads=1, head_size=1, scale=1.0, softcap=0.0, local_window_size=0,
    )  # fmt: skip
    feeds: dict[str, Array] = {"q": zeros(1, 1, 1), "k": zeros(1, 1, 1)}
    feeds |= {name: zeros(*shape) for name, (_, shape) in buffers.items()}
    with pytest.raises(Exception, match="inputs of other sizes"):
        opened.run(None, feeds | {name: np.zeros(1, np.int64) for name in ("slots", "positions")})


@dataclass(frozen=True)
class Cross:
    """Cross attention of one layer: sizes, and the lengths of the sources of each row."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    size: int
    positions: int
    softcap: float = 0.0


CROSSES = [
    Cross((5, 48, 16), 4, 4, 16, 48),
    Cross((33,), 6, 2, 24, 64, softcap=5.0),
    Cross((1, 17), 2, 2, 7, 32),
]


class CrossLayer:
    """The operator, and keys and values that are not numbers after each source."""

    def __init__(self, case: Cross, threads: int = 2) -> None:
        shape = len(case.lengths), case.kv_heads, case.positions, case.size
        self.keys, self.values = np.random.default_rng(3).standard_normal((2, *shape))
        for row, length in enumerate(case.lengths):
            self.keys[row, :, length:] = self.values[row, :, length:] = np.nan
        groups = self.keys.reshape(*shape[:2], -1, 16, case.size).swapaxes(-1, -2)
        padding = [(0, 0)] * 3 + [(0, -case.size % 16)]
        self.stored = {
            "key": np.ascontiguousarray(groups, np.float32),
            "value": np.pad(self.values, padding).astype(np.float32),
            "lengths": np.array(case.lengths, np.int64),
        }
        inputs: dict[str, tuple[int, list[Any]]] = {
            "q": (FLOAT, [1, "T", None]), "key": (FLOAT, [None] * 5), "value": (FLOAT, [None] * 4),
            "slots": (INT64, ["T"]), "lengths": (INT64, [None]),
        }  # fmt: skip
        self._session = session(
            "CrossAttention", inputs, {"y": FLOAT}, threads=threads, num_heads=case.heads,
            kv_num_heads=case.kv_heads, head_size=case.size, scale=0.5, softcap=case.softcap,
        )  # fmt: skip

    def run(self, slots: Array, q: Array) -> Array:
        """Run a pass; return y [T, heads * size]."""
        output: Array = self._session.run(None, {"q": q[None], "slots": slots, **self.stored})[0][0]
        return output


@pytest.mark.parametrize("case", CROSSES)
def test_every_token_attends_to_all_of_its_source_with_the_same_bits_alone(case: Cross) -> None:
    layer, alone = CrossLayer(case), CrossLayer(case, threads=1)
    rng, bound = np.random.default_rng(4), 3e-5 if case.softcap else 5e-6
    for _ in range(12):
        counts = rng.integers(0, 14, len(case.lengths))
        slots = np.repeat(rng.permutation(len(counts)), counts)
        q = rng.standard_normal((len(slots), case.heads * case.size)).astype(np.float32)
        for i, y in enumerate(layer.run(slots, q)):
            row = slots[i]
            keys, values = (
                a[row, :, : case.lengths[row]].swapaxes(0, 1) for a in (layer.keys, layer.values)
            )
            expected = attended(q[i].reshape(case.heads, -1) * 0.5, keys, values, case.softcap)
            assert np.abs(expected - y).max() < bound
            assert np.array_equal(alone.run(slots[i : i + 1], q[i : i + 1])[0], y)


@pytest.mark.parametrize(
    ("row", "lengths", "said"),
    [
        (3, [1, 1, 1], "got row 3; it has 3"),
        (-1, [1, 1, 1], "got row -1; it has 3"),
        (1, [1, 0, 1], "length 0 of row 1; expected 1 to 48"),
        (2, [1, 0, 49], "length 49 of row 2; expected 1 to 48"),
        (0, [1, 1], "inputs of other sizes"),
    ],
)
def test_a_token_without_a_source_is_refused(row: int, lengths: list[int], said: str) -> None:
    layer = CrossLayer(CROSSES[0])
    layer.stored["lengths"] = np.array(lengths, np.int64)
    with pytest.raises(Exception, match=said):
        layer.run(np.array([row]), zeros(1, 64))
