"""Generators of several rows over toy engines, and an engine held within a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from specrt.engine.protocol import Engine
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.scheduler.request import Request
from specrt.speculation.costs import Costs
from specrt.speculation.pool import Models
from specrt.text.tokenizer import Tokenizer
from support.rows import padded
from support.toy import TableEngine, near

WIDTH, LENGTH = 16, 128
COSTS = Costs((100.0, *(105.0 + 5 * i for i in range(40))), tuple(10.0 * g for g in range(9)))
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SOME = SamplingParams(max_tokens=40)

Build = Callable[[TableEngine, int], Engine]


def toys(vocab: int) -> tuple[TableEngine, TableEngine]:
    target = TableEngine(4, vocab=vocab, max_length=LENGTH, max_width=WIDTH)
    return target, near(target, 5, 0.7)


def few_rows(engine: TableEngine, batch: int) -> TableEngine:
    """Return an engine of equally wide rows that scores few positions in a pass."""
    made: Any = padded(engine, batch)
    made.max_rows, honest = 9, made.forward

    def forward(tokens: Any, start: Any, rows: int | None = None) -> Any:
        assert rows is not None
        assert rows <= 9
        return honest(tokens, start, rows)

    made.forward = forward
    return made


def models_of(build: Build, batch: int, tokenizer: Tokenizer, **options: Any) -> Models:
    target, draft = toys(tokenizer.size)
    options = {"costs": COSTS, **options}
    return Models(build(target, batch), build(draft, batch), tuple(range(9)), 4, **options)


def rows(build: Build, batch: int, tokenizer: Tokenizer, **options: Any) -> Generator:
    return Generator(models_of(build, batch, tokenizer), tokenizer, **options)


def alone(tokenizer: Tokenizer) -> Generator:
    models = Models(*toys(tokenizer.size), tuple(range(9)), 4, costs=COSTS)
    return Generator(models, tokenizer, prompt_cache=False)


def shared_prompt(length: int) -> list[int]:
    return [(i * 37) % 251 for i in range(length)]


def target_of(made: Generator) -> Any:
    target: Any = made.models.target
    return getattr(target, "rows", [target])[0]


def request_of(made: Generator, prompt: list[int]) -> Request:
    """Return the request that runs with a prompt."""
    held = [slot.request for slot in made._scheduler._slots if slot.request is not None]
    return next(r for r in held if r.tokens[: len(prompt)] == prompt)


class Gate:
    """Holds an engine within its next pass until it is let go."""

    def __init__(self, engine: Any) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self._engine, self._honest = engine, engine.forward
        engine.forward = self

    def __call__(self, *args: Any) -> Any:
        self._engine.forward = self._honest
        self.inside.set()
        assert self.go.wait(30)
        return self._honest(*args)
