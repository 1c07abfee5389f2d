"""The options of one completion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Signature, signature
from numbers import Real
from operator import index
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, TypedDict

import numpy as np
from numpy.typing import NDArray

from specrt.constraints import (
    Constraint,
    check_choice,
    check_grammar,
    check_regex,
    constraint_of,
    schema_text,
)
from specrt.errors import RequestError, did_you_mean
from specrt.records import shown

Row = NDArray[np.float32]

Callback = Callable[[list[int], Row], Row]
"""Called with the token ids of prompt and output, and a row of scores [V]; returns the new row."""


AUTO: Literal["auto"] = "auto"

Gamma = int | Literal["auto"]
"""Tokens to draft each round, or `auto`: as many as pay, chosen round by round."""


class GenerateOptions(TypedDict, total=False):
    """How a prompt is read and completed; what is missing is the default.

    How it is drafted changes no distribution, and under `match` no text.
    """

    gamma: Gamma | None
    """Tokens to draft each round, or `auto`; the bundle's default when None."""
    drafter: str | None
    """A name of `specrt.speculation.drafters.DRAFTERS`; the bundle's default when None."""
    parse_special: bool
    """Whether the text of a control token in a prompt becomes that token; True by default."""
    memory_key: str | None
    """Whose finished texts may be drafted from, and whose memory gets this one, in a generator
    with text memory: all that give the same key, '' by default. None does neither."""
    cache_salt: str
    """Whose prompts it may begin with, as far as KV buffers hold them, and whose compiled
    constraints it may use: those of the same salt, '' by default."""


def check_options(options: GenerateOptions) -> GenerateOptions:
    """Return the options of a call.

    Raises: RequestError for an unknown one, and for one of `SamplingParams`.
    """
    known = GenerateOptions.__annotations__
    for name, value in options.items():
        if name in known:
            continue
        field = _ALIASES.get(name, name)
        if field in SamplingParams.__dataclass_fields__:
            raise RequestError(
                f"{name} is {short(value)}, an option of SamplingParams and not of the call; pass "
                f"SamplingParams({field}={short(value)}) after the prompt"
            )
        raise RequestError(
            f"unknown option {name!r}{did_you_mean(name, known)}; what shapes the text is an "
            "option of SamplingParams"
        )
    return options


class TimestampRules(NamedTuple):
    """The tokens of a speech model that `specrt.sampling.processors.Timestamps` is about."""

    begin: int
    """The first timestamp; the token before it, <|notimestamps|>, never comes."""
    end: int
    """The end token; every token below it is text."""
    max_initial: int | None = None
    """Most timestamps that the first one may be behind `begin`; None sets no bound."""


_ALIASES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}

_LISTS: tuple[tuple[str, type], ...] = (
    ("stop_token_ids", int),
    ("allowed_token_ids", int),
    ("bad_words", str),
    ("suppress_tokens", int),
    ("begin_suppress_tokens", int),
    ("forced_bos_token_id", int),
    ("forced_eos_token_id", int),
    ("decoder_start", int),
    ("choice", str),
)

_SINGLE = ("forced_bos_token_id", "forced_eos_token_id")
"""Of the lists: those that one number may stand for."""

BUNDLE_OPTIONS = (
    "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_tokens",
)  # fmt: skip
"""Options that an encoder-decoder's generation config may give, where a request leaves them out."""

BEAMS: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
}
"""Options that ask for beams, each with the values that ask for none."""

MOST_COMPLETIONS = 1024
"""Of one prompt in one call: all of them are kept until the last one ends."""

MOST_RANKED = 64
"""Likeliest tokens that are told of each position."""

_MOST_PENALTY = 100

_MOST_BIAS = 10_000

_MOST_DIGITS = 20
"""Of a token id in a text; Python refuses to read some thousands."""


