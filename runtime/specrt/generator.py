"""The generator: engines that complete prompts; the requests it makes of them, and the streams."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Generator as Generates
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain, islice
from operator import index
from reprlib import repr as short
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from specrt.aio import AsyncStream, PacedStream, Worker
from specrt.completion import Completion, SpeculationStats, Stream, Timings
from specrt.engine.protocol import ConditionedEngine, Engine, Source
from specrt.errors import CapacityError, RequestError, one_line, reason_of
from specrt.params import Gamma, GenerateOptions, SamplingParams, check_options
from specrt.sampling.grammar import Grammars
from specrt.sampling.noise import Noise
from specrt.sampling.processors import build_processors
from specrt.scheduler.request import OutputProcessor, Request
from specrt.scheduler.scheduler import BeginRounds, RequestSource, Scheduler, engine_rounds
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import Models
from specrt.speculation.round import Drafter
from specrt.speculation.target import check_verifier
from specrt.speculation.text_memory import TextMemory
from specrt.system.memory import trim_heap
from specrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


Prompt = str | Sequence[int] | NDArray[np.float32]
"""Text or token ids; for a bundle that reads speech, features [channels, frames].

Of an encoder-decoder it is the source: what the encoder reads."""


def prompt_limit(target: Engine) -> tuple[int, str]:
    """Return how many tokens a prompt may have, and what that is in words."""
    if isinstance(target, ConditionedEngine):
        return target.max_source, "longest source of this bundle"
    return target.max_length, "context of this bundle"


def prompt_tokens(
    prompt: Prompt, tokenizer: Tokenizer, target: Engine, *, parse_special: bool = True
) -> list[int]:
    """Return the tokens of a prompt for a target; see `GenerateOptions` for `parse_special`.

    Raises: RequestError for another type, an unknown id and a source without text, CapacityError
        above the context, or above the longest source.
    """
    vocab, (most, what) = target.geometry.vocab_size, prompt_limit(target)
    given: Any = prompt
    if isinstance(prompt, str):
        fewest = tokenizer.fewest(prompt)
        if fewest > most:
            raise CapacityError(
                f"the prompt has {len(prompt)} characters, which are {fewest} tokens or more, and "
                f"the {what} is {most}; shorten the prompt"
            )
        if isinstance(target, ConditionedEngine):
            _require_text(prompt)
        given = tokenizer.encode(prompt, parse_special=parse_special)
    number = getattr(given, "shape", None) == ()  # an array, and nothing to go through
    if number or isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(
            f"the prompt is of type {type(given).__name__}; expected text or token ids"
        )
    tokens = [_token_id(token, vocab) for token in given]
    if not tokens:
        raise RequestError("the prompt has no tokens; give at least one")
    if len(tokens) > most:
        option = "max_source" if isinstance(target, ConditionedEngine) else "max_length"
        raise CapacityError(
            f"the prompt has {len(tokens)} tokens, and the {what} is {most}; shorten the prompt, "
            f"or build with a larger `{option}`"
        )
    return tokens


def _require_text(source: str) -> None:
    """Refuse a source without text: its tokens would be those that every source has."""
    if not source.strip():
        raise RequestError(
            f"the prompt is {source!r}, and this bundle reads it as the source of its text; give "
            "at least one word"
        )


def source_features(given: object, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return a source of features as it is kept.

    Raises: RequestError for another type or shape, and for values that are no numbers.
    """
    expected = f"expected an array of features [{shape[0]}, {shape[1]}], as `specrt.speech` has it"
    if not isinstance(given, np.ndarray):
        raise RequestError(
            f"the prompt is of type {type(given).__name__}, and this bundle reads speech; "
            f"{expected}"
        )
    if given.shape != shape or not np.issubdtype(given.dtype, np.floating):
        raise RequestError(
            f"the prompt is an array {list(given.shape)} of {given.dtype}; {expected}"
        )
    with np.errstate(over="ignore"):  # what is no float of 32 bits is refused as infinite
        features: NDArray[np.float32] = np.array(given, np.float32)
    if not np.isfinite(features).all():
        raise RequestError(f"the prompt holds values that are no numbers; {expected}")
    return features


def refuse_sources(models: Models, what: str) -> None:
    """Refuse an encoder-decoder; `what` is what it is not for, and what else to do.

    Raises: RequestError.
    """
    if models.conditioned is not None:
        raise RequestError(
            f"this bundle is an encoder-decoder, whose prompt is a source it reads once: {what}"
        )


