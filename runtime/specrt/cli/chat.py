"""`specrt chat`: a conversation at a terminal, or from a pipe."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import click

from specrt.cli.cache import bundle_argument
from specrt.cli.message_reader import Read, Typed, next_typed, pipe_reader, terminal_reader
from specrt.cli.options import (
    TextMemoryOptions,
    as_model_samples,
    completion_options,
    dimmed,
    print_notices,
    read_params,
    shows_colours,
    text_memory_options,
)
from specrt.cli.statistics import in_short, tally
from specrt.completion import Chunk, Completion, Stream
from specrt.errors import RequestError, SpecrtError, did_you_mean
from specrt.generator import Generator
from specrt.held_file import replacing
from specrt.loading import load
from specrt.params import AUTO, Gamma
from specrt.session import Session
from specrt.speculation.drafters import DRAFTERS
from specrt.text.chat_template import ChatTemplate, Message, NoTemplateError, read_template
from specrt.text.detokenizer import DraftedSpans
from specrt.text.tokenizer import Tokenizer


class Interruption:
    """Records the first Ctrl-C, so that no round is interrupted; the second one raises.

    Does nothing when it is not `wanted`, and outside the main thread, where no signal arrives.
    """

    def __init__(self, wanted: bool) -> None:
        self.arrived = False
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if self._wanted:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, _: int, __: FrameType | None) -> None:
        if self.arrived:
            raise KeyboardInterrupt
        self.arrived = True


_GREEN, _RESET = "\x1b[32m", "\x1b[0m"

LEGEND = f"{_GREEN}green{_RESET}: drafted and accepted; plain: the target's own"


class Painter:
    """Shows drafted text in a colour of its own."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._spans = DraftedSpans(tokenizer.detokenizer(prompt))

    def paint(self, chunk: Chunk) -> str:
        """Return the text of a chunk with drafted text in green."""
        shown = ""
        spans = self._spans.of(chunk.text, chunk.token_ids, chunk.accepted)
        for drafted, group in groupby(spans, lambda span: span.drafted):
            text = "".join(span.text for span in group)
            shown += f"{_GREEN}{text}{_RESET}" if drafted else text
        return shown