@dataclass(frozen=True)
class SamplingParams:
    """Options of one completion; the names are those people know from vLLM.

    None in place of a list or a mapping is an empty one. The options of `BUNDLE_OPTIONS` are the
    bundle's own where they are None, and without effect where it has none.

    Raises: RequestError for a value out of range, with the range.
    """

    n: int = 1
    """Completions of the same prompt, each with noise of its own; those that find no row wait."""
    max_tokens: int = 128
    """Most tokens to emit."""
    temperature: float = 0.0
    """0 takes the most likely token (greedy decoding); the default."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probability reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    typical_p: float = 1.0
    """Keep the tokens nearest to the expected surprise whose probability reaches this."""
    repetition_penalty: float | None = None
    """Above 1, tokens of prompt and output become less likely; below, more; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Taken from the score of each token that the output holds."""
    frequency_penalty: float = 0.0
    """The same, for each time it holds it."""
    no_repeat_ngram_size: int | None = None
    """Tokens in a row that never come twice; 0 allows all."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the scores of tokens."""
    bad_words: tuple[str, ...] = ()
    """Texts that are ruled out, as the tokenizer spells them at the beginning of a text, after a
    space, and in the middle of one."""
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    """Sequences of tokens that are ruled out."""
    suppress_tokens: tuple[int, ...] | None = None
    """Tokens that are ruled out."""
    begin_suppress_tokens: tuple[int, ...] | None = None
    """Tokens that are ruled out as the first of the output, and after a forced first one."""
    forced_bos_token_id: tuple[int, ...] | None = None
    """The token, or one of those, that the output begins with; a number is the only one."""
    forced_eos_token_id: tuple[int, ...] | None = None
    """The token, or one of those, that comes where the output reaches its limit."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may come; all when None."""
    min_tokens: int | None = None
    """Tokens before which no end token comes; stop strings end the text all the same."""
    timestamp_rules: TimestampRules | None = None
    """Lets timestamps of speech come in pairs that rise, as Whisper's decoder has them."""
    logits_processors: tuple[Callback, ...] = ()
    """Functions of token ids and scores that return scores, called for each row looked at."""
    json_schema: str | Mapping[str, Any] | bool | None = None
    """The text is JSON that this schema admits: a mapping, the text of one, or True for any JSON;
    stored as a text."""
    regex: str | None = None
    """The whole text matches this expression."""
    choice: tuple[str, ...] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """The text is what this Lark grammar derives from `start`; GBNF, with `::=`, is translated."""
    logprobs: int | None = None
    """For each token of the output: how likely it was, and so many of the likeliest (0 to 64).
    These are log-softmax of the target's own scores, before temperature, processors and masks, as
    plain decoding has them: a token that a mask forced may be unlikely."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, all but the first; the whole prompt is read for it,
    whatever the KV buffers hold of it."""
    decoder_start: tuple[int, ...] | None = None
    """Tokens that the text of an encoder-decoder begins with; the bundle's own when None."""
    seed: int | None = None
    """Same seed, same text; None draws one and reports it."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, besides the model's own end."""
    ignore_eos: bool = False
    """Go on past the model's own end."""
    extra_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of logits processors that another package added to
    `specrt.sampling.processors.PROCESSORS`, by their names there."""
    verifier: str = "match"
    """A name of `specrt.speculation.target.VERIFIERS`: `match` or `rejection`, both lossless.
    A seed repeats its text under `match` always, under `rejection` only with a gamma that is a
    number: `auto` depends on the clock."""

    if not TYPE_CHECKING:  # which reads the fields

        def __new__(cls, *_: Any, **options: Any) -> SamplingParams:
            """Refuse an unknown option, naming the nearest one."""
            _check_names(options)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Normalise sequences and check every range."""
        self._fill()
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else given
        object.__setattr__(self, "stop", _tuple_of("stop", stop, str))
        self._list()
        if self.bad_words_ids is not None:
            object.__setattr__(self, "bad_words_ids", _sequences(self.bad_words_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        given = self.logits_processors
        functions = (given,) if callable(given) else _tuple_of("logits_processors", given, object)
        object.__setattr__(self, "logits_processors", functions)
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise RequestError(f"{name} holds an empty string; leave it out")
        if not all(map(callable, self.logits_processors)):
            raise RequestError(
                "logits_processors has an item that is not callable; expected functions"
            )
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty; nothing could come: leave it out")
        for name, check, expected in _RANGES:
            value = getattr(self, name)
            if not check(value):
                raise RequestError(f"{name} is {value!r}; expected {expected}")
        self._check_constraint()
        if (self.min_tokens or 0) > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; expected up to max_tokens, {self.max_tokens}"
            )

    def __repr__(self) -> str:
        """Show what is not the default."""
        given = (f.name for f in fields(self) if getattr(self, f.name) != _default(f))
        return shown(self, *given)

    def _fill(self) -> None:
        """Put empty collections in place of None, which vLLM has for them."""
        for name, kind in _COLLECTIONS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, kind())

    def _list(self) -> None:
        """Make tuples of lists, and of single values."""
        for name, kind in _LISTS:
            given: Any = getattr(self, name)
            if given is not None:
                single = isinstance(given, str) or (name in _SINGLE and _is_int(given))
                object.__setattr__(self, name, _tuple_of(name, (given,) if single else given, kind))

    def _check_constraint(self) -> None:
        object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        if self.regex is not None:
            check_regex(self.regex)
        if self.choice is not None:
            check_choice(self.choice)
        if self.grammar is not None:
            check_grammar(self.grammar)
        constraint = self.constraint
        if constraint is not None and self.ignore_eos:
            raise RequestError(
                f"{constraint.kind} and ignore_eos were given, and a constraint ends the text; "
                "leave one out"
            )

    @property
    def constraint(self) -> Constraint | None:
        """The one constraint of the whole text; None where it is free.

        Raises: RequestError where several were given.
        """
        return constraint_of(self.json_schema, self.regex, self.choice, self.grammar)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """Build from keywords, refusing an unknown one with the nearest name.

        `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar` are aliases.
        """
        named = {}
        options = without_beams(options)
        _check_names(options, _ALIASES)
        for given, value in options.items():
            name = _ALIASES.get(given, given)
            if name in named:
                raise RequestError(f"{name} was given twice, once by an alias; leave one out")
            named[name] = value
        return cls(**named)


