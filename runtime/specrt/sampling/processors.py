"""Logits processors: edits of a row of scores; the same as transformers' and vLLM's.

Each remembers what it needs of the text so far, and takes drafted tokens before a row as history of
that row alone: a score comes out the same, to the bit, whether a token before it is committed yet
or not. All change few scores, whatever the vocabulary, but for `AllowedTokens`,
`Timestamps` and `Custom`.

`PROCESSORS`, at the end, is the table of them: a new processor is one entry there, and its option a
field of `SamplingParams` or, registered from another package, a key of `extra_args`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError, did_you_mean
from specrt.params import Callback, Row, SamplingParams, TimestampRules
from specrt.sampling.grammar import Grammars
from specrt.text.tokenizer import Tokenizer


class TokenCounts:
    """Which tokens there were, and how often; the different ones as an array that grows."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._times = np.empty(64, np.float32)
        self._places: dict[int, int] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
                self._times = np.concatenate([self._times, self._times])
            self._ids[place] = token
            self.counts[token] = self.counts.get(token, 0) + 1
            self._times[place] = self.counts[token]

    @property
    def ids(self) -> NDArray[np.int64]:
        """The different tokens, in the order they came."""
        return self._ids[: len(self._places)]

    @property
    def times(self) -> NDArray[np.float32]:
        """How often each of them came."""
        return self._times[: len(self._places)]


Ids = NDArray[np.int64]

T = TypeVar("T")


class Processor(Protocol):
    """Edits rows of scores; it learns of tokens as they are committed.

    A row of a verify pass comes after tokens that are only drafted: its `path`, which counts as
    history for that row and for no other.
    """

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn of tokens that are now part of the text, in order."""

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """Change scores in place. Shapes: row [V] f32."""


@runtime_checkable
class SparseProcessor(Processor, Protocol):
    """A processor that changes few scores, and knows which."""

    def touches(self, path: Sequence[int]) -> Ids:
        """Return all tokens, less the path's whose scores `edit` may change."""


@runtime_checkable
class MaskProcessor(Processor, Protocol):
    """A processor that can make its edit while it copies a row."""

    def copy(self, row: Row, into: Row) -> None:
        """Write an edited row into another. Shapes: both [V] f32, or shorter."""


@runtime_checkable
class ForcingProcessor(Processor, Protocol):
    """A processor that may leave one way to go on, and knows its tokens."""

    def forced(self) -> list[int]:
        """Return the tokens that must follow the committed ones."""


class LogitsProcessors:
    """The processors of one request, in order, and how far they know the text."""

    def __init__(self, processors: Sequence[Processor], vocabulary: int) -> None:
        self._processors = processors
        sparse = [p for p in processors if isinstance(p, SparseProcessor)]
        self._sparse = sparse if sparse and len(sparse) == len(processors) else None
        first, last = (processors[0], processors[-1]) if processors else (None, None)
        self._mask = first if isinstance(first, MaskProcessor) else None
        self._forcing = last if isinstance(last, ForcingProcessor) else None
        self._edited = np.empty(vocabulary, np.float32)
        self._known = 0

    @property
    def forces(self) -> bool:
        """Whether the last of them may know what comes next."""
        return self._forcing is not None

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that must follow the committed ones, as far as one way leads on."""
        self.learn(tokens)
        return [] if self._forcing is None else self._forcing.forced()

    def learn(self, tokens: Sequence[int]) -> None:
        """Take over what was committed since the last time."""
        if self._known < len(tokens):
            new = tokens[self._known :]
            for processor in self._processors:
                processor.commit(new)
            self._known = len(tokens)

    def edit(self, row: Row, path: Sequence[int]) -> Row:
        """Return a row with every edit, in memory that the next call overwrites.

        Shapes: row [V] f32, or shorter, of a draft that knows fewer tokens.
        """
        edited, rest = self._edited, self._processors
        if self._mask is None:
            edited[: len(row)] = row
        else:
            self._mask.copy(row, edited[: len(row)])
            rest = rest[1:]
        edited[len(row) :] = -np.inf
        for processor in rest:
            processor.edit(edited, path)
        return edited[: len(row)]

    def read(self, row: Row, path: Sequence[int], take: Callable[[Row], T]) -> T:
        """Return what `take` returns for a row with every edit; it must not keep the row.

        Where all processors are sparse the row itself is edited, and then restored: a copy of a
        large vocabulary takes longer than all edits.
        Shapes: as for `edit`.
        """
        if self._sparse is None or len(row) < len(self._edited) or not row.flags.writeable:
            return take(self.edit(row, path))
        touched = [processor.touches(path) for processor in self._sparse]
        ids = np.concatenate((*touched, path) if path else touched)
        scores = row[ids]
        try:
            for processor in self._sparse:
                processor.edit(row, path)
            return take(row)
        finally:
            row[ids] = scores


def likeliest(row: Row) -> int:
    """Return the token of the largest score.

    Raises: RequestError where every token was ruled out.
    """
    best = int(row.argmax())
    if not row[best] > -np.inf:  # NaN included
        raise RequestError(
            "no token is left that the request allows here; loosen allowed_token_ids, bad_words, "
            "bad_words_ids, suppress_tokens, begin_suppress_tokens, no_repeat_ngram_size, "
            "forced_bos_token_id, forced_eos_token_id, min_tokens, its constraint or its own "
            "processors"
        )
    return best


class ProcessorContext(NamedTuple):
    """The request of a processor, besides the value of its own option."""

    params: SamplingParams
    tokenizer: Tokenizer | None
    """Needed to spell words."""
    ends: Collection[int]
    """The model's own end tokens."""
    vocabulary: int
    emitted: int | None = None
    """Tokens that the output has at its limit; None where that is not known."""

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        """Refuse token ids that the model does not score.

        Raises: RequestError.
        """
        wrong = [token for token in ids if not 0 <= token < self.vocabulary]
        if wrong:
            raise RequestError(
                f"{name} holds {wrong[0]}; expected ids of the vocabulary, 0 to "
                f"{self.vocabulary - 1}"
            )


