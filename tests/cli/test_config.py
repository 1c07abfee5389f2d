"""`specrt config`: flags for a build, and building the library."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.conftest import Run
from shared import REPOSITORY
from specrt.cli import config as compiling

PC = "prefix=${pcfiledir}/../..\nimplementation=native\n\nName: specrt\nVersion: 0.1.0\n"
PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(small LANGUAGES CXX)
include(GNUInstallDirs)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/small.cpp "int small() { return RETURNED; }")
add_library(specrt SHARED ${CMAKE_CURRENT_BINARY_DIR}/small.cpp)
set_target_properties(specrt PROPERTIES VERSION 0.1.0 SOVERSION 1)
install(TARGETS specrt LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    prefix = tmp_path / "a place"
    (prefix / "lib" / "pkgconfig").mkdir(parents=True)
    (prefix / "lib" / "libspecrt.so").touch()
    (prefix / "lib" / "pkgconfig" / "specrt.pc").write_text(PC)
    return prefix


def test_it_prints_what_was_asked_on_one_line(cli: Run, installed: Path) -> None:
    lib = f"'{installed}/lib'"
    for asked, told in (
        (["--cmake-dir"], f"'{installed}/lib/cmake/specrt'"),
        (["--version"], "0.1.0 native"),
        (["--libs", "--cflags"], f"-I'{installed}/include' -L{lib} -Wl,-rpath,{lib} -lspecrt"),
    ):
        ran = cli("config", "--to", installed, *asked)
        assert (ran.status, ran.out, ran.err) == (0, f"{told}\n", "")
    (installed / "lib" / "libspecrt.so").rename(installed / "lib" / "libspecrt.a")
    ran = cli("config", "--to", installed, "--libs")
    assert ran.out == f"-L{lib} -Wl,-rpath,{lib} -lspecrt -lstdc++ -lm -lpthread -ldl\n"


@pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None,
    reason="needs cmake and a C++ compiler",
)
def test_a_build_is_installed_whole_or_not_at_all(
    cli: Run, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project" / "CMakeLists.txt"  # the library's takes a minute to compile
    project.parent.mkdir()
    project.write_text(PROJECT.replace("RETURNED", "1"))
    monkeypatch.setattr(compiling, "_sources", lambda: project.parent)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/lib").write_text("a file")
    ran = cli("config", "--build", "--to", tmp_path / "other")
    assert (ran.status, ran.out) == (2, "")
    assert f"{tmp_path}/other cannot be written to" in ran.err.splitlines()[-1]
    assert "name another folder with --to" in ran.err
    before = sorted(installed.rglob("*"))
    project.write_text(PROJECT.replace("RETURNED", "no_such_name"))
    ran = cli("config", "--build", "--to", installed)
    assert (ran.status, ran.out, "no_such_name" in ran.err) == (2, "", True)
    assert ran.err.endswith("as shown above; nothing was installed\n")
    assert sorted(installed.rglob("*")) == before
    project.write_text(PROJECT.replace("RETURNED", "1"))
    ran = cli("config", "--build", "--to", tmp_path / "out")
    assert ran.status == 0
    names = sorted(path.name for path in (tmp_path / "out").rglob("*") if not path.is_dir())
    assert names == ["installed.txt", "libspecrt.so", "libspecrt.so.0.1.0", "libspecrt.so.1"]
    assert (tmp_path / "out/lib/libspecrt.so").is_symlink()
    project.write_text(
        PROJECT.replace("RETURNED", "1").replace("SHARED", "STATIC").replace("LIBRARY", "ARCHIVE")
    )
    ran = cli("config", "--build", "--static", "--libs", "--to", tmp_path / "out")
    assert ran.out.endswith("-lspecrt -lstdc++ -lm -lpthread -ldl\n")
    project.write_text(PROJECT.replace("RETURNED", "1").replace("specrt", "other"))
    assert cli("config", "--build", "--to", tmp_path / "out").status == 0
    (tmp_path / "out/lib/mine").touch()
    for told in ("removed libspecrt from", "name the folder that --build installed to"):
        ran = cli("config", "--uninstall", "--to", tmp_path / "out")
        assert told in ran.out + ran.err
        assert [path.name for path in (tmp_path / "out").rglob("*")] == ["lib", "mine"]


def test_all_that_is_missing_is_named_at_once(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    said = cli("config", "--build", "--to", tmp_path / "out").refusal
    for name in ("cmake and one of c++", "`pip install cmake`", "`apt install g++`"):
        assert name in said


def test_the_wheel_carries_every_source() -> None:
    """Else a folder that is added builds here, and nowhere else."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    root = REPOSITORY / "runtime" / "cpp"
    carried = set()
    for place, patterns in settings["tool"]["setuptools"]["data-files"].items():
        for file in (file for pattern in patterns for file in REPOSITORY.glob(pattern)):
            assert str(Path(place, file.name)) == f"share/specrt/cpp/{file.relative_to(root)}"
            carried.add(file)
    there = {f for f in root.rglob("*") if f.is_file() and f.name != ".clang-format"}
    assert {str(f) for f in there - carried if "__pycache__" not in str(f)} == set()
