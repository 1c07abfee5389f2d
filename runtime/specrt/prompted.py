"""What callers ask for: prompts as tokens, and parameters for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import SupportsIndex

from specrt.engine import Engine
from specrt.errors import CapacityError, RequestError
from specrt.params import SamplingParams
from specrt.text import Tokenizer

Prompt = str | Sequence[int]
"""Text or token ids."""


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer, target: Engine) -> list[int]:
    """Return the tokens of a prompt for a target.

    Raises: RequestError for what is no prompt, CapacityError for one above the context.
    """
    vocab, context = target.geometry.vocab_size, target.max_length
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(
            f"the prompt is of type {type(given).__name__}; expected text or token ids"
        )
    tokens = [_token_id(token, vocab) for token in given]
    if not tokens:
        raise RequestError("the prompt has no tokens; give at least one")
    if len(tokens) > context:
        raise CapacityError(
            f"the prompt has {len(tokens)} tokens, and the context of this bundle is "
            f"{context}; shorten the prompt, or build with a larger `max_length`"
        )
    return tokens


def several_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as a list.

    Raises: RequestError for one prompt, or none, in the place of several.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}; expected a list of prompts, each text "
            "or token ids"
        )
    return list(prompts)


def shared_params(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Return the parameters of each of several prompts.

    Raises: RequestError when the numbers differ.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Iterable) else [params]
    wrong = next((one for one in each if not isinstance(one, SamplingParams)), None)
    if wrong is not None:
        raise RequestError(f"params holds {wrong!r}; expected SamplingParams")
    if len(each) != count:
        raise RequestError(
            f"{count} prompts and {len(each)} sampling params were given; give one for each "
            "prompt, or one for all"
        )
    return each


def _token_id(token: object, vocab: int) -> int:
    """Return a token id of any integer type as an int."""
    whole = isinstance(token, SupportsIndex) and not isinstance(token, bool)
    number = index(token) if whole else -1  # type: ignore[arg-type]
    if not 0 <= number < vocab:
        raise RequestError(f"token id {token!r} is not in the vocabulary of 0 to {vocab - 1}")
    return number
