"""`specrt chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from specrt.bundle import DEFAULT_BUNDLE
from specrt.chat import ChatTemplate, NoTemplateError, read_template
from specrt.cli.sampling import read_params, sampled
from specrt.cli.talk import Talk
from specrt.cli.typed import Read, next_typed, pipe_reader, terminal_reader
from specrt.errors import SpecrtError
from specrt.generate import Generator
from specrt.loading import load
from specrt.models import Gamma


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
        session = generator.session(template, system, params, gamma, drafter)
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
