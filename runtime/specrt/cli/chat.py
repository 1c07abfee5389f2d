"""`specrt chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from specrt.bundle import DEFAULT_BUNDLE
from specrt.cli.options import read_params, sampled
from specrt.cli.terminal import (
    LEGEND,
    Interruption,
    Painter,
    Read,
    Typed,
    next_typed,
    pipe_reader,
    tally,
    terminal_reader,
)
from specrt.completion import Chunk, Completion, Stream
from specrt.errors import RequestError, SpecrtError, did_you_mean
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma
from specrt.session import Session
from specrt.speculation.drafters import DRAFTERS
from specrt.text import ChatTemplate, Message, NoTemplateError, Tokenizer, read_template


class Talk:
    """Answers go to standard output, everything else that is said to standard error.

    `patient` is for a person at a terminal: Ctrl-C stops the answer alone. `colours` says whether
    there are any.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        *,
        patient: bool = False,
        colours: bool = False,
        show_draft: bool = False,
    ) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._patient = patient
        self._colours = colours
        self._show_draft = show_draft
        self._explained = False
        self._answers: list[Completion] = []

    def take(self, typed: Typed) -> None:
        """Answer a message or do as a command says.

        Raises: EOFError for the command to leave; RequestError for what cannot be done,
            EngineError from a pass.
        """
        if typed.command:
            self._obey(typed.text)
        elif typed.text.strip() or self._goes_on:
            self._answer(typed.text)

    @property
    def _goes_on(self) -> bool:
        """Whether an empty line asks for more of a plain text."""
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
        if stopped:
            said = bool(stream.completion.token_ids)
            _say("[stopped]" if said else "[stopped before a word: the message is taken back]")
        elif stream.completion.finish_reason == "length":
            _say(f"[ended after {len(stream.completion.token_ids)} tokens: the limit]")

    def _show(self, stream: Stream) -> bool:
        """Print an answer as it comes; return whether Ctrl-C stopped it."""
        paint = self._painted()
        with Interruption(self._patient) as interruption:
            for chunk in stream:
                _write(paint(chunk))
                if interruption.came:
                    return stream.completion.finish_reason is None
        return False

    def _painted(self) -> Callable[[Chunk], str]:
        if not (self._show_draft and self._colours):
            return lambda chunk: chunk.text
        if not self._explained:
            _say(LEGEND)
            self._explained = True
        return Painter(self._tokenizer).paint

    def _obey(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        if name not in _COMMANDS:
            near = did_you_mean(f"/{name}", [f"/{known}" for known in _COMMANDS])
            raise RequestError(f"there is no command '/{name}'{near}")
        argument = argument.strip()
        command = _COMMANDS[name]
        if argument and not command.argument:
            raise RequestError(f"/{name} takes nothing behind it; it was given {argument!r}")
        command.does(self, argument)

    def _help(self, _: str) -> None:
        shown = [f"/{name} {command.argument}".rstrip() for name, command in _COMMANDS.items()]
        width = max(map(len, shown))
        for usage, command in zip(shown, _COMMANDS.values(), strict=True):
            _say(f"{usage:{width}}  {command.help}")
        _say('A line that ends in \\ goes on in the next; """ begins and ends several lines.')
        _say("Ctrl-C stops an answer; Ctrl-C or Ctrl-D at the prompt leaves.")

    def _stats(self, _: str) -> None:
        if not self._answers:
            raise RequestError("there are no statistics: nothing was answered yet")
        _say(f"this answer: {tally(self._answers[-1:])}")
        _say(f"the session: {tally(self._answers)}")
        _say(f"the conversation: {self._session.tokens} of {self._session.context} tokens")

    def _gamma(self, argument: str) -> None:
        if argument:
            self._session.gamma = _as_gamma(argument)
        _say(f"gamma: {_or_default(self._session.gamma)}")

    def _drafter(self, argument: str) -> None:
        if argument:
            self._session.drafter = argument
        _say(f"drafter: {_or_default(self._session.drafter)}")

    def _switch(self, _: str) -> None:
        if not self._colours:
            raise RequestError(
                "there are no colours to show drafted tokens in: standard output is no terminal, "
                "or NO_COLOR is set"
            )
        self._show_draft = not self._show_draft
        _say(f"drafted tokens are {'green' if self._show_draft else 'no longer coloured'}")

    def _system(self, argument: str) -> None:
        self._session.stop()
        self._session.system = argument or None
        _say("the system message is set" if argument else "there is no system message")

    def _reset(self, _: str) -> None:
        self._session.reset()
        _say("the conversation begins anew")

    def _undo(self, _: str) -> None:
        _say(f"taken back: {self._session.undo()!r}")

    def _save(self, argument: str) -> None:
        if not argument:
            raise RequestError("/save needs the name of a file to write")
        messages = self._session.messages
        write_messages(Path(argument), messages)
        _say(f"{len(messages)} messages are in {argument}")

    def _quit(self, _: str) -> None:
        raise EOFError


class Command(NamedTuple):
    """What a word behind a slash does."""

    argument: str
    help: str
    does: Callable[[Talk, str], None]


_COMMANDS = {
    "help": Command("", "show this", Talk._help),
    "stats": Command("", "what the last answer and the session took", Talk._stats),
    "gamma": Command("N|auto", "tokens to draft each round; 0 drafts none", Talk._gamma),
    "drafter": Command("D", f"what drafts: {', '.join(DRAFTERS)}", Talk._drafter),
    "show-draft": Command("", "colour what was drafted and accepted, or stop it", Talk._switch),
    "system": Command("TEXT", "the system message; none without TEXT", Talk._system),
    "reset": Command("", "forget the conversation", Talk._reset),
    "undo": Command("", "take the last message and its answer back", Talk._undo),
    "save": Command("F", "write the messages to a file, a JSON object a line", Talk._save),
    "quit": Command("", "leave", Talk._quit),
}


def write_messages(path: Path, messages: list[Message]) -> None:
    """Write messages as JSON lines: all of them or none.

    Raises: RequestError for a place that cannot be written.
    """
    try:
        path = path.expanduser().resolve()
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        partial = path.with_name(f".{path.name}.partial")
        lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in messages]
        try:
            partial.write_text("".join(lines), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
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


def _or_default(value: Gamma | str | None) -> Gamma | str:
    return "the bundle's" if value is None else value


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@click.command("chat")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--system", help="What the model is told first.")
@click.option(
    "--show-draft", is_flag=True, help="Show drafted and accepted tokens in green, at a terminal."
)
@sampled
@click.pass_obj
def command(
    owns_process: bool,
    /,
    bundle: Path,
    system: str | None,
    show_draft: bool,
    gamma: Gamma | None,
    drafter: str | None,
    threads: int | None,
    memory: int | None,
    **options: Any,
) -> int:
    """Talk with the model of BUNDLE.

    Type a message, or /help. Ctrl-C stops an answer; at the prompt it leaves, as Ctrl-D does. From
    a pipe each line is a message; answers go to standard output, all else to standard error.
    """
    params = read_params(options)
    most = memory << 20 if memory is not None else None
    with load(bundle, threads=threads, owns_process=owns_process, memory_bytes=most) as generator:
        template = _template(bundle)
        session = Session(
            generator, template, system=system, params=params, gamma=gamma, drafter=drafter
        )
        _greet(generator, template)
        person = sys.stdin.isatty()
        talk = Talk(
            session,
            generator.tokenizer,
            patient=person,
            colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
            show_draft=show_draft,
        )
        return _with_person(talk) if person else converse(talk, pipe_reader())


def _with_person(talk: Talk) -> int:
    print("Type a message, or /help.", file=sys.stderr, flush=True)
    try:
        converse(talk, terminal_reader())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def converse(talk: Talk, read: Read) -> int:
    """Take messages and commands to their end; return 1 when one of them failed."""
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
    for notice in generator.notices:
        print(f"note: {notice}", file=sys.stderr)
    if template is None:
        print(
            "note: this model was not trained for chat; it goes on with your text", file=sys.stderr
        )
    sys.stderr.flush()
