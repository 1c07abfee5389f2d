"""What a dependent project relies on: one version, public names, a README that holds."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

import specrt

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere() -> None:
    assert specrt.__version__ == version("specrt")
    assert f"## {specrt.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_errors_are_caught_by_public_names() -> None:
    assert issubclass(specrt.CapacityError, specrt.RequestError)
    for error in (specrt.RequestError, specrt.EngineError, specrt.BundleError):
        assert issubclass(error, specrt.SpecrtError)


def test_every_public_name_is_there_and_documented() -> None:
    for name in set(specrt.__all__) - {"__version__"}:
        assert getattr(specrt, name).__doc__, name


BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
KERNELS = "runtime/cpp/src/kernels"


def tree(clone: Path) -> Path:
    """Make what an install reads, with a library that compiles at once."""
    for package in ("runtime/specrt", "export/specrt_export"):
        (clone / package).mkdir(parents=True)
        (clone / package / "__init__.py").touch()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, clone / name)
    text = (clone / "pyproject.toml").read_text("utf-8").partition("[tool.setuptools.data-files]")
    (clone / "pyproject.toml").write_text(text[0], "utf-8")
    (clone / KERNELS).mkdir(parents=True)
    (clone / KERNELS / "one.hpp").write_text("int answer();\n")
    shutil.copyfile(ROOT / KERNELS / "compile_flags.txt", clone / KERNELS / "compile_flags.txt")
    return answers(clone, 1)


def answers(clone: Path, number: int) -> Path:
    source = f'#include "kernels/one.hpp"\nint answer() {{ return {number}; }}\n'
    (clone / KERNELS / "one.cpp").write_text(source)
    return clone


def packed(clone: Path, what: str, out: Path, **environment: str) -> Path:
    """Let setuptools make a `wheel`, an `sdist` or an `editable`; return the file."""
    pytest.importorskip("setuptools", minversion="77")
    out.mkdir(exist_ok=True)
    before = {*out.iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(out)], cwd=clone, check=False,
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (made,) = {*out.iterdir()} - before
    return made


def names(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_a_wheel_carries_the_kernels_and_a_source_archive_what_they_are_made_of(
    tmp_path: Path,
) -> None:
    clone = tree(tmp_path / "clone")
    wheel = packed(clone, "wheel", tmp_path / "out")
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheel.name)
    assert "specrt/libspecrt_kernels.so" in names(wheel)
    with tarfile.open(packed(clone, "sdist", tmp_path / "out")) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = {f"{KERNELS}/{name}" for name in ("one.cpp", "one.hpp", "compile_flags.txt")}
    assert {*needed, "setup.py"} <= held


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_an_editable_install_replaces_the_kernels_under_those_who_use_them(tmp_path: Path) -> None:
    clone = tree(tmp_path / "clone")
    library = clone / "runtime/specrt/libspecrt_kernels.so"
    packed(clone, "editable", tmp_path / "first")
    with library.open("rb") as mapped:
        before = mapped.read()
        packed(answers(clone, 2), "editable", tmp_path / "second")
        mapped.seek(0)
        assert mapped.read() == before
    assert library.read_bytes() != before
    assert [p.name for p in library.parent.iterdir() if "kernels" in p.name] == [library.name]


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++")
def test_clang_alone_compiles_the_kernels(tmp_path: Path) -> None:
    """Whatever compiled this Python."""
    (tmp_path / "bin").mkdir()
    for name in ("clang", "clang++", "ld"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    none = dict.fromkeys(("CC", "CXX", "LDSHARED"))
    given = {name: value for name, value in os.environ.items() if name not in none}
    clone, out = tree(tmp_path / "clone"), tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", BUILD, "build_wheel", str(out)]
    environment = {**given, "PATH": str(tmp_path / "bin")}
    subprocess.run(command, cwd=clone, check=True, capture_output=True, env=environment)
    (wheel,) = out.iterdir()
    assert "specrt/libspecrt_kernels.so" in names(wheel)


@pytest.mark.parametrize(
    ("what", "environment"),
    [("wheel", {"CC": "false", "CXX": "false"}), ("editable", {"PATH": ""})],
    ids=str,
)
def test_without_a_compiler_the_package_has_no_kernels(
    tmp_path: Path, environment: dict[str, str], what: str
) -> None:
    clone = tree(tmp_path / "clone")
    library = clone / "runtime/specrt/libspecrt_kernels.so"
    if what == "editable":
        library.write_bytes(b"of older sources")
    wheel = packed(clone, what, tmp_path / "out", **environment)
    assert not [name for name in names(wheel) if name.endswith(".so")]
    assert not library.exists()


def test_make_compiles_the_kernels_again_when_their_sources_change() -> None:
    command = ["make", "-npq", "setup"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    (rule,) = re.findall(r"^\.venv/\.runtime: (.*)$", done.stdout, re.MULTILINE)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / KERNELS).glob("*.?pp")}
    assert sources
    assert sources <= {*rule.split()}


def test_an_editable_install_wins_over_a_folder_called_specrt(tmp_path: Path) -> None:
    above, site = tmp_path / "above", tmp_path / "site"
    clone = tree(above / "specrt")
    wheel = packed(clone, "editable", tmp_path / "out", CC="false", CXX="false")
    with ZipFile(wheel) as archive:
        archive.extractall(site)
        listed = [line.split(",")[0] for line in archive.read(
            next(n for n in archive.namelist() if n.endswith("RECORD"))
        ).decode().split()]  # fmt: skip
        assert sorted(listed) == sorted(archive.namelist())
    (above / "script.py").write_text(
        f"import site; site.addsitedir({str(site)!r})\n"
        "import specrt, specrt_export; print(specrt.__file__, specrt_export.__file__)"
    )
    line = [sys.executable, "-E", "-S", str(above / "script.py")]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    assert done.stdout.split() == [
        f"{clone}/runtime/specrt/__init__.py", f"{clone}/export/specrt_export/__init__.py",
    ], done.stderr  # fmt: skip


def test_ci_runs_the_command_that_the_readme_names() -> None:
    assert "make -s test" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "`make test`" in (ROOT / "README.md").read_text(encoding="utf-8")
