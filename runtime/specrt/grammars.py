"""Compiles the constraints of requests, once each, for one vocabulary."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from specrt.errors import RequestError
from specrt.grammar import GrammarProcessor
from specrt.message import one_line
from specrt.structure import Structure
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
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def processor(self, structure: Structure, stops: Collection[int] = ()) -> GrammarProcessor:
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

    def _matcher(self, structure: Structure) -> LLMatcher:
        with self._lock:
            kept = self._compiled
            made = kept.get(structure) or self._compile(structure)
            kept[structure] = made
            kept.move_to_end(structure)
            while len(kept) > _KEPT:
                kept.popitem(last=False)
            return made

    def _compile(self, structure: Structure) -> LLMatcher:
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


def _refused(structure: Structure, message: str) -> RequestError:
    advice = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
    reason = one_line(message).replace(advice, "write anyOf where alternatives may overlap")
    reason = reason.replace("NoExtensionBias", "it admits nothing")
    return RequestError(f"{structure.kind} cannot be enforced: {reason}")