_NEVER = np.float32(-np.inf)

_NO_IDS: Ids = np.empty(0, np.int64)


class AllowedTokens:
    """Rules out all tokens but some."""

    @classmethod
    def of(cls, ids: Sequence[int], context: ProcessorContext) -> AllowedTokens:
        """See `PROCESSORS`."""
        context.check_ids("allowed_token_ids", ids)
        return cls(ids)

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int64)
        self._most = np.empty(0, np.float32)

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        self.copy(row, row)

    def copy(self, row: Row, into: Row) -> None:
        """See `MaskProcessor`."""
        if len(self._most) < len(row):
            self._most = np.full(max(len(row), self._ids.max() + 1), _NEVER)
            self._most[self._ids] = np.inf
        # Assigning through a mask takes 30 times as long.
        np.minimum(row, self._most[: len(row)], out=into)


class BadWords:
    """Rules out the tokens that complete certain sequences."""

    @classmethod
    def of(cls, words: Sequence[str], context: ProcessorContext) -> BadWords | None:
        """See `PROCESSORS`; a word is spelled as it begins a text, after a space, and amid one."""
        if not words:
            return None
        tokenizer = context.tokenizer
        assert tokenizer is not None, "words are spelled in tokens"
        sequences: list[list[int]] = []
        for word in words:
            texts = ((word, 0), (f" {word}", 0), (f" {word}", 1))
            spelled = [tokenizer.encode(t, special=False, behind=b) for t, b in texts]
            sequences += [ids for at, ids in enumerate(spelled) if ids and ids not in spelled[:at]]
        known = [ids for ids in sequences if max(ids) < context.vocabulary]
        return cls(known) if known else None

    @classmethod
    def of_ids(
        cls, sequences: Sequence[Sequence[int]], context: ProcessorContext
    ) -> BadWords | None:
        """See `PROCESSORS`; an end token alone is not a bad word, as transformers has it."""
        context.check_ids("bad_words_ids", [token for ids in sequences for token in ids])
        kept = [ids for ids in sequences if len(ids) > 1 or ids[0] not in context.ends]
        return cls(kept) if kept else None

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in sequences]
        self._reach = max(map(len, self._words)) - 1
        self._ids = np.array([word[-1] for word in self._words], np.int64)
        self._last: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember the latest tokens."""
        self._last = [*self._last, *tokens][-self._reach :] if self._reach else []

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        seen = (*self._last, *path)
        for *before, last in self._words:
            if not before or tuple(before) == seen[-len(before) :]:
                row[last] = _NEVER

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._ids


class OutputLength:
    """How many tokens were emitted; what is committed first is the prompt."""

    def __init__(self) -> None:
        self._count: int | None = None

    def commit(self, tokens: Sequence[int]) -> None:
        """Count tokens that are now part of the text."""
        self._count = 0 if self._count is None else self._count + len(tokens)

    def behind(self, path: Sequence[int]) -> int:
        """Return how many tokens the output has after a path."""
        return (self._count or 0) + len(path)


class MinTokens:
    """Rules out end tokens before the output has so many tokens."""

    @classmethod
    def of(cls, least: int, context: ProcessorContext) -> MinTokens | None:
        """See `PROCESSORS`."""
        ends = {*context.params.stop_token_ids, *context.ends}
        return cls(least, [e for e in ends if e < context.vocabulary]) if least and ends else None

    def __init__(self, least: int, ends: Sequence[int]) -> None:
        self._left = least
        self._ends = np.array(sorted(ends), np.int64)
        self._begun = False

    def commit(self, tokens: Sequence[int]) -> None:
        """Count what was emitted; the first tokens are the prompt."""
        self._left -= len(tokens) if self._begun else 0
        self._begun = True

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        if len(path) < self._left:
            row[self._ends] = _NEVER

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._ends


class SuppressTokens:
    """Rules out some tokens; with `places`, only where the output has so many tokens.

    Source: Radford et al. 2022, arXiv:2212.04356, for speech without words for sounds.
    """

    @classmethod
    def of(cls, ids: Sequence[int], context: ProcessorContext) -> SuppressTokens | None:
        """See `PROCESSORS`."""
        context.check_ids("suppress_tokens", ids)
        return cls(ids) if ids else None

    @classmethod
    def at_begin(cls, ids: Sequence[int], context: ProcessorContext) -> SuppressTokens | None:
        """See `PROCESSORS`; after a forced first token the next one is the first of its own."""
        context.check_ids("begin_suppress_tokens", ids)
        first = 1 if context.params.forced_bos_token_id else 0
        return cls(ids, first) if ids else None

    def __init__(self, ids: Sequence[int], only_at: int | None = None) -> None:
        self._ids = np.array(sorted(set(ids)), np.int64)
        self._only_at = only_at
        self._output = OutputLength()

    def commit(self, tokens: Sequence[int]) -> None:
        """Count what was emitted."""
        self._output.commit(tokens)

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        row[self.touches(path)] = _NEVER

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        here = self._only_at is None or self._output.behind(path) == self._only_at
        return self._ids if here else _NO_IDS


class ForcedTokens:
    """Leaves only some tokens where the output has so many; all scores elsewhere are as they were.

    What is left scores 0, as transformers has it.
    """

    @classmethod
    def as_first(cls, ids: Sequence[int], context: ProcessorContext) -> ForcedTokens | None:
        """See `PROCESSORS`."""
        context.check_ids("forced_bos_token_id", ids)
        return cls(ids, 0, context.vocabulary) if ids else None

    @classmethod
    def as_last(cls, ids: Sequence[int], context: ProcessorContext) -> ForcedTokens | None:
        """See `PROCESSORS`."""
        context.check_ids("forced_eos_token_id", ids)
        if not ids or context.emitted is None:
            return None
        return cls(ids, context.emitted - 1, context.vocabulary)

    def __init__(self, ids: Sequence[int], only_at: int, vocabulary: int) -> None:
        self._ids = np.array(ids, np.int64)
        self._only_at = only_at
        self._all = np.arange(vocabulary)
        self._output = OutputLength()

    def commit(self, tokens: Sequence[int]) -> None:
        """Count what was emitted."""
        self._output.commit(tokens)

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        if self._output.behind(path) == self._only_at:
            row[:] = _NEVER
            row[self._ids] = 0.0

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._all if self._output.behind(path) == self._only_at else _NO_IDS


class LogitBias:
    """Adds to the scores of some tokens."""

    @classmethod
    def of(cls, bias: Mapping[int, float], context: ProcessorContext) -> LogitBias | None:
        """See `PROCESSORS`."""
        context.check_ids("logit_bias", bias)
        return cls(bias) if bias else None

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.array(list(bias), np.int64)
        self._added = np.array(list(bias.values()), np.float32)

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        row[self._ids] += self._added

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._ids


class RepetitionPenalty:
    """Divides scores above 0 of tokens in prompt or output, and multiplies those below.

    Source: Keskar et al. 2019, arXiv:1909.05858.
    """

    @classmethod
    def of(cls, penalty: float, context: ProcessorContext) -> RepetitionPenalty | None:
        """See `PROCESSORS`."""
        return None if penalty == 1.0 else cls(penalty)

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)
        # The lesser of both is the divided one above 0, and the multiplied one below.
        self._harder = np.minimum if penalty >= 1.0 else np.maximum
        self._seen = TokenCounts()

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember which tokens there were."""
        self._seen.add(tokens)

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        ids = self._seen.ids
        ids = np.concatenate((ids, path)) if path else ids  # twice the same score does no harm
        scores = row[ids]
        with np.errstate(over="ignore"):  # what was as good as ruled out is so now
            row[ids] = self._harder(scores / self._penalty, scores * self._penalty)

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._seen.ids


