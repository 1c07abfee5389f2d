"""The generator: a pair of engines opened for use, and the streams it makes of prompts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from time import perf_counter_ns
from typing import SupportsIndex

from specrt.bundle import Bundle
from specrt.completion import Completion, Stream
from specrt.draft import Drafter, ModelDrafter, NoDrafter
from specrt.engine import Engine, open_engine, share_threads
from specrt.errors import BundleError, CapacityError, RequestError
from specrt.manifest import Manifest, ModelRecord
from specrt.noise import Noise
from specrt.params import SamplingParams
from specrt.reader import Reader
from specrt.speculate import Round, speculate
from specrt.stats import SpeculationStats, Timings
from specrt.target import EngineTarget
from specrt.text import Tokenizer


@dataclass(frozen=True)
class Models:
    """The engines of a bundle and the sizes the round needs to know."""

    target: Engine
    draft: Engine | None
    gammas: tuple[int, ...]
    gamma: int


class Generator:
    """A pair of engines ready to complete prompts.

    Threads: one completion runs at a time. A stream that is still unfinished when another begins
    is refused when it is next asked, because the KV buffers now hold the other's tokens.
    """

    def __init__(
        self, models: Models, tokenizer: Tokenizer, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.models = models
        self._eos = frozenset(eos_token_ids)
        self._closed = False
        self._turn = threading.Lock()
        self._whole = threading.Lock()
        self._owner: object = None

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: int | None = None,
    ) -> Stream:
        """Complete a prompt, yielding chunks as rounds commit.

        `prompt` is text or token ids; `gamma` overrides the bundle's default.
        Raises: RequestError, CapacityError before any work; EngineError from a pass.
        """
        self._require_open()
        params = params or SamplingParams()
        gamma = self.check_gamma(gamma)
        began = perf_counter_ns()
        tokens = self._encode(prompt)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        completion = Completion(len(tokens), seed, SpeculationStats(gamma), Timings(began))
        rounds = self._rounds(tokens, params, gamma, Noise(seed))
        reader = Reader(completion, params, self._eos, self.tokenizer)
        return Stream(completion, reader.read(self._guarded(rounds)))

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        gamma: int | None = None,
    ) -> Completion:
        """Complete a prompt and return the whole of it; see `stream`.

        Threads: calls from several threads wait for each other.
        """
        with self._whole:
            return self.stream(prompt, params, gamma=gamma).finish()

    def close(self) -> None:
        """Close both engines, after the pass that may be running."""
        with self._turn:
            self._closed = True
            for engine in (self.models.target, self.models.draft):
                if engine is not None:
                    engine.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("this generator was closed; load the bundle again")

    def check_gamma(self, gamma: int | None) -> int:
        """Return the gamma to use: the one asked for, or the bundle's default.

        Raises: RequestError for one that no verify pass was built for.
        """
        models = self.models
        if gamma is None:
            return models.gamma
        if gamma not in models.gammas:
            built = ", ".join(map(str, models.gammas))
            raise RequestError(
                f"gamma {gamma} is not among those this bundle was built for: {built}; "
                "choose one of them, or add it to `gammas` in the recipe and build again"
            )
        return gamma

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
        self, tokens: list[int], params: SamplingParams, gamma: int, noise: Noise
    ) -> Iterator[Round]:
        # The last token is never fed, so one more than fits the buffers can be committed.
        limit = min(len(tokens) + params.max_tokens, self.models.target.max_length + 1)
        target = EngineTarget(self.models.target, params, noise)
        drafter: Drafter = NoDrafter()
        draft = self.models.draft
        if draft is not None and gamma:
            sizes = (self.models.target.geometry.vocab_size, draft.geometry.vocab_size)
            drafter = ModelDrafter(draft, params, noise, min(sizes))
        return speculate(target, drafter, tokens, lambda: gamma, limit)

    def _guarded(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """Run rounds one at a time, and refuse to go on once another stream has begun."""
        owner = object()
        self._owner = owner
        while True:
            with self._turn:
                self._require_open()
                if self._owner is not owner:
                    raise RequestError(
                        "this stream was overtaken by a later one on the same generator; "
                        "finish one stream before the next, or load the bundle twice"
                    )
                round_ = next(rounds, None)
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


def load(
    bundle: str | Path, *, threads: int | None = None, owns_process: bool = False
) -> Generator:
    """Open a bundle for generation.

    `threads` is the number of cores to use for the pair; every one this process may run on when
    None. `owns_process` says that nothing else in this process uses the engine library: target
    and draft then share one thread pool, which makes the draft faster; see `share_pool`.
    Raises: BundleError, EngineError, RequestError.
    """
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    tokenizer = Tokenizer(opened.file("tokenizer.json"), manifest.bos_token_id)
    _check_vocabulary(tokenizer, manifest)
    cores = _cores(threads)
    if owns_process:
        share_threads(manifest.backend, cores)
    target = _open_model(opened, manifest.target, cores)
    draft = manifest.draft and _open_model(opened, manifest.draft, cores)
    models = Models(target, draft or None, manifest.gammas, manifest.gamma)
    return Generator(models, tokenizer, manifest.eos_token_ids)


def _open_model(bundle: Bundle, model: ModelRecord, threads: int) -> Engine:
    manifest = bundle.manifest
    return open_engine(
        manifest.backend,
        bundle.file(model.engine),
        model.geometry,
        batch=manifest.batch,
        max_length=manifest.max_length,
        max_width=manifest.max_width,
        threads=threads,
    )


def _cores(threads: int | None) -> int:
    """Return how many cores to use; more than there are only get in each other's way."""
    there = len(os.sched_getaffinity(0))
    if threads is None:
        return there
    if not isinstance(threads, int) or not 1 <= threads <= there:
        raise RequestError(
            f"threads is {threads!r}; expected a whole number from 1 to {there}, the cores this "
            "process may use"
        )
    return threads


def _check_vocabulary(tokenizer: Tokenizer, manifest: Manifest) -> None:
    known, scored = tokenizer.size, manifest.target.geometry.vocab_size
    if known > scored:
        raise BundleError(
            f"the tokenizer has ids up to {known - 1}, and the model scores {scored}; they do not "
            "belong together: build the bundle again from one checkpoint"
        )
