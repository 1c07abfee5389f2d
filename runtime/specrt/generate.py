"""The generator: engines ready to complete prompts, and the streams it makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from specrt.asking import Asking
from specrt.batch import Batch
from specrt.chat import ChatTemplate
from specrt.collecting import collected
from specrt.completion import Completion, Stream
from specrt.drafters import Drafters
from specrt.errors import RequestError
from specrt.heap import trim_heap
from specrt.models import Gamma, Models
from specrt.params import SamplingParams
from specrt.prompted import Prompt, several_prompts, shared_params
from specrt.reading import Reading
from specrt.session import Session
from specrt.text import Tokenizer
from specrt.worker import Worker

if TYPE_CHECKING:
    from specrt.asynchronous import AsyncStream


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
        self._batch = Batch(models, keeps=prompt_cache)
        self._asking = Asking(models, tokenizer, eos_token_ids, self._drafters, self._batch)
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
        from specrt.asynchronous import AsyncStream  # which takes a while to import

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
