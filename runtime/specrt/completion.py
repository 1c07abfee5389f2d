"""One completion: its chunks while it runs; its counts, times and finish reason when it ends.

Counts are stored; rates are properties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from specrt.params import AUTO, Gamma
from specrt.records import shown
from specrt.sampling.distribution import Entry
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import NO_DRAFTER
from specrt.speculation.round import Round


@dataclass
class SpeculationStats:
    """The rounds of one completion or many, and what follows from them. The prefill is not one."""

    gamma: Gamma
    drafter: str = ""
    fallback: str | None = None
    """Why nothing is drafted, or no longer; None where something is, and where gamma is 0."""
    tuned: bool = True
    """Whether gamma `auto` began with costs that were measured on this machine."""
    log: list[Round] = field(default_factory=list, init=False)
    """Every round; `add` records it and the counts."""
    drafted: int = field(default=0, init=False)
    """Tokens proposed."""
    evaluated: int = field(default=0, init=False)
    """Drafted tokens examined, up to and including the first rejection of each round."""
    accepted: int = field(default=0, init=False)
    """Drafted tokens that the target accepted."""
    emitted: int = field(default=0, init=False)
    """Tokens delivered: what rounds made, less what was cut off at an end."""

    def __repr__(self) -> str:
        return shown(
            self, "gamma", "drafter", "fallback", "rounds", "drafted", "evaluated", "accepted",
            "emitted", "acceptance_rate", "tokens_per_round",
        )  # fmt: skip

    def add(self, round_: Round, emitted: int) -> None:
        """Count one round, of whose tokens `emitted` were delivered."""
        self.log.append(round_)
        self.drafted += round_.drafted
        self.evaluated += round_.evaluated
        self.accepted += round_.accepted
        self.emitted += emitted

    def merge(self, other: SpeculationStats) -> None:
        """Add the rounds of another completion at the same gamma."""
        self.log.extend(other.log)
        self.drafted += other.drafted
        self.evaluated += other.evaluated
        self.accepted += other.accepted
        self.emitted += other.emitted

    @property
    def rounds(self) -> int:
        """Drafts verified; of plain decoding, tokens decoded."""
        return len(self.log)

    @property
    def evaluated_at(self) -> list[int]:
        """Per position in the draft, how often the token there was examined."""
        longest = max((r.evaluated for r in self.log), default=0)
        return [sum(r.evaluated > i for r in self.log) for i in range(longest)]

    @property
    def accepted_at(self) -> list[int]:
        """Per position in the draft, how often the token there was accepted."""
        return [sum(r.accepted > i for r in self.log) for i in range(len(self.evaluated_at))]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / evaluated (alpha); 0 where nothing was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else 0.0

    @property
    def draft_yield(self) -> float:
        """Accepted / drafted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """τ = emitted / rounds; 0 where no round ran."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        """Return in one phrase what came of drafting, nothing before the first round."""
        if not self.log:
            return ""
        if not self.drafted:
            asked = self.gamma != 0 and self.drafter != NO_DRAFTER
            why = f"{self.drafter} proposed nothing" if asked else "drafting is off"
            return f"nothing drafted: {self.fallback or why}"
        untuned = " (not tuned)" if self.gamma == AUTO and not self.tuned else ""
        plural = "s" if self.rounds != 1 else ""
        rates = (
            f"{self.drafter}, gamma {self.gamma}{untuned}: {self.rounds} round{plural}, "
            f"{self.tokens_per_round:.2f} tokens per round, "
            f"acceptance rate {self.acceptance_rate:.2f}"
        )
        return rates + (f"; drafting stopped: {self.fallback}" if self.fallback else "")

    @property
    def sources(self) -> dict[str, tuple[int, int]]:
        """Per source of proposals, the tokens drafted and accepted."""
        counts: dict[str, tuple[int, int]] = {}
        for r in self.log:
            if r.drafted:
                drafted, accepted = counts.get(r.source, (0, 0))
                counts[r.source] = (drafted + r.drafted, accepted + r.accepted)
        return counts

    def rates_json(self) -> dict[str, float]:
        """Return the rates under their public names."""
        return {
            "acceptance_rate": round(self.acceptance_rate, 4),
            "draft_yield": round(self.draft_yield, 4),
            "tokens_per_round": round(self.tokens_per_round, 4),
        }

    def to_json(self) -> dict[str, Any]:
        """Return counts and rates under their public names."""
        return {
            "gamma": self.gamma,
            "drafter": self.drafter,
            "fallback": self.fallback,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "emitted": self.emitted,
            **self.rates_json(),
            "sources": {
                name: {"drafted": drafted, "accepted": accepted}
                for name, (drafted, accepted) in self.sources.items()
            },
        }


@dataclass
class Timings:
    """When the tokens of one completion arrived.

    Units: nanoseconds of `perf_counter_ns`, less the time in which no chunk was fetched. Where
    several streams run, time goes on for all while one of them is read. Tokens of one round arrive
    together.
    """

    began_ns: int
    """When it was asked for."""
    queued_ns: int = 0
    """When it was ready to run, its prompt read as tokens."""
    taken_ns: int | None = None
    """When a row took it first."""
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """(time, tokens delivered) per round, the prefill first."""
    _known: tuple[int, list[float]] = field(default=(0, []), init=False, repr=False, compare=False)
    """How many arrivals were read, and their gaps in order; replaced as a whole, so that several
    threads may read."""

    def __repr__(self) -> str:
        return shown(self, "queue_ms", "ttft_ms", "itl_ms", "tokens_per_second")

    @property
    def queue_ms(self) -> float:
        """How long it waited for a row; 0 until one took it."""
        return 0.0 if self.taken_ns is None else (self.taken_ns - self.queued_ns) / 1e6

    @property
    def ttft_ms(self) -> float:
        """Time to first token: from the request to the first delivery, less the wait for a row."""
        if not self.arrivals:
            return 0.0
        return (self.arrivals[0][0] - self.began_ns) / 1e6 - self.queue_ms

    @property
    def itl_ms(self) -> float:
        """Median gap between deliveries, each gap shared by the tokens that came with it."""
        gaps = self._gaps()
        middle = len(gaps) // 2
        if not gaps:
            return 0.0
        return gaps[middle] if len(gaps) % 2 else (gaps[middle - 1] + gaps[middle]) / 2

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput: tokens after the first delivery over the time they took.

        The draft reads the prompt after the first delivery, so that is part of it.
        """
        tokens = len(self._gaps())
        if not tokens:
            return 0.0
        return tokens / ((self.arrivals[-1][0] - self.arrivals[0][0]) / 1e9)

    def _gaps(self) -> list[float]:
        """Return the gap of each token after the first delivery, in milliseconds, least first.

        Only what arrived since the last call is read: a call each round costs a round.
        """
        seen, gaps = self._known
        there = len(self.arrivals)
        if seen < there:
            arrivals = self.arrivals[max(0, seen - 1) : there]
            more = [
                (now - before) / count / 1e6
                for (before, _), (now, count) in pairwise(arrivals)
                for _ in range(count)
            ]
            gaps = sorted(gaps + more)
            self._known = (there, gaps)
        return gaps


