"""/v1/completions and /v1/chat/completions: OpenAI's objects of completions, whole and streamed."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator, Sequence
from time import time
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specrt.completion import Chunk, Completion
from specrt.errors import RequestError
from specrt.prompts import Prompt
from specrt.sampling.distribution import LEAST, Entry, Logprob
from specrt.serve.bodies import MOST_CHOICES, ChatBody, CompletionBody, StreamOptions
from specrt.serve.request_log import record_of
from specrt.serve.route import STREAMED
from specrt.serve.sending import DONE, StrictJsonRoute, answer, as_event
from specrt.serve.service import ServedCompletions, Service
from specrt.serve.speculation_report import metrics_of, speculation_of
from specrt.serve.tool_calls import CallPiece, ToolCall
from specrt.serve.tools import ToolUse, call_parts, tool_use
from specrt.text.detokenizer import Detokenizer


def usage_of(answers: ServedCompletions) -> dict[str, Any]:
    """Return OpenAI's count of tokens; each prompt counts once."""
    completions = answers.completions
    first = [c for c in completions if not c.index]
    read, made = sum(c.prompt_tokens for c in first), sum(len(c.token_ids) for c in completions)
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in first)},
    }


class AnswerFormat:
    """How the completions of one request become OpenAI's objects."""

    kind: str
    """The object's name."""
    chunk_kind: str
    """The same in a stream."""
    prefix: str
    """Of ids."""
    byte_mark: str
    """Before the bytes of a token that is not a text."""

    def __init__(
        self, service: Service, answers: ServedCompletions, options: StreamOptions | None
    ) -> None:
        self._service = service
        self._answers = answers
        self._options = options or StreamOptions()
        self._id = f"{self.prefix}-{uuid4().hex[:24]}"
        self._created = int(time())

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all completions are over.

        Raises: EngineError, RequestError: what ended one of them.
        """
        completions = self._answers.completions
        return {
            **self._head(self.kind),
            "choices": [self.choice(i, c) for i, c in enumerate(completions)],
            "usage": usage_of(self._answers),
            "metrics": metrics_of(completions),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer."""
        answers, options = self._answers, self._options
        count = len(answers.completions)
        for choice in (self.opening(i) for i in range(count)):
            if choice is not None:
                yield self._event([choice])
        painted = [answers.spans(i) for i in range(count if options.include_speculation else 0)]
        async for update in answers.updates():
            extra: dict[str, Any] = {}
            if painted:
                extra["speculation"] = speculation_of(update, painted[update.number])
            for choice in self.deltas(update.number, update.chunk):
                yield self._event([choice], **extra)
        for index, completion in enumerate(answers.completions):
            for choice in self.closing(index, completion):
                yield self._event([choice])
        if options.include_usage:
            metrics = metrics_of(answers.completions)
            yield self._event([], usage=usage_of(answers), metrics=metrics)
        yield DONE

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return a whole choice."""
        raise NotImplementedError

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return what comes before the first text of a choice."""
        raise NotImplementedError

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return what a chunk adds to a choice, one an event."""
        raise NotImplementedError

    def closing(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Return what comes after the last text of a choice, one an event."""
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
            "system_fingerprint": self._service.fingerprint,
        }

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        if self._options.continuous_usage_stats:
            extra.setdefault("usage", usage_of(self._answers))
        elif self._options.include_usage:
            extra.setdefault("usage", None)
        return as_event({**self._head(self.chunk_kind), "choices": choices, **extra})

    def _name(self, token: int) -> str:
        """Return a token's text, a control token's name, or the bytes of what is not a text."""
        tokenizer = self._service.generator.tokenizer
        text = tokenizer.text_of(token)
        if text is not None:
            return text or tokenizer.control_name(token)
        return self.byte_mark + "".join(f"\\x{byte:02x}" for byte in tokenizer.bytes_of(token))


