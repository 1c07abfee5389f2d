"""The service: one open bundle over HTTP, and the completions of each request on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic, time
from typing import TYPE_CHECKING, Any, NamedTuple

from specrt.aio import AsyncStream
from specrt.completion import Chunk, Completion, SpeculationStats
from specrt.errors import RequestError, reason_of
from specrt.generator import Generator
from specrt.params import GenerateOptions, SamplingParams
from specrt.prompts import Prompt
from specrt.serve.admission import Admission, Places, ShutDownError
from specrt.serve.bodies import Body, ChatBody, ChatMessage
from specrt.serve.metrics import ServerMetrics
from specrt.serve.request_log import RequestRecord
from specrt.serve.tool_calls import begins_reasoning
from specrt.serve.tools import ToolUse
from specrt.speculation.drafters import available_drafters
from specrt.speculation.round import Round
from specrt.speech.whisper_config import WhisperConfig
from specrt.text.chat_template import ChatTemplate
from specrt.text.detokenizer import Detokenizer, DraftedSpans
from specrt.text.traced_text import ChatPrompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("specrt.serve")

_MOST_UNKNOWN = 100
"""Names of fields that are logged: they are the clients' own words."""

_COMPILING = 2
"""Threads that compile constraints, a second for some; requests without one do not wait."""

_AHEAD = 16
"""Chunks of several completions that wait to be sent before their streams do."""


class Update(NamedTuple):
    """A chunk of one of the completions of a request."""

    number: int
    """Of the completion."""
    chunk: Chunk
    round_: Round | None
    """What the chunk is of; None for the first one, and for what is left at the end."""
    counts: SpeculationStats
    """Of the completion so far."""


