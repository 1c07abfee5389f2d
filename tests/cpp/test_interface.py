"""The C interface and its C++ header, over an implementation without a model."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import specrt
from cpp.conftest import SOURCES, BuildLibrary, Library, Sanitize, run_program
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.speculation.target import check_verifier

SANITIZERS = [True, pytest.param("thread", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_the_interface_under_sanitizers(built_library: BuildLibrary, sanitize: Sanitize) -> None:
    program = built_library("native", sanitize).program("abi_check")
    names = run_program([program, "--list"]).split()
    assert len(names) > 20
    for name in names:  # each in a process of its own: some shut the library down
        run_program([program, name])


@pytest.mark.parametrize("program", ["header_check", "archive_check"])
def test_the_header_is_c(native: Library, program: str) -> None:
    assert "fake: 3 tokens" in run_program([native.program(program), "any", "count 3"])


def test_the_header_has_the_release_of_the_package() -> None:
    header = (SOURCES / "include" / "specrt" / "specrt.h").read_text("utf-8")
    assert re.findall(r'#define SPECRT_VERSION "(.*)"', header) == [specrt.__version__]


@pytest.mark.parametrize("implementation", ["hosted", "native"])
def test_only_the_interface_is_exported(
    request: pytest.FixtureRequest, implementation: str
) -> None:
    if shutil.which("nm") is None or shutil.which("objdump") is None:
        pytest.skip("needs nm and objdump")
    header = (SOURCES / "include" / "specrt" / "specrt.h").read_text("utf-8")
    declared = set(re.findall(r"^SPECRT_API [^(]*?(specrt_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 30
    library: Library = request.getfixturevalue(implementation)
    described = run_program(["objdump", "-p", library.path])
    assert re.findall(r"SONAME +(.*)", described) == [f"libspecrt-{implementation}.so.1"]
    exported = run_program(["nm", "-D", "--defined-only", "--format=posix", library.path])
    assert {line.split()[0] for line in exported.splitlines()} == declared


# ---- parameters: the ranges and the words of `specrt.SamplingParams` ----

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
WHOLE = (-(2**63), -2, -1, 0, 1, 2, 19, 20, 21, 128, 2**31, 2**63 - 1)
TEXTS = [
    ("set_text", "verifier", "match"),
    ("set_text", "regex", ""),
    ("set_text", "regex", "a" * 10_001),
    ("set_text", "regex", "é" * 10_000),
    ("set_text", "grammar", "a" * 50_001),
    ("add_text", "stop", ""),
    ("add_text", "stop", "a\0b"),
    ("add_text", "bad_words", ""),
    ("add_text", "choice", ""),
    ("add_text", "choice", "a" * 100_001),
]


class Params:
    """Parameters behind the C interface."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.handle = library, ctypes.c_void_p()
        library.specrt_last_error.restype = ctypes.c_char_p
        assert library.specrt_params_create(ctypes.byref(self.handle)) == 0

    def refusal(self, kind: str, *values: Any) -> str:
        """Return the message against a value; "" where it is taken."""
        types = {int: ctypes.c_int64, float: ctypes.c_double, str: lambda text: text.encode()}
        passed = [types.get(type(value), lambda value: value)(value) for value in values]
        if isinstance(values[-1], str) and len(values) > 1:  # a text and its length
            passed.append(ctypes.c_size_t(len(passed[-1])))
        if getattr(self.library, f"specrt_params_{kind}")(self.handle, *passed) == 0:
            return ""
        message: bytes = self.library.specrt_last_error()
        return message.decode()

    def tokens(self, name: str, *ids: int) -> str:
        """Add tokens."""
        return self.refusal("add_tokens", name, (ctypes.c_int64 * len(ids))(*ids),
                            ctypes.c_size_t(len(ids)))  # fmt: skip


@pytest.fixture
def params(hosted: Library) -> Iterator[Params]:
    made = Params(ctypes.CDLL(str(hosted.path)))
    yield made
    assert made.library.specrt_params_close(made.handle) == 0


def python_refusal(**options: Any) -> str:
    try:
        check_verifier(SamplingParams.of(**options).verifier)
    except RequestError as error:
        return str(error).split(", or None")[0]  # C leaves out what is not asked for
    return ""


def test_values_are_refused_as_in_python(params: Params) -> None:
    for name in INTEGERS:
        for value in WHOLE:
            # Apart from the other rule about min_tokens, which is checked later.
            more = {"max_tokens": 2**63 - 1} if name == "min_tokens" else {}
            expected = python_refusal(**{**more, name: value})
            assert params.refusal("set_integer", name, value) == expected
    for name in NUMBERS:
        for real in REALS:
            found, expected = (
                params.refusal("set_number", name, real),
                python_refusal(**{name: real}),
            )
            # Both write the digits that give the number back, powers of ten not in the same way.
            assert bool(found) == bool(expected), (real, found, expected)
            if 1e-4 < abs(real) < 1e6 or not expected:
                assert found == expected
    for kind, name, text in TEXTS:
        given: Any = (text,) if kind == "add_text" else text
        assert params.refusal(kind, name, text) == python_refusal(**{name: given})
    for name in ("temprature", "maxtokens", "top", "penalty", "jsonschema", "seeds", "stop_tokens"):
        found = params.refusal("set_integer", name, 1)
        assert found == python_refusal(**{name: 1})
        assert "did you mean" in found


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("set_integer", ("gamma", -2), "expected a whole number of 0 or more, or -1 for auto"),
        ("set_integer", ("gamma", 2**31), "expected a whole number of 0 or more"),
        ("set_integer", ("ignore_eos", 2), "ignore_eos is 2; expected 0 or 1"),
        ("set_integer", ("parse_special", -1), "parse_special is -1; expected 0 or 1"),
        ("set_integer", ("top_p", 2), "top_p is 2.0; expected a number above 0"),
        ("set_integer", ("stop_token_ids", 1), "specrt_params_add_tokens"),
        ("set_integer", ("", 1), "unknown option ''"),
        ("set_integer", ("a" * 100_000, 1), "unknown option"),
        ("set_number", ("top_k", 5.0), "top_k is a whole number; set it with specrt_params_set_i"),
        ("set_number", ("logit_bias", 1.0), "specrt_params_add_bias"),
        ("set_text", ("stop", "a"), "specrt_params_add_text"),
        ("set_text", ("temperature", "1"), "specrt_params_set_number"),
        ("set_text", ("gamma", "three"), "gamma is 'three'; expected 'auto', or a number"),
        ("set_text", ("verifier", "reject"), "expected 'match' or 'rejection'"),
        ("set_text", ("drafter", "modle"), "did you mean 'model'?"),
        ("add_text", ("regex", "a"), "specrt_params_set_text"),
        ("add_text", ("bad_words", "a\0b"), "bad_words holds a zero byte at 1"),
        ("add_bias", (-5, 1.0), "logit_bias holds -5"),
        ("add_bias", (5, 10_001.0), "logit_bias holds 5: 10001.0"),
        ("add_bias", (5, math.nan), "logit_bias holds 5: nan"),
    ],
)
def test_values_of_another_kind_are_refused(
    params: Params, kind: str, values: tuple[Any, ...], says: str
) -> None:
    assert says in params.refusal(kind, *values)
