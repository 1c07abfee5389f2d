"""From what a caller asks for to requests, after every check."""

from __future__ import annotations

import os
from collections.abc import Collection
from time import perf_counter_ns

from specrt.batch import Batch
from specrt.completion import Completion
from specrt.drafters import Drafters
from specrt.errors import RequestError
from specrt.grammars import Grammars
from specrt.models import Gamma, Models
from specrt.noise import Noise
from specrt.params import SamplingParams
from specrt.prompted import Prompt, prompt_tokens
from specrt.reader import Reader
from specrt.request import Request
from specrt.requested import rules_of
from specrt.stats import SpeculationStats, Timings
from specrt.target import CachedTokens
from specrt.text import Tokenizer


class Asking:
    """Makes requests of prompts and options. Threads: any may ask."""

    def __init__(
        self,
        models: Models,
        tokenizer: Tokenizer,
        eos: Collection[int],
        drafters: Drafters,
        batch: Batch,
    ) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)
        self._grammars = Grammars(tokenizer, self._eos, models.target.geometry.vocab_size)
        self._drafters = drafters
        self._batch = batch

    def one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        gamma: Gamma | None,
        drafter: str | None,
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
        (request,) = self.requests(prompt, params, gamma, drafter)
        return request

    def requests(
        self, prompt: Prompt, params: SamplingParams, gamma: Gamma | None, drafter: str | None
    ) -> list[Request]:
        """Return the requests of a prompt, after every check.

        Raises: RequestError, CapacityError.
        """
        turn, called_ns = self._batch.turn, perf_counter_ns()
        turn.require_open()
        gamma, chosen = self._drafters.check_gamma(gamma), self._drafters.check_drafter(drafter)
        if params.n > len(self._batch):
            raise RequestError(
                f"n is {params.n}, and this bundle was built for {len(self._batch)} at once: ask "
                f"for fewer, or build with `batch = {params.n}`"
            )
        tokens = prompt_tokens(prompt, self._tokenizer, self._models.target)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        made = []
        for number in range(params.n):
            counts = SpeculationStats(gamma, chosen)
            if drafter is None:
                counts.fallback = self._models.absent
            completion = Completion(len(tokens), seed, counts, Timings(0), index=number)
            made.append(self._request(list(tokens), params, completion))
        began_ns = turn.now_ns() - (perf_counter_ns() - called_ns)
        for request in made:
            request.completion.timings.began_ns = began_ns
        return made

    def _request(
        self, tokens: list[int], params: SamplingParams, completion: Completion
    ) -> Request:
        models = self._models
        rules = rules_of(
            params, self._tokenizer, self._eos, models.target.geometry.vocab_size, self._grammars
        )
        return Request(
            tokens,
            # The last token is never fed, so one more than fits the buffers can be committed.
            min(len(tokens) + params.max_tokens, models.target.max_length + 1),
            params,
            completion,
            Noise(completion.seed, completion.index),
            rules,
            Reader(completion, params, self._eos, self._tokenizer),
            [CachedTokens(e) for e in (models.target, models.draft) if e is not None],
            fresh=params.prompt_logprobs is not None,
        )
