"""How many of the committed tokens the KV buffers of an engine hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrt.engine.protocol import Engine, Output
from specrt.geometry import TAKEN_BACK
from specrt.speculation.round import Pass, Passes

PROMPT_ROWS = 64
"""Most tokens of a prompt that are scored in one pass: a row of scores is a whole vocabulary."""


def scorable_rows(engine: Engine) -> int:
    """Return how many positions one pass of an engine can score."""
    rows: int = getattr(engine, "max_rows", engine.max_width)
    return min(engine.max_width, rows)


class KVCache:
    """An engine, and how many of the committed tokens its KV buffers hold.

    `length` counts a prefix of the committed tokens, which never includes the last one once a
    round is over.
    """

    def __init__(self, engine: Engine, length: int = 0) -> None:
        self.engine = engine
        self.length = length

    def lacks(self, tokens: int) -> int:
        """Return how many of so many committed tokens are to be fed before one is drafted."""
        return tokens - self.length if self.engine.traits.remembers else 1

    def feed(self, tokens: Sequence[int], rows: int) -> Passes[Output]:
        """Append tokens to the cache, in chunks where they are many, and score the last rows.

        The last chunk holds at least `rows` tokens, so that all scored rows come from one pass.
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

    def read(self, text: Sequence[int], take: Callable[[Output, int, int], None]) -> Passes[None]:
        """Feed a text from its beginning and score every token of it.

        `take` is called with the output of each pass, the position of its first row, and how many
        of its first rows an earlier pass scored. All passes have one width, a power of two, because
        engines keep memory for each width; where the text is not a multiple of it the last pass
        begins earlier, which recurrent states do by what a pass takes back.
        """
        engine, self.length = self.engine, 0
        most = min(PROMPT_ROWS, len(text), scorable_rows(engine))
        most = min(most, TAKEN_BACK) if engine.geometry.recurs else most
        width = 1 << most.bit_length() >> 1
        while self.length < len(text):
            start = min(self.length, len(text) - width)
            output = yield Pass(engine, text[start : start + width], start, width)
            take(output, start, self.length - start)
            self.length = start + width
