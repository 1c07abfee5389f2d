"""Lookup in one text against lookup with memory of the texts before it, tokens per second.

    memory.py engines/build/codelet-200M-int8 [--requests 50] [--max-tokens 64] [--drafter ngram]

Two loads, each the same in every run. `agent`: one long context, a file of this repository, in
which each request changes one line and asks for what follows. `unrelated`: prompts that share
nothing, each asked once. Both generators use the same engines; every request runs in both, one
after the other, and which is first changes from request to request. Texts must be equal.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from time import perf_counter

from specrt import SamplingParams, load
from specrt.completion import Completion
from specrt.generator import Generator
from specrt.speculation.text_memory import TextMemory

ROOT = Path(__file__).parents[1]


def agent(requests: int, characters: int) -> list[str]:
    """Return a context that grows stale: each request edits one of its lines, and asks again."""
    rng = random.Random(19)
    lines = (ROOT / "runtime/specrt/speculation/gamma.py").read_text()[:characters].splitlines()
    prompts = []
    for number in range(requests):
        place = rng.randrange(len(lines) * 3 // 4)
        lines[place] = f"{lines[place].split('  #')[0]}  # edit {number}"
        prompts.append("\n".join(lines))
    return prompts


def unrelated(requests: int) -> list[str]:
    """Return the prompts of code and prose, and pieces of files where these are too few."""
    prompts = []
    for name in ("code", "prose", "unseen"):
        rows = (ROOT / f"benchmarks/prompts/{name}.jsonl").read_text().splitlines()
        prompts += [json.loads(row)["prompt"] for row in rows]
    for path in sorted((ROOT / "runtime/specrt").rglob("*.py")):
        if len(prompts) >= requests:
            break
        prompts.append(path.read_text()[1000:1600])
    return [prompt for prompt in prompts if prompt][:requests]


def run(pair: dict[str, Generator], prompts: list[str], most: int, drafter: str) -> None:
    """Complete all prompts with both generators in turns, and print what came of it."""
    seconds, tokens = dict.fromkeys(pair, 0.0), 0
    counts = {name: dict[str, list[int]]() for name in pair}
    later = dict.fromkeys(pair, 0.0)
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        names = list(pair) if number % 2 else list(pair)[::-1]
        done: dict[str, Completion] = {}
        for name in names:
            began = perf_counter()
            done[name] = pair[name].generate(prompt, params, drafter=drafter)
            spent = perf_counter() - began
            seconds[name] += spent
            later[name] += spent - done[name].timings.ttft_ms / 1e3
            for source, (drafted, accepted) in done[name].speculation.sources.items():
                count = counts[name].setdefault(source, [0, 0])
                count[0] += drafted
                count[1] += accepted
        first, second = done.values()
        assert first.token_ids == second.token_ids, "memory changed a text"
        tokens += len(first.token_ids)
    for name in pair:
        told = ", ".join(f"{s} {a} of {d}" for s, (d, a) in counts[name].items())
        print(
            f"  {name:8} {tokens / seconds[name]:7.1f} tokens/s whole, "
            f"{tokens / later[name]:7.1f} after the first token; accepted {told}"
        )
    print(
        f"  memory / lookup: {seconds['lookup'] / seconds['memory']:.2f} whole, "
        f"{later['lookup'] / later['memory']:.2f} after the first token"
    )


def main() -> None:
    """Run both loads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--characters", type=int, default=1200, help="of the agent's context")
    parser.add_argument("--drafter", choices=("ngram", "cascade"), default="ngram")
    given = parser.parse_args()
    loads = {
        "agent": agent(given.requests, given.characters),
        "unrelated": unrelated(given.requests),
    }
    for name, prompts in loads.items():
        print(f"{name}: {len(prompts)} requests, {given.max_tokens} tokens each, {given.drafter}")
        with load(given.bundle, text_memory_bytes=0) as first:
            second = Generator(first.models, first.tokenizer, text_memory=TextMemory())
            for one in (first, second):
                one.generate("warm up", SamplingParams(max_tokens=16), memory_key=None)
            run({"lookup": first, "memory": second}, prompts, given.max_tokens, given.drafter)


if __name__ == "__main__":
    main()
