"""What several verbs share: options and their readers, tables, notices, progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from shutil import get_terminal_size
from threading import Event, Thread
from time import monotonic
from typing import Any, NamedTuple, TypeVar, cast

import click

from specrt.bundle import FILE_NAME
from specrt.constraints import KINDS
from specrt.engine.protocol import CudaGraphs
from specrt.errors import RequestError
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.pool import Models
from specrt.speculation.target import VERIFIERS
from specrt.speculation.text_memory import DEFAULT_BYTES
from specrt.system.memory import size
from specrt.text.prompt_file import read_text

API_KEY = "SPECRT_API_KEY"
"""The environment variable of a server's key."""


class InputFile(click.ParamType):  # type: ignore[type-arg]
    """Reads the path of a file to read; a dash is standard input, a file like any other."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        """Return the path."""
        return Path("/dev/stdin" if value == "-" else value)


class GammaType(click.ParamType):  # type: ignore[type-arg]
    """Reads a gamma from the command line."""

    name = "gamma"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Return the expected values; click would show them in capitals."""
        return "N|auto"

    def convert(self, value: Any, param: Any, ctx: Any) -> Gamma:
        """Return the number, or `auto`."""
        if value == AUTO or type(value) is int:
            return value  # type: ignore[no-any-return]
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor auto", param, ctx)


def parse_gammas(text: str) -> list[Gamma]:
    """Read a list of gammas that `auto` may be among, as 0,2,4,auto.

    Raises: RequestError for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        return list(dict.fromkeys(AUTO if part == AUTO else int(part) for part in parts))
    except ValueError:
        raise RequestError(
            f"--gammas is {text!r}; expected numbers and auto, as 0,2,4,auto"
        ) from None


class BiasType(click.ParamType):  # type: ignore[type-arg]
    """Reads `ID=NUMBER`, such as `50=-2.5`."""

    name = "id=number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return the token id and the number added to its logit."""
        token, _, number = str(value).partition("=")
        try:
            return int(token), float(number)
        except ValueError:
            self.fail(
                f"{value!r} is not a bias; expected a token id and a number, as 50=-2.5", param, ctx
            )


F = TypeVar("F", bound=Callable[..., Any])

_CONSTRAINT_OPTIONS = (
    click.option(
        "--json-schema",
        metavar="F",
        help="Answer in JSON of this schema: a file, the schema itself, or true for any JSON.",
    ),
    click.option("--regex", help="Answer with a text that this regular expression matches whole."),
    click.option(
        "--choice", multiple=True, help="Answer with one of these texts; repeat for each."
    ),
    click.option(
        "--grammar",
        type=InputFile(),
        metavar="F",
        help="Answer in the language of this file's Lark or GBNF grammar.",
    ),
)


def constraint_options(command: F) -> F:
    """Add the options that constrain the text; what is refused of them names option and file."""

    @wraps(command)
    def named(*args: Any, **options: Any) -> Any:
        schema, grammar = options["json_schema"], options["grammar"]
        files = {"json_schema": schema and _schema_file(schema), "grammar": grammar}
        try:
            return command(*args, **options)
        except RequestError as error:
            kind, _, rest = str(error).partition(" ")
            if kind not in KINDS:
                raise
            option = f"--{kind.replace('_', '-')}"
            place = f"{option} {files[kind]}" if files.get(kind) else option
            bare = "cannot be enforced: " in rest and "; " not in rest
            remedy = "; docs/structured.md tells what can be" if bare else ""
            raise RequestError(f"{place} {rest}{remedy}") from error

    for option in reversed(_CONSTRAINT_OPTIONS):
        named = option(named)
    return cast(F, named)


