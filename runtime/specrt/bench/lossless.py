"""Compares speculative output with plain output, and explains each divergence by its margin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specrt.bench.measure import PLAIN, Configuration, Sample
from specrt.engine.protocol import first_row
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.speculation.drafters import available_drafters
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import run_alone

Margin = Callable[[int, Sequence[int]], float]
"""Of a prompt and the plain tokens before the difference: the plain pass's top-2 margin."""


@dataclass(frozen=True)
class Difference:
    """The first token at which the output of a configuration differs from the plain one."""

    configuration: Configuration
    prompt: int
    position: int
    plain_token: int
    token: int
    margin: float | None
    """Logits between the plain pass's best and second best; None where tokens were sampled."""


@dataclass(frozen=True)
class Comparison:
    """All outputs of a run against the plain ones."""

    compared: int
    """Pairs of a prompt and a configuration that drafted or differs."""
    differences: tuple[Difference, ...] = ()
    precision: str = "fp32"
    promised: bool = True
    """Whether passes of every width differ in the order of fp32 sums alone, so that rounding
    explains no margin beyond the tolerance of `specrt verify`."""
    reason: str = "nothing was drafted"
    """Why nothing was compared, where nothing was."""
    undrafted: int = 0
    """Pairs that could have drafted and did not: their output is plain decoding itself."""

    @property
    def unexplained(self) -> list[Difference]:
        """Differences that rounding does not explain: a bug, and no speed is worth reporting."""
        if not self.promised:
            return []
        return [d for d in self.differences if d.margin is None or d.margin > FP32_TOLERANCE]

    def __str__(self) -> str:
        """Return a sentence."""
        if not self.compared:
            return f"outputs not compared: {self.reason}"
        idle = (
            f"; {self.undrafted} more drafted nothing and prove nothing" if self.undrafted else ""
        )
        if not self.differences:
            return f"outputs identical to plain decoding: {self.compared} compared{idle}"
        share = f"{len(self.differences)} of {self.compared} outputs differ from plain decoding"
        margins = sorted(d.margin for d in self.differences if d.margin is not None)
        if not margins:
            return (
                f"{share}; they are sampled, so there is no margin to judge by ({self.precision})"
            )
        return (
            f"{share}, where the plain pass's best two tokens are {margins[0]:.1e} to "
            f"{margins[-1]:.1e} logits apart ({self.precision}; `specrt verify` lists them)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON types."""
        listed = [{**vars(d), "configuration": str(d.configuration)} for d in self.differences]
        counts = {"compared": self.compared, "undrafted": self.undrafted, "differing": len(listed)}
        return {**counts, "differences": listed}


def compare_outputs(
    samples: Mapping[Configuration, Iterable[Sample]],
    margin: Margin | None,
    precision: str,
    promised: bool = True,
) -> Comparison:
    """Compare every output with the first plain one of its prompt, plain repeats included.

    An equal output proves nothing where nothing was drafted, and is not counted.
    """
    first: dict[int, tuple[int, ...]] = {}
    for sample in samples[PLAIN]:
        first.setdefault(sample.prompt, sample.tokens)
    compared: set[tuple[Configuration, int]] = set()
    drafting = {(c, s.prompt) for c, each in samples.items() if not c.is_plain for s in each}
    differences: dict[tuple[Configuration, int], Difference] = {}
    for configuration, each in samples.items():
        for sample in each:
            pair = configuration, sample.prompt
            plain = first[sample.prompt]
            if sample.counts.drafted:
                compared.add(pair)
            at = first_difference(plain, sample.tokens)
            if at is not None and pair not in differences:
                gap = margin(sample.prompt, plain[:at]) if margin else None
                differences[pair] = Difference(*pair, at, plain[at], sample.tokens[at], gap)
    compared |= differences.keys()
    idle = len(drafting - compared)
    found = tuple(differences.values())
    return Comparison(len(compared), found, precision, promised, undrafted=idle)


FP32_TOLERANCE = 1e-3
"""Logits. Passes of different widths sum in different orders; in fp32 on a CPU that moves a logit
by 1e-5, so a margin a hundred times larger cannot be rounding."""


@dataclass(frozen=True)
class Divergence:
    """The first token at which a speculative output differs from the plain one."""

    prompt: int
    gamma: Gamma
    position: int
    """Index of the first emitted token that differs."""
    plain_token: int
    speculative_token: int
    margin: float
    """The plain pass's best logit minus its second best."""
    explained: bool
    """Whether the margin is within the tolerance: a near-tie that rounding may decide."""


@dataclass
class LosslessReport:
    """How many outputs were compared with plain decoding, and where they differ."""

    prompts: int = 0
    tokens: int = 0
    drafted: int = 0
    """Tokens that were drafted; where none were, plain decoding was compared with itself."""
    tolerance: float = FP32_TOLERANCE
    divergences: tuple[Divergence, ...] = ()

    @property
    def unexplained(self) -> int:
        """Count the divergences that rounding does not explain."""
        return sum(not d.explained for d in self.divergences)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        return {**asdict(self), "unexplained": self.unexplained}


def compare(
    generator: Generator,
    prompts: Sequence[str | Sequence[int]],
    gammas: Sequence[Gamma],
    max_tokens: int,
    tolerance: float = FP32_TOLERANCE,
    drafter: str | None = None,
) -> Iterator[LosslessReport]:
    """Complete every prompt greedily, plain and at each gamma; yield the report as it grows.

    `drafter` is `default_drafter` when None, as the bundle's own default may be to draft nothing.
    Raises: RequestError for a tolerance that is not a number of logits.
    """
    if not 0.0 <= tolerance < float("inf"):
        raise RequestError(f"tolerance is {tolerance!r}; expected a number of logits, 0 or more")
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    drafter = drafter or default_drafter(generator)
    report = LosslessReport(tolerance=tolerance)
    for number, prompt in enumerate(prompts):
        generator.forget()
        plain = generator.generate(prompt, params, gamma=0).token_ids
        for gamma in gammas:
            generator.forget()
            completion = generator.generate(prompt, params, gamma=gamma, drafter=drafter)
            tokens = completion.token_ids
            report.tokens += len(tokens)
            report.drafted += completion.speculation.drafted
            at = first_difference(plain, tokens)
            if at is not None:
                margin = plain_margin(generator, prompt, plain[:at])
                divergence = Divergence(
                    number, gamma, at, plain[at], tokens[at], margin, margin <= tolerance
                )
                report.divergences += (divergence,)
        report.prompts += 1
        yield report


def default_drafter(generator: Generator) -> str:
    """Return the drafter where none is named: the bundle's own, or the first that drafts."""
    own = generator.check_drafter(None)
    drafts = available_drafters(has_model=generator.models.draft is not None)
    return own if own in drafts else drafts[0]


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two outputs differ, None where they are equal."""
    pairs = zip(plain, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    return at if at < max(len(plain), len(other)) else None


def plain_margin(
    generator: Generator, prompt: str | Sequence[int], plain: Sequence[int] = ()
) -> float:
    """Return the logits between the best and the second best token after plain output.

    The last token has a pass of its own, as in plain decoding. Logits are as the bundle's own
    options leave them, where it has any.
    """
    generator.forget()
    request, target = generator.request(prompt), generator.models.conditioned
    tokens = [*request.tokens, *plain]
    if target is not None and request.source is not None:
        target.condition(0, request.source)
    cache = KVCache(first_row(generator.models.target))
    if len(tokens) > 1:
        run_alone(cache.feed(tokens[:-1], 1))
    logits = run_alone(cache.feed(tokens[-1:], 1)).logits[0, 0]
    if request.processors is not None:
        request.processors.learn(request.tokens)
        request.processors.learn(tokens)
        logits = request.processors.edit(logits, [])
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)
