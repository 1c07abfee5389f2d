"""Constrained decoding: rows of scores follow a grammar, along the drafted path."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import takewhile
from time import thread_time_ns
from typing import TYPE_CHECKING

import numpy as np

from specrt.constraints import Constraint, schemas_within
from specrt.errors import RequestError, how_to_install, one_line
from specrt.json_schema import compiler_form, escaped_characters, schema_parts
from specrt.params import Row
from specrt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_CACHED = 32
"""Compiled constraints; the next request with the same one copies it, which takes 1 us."""

_MOST_STATES = 50_000
"""Of an expression; each takes 1 to 2 kB."""

_FUEL = 250_000
"""Of the first mask; 100,000 suffice for 150 kB of names, 140 formats or 300 patterns. Without a
bound `a{1000000}` takes seconds before it is refused."""

_FREE_NS, _MASK_NS = 250_000_000, 2_000_000
"""Processor time that a text's grammar may take, and what it may take more for each mask: others'
rows wait for it. Common masks take 5 to 200 us."""

_SPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,2}"
"""Between the parts of a JSON text: a line end and what indents the next line, or a few blanks.
Small models that may write any blanks write nothing else in the end."""


class Grammars:
    """Compiles the constraints of requests for one tokenizer and its end tokens."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._ends = sorted(end for end in ends if end < vocabulary)
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[tuple[str, Constraint], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def processor(
        self, constraint: Constraint, stops: Collection[int] = (), salt: str = ""
    ) -> GrammarProcessor:
        """Return the processor that constrains one completion.

        What was compiled for requests of another `salt` is not used: the time would tell of it.
        `stops` end the text besides the model's own ends: special tokens among them may come where
        the grammar is complete, as those may.
        Raises: RequestError with the compiler's reason.
        """
        if not self._ends:
            raise RequestError(
                f"{constraint.kind} was given, and this model has no end token to end its text with"
            )
        special = self._tokenizer.special
        ends = {*self._ends, *(s for s in stops if s in special and s < self._vocabulary)}
        return GrammarProcessor(self._matcher(constraint, salt), sorted(ends), self._vocabulary)

    def _matcher(self, constraint: Constraint, salt: str = "") -> LLMatcher:
        compiled, key = self._compiled, (salt, constraint)
        with self._lock:
            matcher = compiled.get(key)
        matcher = matcher or self._compile(constraint)  # others need not wait for it
        with self._lock:
            compiled[key] = matcher
            compiled.move_to_end(key)
            while len(compiled) > _CACHED:
                compiled.popitem(last=False)
            return matcher

    def _compile(self, constraint: Constraint) -> LLMatcher:
        reader = self._reader
        from llguidance import LLMatcher, LLParserLimits

        grammar = _SOURCES[constraint.kind](constraint.text)
        limits = LLParserLimits(
            max_lexer_states=_MOST_STATES, initial_lexer_fuel=_FUEL, verbose_errors=False
        )
        matcher = LLMatcher(reader, grammar, log_level=0, limits=limits)
        warnings = matcher.get_grammar_warnings()
        if matcher.is_error() or warnings:
            reason = matcher.get_error() if matcher.is_error() else warnings[0]
            raise _refused(constraint, reason)
        trial = matcher.deep_copy()
        allows = any(trial.compute_bitmask())
        if trial.try_consume_tokens(trial.compute_ff_tokens()):
            trial.compute_bitmask()
        if trial.is_error() or not allows:
            raise _refused(constraint, trial.get_error() or "it admits nothing")
        return matcher

    @cached_property
    def _reader(self) -> LLTokenizer:
        """The vocabulary as the compiler wants it: once for each bundle, it takes a while."""
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise RequestError(
                "structured output needs llguidance, which is not installed here; install it with "
                f"`{how_to_install('structured')}`"
            ) from None
        try:
            # Where tokens have no spelling of their own, the compiler says what it cannot read.
            given = (
                TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocabulary, self._ends[0]))
                if self._tokenizer.spells
                else self._tokenizer.to_json()
            )
            return LLTokenizer(given, self._vocabulary, self._ends)
        except ValueError as error:
            raise RequestError(
                f"this bundle's tokenizer cannot be constrained: {one_line(str(error))}"
            ) from None


class _Vocabulary:
    """A tokenizer as the compiler asks for one.

    Its own reader of `tokenizer.json` makes control tokens of their names in a text that a grammar
    wants, which then has neither the text nor the structure.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.special_token_ids = sorted(tokenizer.special)
        self.tokens = [
            (tokenizer.name(i) or "").encode() if i in tokenizer.special else tokenizer.bytes_of(i)
            for i in range(max(vocabulary, tokenizer.size))
        ]

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of text that a grammar wants."""
        return self._tokenizer.encode_text(text.decode())


_ESCAPES = 'nrbtf\\"'
"""Characters that JSON strings may have after a backslash; u for control characters where a schema
asks for one. A name that is spelt \\u0061 would go past the schema of "a"."""


def _json(text: str) -> str:
    from llguidance import LLMatcher

    try:
        schema = compiler_form(json.loads(text))
        escaped = any(any(escaped_characters(part.schema)) for part in schema_parts(schema))
        return str(
            LLMatcher.grammar_from_json_schema(
                "{}" if schema is True else json.dumps(schema),
                overrides={
                    "lenient": False,
                    "coerce_one_of": False,
                    "whitespace_pattern": _SPACE,
                    "json_allowed_escapes": _ESCAPES + "u" * escaped,
                },
            )
        )
    except ValueError as error:
        raise RequestError(f"json_schema cannot be enforced: {one_line(str(error))}") from None
    except RecursionError:
        raise RequestError("json_schema is nested too deep") from None


def _regex(text: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(text))


