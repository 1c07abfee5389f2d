"""Memory across requests: texts that were finished, and a drafter that copies from them."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError
from specrt.held_file import check_place, read_file, replacing
from specrt.speculation.gamma import DraftDecision, GammaPolicy
from specrt.speculation.ngram import MOST, NgramDrafter
from specrt.speculation.round import NOTHING, Passes, Proposal, Round

DEFAULT_BYTES = 32 << 20
"""Some 600,000 tokens."""

GRAMS = (4, 8, 16)
"""Lengths of the runs of tokens that are looked up; two tokens alone say little across texts."""

REACH = 64
"""Tokens up to which matches are compared: longer ones are alike."""

_MASK = (1 << 64) - 1
_FACTORS = tuple(pow(0x9E3779B97F4A7C15, 2 * n + 1, 1 << 64) for n in range(GRAMS[-1]))
_FINAL = 0xD6E8FEB86659FD93
_LEAST_BITS = 10
_TEXT_BYTES = 400
"""What Python needs for a text besides its tokens."""

_FORMAT = "specrt text memory 1"


class Recalled(NamedTuple):
    """A place in a text where the last tokens of another one occurred."""

    length: int
    """How many tokens agree, up to `REACH`."""
    end: int
    """Index of the token that followed them."""
    number: int
    """Of the text."""
    text: Sequence[int]


class TextIndex:
    """Where runs of tokens last occurred in the texts of one key.

    A table for each length of run has a place for each hash: the last run with this hash is there,
    and who looks compares the tokens. So nothing is removed when a text goes, and a text is added
    by a few vector operations. Once as many tokens were entered as there are places, all texts that
    are still held are entered again, or those that went would hide them.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Of all texts that are held."""
        self.texts = 0
        self.entered = 0
        """Tokens since the tables were made."""
        self.bits = _LEAST_BITS
        self._tables = _tables(self.bits)

    def bits_for(self, count: int) -> int:
        """Return the size of tables, as a power of two, with `count` tokens more."""
        return max(self.bits, (self.tokens + count - 1).bit_length())

    def resize(self, bits: int, texts: Iterator[tuple[int, array[int]]]) -> None:
        """Make tables of another size and enter the texts again, the newest last."""
        self.bits, self._tables, self.entered = bits, _tables(bits), 0
        for number, text in texts:
            self.enter(number, text)

    def enter(self, number: int, text: array[int]) -> None:
        """Note where the runs of a text end, if another token follows."""
        tokens = np.frombuffer(text, np.int32).astype(np.uint64)
        self.entered += len(tokens)
        count, shift = len(tokens), np.uint64(64 - self.bits)
        sums = np.zeros(count, np.uint64)
        for back in range(1, min(GRAMS[-1], count - 1) + 1):
            sums = sums[1:] + tokens[: count - back] * np.uint64(_FACTORS[back - 1])
            if back in GRAMS:
                places = (sums * np.uint64(_FINAL)) >> shift
                ends = np.arange(back, count, dtype=np.int64)
                self._tables[back][places] = ends | (number << 32)

    def entries(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield what the tables have for the last tokens, the longest run first."""
        last = tokens[: -GRAMS[-1] - 1 : -1]
        sums, total, before = [], 0, 0
        for gram in GRAMS:
            if gram > len(last):
                break
            total += sum(map(mul, last[before:gram], _FACTORS[before:gram]))
            sums.append((gram, total))
            before = gram
        shift = 64 - self.bits
        for gram, total in reversed(sums):
            entry = self._tables[gram].item(((total & _MASK) * _FINAL & _MASK) >> shift)
            if entry:
                yield entry


def _tables(bits: int) -> dict[int, NDArray[np.int64]]:
    return {gram: np.zeros(1 << bits, np.int64) for gram in GRAMS}


def _table_bytes(bits: int) -> int:
    return len(GRAMS) * 8 << bits


def agreeing(first: Sequence[int], end: int, second: Sequence[int]) -> int:
    """Return how many tokens before `end` are the last ones of another text, up to `REACH`."""
    most, count, last = min(end, len(second), REACH), 0, len(second) - 1
    while count < most and first[end - 1 - count] == second[last - count]:
        count += 1
    return count


