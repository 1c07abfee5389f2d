"""What a caller may ask of one completion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from specrt.errors import RequestError, did_you_mean

VERIFIERS = ("match", "rejection")


@dataclass(frozen=True)
class SamplingParams:
    """Options of one completion; the names are those people know from vLLM.

    Raises: RequestError for a value out of range, with the range.
    """

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
    seed: int | None = None
    """Same seed, same text; None draws one and reports it."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, besides the model's own end."""
    ignore_eos: bool = False
    """Go on past the model's own end."""
    verifier: str = "match"
    """`match` or `rejection`; both lossless. A seed repeats its text under `match` always, under
    `rejection` only with a gamma that is a number: `auto` goes by the clock."""

    def __post_init__(self) -> None:
        """Normalise sequences and check every range."""
        asked: Any = self.stop
        stop = (asked,) if isinstance(asked, str) else asked
        object.__setattr__(self, "stop", _tuple_of("stop", stop, str))
        ids = _tuple_of("stop_token_ids", self.stop_token_ids, int)
        object.__setattr__(self, "stop_token_ids", ids)
        if "" in self.stop:
            raise RequestError("stop holds an empty string; leave it out")
        for name, check, expected in _RANGES:
            value = getattr(self, name)
            if not check(value):
                raise RequestError(f"{name} is {value!r}; expected {expected}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @classmethod
    def of(cls, **options: Any) -> SamplingParams:
        """Build from keywords, refusing an unknown one with the nearest name."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise RequestError(f"unknown option {name!r}{did_you_mean(name, known)}")
        return cls(**options)


def _tuple_of(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise RequestError(f"{name} is {values!r}; expected {kind.__name__} values")
    items = tuple(values)
    for item in items:
        if not isinstance(item, kind):
            raise RequestError(f"{name} holds {item!r}; expected {kind.__name__} values")
    return items


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN and infinity, whole numbers included


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", lambda v: _is_int(v) and v >= 1, "a whole number of 1 or more"),
    ("temperature", lambda v: _is_real(v) and v >= 0, "a number of 0 or more"),
    ("top_k", lambda v: _is_int(v) and v >= -1, "a whole number of 1 or more, or 0 for all"),
    ("top_p", lambda v: _is_real(v) and 0 < v <= 1, "a number above 0, up to 1"),
    ("min_p", lambda v: _is_real(v) and 0 <= v <= 1, "a number from 0 to 1"),
    ("seed", lambda v: v is None or _is_int(v), "a whole number, or None to draw one"),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    ("verifier", lambda v: v in VERIFIERS, "'match' or 'rejection'"),
)