def refuse_speech(models: Models) -> None:
    """Refuse a bundle of speech where a text was given.

    Raises: RequestError.
    """
    if models.features is not None:
        raise RequestError(
            "this bundle reads speech, and a text was given; use `specrt transcribe FILE.wav`"
        )


class TextStart(NamedTuple):
    """What a prompt comes to: the tokens its text begins with, and the source it is of, if any."""

    tokens: Sequence[int]
    positions: int
    """Of the prompt."""
    source: Source | None = None


def several_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as a list.

    Raises: RequestError for a single prompt.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}; expected a list of prompts, each text "
            "or token ids"
        )
    return list(prompts)


def shared_params(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Return the parameters of each of several prompts.

    Raises: RequestError when the numbers differ.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Iterable) else [params]
    wrong = next((one for one in each if not isinstance(one, SamplingParams)), None)
    if wrong is not None:
        raise RequestError(f"params holds {wrong!r}; expected SamplingParams")
    if len(each) != count:
        raise RequestError(
            f"{count} prompts and {len(each)} sampling params were given; give one for each "
            "prompt, or one for all"
        )
    return each


def _token_id(token: object, vocab: int) -> int:
    """Return a token id of any integer type as an int."""
    number = -1
    if type(token) is int:  # at once: the check of a protocol takes microseconds
        number = token
    elif isinstance(token, SupportsIndex) and not isinstance(token, bool):
        with suppress(TypeError):  # arrays have the verb, and most of them no index
            number = index(token)
    if not 0 <= number < vocab:
        given = one_line(short(token))  # of an array, which has lines
        raise RequestError(f"token id {given} is not in the vocabulary of 0 to {vocab - 1}")
    return number


def _memory_key(key: object) -> str | None:
    """Return the key of a text memory; raises RequestError for what is none."""
    if key is None or isinstance(key, str):
        return key
    raise RequestError(f"memory_key is {key!r}; expected a text, or None to use no memory")


_OF_FREE_TEXT = ("min_tokens", "no_repeat_ngram_size", "forced_eos_token_id")
"""Options of a bundle that no constraint could be kept with: a text that matches may be short, or
say something twice, and what is cut at its limit does not match yet."""


