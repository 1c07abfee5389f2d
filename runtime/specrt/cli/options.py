"""The options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from specrt.errors import RequestError
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.target import VERIFIERS
from specrt.text import read_text


class GammaType(click.ParamType):  # type: ignore[type-arg]
    """Reads a gamma from the command line."""

    name = "gamma"

    def get_metavar(self, *_: Any, **__: Any) -> str:
        """Name what is expected; click would make capitals of it."""
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
        """Return the token id and what is added to its score."""
        token, _, number = str(value).partition("=")
        try:
            return int(token), float(number)
        except ValueError:
            self.fail(f"{value!r} is no bias; expected a token id and a number, as 50=-2.5")


F = TypeVar("F", bound=Callable[..., Any])

_CONSTRAINT_OPTIONS = (
    click.option(
        "--json-schema",
        metavar="F",
        help="Keep to a JSON Schema: a file, the schema itself, or true for any JSON.",
    ),
    click.option("--regex", help="Keep to a regular expression, from beginning to end."),
    click.option("--choice", multiple=True, help="Take one of these texts; repeat for each."),
    click.option(
        "--grammar",
        type=click.Path(path_type=Path),
        metavar="F",
        help="Keep to the Lark or GBNF grammar of a file.",
    ),
)


def structured(command: F) -> F:
    """Give a command the options."""
    for option in reversed(_CONSTRAINT_OPTIONS):
        command = option(command)
    return command


def read_structured(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of a command's, as `SamplingParams` names and takes them.

    Raises: RequestError for a file that cannot be read.
    """
    schema, choice = options.pop("json_schema"), options.pop("choice")
    grammar: Path | None = options.pop("grammar")
    return {
        "json_schema": None if schema is None else read_schema(schema),
        "regex": options.pop("regex"),
        "choice": choice or None,
        "grammar": None if grammar is None else read_text(grammar),
    }


def read_schema(given: str) -> str:
    """Return a schema's text: what was given where it is one, else what the file holds."""
    if not given.strip():
        raise RequestError("--json-schema is empty; expected a file, a schema, or true")
    written_out = given.lstrip().startswith("{") or given.strip() in ("true", "false")
    return given if written_out else read_text(Path(given))


_LOGPROB_OPTIONS = (
    click.option(
        "--logprobs",
        type=int,
        metavar="K",
        help="With --json: log-probabilities of each token and of the K likeliest, 0 to 20.",
    ),
    click.option(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="With --json: the same for the tokens of the prompt.",
    ),
)


def ranking(command: F) -> F:
    """Give a command the options that ask for log-probabilities."""
    for option in reversed(_LOGPROB_OPTIONS):
        command = option(command)
    return command


def require_json(params: SamplingParams, as_json: bool) -> None:
    """Refuse to look for log-probabilities that would not be shown.

    Raises: RequestError.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not as_json:
            option = f"--{name.replace('_', '-')}"
            raise RequestError(f"{option} was given without --json, which prints them; add --json")


_BEFORE = (
    click.option("--max-tokens", default=128, show_default=True, help="Most tokens to emit."),
    click.option(
        "--gamma",
        "--num-speculative-tokens",
        type=GammaType(),
        help="Tokens drafted per round: a number, 0 for plain decoding, or auto to draft what "
        "pays.  [default: the bundle's, or auto]",
    ),
    click.option(
        "--drafter",
        type=click.Choice(list(DRAFTERS)),
        help="What drafts: the draft model, n-gram lookup in the text so far, lookup and then the "
        "model, or nothing.  [default: the bundle's]",
    ),
    click.option("--temperature", default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", default=0, help="Keep the k most likely tokens; 0 keeps all."),
    click.option(
        "--top-p", default=1.0, help="Keep the fewest tokens that reach this probability."
    ),
    click.option("--min-p", default=0.0, help="Keep tokens this likely relative to the likeliest."),
    click.option("--typical-p", default=1.0, help="Keep the tokens of the most typical surprise."),
    click.option(
        "--repetition-penalty",
        default=1.0,
        help="Above 1, what prompt and text hold gets unlikelier.",
    ),
    click.option("--presence-penalty", default=0.0, help="Taken from tokens that the text holds."),
    click.option("--frequency-penalty", default=0.0, help="The same, for each time it holds them."),
    click.option(
        "--no-repeat-ngram",
        "no_repeat_ngram_size",
        default=0,
        help="No N tokens in a row come twice.",
    ),
    click.option(
        "--logit-bias", type=BiasType(), multiple=True, help="ID=NUMBER, added to a token's score."
    ),
    click.option("--bad-word", "bad_words", multiple=True, help="A text that must not come."),
    click.option(
        "--allowed-token-id",
        "allowed_token_ids",
        type=int,
        multiple=True,
        help="Only these may come.",
    ),
    click.option("--min-tokens", default=0, help="Tokens before which no end token comes."),
)

_BEHIND = (
    click.option("--seed", type=int, help="Same seed, same text."),
    click.option("--stop", multiple=True, help="End before this string; may be repeated."),
    click.option(
        "--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token."
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on past the model's own end."),
    click.option(
        "--verifier",
        type=click.Choice(list(VERIFIERS)),
        default="match",
        show_default=True,
        help="match: same seed, same text at every gamma. rejection: accepts more when sampling; "
        "a seed repeats its text at a numbered gamma only.",
    ),
    click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]"),
    click.option(
        "--memory",
        type=click.IntRange(min=1),
        help="MiB that weights and caches may take; without room the draft model stays closed.  "
        "[default: what is available]",
    ),
)


def sampled(command: F) -> F:
    """Give a command the options of a completion, and of opening a bundle."""
    for option in reversed(_BEHIND):
        command = option(command)
    command = structured(command)
    for option in reversed(_BEFORE):
        command = option(command)
    return command


def read_params(options: dict[str, Any]) -> SamplingParams:
    """Return what was asked of a completion; `options` are named as `SamplingParams` has them.

    Raises: RequestError for a value out of range, and for a file that cannot be read.
    """
    allowed = options["allowed_token_ids"]
    given = {
        **read_structured(options),
        **options,
        "logit_bias": dict(options["logit_bias"]),
        "allowed_token_ids": allowed or None,
    }
    return SamplingParams.of(**given)
