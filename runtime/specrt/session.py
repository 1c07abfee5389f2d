"""A chat: a conversation whose messages are answered by reading only what is new."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from specrt.completion import Chunk, Completion, Stream
from specrt.errors import CapacityError, RequestError
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.text.chat_template import ChatTemplate, Message


@dataclass(eq=False)
class ChatTurn:
    """A message, and as much of its answer as was read."""

    message: str
    script: str
    """The text of the whole conversation up to the answer."""
    prompt: list[int]
    """The same in tokens."""
    completion: Completion
    answer: str = ""
    tokens: list[int] = field(default_factory=list)
    """Of the answer."""

    @property
    def body(self) -> list[int]:
        """The answer's tokens without the one that ended it."""
        done = self.completion
        whole = len(self.tokens) == len(done.token_ids) and done.finish_reason == "stop"
        return self.tokens[:-1] if whole and not isinstance(done.stop_reason, str) else self.tokens


class Answer:
    """The answer to a message, which becomes part of the conversation as it is read."""

    def __init__(
        self, turn: ChatTurn, stream: Stream, settle: Callable[[ChatTurn], object]
    ) -> None:
        self._turn = turn
        self._stream = stream
        self._settle = settle

    def fetch(self) -> Chunk | None:
        """Return the next chunk, None at the end; see `Stream`."""
        chunk = None
        try:
            chunk = next(self._stream, None)
        finally:
            if chunk is None:
                self._settle(self._turn)
        if chunk is not None:
            self._turn.answer += chunk.text
            self._turn.tokens += chunk.token_ids
        return chunk

    def cancel(self) -> None:
        """End it before its time; see `Stream.cancel`."""
        self._stream.cancel()

    def drop(self) -> None:
        """Discard what is not read yet."""
        self._stream.close()


_TAIL = 64
"""Last tokens of an answer that may be no part of its text: a stop string, half a character."""


