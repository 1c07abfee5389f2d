"""Conversations: chat templates, and sessions that read only what is new."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

from specrt.completion import Chunk, Completion, Stream
from specrt.errors import CapacityError, RequestError, SpecrtError
from specrt.params import Gamma, SamplingParams

if TYPE_CHECKING:
    from specrt.generator import Generator


Message = dict[str, str]

_LONGEST = 200
"""Characters of a template's own words in an error."""


class NoTemplateError(RequestError):
    """A bundle has no chat template."""


class ChatTemplate:
    """The Jinja template of a tokenizer, rendered in a sandbox as transformers renders it."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = special
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # deep nesting fails in the parser and in Python's compiler
            raise RequestError(
                f"the bundle's chat template is not valid Jinja: {_line(error)}"
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt text for messages of `role` and `content`.

        Raises: RequestError when the template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates ask whether it is none, not only whether it is defined
                documents=None,
                **self._special,
            )
        except SpecrtError:
            raise
        except Exception as error:  # a template is a program, and may fail like one
            raise RequestError(f"the chat template refused the messages: {_line(error)}") from error


def read_template(bundle: str | Path) -> ChatTemplate:
    """Read the chat template of a bundle: chat_template.jinja, else tokenizer_config.json.

    Raises: NoTemplateError when the bundle has none, RequestError for one that cannot be read.
    """
    folder = Path(bundle)
    config = _config(folder / "tokenizer_config.json")
    separate = folder / "chat_template.jinja"
    source = _read(separate) if separate.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named ones; transformers takes `default`
        named = [t for t in source if isinstance(t, dict)]
        source = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise _damaged(
            folder / "tokenizer_config.json",
            f"has the chat_template {short(source)}; expected a string or a list of named ones",
        )
    if not source:
        raise NoTemplateError(
            f"{folder} has no chat template: its model was not trained for chat; "
            "complete plain text instead (no --chat; a session without a template)"
        )
    tokens = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token")
    }
    return ChatTemplate(source, {k: v for k, v in tokens.items() if isinstance(v, str)})


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _damaged(path, f"holds {short(config)}; expected an object")
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"cannot be read as UTF-8: {error}") from error


def _damaged(path: Path, what: str) -> RequestError:
    return RequestError(
        f"{path} {what}; correct it in the checkpoint and build the bundle again, or leave --chat "
        "out"
    )


def _generation_tag() -> type[Any]:
    """Return the `{% generation %}` block of newer templates, which marks and changes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model has never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: Any) -> NoReturn:
    raise RequestError(f"the chat template refused the messages: {_line(message)}")


def _line(said: Any) -> str:
    """Return what a template or its failure says as one line of bearable length."""
    shown = "".join(c if c.isprintable() else " " for c in str(said))
    text = " ".join(shown.split()) or type(said).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@dataclass(eq=False)
class ChatTurn:
    """A message, and what was read of the answer to it."""

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
        """Give up what is not read yet."""
        self._stream.close()


_TAIL = 64
"""Last tokens of an answer that may be no part of its text: a stop string, half a character."""


