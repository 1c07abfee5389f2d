"""What keeping to a JSON Schema costs: ms per token beside free requests, in turns.

    python benchmarks/structured.py [BUNDLE] [--json-schema F] [--gammas 0,4,auto]

Every prompt is completed freely and within the schema right after each other, in an order that
turns round, to the same number of tokens (free ones go past their ends). The ratio is the median
over pairs. At gamma 0 it is the cost of the structure itself; above, acceptance differs too,
because the texts do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from specrt import Completion, Generator, SamplingParams, load
from specrt.bundle import DEFAULT_BUNDLE
from specrt.cli.gammas import parse_gammas
from specrt.models import AUTO, Gamma
from specrt.prompts import first_of_each, read_prompts

PROMPTS = Path(__file__).parent / "prompts" / "code.jsonl"
LONG = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "line": {"type": "integer", "minimum": 1, "maximum": 9999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
        },
        "required": ["name", "line", "tags"],
        "additionalProperties": False,
    },
}
"""A schema that no completion comes to the end of."""


def main() -> None:
    """Measure and print."""
    asked = _arguments()
    schema = asked.json_schema.read_text() if asked.json_schema else json.dumps(LONG)
    prompts = [p.text for p in first_of_each(read_prompts(asked.prompts), asked.limit)]
    with load(asked.bundle, owns_process=True) as generator:
        print("gamma  free ms/token  structured  ratio  tokens/round free, structured  forced")
        for gamma in asked.gammas:
            compare(generator, prompts, asked.tokens, gamma, schema)


def compare(
    generator: Generator, prompts: Sequence[str], tokens: int, gamma: Gamma, schema: str
) -> None:
    """Complete every prompt both ways, once unmeasured, and print the medians."""
    free = SamplingParams(max_tokens=tokens, ignore_eos=True)
    kept = SamplingParams(max_tokens=tokens, json_schema=schema)
    for params in (free, kept):
        generator.generate(prompts[0], params, gamma=gamma)
    pairs: list[tuple[Completion, Completion]] = []
    for turn, prompt in enumerate(prompts):
        order = (free, kept) if turn % 2 else (kept, free)
        first, second = (generator.generate(prompt, params, gamma=gamma) for params in order)
        pair = (first, second) if turn % 2 else (second, first)
        if len(pair[1].token_ids) == tokens:
            pairs.append(pair)
    times = [(ms_per_token(one), ms_per_token(other)) for one, other in pairs]
    ratio = median(other / one for one, other in times)
    rounds = [
        median(c.speculation.tokens_per_round for c in side) for side in zip(*pairs, strict=True)
    ]
    forced = sum(c.speculation.sources.get("forced", (0, 0))[1] for _, c in pairs)
    print(
        f"{gamma!s:>5}  {median(t[0] for t in times):13.3f}  {median(t[1] for t in times):10.3f}  "
        f"{ratio:5.3f}  {rounds[0]:17.2f}, {rounds[1]:.2f}  {forced / len(pairs) / tokens:11.2f}"
    )


def ms_per_token(done: Completion) -> float:
    """Return the decode time of a completion for each token after the first delivery."""
    return 1e3 / done.timings.tokens_per_second


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path, nargs="?", default=DEFAULT_BUNDLE)
    parser.add_argument("--json-schema", type=Path, help="a schema that takes long to complete")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, default=12, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--gammas", type=parse_gammas, default=(0, 2, 4, AUTO))
    return parser.parse_args()


if __name__ == "__main__":
    main()