def read_constraint(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the constraint from a command's options, and return it as `SamplingParams` takes it.

    Raises: RequestError for a file that cannot be read.
    """
    schema, choice = options.pop("json_schema"), options.pop("choice")
    grammar: Path | None = options.pop("grammar")
    return {
        "json_schema": None if schema is None else read_schema(schema),
        "regex": options.pop("regex"),
        "choice": choice or None,
        "grammar": None if grammar is None else _read_file("grammar", grammar, "a grammar's file"),
    }


def read_schema(value: str) -> str:
    """Return the text of a schema: the value itself, or the content of the file it names."""
    if not value.strip():
        raise RequestError("--json-schema is empty; expected a file, a schema, or true")
    file = _schema_file(value)
    return value if file is None else _read_file("json-schema", file, "a file, a schema, or true")


def _schema_file(value: str) -> Path | None:
    """Return the file that a value of --json-schema names; None where it is a schema."""
    is_schema = value.lstrip().startswith("{") or value.strip() in ("true", "false")
    return None if is_schema else Path(value)


def _read_file(option: str, file: Path, expected: str) -> str:
    try:
        return read_text(file)
    except RequestError as error:
        reason = str(error).partition("; ")[0]
        raise RequestError(f"--{option} {reason}; expected {expected}") from error


_LOGPROB_OPTIONS = (
    click.option(
        "--logprobs",
        type=int,
        metavar="K",
        help="With --json: log-probabilities of each token and of the K likeliest, 0 to 64.",
    ),
    click.option(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="With --json: the same for the tokens of the prompt.",
    ),
)


def logprob_options(command: F) -> F:
    """Add the options for log-probabilities."""
    for option in reversed(_LOGPROB_OPTIONS):
        command = option(command)
    return command


def text_memory_options(command: F) -> F:
    """Add the options for what texts are drafted from; `TextMemoryOptions` has their values."""
    for option in reversed(_TEXT_MEMORY_OPTIONS):
        command = option(command)
    return command


class TextMemoryOptions(NamedTuple):
    """Whether texts are drafted from texts completed before them, and the file of these."""

    file: Path | None
    off: bool

    def of_load(self) -> dict[str, Any]:
        """Return the arguments of `specrt.load`.

        Raises: RequestError for a file where nothing is remembered.
        """
        if self.file is not None and self.off:
            raise RequestError(
                "--text-memory-file and --no-text-memory were given; leave one of them out"
            )
        return {
            "text_memory_bytes": 0 if self.off else DEFAULT_BYTES,
            "text_memory_file": self.file,
        }


_TEXT_MEMORY_OPTIONS = (
    click.option(
        "--no-text-memory",
        is_flag=True,
        help="Let no text be drafted from texts completed before it.",
    ),
    click.option(
        "--text-memory-file",
        type=click.Path(path_type=Path),
        help="File of texts to draft from; this run's are added to it. They are not encrypted.",
    ),
)


def require_json(params: SamplingParams, as_json: bool) -> None:
    """Refuse log-probabilities that nothing would show.

    Raises: RequestError.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not as_json:
            option = f"--{name.replace('_', '-')}"
            raise RequestError(f"{option} needs --json, which alone prints log-probabilities")


_BEFORE = (
    click.option("--max-tokens", default=128, show_default=True, help="Tokens to emit at most."),
    click.option(
        "--gamma",
        "--num-speculative-tokens",
        type=GammaType(),
        help="Tokens drafted per round: a number, 0 for plain decoding, or auto, which chooses the "
        "fastest round by round.  [default: the bundle's, or auto]",
    ),
    click.option(
        "--drafter",
        type=click.Choice(list(DRAFTERS)),
        help="What drafts: the draft model, n-gram lookup in the text so far, lookup and then the "
        "model (cascade), or nothing.  [default: the bundle's]",
    ),
    click.option(
        "--temperature", type=float, help="0 is greedy.  [default: the model's own, or 0]"
    ),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 keeps all."),
    click.option(
        "--top-p", type=float, help="Keep the likeliest tokens that reach this probability."
    ),
    click.option(
        "--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."
    ),
    click.option(
        "--typical-p",
        type=float,
        help="Keep the most typical tokens that reach this probability; 1 keeps all.",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        help="Above 1, tokens of the prompt and the text become less likely.  [default: the "
        "bundle's, or 1]",
    ),
    click.option(
        "--presence-penalty", default=0.0, help="Subtracted from the logits of tokens in the text."
    ),
    click.option("--frequency-penalty", default=0.0, help="The same, times how often they occur."),
    click.option(
        "--no-repeat-ngram",
        "no_repeat_ngram_size",
        type=int,
        help="No N tokens in a row occur twice; 0 allows them.  [default: the bundle's, or 0]",
    ),
    click.option(
        "--logit-bias",
        type=BiasType(),
        multiple=True,
        help="ID=NUMBER, added to the logit of a token; may be repeated.",
    ),
    click.option(
        "--bad-word",
        "bad_words",
        multiple=True,
        help="A text that must not occur; may be repeated.",
    ),
    click.option(
        "--allowed-token-id",
        "allowed_token_ids",
        type=int,
        multiple=True,
        help="Allow only this token, and others so named.",
    ),
    click.option(
        "--min-tokens",
        type=int,
        help="Emit no end token before so many tokens.  [default: the bundle's, or 0]",
    ),
    click.option(
        "--forced-bos-token-id",
        type=int,
        help="Begin the text with this token, such as the language of a translation.  [default: "
        "the bundle's, if any]",
    ),
    click.option("--num-beams", type=int, hidden=True),  # refused by a sentence
)

_BEHIND = (
    click.option("--seed", type=int, help="Same seed, same text."),
    click.option("--stop", multiple=True, help="Stop before this text; may be repeated."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="Stop at this token; may be repeated.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end token."),
    click.option(
        "--verifier",
        type=click.Choice(list(VERIFIERS)),
        default=SamplingParams.verifier,
        show_default=True,
        help="match: one seed gives one text at every gamma. rejection: accepts more when "
        "sampling; a seed repeats its text only at the same numbered gamma.",
    ),
    click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]"),
    click.option(
        "--memory",
        type=click.IntRange(min=1),
        help="MB for weights and caches; without room for it the draft model is not loaded.  "
        "[default: what is available]",
    ),
)


