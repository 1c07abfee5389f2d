"""The examples in C++, built as by an application against a library that was moved."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cpp.conftest import BuildLibrary, run_program
from shared import REPOSITORY
from specrt.generator import Generator
from specrt.params import SamplingParams

PROMPT = "def area(width, height):"


@pytest.fixture(scope="module")
def moved(built_library: BuildLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed tree at another place than it was installed to."""
    place = tmp_path_factory.mktemp("installed") / "moved"
    shutil.copytree(built_library("hosted").prefix, place, symlinks=True)
    return place


@pytest.fixture(scope="module")
def programs(moved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("examples")
    sources = REPOSITORY / "examples" / "cpp"
    output = run_program(["cmake", "-S", sources, "-B", build, f"-DCMAKE_PREFIX_PATH={moved}"])
    assert "specrt 0.1.0, hosted" in output
    run_program(["cmake", "--build", build])
    return build


def test_complete_streams_what_python_generates(
    programs: Path, codelet: Path, generator: Generator
) -> None:
    params = SamplingParams(max_tokens=64, stop=("\n\n\n",))
    completion = generator.generate(PROMPT, params)
    output = run_program([programs / "complete", codelet, PROMPT])
    assert completion.text in output
    assert f"{len(completion.token_ids)} tokens" in output


def test_the_assistant_answers_while_it_summarises(
    programs: Path, codelet: Path, generator: Generator
) -> None:
    params = SamplingParams(max_tokens=48, stop=("\n\n\n",))
    output = run_program([programs / "assistant", codelet, PROMPT, "def perimeter(width, height):"])
    assert f"> {PROMPT}\n{generator.generate(PROMPT, params).text}" in output
    assert output.count("[in short: this") == 2


@pytest.mark.parametrize("program", ["complete", "assistant"])
@pytest.mark.parametrize(
    ("arguments", "status", "message"), [(["missing", "a"], 1, "missing"), ([], 2, "usage: ")]
)
def test_examples_fail_with_one_line(
    programs: Path, program: str, arguments: list[str], status: int, message: str
) -> None:
    process = subprocess.run(
        [programs / program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == status, process
    assert message in process.stderr
    assert process.stderr.count("\n") == 1


def test_pkg_config_goes_with_the_tree(moved: Path, codelet: Path, tmp_path: Path) -> None:
    (folder,) = moved.rglob("pkgconfig")
    environment = {"PKG_CONFIG_PATH": str(folder)}
    command: list[str | Path] = ["pkg-config", "--cflags", "--libs", "specrt"]
    flags = run_program(command, environment=environment).split()
    program, source = tmp_path / "header", Path(__file__).parent / "abi" / "header.c"
    where = f"-Wl,-rpath,{folder.parent}"
    run_program(["cc", "-std=c11", source, "-o", program, *flags, where])
    assert "0.1.0 hosted: 3 tokens" in run_program([program, codelet, PROMPT])
