"""From rounds to chunks: cut at ends and stop strings, keep counts and times."""

from __future__ import annotations

from specrt.completion import Chunk, Completion
from specrt.logprobs import Entry, Ranked
from specrt.params import SamplingParams
from specrt.round import Round
from specrt.text import StopStrings, Tokenizer


class Reader:
    """Turns rounds into chunks: cuts at ends and stop strings, keeps counts and times."""

    def __init__(
        self,
        completion: Completion,
        params: SamplingParams,
        eos: frozenset[int],
        tokenizer: Tokenizer,
    ) -> None:
        self._completion = completion
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self._eos = eos
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(params.stop)
        self._one_by_one = bool(params.stop) or tokenizer.falls_back_to_bytes
        self._decode = tokenizer.decode
        self._pieces: dict[int, str] = {}
        if params.logprobs is not None:
            completion.logprobs = []

    def take(self, round_: Round, now_ns: int) -> Chunk:
        """Return what a round delivers; `finish_reason` is set where it ended the text."""
        done = self._completion
        kept, text = self._take(round_.tokens)
        if done.timings.arrivals:  # the first round is the prefill's
            done.speculation.add(round_, len(kept))
        done.timings.arrivals.append((now_ns, len(kept)))
        done.token_ids.extend(kept)
        done.text += text
        accepted = min(round_.accepted, len(kept))
        if round_.prompt_logprobs is not None:
            done.prompt_logprobs = [None, *self._entries(round_.prompt_logprobs)]
        if done.logprobs is None:
            return Chunk(text, kept, accepted)
        assert round_.logprobs is not None, "a target tells what it is asked"
        entries = self._entries(round_.logprobs, len(kept))
        done.logprobs += entries
        return Chunk(text, kept, accepted, entries)

    def finish(self) -> Chunk | None:
        """End a text that no end or stop string ended; return what was held back of it."""
        done = self._completion
        done.finish_reason = "length"
        rest, _ = self._show(self._detokenizer.finish())
        rest += self._stops.finish()
        done.text += rest
        if not rest:
            return None
        return Chunk(rest, [], logprobs=None if done.logprobs is None else [])

    def _entries(self, told: Ranked, count: int | None = None) -> list[Entry]:
        """Return what rows say, the first `count` of them, with the texts of their tokens."""
        return told.entries(len(told.ranks) if count is None else count, self._piece)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _take(self, tokens: list[int]) -> tuple[list[int], str]:
        """Return the tokens to deliver and the text that became certain."""
        ended = None
        if not self._ends.isdisjoint(tokens):
            ended = next(i for i, t in enumerate(tokens) if t in self._ends)
        body = tokens if ended is None else tokens[:ended]
        text = ""
        pieces = [[t] for t in body] if self._one_by_one else [body]
        for number, piece in enumerate(pieces):
            shown, stopped = self._show(self._detokenizer.push(piece))
            text += shown
            if stopped:
                return body[: number + 1], text
        if ended is None:
            return tokens, text
        shown, stopped = self._show(self._detokenizer.finish())
        text += shown + ("" if stopped else self._stops.finish())
        if not stopped:
            last = tokens[ended]
            self._end("stop", None if last in self._eos else last)
        return tokens[: ended + 1], text

    def _show(self, text: str) -> tuple[str, str | None]:
        shown, stop = self._stops.push(text)
        if stop is not None:
            self._end("stop", stop)
        return shown, stop

    def _end(self, reason: str, stop: int | str | None) -> None:
        self._completion.finish_reason = reason
        self._completion.stop_reason = stop