def completion_options(command: F) -> F:
    """Add the options of a completion and of opening a bundle."""
    for option in reversed(_BEHIND):
        command = option(command)
    command = constraint_options(command)
    for option in reversed(_BEFORE):
        command = option(command)
    return command


def read_params(options: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a completion; `options` have the names of `SamplingParams`.

    Raises: RequestError for a value out of range, and for a file that cannot be read.
    """
    allowed = options["allowed_token_ids"]
    values = {
        **read_constraint(options),
        **options,
        "logit_bias": dict(options["logit_bias"]),
        "allowed_token_ids": allowed or None,
    }
    return SamplingParams.of(**{k: value for k, value in values.items() if value is not None})


def as_model_samples(
    params: SamplingParams, options: dict[str, Any], models: Models
) -> SamplingParams:
    """Return parameters with the model's own way to sample where no option was given."""
    left_out = {k: value for k, value in models.sampling.items() if options[k] is None}
    return replace(params, **left_out)


GGUF = ".gguf"


def is_checkpoint(path: Path) -> bool:
    """Tell whether a path names a checkpoint, a GGUF file or a folder, and not a bundle."""
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / FILE_NAME).exists()
    return path.suffix == GGUF


def print_notices(notices: Sequence[str]) -> None:
    """Print what a user should know of an opened bundle to standard error."""
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)


def dimmed(text: str) -> str:
    """Return a text that stands back, where standard output is a terminal that shows colours."""
    return f"\x1b[2m{text}\x1b[0m" if shows_colours() else text