class TextMemory:
    """The texts that a generator has finished, within a number of bytes.

    The text that was of no use for longest goes first. Each key has texts and tables of its own: a
    text is never drafted into one of another key.

    Threads: any may call.
    """

    def __init__(self, most_bytes: int = DEFAULT_BYTES) -> None:
        if type(most_bytes) is not int or most_bytes < 0:
            raise RequestError(
                f"text_memory_bytes is {most_bytes!r}; expected a whole number, 0 for no memory"
            )
        self._most_bytes = most_bytes
        self._indices: dict[str, TextIndex] = {}
        self._texts: OrderedDict[int, tuple[str, array[int]]] = OrderedDict()
        """By number; the text that was used last is the last one."""
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._newest = 0
        self._bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return how many texts there are."""
        return len(self._texts)

    @property
    def bytes(self) -> int:
        """What texts and tables take."""
        return self._bytes

    def add(self, key: str, tokens: Sequence[int]) -> None:
        """Remember a text; one that does not fit is left out."""
        text = array("i", tokens)
        if len(text) <= GRAMS[0]:
            return
        with self._lock:
            name = key, _digest(text)
            number = self._numbers.get(name)
            if number is not None:
                self._texts.move_to_end(number)
                return
            while self._bytes + self._cost(key, len(text)) > self._most_bytes:
                if not self._texts:
                    return
                self._remove(next(iter(self._texts)))
            self._bytes += self._cost(key, len(text))
            index = self._indices.setdefault(key, TextIndex())
            bits = index.bits_for(len(text))
            if bits > index.bits or index.entered + len(text) > 1 << bits:
                index.resize(bits, ((n, t) for n, (k, t) in self._texts.items() if k == key))
            self._newest = number = self._newest + 1
            index.enter(number, text)
            index.tokens += len(text)
            index.texts += 1
            self._texts[number], self._numbers[name] = (key, text), number

    def recall(self, key: str, tokens: Sequence[int]) -> Recalled | None:
        """Return where the last tokens occurred in the texts of a key, the longest run found."""
        with self._lock:
            index = self._indices.get(key)
            if index is None:
                return None
            for entry in index.entries(tokens):
                number, end = entry >> 32, entry & 0xFFFFFFFF
                held = self._texts.get(number)
                if held is None:
                    continue
                length = agreeing(held[1], end, tokens)
                if length >= GRAMS[0]:
                    return Recalled(length, end, number, held[1])
        return None

    def use(self, number: int) -> None:
        """Note that a text was of use."""
        with self._lock:
            if number in self._texts:
                self._texts.move_to_end(number)

    def forget(self) -> None:
        """Drop all texts."""
        with self._lock:
            self._indices.clear()
            self._texts.clear()
            self._numbers.clear()
            self._bytes = 0

    def save(self, path: Path, vocabulary: str) -> None:
        """Write all texts to a file that only its owner may read, at once or not at all.

        Raises: RequestError.
        """
        with self._lock:
            texts = list(self._texts.values())
        body = b"".join(_little(text) for _, text in texts)
        head = {
            "format": _FORMAT,
            "vocabulary": vocabulary,
            "sha256": hashlib.sha256(body).hexdigest(),
            "texts": [[key, len(text)] for key, text in texts],
        }
        with _told(path, "written"), replacing(path, 0o600) as out:
            out.write(json.dumps(head).encode() + b"\n" + body)

    def read(self, path: Path, vocabulary: str, vocab_size: int) -> None:
        """Add the texts of a file, if there is one; one that could not be saved is refused now.

        Raises: RequestError for a file that is damaged, too large, or of another tokenizer.
        """
        with _told(path, "written"):
            check_place(path)
        if not path.exists():
            return
        size = path.stat().st_size
        if size > self._most_bytes:
            raise RequestError(
                f"{path} has {size} bytes, and the text memory is bounded to {self._most_bytes}; "
                "raise text_memory_bytes, or delete the file"
            )
        with _told(path, "read"):
            data = read_file(path)
        for key, tokens in _read_texts(path, data, vocabulary, vocab_size):
            self.add(key, tokens)

    def _cost(self, key: str, count: int) -> int:
        """Return how many bytes another text takes."""
        index = self._indices.get(key)
        if index is None:
            tables = _table_bytes(TextIndex().bits_for(count))
        else:
            tables = _table_bytes(index.bits_for(count)) - _table_bytes(index.bits)
        return tables + 4 * count + _TEXT_BYTES

    def _remove(self, number: int) -> None:
        key, text = self._texts.pop(number)
        del self._numbers[key, _digest(text)]
        self._bytes -= 4 * len(text) + _TEXT_BYTES
        index = self._indices[key]
        index.tokens -= len(text)
        index.texts -= 1
        if not index.texts:
            self._bytes -= _table_bytes(index.bits)
            del self._indices[key]


@contextmanager
def _told(path: Path, done: str) -> Iterator[None]:
    """Say of a file of a text memory what the system refused.

    Raises: RequestError.
    """
    try:
        yield
    except OSError as error:
        raise RequestError(
            f"{path} cannot be {done}: {error.strerror}; give another file for the text memory"
        ) from None


def _digest(text: array[int]) -> bytes:
    return hashlib.sha256(text).digest()


def _little(text: array[int]) -> bytes:
    return np.frombuffer(text, np.int32).astype("<i4").tobytes()


def _read_texts(
    path: Path, data: bytes, vocabulary: str, vocab_size: int
) -> list[tuple[str, list[int]]]:
    """Return the texts of a file, by their keys.

    Raises: RequestError.
    """
    first, _, body = data.partition(b"\n")
    head: Any = None
    with suppress(ValueError, RecursionError):
        head = json.loads(first)
    if not isinstance(head, dict) or head.get("format") != _FORMAT:
        raise RequestError(f"{path} is not a file of a text memory; delete it, or give another")
    if head.get("vocabulary") != vocabulary:
        raise RequestError(
            f"{path} holds texts of another tokenizer; give each bundle a file of its own"
        )
    damaged = RequestError(f"{path} is damaged; delete it, and the text memory begins anew")
    if head.get("sha256") != hashlib.sha256(body).hexdigest() or len(body) % 4:
        raise damaged
    tokens = np.frombuffer(body, "<i4")
    texts: Any = head.get("texts")
    try:
        pairs = [(key, length) for key, length in texts]
    except (TypeError, ValueError):
        raise damaged from None
    if not all(type(k) is str and type(n) is int and n > 0 for k, n in pairs):
        raise damaged
    inside = not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size)
    if sum(n for _, n in pairs) != len(tokens) or not inside:
        raise damaged
    each = iter(tokens.tolist())
    return [(key, list(islice(each, length))) for key, length in pairs]


class KeyMemory(NamedTuple):
    """The texts that one completion may be drafted from."""

    memory: TextMemory
    key: str

    def recall(self, tokens: Sequence[int]) -> Recalled | None:
        """Return where the last tokens of a text occurred."""
        return self.memory.recall(self.key, tokens)


class MemoryDrafter:
    """Copies from texts of earlier requests where they agree for longer than the text at hand.

    It finds the longest of the last tokens that end one of the runs in memory, at its latest
    occurrence, and drafts what followed there. Where the text at hand agrees for as long, where
    nothing is found, or where `gamma` drops the first token, `lookup` proposes.

    `gamma` is a policy of its own, so that what memory yields is learned apart from what lookup
    yields. Each learns from rounds of its own and from those that neither drafted. Confidences are
    those of lookup.
    Source: Suffix Decoding, arXiv:2411.04975, for memory across requests; the index differs.
    """

    SOURCE = "memory"

    def __init__(self, lookup: NgramDrafter, texts: KeyMemory, gamma: GammaPolicy) -> None:
        self._lookup = lookup
        self._texts = texts
        self._gamma = gamma
        self._drafted = False
        """Whether this round's draft is from memory."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return what memory proposes, else what lookup does."""
        most = min(self._gamma.choose(), room)
        proposal = self._recalled(tokens, most) if most > 0 else NOTHING
        self._drafted = bool(proposal.tokens)
        return proposal if self._drafted else (yield from self._lookup.propose(tokens, room))

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Let the policies learn from the round."""
        if self._drafted or not round_.drafted:
            self._gamma.observe(round_)
        if not self._drafted:
            self._lookup.observe(tokens, round_)

    def _recalled(self, tokens: Sequence[int], most: int) -> Proposal:
        found = self._texts.recall(tokens)
        if found is None:
            return NOTHING
        here = self._lookup.find(tokens)
        if here is not None:
            length = here.length
            if length >= MOST and found.length > length:
                length = agreeing(self._lookup.searched(tokens), here.end, tokens)
            if length >= found.length:
                return NOTHING
        drafted: list[int] = []
        confidences: list[float] = []
        agreed = min(found.length, MOST)
        for token in found.text[found.end : found.end + most]:
            confidence = agreed / (agreed + 2)
            decision = self._gamma.decide(len(drafted) + 1, confidence)
            if decision is DraftDecision.DISCARD:
                break
            drafted.append(token)
            confidences.append(confidence)
            if decision is DraftDecision.STOP:
                break
            agreed += 1
        if not drafted:
            return NOTHING
        self._texts.memory.use(found.number)
        return Proposal(drafted, None, self.SOURCE, confidences)
