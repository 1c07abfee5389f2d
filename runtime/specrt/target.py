"""The target's side of a round: score what was drafted, and say what to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from specrt.engine import Engine, Output
from specrt.errors import EngineError
from specrt.logprobs import Ranked, joined, ranked
from specrt.noise import Noise, Purpose
from specrt.params import SamplingParams
from specrt.passes import Asking, Pass
from specrt.rules import Row, Rules, likeliest
from specrt.sampling import Distribution, distribution_of, not_a_number, process
from specrt.verify import Proposal, Verdict, agree, match, rejection

T = TypeVar("T")

SCORED = 64
"""Most tokens of a prompt that are scored in one pass: a row of scores is a whole vocabulary."""


class Target(Protocol):
    """Whoever owns the output. Logits never cross this seam, so it may sit anywhere."""

    def verify(self, tokens: Sequence[int], proposal: Proposal) -> Asking[Verdict]:
        """Judge what was proposed to follow the committed tokens, asking for passes."""


class CachedTokens:
    """An engine, and how many of the committed tokens its KV buffers hold.

    Holds: `length` counts a prefix of the committed tokens that never includes the last one once
    a round is over.
    """

    def __init__(self, engine: Engine, length: int = 0) -> None:
        self.engine = engine
        self.length = length

    def feed(self, tokens: Sequence[int], rows: int) -> Asking[Output]:
        """Append tokens to the cache, in chunks where they are many, and score the last rows.

        The last chunk holds at least `rows` tokens, so every row asked for comes from one pass.
        """
        engine, length = self.engine, self.length
        while len(tokens) > engine.max_width:
            chunk = min(engine.max_width, len(tokens) - rows)
            yield Pass(engine, tokens[:chunk], length, 1)
            self.length = length = length + chunk
            tokens = tokens[chunk:]
        output = yield Pass(engine, tokens, length, rows)
        self.length = length + len(tokens)
        return output

    def read(self, text: Sequence[int], look: Callable[[Output, int, int], None]) -> Asking[None]:
        """Feed a text from its beginning and score every token of it.

        `look` is shown what each pass left behind, the position of its first row, and how many of
        its rows it was shown before. Passes are as wide as a power of two, all of them alike, and
        the last begins earlier where the text is no multiple of it: engines keep memory for each
        width and number of rows.
        """
        engine, self.length = self.engine, 0
        most = min(SCORED, len(text), engine.max_width, getattr(engine, "max_rows", SCORED))
        width = 1 << most.bit_length() >> 1
        while self.length < len(text):
            start = min(self.length, len(text) - width)
            output = yield Pass(engine, text[start : start + width], start, width)
            look(output, start, self.length - start)
            self.length = start + width


class EngineTarget:
    """A target in this process."""

    def __init__(
        self,
        cache: CachedTokens,
        params: SamplingParams,
        noise: Noise,
        rules: Rules | None = None,
    ) -> None:
        self._rules = rules
        self._cache = cache
        self._params = params
        self._noise = noise
        self._reads = params.prompt_logprobs is not None
        """Whether the prompt is still to be scored."""

    def verify(self, tokens: Sequence[int], proposal: Proposal) -> Asking[Verdict]:
        """Feed what the cache lacks plus the drafted tokens in one pass, and apply the rule."""
        drafted = proposal.tokens
        cache = self._cache
        if self._rules is not None:
            self._rules.learn(tokens)
        prompt = (yield from self._scored(tokens)) if self._reads else None
        output = yield from cache.feed([*tokens[cache.length :], *drafted], len(drafted) + 1)
        verdict = self._judge(proposal, output, len(tokens))
        if self._params.logprobs is not None:
            kept = [*drafted[: verdict.accepted], verdict.next]
            found = ranked(output.logits[0, : len(kept)], kept, self._params.logprobs)
            verdict = verdict._replace(logprobs=found)
        cache.length = len(tokens) + verdict.accepted
        return verdict if prompt is None else verdict._replace(prompt_logprobs=prompt)

    def _scored(self, prompt: Sequence[int]) -> Asking[Ranked]:
        """Read a prompt up to its last token, and rank all of its tokens but the first."""
        parts: list[Ranked] = []
        k = self._params.prompt_logprobs or 0

        def look(output: Output, first: int, seen: int) -> None:
            rows = output.logits[0, seen:]
            following = first + seen + 1
            parts.append(ranked(rows, prompt[following : following + len(rows)], k))

        yield from self._cache.read(prompt[:-1], look)
        self._reads = False
        return joined(parts)

    def _judge(self, proposal: Proposal, output: Output, position: int) -> Verdict:
        params, noise, drafted = self._params, self._noise, proposal.tokens
        if params.greedy and self._rules is None:  # the argmax says it all: logits stay in place
            best = output.argmax[0].tolist()
            verdict = agree(drafted, best)
            if min(best[: verdict.accepted + 1]) < 0:
                raise not_a_number()
            return verdict
        if params.greedy:
            return match(drafted, lambda i: self._read(output, drafted, i, likeliest))

        def distribution(i: int) -> Distribution:
            return self._distribution(output, drafted, i)

        if params.verifier == "rejection":
            return rejection(proposal, distribution, noise, position)
        return match(drafted, lambda i: distribution(i).draw(noise, Purpose.TOKEN, position + i))

    def _read(self, output: Output, drafted: Sequence[int], i: int, take: Callable[[Row], T]) -> T:
        """Read a row as the request's processors leave it, behind the tokens drafted before."""
        assert self._rules is not None
        if output.argmax[0, i] < 0:
            raise not_a_number()
        return self._rules.read(output.logits[0, i], drafted[:i], take)

    def _distribution(self, output: Output, drafted: Sequence[int], i: int) -> Distribution:
        if self._rules is None:
            return distribution_of(output, i, self._params)
        return self._read(output, drafted, i, self._processed)

    def _processed(self, scores: Row) -> Distribution:
        try:
            return process(scores, self._params)
        except EngineError:
            likeliest(scores)  # says that nothing is left, where that is the reason
            raise