class RequestFactory:
    """Makes requests of prompts and options. Threads: any may call."""

    def __init__(
        self, models: Models, tokenizer: Tokenizer, eos: Collection[int], scheduler: Scheduler
    ) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)
        self._grammars = Grammars(tokenizer, self._eos, models.target.geometry.vocab_size)
        self._scheduler = scheduler

    def one(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
        parse_special: bool = True,
        memory_key: str | None = "",
    ) -> Request:
        """Return the one request of a stream, after every check.

        Raises: RequestError, CapacityError.
        """
        given: object = params
        if not isinstance(given, SamplingParams | None):
            raise RequestError(f"params is {given!r}; expected SamplingParams")
        params = params or SamplingParams()
        stats = self._stats(gamma, drafter)
        return self._one(prompt, params, stats, parse_special, _memory_key(memory_key))

    def with_drafter(
        self, prompt: Prompt, params: SamplingParams, drafter: Drafter, name: str, special: bool
    ) -> Request:
        """Return a request whose drafter is its own, with a name for what it did.

        Raises: RequestError, CapacityError.
        """
        refuse_sources(self._models, "no device drafts for it; send whole requests")
        stats = SpeculationStats(max(self._models.gammas), name)
        request = self._one(prompt, params, stats, special, None)
        request.drafter = drafter
        return request

    def _one(
        self, prompt: Prompt, params: SamplingParams, stats: SpeculationStats, special: bool,
        key: str | None,
    ) -> Request:  # fmt: skip
        if params.n != 1:
            raise RequestError(f"n is {params.n}: a stream is one completion; use generate_many")
        (request,) = self._each(prompt, params, stats, special, key)
        return request

    def each(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
        parse_special: bool = True,
        memory_key: str | None = "",
    ) -> list[Request]:
        """Return the `params.n` requests of a prompt, after every check.

        Raises: RequestError, CapacityError.
        """
        stats = self._stats(gamma, drafter)
        return self._each(prompt, params, stats, parse_special, _memory_key(memory_key))

    def _each(
        self, prompt: Prompt, params: SamplingParams, stats: SpeculationStats, special: bool,
        key: str | None,
    ) -> list[Request]:  # fmt: skip
        called_ns = perf_counter_ns()
        params = self._filled(params)
        completions = self._completions(params, stats)
        start = self._start(prompt, params, special)
        requests = [self._request(start, params, one, key) for one in completions]
        self._begin(completions, called_ns)
        return requests

    def several(
        self,
        prompt: Prompt,
        params: SamplingParams,
        place: str,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
        parse_special: bool = True,
        memory_key: str | None = "",
    ) -> PromptRequests:
        """Return the requests of a prompt, after every check; they are made as they are taken.

        The completions of a prompt that cannot be completed are over: they say so, and its place.
        Raises: RequestError for options that no prompt could have.
        """
        called_ns = perf_counter_ns()
        params = self._filled(params)
        completions = self._completions(params, self._stats(gamma, drafter))
        key = _memory_key(memory_key)
        try:
            start = self._start(prompt, params, parse_special)
        except RequestError as error:
            for completion in completions:
                completion.fail(f"{place}: {error}")
            return PromptRequests(completions, iter(()))
        first = self._request(start, params, completions[0], key)
        others = (self._request(start, params, one, key) for one in completions[1:])
        self._begin(completions, called_ns)
        return PromptRequests(completions, chain([first], others))

    def _filled(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with the bundle's own options where they leave them out.

        Raises: RequestError for log-probabilities of a source, which no model scores.
        """
        if self._models.conditioned is not None and params.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs is {params.prompt_logprobs}, and the prompt of an "
                "encoder-decoder is its source, which is read and not scored; leave it out"
            )
        options: dict[str, Any] = {
            name: value
            for name, value in self._models.options.items()
            if getattr(params, name) is None
        }
        if params.constraint is not None:
            options = self._beside_constraint(options, params.decoder_start)
        if "min_tokens" in options:
            options["min_tokens"] = min(options["min_tokens"], params.max_tokens)
        return replace(params, **options) if options else params

    def _beside_constraint(
        self, options: dict[str, Any], start: Sequence[int] | None
    ) -> dict[str, Any]:
        """Return the bundle's own options for a text that a constraint is about.

        What would rule out a text that matches is left out. A token that is to come first is none
        of the text: it stands behind those that the text begins with.
        """
        kept = {name: value for name, value in options.items() if name not in _OF_FREE_TEXT}
        first = kept.pop("forced_bos_token_id", ())
        tokens = first[:1] if isinstance(first, Sequence) else (first,)
        if tokens:
            kept["decoder_start"] = (*(start or self._models.decoder_start), *tokens)
        return kept

    def _start(self, prompt: Prompt, params: SamplingParams, special: bool) -> TextStart:
        """Return what a prompt comes to.

        Raises: RequestError, CapacityError.
        """
        models = self._models
        target, conditioned = models.target, models.conditioned
        first = self._decoder_start(params.decoder_start)
        if conditioned is not None and models.features is not None:
            features = source_features(prompt, models.features)
            features.flags.writeable = False
            return TextStart(first, conditioned.max_source, features)
        tokens = prompt_tokens(prompt, self._tokenizer, target, parse_special=special)
        if conditioned is None:
            return TextStart(tokens, len(tokens))
        source = np.array(tokens, np.int64)
        source.flags.writeable = False
        return TextStart(first, len(tokens), source)

    def _decoder_start(self, given: Sequence[int] | None) -> Sequence[int]:
        """Return what the text of an encoder-decoder begins with: the request's own, if any.

        Raises: RequestError for unknown ids, none or too many of them, and where a text begins with
            its prompt.
        """
        models = self._models
        if given is None:
            return models.decoder_start
        if models.conditioned is None:
            raise RequestError(
                f"decoder_start is {[*given]}, and this bundle is no encoder-decoder: a text "
                "begins with its prompt; leave it out"
            )
        if not 0 < len(given) <= models.target.max_length:
            raise RequestError(
                f"decoder_start has {len(given)} tokens; expected 1 to {models.target.max_length}, "
                "the context of this bundle"
            )
        last = models.target.geometry.vocab_size - 1
        wrong = [token for token in given if not 0 <= token <= last]
        if wrong:
            raise RequestError(
                f"decoder_start holds {wrong[0]}; expected ids of the vocabulary, 0 to {last}"
            )
        return given

    def _stats(self, gamma: Gamma | None, drafter: str | None) -> SpeculationStats:
        """Return the counts that a completion begins with, after checks of the options."""
        drafters, default = self._scheduler.drafters, drafter is None
        return SpeculationStats(
            drafters.check_gamma(gamma),
            drafters.check_drafter(drafter),
            fallback=self._models.absent if default else None,
            tuned=self._models.costs is not None,
        )

    def _completions(self, params: SamplingParams, stats: SpeculationStats) -> list[Completion]:
        """Return the completions of a prompt, still empty, each with such counts of its own."""
        self._scheduler.lock.require_open()
        check_verifier(params.verifier)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        return [
            Completion(0, seed, replace(stats), Timings(0), index=number)
            for number in range(params.n)
        ]

    def _begin(self, completions: Sequence[Completion], called_ns: int) -> None:
        """Note when completions were asked for, and that they wait from now on."""
        now_ns = self._scheduler.lock.now_ns()
        for completion in completions:
            completion.timings.began_ns = now_ns - (perf_counter_ns() - called_ns)
            completion.timings.queued_ns = now_ns

    def _request(
        self, start: TextStart, params: SamplingParams, completion: Completion, key: str | None
    ) -> Request:
        models, tokens, counts = self._models, [*start.tokens], completion.speculation
        completion.prompt_tokens = start.positions
        assert completion.seed is not None, "it was given or drawn"
        # The last token is never fed, so one more than fits the buffers can be committed.
        limit = min(len(tokens) + params.max_tokens, models.target.max_length + 1)
        return Request(
            tokens,
            limit,
            params,
            completion,
            Noise(completion.seed, completion.index),
            build_processors(
                params, self._tokenizer, self._eos, models.target.geometry.vocab_size,
                self._grammars, limit - len(tokens),
            ),
            OutputProcessor(completion, params, self._eos, self._tokenizer, tokens),
            [KVCache(e) for e in (models.target, models.draft) if e is not None],
            start.source,
            1 if start.source is None else models.readers(counts.drafter, counts.gamma),
            fresh=params.prompt_logprobs is not None,
            memory_key=key,
        )  # fmt: skip


class PromptRequests(NamedTuple):
    """The completions of a prompt, and the requests that make them."""

    completions: list[Completion]
    requests: Iterator[Request]
    """Of those that are not over."""


def _collect(
    scheduler: Scheduler, prompts: Sequence[PromptRequests], rows: int
) -> Iterator[list[Completion]]:
    """Run all requests, at most `rows` at once; yield the completions of each prompt, in order."""
    left = [sum(c.finish_reason is None for c in one.completions) for one in prompts]
    numbered = ((number, r) for number, one in enumerate(prompts) for r in one.requests)
    with closing(_run(scheduler, numbered, rows)) as ended:
        for number, one in enumerate(prompts):
            while left[number]:
                left[next(ended)] -= 1
            yield one.completions


def _run(
    scheduler: Scheduler, requests: Iterator[tuple[int, Request]], rows: int
) -> Generates[int, None, None]:
    """Run requests to their ends, at most `rows` at once; yield the number of each that ends."""
    running: dict[Request, int] = {}
    try:
        while True:
            for number, request in islice(requests, rows - len(running)):
                request.collected = True
                running[request] = number
                scheduler.submit(request)
            if not running:
                return
            request = scheduler.finish_one(running.keys())
            if request.error is not None:
                request.completion.fail(reason_of(request.error))
            yield running.pop(request)
    finally:
        for request in running:
            request.drop()


class Generator:
    """A pair of engines ready to complete prompts, as many at once as they have rows.

    What the KV buffers hold of earlier texts is not read again: a prompt that begins as one of
    them did starts where they part (`Completion.cached_tokens`). Where the bundle is an
    encoder-decoder a prompt is the source of its text, and one that a row holds is not encoded
    again.

    Threads: any may stream and generate. Streams share the rows and run while one of them is read:
    a stream that is not read for a while pauses, and makes room for others.

    `options` of the methods are those of `GenerateOptions`: `gamma`, `drafter`, `parse_special`,
    `memory_key`.

    With `text_memory` lookup drafts from the texts of earlier requests too. `on_close` is called
    once, when the generator was closed.
    """

    def __init__(
        self,
        models: Models,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int] = (),
        notices: Sequence[str] = (),
        *,
        prompt_cache: bool = True,
        rounds: BeginRounds = engine_rounds,
        text_memory: TextMemory | None = None,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.models = models
        self.eos_token_ids = tuple(eos_token_ids)
        self._notices = tuple(notices)
        self._on_close = on_close
        self._scheduler = Scheduler(
            models, prompt_cache=prompt_cache, rounds=rounds, text_memory=text_memory
        )
        self._requests = RequestFactory(models, tokenizer, eos_token_ids, self._scheduler)
        self._worker = Worker(self._scheduler)

    @property
    def rows(self) -> int:
        """How many completions run at once."""
        return len(self._scheduler)

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks for the user who opened the bundle, a line each.

        Passes that cannot be CUDA graphs join them once they were run.
        """
        graphs = self.models.cuda_graphs
        return self._notices + (graphs.refusals if graphs else ())

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Complete a prompt, text or token ids, yielding chunks as rounds commit; see `Prompt`.

        Raises: RequestError, CapacityError before any work; EngineError from a pass.
        """
        request = self.request(prompt, params, **options)
        return Stream(request.completion, RequestSource(self._scheduler, request))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Complete a prompt and return the whole of it; see `stream`."""
        return self.stream(prompt, params, **options).finish()

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """Complete a prompt, with chunks to be awaited: `async for chunk in g.astream(...)`.

        No event loop waits for a pass: a thread runs them, and there is none where nothing runs.
        Raises: RequestError, CapacityError by this call; EngineError where a chunk is awaited.
        """
        return AsyncStream(self.request(prompt, params, **options), self._worker)

    def astreams(
        self, prompt: Prompt, params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> list[AsyncStream]:
        """Complete a prompt `params.n` times, each a stream of its own; see `astream`."""
        requests = self._requests.each(prompt, params, **check_options(options))
        return [AsyncStream(request, self._worker) for request in requests]

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Complete a prompt and return the whole of it; see `astream`."""
        return await self.astream(prompt, params, **options).finish()

    def paced(
        self,
        prompt: Prompt,
        params: SamplingParams,
        drafter: Drafter,
        *,
        name: str,
        parse_special: bool = True,
    ) -> PacedStream:
        """Complete a prompt round by round, as it is told to, with a drafter of its own.

        `name` is what its counts call the drafter.
        While it is not told to go on it pauses, and its row goes to others as that of a stream that
        is not read.
        Raises: RequestError, CapacityError.
        """
        request = self._requests.with_drafter(prompt, params, drafter, name, parse_special)
        return PacedStream(request, self._worker)

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rows: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Completion]]:
        """Complete several prompts, `n` times each, on all rows; return n completions of each.

        `params` are shared, or one for each prompt. A row that is done takes the next completion at
        once; `rows` is how many run at once at most, all when None. A completion that fails harms
        no other: it has the finish reason `error` and the reason in `error`, where that is its
        prompt with the prompt's place, as `prompts[2]: ...`.
        Raises: RequestError before any work for options that no prompt could have.
        """
        return list(self.generate_each(prompts, params, rows=rows, **options))

    def generate_each(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rows: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[list[Completion]]:
        """Complete prompts as `generate_many` does; yield the completions of each, in order.

        Raises: RequestError before any work for options that no prompt could have.
        """
        check_options(options)
        several = several_prompts(prompts)
        each = shared_params(len(several), params)
        rows = self._check_rows(rows)
        pairs = enumerate(zip(several, each, strict=True))
        requests = [
            self._requests.several(prompt, own, f"prompts[{number}]", **options)
            for number, (prompt, own) in pairs
        ]
        return _collect(self._scheduler, requests, rows)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Request:
        """Return the request of a completion, which nothing runs; see `stream` for errors."""
        return self._requests.one(prompt, params, **check_options(options))

    def forget(self) -> None:
        """Read every coming prompt from its beginning, and draft from no text of before."""
        self._scheduler.forget()

    def close(self) -> None:
        """Close both engines, after the pass that may be running, and give their memory back.

        Threads and tasks that wait for a chunk get a RequestError. Closing again does nothing.
        """
        self._scheduler.close(self._worker.join)
        trim_heap()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_gamma(self, gamma: Gamma | None) -> Gamma:
        """Return the gamma to use; raises RequestError for one that was not built."""
        return self._scheduler.drafters.check_gamma(gamma)

    def check_drafter(self, drafter: str | None) -> str:
        """Return the drafter to use; raises RequestError for one that cannot run here."""
        return self._scheduler.drafters.check_drafter(drafter)

    def _check_rows(self, rows: int | None) -> int:
        built = len(self._scheduler)
        if rows is None:
            return built
        if type(rows) is not int or not 1 <= rows <= built:
            raise RequestError(f"rows is {rows!r}; this bundle was built for 1 to {built} at once")
        return rows
