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


class Layer:
    """A layer's operator, its buffers, and the passes it is fed."""

    def __init__(self, case: Case, threads: int = 2) -> None:
        self.case = case
        stride = -(-case.size // 16) * 16
        self.keys = np.full(
            (case.rows, case.kv_heads, case.positions // 16, case.size, 16), np.nan, np.float32
        )
        self.values = np.zeros((case.rows, case.kv_heads, case.positions, stride), np.float32)
        self.values[..., : case.size] = np.nan  # what was never written is never read
        angles = np.random.default_rng(1).random((case.positions, case.angles // 2))
        self.tables = [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
        inputs: dict[str, tuple[int, list[Any]]] = {"q": (FLOAT, [1, "T", None])}
        if not case.joined:
            inputs |= {name: (FLOAT, [1, "T", None]) for name in "kv"}
        else:
            inputs |= {"": (0, []), " ": (0, [])}
        inputs |= {"key": (FLOAT, [None] * 5), "value": (FLOAT, [None] * 4)}
        inputs |= {"slots": (INT64, ["T"]), "positions": (INT64, ["T"])}
        # What is added for a distance, and how it lies.
        self.biases = np.random.default_rng(2).uniform(-4, 4, (case.heads, case.reach))
        self._stored_biases = self.biases[:, ::-1].astype(np.float32)
        if case.angles:
            inputs |= {n: (FLOAT, [None, case.angles // 2]) for n in ("cos", "sin")}
        elif case.reach:
            inputs |= {" " * (i + 3): (0, []) for i in range(2)}
        if case.reach:
            inputs |= {"biases": (FLOAT, [case.heads, case.reach])}
        self._session = session(
            "Attention", inputs, {"y": FLOAT, "new_key": FLOAT, "new_value": FLOAT},
            threads=threads, num_heads=case.heads, kv_num_heads=case.kv_heads,
            head_size=case.size, scale=case.size**-0.5, softcap=case.softcap,
            local_window_size=case.window, **({"bidirectional": 1} if case.ahead else {}),
        )  # fmt: skip

    def run(self, slots: Array, positions: Array, q: Array, k: Array, v: Array) -> Array:
        """Run a pass; return y [T, heads * size]."""
        feeds: dict[str, Array] = {"q": q[None], "k": k[None], "v": v[None]}
        if self.case.joined:
            feeds = {"q": np.concatenate([q, k, v], -1)[None]}
        feeds |= {"key": self.keys, "value": self.values, "slots": slots, "positions": positions}
        if self.case.angles:
            feeds |= dict(zip(("cos", "sin"), self.tables, strict=True))
        if self.case.reach:
            feeds["biases"] = self._stored_biases
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

    def taken(self, index: slice) -> Pass:
        """Return some of its tokens."""
        return replace(self, **{name: value[index] for name, value in vars(self).items()})

    def of(self, layer: Layer) -> Array:
        """Run it."""
        return layer.run(self.slots, self.positions, self.q, self.k, self.v)


def passes(case: Case, seed: int = 0) -> Iterator[Pass]:
    """Fill all rows by passes of random widths; some go back before they go on."""
    rng = np.random.default_rng(seed)
    lengths = [0] * case.rows
    while min(lengths) < case.positions:
        places = []
        for row in range(case.rows):
            lengths[row] = max(0, lengths[row] - int(rng.integers(0, 3)))
            count = min(int(rng.integers(0, 14)), case.positions - lengths[row])
            places += [(row, lengths[row] + i) for i in range(count)]
            lengths[row] += count
        if places:
            slots, positions = np.array(places, np.int64).T.copy()
            q, k, v = (
                rng.standard_normal((len(places), heads * case.size)).astype(np.float32)
                for heads in (case.heads, case.kv_heads, case.kv_heads)
            )
            yield Pass(slots, positions, q, k, v)


def rotated(case: Case, tables: list[Array], x: Array, position: int) -> Array:
    """Rotate heads [heads, size] in halves."""
    half = case.angles // 2
    cos, sin = (table[position] for table in tables)
    low, high, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)


@pytest.mark.parametrize("case", CASES + AHEAD)
def test_attention_is_that_of_the_formula(case: Case) -> None:
    layer = Layer(case)
    keys = np.zeros((case.rows, case.positions, case.kv_heads, case.size))
    values = np.zeros_like(keys)
    for fed in passes(case):
        y = fed.of(layer)
        places = list(zip(fed.slots.tolist(), fed.positions.tolist(), strict=True))
        for i, (row, at) in enumerate(places):
            keys[row, at] = rotated(case, layer.tables, fed.k[i].reshape(case.kv_heads, -1), at)
            values[row, at] = fed.v[i].reshape(case.kv_heads, -1)
        for i, (row, at) in enumerate(places):
            query = rotated(case, layer.tables, fed.q[i].reshape(case.heads, -1), at)
            end = max(there for of, there in places if of == row) if case.ahead else at
            seen = slice(max(0, at + 1 - case.window) if case.window else 0, end + 1)
            shared = case.heads // case.kv_heads
            k, v = (np.repeat(a[row, seen], shared, axis=1) for a in (keys, values))
            scores = np.einsum("hd,khd->hk", query * case.size**-0.5, k)
            if case.reach:
                distances = at - np.arange(seen.start, seen.stop)
                scores += layer.biases[:, np.minimum(distances, case.reach - 1)]
            if case.softcap:
                scores = np.tanh(scores / case.softcap) * case.softcap
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected = np.einsum("hk,khd->hd", weights, v).reshape(-1)
            assert np.abs(expected - y[i]).max() < (3e-5 if case.softcap else 5e-6)


@pytest.mark.parametrize("case", [case for case in CASES + AHEAD if not case.joined])
def test_tokens_without_queries_leave_keys_and_values(case: Case) -> None:
    """Queries of the last tokens alone: a block behind what a target left, of the same rows."""
    whole, some = Layer(case), Layer(case)
    for fed in passes(case):
        # Those without a query come first, of whichever row; the order of a pass is its caller's.
        starts = np.array([fed.positions[fed.slots == slot].min() for slot in fed.slots])
        asks = fed.positions >= starts + 3
        order = np.argsort(asks, kind="stable")
        turned = fed.taken(order)
        first = len(asks) - int(asks.sum())
        expected = fed.of(whole)[order][first:]
        found = some.run(turned.slots, turned.positions, turned.q[first:], turned.k, turned.v)
        assert np.array_equal(found, expected)
    assert np.array_equal(whole.keys, some.keys, equal_nan=True)
    assert np.array_equal(whole.values, some.values, equal_nan=True)


def test_more_queries_than_tokens_are_refused() -> None:
    case = CASES[1]
    layer, fed = Layer(case), next(passes(CASES[1]))
    more = np.concatenate([fed.q, fed.q[:1]])
    with pytest.raises(Exception, match="inputs of other sizes"):
        layer.run(fed.slots, fed.positions, more, fed.k, fed.v)


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_same_bits_alone_and_beside_others(case: Case) -> None:
    together, alone = Layer(case), Layer(case, threads=1)
    for fed in passes(case):
        y = fed.of(together)
        for i in range(len(y)):
            assert np.array_equal(fed.taken(slice(i, i + 1)).of(alone)[0], y[i])
    assert np.array_equal(together.keys, alone.keys, equal_nan=True)
    assert np.array_equal(together.values, alone.values, equal_nan=True)


def test_biases_of_other_heads_are_refused() -> None:
    case = CASES[5]
    for shape in ((case.heads - 1, case.reach), (case.heads, 0), (case.heads,)):
        layer = Layer(case)
        layer._stored_biases = np.zeros(shape, np.float32)
        with pytest.raises(Exception, match=r"biases|rank|dimensions"):
            next(p for p in passes(case) if len(p.slots)).of(layer)


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
    """The operator, and keys and values that are no numbers behind each source."""

    def __init__(self, case: Cross, threads: int = 2) -> None:
        self.case = case
        rng = np.random.default_rng(3)
        shape = (len(case.lengths), case.kv_heads, case.positions, case.size)
        self.keys, self.values = rng.standard_normal((2, *shape))
        for row, length in enumerate(case.lengths):
            self.keys[row, :, length:] = self.values[row, :, length:] = np.nan
        groups = self.keys.reshape(*shape[:2], -1, 16, case.size).swapaxes(-1, -2)
        behind = -case.size % 16
        self.stored = {
            "key": np.ascontiguousarray(groups, np.float32),
            "value": np.pad(self.values, [(0, 0)] * 3 + [(0, behind)]).astype(np.float32),
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


def cross_passes(case: Cross) -> Iterator[tuple[Array, Array]]:
    """Yield slots and queries of passes of some rows, each of several tokens."""
    rng = np.random.default_rng(4)
    for _ in range(12):
        counts = rng.integers(0, 14, len(case.lengths))
        slots = np.repeat(rng.permutation(len(counts)), counts)
        yield slots, rng.standard_normal((len(slots), case.heads * case.size)).astype(np.float32)


@pytest.mark.parametrize("case", CROSSES)
def test_every_token_attends_to_all_of_its_source(case: Cross) -> None:
    layer = CrossLayer(case)
    for slots, q in cross_passes(case):
        y = layer.run(slots, q)
        for i, row in enumerate(slots.tolist()):
            keys, values = (
                np.repeat(a[row, :, : case.lengths[row]], case.heads // case.kv_heads, axis=0)
                for a in (layer.keys, layer.values)
            )
            scores = np.einsum("hd,hkd->hk", q[i].reshape(case.heads, -1) * 0.5, keys)
            if case.softcap:
                scores = np.tanh(scores / case.softcap) * case.softcap
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected = np.einsum("hk,hkd->hd", weights, values).reshape(-1)
            assert np.abs(expected - y[i]).max() < (3e-5 if case.softcap else 5e-6)


@pytest.mark.parametrize("case", CROSSES)
def test_a_token_crosses_with_the_same_bits_alone_and_beside_others(case: Cross) -> None:
    together, alone = CrossLayer(case), CrossLayer(case, threads=1)
    for slots, q in cross_passes(case):
        y = together.run(slots, q)
        for i in range(len(y)):
            assert np.array_equal(alone.run(slots[i : i + 1], q[i : i + 1])[0], y[i])


def test_a_token_without_a_source_is_refused() -> None:
    case = CROSSES[0]
    layer, q = CrossLayer(case), np.zeros((1, case.heads * case.size), np.float32)
    for row, lengths, said in (
        (3, [1, 1, 1], "got row 3; it has 3"),
        (-1, [1, 1, 1], "got row -1; it has 3"),
        (1, [1, 0, 1], "length 0 of row 1; expected 1 to 48"),
        (2, [1, 0, 49], "length 49 of row 2; expected 1 to 48"),
        (0, [1, 1], "inputs of other sizes"),
    ):
        layer.stored["lengths"] = np.array(lengths, np.int64)
        with pytest.raises(Exception, match=said):
            layer.run(np.array([row]), q)


def test_tokens_outside_the_buffers_are_refused() -> None:
    case = CASES[0]
    layer = Layer(case)
    fed = next(passes(case)).taken(slice(0, 1))
    for wrong in (
        replace(fed, slots=np.array([1])),
        replace(fed, positions=np.array([case.positions])),
        replace(fed, positions=np.array([-1])),
    ):
        with pytest.raises(Exception, match="it has 1 rows of 64"):
            wrong.of(layer)


def test_tokens_behind_the_cosines_are_refused() -> None:
    case = CASES[0]
    layer = Layer(case)
    layer.tables = [table[:8] for table in layer.tables]
    fed = next(passes(case)).taken(slice(0, 1))
    with pytest.raises(Exception, match="it has 1 rows of 8"):
        replace(fed, positions=np.array([8])).of(layer)


def test_buffers_of_other_shapes_are_refused() -> None:
    case = CASES[0]
    fed = next(passes(case)).taken(slice(0, 1))
    for keys, values in (
        ((1, 2, 17, 16, 1), (1, 2, 17, 16)),  # as many numbers, and no whole group
        ((2, 2, 1, 16, 16), (1, 2, 32, 16)),
    ):
        layer = Layer(case)
        layer.keys, layer.values = np.zeros(keys, np.float32), np.zeros(values, np.float32)
        with pytest.raises(Exception, match="KV buffers of other sizes"):
            fed.of(layer)


def test_keys_without_values_are_refused() -> None:
    one = {"q": (FLOAT, [1, "T", None]), "k": (FLOAT, [1, "T", None]), " ": (0, [])}
    buffers = {"key": (FLOAT, [1, 1, 1, 1, 16]), "value": (FLOAT, [1, 1, 16, 16])}
    places = {"slots": (INT64, ["T"]), "positions": (INT64, ["T"])}
    opened = session(
        "Attention", {**one, **buffers, **places}, {"y": FLOAT, "k2": FLOAT, "v2": FLOAT},
        num_heads=1, kv_num_heads=1, head_size=1, scale=1.0, softcap=0.0, local_window_size=0,
    )  # fmt: skip
    feeds: dict[str, Array] = {name: np.ones((1, 1, 1), np.float32) for name in "qk"}
    feeds |= {"key": np.ones((1, 1, 1, 1, 16)), "value": np.ones((1, 1, 16, 16))}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    with pytest.raises(Exception, match="inputs of other sizes"):
        opened.run(None, feeds | {name: np.zeros(1, np.int64) for name in places})


def test_a_pass_of_no_tokens_leaves_the_buffers() -> None:
    for case in CASES:
        layer = Layer(case)
        fed = next(passes(case))
        fed.of(layer)
        keys, values = layer.keys.copy(), layer.values.copy()
        assert fed.taken(slice(0, 0)).of(layer).shape == (0, case.heads * case.size)
        assert np.array_equal(layer.keys, keys, equal_nan=True)
        assert np.array_equal(layer.values, values, equal_nan=True)


def test_a_value_that_is_no_number_reaches_no_token_before_it() -> None:
    case = CASES[0]
    whole, spoiled = Layer(case), Layer(case)
    fed = replace(
        next(p for p in passes(case) if len(p.slots) > 5), slots=np.zeros(6, np.int64),
        positions=np.arange(6),
    )  # fmt: skip
    fed = replace(fed, q=fed.q[:6], k=fed.k[:6], v=fed.v[:6])
    wrong = fed.v.copy()
    wrong[5] = np.nan
    assert np.array_equal(replace(fed, v=wrong).of(spoiled)[:5], fed.of(whole)[:5])


def attend_all() -> Iterator[Array]:
    """Yield what all cases come to, for a comparison of instruction sets."""
    for case in CASES + AHEAD:
        layer = Layer(case)
        for fed in passes(case):
            yield fed.of(layer)
    for cross in CROSSES:
        crossing = CrossLayer(cross)
        for slots, q in cross_passes(cross):
            yield crossing.run(slots, q)