class Session:
    """A chat: each message is answered with everything said before it in view.

    With a chat template, messages have roles and the text is what the template makes of them.
    Without one the model goes on with a plain text: `system`, then messages and answers in turn,
    with nothing between them.

    The tokens of the conversation are kept as they came, and only the new text is turned into
    tokens, so that the KV buffers still hold everything before it (`Completion.cached_tokens`).
    Where a template writes earlier messages otherwise than they were said, all of it is turned
    into tokens again.

    `params`, `gamma`, `drafter` and `system` may be changed between messages. Not for several
    threads at once; several sessions may share a generator.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        template: ChatTemplate | None = None,
        system: str | None = None,
        params: SamplingParams | None = None,
        gamma: Gamma | None = None,
        drafter: str | None = None,
    ) -> None:
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
        """What the model is told first; raises RequestError on setting what is no text."""
        return self._system

    @system.setter
    def system(self, system: str | None) -> None:
        if system is not None and not isinstance(system, str):
            raise RequestError(f"system is of type {type(system).__name__}; expected text")
        self._system = system

    @property
    def params(self) -> SamplingParams:
        """Options of the coming answers; raises RequestError on setting what is none."""
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
        """What drafts; the bundle's default when None.

        Raises: RequestError on setting one that cannot be had.
        """
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: str | None) -> None:
        self._generator.check_drafter(drafter)
        self._drafter = drafter

    @property
    def messages(self) -> list[Message]:
        """What was said so far, as `role` and `content`."""
        said = [] if self.system is None else [_message("system", self.system)]
        for turn in self._turns:
            said.append(_message("user", turn.message))
            if turn.tokens:
                said.append(_message("assistant", turn.answer))
        return said

    @property
    def tokens(self) -> int:
        """How many tokens the conversation has, as of the last answer."""
        return len(self._turns[-1].prompt) + len(self._turns[-1].tokens) if self._turns else 0

    @property
    def context(self) -> int:
        """How many tokens a conversation can have, the next message included."""
        return self._generator.models.target.max_length

    def stream(self, message: str) -> Stream:
        """Answer a message, yielding chunks as rounds commit.

        What was read of the answer is part of the conversation, to its end or to where it was
        stopped; a message of whose answer nothing came is none. An answer that still runs is
        stopped first.
        Raises: RequestError, CapacityError before any work, and the conversation stays as it was;
            EngineError from a pass.
        """
        self.stop()
        if not isinstance(message, str):
            raise RequestError(f"the message is of type {type(message).__name__}; expected text")
        script = self._written([*self.messages, _message("user", message)])
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
        """Stop the answer that runs, if one does; what was read of it stays."""
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
            raise RequestError("there is nothing to undo: nothing was said yet")
        return self._turns.pop().message

    def reset(self) -> None:
        """Begin anew; system message and options stay."""
        self.stop()
        self._turns.clear()

    def settle(self, turn: ChatTurn | None = None) -> None:
        """Let go of a message of whose answer nothing came: of `turn`, if it is the last."""
        last = self._turns[-1] if self._turns else None
        if last is not None and not last.tokens and turn in (None, last):
            self._turns.pop()

    def _written(self, messages: list[Message]) -> str:
        """Return the text of a conversation, up to where the answer begins."""
        if self.template is not None:
            return self.template.render(messages)
        return "".join(message["content"] for message in messages)

    def _encode(self, script: str) -> list[int]:
        """Return the tokens of a conversation: those there are, and those of what is new."""
        tokenizer = self._generator.tokenizer
        whole = tokenizer.encode(script, special=self.template is None)
        carried = self._carried(script) if self._turns else None
        if carried is None:
            return whole
        tokens, rest = carried
        joined = tokens + (tokenizer.encode(rest, special=False) if rest else [])
        # Some tokenizers write the beginning of a text otherwise than its middle.
        return joined if tokenizer.decode(joined) == tokenizer.decode(whole) else whole

    def _carried(self, script: str) -> tuple[list[int], str] | None:
        """Return the tokens so far that a text begins with, and the text behind them."""
        turn = self._turns[-1]
        if not script.startswith(turn.script + turn.answer):
            return None
        body, decode = turn.body, self._generator.tokenizer.decode
        for end in range(len(body), max(len(body) - _TAIL, 0) - 1, -1):
            text = decode(body[:end])
            if turn.answer.startswith(text):
                return turn.prompt + body[:end], script[len(turn.script) + len(text) :]
        return None

    def _require_room(self, tokens: int) -> None:
        if tokens > self.context:
            raise CapacityError(
                f"the conversation would have {tokens} tokens, and the context of this bundle is "
                f"{self.context}: undo some of it, reset it, or build with a larger `max_length`"
            )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
