"""Every option out of range is refused with its value, and what was expected."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specrt.errors import RequestError
from specrt.params import SamplingParams

WRONG: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "a whole number of 1 or more"),
    ("max_tokens", -3, "a whole number of 1 or more"),
    ("max_tokens", 1.5, "a whole number of 1 or more"),
    ("max_tokens", True, "a whole number of 1 or more"),
    ("max_tokens", None, "a whole number of 1 or more"),
    ("temperature", -0.1, "a number of 0 or more"),
    ("temperature", float("nan"), "a number of 0 or more"),
    ("temperature", float("inf"), "a number of 0 or more"),
    ("temperature", "1", "a number of 0 or more"),
    ("temperature", False, "a number of 0 or more"),
    ("top_k", -2, "a whole number of 1 or more, or 0 for all"),
    ("top_k", 2.0, "a whole number of 1 or more, or 0 for all"),
    ("top_p", 0, "a number above 0, up to 1"),
    ("top_p", -0.5, "a number above 0, up to 1"),
    ("top_p", 1.01, "a number above 0, up to 1"),
    ("top_p", float("nan"), "a number above 0, up to 1"),
    ("min_p", -0.01, "a number from 0 to 1"),
    ("min_p", 1.01, "a number from 0 to 1"),
    ("seed", 1.0, "a whole number, or None to draw one"),
    ("seed", "1", "a whole number, or None to draw one"),
    *((name, value, "a whole number from 0 to 20, or None")
      for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, True, 1.0, "3")),
    ("ignore_eos", 1, "True or False"),
    ("verifier", None, "the name of a verifier"),
    ("extra_args", 3, "a mapping of names to values"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=str)
def test_a_value_out_of_range_is_refused(name: str, value: Any, expected: str) -> None:
    said = re.escape(f"{name} is {value!r}; expected {expected}")
    with pytest.raises(RequestError, match=f"^{said}$"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", (1,)), ("temperature", (0, 100.0)), ("top_k", (-1, 10**9)),
        ("top_p", (1, 1e-300)), ("min_p", (0, 1.0)), ("seed", (-(10**30), None)),
        ("verifier", ("rejection",)),
    ],
)  # fmt: skip
def test_the_ends_of_each_range_are_allowed(name: str, values: tuple[Any, ...]) -> None:
    assert tuple(getattr(SamplingParams(**{name: value}), name) for value in values) == values


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("stop", ("a", ""), "stop holds an empty string; leave it out"),
        ("stop", "", "stop holds an empty string; leave it out"),
        ("stop", (b"a",), "stop holds b'a'; expected str values"),
        ("stop", 5, "stop is 5; expected str values"),
        ("stop", None, "stop is None; expected str values"),
        ("stop_token_ids", ("</s>",), "stop_token_ids holds '</s>'; expected int values"),
        ("stop_token_ids", 2, "stop_token_ids is 2; expected int values"),
    ],
)
def test_what_ends_a_text_must_be_of_its_kind(name: str, value: Any, said: str) -> None:
    with pytest.raises(RequestError, match=re.escape(said)):
        SamplingParams(**{name: value})


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"unknown option 'temprature'; did you mean 'temp"):
        SamplingParams.of(temprature=1.0)
    with pytest.raises(
        RequestError, match=r"unknown option 'xyzzy'; known: allowed_token_ids, bad_words"
    ):
        SamplingParams.of(xyzzy=1)
    assert SamplingParams.of(top_k=3) == SamplingParams(top_k=3)
