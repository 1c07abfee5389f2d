"""Several completions in one command: n of a prompt, and all prompts of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specrt.cli.tally import summary
from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.generate import Generator
from specrt.models import Gamma
from specrt.params import SamplingParams
from specrt.prompts import Prompt


@dataclass(frozen=True)
class FilePrompts:
    """The prompts of a file, and what turns each into tokens; the tokenizer where nothing does."""

    prompts: Sequence[Prompt]
    rendered: Callable[[str], list[int]] | None = None


def complete_one(
    generator: Generator, prompt: str | list[int], params: SamplingParams, gamma: Gamma | None,
    drafter: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Print n completions of a prompt, each under its number; return 1 where one failed."""
    (done,) = generator.generate_many([prompt], params, gamma=gamma, drafter=drafter)
    if as_json:
        _print_json({"completions": [_entry(completion) for completion in done]})
    else:
        for completion in done:
            _show(completion)
    return _status(done)


def complete_file(
    generator: Generator, source: FilePrompts, params: SamplingParams, gamma: Gamma | None,
    drafter: str | None,
) -> int:  # fmt: skip
    """Print a JSON object for each prompt, in order, once it is complete; return 1 on failures.

    Raises: RequestError before any work, naming the line of a prompt that cannot be completed.
    """
    encode = source.rendered or generator.tokenizer.encode
    asked = []
    for prompt in source.prompts:
        try:
            asked.append(encode(prompt.text))
            generator.stream(asked[-1], replace(params, n=1), gamma=gamma, drafter=drafter)
        except RequestError as error:
            raise RequestError(f"{prompt.place}: {error}") from None
    status = 0
    found = generator.generate_each(asked, params, gamma=gamma, drafter=drafter)
    for prompt, done in zip(source.prompts, found, strict=True):
        entries = [_entry(completion) for completion in done]
        told = entries[0] if params.n == 1 else {"completions": entries}
        _print_json({"prompt": prompt.text, **told})
        status |= _status(done)
    return status


def _entry(completion: Completion) -> dict[str, Any]:
    failed = {} if completion.error is None else {"error": completion.error}
    return {**completion.to_json(), **failed}


def _print_json(told: dict[str, Any]) -> None:
    print(json.dumps(told, ensure_ascii=False), flush=True)


def _show(completion: Completion) -> None:
    print(f"[{completion.index + 1}]\n{completion.text}", flush=True)
    if completion.error is not None:
        print(f"specrt: completion {completion.index + 1}: {completion.error}", file=sys.stderr)
    else:
        print(summary(completion), file=sys.stderr)


def _status(done: Sequence[Completion]) -> int:
    return int(any(completion.error is not None for completion in done))