class OutputPenalties:
    """Takes from the scores of tokens of the output: once each, and once each time.

    As vLLM and OpenAI define presence and frequency penalties; the prompt does not count.
    """

    @classmethod
    def of(cls, presence: float, context: ProcessorContext) -> OutputPenalties | None:
        """See `PROCESSORS`."""
        frequency = context.params.frequency_penalty
        return cls(presence, frequency) if presence or frequency else None

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._seen = TokenCounts()
        self._taken = np.empty(0, np.float32)
        self._begun = False

    def commit(self, tokens: Sequence[int]) -> None:
        """Count what was emitted; the first tokens are the prompt."""
        if self._begun:
            self._seen.add(tokens)
            self._taken = self._presence + self._frequency * self._seen.times
        self._begun = True

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        ids, taken = self._seen.ids, self._taken
        if path:
            counts = self._seen.counts
            times = [counts.get(token, 0) + path.count(token) for token in path]
            more = self._presence + self._frequency * np.array(times, np.float32)
            # Of a token that is there twice the last one holds.
            ids, taken = np.concatenate((ids, path)), np.concatenate((taken, more))
        row[ids] = row[ids] - taken

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._seen.ids


class NoRepeatNgram:
    """Rules out the tokens that would repeat n tokens in a row.

    Source: Paulus et al. 2017, arXiv:1705.04304.
    """

    @classmethod
    def of(cls, size: int, context: ProcessorContext) -> NoRepeatNgram | None:
        """See `PROCESSORS`."""
        return cls(size) if size else None

    def __init__(self, size: int) -> None:
        self._size = size
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._last: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember what followed each run of tokens."""
        for begin, token in _runs(self._last, tokens, self._size):
            self._after.setdefault(begin, []).append(token)
        self._last = self._latest(tokens)

    def _latest(self, tokens: Sequence[int]) -> list[int]:
        return [*self._last, *tokens][-(self._size - 1) :] if self._size > 1 else []

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        now = tuple(self._latest(path))
        if len(now) < self._size - 1:
            return
        banned = self._after.get(now)
        if banned is not None:
            row[banned] = _NEVER
        for begin, token in _runs(self._last, path, self._size):
            if begin == now:
                row[token] = _NEVER

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return np.array(self._after.get(tuple(self._latest(path)), ()), np.int64)


def _runs(
    before: Sequence[int], tokens: Sequence[int], size: int
) -> list[tuple[tuple[int, ...], int]]:
    """Return, for each new token that ends a run of `size`, what comes before it and itself."""
    text = [*before, *tokens]
    ends = range(len(before), len(text))
    return [(tuple(text[e - size + 1 : e]), text[e]) for e in ends if e >= size - 1]


class Timestamps:
    """Lets timestamps of speech come in pairs that rise, the first of them soon.

    Where all timestamps together are more probable than the likeliest text, no text comes.
    Source: Radford et al. 2022, arXiv:2212.04356, sections 2.3 and 4.5.
    """

    @classmethod
    def of(cls, rules: TimestampRules, context: ProcessorContext) -> Timestamps:
        """See `PROCESSORS`."""
        context.check_ids("timestamp_rules", rules[:2])
        return cls(rules)

    def __init__(self, rules: TimestampRules) -> None:
        self._begin, self._end, self._most = rules
        self._begun = False
        self._last: list[int] = []
        """The latest two tokens of the output."""
        self._latest: int | None = None
        """The latest timestamp."""

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember the latest tokens; the first ones are the prompt."""
        if self._begun:
            self._latest = self._latest_in(tokens)
            self._last = [*self._last, *tokens][-2:]
        self._begun = True

    def _latest_in(self, tokens: Sequence[int]) -> int | None:
        return next((t for t in reversed(tokens) if t >= self._begin), self._latest)

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        begin, text, latest = self._begin, [*self._last, *path], self._latest_in(path)
        ends = bool(text) and text[-1] >= begin
        single = ends and len(text) > 1 and text[-2] < begin
        row[begin - 1] = _NEVER
        if single:
            row[: self._end] = _NEVER
        elif ends:
            row[begin:] = _NEVER
        if latest is not None:
            row[begin : latest if single else latest + 1] = _NEVER
        if not text:
            row[:begin] = _NEVER
            if self._most is not None:
                row[begin + self._most + 1 :] = _NEVER
        if _log_sum(row[begin:]) > row[:begin].max():
            row[:begin] = _NEVER


