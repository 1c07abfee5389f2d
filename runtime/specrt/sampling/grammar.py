"""Constrained decoding: rows of scores follow a grammar, along the drafted path."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specrt.constraints import Constraint
from specrt.errors import RequestError, one_line
from specrt.params import Row
from specrt.sampling.processors import LogitsProcessors, Processor
from specrt.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_KEPT = 32
"""Compiled constraints kept; the next request with the same one copies it, which takes 1 us."""

_SPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,2}"
"""Between the parts of a JSON text: a line end and what indents the next line, or a few blanks.
Small models that may write any blanks write nothing else in the end."""


class Grammars:
    """Compiles the constraints of requests for one tokenizer and its end tokens."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._ends = sorted(end for end in ends if end < vocabulary)
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def processor(self, structure: Constraint, stops: Collection[int] = ()) -> GrammarProcessor:
        """Return what keeps one completion to a constraint.

        `stops` end the text besides the model's own ends: special tokens among them may come where
        the grammar is complete, as those may.
        Raises: RequestError with the compiler's reason.
        """
        if not self._ends:
            raise RequestError(
                f"{structure.kind} was given, and this model has no end token to end its text with"
            )
        special = self._tokenizer.special
        ends = {*self._ends, *(s for s in stops if s in special and s < self._vocabulary)}
        return GrammarProcessor(self._matcher(structure), sorted(ends), self._vocabulary)

    def _matcher(self, structure: Constraint) -> LLMatcher:
        with self._lock:
            kept = self._compiled
            made = kept.get(structure) or self._compile(structure)
            kept[structure] = made
            kept.move_to_end(structure)
            while len(kept) > _KEPT:
                kept.popitem(last=False)
            return made

    def _compile(self, structure: Constraint) -> LLMatcher:
        reader = self._reader
        from llguidance import LLMatcher

        grammar = _SOURCES[structure.kind](structure.text)
        made = LLMatcher(reader, grammar, log_level=0)
        warnings = made.get_grammar_warnings()
        if made.is_error() or warnings:
            reason = made.get_error() if made.is_error() else warnings[0]
            raise _refused(structure, reason)
        trial = made.deep_copy()
        allows = any(trial.compute_bitmask())
        if trial.try_consume_tokens(trial.compute_ff_tokens()):
            trial.compute_bitmask()
        if trial.is_error() or not allows:
            raise _refused(structure, trial.get_error() or "it admits nothing")
        return made

    @cached_property
    def _reader(self) -> LLTokenizer:
        """The vocabulary as the compiler wants it: once for each bundle, it takes a while."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                "structured output needs llguidance, which is not installed here; install it with "
                "`pip install 'specrt[structured]'`"
            ) from None
        try:
            return LLTokenizer(self._tokenizer.to_json(), self._vocabulary, self._ends)
        except ValueError as error:
            raise RequestError(
                f"this bundle's tokenizer cannot keep to a structure: {one_line(str(error))}"
            ) from None


ESCAPES = 'nrbtf\\"'
"""Characters that JSON strings may have behind a backslash."""


def _json(text: str) -> str:
    from llguidance import LLMatcher

    try:
        return str(
            LLMatcher.grammar_from_json_schema(
                "{}" if text == "true" else text,
                overrides={
                    "lenient": False,
                    "coerce_one_of": False,
                    "whitespace_pattern": _SPACE,
                    # A name that is spelt \u0061 would go past the schema of "a".
                    "json_allowed_escapes": ESCAPES,
                },
            )
        )
    except ValueError as error:
        raise RequestError(f"json_schema cannot be enforced: {one_line(str(error))}") from None


def _regex(text: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(text))


def _lark(text: str) -> str:
    """Return a Lark grammar's definition; one with `::=` is translated from GBNF first."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text))
    except Exception as error:  # the translator raises bare Exception
        raise RequestError(f"grammar cannot be read: {one_line(str(error))}") from None


_SOURCES = {"json_schema": _json, "regex": _regex, "choice": _regex, "grammar": _lark}


def _refused(structure: Constraint, message: str) -> RequestError:
    advice = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
    reason = one_line(message).replace(advice, "write anyOf where alternatives may overlap")
    reason = reason.replace("NoExtensionBias", "it admits nothing")
    return RequestError(f"{structure.kind} cannot be enforced: {reason}")


