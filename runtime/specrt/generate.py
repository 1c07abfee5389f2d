"""The generator: engines ready to complete prompts, and the streams it makes of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator as Rounding
from collections.abc import Iterable, Sequence
from contextlib import closing
from operator import index
from time import perf_counter_ns
from typing import SupportsIndex

from specrt.completion import Completion, Stream
from specrt.drafters import Drafters, Manner
from specrt.errors import CapacityError, RequestError
from specrt.models import Gamma, Models
from specrt.noise import Noise
from specrt.params import SamplingParams
from specrt.reader import Reader
from specrt.requested import rules_of
from specrt.round import Round
from specrt.rules import Rules
from specrt.speculate import played, speculate
from specrt.stats import SpeculationStats, Timings
from specrt.target import CachedTokens, EngineTarget
from specrt.text import Tokenizer

Rounds = Rounding[Round, None, None]


class Generator:
    """A pair of engines ready to complete prompts.

    Threads: one completion runs at a time. A stream that is still unfinished when another begins
    is refused when it is next asked, because the KV buffers now hold the other's tokens.
    """

    def __init__(
        self,
        models: Models,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int] = (),
        notices: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.models = models
        self.notices = tuple(notices)
        """What the opener of the bundle should know, a line each."""
        self._drafters = Drafters(models)
        self._eos = frozenset(eos_token_ids)
        self._closed = False
        self._turn = threading.Lock()
        self._whole = threading.Lock()
        self._owner: object = None
        self._runner: int | None = None

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> Stream:
        """Complete a prompt, yielding chunks as rounds commit.

        `prompt` is text or token ids. `gamma` is how many tokens to draft each round, or `auto`;
        `drafter` is `model`, `ngram`, `cascade` or `none`. Without them the bundle's defaults.
        Raises: RequestError, CapacityError before any work; EngineError from a pass.
        """
        self._require_open()
        params = params or SamplingParams()
        counts = SpeculationStats(self.check_gamma(gamma), self.check_drafter(drafter))
        if drafter is None:
            counts.fallback = self.models.absent
        began = perf_counter_ns()
        tokens = self._encode(prompt)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        completion = Completion(len(tokens), seed, counts, Timings(began))
        vocabulary = self.models.target.geometry.vocab_size
        rules = rules_of(params, self.tokenizer, self._eos, vocabulary)
        rounds = self._rounds(tokens, params, counts, Noise(seed), rules)
        reader = Reader(completion, params, self._eos, self.tokenizer)
        return Stream(completion, reader.read(self._guarded(rounds)))

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> Completion:
        """Complete a prompt and return the whole of it; see `stream`.

        Threads: calls from several threads wait for each other.
        """
        self._require_apart()
        with self._whole:
            return self.stream(prompt, params, gamma=gamma, drafter=drafter).finish()

    def close(self) -> None:
        """Close both engines, after the pass that may be running."""
        self._require_apart()
        with self._turn:
            self._closed = True
            for engine in (self.models.target, self.models.draft):
                if engine is not None:
                    engine.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_apart(self) -> None:
        """Refuse calls from within a pass, which would wait for themselves."""
        if self._runner == threading.get_ident():
            raise RequestError("a logits processor cannot use the generator that runs it")

    def _require_open(self) -> None:
        self._require_apart()
        if self._closed:
            raise RequestError("this generator was closed; load the bundle again")

    def check_gamma(self, gamma: Gamma | None) -> Gamma:
        """Return the gamma to use; raises RequestError for one that was not built."""
        return self._drafters.check_gamma(gamma)

    def check_drafter(self, drafter: str | None) -> str:
        """Return the drafter to use; raises RequestError for one that cannot be had."""
        return self._drafters.check_drafter(drafter)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        vocab = self.models.target.geometry.vocab_size
        given = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if isinstance(given, bytes) or not isinstance(given, Iterable):
            raise RequestError(
                f"the prompt is of type {type(given).__name__}; expected text or token ids"
            )
        tokens = [_token_id(token, vocab) for token in given]
        if not tokens:
            raise RequestError("the prompt has no tokens; give at least one")
        context = self.models.target.max_length
        if len(tokens) > context:
            raise CapacityError(
                f"the prompt has {len(tokens)} tokens, and the context of this bundle is "
                f"{context}; shorten the prompt, or build with a larger `max_length`"
            )
        return tokens

    def _rounds(
        self, tokens: list[int], params: SamplingParams, counts: SpeculationStats, noise: Noise,
        rules: Rules | None,
    ) -> Rounds:  # fmt: skip
        # Made only now, when it is this stream's turn: making it may measure passes.
        drafter = self._drafters.make(counts.drafter, counts.gamma, params, noise, rules)
        target = EngineTarget(CachedTokens(self.models.target), params, noise, rules)
        # The last token is never fed, so one more than fits the buffers can be committed.
        limit = min(len(tokens) + params.max_tokens, self.models.target.max_length + 1)
        try:
            yield from played(speculate(target, drafter, tokens, limit))
        finally:
            manner = Manner.of(params, rules)
            found = self._drafters.fallback(counts.drafter, counts.gamma, manner)
            counts.fallback = found or counts.fallback

    def _guarded(self, rounds: Rounds) -> Rounds:
        """Run rounds one at a time, and refuse to go on once another stream has begun."""
        owner = object()
        self._owner = owner
        with closing(rounds):
            while True:
                with self._turn:
                    self._require_open()
                    if self._owner is not owner:
                        raise RequestError(
                            "this stream was overtaken by a later one on the same generator; "
                            "finish one stream before the next, or load the bundle twice"
                        )
                    self._runner = threading.get_ident()
                    try:
                        round_ = next(rounds, None)
                    finally:
                        self._runner = None
                if round_ is None:
                    return
                yield round_


def _token_id(token: object, vocab: int) -> int:
    """Return a token id of any integer type as an int."""
    whole = isinstance(token, SupportsIndex) and not isinstance(token, bool)
    number = index(token) if whole else -1  # type: ignore[arg-type]
    if not 0 <= number < vocab:
        raise RequestError(f"token id {token!r} is not in the vocabulary of 0 to {vocab - 1}")
    return number
