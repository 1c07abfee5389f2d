"""The generator: engines ready to complete prompts, and the streams it makes of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter_ns

from specrt.batch import Batch
from specrt.chat import ChatTemplate
from specrt.completion import Completion, Stream
from specrt.drafters import Drafters
from specrt.errors import RequestError, SpecrtError
from specrt.grammars import Grammars
from specrt.models import Gamma, Models
from specrt.noise import Noise
from specrt.params import SamplingParams
from specrt.prompted import Prompt, prompt_tokens, several_prompts, shared_params
from specrt.reader import Reader
from specrt.reading import Reading
from specrt.request import Request
from specrt.requested import rules_of
from specrt.session import Session
from specrt.stats import SpeculationStats, Timings
from specrt.target import CachedTokens
from specrt.text import Tokenizer


class Generator:
    """A pair of engines ready to complete prompts, as many at once as they have rows.

    What the KV buffers hold of earlier texts is not read again: a prompt that begins as one of
    them did starts where they part (`Completion.cached_tokens`).

    Threads: any may stream and generate. Streams share the rows and run when one is asked: a
    stream that is not read for a while pauses, and makes room for others.
    """

    def __init__(
        self,
        models: Models,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int] = (),
        notices: Sequence[str] = (),
        *,
        prompt_cache: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.models = models
        self.notices = tuple(notices)
        """What the opener of the bundle should know, a line each."""
        self._drafters = Drafters(models)
        self._eos = frozenset(eos_token_ids)
        self._grammars = Grammars(tokenizer, self._eos, models.target.geometry.vocab_size)
        self._batch = Batch(models, keeps=prompt_cache)

    def stream(
        self,
        prompt: Prompt,
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
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}: a stream is one completion; use generate_many")
        (request,) = self._requests(prompt, params, gamma, drafter)
        return Stream(request.completion, Reading(self._batch, request))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> Completion:
        """Complete a prompt and return the whole of it; see `stream`."""
        return self.stream(prompt, params, gamma=gamma, drafter=drafter).finish()

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
        rows: int | None = None,
    ) -> list[list[Completion]]:
        """Complete several prompts, `n` times each, on all rows; return n completions of each.

        `params` are shared, or one for each prompt. A row that is done takes the next prompt at
        once; `rows` is how many run at once at most, all when None. A completion that fails on the
        way has the finish reason `error`, says why in `error` and harms no other.
        Raises: RequestError, CapacityError before any work, for any of the prompts.
        """
        return list(self.generate_each(prompts, params, gamma=gamma, drafter=drafter, rows=rows))

    def generate_each(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
        rows: int | None = None,
    ) -> Iterator[list[Completion]]:
        """Complete prompts as `generate_many` does; yield the completions of each, in order.

        Raises: RequestError, CapacityError before any work, for any of the prompts.
        """
        asked = several_prompts(prompts)
        each = shared_params(len(asked), params)
        at_once = self._at_once(rows)
        many = [
            self._requests(prompt, own, gamma, drafter)
            for prompt, own in zip(asked, each, strict=True)
        ]
        return self._finished(many, at_once)

    def session(
        self, template: ChatTemplate | None = None, system: str | None = None,
        params: SamplingParams | None = None, gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> Session:  # fmt: skip
        """Begin a conversation, each message answered with all before it in view; see `Session`.

        Raises: RequestError for a gamma or drafter that cannot be had.
        """
        return Session(
            self, template=template, system=system, params=params, gamma=gamma, drafter=drafter
        )

    def forget(self) -> None:
        """Read every coming prompt from its beginning, whatever the KV buffers hold."""
        self._batch.forget()

    def close(self) -> None:
        """Close both engines, after the pass that may be running."""
        self._batch.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_gamma(self, gamma: Gamma | None) -> Gamma:
        """Return the gamma to use; raises RequestError for one that was not built."""
        return self._drafters.check_gamma(gamma)

    def check_drafter(self, drafter: str | None) -> str:
        """Return the drafter to use; raises RequestError for one that cannot be had."""
        return self._drafters.check_drafter(drafter)

    def _at_once(self, rows: int | None) -> int:
        built = len(self._batch)
        if rows is None:
            return built
        if type(rows) is not int or not 1 <= rows <= built:
            raise RequestError(f"rows is {rows!r}; this bundle was built for 1 to {built} at once")
        return rows

    def _finished(self, many: list[list[Request]], rows: int) -> Iterator[list[Completion]]:
        requests = [request for one in many for request in one]
        for request in requests:
            request.patient = True
        told = 0
        try:
            for _ in self._run(requests, rows):
                while told < len(many) and all(r.completion.finish_reason for r in many[told]):
                    yield [request.completion for request in many[told]]
                    told += 1
        finally:
            for request in requests:
                request.cancelled = not request.done

    def _run(self, requests: Iterable[Request], rows: int) -> Iterator[None]:
        """Run requests to their ends, so many at once, yielding at each; a failure is its own."""
        running: list[Request] = []
        for request in requests:
            if len(running) == rows:
                self._settle(running)
                yield
            self._batch.submit(request)
            running.append(request)
        while running:
            self._settle(running)
            yield

    def _settle(self, running: list[Request]) -> None:
        done = self._batch.settle(running)
        running.remove(done)
        if done.error is not None:
            if not isinstance(done.error, SpecrtError):
                raise done.error
            done.completion.error = str(done.error)
            done.completion.finish_reason = "error"

    def _requests(
        self, prompt: Prompt, params: SamplingParams, gamma: Gamma | None, drafter: str | None
    ) -> list[Request]:
        """Return the requests of a prompt, after every check.

        Raises: RequestError, CapacityError.
        """
        turn, called_ns = self._batch.turn, perf_counter_ns()
        turn.require_open()
        gamma, chosen = self.check_gamma(gamma), self.check_drafter(drafter)
        if params.n > len(self._batch):
            raise RequestError(
                f"n is {params.n}, and this bundle was built for {len(self._batch)} at once: ask "
                f"for fewer, or build with `batch = {params.n}`"
            )
        tokens = prompt_tokens(prompt, self.tokenizer, self.models.target)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        made = []
        for number in range(params.n):
            counts = SpeculationStats(gamma, chosen)
            if drafter is None:
                counts.fallback = self.models.absent
            completion = Completion(len(tokens), seed, counts, Timings(0), index=number)
            made.append(self._request(list(tokens), params, completion))
        began_ns = turn.now_ns() - (perf_counter_ns() - called_ns)
        for request in made:
            request.completion.timings.began_ns = began_ns
        return made

    def _request(
        self, tokens: list[int], params: SamplingParams, completion: Completion
    ) -> Request:
        models = self.models
        rules = rules_of(
            params, self.tokenizer, self._eos, models.target.geometry.vocab_size, self._grammars
        )
        return Request(
            tokens,
            # The last token is never fed, so one more than fits the buffers can be committed.
            min(len(tokens) + params.max_tokens, models.target.max_length + 1),
            params,
            completion,
            Noise(completion.seed, completion.index),
            rules,
            Reader(completion, params, self._eos, self.tokenizer),
            [CachedTokens(e) for e in (models.target, models.draft) if e is not None],
            fresh=params.prompt_logprobs is not None,
        )
