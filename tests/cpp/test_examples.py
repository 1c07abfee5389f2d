"""The examples in C++ do on codelet what they say they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import REPOSITORY
from cpp.conftest import BuildLibrary, run_program
from specrt.generator import Generator
from specrt.params import SamplingParams

PROMPT = "def area(width, height):"


@pytest.fixture(scope="module")
def programs(built_library: BuildLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the examples against the library that hosts Python, as an application would be."""
    build = tmp_path_factory.mktemp("examples")
    prefix = built_library("hosted").prefix
    sources = REPOSITORY / "examples" / "cpp"
    run_program(["cmake", "-S", sources, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"])
    run_program(["cmake", "--build", build])
    return build


def test_complete_streams_what_python_generates(
    programs: Path, codelet: Path, generator: Generator
) -> None:
    params = SamplingParams(max_tokens=64, stop=("\n\n\n",))
    done = generator.generate(PROMPT, params)
    said = run_program([programs / "complete", codelet, PROMPT])
    assert done.text in said
    assert f"{len(done.token_ids)} tokens" in said


def test_the_assistant_answers_while_it_summarises(
    programs: Path, codelet: Path, generator: Generator
) -> None:
    params = SamplingParams(max_tokens=48, stop=("\n\n\n",))
    said = run_program([programs / "assistant", codelet, PROMPT, "def perimeter(width, height):"])
    assert f"> {PROMPT}\n{generator.generate(PROMPT, params).text}" in said
    assert said.count("[in short: this") == 2
