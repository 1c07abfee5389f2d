"""The generator: engines that complete prompts, one by one as streams, or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Generates
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

from specrt.aio import AsyncStream, PacedStream, Worker
from specrt.completion import Completion, SpeculationStats, Stream
from specrt.errors import RequestError, reason_of
from specrt.params import Gamma, GenerateOptions, SamplingParams, check_options
from specrt.prompts import Prompt, several_prompts
from specrt.request_factory import PromptRequests, RequestFactory, shared_params
from specrt.scheduler.request import Request
from specrt.scheduler.scheduler import BeginRounds, RequestSource, Scheduler, engine_rounds
from specrt.speculation.pool import Models
from specrt.speculation.round import Drafter
from specrt.speculation.text_memory import TextMemory
from specrt.system.memory import trim_heap
from specrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    `memory_key`, `cache_salt`.

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
        self.reader = self._requests.reader
        """Reads prompts."""
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
        requests = self._requests.each(prompt, params, check_options(options))
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
        cache_salt: str = "",
    ) -> PacedStream:
        """Complete a prompt round by round, as it is told to, with a drafter of its own.

        `name` is what its counts call the drafter.
        While it is not told to go on it pauses, and its row goes to others as that of a stream that
        is not read.
        Raises: RequestError, CapacityError.
        """
        self.reader.require_continuing("no device drafts for it; send whole requests")
        options: GenerateOptions = {
            "parse_special": parse_special, "memory_key": None, "cache_salt": cache_salt,
        }  # fmt: skip
        request = self._requests.one(prompt, params, options)
        request.completion.speculation = SpeculationStats(max(self.models.gammas), name)
        request.drafter = drafter
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
        requests = [
            self._requests.several(prompt, own, options, f"prompts[{number}]")
            for number, (prompt, own) in enumerate(zip(several, each, strict=True))
        ]
        return _collect(self._scheduler, requests, rows)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Request:
        """Return the request of a completion, which nothing runs; see `stream` for errors."""
        return self._requests.one(prompt, params, check_options(options))

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
