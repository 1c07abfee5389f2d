"""Generators of several rows over toy engines, and an engine held within a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from runtime.toy import TableEngine, near
from specrt.engine.protocol import Engine
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.costs import Costs
from specrt.speculation.pool import Models
from specrt.text import Tokenizer

WIDTH, LENGTH = 16, 128


COSTS = Costs((100.0, *(105.0 + 5 * i for i in range(40))), tuple(10.0 * g for g in range(9)))


Build = Callable[[TableEngine, int], Engine]


LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def toys(vocab: int) -> tuple[TableEngine, TableEngine]:
    target = TableEngine(4, vocab=vocab, max_length=LENGTH, max_width=WIDTH)
    return target, near(target, 5, 0.7)


def rows(build: Build, batch: int, tokenizer: Tokenizer, **options: Any) -> Generator:
    target, draft = toys(tokenizer.size)
    models = Models(
        build(target, batch), build(draft, batch), tuple(range(9)), 4, measure=lambda _: COSTS
    )
    return Generator(models, tokenizer, **options)


def alone(tokenizer: Tokenizer) -> Generator:
    target, draft = toys(tokenizer.size)
    models = Models(target, draft, tuple(range(9)), 4, measure=lambda _: COSTS)
    return Generator(models, tokenizer, prompt_cache=False)


def shared_prompt(length: int) -> list[int]:
    return [(i * 37) % 251 for i in range(length)]


def target_of(made: Generator) -> Any:
    target: Any = made.models.target
    return getattr(target, "rows", [target])[0]


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
