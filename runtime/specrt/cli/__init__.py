"""The command line. Each verb is a module, imported when it is called for."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

import click

from specrt.errors import SpecrtError, did_you_mean

COMMANDS = (
    "generate",
    "chat",
    "build",
    "export",
    "inspect",
    "lint",
    "verify",
    "bench",
    "tune",
    "doctor",
    "config",
)

INTERRUPTED = 130


class Verbs(click.Group):
    """A group that imports a command's module only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the module of a verb and return its command."""
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"specrt.cli.{name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Name the nearest verb for an unknown one."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"unknown command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specrt", message="specrt %(version)s")
def specrt() -> None:
    """Lossless speculative decoding as a compiled artifact."""


def main() -> None:
    """Run the command line; an error is one line on stderr and exit status 2."""
    _fill_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # a completion has characters no old locale has
    status = run(sys.argv[1:], owns_process=True)
    try:
        sys.stdout.flush()
    except OSError:
        status = status or 2
        _discard_output()
    sys.exit(status)


def run(args: list[str], *, owns_process: bool = False) -> int:
    """Run one command and return its exit status; `owns_process` as in `specrt.load`."""
    try:
        # Not through click's own main, which ends the line and the process in ways of its own.
        with specrt.make_context("specrt", args or ["--help"], obj=owns_process) as context:
            status = specrt.invoke(context)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except SpecrtError as error:
        return _say(str(error), 2)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "specrt"
        return _say(f"{error.format_message()} (see `{path} --help`)", error.exit_code)
    except click.ClickException as error:
        return _say(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _discard_output()  # the reader went away; nothing is left to say
        return 1
    except OSError as error:
        _discard_output()
        return _say(error.strerror or str(error), 2)


def _say(message: str, status: int) -> int:
    print(f"specrt: {message}", file=sys.stderr)
    return status


def _fill_streams() -> None:
    """Give a process started with closed streams something to write to and read from."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def _discard_output() -> None:
    """Keep the exit flush from failing again on what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
