"""The generator: engines that complete prompts, and the streams it makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from specrt.aio import AsyncStream, Worker
from specrt.completion import Chunk, Completion, Stream
from specrt.errors import RequestError, SpecrtError
from specrt.params import Gamma, GenerateOptions, SamplingParams
from specrt.request_factory import Prompt, RequestFactory, several_prompts, shared_params
from specrt.scheduler.request import Request
from specrt.scheduler.scheduler import Scheduler
from specrt.speculation.pool import Models
from specrt.system import trim_heap
from specrt.text import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RequestSource:
    """The chunks of a request, which waits for a slot from the first fetch on."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler = scheduler
        self._request = request

    def fetch(self) -> Chunk | None:
        """Return the next chunk, running passes until there is one; None at the end.

        Raises: RequestError, EngineError: what ended it before its time, once.
        """
        try:
            return self._scheduler.fetch(self._request)
        except BaseException:
            self.drop()
            raise

    def cancel(self) -> None:
        """End it before its time; see `Stream.cancel`."""
        self._request.cancel()

    def drop(self) -> None:
        """Discard what is not read yet."""
        self._request.drop()


def _collect(
    scheduler: Scheduler, prompts: Sequence[Sequence[Request]], rows: int
) -> Iterator[list[Completion]]:
    """Run all requests, at most `rows` at once; yield the completions of each prompt, in order."""
    requests = [request for one in prompts for request in one]
    for request in requests:
        request.collected = True
    done = 0
    try:
        for _ in _run(scheduler, requests, rows):
            while done < len(prompts) and all(r.completion.finish_reason for r in prompts[done]):
                yield [request.completion for request in prompts[done]]
                done += 1
    finally:
        for request in requests:
            request.drop()


def _run(scheduler: Scheduler, requests: Iterable[Request], rows: int) -> Iterator[None]:
    """Run requests to their ends, at most `rows` at once, yielding at each end."""
    running: list[Request] = []
    for request in requests:
        if len(running) == rows:
            _finish_one(scheduler, running)
            yield
        scheduler.submit(request)
        running.append(request)
    while running:
        _finish_one(scheduler, running)
        yield


def _finish_one(scheduler: Scheduler, running: list[Request]) -> None:
    """Run until a request is over; an error becomes part of its completion."""
    request = scheduler.finish_one(running)
    running.remove(request)
    if request.error is not None:
        if not isinstance(request.error, SpecrtError):
            raise request.error
        request.completion.error = str(request.error)
        request.completion.finish_reason = "error"


class Generator:
    """A pair of engines ready to complete prompts, as many at once as they have rows.

    What the KV buffers hold of earlier texts is not read again: a prompt that begins as one of
    them did starts where they part (`Completion.cached_tokens`).

    Threads: any may stream and generate. Streams share the rows and run while one of them is read:
    a stream that is not read for a while pauses, and makes room for others.

    `options` of the methods are those of `GenerateOptions`: `gamma` and `drafter`.
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
        """Remarks for the user who opened the bundle, a line each."""
        self._scheduler = Scheduler(models, prompt_cache=prompt_cache)
        self._requests = RequestFactory(models, tokenizer, eos_token_ids, self._scheduler)
        self._worker = Worker(self._scheduler)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Complete a prompt, text or token ids, yielding chunks as rounds commit.

        Raises: RequestError, CapacityError before any work; EngineError from a pass.
        """
        request = self._requests.one(prompt, params, **options)
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
        return AsyncStream(self._requests.one(prompt, params, **options), self._worker)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Complete a prompt and return the whole of it; see `astream`."""
        return await self.astream(prompt, params, **options).finish()

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        rows: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Completion]]:
        """Complete several prompts, `n` times each, on all rows; return n completions of each.

        `params` are shared, or one for each prompt. A row that is done takes the next prompt at
        once; `rows` is how many run at once at most, all when None. A completion that fails on the
        way has the finish reason `error` and the reason in `error`, and harms no other.
        Raises: RequestError, CapacityError before any work, for any of the prompts.
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

        Raises: RequestError, CapacityError before any work, for any of the prompts.
        """
        several = several_prompts(prompts)
        each = shared_params(len(several), params)
        rows = self._check_rows(rows)
        requests = [
            self._requests.requests(prompt, own, **options)
            for prompt, own in zip(several, each, strict=True)
        ]
        return _collect(self._scheduler, requests, rows)

    def forget(self) -> None:
        """Read every coming prompt from its beginning, whatever the KV buffers hold."""
        self._scheduler.forget()

    def close(self) -> None:
        """Close both engines, after the pass that may be running, and give their memory back.

        Threads and tasks that wait for a chunk get a RequestError. Closing again does nothing.
        """
        self._scheduler.close(self._worker.join)
        trim_heap()

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
