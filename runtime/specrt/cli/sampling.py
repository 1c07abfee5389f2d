"""The options of a completion, for the commands that make some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from specrt.cli.bias import BiasType
from specrt.cli.gamma import GammaType
from specrt.cli.structured import read_structured, structured
from specrt.models import DRAFTERS
from specrt.params import VERIFIERS, SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

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
        type=click.Choice(DRAFTERS),
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
        type=click.Choice(VERIFIERS),
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
