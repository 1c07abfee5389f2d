"""The generator: engines that complete prompts, and the streams it makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from specrt.aio import Worker
from specrt.completion import Chunk, Completion, Stream
from specrt.errors import RequestError, SpecrtError
from specrt.params import Gamma, SamplingParams
from specrt.request_factory import Prompt, RequestFactory, several_prompts, shared_params
from specrt.scheduler.request import Request
from specrt.scheduler.scheduler import Scheduler
from specrt.session import ChatTemplate, Session
from specrt.speculation.pool import DrafterPool, Models
from specrt.system import trim_heap
from specrt.text import Tokenizer

if TYPE_CHECKING:
    from specrt.aio import AsyncStream


class RequestSource:
    """A request that is read; it begins to wait for a row when its first chunk is asked for."""

    def __init__(self, batch: Scheduler, request: Request) -> None:
        self._batch = batch
        self._request = request

    def fetch(self) -> Chunk | None:
        """Return the next chunk, running passes where there is none; None at the end.

        Raises: RequestError, EngineError: what ended it before its time, once.
        """
        try:
            return self._batch.fetch(self._request)
        except BaseException:
            self.drop()
            raise

    def cancel(self) -> None:
        """End it before its time; see `Stream.cancel`."""
        self._request.cancel()

    def drop(self) -> None:
        """Give up what is not read yet."""
        self._request.drop()


def collected(
    batch: Scheduler, many: Sequence[Sequence[Request]], rows: int
) -> Iterator[list[Completion]]:
    """Run all requests, so many at once, and yield the completions of each prompt, in order."""
    requests = [request for one in many for request in one]
    for request in requests:
        request.patient = True
    told = 0
    try:
        for _ in _run(batch, requests, rows):
            while told < len(many) and all(r.completion.finish_reason for r in many[told]):
                yield [request.completion for request in many[told]]
                told += 1
    finally:
        for request in requests:
            request.drop()


def _run(batch: Scheduler, requests: Iterable[Request], rows: int) -> Iterator[None]:
    """Run requests to their ends, so many at once, yielding at each; a failure is its own."""
    running: list[Request] = []
    for request in requests:
        if len(running) == rows:
            _settle(batch, running)
            yield
        batch.submit(request)
        running.append(request)
    while running:
        _settle(batch, running)
        yield


def _settle(batch: Scheduler, running: list[Request]) -> None:
    done = batch.settle(running)
    running.remove(done)
    if done.error is not None:
        if not isinstance(done.error, SpecrtError):
            raise done.error
        done.completion.error = str(done.error)
        done.completion.finish_reason = "error"


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
        self._drafters = DrafterPool(models)
        self._batch = Scheduler(models, keeps=prompt_cache)
        self._asking = RequestFactory(models, tokenizer, eos_token_ids, self._drafters, self._batch)
        self._worker = Worker(self._batch)

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
        request = self._asking.one(prompt, params, gamma, drafter)
        return Stream(request.completion, RequestSource(self._batch, request))

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

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> AsyncStream:
        """Complete a prompt, with chunks to be awaited: `async for chunk in g.astream(...)`.

        No event loop waits for a pass: a thread runs them, and there is none where nothing runs.
        Raises: RequestError, CapacityError by this call; EngineError where a chunk is awaited.
        """
        from specrt.aio import AsyncStream

        return AsyncStream(self._asking.one(prompt, params, gamma, drafter), self._worker)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> Completion:
        """Complete a prompt and return the whole of it; see `astream`."""
        return await self.astream(prompt, params, gamma=gamma, drafter=drafter).finish()

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
            self._asking.requests(prompt, own, gamma, drafter)
            for prompt, own in zip(asked, each, strict=True)
        ]
        return collected(self._batch, many, at_once)

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
        """Close both engines, after the pass that may be running, and give their memory back.

        Threads and tasks that wait for a chunk get a RequestError. Closing again does nothing.
        """
        self._batch.close(self._worker.join)
        trim_heap()

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
