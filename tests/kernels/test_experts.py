"""Mixtures of experts by the CPU kernels: what they come to, and that a row decides it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from support.kernels import Stored, matmul, session, stored

Array = NDArray[Any]
FORMATS = [("int4", 32), ("int8", 32), ("int4-zeros", 16), ("fp4", 32), ("bf16", 0), ("fp32", 0)]
EXPERTS, SLOTS, HIDDEN, INNER = 7, 3, 64, 96


class Mixture:
    """Experts with weights and biases of their own."""

    def __init__(self, format_: str, block: int, *, activation: str = "silu") -> None:
        self.activation = activation
        self.block = block and 16
        scale = 1e6 if format_ == "fp4" else 1  # fp32 for all experts
        sizes = ((2 * INNER, HIDDEN, block), (HIDDEN, INNER, self.block))
        self.gate_up, self.down = (
            [
                stored(format_, *size, gates=not i, seed=2 * e + i, scale=scale)
                for e in range(EXPERTS)
            ]
            for i, size in enumerate(sizes)
        )
        rng = np.random.default_rng(1)
        self.gate_up_bias = rng.standard_normal((EXPERTS, 2 * INNER)).astype(np.float32)
        self.down_bias = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
        self.products = [
            (matmul(g, gb, activation=activation, threads=1), matmul(d, db, threads=1))
            for g, gb, d, db in zip(
                self.gate_up, self.gate_up_bias, self.down, self.down_bias, strict=True
            )
        ]

    def opened(self, *, threads: int = 2, exact: bool = False) -> Any:
        """Return a function of x, experts and weights, all [T, ..]."""
        alternating = self.gate_up_bias.reshape(EXPERTS, 2, -1, 16).transpose(0, 2, 1, 3)
        feeds = {"gate_up_bias": alternating.reshape(EXPERTS, -1), "down_bias": self.down_bias}
        inputs = {
            "x": (1, ["T", HIDDEN]), "experts": (TensorProto.INT64, ["T", SLOTS]),
            "weights": (1, ["T", SLOTS]), "gate_up": (TensorProto.UINT8, None),
            "down": (TensorProto.UINT8, None),
            **{name: (1, [*bias.shape]) for name, bias in feeds.items()},
        }  # fmt: skip
        tiles = {"gate_up": joined(self.gate_up), "down": joined(self.down)}
        run = session(
            "Experts", {n: (t, s or [*tiles[n].shape]) for n, (t, s) in inputs.items()},
            {"y": 1}, threads=threads, experts=EXPERTS, H=HIDDEN, I=INNER,
            block_size=self.gate_up[0].block, format=self.gate_up[0].format,
            down_block_size=self.down[0].block, down_format=self.down[0].format,
            activation=self.activation, exact=int(exact),
        )  # fmt: skip
        return lambda x, experts, weights: run.run(
            None, {"x": x, "experts": experts, "weights": weights, **tiles, **feeds}
        )[0]

    def expected(self, x: Array, experts: Array, weights: Array) -> Array:
        """Sum what the products of the slots come to, one token at a time."""
        y = np.zeros(x.shape)
        for token, (named, shares) in enumerate(zip(experts, weights, strict=True)):
            for expert, share in zip(named, shares, strict=True):
                gate_up, down = self.products[expert]
                y[token] += float(share) * down(gate_up(x[token : token + 1]))[0]
        return y


def joined(parts: list[Stored]) -> Array:
    """Return the tiles of experts one after another."""
    return np.concatenate([part.tiles.load().view(np.uint8).reshape(1, -1) for part in parts])


def routed(tokens: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return rows, and the experts and weights of each."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, HIDDEN)).astype(np.float32)
    experts = np.argsort(rng.random((tokens, EXPERTS)))[:, :SLOTS].astype(np.int64)
    return x, experts, rng.random((tokens, SLOTS)).astype(np.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("format_", "block"), FORMATS)
def test_a_token_is_the_sum_of_its_experts_with_the_same_bits_in_any_company(
    format_: str, block: int, activation: str
) -> None:
    mixture = Mixture(format_, block, activation=activation)
    alone, together = mixture.opened(threads=1), mixture.opened()
    x, experts, weights = routed(300)  # more than are read at a time
    rows = np.concatenate([alone(x[i : i + 1], experts[i : i + 1], weights[i : i + 1])
                           for i in range(40)])  # fmt: skip
    expected = mixture.expected(x[:40], experts[:40], weights[:40])
    assert np.abs(rows - expected).max() <= 1e-5 * np.abs(expected).max()
    for width in (1, 2, 5, 9, 17, 40):
        for part in (slice(width), slice(40 - width, 40)):
            assert np.array_equal(together(x[part], experts[part], weights[part]), rows[part])
    order = np.random.default_rng(2).permutation(300)
    many = together(x[order], experts[order], weights[order])
    assert np.array_equal(many, together(x, experts, weights)[order])
    assert together(x[:0], experts[:0], weights[:0]).shape == (0, HIDDEN)


def test_an_expert_may_be_named_twice_and_exact_products_are_near() -> None:
    mixture = Mixture("int8", 32)
    x, experts, weights = routed(5)
    experts[:, 1] = experts[:, 0]
    exact = mixture.opened(exact=True)(x, experts, weights)
    quantized = mixture.opened()(x, experts, weights)
    expected, most = mixture.expected(x, experts, weights), np.abs(exact).max()
    assert np.abs(quantized - expected).max() <= 1e-5 * most
    assert 0 < np.abs(exact - quantized).max() <= 0.05 * most


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"experts": np.full((2, SLOTS), EXPERTS)}, f"expert {EXPERTS}; it has {EXPERTS}"),
        ({"experts": np.full((2, SLOTS), -1)}, "expert -1"),
        ({"experts": np.zeros((3, SLOTS), np.int64), "weights": np.ones((3, SLOTS), np.float32)},
         "other tokens"),
        ({"weights": np.ones((3, SLOTS), np.float32)}, "another size"),
    ],
)  # fmt: skip
def test_experts_that_are_not_there_are_refused(wrong: dict[str, Array], said: str) -> None:
    given = dict(zip(("x", "experts", "weights"), routed(2), strict=True)) | wrong
    with pytest.raises(Exception, match=said):
        Mixture("fp32", 0).opened()(*given.values())


def test_weights_of_fewer_experts_are_refused() -> None:
    mixture = Mixture("fp32", 0)
    mixture.down.pop()
    with pytest.raises(Exception, match="another size"):
        mixture.opened()(*routed(1))