class TextFormat(AnswerFormat):
    """The objects of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix, byte_mark = "cmpl", "bytes:"

    def __init__(self, service: Service, answers: ServedCompletions, body: CompletionBody) -> None:
        super().__init__(service, answers, body.stream_options)
        self._echo = body.echo
        count, tokenizer = len(answers.completions), service.generator.tokenizer
        self._offsets = [
            TextOffsets(tokenizer.detokenizer() if self._echo else answers.detokenizer(index))
            for index in range(count)
        ]

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return a whole choice, after its prompt where that is echoed."""
        text = self._echoed(index) + completion.text
        entries: Sequence[Entry | None] | None = completion.logprobs
        if entries is not None and self._echo:
            entries = [*(completion.prompt_logprobs or []), *entries]
        logprobs = None if entries is None else self._logprobs(index, entries)
        return self._choice(index, text, logprobs, completion.finish_reason, completion.stop_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the prompt where it is echoed."""
        return self._choice(index, self._echoed(index)) if self._echo else None

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the text of a chunk."""
        if not (chunk.text or chunk.token_ids):
            return []
        known = chunk.logprobs
        logprobs = None if known is None else self._logprobs(index, known)
        return [self._choice(index, chunk.text, logprobs)]

    def closing(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Return the reason of the end."""
        return [self._choice(index, "", None, completion.finish_reason, completion.stop_reason)]

    def _echoed(self, index: int) -> str:
        if not self._echo:
            return ""
        return self._service.generator.tokenizer.decode(
            self._answers.completions[index].prompt_token_ids
        )

    def _choice(
        self, index: int, text: str, logprobs: Any = None, reason: str | None = None,
        stop: int | str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": stop,
        }

    def _logprobs(self, index: int, entries: Sequence[Entry | None]) -> dict[str, Any]:
        """Return log-probabilities in lists side by side; a first token's are unknown."""
        prompt = self._answers.completions[index].prompt_token_ids
        drawn = [
            prompt[number] if entry is None else next(iter(entry))
            for number, entry in enumerate(entries)
        ]
        top = [None if entry is None else self._by_name(entry) for entry in entries]
        return {
            "tokens": [*map(self._name, drawn)],
            "token_logprobs": [None if one is None else next(iter(one.values())) for one in top],
            "top_logprobs": top,
            "text_offset": [*map(self._offsets[index].of, drawn)],
        }

    def _by_name(self, entry: Entry) -> dict[str, float]:
        """Return the log-probabilities of an entry; of two tokens of one name the later has its id.

        The token of the text is the first.
        """
        named: dict[str, float] = {}
        for token, one in entry.items():
            name = self._name(token)
            named[f"token_id:{token}" if name in named else name] = max(one.logprob, LEAST)
        return named


class TextOffsets:
    """Where the tokens of a text begin in it; parts of a character begin where that does."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._length = 0

    def of(self, token: int) -> int:
        """Return the offset of the next token."""
        offset = self._length
        self._length += len(self._detokenizer.push([token]))
        return offset


class ChatFormat(AnswerFormat):
    """The objects of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix, byte_mark = "chatcmpl", ""

    def __init__(
        self, service: Service, answers: ServedCompletions, body: ChatBody, use: ToolUse
    ) -> None:
        super().__init__(service, answers, body.stream_options)
        self._use = use
        self._top = body.ranked or 0
        self._readers = [use.stream(reasoning=answers.reasoning) for _ in answers.completions]
        self._calls = [0] * len(answers.completions)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return a whole choice: a message, with the calls that its text has."""
        parts = call_parts(completion.text, self._use, reasoning=self._answers.reasoning)
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [call.to_json() for call in calls]
        known = completion.logprobs
        reason = "tool_calls" if calls and completion.finish_reason == "stop" else None
        return {
            "index": index,
            "message": message,
            "logprobs": None if known is None else self._logprobs(known),
            "finish_reason": reason or completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the role."""
        return self._choice(index, {"role": "assistant", "content": None})

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the text of a chunk, and what it adds to calls."""
        logprobs = None if chunk.logprobs is None else self._logprobs(chunk.logprobs)
        reader = self._readers[index]
        parts: list[str | CallPiece] = (
            reader.push(chunk.text) if reader else [chunk.text] if chunk.text else []
        )
        choices = [self._choice(index, delta) for delta in self._deltas(index, parts)]
        if logprobs and not choices:  # tokens whose text is held back are told all the same
            choices = [self._choice(index, {"content": ""})]
        if choices:
            choices[0]["logprobs"] = logprobs
        return choices

    def closing(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Return what was held back, and the reason of the end."""
        reader = self._readers[index]
        parts = reader.finish() if reader else []
        choices = [self._choice(index, delta) for delta in self._deltas(index, parts)]
        reason = completion.finish_reason
        if self._calls[index] and reason == "stop":
            reason = "tool_calls"
        stop = completion.stop_reason
        return [*choices, self._choice(index, {}, reason) | {"stop_reason": stop}]

    def _deltas(self, index: int, parts: Sequence[str | CallPiece]) -> Iterator[dict[str, Any]]:
        """Yield the deltas of pieces of text and of calls."""
        for part in parts:
            if isinstance(part, str):
                yield {"content": part}
                continue
            self._calls[index] += part.name is not None
            if part.name is not None or part.arguments:
                yield {"tool_calls": [part.to_json(self._calls[index] - 1)]}

    def _choice(
        self, index: int, delta: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        content = []
        for entry in entries:
            told = {token: self._told(token, one) for token, one in entry.items()}
            ranked = sorted(told, key=lambda token: entry[token].rank)
            top = [told[token] for token in ranked if entry[token].rank <= self._top]
            content.append({**next(iter(told.values())), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _told(self, token: int, logprob: Logprob) -> dict[str, Any]:
        data = self._service.generator.tokenizer.bytes_of(token)
        value = max(logprob.logprob, LEAST)
        return {"token": self._name(token), "logprob": value, "bytes": list(data)}


def completion_routes(service: Service) -> APIRouter:
    """Return the routes of completions."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/v1/completions", response_model=None, responses=STREAMED)
    async def completions(body: CompletionBody, request: HttpRequest) -> Response:
        """Complete a text, or several."""
        service.check(body)
        prompts: list[Prompt] = [*body.prompts] or [service.document_start()]
        if len(prompts) * (body.n or 1) > MOST_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts with n {body.n or 1} were given; expected up to "
                f"{MOST_CHOICES} completions"
            )
        if body.echo and body.logprobs is not None and body.stream:
            raise RequestError("echo and logprobs cannot be streamed; leave stream out")
        if body.echo:
            remedy = "no text begins with it; leave echo out"
            service.generator.reader.require_continuing(remedy)
        if body.max_tokens == 0 and not body.echo:
            raise RequestError("max_tokens is 0; expected 1 or more, or echo")
        ranked, record = body.logprobs, record_of(request.scope)
        params = await to_thread(
            body.params,
            None if body.max_tokens is None else max(1, body.max_tokens),
            service.context,
            logprobs=ranked,
            prompt_logprobs=ranked if body.echo else None,
        )
        answers = await service.begin(
            prompts,
            params,
            record,
            only_prompts=body.max_tokens == 0,
            **body.options(record.cache_salt(body.cache_salt)),
        )
        form = TextFormat(service, answers, body)
        return await answer(request, answers, form, stream=body.stream)

    @router.post("/chat/completions", response_model=None, include_in_schema=False)
    @router.post("/v1/chat/completions", response_model=None, responses=STREAMED)
    async def chat_completions(body: ChatBody, request: HttpRequest) -> Response:
        """Answer a conversation."""
        service.check(body)
        use = tool_use(body)
        answers = await service.begin_chat(body, use, record_of(request.scope))
        form = ChatFormat(service, answers, body, use)
        return await answer(request, answers, form, stream=body.stream)

    return router