_BITS = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.float32(np.inf), -np.inf)

_LIMITS = _BITS.astype(np.float32)
"""For each byte of a mask the most that each of its eight tokens may score."""


class GrammarProcessor:
    """Rules out tokens that cannot follow, in a row behind any drafted path.

    The matcher stands behind what was committed and some of a path, and moves to the path asked
    for: back to where both part, then on. Rows of a pass extend each other's paths, and the draft
    was on the same path before the target is, so that limits once found are kept for the round.

    A row behind the end of the text, or behind tokens that the grammar refuses, is left as it is:
    nobody will look at it.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], vocabulary: int) -> None:
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._ends = frozenset(ends)
        self._end_ids = np.array(ends, np.int64)
        self._vocabulary = vocabulary
        self._mask = np.empty((vocabulary + 31) // 32 * 4, np.uint8)
        self._address = self._mask.ctypes.data
        self._text: list[int] = []
        self._ahead: list[int] = []
        """What the matcher read of the latest path."""
        self._limits: list[Row] = []
        """The limits behind each of the first tokens of that path, kept in the first `_made`."""
        self._made: set[int] = set()
        self._begun = False
        self._over = False

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that are part of the text now; the first ones are the prompt."""
        if not self._begun or self._over:
            self._begun = True
            return
        self._over = not self._follow(tokens)
        self._text += tokens
        self._ahead.clear()
        self._made.clear()

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`.

        Raises: RequestError where the grammar has become too complex to go on.
        """
        if self._over or not self._follow(path):
            return
        np.minimum(row, self._limits_behind(len(path)), out=row)

    def forced(self) -> list[int]:
        """Return the tokens that follow what was committed, where there is one way to go on."""
        if self._over or not self._follow(()):
            return []
        return list(self._matcher.compute_ff_tokens())

    def _follow(self, path: Sequence[int]) -> bool:
        """Move the matcher behind a path; False where it ends the text or leaves the grammar."""
        if not self._ends.isdisjoint(path):
            return False
        ahead, matcher = self._ahead, self._matcher
        shared = _shared(ahead, path)
        if shared < len(ahead):
            matcher.rollback(len(ahead) - shared)
            del ahead[shared:]
            self._made = {depth for depth in self._made if depth <= shared}
        if shared < len(path):
            read = matcher.try_consume_tokens(list(path[shared:]))
            ahead += path[shared : shared + read]
            if read < len(path) - shared and matcher.is_error():
                raise self._broken()
        return len(ahead) == len(path)

    def _limits_behind(self, depth: int) -> Row:
        """Return the most that each token may score behind a path that was followed."""
        while len(self._limits) <= depth:
            self._limits.append(np.empty(len(self._mask) * 8, np.float32))
        limits = self._limits[depth]
        if depth not in self._made:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
            if self._matcher.is_error():
                raise self._broken()
            np.take(_LIMITS, self._mask, axis=0, out=limits.reshape(-1, 8), mode="clip")
            # An end token is one only where the text may end, whatever else the grammar says.
            limits[self._end_ids] = np.inf if self._matcher.is_accepting() else -np.inf
            self._made.add(depth)
        return limits[: self._vocabulary]

    def _broken(self) -> RequestError:
        """Return why the matcher failed, and put one in its place: it never recovers by itself."""
        reason = one_line(self._matcher.get_error())
        self._matcher = self._fresh.deep_copy()
        self._matcher.try_consume_tokens(self._text)
        self._ahead.clear()
        self._made.clear()
        return RequestError(f"the structure became too complex to follow: {reason}")


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many first tokens two paths share."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))


class GrammarRules(LogitsProcessors):
    """Rules that end with a grammar, which may know what comes next."""

    def __init__(
        self, processors: Sequence[Processor], grammar: GrammarProcessor, vocabulary: int
    ) -> None:
        super().__init__([*processors, grammar], vocabulary)
        self._grammar = grammar

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that must follow the committed ones, as far as one way leads on."""
        self.learn(tokens)
        return self._grammar.forced()
