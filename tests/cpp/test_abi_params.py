"""Parameters of the C interface, held to `specrt.SamplingParams`: same ranges, same words."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest

from cpp.conftest import BuildLibrary
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.speculation.target import check_verifier

INTEGERS = (
    "max_tokens", "top_k", "no_repeat_ngram_size", "min_tokens", "logprobs", "prompt_logprobs",
    "seed",
)  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
REALS = (
    -1e308, -2.5, -2.0, -0.1, 0.0, 5e-324, 0.009, 0.01, 0.1, 0.30000000000000004, 1.0,
    1.0000000000000002, 1.9, 2.0, 2.1, 100.0, 100.5, 1e16, 123456789.123, 1e308, math.nan, math.inf,
)  # fmt: skip
MISSPELT = ("temprature", "maxtokens", "top", "penalty", "jsonschema", "seeds", "stop_tokens")


class Params:
    """Parameters behind the C interface."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.specrt_last_error.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p()
        assert library.specrt_params_create(ctypes.byref(self._handle)) == 0

    def refusal(self, kind: str, name: str, *values: Any) -> str:
        """Return what the interface says against a value; "" where it takes it."""
        call = getattr(self._library, f"specrt_params_{kind}")
        if call(self._handle, name.encode(), *values) == 0:
            return ""
        said: bytes = self._library.specrt_last_error()
        return said.decode()

    def close(self) -> None:
        assert self._library.specrt_params_close(self._handle) == 0


@pytest.fixture(scope="session")
def library(built_library: BuildLibrary) -> ctypes.CDLL:
    return ctypes.CDLL(str(built_library("hosted").path))


@pytest.fixture
def params(library: ctypes.CDLL) -> Any:
    made = Params(library)
    yield made
    made.close()


def python_refusal(**options: Any) -> str:
    try:
        check_verifier(SamplingParams.of(**options).verifier)
    except RequestError as error:
        return str(error).split(", or None")[0]  # C leaves out what is not asked for
    return ""


@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers(params: Params, name: str) -> None:
    for value in (-(2**63), -2, -1, 0, 1, 2, 19, 20, 21, 128, 2**31, 2**63 - 1):
        options = {name: value}
        if name == "min_tokens":  # apart from the other rule, which is checked later
            options["max_tokens"] = 2**63 - 1
        assert params.refusal("set_integer", name, ctypes.c_int64(value)) == python_refusal(
            **options
        )


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(params: Params, name: str) -> None:
    for value in REALS:
        found = params.refusal("set_number", name, ctypes.c_double(value))
        expected = python_refusal(**{name: value})
        # Both write the digits that give the number back, powers of ten not in the same way.
        assert bool(found) == bool(expected), (value, found, expected)
        if 1e-4 < abs(value) < 1e6 or not expected:
            assert found == expected


@pytest.mark.parametrize("name", MISSPELT)
def test_the_nearest_name_is_told(params: Params, name: str) -> None:
    found = params.refusal("set_integer", name, ctypes.c_int64(1))
    assert found == python_refusal(**{name: 1})
    assert "did you mean" in found


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("set_text", "verifier", "match"),
        ("set_text", "regex", ""),
        ("set_text", "regex", "a" * 10_001),
        ("set_text", "regex", "é" * 10_000),
        ("set_text", "grammar", "a" * 50_001),
        ("add_text", "stop", ""),
        ("add_text", "stop", "\n"),
        ("add_text", "bad_words", ""),
        ("add_text", "choice", ""),
        ("add_text", "choice", "a" * 100_001),
    ],
)
def test_texts(params: Params, kind: str, name: str, text: str) -> None:
    value: Any = (text,) if kind == "add_text" else text
    found = params.refusal(kind, name, text.encode(), ctypes.c_size_t(len(text.encode())))
    assert found == python_refusal(**{name: value})
