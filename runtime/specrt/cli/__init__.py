"""The command line. The module of a verb is imported when the verb runs."""

from __future__ import annotations

import errno
import importlib
import io
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

import click

from specrt.cli.number import in_plain_words
from specrt.errors import SpecrtError, did_you_mean, first_line, shortage


class Verb(NamedTuple):
    """Where a command is, and the line that lists it."""

    place: str
    """Its module and the function there."""
    help: str


COMMANDS = {
    "generate": Verb("generate.command", "Complete a prompt."),
    "chat": Verb("chat.command", "Talk with a model."),
    "transcribe": Verb("transcribe.command", "Write down the speech in a WAV file."),
    "serve": Verb("serve.command", "Serve a bundle over HTTP, as OpenAI's API does."),
    "pull": Verb("models.pull", "Fetch the weights of a pair or a model from the hub."),
    "list": Verb("models.list_models", "List pairs, the weights that are here, and bundles."),
    "rm": Verb("models.remove", "Remove weights and bundles."),
    "build": Verb("build.command", "Build bundles from recipes or checkpoints."),
    "export": Verb("export.command", "Write the portable ONNX graph of a checkpoint."),
    "inspect": Verb("inspect.command", "Show what a bundle holds and what it needs."),
    "lint": Verb("lint.command", "List what TensorRT refuses in an ONNX graph."),
    "verify": Verb("verify.command", "Check that speculation changes no token."),
    "bench": Verb("bench.command", "Compare the speed with plain decoding."),
    "tune": Verb("tune.command", "Find the fastest drafter and gamma on this machine."),
    "collect": Verb("collect.command", "Store what a target writes, to train a draft on."),
    "align": Verb("align.command", "Train a draft on what `collect` stored."),
    "doctor": Verb("inspect.doctor", "Show what works on this machine and what is missing."),
    "config": Verb("config.command", "Print compiler flags for libspecrt, or build it."),
}
"""Verbs in the order a user meets them."""

INTERRUPTED, CUT_OFF = 130, 141
"""What a shell says of a program that SIGINT or SIGPIPE ended: 128 and the number."""

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""What else ends a program: whoever runs it, and its terminal when that is closed."""


class Verbs(click.Group):
    """A group that imports a command's module only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in COMMANDS.items()])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the module of a verb and return its command."""
        if name not in COMMANDS:
            return None
        module, _, function = COMMANDS[name].place.partition(".")
        command: click.Command = getattr(importlib.import_module(f"specrt.cli.{module}"), function)
        in_plain_words(command.params)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Refuse an unknown verb, naming the nearest one."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"unknown command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specrt", message="specrt %(version)s")
def specrt() -> None:
    """Run, build and measure bundles: lossless speculative decoding as a compiled artifact.

    A bundle is a folder of compiled engines, which `specrt build` makes. `specrt COMMAND --help`
    explains a command.
    """


def main() -> None:
    """Run the command line; an error is one line on stderr and exit status 2."""
    _fill_streams()
    for number in ENDS:  # `nohup` ignores one
        if signal.getsignal(number) == signal.SIG_DFL:
            _end_on(number)
    # The process is ours: no log lines of a library.
    sys.meta_path.insert(0, SilentImport())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        # A completion has characters that no old locale has, and a file's name may be no text.
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(sys.stdout.fileno(), "w", closefd=False)),
            "utf-8", "surrogateescape", line_buffering=sys.stdout.line_buffering,
            write_through=sys.stdout.write_through,
        )  # fmt: skip
    status = run(sys.argv[1:], owns_process=True)
    try:
        sys.stdout.flush()
    except OSError as error:
        status = status or _unwritten(error)
    sys.exit(status)


