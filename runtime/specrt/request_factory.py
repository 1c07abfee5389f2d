"""Turns a caller's arguments into requests: prompts as tokens, checked options, processors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from operator import index
from time import perf_counter_ns
from typing import SupportsIndex

from specrt.completion import Completion, SpeculationStats, Timings
from specrt.engine.protocol import Engine
from specrt.errors import CapacityError, RequestError
from specrt.params import Gamma, SamplingParams
from specrt.sampling.grammar import Grammars
from specrt.sampling.noise import Noise
from specrt.sampling.processors import build_processors
from specrt.scheduler.request import OutputProcessor, Request
from specrt.scheduler.scheduler import Scheduler
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import Models
from specrt.speculation.target import check_verifier
from specrt.text import Tokenizer

Prompt = str | Sequence[int]
"""Text or token ids."""


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer, target: Engine) -> list[int]:
    """Return the tokens of a prompt for a target.

    Raises: RequestError for another type or an unknown id, CapacityError above the context.
    """
    vocab, context = target.geometry.vocab_size, target.max_length
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(
            f"the prompt is of type {type(given).__name__}; expected text or token ids"
        )
    tokens = [_token_id(token, vocab) for token in given]
    if not tokens:
        raise RequestError("the prompt has no tokens; give at least one")
    if len(tokens) > context:
        raise CapacityError(
            f"the prompt has {len(tokens)} tokens, and the context of this bundle is "
            f"{context}; shorten the prompt, or build with a larger `max_length`"
        )
    return tokens


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
    whole = isinstance(token, SupportsIndex) and not isinstance(token, bool)
    number = index(token) if whole else -1  # type: ignore[arg-type]
    if not 0 <= number < vocab:
        raise RequestError(f"token id {token!r} is not in the vocabulary of 0 to {vocab - 1}")
    return number


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
    ) -> Request:
        """Return the one request of a stream, after every check.

        Raises: RequestError, CapacityError.
        """
        given: object = params
        if not isinstance(given, SamplingParams | None):
            raise RequestError(f"params is {given!r}; expected SamplingParams")
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}: a stream is one completion; use generate_many")
        (request,) = self.requests(prompt, params, gamma=gamma, drafter=drafter)
        return request

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> list[Request]:
        """Return the requests of a prompt, after every check.

        Raises: RequestError, CapacityError.
        """
        scheduler, called_ns = self._scheduler, perf_counter_ns()
        scheduler.lock.require_open()
        check_verifier(params.verifier)
        drafters, default = scheduler.drafters, drafter is None
        gamma, drafter = drafters.check_gamma(gamma), drafters.check_drafter(drafter)
        if params.n > len(scheduler):
            raise RequestError(
                f"n is {params.n}, and this bundle was built for {len(scheduler)} at once: ask "
                f"for fewer, or build with `batch = {params.n}`"
            )
        tokens = prompt_tokens(prompt, self._tokenizer, self._models.target)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        requests = []
        for number in range(params.n):
            counts = SpeculationStats(gamma, drafter)
            counts.fallback = self._models.absent if default else None
            completion = Completion(len(tokens), seed, counts, Timings(0), index=number)
            requests.append(self._request(list(tokens), params, completion))
        began_ns = scheduler.lock.now_ns() - (perf_counter_ns() - called_ns)
        for request in requests:
            request.completion.timings.began_ns = began_ns
        return requests

    def _request(
        self, tokens: list[int], params: SamplingParams, completion: Completion
    ) -> Request:
        models = self._models
        return Request(
            tokens,
            # The last token is never fed, so one more than fits the buffers can be committed.
            min(len(tokens) + params.max_tokens, models.target.max_length + 1),
            params,
            completion,
            Noise(completion.seed, completion.index),
            build_processors(
                params, self._tokenizer, self._eos, models.target.geometry.vocab_size,
                self._grammars,
            ),
            OutputProcessor(completion, params, self._eos, self._tokenizer),
            [KVCache(e) for e in (models.target, models.draft) if e is not None],
            fresh=params.prompt_logprobs is not None,
        )  # fmt: skip
