"""What `specrt bench` was asked to measure: prompts, gammas and drafters that are there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specrt.bench.configuration import Configuration, configurations
from specrt.bench.report import ALL
from specrt.errors import RequestError, did_you_mean
from specrt.generate import Generator
from specrt.models import AUTO, DRAFTERS, Gamma
from specrt.params import SamplingParams
from specrt.prompts import Prompt, first_of_each, of_categories, read_prompts

SHARED_PROMPTS = 24
"""Prompts measured where no limit is given, shared by the classes: about a minute for codelet."""
FEW_GAMMAS = (2, 4)
"""Fixed gammas measured beside plain decoding and auto where none are named."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured; None and nothing leave it to the bundle."""

    prompts: Sequence[Prompt]
    gammas: Sequence[Gamma] | None
    drafters: Sequence[str]
    params: SamplingParams
    repeats: int


def choose(files: Sequence[Path], categories: Sequence[str], limit: int | None) -> list[Prompt]:
    """Return the prompts to measure; one without a category takes the name of its file.

    Raises: RequestError for prompts that cannot be read, and a class called as all of them.
    """
    read = [(file, prompt) for file in files for prompt in read_prompts(file)]
    named = [replace(p, category=p.category or file.stem) for file, p in read]
    wanted = of_categories(named, categories)
    classes = {p.category for p in wanted}
    if ALL in classes and len(classes) > 1:
        place = next(p.place for p in wanted if p.category == ALL)
        raise RequestError(
            f"{place} is of category {ALL!r}, as all classes together are called; give it another "
            "`category`, or its file another name"
        )
    each = limit or max(1, SHARED_PROMPTS // len(classes))
    return first_of_each(wanted, each)


def parse_drafters(given: Sequence[str]) -> list[str]:
    """Read names of drafters, several in one separated by commas.

    Raises: RequestError for an unknown one.
    """
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in DRAFTERS:
            raise RequestError(f"--drafter is {name!r}{did_you_mean(name, DRAFTERS)}")
    return list(dict.fromkeys(names))


def resolve(
    generator: Generator, gammas: Sequence[Gamma] | None, drafters: Sequence[str]
) -> list[Configuration]:
    """Return what to compare, every configuration one that this bundle can run.

    Raises: RequestError for a gamma that was not built, or a drafter that is not there.
    """
    if gammas is None:
        built = generator.models.gammas
        gammas = [0, *(g for g in FEW_GAMMAS if g in built), AUTO]
    if not drafters:
        drafters = [generator.stream([0]).completion.speculation.drafter]
    for gamma in gammas:
        for drafter in drafters:
            generator.stream([0], gamma=gamma, drafter=drafter)  # refuses; nothing runs yet
    return configurations(gammas, drafters)


def encode(
    generator: Generator, prompts: Sequence[Prompt], params: SamplingParams
) -> list[list[int]]:
    """Return the token ids of every prompt.

    Raises: RequestError naming a prompt that is empty, or too long for what is to follow it.
    """
    context = generator.models.target.max_length
    encoded = []
    for prompt in prompts:
        ids = generator.tokenizer.encode(prompt.text)
        if not ids:
            raise RequestError(f"{prompt.place} has a prompt of no tokens; give it some text")
        if len(ids) + params.max_tokens > context + 1:
            raise RequestError(
                f"{prompt.place}: a prompt of {len(ids)} tokens and {params.max_tokens} more do "
                f"not fit the context of {context}; lower --max-tokens or shorten the prompt"
            )
        encoded.append(ids)
    return encoded


def progress(done: float) -> None:
    """Show how much was measured, where somebody looks."""
    if sys.stderr.isatty():
        end = "\n" if done >= 1 else ""
        print(f"\rmeasuring {done:4.0%}", end=end, file=sys.stderr, flush=True)
