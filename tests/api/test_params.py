"""Every option out of range is refused with its value, and what was expected."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from specrt.errors import RequestError
from specrt.params import SamplingParams

WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("max_tokens", (0, -3, 1.5, True, None), "a whole number of 1 or more"),
    ("temperature", (-0.1, math.nan, math.inf, "1", False), "a number of 0 or more"),
    ("top_k", (-2, 2.0), "a whole number of 1 or more, or 0 for all"),
    ("top_p", (0, -0.5, 1.01, math.nan), "a number above 0, up to 1"),
    ("min_p", (-0.01, 1.01), "a number from 0 to 1"),
    ("seed", (1.0, "1"), "a whole number, or None to draw one"),
    ("logprobs", (-1, 21, True, 1.0, "3"), "a whole number from 0 to 20, or None"),
    ("prompt_logprobs", (-1, 21), "a whole number from 0 to 20, or None"),
    ("ignore_eos", (1,), "True or False"),
    ("verifier", (None,), "the name of a verifier"),
    ("extra_args", (3,), "a mapping of names to values"),
    ("stop", (5, None), "str values"),
    ("stop_token_ids", (2,), "int values"),
]


@pytest.mark.parametrize(("name", "values", "expected"), WRONG, ids=[name for name, *_ in WRONG])
def test_a_value_out_of_range_is_refused(name: str, values: tuple[Any, ...], expected: str) -> None:
    for value in values:
        said = re.escape(f"{name} is {value!r}; expected {expected}")
        with pytest.raises(RequestError, match=f"^{said}$"):
            SamplingParams(**{name: value})


def test_what_ends_a_text_must_be_of_its_kind() -> None:
    wrong: list[tuple[str, Any, str]] = [
        *(("stop", value, "stop holds an empty string; leave it out") for value in (("a", ""), "")),
        ("stop", (b"a",), "stop holds b'a'; expected str values"),
        ("stop_token_ids", ("</s>",), "stop_token_ids holds '</s>'; expected int values"),
    ]
    for name, value, said in wrong:
        with pytest.raises(RequestError, match=re.escape(said)):
            SamplingParams(**{name: value})
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_the_ends_of_each_range_are_allowed() -> None:
    ranges: dict[str, tuple[Any, ...]] = {
        "max_tokens": (1,), "temperature": (0, 100.0), "top_k": (-1, 10**9),
        "top_p": (1, 1e-300), "min_p": (0, 1.0), "seed": (-(10**30), None),
    }  # fmt: skip
    for name, values in ranges.items():
        assert [getattr(SamplingParams(**{name: v}), name) for v in values] == list(values)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"unknown option 'temprature'; did you mean 'temp"):
        SamplingParams.of(temprature=1.0)
    with pytest.raises(RequestError, match=r"unknown option 'xyzzy'; known: allowed_token_ids"):
        SamplingParams.of(xyzzy=1)
    assert SamplingParams.of(top_k=3) == SamplingParams(top_k=3)
