"""Makes test vectors: what the Python runtime generates, for other implementations to replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import specrt
from specrt import Generator
from specrt.models import AUTO

Options = Mapping[str, Any]

SAMPLERS: tuple[Options, ...] = (
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.3, "top_k": 40, "seed": 2},
    {"temperature": 0.9, "top_p": 0.9, "seed": -3},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.02, "top_k": 100, "seed": 2**62},
    {"temperature": 1.0, "typical_p": 0.8, "seed": 5},
)
RULES: tuple[Options, ...] = (
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3, "temperature": 0.8, "seed": 6},
    {"no_repeat_ngram_size": 3},
    {"logit_bias": {"12": 4.0, "300": -100.0}, "temperature": 0.6, "seed": 7},
    {"min_tokens": 20, "stop_token_ids": [201, 10, 13]},
    {"allowed_token_ids": [*range(1, 8192, 3)], "temperature": 0.7, "seed": 8},
    {"repetition_penalty": 0.9, "no_repeat_ngram_size": 4, "top_k": 50, "temperature": 1.1,
     "min_p": 0.01, "seed": 9, "presence_penalty": -0.5},
)  # fmt: skip
ENDS: tuple[Options, ...] = (
    {"stop": ["\n\n"]},
    {"stop": [":\n", "self"], "temperature": 0.8, "seed": 10},
    {"max_tokens": 1},
    {"stop_token_ids": [200, 201, 202, 203]},
)
TOLD: tuple[Options, ...] = (
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logprobs": 0, "prompt_logprobs": 0, "temperature": 0.9, "seed": 11},
)
DRAFTERS = ("model", "ngram", "cascade", "none")


def requests(gammas: Sequence[int]) -> Iterator[Options]:
    """Yield what is asked, gamma and drafter included."""
    for gamma in (*gammas, AUTO):
        yield {"gamma": gamma}
        yield {"gamma": gamma, **SAMPLERS[0]}
    for number, sampler in enumerate((*SAMPLERS, *RULES, *ENDS, *TOLD)):
        for drafter in DRAFTERS:
            gamma = gammas[(number + len(drafter)) % len(gammas)]
            yield {"gamma": gamma, "drafter": drafter, **sampler}
    for gamma in gammas[1::2]:
        yield {"gamma": gamma, "verifier": "rejection", **SAMPLERS[gamma % len(SAMPLERS)]}
        yield {"gamma": gamma, "verifier": "rejection", "drafter": "ngram", **RULES[1]}


def cases(
    generator: Generator, prompts: Sequence[str], *, texts: bool, every: int = 1
) -> list[dict[str, Any]]:
    """Return requests, one after another on one row that held nothing, and what came of each.

    `texts` gives prompts as they are, where not as token ids; `every` leaves requests out.
    """
    generator.forget()
    made = []
    for number, asked in enumerate([*requests(generator.models.gammas)][::every]):
        prompt = prompts[number // 2 % len(prompts)]
        ids = generator.tokenizer.encode(prompt)
        given: str | list[int] = prompt if texts else ids
        params = {"max_tokens": 40, **asked}
        made.append({"prompt": given, "params": params, **_outcome(generator, ids, params)})
    return made


def _outcome(generator: Generator, prompt: list[int], asked: Options) -> dict[str, Any]:
    options = {k: v for k, v in asked.items() if k not in ("gamma", "drafter")}
    stream = generator.stream(
        prompt,
        specrt.SamplingParams.of(**options),
        gamma=asked["gamma"],
        drafter=asked.get("drafter"),
    )
    done, lines = stream.completion, ""
    for chunk in stream:
        counts = done.speculation
        lines += (
            f"{' '.join(map(str, chunk.token_ids))} ({chunk.accepted}) after {counts.rounds} "
            f"rounds {counts.drafted} {counts.evaluated} {counts.accepted}\n"
        )
    told = done.to_json()
    return {
        "ids": done.token_ids,
        "text": done.text,
        "finish_reason": done.finish_reason,
        "cached_tokens": done.cached_tokens,
        # How far auto drafts depends on what passes take.
        "rounds": None if asked["gamma"] == AUTO else lines,
        **({"told": told} if done.logprobs is not None else {}),
    }
