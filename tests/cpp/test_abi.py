"""The C interface and its C++ header, over an implementation without a model."""

from __future__ import annotations

import re
import shutil

import pytest

from cpp.conftest import SOURCES, BuildLibrary, Sanitize, run_program

SANITIZERS = [True, pytest.param("thread", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_the_interface_under_sanitizers(built_library: BuildLibrary, sanitize: Sanitize) -> None:
    program = built_library("native", sanitize).program("abi_check")
    names = run_program([program, "--list"]).split()
    assert len(names) > 30
    for name in names:  # each in a process of its own: some shut the library down
        run_program([program, name])
    with pytest.raises(AssertionError, match="no check is called nothing"):
        run_program([program, "nothing"])


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_headers_of_c_and_cpp(built_library: BuildLibrary, sanitize: Sanitize) -> None:
    library = built_library("native", sanitize)
    run_program([library.program("wrapper_check_17")])
    if sanitize is True:
        run_program([library.program("wrapper_check_20")])
        assert "fake: 3 tokens" in run_program([library.program("header_check"), "any", "count 3"])


@pytest.mark.parametrize(("implementation", "sanitize"), [("hosted", False), ("native", True)])
def test_only_the_interface_is_exported(
    built_library: BuildLibrary, implementation: str, sanitize: Sanitize
) -> None:
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    header = (SOURCES / "include" / "specrt" / "specrt.h").read_text("utf-8")
    declared = set(re.findall(r"^SPECRT_API [^(]*?(specrt_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 30
    library = built_library(implementation, sanitize).path
    exported = run_program(["nm", "-D", "--defined-only", "--format=posix", library])
    assert {line.split()[0] for line in exported.splitlines()} == declared
