"""Time an encoder-decoder pair next to transformers on the same weights, from source to end.

    beside_transformers.py BUNDLE --target CHECKPOINT --draft CHECKPOINT --prompts FILE.jsonl

Rows take turns in every repeat: specrt plain, then each drafter at each gamma, then transformers'
`generate`, alone and with the draft as its assistant. A completion's time begins with its source,
so that reading it is in every figure, and ends with the text; tokens are those of the text. Greedy
decoding, fp32 in transformers whatever the bundle's precision is. Ratios are of one repeat; medians
of them are printed with the lowest and the highest. With --equal no time is taken: texts are
compared token for token with those of assisted generation until so many tokens are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM
from transformers.utils.logging import set_verbosity_error

from specrt.completion import Completion
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.text.prompt_file import PromptRecord, read_prompts

PLAIN, ASSISTED = "plain", "transformers, assisted"
ASSISTED_GAMMAS: tuple[Gamma, ...] = (4, AUTO)


@dataclass(frozen=True)
class Written:
    """A text, and how it came about."""

    tokens: list[int]
    text: str
    per_round: float | None = None
    """Tokens a round, where the runtime tells."""


@dataclass(frozen=True)
class Candidate:
    """What writes a text for a source, and its name."""

    name: str
    write: Callable[[str], Written]


class Assisted:
    """A target and its assistant in transformers."""

    def __init__(self, target: Path, draft: Path, generator: Generator, most: int) -> None:
        self.target, self.draft = _load(target), _load(draft)
        self.tokenizer, self.most = generator.tokenizer, most

    def write(self, source: str, gamma: Gamma | None) -> Written:
        """Return the text of a source; without a gamma the target writes alone.

        Gamma `auto` is transformers' own setting: at most 20 tokens, fewer where the assistant is
        less sure of one than 0.4.
        """
        ids = torch.tensor([self.tokenizer.encode(source)])
        options: dict[str, Any] = {}
        if gamma is not None:
            wish = self.draft.generation_config
            wish.num_assistant_tokens = 20 if gamma == AUTO else gamma
            wish.assistant_confidence_threshold = 0.4 if gamma == AUTO else 0.0
            wish.num_assistant_tokens_schedule = "constant"
            options["assistant_model"] = self.draft
        with torch.inference_mode():
            made = self.target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=self.most, **options,
            )  # fmt: skip
        tokens = made[0, 1:].tolist()
        return Written(tokens, self.tokenizer.decode(tokens))


def _load(folder: Path) -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()


def written(done: Completion, gamma: Gamma) -> Written:
    """Return what a completion of specrt's is."""
    rate = done.speculation.tokens_per_round if gamma != 0 else None
    return Written(list(done.token_ids), done.text, rate)


def candidates(
    generator: Generator,
    other: Assisted,
    drafters: Sequence[str],
    gammas: Sequence[Gamma],
    most: int,
) -> Iterator[Candidate]:
    """Yield all rows, the plain one first."""
    params = SamplingParams(max_tokens=most, temperature=0.0)

    def own(drafter: str | None, gamma: Gamma) -> Callable[[str], Written]:
        def write(source: str) -> Written:
            generator.forget()  # every row reads its source
            done = generator.generate(source, params, gamma=gamma, drafter=drafter)
            return written(done, gamma)

        return write

    def others(gamma: Gamma | None) -> Callable[[str], Written]:
        return lambda source: other.write(source, gamma)

    yield Candidate(PLAIN, own(None, 0))
    for drafter in drafters:
        for gamma in gammas:
            yield Candidate(f"{drafter}, gamma {gamma}", own(drafter, gamma))
    yield Candidate("transformers", others(None))
    for gamma in ASSISTED_GAMMAS:
        yield Candidate(f"{ASSISTED}, gamma {gamma}", others(gamma))