def _log_sum(scores: Row) -> float:
    """Return the logarithm of the sum of what scores are the logarithms of."""
    most = scores.max()
    if not most > -np.inf:
        return -np.inf
    return float(most) + float(np.log(np.exp((scores - most).astype(np.float64)).sum()))


class Custom:
    """Applies functions of the caller's, with NumPy set as it is where the request is made."""

    def __init__(self, *functions: Callback) -> None:
        self._functions = functions
        self._tokens: list[int] = []
        self._numpy: dict[str, Any] = {**np.geterr(), "call": np.geterrcall()}

    @classmethod
    def of(cls, functions: Sequence[Callback], context: ProcessorContext) -> Custom | None:
        """See `PROCESSORS`."""
        return cls(*functions) if functions else None

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember the text."""
        self._tokens += tokens

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`.

        Raises: RequestError for a result that is not a row of scores.
        """
        for function in self._functions:
            row[:] = self._scores(function, row, path)

    def _scores(self, function: Callback, row: Row, path: Sequence[int]) -> Row:
        name = getattr(function, "__name__", type(function).__name__)
        try:
            with np.errstate(**self._numpy):
                result = function([*self._tokens, *path], row.copy())
            with np.errstate(over="ignore"):
                scores = np.asarray(result).astype(np.float32)
        except Exception as error:  # whatever the caller's function raises
            raise RequestError(f"the logits processor {name} failed: {error!r}") from error
        if scores.shape != row.shape:
            raise RequestError(
                f"the logits processor {name} returned shape {list(scores.shape)}; expected "
                f"{list(row.shape)}, one score for each token"
            )
        if not scores.max() < np.inf:
            raise RequestError(
                f"the logits processor {name} returned NaN or infinity; expected scores, and -inf "
                "for what must not come"
            )
        return scores


