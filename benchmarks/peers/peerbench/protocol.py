"""A runner keeps one peer's models loaded: a line of JSON in is an order, a line out its outcome.

The runner says hello first. Every peer's runner imports this file in its own environment, so it
needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TextIO

Gamma = int | Literal["auto"]
AUTO: Literal["auto"] = "auto"
PLAIN = "plain"
SPECULATIVE = "speculative"
NGRAM = "ngram"


@dataclass(frozen=True)
class Order:
    """Prompts to complete greedily, end tokens ignored, exactly `max_tokens` each."""

    prompts: list[list[int]]
    max_tokens: int
    mode: str = PLAIN
    gamma: Gamma = 0
    """Tokens to draft each round, or `auto`: whatever the peer's own policy chooses."""

    @classmethod
    def from_json(cls, line: str) -> Order:
        """Read an order. Raises: ValueError, TypeError where it is none."""
        order = cls(**json.loads(line))
        order = replace(order, gamma=parse_gamma(str(order.gamma)) if order.mode != PLAIN else 0)
        if not all(order.prompts) or order.max_tokens < 2:
            raise ValueError("an order has prompts of at least one token and at least two to make")
        return order


def parse_gamma(text: str) -> Gamma:
    """Read a gamma: `auto`, or a number of at least 1. Raises: ValueError."""
    if text == AUTO:
        return AUTO
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"gamma is {text!r}; expected a number of at least 1, or {AUTO}")
    return int(text)


@dataclass(frozen=True)
class Completed:
    """One prompt completed.

    Units: nanoseconds. `ttft_ns` runs to the first delivery, which brought `first` tokens;
    `decode_ns` from there to the last one.
    """

    tokens: list[int]
    ttft_ns: int
    decode_ns: int
    first: int = 1
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What an order came to: one entry per prompt in every list, or an error."""

    tokens: list[list[int]] = field(default_factory=list)
    ttft_ns: list[int] = field(default_factory=list)
    decode_ns: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    drafted: list[int | None] = field(default_factory=list)
    accepted: list[int | None] = field(default_factory=list)
    error: str = ""

    @classmethod
    def of(cls, completed: Iterable[Completed]) -> Outcome:
        """Join completions prompt by prompt."""
        rows = list(completed)
        columns: dict[str, Any] = {name: [getattr(r, name) for r in rows] for name in _COLUMNS}
        return cls(**columns)

    @property
    def decoded(self) -> int:
        """Tokens that came after the first delivery of their prompt: what decoding made."""
        return sum(len(t) - f for t, f in zip(self.tokens, self.first, strict=True))

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decoding, all prompts together."""
        return self.decoded / (sum(self.decode_ns) / 1e9)

    @property
    def whole_rate(self) -> float:
        """Tokens per second from request to last token, reading the prompts included."""
        return sum(map(len, self.tokens)) / (sum(self.ttft_ns + self.decode_ns) / 1e9)


_COLUMNS = ("tokens", "ttft_ns", "decode_ns", "first", "drafted", "accepted")


@dataclass(frozen=True)
class Hello:
    """Who a runner is, what it can do, and the versions it runs."""

    peer: str
    modes: list[str]
    versions: dict[str, str]
    adaptive: list[str] = field(default_factory=list)
    """Modes in which gamma may be `auto`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What was chosen where the peer leaves a choice."""


class Peer(Protocol):
    """A runtime with its models loaded."""

    hello: Hello

    def complete(self, prompt: Sequence[int], order: Order) -> Completed:
        """Complete one prompt. Raises: anything; it becomes the outcome's error."""
        ...


def serve(opening: Callable[[], AbstractContextManager[Peer]]) -> None:
    """Open a peer, answer orders until input ends, close it.

    Whatever the peer's library prints goes to standard error.
    """
    answers = _private_stdout()
    with opening() as peer:
        _send(answers, asdict(peer.hello))
        for line in sys.stdin:
            _send(answers, asdict(fulfil(peer, line)))


def fulfil(peer: Peer, line: str) -> Outcome:
    """Do what one line orders; a failure becomes an outcome with an error."""
    try:
        order = Order.from_json(line)
        if order.mode not in peer.hello.modes:
            raise ValueError(f"{peer.hello.peer} has no mode {order.mode!r}")
        return Outcome.of(peer.complete(prompt, order) for prompt in order.prompts)
    except Exception as error:  # a peer may raise anything; the other peers go on
        return Outcome(error=f"{type(error).__name__}: {error}")


def _private_stdout() -> TextIO:
    """Keep standard output for answers, and send what else is printed to standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _send(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