_FIELDS = [*signature(SamplingParams.__init__).parameters.values()][1:]

# Of its __new__, which takes anything, an editor could complete nothing.
SamplingParams.__signature__ = Signature(_FIELDS)  # type: ignore[attr-defined]


def _default(option: Field[Any]) -> Any:
    made = option.default_factory
    return option.default if made is MISSING else made()


def without_beams(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without `BEAMS`.

    Raises: RequestError where they ask for beams.
    """
    for name, without_effect in BEAMS.items():
        if options.get(name) not in without_effect:
            raise RequestError(
                f"{name} is {options[name]!r}, and beams are not speculated on: a text is decoded "
                "greedily or sampled; leave it out, or use n for several completions"
            )
    return {name: value for name, value in options.items() if name not in BEAMS}


def _check_names(options: Mapping[str, Any], aliases: Iterable[str] = ()) -> None:
    known = [*SamplingParams.__dataclass_fields__, *aliases]
    for name in without_beams(options):
        if name not in known:
            raise RequestError(f"unknown option {name!r}{did_you_mean(name, known)}")


def _tuple_of(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}; expected {kind.__name__} values")
    items = tuple(map(_plain, values)) if kind is int else tuple(values)
    for item in items:
        if not isinstance(item, kind):
            raise RequestError(f"{name} holds {item!r}; expected {kind.__name__} values")
    return items


def _sequences(given: Any) -> tuple[tuple[int, ...], ...]:
    """Return sequences of token ids.

    Raises: RequestError.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"bad_words_ids is {given!r}; expected lists of token ids")
    sequences = tuple(_tuple_of("bad_words_ids", ids, int) for ids in given)
    if () in sequences:
        raise RequestError("bad_words_ids holds an empty list; leave it out")
    return sequences


