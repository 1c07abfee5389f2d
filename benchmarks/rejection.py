"""How many drafted tokens `rejection` keeps of the same drafts, as a block and judged one by one.

Both are expectations, given the draft of a round: they need no second run to be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import specrt
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution
from specrt.sampling.noise import Noise
from specrt.speculation.round import Proposal, Verdict
from specrt.speculation.target import VERIFIERS
from specrt.text.prompt_file import read_prompts

PROMPTS = Path(__file__).parent / "prompts"

REJECTION = VERIFIERS["rejection"]


def kept(proposal: Proposal, target: Callable[[int], Distribution]) -> tuple[float, float]:
    """Return how many tokens of a draft are kept on average: judged one by one, and as a block."""
    assert proposal.distributions is not None
    chance = weight = 1.0
    each = block = 0.0
    for i, (token, q) in enumerate(zip(proposal.tokens, proposal.distributions, strict=True)):
        ratio = target(i).prob(token) / q.prob(token)
        chance, weight = chance * min(ratio, 1.0), min(weight * ratio, 1.0)
        each, block = each + chance, block + weight
    return each, block


def measure(
    generator: specrt.Generator, prompts: Sequence[str], gamma: int, temperature: float, seeds: int
) -> list[tuple[float, float]]:
    """Return both of every round that drafted `gamma` tokens."""
    found: list[tuple[float, float]] = []

    def accept(
        proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
    ) -> Verdict:
        if len(proposal.tokens) == gamma:
            found.append(kept(proposal, target))
        return REJECTION.accept(proposal, target, noise, position)

    VERIFIERS["rejection"] = REJECTION._replace(accept=accept)
    for seed in range(seeds):
        params = SamplingParams(
            temperature=temperature, verifier="rejection", seed=seed, max_tokens=128,
            ignore_eos=True,
        )  # fmt: skip
        for prompt in prompts:
            generator.generate(prompt, params, gamma=gamma, drafter="model")
    return found


def main() -> None:
    """Print a row of the table in docs/drafting.md for each gamma and temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    files = [read_prompts(PROMPTS / f"{name}.jsonl")[:8] for name in ("code", "prose")]
    prompts = [record.text for records in files for record in records]
    print("| gamma | temperature | rounds | each judged | as a block | more kept | more a round |")
    with specrt.load(options.bundle) as generator:
        for gamma, temperature in ((4, 0.8), (4, 1.0), (8, 0.8), (8, 1.0)):
            found = measure(generator, prompts, gamma, temperature, options.seeds)
            each, block = map(fmean, zip(*found, strict=True))
            error = stdev(b - a for a, b in found) / sqrt(len(found)) / each
            print(
                f"| {gamma} | {temperature} | {len(found)} | {each:.2f} | {block:.2f} "
                f"| {block / each - 1:.1%} ± {error:.1%} | {(1 + block) / (1 + each) - 1:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