class Talk:
    """Writes answers to standard output, and everything else to standard error.

    `interactive`: Ctrl-C stops the answer alone. `colours`: standard output shows them.
    """

    def __init__(
        self,
        session: Session,
        generator: Generator,
        *,
        interactive: bool = False,
        colours: bool = False,
        show_draft: bool = False,
    ) -> None:
        self._session = session
        self._generator, self._models = generator, generator.models
        self._interactive = interactive
        self._colours = colours
        self._show_draft = show_draft
        self._explained = False
        self._answers: list[Completion] = []

    def take(self, typed: Typed) -> None:
        """Answer a message or run a command.

        Raises: EOFError for /quit; RequestError for a message or command that is refused;
            EngineError from a pass.
        """
        if typed.command:
            self._obey(typed.text)
        elif typed.text.strip() or self._goes_on:
            self._answer(typed.text)

    @property
    def _goes_on(self) -> bool:
        """Whether an empty line continues a plain text."""
        return self._session.template is None and bool(self._answers)

    def _answer(self, message: str) -> None:
        stream = self._session.stream(message)
        try:
            stopped = self._show(stream)
        finally:
            self._session.stop()
            if stream.completion.token_ids:
                self._answers.append(stream.completion)
                _write("\n")
        told = [self._ending(stream.completion, stopped)]
        if self._interactive and stream.completion.token_ids:
            told.insert(0, in_short(stream.completion, self._models))
        if any(told):
            line = f"[{' | '.join(filter(None, told))}]"
            _say(dimmed(line) if sys.stderr.isatty() else line)

    def _ending(self, answer: Completion, stopped: bool) -> str:
        """Return what ended an answer before the model did."""
        if stopped:
            return "stopped" if answer.token_ids else "stopped before any text: it is removed"
        if answer.finish_reason != "length":
            return ""
        context = self._session.context
        full = answer.prompt_tokens + len(answer.token_ids) > context
        return f"the context of {context} is full" if full else "the limit of --max-tokens"

    def _show(self, stream: Stream) -> bool:
        """Print an answer as it is generated; return whether Ctrl-C stopped it."""
        paint = self._painted()
        with Interruption(self._interactive) as interruption:
            for chunk in stream:
                _write(paint(chunk))
                if interruption.arrived:
                    return stream.completion.finish_reason is None
        return False

    def _painted(self) -> Callable[[Chunk], str]:
        if not (self._show_draft and self._colours):
            return lambda chunk: chunk.text
        if not self._explained:
            _say(LEGEND)
            self._explained = True
        return Painter(self._generator.tokenizer, self._session.prompt).paint

    def _obey(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        if name not in _COMMANDS:
            near = did_you_mean(f"/{name}", [f"/{known}" for known in _COMMANDS])
            raise RequestError(f"there is no command '/{name}'{near}")
        argument = argument.strip()
        command = _COMMANDS[name]
        if argument and not command.argument:
            raise RequestError(f"/{name} takes no argument, and {argument!r} was given")
        command.run(self, argument)

    def _help(self, _: str) -> None:
        shown = [f"/{name} {command.argument}".rstrip() for name, command in _COMMANDS.items()]
        width = max(map(len, shown))
        for usage, command in zip(shown, _COMMANDS.values(), strict=True):
            _say(f"{usage:{width}}  {command.help}")
        _say("Without its argument a command says what is set.")
        _say('A line that ends in \\ continues in the next; """ begins and ends several lines.')
        _say("Ctrl-C stops an answer; Ctrl-D leaves.")

    def _stats(self, _: str) -> None:
        if not self._answers:
            raise RequestError("there are no statistics before the first answer")
        _say(f"this answer: {tally(self._answers[-1:], self._models)}")
        _say(f"the session: {tally(self._answers, self._models)}")
        _say(f"the conversation: {self._session.tokens} of {self._session.context} tokens")

    def _gamma(self, argument: str) -> None:
        if argument:
            self._session.gamma = _as_gamma(argument)
        _say(f"gamma: {_used(self._session.gamma, self._models.gamma)}")

    def _drafter(self, argument: str) -> None:
        if argument:
            self._session.drafter = argument
        _say(f"drafter: {_used(self._session.drafter, self._generator.check_drafter(None))}")

    def _temperature(self, argument: str) -> None:
        if argument:
            params = replace(self._session.params, temperature=_as_temperature(argument))
            self._session.params = params
        greedy = ", greedy" if self._session.params.greedy else ""
        _say(f"temperature: {self._session.params.temperature:g}{greedy}")

    def _switch(self, _: str) -> None:
        if not self._colours:
            raise RequestError(
                "drafted tokens cannot be coloured: standard output is not a terminal, or NO_COLOR "
                "is set"
            )
        self._show_draft = not self._show_draft
        _say(f"drafted tokens are {'green' if self._show_draft else 'no longer coloured'}")

    def _system(self, argument: str) -> None:
        if argument:
            self._session.stop()
            self._session.system = None if argument == _EMPTY else argument
        system = self._session.system
        _say("there is no system message" if system is None else f"system: {system}")

    def _reset(self, _: str) -> None:
        self._session.reset()
        _say("the conversation is empty again")

    def _undo(self, _: str) -> None:
        _say(f"removed: {self._session.undo()!r}")

    def _save(self, argument: str) -> None:
        if not argument:
            raise RequestError("/save needs the name of a file to write")
        messages = self._session.messages
        write_messages(Path(argument), messages)
        count = f"{len(messages)} message{'' if len(messages) == 1 else 's'}"
        _say(f"wrote {count} to {argument}")

    def _quit(self, _: str) -> None:
        raise EOFError


_EMPTY = '""'
"""What is typed for an empty text."""


class Command(NamedTuple):
    """The argument, help and function of a word after a slash."""

    argument: str
    help: str
    run: Callable[[Talk, str], None]


_COMMANDS = {
    "help": Command("", "show this", Talk._help),
    "stats": Command(
        "", "tokens, times and rounds of the last answer and of the session", Talk._stats
    ),
    "temperature": Command("T", "how freely tokens are drawn; 0 is greedy", Talk._temperature),
    "gamma": Command("N|auto", "tokens to draft each round; 0 drafts none", Talk._gamma),
    "drafter": Command("D", f"what drafts: {', '.join(DRAFTERS)}", Talk._drafter),
    "show-draft": Command(
        "", "switch the colour of drafted and accepted tokens on or off", Talk._switch
    ),
    "system": Command("TEXT", f"set the system message; {_EMPTY} removes it", Talk._system),
    "reset": Command("", "forget the conversation", Talk._reset),
    "undo": Command("", "remove the last message and its answer", Talk._undo),
    "save": Command("F", "write the messages to a file, one JSON object a line", Talk._save),
    "quit": Command("", "leave", Talk._quit),
}


def write_messages(path: Path, messages: list[Message]) -> None:
    """Write messages as JSON lines: all of them or none.

    Raises: RequestError for a place that cannot be written.
    """
    try:
        path = path.expanduser()
        lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages]
        with replacing(path) as file:
            file.write("".join(lines).encode())
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{path} cannot be written: {why}") from None


