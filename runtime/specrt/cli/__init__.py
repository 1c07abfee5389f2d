"""The command line. Each verb is a module, imported when it is called for."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Any

import click

from specrt.errors import SpecrtError, did_you_mean

COMMANDS = ("generate", "build", "export", "inspect", "verify", "bench", "doctor")
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # a completion has characters no old locale has
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run one command and return its exit status.

    A reader that went away ends the process with status 1 and no word; click sees to that.
    """
    try:
        status = specrt.main(args=args or ["--help"], prog_name="specrt", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except SpecrtError as error:
        print(f"specrt: {error}", file=sys.stderr)
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "specrt"
        print(f"specrt: {error.format_message()} (see `{path} --help`)", file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        print(f"specrt: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("specrt: interrupted", file=sys.stderr)
        return INTERRUPTED
