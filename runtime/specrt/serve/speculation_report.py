"""What an answer tells of its speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrt.completion import Completion
from specrt.serve.service import Update
from specrt.text.detokenizer import DraftedSpans


def metrics_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return what came of speculating: the shape that vLLM's clients print, and our own counts.

    Both are of one completion; null for several.
    """
    if len(completions) > 1:
        return {"speculative_decoding": None, "specrt": None}
    (completion,) = completions
    counts, timings = completion.speculation, completion.timings
    drafting = [r for r in counts.log if r.drafted]
    widest = max((r.drafted for r in drafting), default=0)
    histogram = [sum(r.accepted == n for r in drafting) for n in range(widest + 1)]
    speculative = drafting and {
        "mean_acceptance_length": 1 + counts.accepted / len(drafting),
        "draft_acceptance_rate": counts.draft_yield,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(drafting),
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.drafted,
    }
    return {
        "speculative_decoding": speculative or None,
        "specrt": {
            **counts.to_json(),
            "accepted_at": counts.accepted_at,
            "seed": completion.seed,
            "queue_ms": round(timings.queue_ms, 3),
            "ttft_ms": round(timings.ttft_ms, 3),
            "itl_ms": round(timings.itl_ms, 3),
            "tokens_per_second": round(timings.tokens_per_second, 2),
        },
    }


def speculation_of(update: Update, painted: DraftedSpans) -> dict[str, Any]:
    """Return what was drafted of a chunk, which parts of its text that are, and rates so far."""
    chunk, round_ = update.chunk, update.round_
    spans = painted.of(chunk.text, chunk.token_ids, chunk.accepted)
    return {
        "drafted": round_.drafted if round_ else 0,
        "accepted": chunk.accepted,
        "source": round_.source if round_ else "",
        **update.counts.rates_json(),
        "spans": [{"text": span.text, "accepted": span.drafted} for span in spans],
    }
