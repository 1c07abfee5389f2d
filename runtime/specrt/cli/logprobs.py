"""The options of commands that tell how likely tokens were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from specrt.errors import RequestError
from specrt.params import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
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
    for option in reversed(_OPTIONS):
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