@dataclass
class Measurement:
    """What a candidate did: seconds of each repeat, and the texts of the last."""

    name: str
    seconds: list[float]
    texts: list[Written]

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(one.tokens) for one in self.texts)

    def over(self, other: Measurement) -> list[float]:
        """Return how many times as many tokens a second as another row, in each repeat."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return [self.tokens / own / (other.tokens / its) for own, its in pairs]


def measure(rows: Sequence[Candidate], sources: Sequence[str], repeats: int) -> list[Measurement]:
    """Let every candidate write all texts in every repeat, the order turned by one each time."""
    measured = [Measurement(one.name, [], []) for one in rows]
    for one in rows:
        one.write(sources[0])
    for repeat in range(repeats):
        for number in range(len(rows)):
            at = (number + repeat) % len(rows)
            began = perf_counter()
            measured[at].texts = [rows[at].write(source) for source in sources]
            measured[at].seconds.append(perf_counter() - began)
            print(f"{repeat + 1}/{repeats} {rows[at].name}", file=sys.stderr)
    return measured


def table(rows: Sequence[Measurement], prompts: Sequence[PromptRecord]) -> str:
    """Return all rows in Markdown, ratios to plain decoding and to the faster assisted row."""
    plain = rows[0]
    assisted = min(
        (row for row in rows if row.name.startswith(ASSISTED)), key=lambda row: median(row.seconds)
    )
    lines = [
        "| row | tokens/s | over plain | over assisted | tokens a round | as plain | right |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        rates = [one.per_round for one in row.texts if one.per_round is not None]
        same = sum(a.tokens == b.tokens for a, b in zip(row.texts, plain.texts, strict=True))
        right = sum(one.text == p.completion for one, p in zip(row.texts, prompts, strict=True))
        cells = (
            row.name,
            f"{row.tokens / median(row.seconds):.0f}",
            _spread(row.over(plain)),
            _spread(row.over(assisted)),
            f"{sum(rates) / len(rates):.2f}" if rates else "",
            f"{same}/{len(prompts)}",
            f"{right}/{len(prompts)}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def compare(
    generator: Generator, other: Assisted, sources: Sequence[str], gammas: Sequence[Gamma],
    tokens: int, most: int,
) -> None:  # fmt: skip
    """Hold texts of plain decoding and at each gamma to transformers' assisted generation.

    Raises: SystemExit naming the first text that differs.
    """
    params, compared, texts = SamplingParams(max_tokens=most, temperature=0.0), 0, 0
    for source, gamma in zip(sources, cycle((0, *gammas)), strict=False):
        found = list(generator.generate(source, params, gamma=gamma).token_ids)
        expected = other.write(source, 4).tokens
        # transformers' text has its end token, specrt's may leave it out.
        if found not in (expected, expected[:-1]):
            at = next(
                i for i, pair in enumerate(zip_longest(found, expected)) if pair[0] != pair[1]
            )
            raise SystemExit(f"{source!r} at gamma {gamma}: token {at} differs")
        compared, texts = compared + len(found), texts + 1
        if compared >= tokens:
            break
    print(f"{compared} tokens of {texts} texts are those of assisted generation")


def gamma_of(text: str) -> Gamma:
    """Read a gamma."""
    return AUTO if text == AUTO else int(text)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument("--draft", type=Path, required=True, help="the draft's checkpoint")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="sources, with their completions"
    )
    parser.add_argument("--limit", type=int, default=12, help="how many, from the first")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--gammas", default="3,5,auto")
    parser.add_argument("--drafters", default="model,ngram,cascade")
    parser.add_argument("--equal", type=int, metavar="TOKENS", help="compare texts, time nothing")
    given = parser.parse_args()
    set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(given.threads)
    prompts = read_prompts(given.prompts)
    with load(given.bundle, threads=given.threads, text_memory_bytes=0) as generator:
        other = Assisted(given.target, given.draft, generator, given.max_tokens)
        gammas = [gamma_of(text) for text in given.gammas.split(",")]
        if given.equal is not None:
            sources = [prompt.text for prompt in prompts]
            compare(generator, other, sources, gammas, given.equal, given.max_tokens)
            return
        prompts = list(islice(prompts, given.limit))
        rows = list(
            candidates(generator, other, given.drafters.split(","), gammas, given.max_tokens)
        )
        print(table(measure(rows, [p.text for p in prompts], given.repeats), prompts))


if __name__ == "__main__":
    main()