class Chunk(NamedTuple):
    """What one round added: text that is certain, and the tokens that arrived."""

    text: str
    token_ids: list[int]
    accepted: int = 0
    """How many of the tokens, from the first, were drafted; the rest is the target's own."""
    logprobs: list[Entry] | None = None
    """One for each token; None without `logprobs`."""

    def __repr__(self) -> str:
        return shown(self, "text", "token_ids", "accepted")


@dataclass
class Completion:
    """One completion, its counts and times; final once `finish_reason` is set."""

    prompt_tokens: int
    seed: int | None
    """None where a server drew it and keeps it to itself."""
    speculation: SpeculationStats
    timings: Timings
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """How many of the prompt's tokens were in the KV buffers already."""
    finish_reason: str | None = None
    """`stop` (an end token or a stop string), `length`, `error`, `cancelled` (by `cancel`), or
    None: it is not finished, or its stream was closed."""
    index: int = 0
    """Which of the n completions of its prompt it is."""
    error: str | None = None
    """What ended it before its time, or let it not begin, where others went on."""
    stop_reason: int | str | None = None
    """The token or string that ended the text, when it was not the model's own end."""
    logprobs: list[Entry] | None = None
    """Of each token and of the likeliest, by the target; None without `logprobs`."""
    prompt_logprobs: list[Entry | None] | None = None
    """The same of the prompt's tokens, None for the first; None without `prompt_logprobs`."""
    prompt_token_ids: Sequence[int] = ()
    """The prompt as it was read; none of speech."""

    def __repr__(self) -> str:
        return shown(
            self, "index", "text", "token_ids", "finish_reason", "stop_reason", "error",
            "prompt_tokens", "cached_tokens", "seed", "timings", "speculation",
        )  # fmt: skip

    def fail(self, reason: str) -> None:
        """End with an error, where others go on."""
        self.finish_reason, self.error = "error", reason

    def to_json(self) -> dict[str, Any]:
        """Return the public JSON object; it has log-probabilities where the request has them."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "queue_ms": round(self.timings.queue_ms, 3),
            "ttft_ms": round(self.timings.ttft_ms, 3),
            "itl_ms": round(self.timings.itl_ms, 3),
            "tokens_per_second": round(self.timings.tokens_per_second, 2),
            "speculation": self.speculation.to_json(),
            **_ranks_json("logprobs", self.logprobs),
            **_ranks_json("prompt_logprobs", self.prompt_logprobs),
        }


FEWEST_ROUNDS = 16
"""Rounds from which anything is estimated: the first ones of a process are slow."""


def times_plain(completions: Sequence[Completion], costs: Costs | None) -> float | None:
    """Estimate how many times as fast as plain decoding texts were made; None where nothing tells.

    A plain step would have taken as much less than these verify passes as tuned costs say, or,
    without any, as long as the rounds here that drafted nothing; and as long outside the passes
    as a round. `completions` ran one after the other, each alone. It is not a measurement: for one
    `generate --compare` and `specrt bench` decode plainly, too.
    """
    log = [round_ for done in completions for round_ in done.speculation.log]
    arrivals = [done.timings.arrivals for done in completions if done.timings.arrivals]
    took = sum(each[-1][0] - each[0][0] for each in arrivals)
    if took <= 0 or not any(round_.drafted for round_ in log):
        return None
    passes = log if costs else [round_ for round_ in log if not round_.drafted]
    if len(passes) < FEWEST_ROUNDS:
        return None
    steps = sum(costs.verify(r.drafted) / costs.verify(0) if costs else 1.0 for r in passes)
    step = sum(r.verify_ns for r in passes) / steps
    outside = max(0, took - sum(r.draft_ns + r.verify_ns for r in log)) / len(log)
    tokens = sum(count for each in arrivals for _, count in each[1:])
    return tokens * (step + outside) / took


def _ranks_json(name: str, entries: Sequence[Entry | None] | None) -> dict[str, Any]:
    """Return log-probabilities as JSON, an empty object without them."""
    if entries is None:
        return {}
    return {
        name: [
            None if entry is None else {str(t): logprob.to_json() for t, logprob in entry.items()}
            for entry in entries
        ]
    }


class ChunkSource(Protocol):
    """The source of a stream's chunks; any thread may call."""

    def fetch(self) -> Chunk | None:
        """Return the next chunk; None at the end, after a failure, and once it was dropped."""
        ...

    def cancel(self) -> None:
        """End it before its time, with the finish reason `cancelled`."""
        ...

    def drop(self) -> None:
        """Discard what is not read yet."""
        ...


class Stream(Iterator[Chunk]):
    """An iterator of chunks; `completion` holds what came so far, and all of it at the end.

    Threads: any may cancel or close it, also while another waits for its next chunk, which then
    ends after the pass that runs. Dropping the stream closes it.
    """

    def __init__(self, completion: Completion, source: ChunkSource) -> None:
        self.completion = completion
        self._source = source

    def __next__(self) -> Chunk:
        """Return the next chunk; text may be empty while a character is incomplete."""
        chunk = self._source.fetch()
        if chunk is None:
            raise StopIteration
        return chunk

    def cancel(self) -> None:
        """Stop, from any thread: the reader is at the end, and the row is free at once.

        A completion that was not finished has the finish reason `cancelled`. Never waits.
        """
        self._source.cancel()

    def close(self) -> None:
        """Discard what is not read yet; the row is free at once. There is no finish reason."""
        self._source.drop()

    def finish(self) -> Completion:
        """Run to the end and return the completion."""
        for _ in self:
            pass
        return self.completion

    def __del__(self) -> None:
        self._source.drop()