def shows_colours() -> bool:
    """Tell whether standard output is a terminal whose user has not turned colours off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def graphs_text(graphs: CudaGraphs) -> str:
    """Return in words how many CUDA graphs there are, and what is none and why."""
    text = f"CUDA graphs: {graphs.captured}"
    return f"{text}; {'; '.join(graphs.refusals)}" if graphs.refusals else text


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 0, markdown: bool = False
) -> str:
    """Return a table as text or Markdown; the first `left` columns are aligned to the left."""
    if markdown:
        rule = ["---"] * left + ["---:"] * (len(columns) - left)
        return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *rows))
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (columns, *rows)
    ]
    return "\n".join(map(str.rstrip, lines))


INTERVAL_S, LONGEST_INTERVAL_S = 5.0, 60.0
"""Time between two lines of progress where standard error is not a terminal: the first is doubled
with each line, up to the second."""

_LEARNING_S = 2.0
"""Time of a stage after which the rest is estimated from it."""


@contextmanager
def progress(
    title: str, *, steady: bool = False, total_bytes: int = 0
) -> Iterator[Callable[[float | None, str], None]]:
    """Give a function that takes the share done and the stage, and show both on standard error.

    A share of None stands for one that is not known. Where the share is `steady`, growing with the
    time that work takes, the time left is shown; of `total_bytes` the rate, too.

    At a terminal one line is rewritten; elsewhere each new stage prints a line, and so does a clock
    that ticks ever more slowly, with the seconds so far: a log shows that work goes on. A stage
    that begins with `warning: ` is a line that stays.
    """
    line = ProgressLine(title, steady=steady, total_bytes=total_bytes)
    try:
        yield line.update
    finally:
        line.close()


class ProgressLine:
    """The state behind `progress`."""

    def __init__(self, title: str, *, steady: bool = False, total_bytes: int = 0) -> None:
        self._title = title
        self._steady = steady
        self._total_bytes = total_bytes
        self._share: float | None = None
        self._stage = ""
        self._terminal = sys.stderr.isatty()
        self._began = monotonic()
        self._stage_began = 0.0, self._began
        """The share and the time."""
        self._printed = ""
        self._ended = Event()
        self._thread = Thread(target=self._repeat, name="specrt progress", daemon=True)
        if not self._terminal:
            self._thread.start()

    def update(self, share: float | None, stage: str = "") -> None:
        """Show a share of the work, and the stage that runs."""
        if stage.startswith("warning: "):
            self._keep(stage)
            return
        begins = stage != self._stage
        if begins:
            self._stage_began = share or 0.0, monotonic()
        self._share, self._stage = share, stage
        if self._terminal or begins:
            self._print()

    def _keep(self, text: str) -> None:
        """Print a line that stays, whatever is shown next."""
        sys.stderr.write(f"\r{text}\x1b[K\n" if self._terminal else f"{text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """End the line."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._terminal and self._printed:
            print(file=sys.stderr)

    def _repeat(self) -> None:
        interval_s = INTERVAL_S
        while not self._ended.wait(interval_s):
            self._print()
            interval_s = min(2 * interval_s, LONGEST_INTERVAL_S)

    def _left(self) -> str:
        """Estimate the time left from the share that this stage did in its time."""
        share, began = self._stage_began
        took_s, done = monotonic() - began, (self._share or 0.0) - share
        if not self._steady or took_s < _LEARNING_S or done <= 0 or self._share == 1:
            return ""
        left_s = took_s * (1 - share - done) / done
        rate = f", {size(done * self._total_bytes / took_s)}/s" if self._total_bytes else ""
        return (
            f"{rate}, about {f'{left_s:.0f} s' if left_s < 100 else f'{left_s / 60:.0f} min'} left"
        )

    def _print(self) -> None:
        share = "" if self._share is None else f"{self._share:4.0%} "
        text = f"{self._title}: {share}{self._stage}".rstrip(": ") + self._left()
        seconds = monotonic() - self._began
        shown = text[: get_terminal_size().columns - 1]  # a line that wraps is not rewritten
        line = f"\r{shown}\x1b[K" if self._terminal else f"{text} ({seconds:.0f} s)\n"
        if line == self._printed:
            return
        sys.stderr.write(line)  # one write a line: Ctrl-C must not find half of one
        sys.stderr.flush()
        self._printed = line
