"""What a terminal shows and reads: summaries, colours, bars, Ctrl-C, typed lines."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

from specrt.completion import Chunk, Completion, SpeculationStats
from specrt.errors import RequestError
from specrt.text import Tokenizer, decode_utf8


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


_GREEN, _RESET = "\x1b[32m", "\x1b[0m"

LEGEND = f"{_GREEN}green{_RESET}: drafted and accepted; plain: the target's own"


class TextSpan(NamedTuple):
    """A part of a text, and whether it was drafted."""

    text: str
    drafted: bool


class Painter:
    """Tells which part of an answer came from which token.

    A character split over tokens belongs to the one that completes it. Spans of a chunk, joined,
    are its text: what a stop string holds back is told when it is shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._waiting: deque[tuple[int, bool]] = deque()
        """(characters, whether drafted) of tokens whose text was not shown yet."""

    def spans(self, chunk: Chunk) -> list[TextSpan]:
        """Return the text of a chunk, token by token."""
        for number, token in enumerate(chunk.token_ids):
            length = len(self._detokenizer.push([token]))
            if length:
                self._waiting.append((length, number < chunk.accepted))
        found = []
        text = chunk.text
        while text and self._waiting:
            length, drafted = self._waiting.popleft()
            if length > len(text):
                self._waiting.appendleft((length - len(text), drafted))
            found.append(TextSpan(text[:length], drafted))
            text = text[length:]
        return [*found, TextSpan(text, False)] if text else found

    def paint(self, chunk: Chunk) -> str:
        """Return the text of a chunk with what was drafted in green."""
        shown = ""
        for drafted, spans in groupby(self.spans(chunk), lambda span: span.drafted):
            text = "".join(span.text for span in spans)
            shown += f"{_GREEN}{text}{_RESET}" if drafted else text
        return shown


_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """Return a bar over a share of a width, to the eighth of a character."""
    whole, part = divmod(round(min(1.0, max(0.0, share)) * width * 8), 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")


def chart(rows: Sequence[tuple[str, str, float]], width: int = 48) -> str:
    """Return a line for each (group, name, value), bars from 0 to the largest value.

    The group is written beside its first row.
    """
    longest = max((value for _, _, value in rows), default=0.0) or 1.0
    groups = max((len(group) for group, _, _ in rows), default=0)
    names = max((len(name) for _, name, _ in rows), default=0)
    lines = []
    for group, members in groupby(rows, key=lambda row: row[0]):
        for number, (_, name, value) in enumerate(members):
            head = group if number == 0 else ""
            drawn = bar(value / longest, width)
            lines.append(f"{head:{groups}}  {name:>{names}} {drawn:{width}} {value:.0f}")
    return "\n".join(lines)


class Interruption:
    """Notes the first Ctrl-C, so that a round is never cut in the middle; the second one raises.

    Does nothing when it is not `wanted`, and outside the main thread, where no signal arrives.
    """

    def __init__(self, wanted: bool) -> None:
        self.came = False
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if self._wanted:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, _: int, __: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


PROMPT, MORE = ">>> ", "... "

_QUOTES = '"""'

Read = Callable[[str], str]
"""Shows a prompt and returns a line; raises EOFError at the end."""


class Typed(NamedTuple):
    """A message or a command."""

    text: str
    command: bool = False


def next_typed(read: Read) -> Typed:
    r"""Read a message or a command.

    A line that ends in a backslash goes on in the next; what begins with three quotes goes on to
    the next three, and is a message whatever it begins with.
    Raises: EOFError at the end, RequestError for what cannot be read.
    """
    line = read(PROMPT)
    if line.startswith(_QUOTES):
        return Typed(_quoted(line[len(_QUOTES) :], read))
    if line.startswith("/"):
        return Typed(line, command=True)
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{_more(read, 'a backslash')}"
    return Typed(line)


def _quoted(text: str, read: Read) -> str:
    while not text.endswith(_QUOTES):
        text += "\n" + _more(read, _QUOTES)
    return text[: -len(_QUOTES)]


def _more(read: Read, opened: str) -> str:
    try:
        return read(MORE)
    except EOFError:
        raise RequestError(f"the input ended in a message that {opened} keeps open") from None


def terminal_reader() -> Read:
    """Return what reads lines from a person, who may edit them and call earlier ones back."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is there)
    shown = sys.stdout.isatty()

    def read(prompt: str) -> str:
        try:
            return input(prompt if shown else "")
        except UnicodeDecodeError as error:
            raise RequestError(f"the line is not UTF-8: {error.reason}") from None

    return read


def pipe_reader() -> Read:
    """Return what reads lines from standard input, showing no prompt."""
    number = 0

    def read(_: str) -> str:
        nonlocal number
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        number += 1
        text = decode_utf8(line, f"line {number} of standard input")
        return text.removesuffix("\n").removesuffix("\r")

    return read
