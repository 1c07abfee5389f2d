"""What completions took, in a line."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from specrt.completion import Completion
from specrt.stats import SpeculationStats


def tally(answers: Sequence[Completion]) -> str:
    """Return tokens, times, rounds and cached tokens of one answer or several."""
    tokens = sum(len(a.token_ids) for a in answers)
    prompts, cached = (
        sum(getattr(a, n) for a in answers) for n in ("prompt_tokens", "cached_tokens")
    )
    ttfts = [a.timings.ttft_ms for a in answers if a.timings.arrivals]
    parts = [f"{tokens} tokens"]
    if speed := _tokens_per_second(answers):
        parts.append(f"{speed:.0f} tokens/s")
    if ttfts:
        parts.append(f"TTFT {median(ttfts):.1f} ms")
    parts.append(f"{cached} of {prompts} prompt tokens cached")
    return ", ".join(parts) + _rounds(answers)


def _tokens_per_second(answers: Sequence[Completion]) -> float:
    """Return the tokens behind the first of each answer over the time they took."""
    arrivals = [a.timings.arrivals for a in answers if len(a.timings.arrivals) > 1]
    ns = sum(came[-1][0] - came[0][0] for came in arrivals)
    tokens = sum(count for came in arrivals for _, count in came[1:])
    return tokens / ns * 1e9 if ns else 0.0


def _rounds(answers: Sequence[Completion]) -> str:
    counts = SpeculationStats(0)
    for answer in answers:
        counts.merge(answer.speculation)
    if not counts.drafted:
        return f" | {counts.rounds} rounds, nothing drafted"
    drafters = sorted({a.speculation.drafter for a in answers if a.speculation.drafted})
    return (
        f" | {', '.join(drafters)}: {counts.rounds} rounds, {counts.tokens_per_round:.2f} tokens "
        f"per round, acceptance rate {counts.acceptance_rate:.2f}"
    )


def summary(completion: Completion) -> str:
    """Return the line of statistics of a completion."""
    timings, counts = completion.timings, completion.speculation
    tokens = len(completion.token_ids)
    speed = f"{timings.tokens_per_second:.0f} tokens/s, " if len(timings.arrivals) > 1 else ""
    line = f"{tokens} tokens, {speed}TTFT {timings.ttft_ms:.1f} ms"
    if counts.drafted:
        line += (
            f" | {counts.drafter}, gamma {counts.gamma}: {counts.rounds} rounds, "
            f"{counts.tokens_per_round:.2f} tokens per round, "
            f"acceptance rate {counts.acceptance_rate:.2f}"
        )
    if counts.fallback:
        line += f" | speculation is off: {counts.fallback}"
    return f"[{line} | {completion.finish_reason or 'interrupted'}]"