class Session:
    """A chat: each message is answered with the whole conversation before it in view.

    With a chat template, messages have roles and the text is what the template makes of them.
    Without one the model goes on with a plain text: `system`, then messages and answers in turn,
    with nothing between them.

    The tokens of the conversation stay as they were, and only the new text is turned into tokens,
    as the middle of a text, so that the KV buffers still hold everything before it
    (`Completion.cached_tokens`). Where a template changes earlier messages, the whole text is
    turned into tokens again. What messages hold is text: no control token comes of it.

    `params`, `gamma`, `drafter` and `system` may be changed between messages. Not for several
    threads at once; several sessions may share a generator.
    Raises: RequestError for an encoder-decoder.
    """

    def __init__(
        self,
        generator: Generator,
        template: ChatTemplate | None = None,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> None:
        generator.reader.require_continuing("it holds no conversations; use generate")
        self._generator = generator
        self._turns: list[ChatTurn] = []
        self._running: Any = None
        """Weak, so that dropping a stream stops it."""
        self.template = template
        self.system = system
        self.params = SamplingParams() if params is None else params
        self.gamma = gamma
        self.drafter = drafter

    @property
    def system(self) -> str | None:
        """The system message; raises RequestError on setting another type than text."""
        return self._system

    @system.setter
    def system(self, system: str | None) -> None:
        if system is not None and not isinstance(system, str):
            raise RequestError(f"system is of type {type(system).__name__}; expected text")
        self._system = system

    @property
    def params(self) -> SamplingParams:
        """Options of the coming answers; raises RequestError on setting another type."""
        return self._params

    @params.setter
    def params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}; expected SamplingParams")
        self._params = params

    @property
    def gamma(self) -> Gamma | None:
        """How many tokens to draft each round; the bundle's default when None.

        Raises: RequestError on setting one that was not built.
        """
        return self._gamma

    @gamma.setter
    def gamma(self, gamma: Gamma | None) -> None:
        self._generator.check_gamma(gamma)
        self._gamma = gamma

    @property
    def drafter(self) -> str | None:
        """The name of the drafter; the bundle's default when None.

        Raises: RequestError on setting one that cannot run here.
        """
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: str | None) -> None:
        self._generator.check_drafter(drafter)
        self._drafter = drafter

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, as `role` and `content`."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for turn in self._turns:
            messages.append(_message("user", turn.message))
            if turn.tokens:
                messages.append(_message("assistant", turn.answer))
        return messages

    @property
    def tokens(self) -> int:
        """How many tokens the conversation has, as of the last answer."""
        return len(self._turns[-1].prompt) + len(self._turns[-1].tokens) if self._turns else 0

    @property
    def prompt(self) -> list[int]:
        """The tokens before the last answer."""
        return self._turns[-1].prompt if self._turns else []

    @property
    def context(self) -> int:
        """How many tokens a conversation can have, the next message included."""
        return self._generator.models.target.max_length

    def stream(self, message: str) -> Stream:
        """Answer a message, yielding chunks as rounds commit.

        The answer, as far as it was read, is part of the conversation; a message without any
        answer is not. An answer that still runs is stopped first.
        Raises: RequestError, CapacityError before any work, and the conversation stays as it was;
            EngineError from a pass.
        """
        self.stop()
        if not isinstance(message, str):
            raise RequestError(f"the message is of type {type(message).__name__}; expected text")
        script = self._render([*self.messages, _message("user", message)])
        prompt = self._encode(script)
        self._require_room(len(prompt))
        stream = self._generator.stream(
            prompt, self.params, gamma=self._gamma, drafter=self._drafter
        )
        turn = ChatTurn(message, script, prompt, stream.completion)
        self._turns.append(turn)
        answering = Stream(stream.completion, Answer(turn, stream, self.settle))
        self._running = ref(answering)
        return answering

    def generate(self, message: str) -> Completion:
        """Answer a message and return the whole answer; see `stream`."""
        return self.stream(message).finish()

    def stop(self) -> None:
        """Stop the answer that runs, if one does; as much of it as was read stays."""
        answering = self._running() if self._running is not None else None
        self._running = None
        if answering is not None:
            answering.close()
        self.settle()

    def undo(self) -> str:
        """Take the last message and its answer back, and return the message.

        Raises: RequestError where there is none.
        """
        self.stop()
        if not self._turns:
            raise RequestError("there is nothing to undo: the conversation is empty")
        return self._turns.pop().message

    def reset(self) -> None:
        """Begin anew; system message and options stay."""
        self.stop()
        self._turns.clear()

    def settle(self, turn: ChatTurn | None = None) -> None:
        """Drop the last message (only `turn`, where given) if nothing of its answer was read."""
        last = self._turns[-1] if self._turns else None
        if last is not None and not last.tokens and turn in (None, last):
            self._turns.pop()

    def _render(self, messages: list[Message]) -> str:
        """Return the text of a conversation, up to where the answer begins."""
        if self.template is not None:
            return self.template.render(messages)
        return "".join(message["content"] for message in messages)

    def _encode(self, script: str) -> list[int]:
        """Return the tokens of a conversation: the former ones, and the new text's."""
        known, behind = self._known(script)
        return known + self._generator.tokenizer.encode(
            script, parse_special=self.template is not None, behind=behind
        )

    def _known(self, script: str) -> tuple[list[int], int]:
        """Return the tokens so far that a text begins with, and how many characters they are."""
        turn = self._turns[-1] if self._turns else None
        if turn is None or not script.startswith(turn.script):
            return [], 0
        body, decode, begun = turn.body, self._generator.tokenizer.decode, len(turn.script)
        for end in [*range(len(body), max(len(body) - _TAIL, 0), -1), 0]:
            text = decode(body[:end], turn.prompt)
            if script.startswith(text, begun):
                return turn.prompt + body[:end], begun + len(text)
        raise AssertionError("no tokens are not text")

    def _require_room(self, tokens: int) -> None:
        if tokens > self.context:
            raise CapacityError(
                f"the conversation would have {tokens} tokens, and the context of this bundle is "
                f"{self.context}: undo some of it, reset it, or build with a larger `max_length`"
            )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