class Terminated(SystemExit):
    """One of `ENDS` came."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)


def _end_on(number: int) -> None:
    """Let a signal end what runs as Ctrl-C does, so that nothing half-made is left."""
    last = -math.inf

    def end(*_: Any) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > 1:  # `timeout` sends two at once
            raise Terminated(number)

    signal.signal(number, end)


def run(args: list[str], *, owns_process: bool = False) -> int:
    """Run one command and return its exit status; `owns_process` as in `specrt.load`."""
    try:
        # Not through click's own main, which ends the process itself.
        with specrt.make_context("specrt", args or ["--help"], obj=owns_process) as context:
            status = specrt.invoke(context)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except SpecrtError as error:
        return _fail(_as_typed(str(error), args), 2)
    except click.UsageError as error:
        named = [word for word in args[:1] if word in COMMANDS]
        path = error.ctx.command_path if error.ctx else " ".join(["specrt", *named])
        return _fail(f"{error.format_message()} (see `{path} --help`)", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except Terminated as end:
        return _fail("interrupted", end.status)
    except BrokenPipeError:
        _discard_output()  # the reader is gone
        return CUT_OFF
    except Exception as error:
        if not isinstance(error, (OSError, ImportError)) and shortage(error) is None:
            raise  # a defect of ours: its traceback says where
        return _refused(error)


def _as_typed(message: str, args: list[str]) -> str:
    """Name the option that was typed where an error begins with the name of its parameter."""
    name, _, rest = message.partition(" ")
    command = specrt.get_command(click.Context(specrt), args[0] if args else "")
    typed = {word.partition("=")[0] for word in args}
    for option in command.params if command else ():
        if option.name == name and typed & {*option.opts} and rest.startswith(("is ", "holds ")):
            return f"{option.opts[0]} {rest}"
    return message


class _Output(io.FileIO):
    """Standard output; its errors name it."""

    def write(self, data: Any, /) -> int:
        """Write bytes."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _STDOUT
            raise


_STDOUT = "standard output"


def _refused(error: Exception) -> int:
    """Report what the machine refused."""
    if isinstance(error, OSError) and error.filename == _STDOUT:
        return _unwritten(error)
    return _fail(_explained(error), 2)


def _unwritten(error: OSError) -> int:
    """Report that standard output takes no more, and leave it alone from now on."""
    _discard_output()
    if error.errno == errno.EPIPE:
        return CUT_OFF
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror
    return _fail(f"standard output cannot be written: {reason}", 2)


def _explained(error: Exception) -> str:
    """Return what failed, the file it is about, and the remedy where one is known."""
    remedy = shortage(error)
    if remedy is None and isinstance(error, ImportError):
        remedy = "`specrt doctor` names what is missing"
    if remedy and not str(error):
        return remedy
    reason = getattr(error, "strerror", None) or first_line(error)
    named = getattr(error, "filename", None)
    return "; ".join(filter(None, (f"{named}: {reason}" if named else reason, remedy)))


class SilentImport:
    """Finds ONNX Runtime for the import system, and keeps what it logs off the terminal.

    It logs while it is imported, before any option can be set.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec with a loader that is silent; None for every other module."""
        spec = PathFinder.find_spec(name) if name == "onnxruntime" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_silently(module: ModuleType) -> None:
                with _no_errors():
                    load(module)
                module.set_default_logger_severity(4)
                setattr(module, "set_default_logger_severity", lambda _: None)  # noqa: B010, for good

            spec.loader.exec_module = load_silently  # type: ignore[method-assign]
        return spec


@contextmanager
def _no_errors() -> Iterator[None]:
    """Discard what libraries write to standard error."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
        _discard(2)
    except OSError:  # no file may be opened any more
        yield
        return
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _fail(message: str, status: int) -> int:
    try:
        print(f"specrt: {message}", file=sys.stderr, flush=True)
    except OSError:  # nobody reads it
        _discard(2)
    return status


def _fill_streams() -> None:
    """Open null devices for the standard streams that the process was started without.

    What is written to a standard output that is closed is refused, as a full disk refuses it.
    """
    streams = (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    )
    for name, mode, flags in streams:
        if getattr(sys, name) is None:
            device = os.open(os.devnull, flags)
            file = open(device, mode, encoding="utf-8")  # noqa: PTH123, SIM115
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)


def _discard_output() -> None:
    """Redirect standard output, so that the flush at exit does not fail again."""
    with suppress(OSError, ValueError):  # no file may be opened any more, or there is no output
        _discard(sys.stdout.fileno())


def _discard(descriptor: int) -> None:
    """Redirect a descriptor to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
