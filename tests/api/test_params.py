"""Every option out of range is refused with its value, and what was expected."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from specrt.errors import RequestError
from specrt.params import SamplingParams

# A name, the ends of its range, values outside it, and what was expected.
RANGES: list[tuple[str, tuple[Any, ...], tuple[Any, ...], str]] = [
    ("n", (1, 1024), (0, 1025, None), "a whole number from 1 to 1024"),
    ("max_tokens", (1,), (0, 1.5, True, None), "a whole number of 1 or more"),
    (
        "temperature",
        (0, 100.0),
        (-0.1, math.nan, math.inf, "1", False),
        "a finite number of 0 or more",
    ),
    ("top_k", (-1, 10**9), (-2, 2.0), "a whole number of 1 or more, or 0 for all"),
    ("top_p", (1, 1e-300), (0, 1.01, math.nan), "a number above 0, up to 1"),
    ("min_p", (0, 1.0), (-0.01, 1.01), "a number from 0 to 1"),
    ("seed", (-(10**30), None), (1.0, "1"), "a whole number, or None to draw one"),
    ("logprobs", (0, 64, None), (-1, 65, True), "a whole number from 0 to 64, or None"),
    ("prompt_logprobs", (0, 64, None), (-1, 65), "a whole number from 0 to 64, or None"),
    ("ignore_eos", (True,), (1,), "True or False"),
    ("extra_args", (), (3,), "a mapping of names to values"),
    ("stop", (("a", "b"), ("a",)), (5,), "str values"),
    ("stop_token_ids", ((1,),), (2,), "int values"),
]


def test_a_value_out_of_range_is_refused() -> None:
    for name, allowed, wrong, expected in RANGES:
        for value in allowed:
            assert getattr(SamplingParams(**{name: value}), name) == value
        for value in wrong:
            said = re.escape(f"{name} is {value!r}; expected {expected}")
            with pytest.raises(RequestError, match=f"^{said}$"):
                SamplingParams(**{name: value})
    with pytest.raises(RequestError, match="stop holds an empty string; leave it out"):
        SamplingParams(stop=("a", ""))
    lists = ("stop", "stop_token_ids", "bad_words", "logits_processors", "logit_bias", "extra_args")
    assert SamplingParams(**dict.fromkeys(lists)) == SamplingParams()  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"'temprature'; did you mean 'temperature'\?"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
