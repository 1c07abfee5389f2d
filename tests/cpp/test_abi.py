"""The C interface and its C++ header, over an implementation without a model."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import REPOSITORY
from cpp.conftest import SOURCES, BuildLibrary, Sanitize, run_program

EXAMPLES = REPOSITORY / "examples" / "cpp"


@pytest.mark.parametrize("sanitize", [True, "thread"])
def test_the_interface_under_sanitizers(built_library: BuildLibrary, sanitize: Sanitize) -> None:
    program = built_library("fake", sanitize).program("abi_check")
    names = run_program([program, "--list"]).split()
    assert len(names) > 30
    for name in names:  # each in a process of its own: some shut the library down
        run_program([program, name])


@pytest.mark.parametrize(
    ("sanitize", "program"),
    [
        (True, "header_check"),
        (True, "wrapper_check_17"),
        (True, "wrapper_check_20"),
        ("thread", "wrapper_check_17"),
    ],
)
def test_headers_of_c_and_cpp(
    built_library: BuildLibrary, sanitize: Sanitize, program: str
) -> None:
    run_program([built_library("fake", sanitize).program(program)])


def test_a_check_that_fails_is_seen(built_library: BuildLibrary) -> None:
    program = built_library("fake", True).program("abi_check")
    with pytest.raises(AssertionError, match="no check is called nothing"):
        run_program([program, "nothing"])


def test_only_the_interface_is_exported(built_library: BuildLibrary) -> None:
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    header = (SOURCES / "include" / "specrt" / "specrt.h").read_text("utf-8")
    declared = set(re.findall(r"^SPECRT_API [^(]*?(specrt_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 30
    library = built_library("fake").path
    exported = run_program(["nm", "-D", "--defined-only", "--format=posix", library])
    assert {line.split()[0] for line in exported.splitlines()} == declared


@pytest.fixture
def moved(built_library: BuildLibrary, tmp_path: Path) -> Path:
    """An installed tree at another place than it was installed to."""
    place = tmp_path / "moved"
    shutil.copytree(built_library("fake").prefix, place, symlinks=True)
    return place


@pytest.fixture(scope="module")
def examples(built_library: BuildLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, built against an installed tree at another place than it was installed to."""
    place, build = tmp_path_factory.mktemp("examples") / "moved", tmp_path_factory.mktemp("build")
    shutil.copytree(built_library("fake").prefix, place, symlinks=True)
    said = run_program(["cmake", "-S", EXAMPLES, "-B", build, f"-DCMAKE_PREFIX_PATH={place}"])
    assert "specrt 0.1.0, fake" in said
    run_program(["cmake", "--build", build])
    return build


def test_examples_stream(examples: Path) -> None:
    assert "ab ab ab \n" in run_program([examples / "complete", "any", "count 3"])
    said = run_program([examples / "assistant", "any", "count 2", "forever and on"])
    assert said.splitlines()[:3] == ["> count 2", "ab ab ", "[in short: thisab ab ]"]


@pytest.mark.parametrize("program", ["complete", "assistant"])
def test_examples_say_what_went_wrong(examples: Path, program: str) -> None:
    for arguments, status, said in (
        (["missing", "a"], 1, "no bundle is at missing\n"),
        (["any", "fail"], 1, "the pass failed\n"),
        ([], 2, f"usage: {program} BUNDLE"),
    ):
        done = subprocess.run(
            [examples / program, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_pkg_config_goes_with_the_tree(moved: Path, tmp_path: Path) -> None:
    tool = shutil.which("pkg-config")
    if tool is None or shutil.which("cc") is None:
        pytest.skip("needs pkg-config and cc")
    (folder,) = moved.rglob("pkgconfig")
    environment = {"PKG_CONFIG_PATH": str(folder), "PATH": "/usr/bin:/bin"}
    asked = [tool, "--cflags", "--libs", "specrt"]
    flags = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
    program, source = tmp_path / "header", Path(__file__).parent / "abi" / "wrapper" / "header.c"
    where = f"-Wl,-rpath,{folder.parent}"
    run_program(["cc", "-std=c11", source, "-o", program, *flags.stdout.split(), where])
    assert "0.1.0 fake: 3 tokens" in run_program([program])