def _as_gamma(text: str) -> Gamma:
    if text == AUTO:
        return AUTO
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"{text!r} is neither a whole number nor auto") from None


def _used(chosen: Gamma | str | None, default: Gamma | str) -> str:
    return f"{default}, the bundle's default" if chosen is None else f"{chosen}"


def _as_temperature(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{text!r} is not a number; expected a temperature, as 0.7") from None


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@click.command("chat")
@bundle_argument
@click.option("--system", help="System message.")
@click.option(
    "--show-draft", is_flag=True, help="Show drafted and accepted tokens in green, at a terminal."
)
@click.option("--no-history", is_flag=True, help="Keep nothing of what is typed at a terminal.")
@text_memory_options
@completion_options
@click.pass_obj
def command(
    owns_process: bool,
    /,
    bundle: Path,
    system: str | None,
    show_draft: bool,
    no_history: bool,
    no_text_memory: bool,
    text_memory_file: Path | None,
    gamma: Gamma | None,
    drafter: str | None,
    threads: int | None,
    memory: int | None,
    **options: Any,
) -> int:
    """Talk with the model of BUNDLE.

    Type a message, or /help. Ctrl-C stops an answer, Ctrl-D leaves. In piped input each line is a
    message; where one is refused the others are answered, and the exit status is 1. Answers go to
    standard output, the rest to standard error. A model that was trained for chat ends its answers
    itself where --max-tokens is not given.
    """
    params = read_params(options)
    most = memory * 10**6 if memory is not None else None
    remembered = TextMemoryOptions(text_memory_file, off=no_text_memory).of_load()
    with load(
        bundle, threads=threads, owns_process=owns_process, memory_bytes=most, **remembered
    ) as generator:
        template = _template(bundle)
        params = as_model_samples(params, options, generator.models)
        if template is not None and not _given("max_tokens"):
            params = replace(params, max_tokens=generator.models.target.max_length)
        session = Session(
            generator, template, system=system, params=params, gamma=gamma, drafter=drafter
        )
        _greet(generator, template)
        interactive = sys.stdin.isatty()
        talk = Talk(
            session,
            generator,
            interactive=interactive,
            colours=shows_colours(),
            show_draft=show_draft,
        )
        if not interactive:
            return converse(talk, pipe_reader())
        _say("Type a message, or /help.")
        converse(talk, terminal_reader(keeps_history=not no_history))
    return 0


def _given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE


def converse(talk: Talk, read: Read) -> int:
    """Read messages and commands to their end; return 1 where one of them failed."""
    failed = False
    while True:
        try:
            talk.take(next_typed(read))
        except EOFError:
            return 1 if failed else 0
        except SpecrtError as error:
            print(f"specrt: {error}", file=sys.stderr, flush=True)
            failed = True


def _template(bundle: Path) -> ChatTemplate | None:
    try:
        return read_template(bundle)
    except NoTemplateError:
        return None


def _greet(generator: Generator, template: ChatTemplate | None) -> None:
    print_notices(generator.notices)
    if template is None:
        print("note: this model was not trained for chat; it continues your text", file=sys.stderr)
    sys.stderr.flush()
