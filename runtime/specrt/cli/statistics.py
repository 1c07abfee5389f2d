"""The line of statistics of a completion, or of several one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from specrt.cli.options import graphs_text
from specrt.completion import Completion, SpeculationStats, times_plain
from specrt.speculation.pool import Models


def summary(completion: Completion, models: Models | None = None) -> str:
    """Return the line of a completion.

    With `models`, which it had for itself, it says how it compares with plain decoding, too.
    """
    answers, graphs = [completion], models and models.cuda_graphs
    ttft = f"TTFT {completion.timings.ttft_ms:.1f} ms"
    parts = [f"{speed(answers, models)}, {ttft}", rounds(answers)]
    parts += [graphs_text(graphs) if graphs else "", completion.finish_reason or "interrupted"]
    return f"[{' | '.join(part for part in parts if part)}]"


def tally(answers: Sequence[Completion], models: Models) -> str:
    """Return the same of answers of a conversation, with what of their prompts was cached."""
    prompts, cached = (
        sum(getattr(a, n) for a in answers) for n in ("prompt_tokens", "cached_tokens")
    )
    ttfts = [a.timings.ttft_ms for a in answers if a.timings.arrivals]
    parts = [speed(answers, models), *([f"TTFT {median(ttfts):.1f} ms"] if ttfts else [])]
    line = ", ".join([*parts, f"{cached} of {prompts} prompt tokens cached"])
    return " | ".join(filter(None, (line, rounds(answers))))


def in_short(answer: Completion, models: Models) -> str:
    """Return how fast an answer was, and how many of the drafted tokens it kept."""
    counts = answer.speculation
    kept = f"acceptance rate {counts.acceptance_rate:.2f}" if counts.drafted else str(counts)
    return ", ".join(filter(None, (speed([answer], models), kept)))


def speed(answers: Sequence[Completion], models: Models | None) -> str:
    """Return tokens, tokens a second, and how many times as fast as plain decoding that is."""
    parts = [f"{sum(len(a.token_ids) for a in answers)} tokens"]
    if rate := _tokens_per_second(answers):
        parts.append(f"{rate:.0f} tokens/s")
    fused = models is None or models.rounds is not None  # no plain pass is known of such rounds
    ratio = None if fused or models is None else times_plain(answers, models.costs)
    if ratio is not None:
        slower = ", slower" if ratio < 0.95 else ""
        parts.append(f"estimated {ratio:.1f} times plain decoding{slower}")
    return ", ".join(parts)


def rounds(answers: Sequence[Completion]) -> str:
    """Return in one phrase what came of drafting, nothing before the first round."""
    last = answers[-1].speculation
    drafters = ", ".join(dict.fromkeys(a.speculation.drafter for a in answers))
    counts = SpeculationStats(last.gamma, drafters, last.fallback, last.tuned)
    for answer in answers:
        counts.merge(answer.speculation)
    return str(counts)


def _tokens_per_second(answers: Sequence[Completion]) -> float:
    """Return the tokens after the first delivery of each answer over their time."""
    arrivals = [a.timings.arrivals for a in answers if len(a.timings.arrivals) > 1]
    ns = sum(each[-1][0] - each[0][0] for each in arrivals)
    tokens = sum(count for each in arrivals for _, count in each[1:])
    return tokens / ns * 1e9 if ns else 0.0