def _lark(text: str) -> str:
    """Return a Lark grammar's definition; one with `::=` is translated from GBNF first."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if "::=" in text:
            return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
        for place, schema in reversed([*schemas_within(text)]):
            text = text[: place.start] + json.dumps(compiler_form(schema)) + text[place.stop :]
        return str(LLMatcher.grammar_from_lark(text))
    except RequestError:
        raise
    except Exception as error:  # the translator raises bare Exception
        raise RequestError(f"grammar cannot be read: {one_line(str(error))}") from None


_NOTHING = "NoExtensionBias"
"""The compiler's word for a text that nothing can follow."""

_SOURCES = {"json_schema": _json, "regex": _regex, "choice": _regex, "grammar": _lark}


def _refused(constraint: Constraint, message: str) -> RequestError:
    advice = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
    reason = one_line(message).replace(advice, "write anyOf where alternatives may overlap")
    reason = reason.replace(_NOTHING, "it admits nothing")
    return RequestError(f"{constraint.kind} cannot be enforced: {reason}")


_BITS = np.where((np.arange(256)[:, None] >> np.arange(8)) & 1, np.float32(np.inf), -np.inf)

_LIMITS = _BITS.astype(np.float32)
"""For each byte of a mask the most that each of its eight tokens may score."""


class GrammarProcessor:
    """Rules out tokens that cannot follow, in a row after any drafted path.

    The matcher stands after what was committed and some of a path, and moves to the path of a row:
    back to where both part, then on. Rows of a pass extend each other's paths, and the draft was on
    the same path before the target is, so that limits once computed serve the whole round.

    A row after the end of the text, or after tokens that the grammar refuses, is left as it is:
    no token is taken from it.
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
        """The limits after each of the first tokens of that path, at depths in `_computed`."""
        self._computed: set[int] = set()
        self._begun = False
        self._over = False
        self._masks = 0
        self._spent_ns = 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on after tokens that are part of the text now; the first ones are the prompt.

        Raises: RequestError for a token that the grammar refuses: all after it would be free.
        """
        if not self._begun or self._over:
            self._begun = True
            return
        began_ns = thread_time_ns()
        within = [*takewhile(lambda token: token not in self._ends, tokens)]
        if not self._follow(within):
            raise RequestError(
                f"the text left its constraint at token {tokens[len(self._ahead)]}, after "
                f"{len(self._text) + len(self._ahead)} that it admits; write the constraint in "
                "another way, and report it"
            )
        self._over = len(within) < len(tokens)
        self._spent_ns += thread_time_ns() - began_ns
        self._text += tokens
        self._ahead.clear()
        self._computed.clear()

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`.

        Raises: RequestError where the grammar has become too complex to go on, or takes too long.
        """
        if not self._over:
            began_ns = thread_time_ns()
            limits = self._limits_behind(len(path)) if self._follow(path) else None
            self._spend(began_ns)
            if limits is not None:
                np.minimum(row, limits, out=row)

    def forced(self) -> list[int]:
        """Return the tokens that follow what was committed, where there is one way to go on."""
        if self._over:
            return []
        began_ns = thread_time_ns()
        tokens = list(self._matcher.compute_ff_tokens()) if self._follow(()) else []
        self._spend(began_ns)
        return tokens

    def _spend(self, began_ns: int) -> None:
        """Count time that this thread had.

        Raises: RequestError beyond what there is.
        """
        self._spent_ns += thread_time_ns() - began_ns
        most_ns = _FREE_NS + self._masks * _MASK_NS
        if self._spent_ns > most_ns:
            raise RequestError(
                f"the constraint took {self._spent_ns / 1e6:.0f} ms to follow, and others wait for "
                f"it; expected up to {most_ns / 1e6:.0f} ms after {len(self._text)} tokens: give a "
                "grammar that reads a text in fewer ways"
            )

    def _follow(self, path: Sequence[int]) -> bool:
        """Move the matcher after a path; False where it ends the text or leaves the grammar."""
        if not self._ends.isdisjoint(path):
            return False
        ahead, matcher = self._ahead, self._matcher
        shared = _shared(ahead, path)
        if shared < len(ahead):
            matcher.rollback(len(ahead) - shared)
            del ahead[shared:]
            self._computed = {depth for depth in self._computed if depth <= shared}
        if shared < len(path):
            read = matcher.try_consume_tokens(list(path[shared:]))
            ahead += path[shared : shared + read]
            if read < len(path) - shared and matcher.is_error():
                raise self._broken()
        return len(ahead) == len(path)

    def _limits_behind(self, depth: int) -> Row:
        """Return the most that each token may score after a path that was followed."""
        while len(self._limits) <= depth:
            self._limits.append(np.empty(len(self._mask) * 8, np.float32))
        limits = self._limits[depth]
        if depth not in self._computed:
            self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
            if self._matcher.is_error():
                raise self._broken()
            np.take(_LIMITS, self._mask, axis=0, out=limits.reshape(-1, 8), mode="clip")
            # An end token is one only where the text may end, whatever else the grammar says.
            limits[self._end_ids] = np.inf if self._matcher.is_accepting() else -np.inf
            self._computed.add(depth)
            self._masks += 1
        return limits[: self._vocabulary]

    def _broken(self) -> RequestError:
        """Return why the matcher failed, and replace it: it never recovers."""
        reason = one_line(self._matcher.get_error().removesuffix("<non-verbose/>"))
        self._matcher = self._fresh.deep_copy()
        self._matcher.try_consume_tokens(self._text)
        self._ahead.clear()
        self._computed.clear()
        if _NOTHING in reason:
            return RequestError(
                "nothing that the constraint admits goes on from here; give one that can end on "
                "every way it may take"
            )
        return RequestError(f"the constraint became too complex to follow: {reason}")


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many first tokens two paths share."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))