def _bias(given: Any) -> dict[int, float]:
    """Return a bias by token id; keys may be texts of numbers, as JSON has them.

    Raises: RequestError.
    """
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias is {given!r}; expected a mapping of token ids to numbers")
    bias = {}
    for key, value in given.items():
        digits = (
            isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS
        )
        token = int(key) if digits else _plain(key)
        if not _is_int(token) or not _is_real(value) or abs(value) > _MOST_BIAS:
            raise RequestError(
                f"logit_bias holds {key!r}: {value!r}; expected a token id: a finite number"
            )
        bias[token] = float(value)
    return bias


def _plain(value: Any) -> Any:
    """Return a whole number of any type, NumPy's among them, as an int, and the rest as it is."""
    if type(value) is int:  # at once: the check of a protocol takes microseconds
        return value
    whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    return index(value) if whole else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_natural(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _are_rules(value: Any) -> bool:
    if not isinstance(value, TimestampRules) or not all(map(_is_int, value[:2])):
        return False
    most = value.max_initial
    return 0 <= value.end < value.begin and (most is None or (_is_int(most) and most >= 0))


def _is_few(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= MOST_RANKED


def _is_real(value: Any) -> bool:
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return bool(abs(number) <= sys.float_info.max)  # false for NaN and infinity, too large an int


_COLLECTIONS: tuple[tuple[str, type], ...] = (
    ("stop", tuple), ("stop_token_ids", tuple), ("bad_words", tuple), ("logits_processors", tuple),
    ("logit_bias", dict), ("extra_args", dict),
)  # fmt: skip

_OF_COMPLETIONS = f"a whole number from 1 to {MOST_COMPLETIONS}"

_OF_RANKED = f"a whole number from 0 to {MOST_RANKED}, or None"

_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda v: _is_int(v) and 1 <= v <= MOST_COMPLETIONS, _OF_COMPLETIONS),
    ("max_tokens", lambda v: _is_int(v) and v >= 1, "a whole number of 1 or more"),
    ("temperature", lambda v: _is_real(v) and v >= 0, "a finite number of 0 or more"),
    ("top_k", lambda v: _is_int(v) and v >= -1, "a whole number of 1 or more, or 0 for all"),
    ("top_p", lambda v: _is_real(v) and 0 < v <= 1, "a number above 0, up to 1"),
    ("min_p", lambda v: _is_real(v) and 0 <= v <= 1, "a number from 0 to 1"),
    ("typical_p", lambda v: _is_real(v) and 0 < v <= 1, "a number above 0, up to 1"),
    (
        "repetition_penalty",
        lambda v: v is None or (_is_real(v) and 1 / _MOST_PENALTY <= v <= _MOST_PENALTY),
        "a number from 0.01 to 100",
    ),
    ("presence_penalty", lambda v: _is_real(v) and -2 <= v <= 2, "a number from -2 to 2"),
    ("frequency_penalty", lambda v: _is_real(v) and -2 <= v <= 2, "a number from -2 to 2"),
    ("no_repeat_ngram_size", lambda v: v is None or _is_natural(v), "a whole number of 0 or more"),
    ("min_tokens", lambda v: v is None or _is_natural(v), "a whole number of 0 or more"),
    ("logprobs", lambda v: v is None or _is_few(v), _OF_RANKED),
    ("prompt_logprobs", lambda v: v is None or _is_few(v), _OF_RANKED),
    ("seed", lambda v: v is None or _is_int(v), "a whole number, or None to draw one"),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    ("extra_args", lambda v: isinstance(v, Mapping), "a mapping of names to values"),
    (
        "timestamp_rules",
        lambda v: v is None or _are_rules(v),
        "TimestampRules with begin above end",
    ),
    ("verifier", lambda v: isinstance(v, str), "the name of a verifier"),
)