ProcessorMaker = Callable[[Any, ProcessorContext], Processor | None]

PROCESSORS: dict[str, ProcessorMaker] = {
    "allowed_token_ids": AllowedTokens.of,
    "bad_words": BadWords.of,
    "bad_words_ids": BadWords.of_ids,
    "suppress_tokens": SuppressTokens.of,
    "begin_suppress_tokens": SuppressTokens.at_begin,
    "min_tokens": MinTokens.of,
    "logit_bias": LogitBias.of,
    "logits_processors": Custom.of,
    "repetition_penalty": RepetitionPenalty.of,
    "presence_penalty": OutputPenalties.of,
    "no_repeat_ngram_size": NoRepeatNgram.of,
    "timestamp_rules": Timestamps.of,
    "forced_bos_token_id": ForcedTokens.as_first,
    "forced_eos_token_id": ForcedTokens.as_last,
}
"""By the option of each, in the order they are applied, which is vLLM's; what is forced comes last.

An entry is called with the option's value, where that is not None, and returns None where the value
has no effect. The option is a field of `SamplingParams`, or else a key of `extra_args`.
"""


def build_processors(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    ends: Collection[int],
    vocabulary: int,
    grammars: Grammars | None = None,
    emitted: int | None = None,
    salt: str = "",
) -> LogitsProcessors | None:
    """Return the processors of a request; None without any.

    `emitted` is how many tokens its output has at its limit.

    Only bad words and a constraint need a tokenizer. `grammars` holds what was compiled for other
    requests, for `salt` see there. A constraint comes last: no other processor allows again what it
    ruled out.
    Raises: RequestError for an unknown option, unknown token ids, and a constraint that cannot be
        enforced.
    """
    context = ProcessorContext(params, tokenizer, ends, vocabulary, emitted)
    context.check_ids("stop_token_ids", params.stop_token_ids)
    options = {field.name: getattr(params, field.name) for field in fields(params)}
    for name, value in params.extra_args.items():
        if name not in PROCESSORS or name in options:
            extra = [known for known in PROCESSORS if known not in options]
            raise RequestError(f"extra_args has {name!r}{did_you_mean(name, extra)}")
        options[name] = value
    values = ((make, options.get(name)) for name, make in PROCESSORS.items())
    optional = (make(value, context) for make, value in values if value is not None)
    processors = [processor for processor in optional if processor is not None]
    constraint = params.constraint
    if constraint is not None:
        if grammars is None:
            assert tokenizer is not None, "a constraint is enforced in tokens"
            grammars = Grammars(tokenizer, ends, vocabulary)
        processors.append(grammars.processor(constraint, params.stop_token_ids, salt))
    return LogitsProcessors(processors, vocabulary) if processors else None
