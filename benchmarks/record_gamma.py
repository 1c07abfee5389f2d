"""Record what a bundle's drafters would propose along its own plain texts, for `replay_gamma.py`.

    python benchmarks/record_gamma.py engines/build/codelet --prompts benchmarks/prompts/code.jsonl

For each prompt the target's plain text is generated. The draft model and the n-gram drafter then
draft from every position of it, as deep as any gamma goes; how many tokens were right and how sure
the drafter was is kept, with what passes cost and by how much rounds vary. Under `match` a sampled
text is fixed by its seed, and may be recorded just so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import gamma_traces
from gamma_traces import FOLDER, LARGEST, Drafts

from specrt.generator import Generator
from specrt.loading import load
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import ModelDrafter
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.round import Drafter, Round, run_alone, run_rounds, speculate
from specrt.speculation.target import EngineTarget
from specrt.text.prompt_file import read_prompts
from specrt.tuning.pass_timer import measure_costs

GAMMA = 4
"""Of the rounds whose times are recorded."""


def main() -> None:
    """Record one trace and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200, help="of each prompt")
    parser.add_argument("--count", type=int, default=8, help="prompts to take")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="default: among the traces of the repository")
    arguments = parser.parse_args()

    texts = [p.text for p in read_prompts(arguments.prompts)][: arguments.count]
    manner = f"t{arguments.temperature:g}" if arguments.temperature else "greedy"
    name = f"{arguments.bundle.name}-{arguments.prompts.stem}-{manner}.npz"
    params = SamplingParams(
        max_tokens=arguments.tokens, temperature=arguments.temperature, seed=1, ignore_eos=True
    )
    with load(arguments.bundle, owns_process=True, text_memory_bytes=0) as generator:
        costs = measure_costs(generator.models, generator.tokenizer)
        jitter: list[float] = []
        drafts: dict[str, list[Drafts]] = {"model": [], "ngram": []}
        for text in texts:
            prompt = generator.tokenizer.encode(text)
            tokens = generator.generate(prompt, params, gamma=0).token_ids
            for source, parts in drafts.items():
                drafter = drafter_of(generator, source, params, LARGEST)
                parts.append(drafts_along(drafter, prompt, tokens))
            jitter += variation(rounds_of(generator, prompt, params))
    place = arguments.out or FOLDER / name
    gamma_traces.save(place, costs, jitter, **{s: joined(parts) for s, parts in drafts.items()})
    print(f"{place}: {sum(len(d.right) for d in drafts['model'])} positions")


def drafter_of(generator: Generator, source: str, params: SamplingParams, gamma: int) -> Drafter:
    """Return a drafter that drafts as deep as it can."""
    if source == "ngram":
        return NgramDrafter(FixedGamma(gamma))
    draft = generator.models.draft
    assert draft is not None, "a bundle with a draft model"
    vocabulary = min(generator.models.target.geometry.vocab_size, draft.geometry.vocab_size)
    cache = KVCache(draft)
    return ModelDrafter(cache, params, Noise(params.seed or 0), FixedGamma(gamma), vocabulary)


def drafts_along(drafter: Drafter, prompt: Sequence[int], tokens: Sequence[int]) -> Drafts:
    """Return what a drafter proposes from every position of a text but the first."""
    right, confidence = [], []
    for position in range(1, len(tokens)):
        committed = [*prompt, *tokens[:position]]
        proposal = run_alone(drafter.propose(committed, LARGEST))
        follows = tokens[position : position + LARGEST]
        wrong = (i for i, t in enumerate(proposal.tokens) if i >= len(follows) or t != follows[i])
        right.append(next(wrong, len(proposal.tokens)))
        confidence.append([float(c) for c in proposal.confidences])
        drafter.observe([*committed, tokens[position]], Round([tokens[position]], 0, 0, 0, 0))
    return Drafts(right, confidence)


def rounds_of(generator: Generator, prompt: Sequence[int], params: SamplingParams) -> list[Round]:
    """Run rounds of one gamma, for their times."""
    noise = Noise(params.seed or 0)
    target = EngineTarget(KVCache(generator.models.target), params, noise)
    drafter = drafter_of(generator, "model", params, GAMMA)
    limit = len(prompt) + params.max_tokens
    return list(run_rounds(speculate(target, drafter, [*prompt], limit)))[1:]


def variation(rounds: Iterable[Round]) -> list[float]:
    """Return what each whole round took to verify, by what is usual."""
    whole = [r.verify_ns for r in rounds if r.drafted == GAMMA]
    return [ns / median(whole) for ns in whole]


def joined(parts: Sequence[Drafts]) -> Drafts:
    """Return the drafts of several texts as of one."""
    first = parts[0]
    return replace(
        first,
        right=[count for part in parts for count in part.right],
        confidence=[row for part in parts for row in part.confidence],
    )


if __name__ == "__main__":
    main()
