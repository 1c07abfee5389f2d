"""The request factory: makes the requests of a prompt and its options, after every check."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from time import perf_counter_ns
from typing import Any, NamedTuple

from specrt.completion import Completion, SpeculationStats, Timings
from specrt.errors import RequestError
from specrt.params import GenerateOptions, SamplingParams
from specrt.prompts import Prompt, TextStart, prompt_reader
from specrt.sampling.grammar import Grammars
from specrt.sampling.noise import Noise
from specrt.sampling.processors import build_processors
from specrt.scheduler.request import OutputProcessor, Request
from specrt.scheduler.scheduler import Scheduler
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import Models
from specrt.speculation.target import check_verifier
from specrt.text.tokenizer import Tokenizer

_UNCONSTRAINED = ("min_tokens", "no_repeat_ngram_size", "forced_eos_token_id")
"""Options of a bundle that a constrained text goes without: one that matches may be short, or say
something twice, and one that is cut at its limit does not match yet."""


class PromptRequests(NamedTuple):
    """The completions of a prompt, and the requests that make them."""

    completions: list[Completion]
    requests: Iterator[Request]
    """Of the completions that are not over."""


class RequestFactory:
    """Makes requests of prompts and options. Threads: any may call."""

    def __init__(
        self, models: Models, tokenizer: Tokenizer, eos: Collection[int], scheduler: Scheduler
    ) -> None:
        self.reader = prompt_reader(models, tokenizer)
        self._models = models
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)
        self._grammars = Grammars(tokenizer, self._eos, models.target.geometry.vocab_size)
        self._scheduler = scheduler

    def one(
        self, prompt: Prompt, params: SamplingParams | None = None,
        options: GenerateOptions | None = None,
    ) -> Request:  # fmt: skip
        """Return the one request of a stream.

        Raises: RequestError, CapacityError.
        """
        given: object = params
        if not isinstance(given, SamplingParams | None):
            raise RequestError(f"params is {given!r}; expected SamplingParams")
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}: a stream is one completion; use generate_many")
        (request,) = self.each(prompt, params, options or {})
        return request

    def each(
        self, prompt: Prompt, params: SamplingParams, options: GenerateOptions
    ) -> list[Request]:
        """Return the `params.n` requests of a prompt.

        Raises: RequestError, CapacityError.
        """
        called_ns = perf_counter_ns()
        params, completions = self._completions(params, options)
        start = self._start(prompt, params, options)
        requests = [self._request(start, params, options, one) for one in completions]
        self._begin(completions, called_ns)
        return requests

    def several(
        self, prompt: Prompt, params: SamplingParams, options: GenerateOptions, place: str
    ) -> PromptRequests:
        """Return the requests of a prompt; those after the first are made as they are taken.

        The completions of a prompt that cannot be read are over: they say so, and its place.
        Raises: RequestError for options that no prompt could have.
        """
        called_ns = perf_counter_ns()
        params, completions = self._completions(params, options)
        try:
            start = self._start(prompt, params, options)
        except RequestError as error:
            for completion in completions:
                completion.fail(f"{place}: {error}")
            return PromptRequests(completions, iter(()))
        first = self._request(start, params, options, completions[0])
        others = (self._request(start, params, options, one) for one in completions[1:])
        self._begin(completions, called_ns)
        return PromptRequests(completions, chain([first], others))

    def _completions(
        self, params: SamplingParams, options: GenerateOptions
    ) -> tuple[SamplingParams, list[Completion]]:
        """Return the parameters of a prompt's completions, and these, still empty.

        Raises: RequestError.
        """
        _check_sharing(options)
        drafters, models, drafter = self._scheduler.drafters, self._models, options.get("drafter")
        stats = SpeculationStats(
            drafters.check_gamma(options.get("gamma")),
            drafters.check_drafter(drafter),
            fallback=models.absent if drafter is None else None,
            tuned=models.costs is not None,
        )
        params = self._with_defaults(params)
        self._scheduler.lock.require_open()
        check_verifier(params.verifier)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        return params, [
            Completion(0, seed, replace(stats), Timings(0), index=number)
            for number in range(params.n)
        ]

    def _with_defaults(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with the bundle's own options where they leave them out.

        Raises: RequestError for what no prompt here could have.
        """
        self.reader.check_params(params)
        defaults: dict[str, Any] = {
            name: value
            for name, value in self._models.options.items()
            if getattr(params, name) is None
        }
        if params.constraint is not None:
            defaults = self._constrained(defaults, params.decoder_start)
        if "min_tokens" in defaults:
            defaults["min_tokens"] = min(defaults["min_tokens"], params.max_tokens)
        return replace(params, **defaults) if defaults else params

    def _constrained(self, defaults: dict[str, Any], start: Sequence[int] | None) -> dict[str, Any]:
        """Return the bundle's own options for a text that a constraint is about.

        What would rule out a text that matches is left out. A token that is to come first is not
        part of the text: it follows those that the text begins with.
        """
        kept = {name: value for name, value in defaults.items() if name not in _UNCONSTRAINED}
        first = kept.pop("forced_bos_token_id", ())
        tokens = first[:1] if isinstance(first, Sequence) else (first,)
        if tokens:
            kept["decoder_start"] = (*(start or self.reader.first_tokens(())), *tokens)
        return kept

    def _start(self, prompt: Prompt, params: SamplingParams, options: GenerateOptions) -> TextStart:
        special = options.get("parse_special", True)
        return self.reader.start(prompt, params, parse_special=special)

    def _begin(self, completions: Sequence[Completion], called_ns: int) -> None:
        """Note when completions were asked for, and that they wait from now on."""
        now_ns = self._scheduler.lock.now_ns()
        for completion in completions:
            completion.timings.began_ns = now_ns - (perf_counter_ns() - called_ns)
            completion.timings.queued_ns = now_ns

    def _request(
        self, start: TextStart, params: SamplingParams, options: GenerateOptions,
        completion: Completion,
    ) -> Request:  # fmt: skip
        models, tokens, counts = self._models, [*start.tokens], completion.speculation
        completion.prompt_tokens, completion.prompt_token_ids = start.positions, start.prompt
        assert completion.seed is not None, "it was given or drawn"
        # The last token is never fed, so one more than fits the buffers can be committed.
        limit, salt = len(tokens) + params.max_tokens, options.get("cache_salt", "")
        limit = min(limit, models.target.max_length + 1)
        return Request(
            tokens,
            limit,
            params,
            completion,
            Noise(completion.seed, completion.index),
            build_processors(
                params, self._tokenizer, self._eos, models.target.geometry.vocab_size,
                self._grammars, limit - len(tokens), salt,
            ),
            OutputProcessor(completion, params, self._eos, self._tokenizer, tokens),
            [KVCache(e) for e in (models.target, models.draft) if e is not None],
            start.source,
            1 if start.source is None else models.readers(counts.drafter, counts.gamma),
            fresh=params.prompt_logprobs is not None,
            memory_key=options.get("memory_key", ""),
            cache_salt=salt,
        )  # fmt: skip


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


def _check_sharing(options: GenerateOptions) -> None:
    key: object = options.get("memory_key", "")
    if key is not None and not isinstance(key, str):
        raise RequestError(f"memory_key is {key!r}; expected a text, or None to use no memory")
    salt: object = options.get("cache_salt", "")
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt is {salt!r}; expected a text")
