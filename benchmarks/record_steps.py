"""Record what steps of several rows take on a bundle here, for `replay_gamma.py`.

    python benchmarks/record_steps.py engines/build/codelet-rows            # a bundle of 4 rows
    python benchmarks/record_steps.py engines/build/codelet-rows --busy     # next to two busy loops

Some rows draft, as far as it comes, at random. What a step takes besides drafting is kept by rows
and drafted tokens, what drafting takes by rows and passes, and by how much steps vary.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import step_traces
from gamma_traces import LARGEST
from never_slower import LOOPS, PROMPTS, busy
from step_traces import ROWS, StepCosts

from specrt.generator import Generator
from specrt.loading import load
from specrt.params import SamplingParams
from specrt.speculation.auto_gamma import AutoGamma
from specrt.speculation.compiled_gamma import AutoFactory
from specrt.speculation.shared_step import DraftingRow, SharedStep
from specrt.text.prompt_file import read_prompts
from specrt.tuning.pass_timer import measure_costs

DRAW = random.Random(1)
VERIFY: dict[tuple[int, int], list[int]] = defaultdict(list)
"""By rows and drafted tokens of all, times of steps besides drafting."""
DRAFTS: dict[tuple[int, int], list[int]] = defaultdict(list)
"""By rows that draft and passes, times of drafting."""


class RandomStep(SharedStep):
    """Lets some rows draft, as far as it comes, and notes what that takes."""

    def begin(self, rows: int, drafting: Sequence[DraftingRow]) -> None:
        """Choose the rows, and how far they draft."""
        super().begin(rows, drafting)
        policies = [row.policy for row in drafting]
        self._chosen = DRAW.sample(policies, DRAW.randint(0, len(policies)))
        self.probing, self.rest, self.gamma = True, 0, DRAW.randint(1, LARGEST)

    def settle(
        self, made: int, drafted: Sequence[int], draft_ns: int, verify_ns: int,
        passes: int = 0, drafting: int = 0, steps: int = 1,
    ) -> None:  # fmt: skip
        """Note what the step took."""
        VERIFY[self.rows, sum(drafted)].append(verify_ns // steps)
        if passes:
            DRAFTS[drafting, passes].append(draft_ns)


def main() -> None:
    """Record one machine and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--busy", action="store_true", help="next to two busy loops")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--turns", type=int, default=4)
    arguments = parser.parse_args()

    texts = [prompt.text for prompt in read_prompts(PROMPTS)]
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
    with load(arguments.bundle, text_memory_bytes=0, prompt_cache=False) as opened:
        tuned = measure_costs(opened.models, opened.tokenizer)
        models = replace(opened.models, auto=AutoFactory(AutoGamma, RandomStep))
        generator = Generator(models, opened.tokenizer)
        ids = [opened.tokenizer.encode(text) for text in texts]
        with busy(LOOPS if arguments.busy else 0):
            for turn in range(arguments.turns):
                for rows in range(2, ROWS + 1):
                    few = [ids[(turn + i) % len(ids)] for i in range(rows)]
                    generator.generate_many(few, params, gamma="auto", drafter="model")
    alone = [tuned.verify(gamma) + tuned.outside_ns for gamma in range(LARGEST + 1)]
    verify = [alone, *(along(VERIFY, rows, rows * LARGEST) for rows in range(2, ROWS + 1))]
    drafts = [along(DRAFTS, rows, LARGEST) for rows in range(1, ROWS + 1)]
    jitter = [ns / verify[rows - 1][drafted] for (rows, drafted), t in VERIFY.items() for ns in t]
    DRAW.shuffle(jitter)
    name = f"{arguments.bundle.name}-{'busy' if arguments.busy else 'quiet'}.npz"
    step_traces.save(step_traces.FOLDER / name, StepCosts(verify, drafts, jitter[:4000]), tuned)
    print(f"{step_traces.FOLDER / name}: {len(jitter)} steps")


def along(times: Mapping[tuple[int, int], Sequence[int]], rows: int, most: int) -> list[float]:
    """Return the medians of so many rows, on lines between the places that were timed."""
    known = sorted((place, median(ns)) for (n, place), ns in times.items() if n == rows)
    places, medians = zip(*known, strict=True)
    if places[0]:  # drafting nothing takes nothing
        places, medians = (0, *places), (0.0, *medians)
    return [float(ns) for ns in np.interp(range(most + 1), places, medians)]


if __name__ == "__main__":
    main()