class Service:
    """A generator with all that the routes share. For one event loop."""

    def __init__(
        self,
        generator: Generator,
        name: str,
        *,
        template: ChatTemplate | None = None,
        fingerprint: str = "",
        facts: Mapping[str, Any] | None = None,
        max_queue: int = 64,
        metrics_prefix: str = "specrt",
        speech: WhisperConfig | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self.generator = generator
        self.name = name
        self.names = tuple(dict.fromkeys((name, *aliases)))
        """By which requests may call the model."""
        self.template = template
        self.fingerprint = fingerprint
        self.facts = facts or {"backend": None}
        """Of the bundle, for /v1/models."""
        self.speech = speech
        """Of a bundle that transcribes."""
        self.created = int(time())
        self._compiling = ThreadPoolExecutor(_COMPILING, "constraints")
        self._unknown: set[str] = set()
        """Names of fields that were logged."""
        self.context = generator.models.target.max_length
        self.admission = Admission(generator.rows, max_queue)
        self.metrics = ServerMetrics(
            metrics_prefix, name, self.admission, generator.rows * self.context,
            prompts_held=generator.reader.continues,
        )  # fmt: skip

    def close(self) -> None:
        """Close the generator; what is not compiled yet is dropped."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self.generator.close()

    def check(self, body: Body) -> None:
        """Refuse a model of another name, and log fields that mean nothing here, once each.

        Raises: UnknownModelError.
        """
        self.require(body.model)
        for name in body.unknown:
            if name not in self._unknown and len(self._unknown) < _MOST_UNKNOWN:
                self._unknown.add(name)
                log.warning("requests have the field %.60r, which means nothing here", name)

    def require(self, model: str | None) -> None:
        """Refuse a model of another name.

        Raises: UnknownModelError.
        """
        if model and model not in self.names:
            raise UnknownModelError(f"the model {model!r} is not here; this is {self.name!r}")

    def to_json(self, name: str) -> dict[str, Any]:
        """Return the object of /v1/models under one of its names, and what speculation there is."""
        models, reader = self.generator.models, self.generator.reader
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "specrt",
            "root": self.name,
            "max_model_len": self.context,
            "specrt": {
                "chat": self.template is not None and reader.continues,
                **self.facts,
                "gammas": list(models.gammas),
                "gamma": models.gamma,
                "drafters": list(available_drafters(has_model=models.draft is not None)),
                "drafter": self.generator.check_drafter(None),
                "rows": self.generator.rows,
                "sampling": {**models.sampling},
                **({} if reader.continues else {"max_source": reader.limit}),
            },
        }

    def tokens_of(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, which may have more than a prompt but not many more.

        Raises: CapacityError for one that is far too long, before it is tokenized.
        """
        self.generator.reader.check_length(text)
        return self.generator.tokenizer.encode(text, special=special)

    def document_start(self) -> list[int]:
        """Return the prompt of a request that has none: what a document begins with.

        Raises: RequestError where no token is known to begin one.
        """
        self.generator.reader.require_continuing("give a prompt")
        begin = self.generator.tokenizer.bos_token_id
        known = [begin] if begin is not None else [*self.generator.eos_token_ids]
        if not known:
            raise RequestError(
                "prompt is null, and this model has no token to begin a text with; give a prompt"
            )
        return known[:1]

    async def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        record: RequestRecord,
        *,
        only_prompts: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> ServedCompletions:
        """Admit a request, and return its completions: `params.n` of each prompt, in order.

        With `only_prompts` they are empty: the prompts are read, and what comes is left out.
        Raises: OverloadError, RequestError, CapacityError before any work.
        """
        with ExitStack() as admitted:
            places = admitted.enter_context(self.admit(len(prompts) * params.n, record))
            began = monotonic()
            streams = await asyncio.get_running_loop().run_in_executor(
                None if params.constraint is None else self._compiling,
                self._streams, prompts, params, options,
            )  # fmt: skip
            if self.admission.ended:
                raise ShutDownError
            return ServedCompletions(
                self, streams, places, admitted.pop_all(), began, record,
                only_prompts=only_prompts,
            )  # fmt: skip

    @contextmanager
    def admit(self, count: int, record: RequestRecord) -> Iterator[Places]:
        """Hold the places of so many completions, here and of the request's key.

        Raises: OverloadError, RequestError; see `Admission` and `ApiKey`.
        """
        with ExitStack() as admitted:
            places = admitted.enter_context(self.admission.admit(count))
            if record.key is not None:
                admitted.enter_context(record.key.admit(count))
            yield places

    async def begin_chat(
        self, body: ChatBody, use: ToolUse, record: RequestRecord
    ) -> ServedCompletions:
        """Admit a conversation; see `begin`.

        Raises: RequestError where both a call is forced and the text is constrained, too.
        """
        more: dict[str, Any] = {"logprobs": body.ranked}
        forced = await asyncio.to_thread(use.schema)
        if forced is not None:
            if body.constraint():
                raise RequestError(
                    "tool_choice forces a call, and another field says what the text must match; "
                    "expected one of them"
                )
            more["json_schema"] = forced
        params = await asyncio.to_thread(body.params, body.most_tokens, self.context, **more)
        prompt = await asyncio.to_thread(self.render, body.messages, use.described)
        options = body.options(record.cache_salt(body.cache_salt))
        answers = await self.begin([prompt], params, record, **options)
        answers.read_calls(use, reasoning=begins_reasoning(prompt))
        return answers

    def render(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ChatPrompt:
        """Return the prompt of a conversation.

        Raises: RequestError for an encoder-decoder, without a chat template, and for what that
            refuses.
        """
        self.generator.reader.require_continuing(
            "it holds no conversations; use /v1/completions with a prompt"
        )
        if self.template is None:
            raise RequestError(
                f"{self.name} has no chat template: its model was not trained for chat; use "
                "/v1/completions, or give the server a template with --chat-template"
            )
        return self.template.render([message.plain() for message in messages], tools=tools)

    def _streams(
        self, prompts: Sequence[Prompt], params: SamplingParams, options: GenerateOptions
    ) -> list[AsyncStream]:
        generator = self.generator
        generator.reader.require_text("use /v1/audio/transcriptions")
        for prompt in prompts:  # all, before one is tokenized
            if isinstance(prompt, str):
                generator.reader.check_length(prompt)
        return [s for one in prompts for s in generator.astreams(one, params, **options)]


class UnknownModelError(RequestError):
    """A request names another model than the one that is served."""


class ServedCompletions:
    """The completions of one request. Close it however the request ends."""

    def __init__(
        self,
        service: Service,
        streams: Sequence[AsyncStream],
        places: Places,
        admitted: ExitStack,
        began: float,
        record: RequestRecord,
        *,
        only_prompts: bool = False,
    ) -> None:
        self.completions = [stream.completion for stream in streams]
        self._service = service
        self._streams = streams
        self._places = places
        self._admitted = admitted
        self._began = began
        self.record = record
        self._only_prompts = only_prompts
        self._use(prompt=sum(len(c.prompt_token_ids) for c in self.completions if not c.index))
        self._open = set(streams)
        self.reasoning = False
        """Whether the prompt of a conversation ends where reasoning begins."""
        service.admission.live |= self._open

    def read_calls(self, use: ToolUse, *, reasoning: bool) -> None:
        """Say how calls are found in the texts, before any of them begins."""
        self.reasoning = reasoning
        for stream in self._streams:
            end = use.end(reasoning=reasoning)
            if end is not None:
                stream.end_with(end)

    async def updates(self) -> AsyncIterator[Update]:
        """Yield the chunks of all completions as they come.

        Raises: RequestError, EngineError, ShutDownError: what ended one of them before its time.
        """
        if len(self._streams) == 1:
            async for update in self._follow(0):
                yield update
            return
        queue: asyncio.Queue[Update | BaseException | None] = asyncio.Queue(_AHEAD)

        async def pump(index: int) -> None:
            try:
                async for update in self._follow(index):
                    await queue.put(update)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._streams))]
        try:
            left = len(tasks)
            while left:
                given = await queue.get()
                if isinstance(given, BaseException):
                    raise given
                if given is None:
                    left -= 1
                else:
                    yield given
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> list[Completion]:
        """Run all completions to their ends; see `updates` for what it raises."""
        async for _ in self.updates():
            pass
        return self.completions

    async def close(self) -> None:
        """End what still runs, and give the places back."""
        try:
            for stream in [*self._open]:
                self._ended(stream)
                with suppress(Exception):
                    await stream.aclose()
        finally:
            self._admitted.close()

    def detokenizer(self, index: int) -> Detokenizer:
        """Return what turns the tokens of a completion into its text."""
        generator = self._service.generator
        before = generator.reader.first_tokens(self.completions[index].prompt_token_ids)
        return generator.tokenizer.detokenizer(before)

    def spans(self, index: int) -> DraftedSpans:
        """Return what tells which text of a completion was drafted."""
        return DraftedSpans(self.detokenizer(index))

    async def _follow(self, index: int) -> AsyncIterator[Update]:
        stream, metrics = self._streams[index], self._service.metrics
        completion = stream.completion
        arrivals, log, number = completion.timings.arrivals, completion.speculation.log, 0
        try:
            async for chunk in stream:
                round_ = None
                if chunk.token_ids:
                    if not number:
                        metrics.first_token(completion)
                    else:
                        round_ = log[number - 1]
                        seconds = (arrivals[number][0] - arrivals[number - 1][0]) / 1e9
                        metrics.round(round_, seconds, len(chunk.token_ids))
                    number += 1
                    self._use(generated=len(chunk.token_ids))
                if not self._only_prompts:
                    yield Update(index, chunk, round_, completion.speculation)
        except Exception as error:
            completion.fail(reason_of(error))
            self._ended(stream)
            raise
        self._ended(stream)
        if stream in self._service.admission.cut:
            raise ShutDownError

    def _use(self, **tokens: int) -> None:
        """Count tokens that the key of the request has used."""
        if self.record.key is not None:
            self.record.key.use(**tokens)

    def _ended(self, stream: AsyncStream) -> None:
        if stream in self._open:
            self._open.discard(stream)
            self._places.give_back()
            self._service.admission.live.discard(stream)
            if self._only_prompts:
                _drop_text(stream.completion)
            self._service.metrics.end(stream.completion, monotonic() - self._began)
            self.record.end(stream.completion)


def _drop_text(completion: Completion) -> None:
    """Leave a completion as one that ended after its prompt."""
    completion.text, completion.stop_reason = "", None
    completion.token_ids.clear()
    if completion.logprobs is not None:
        completion.logprobs.clear()
    if completion.finish_reason is not None:
        completion.finish_reason = "length"
