"""What a dependent project relies on: one version, public names, a README that holds."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

import specrt
from specrt.cli import COMMANDS

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


def test_the_readme_names_only_targets_and_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert named
    assert named <= targets
    used = set(re.findall(r"^specrt ([a-z]+)", readme, re.MULTILINE))
    assert used
    assert used <= set(COMMANDS)


BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"


def test_an_editable_install_wins_over_a_folder_called_specrt(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    above, site = tmp_path / "above", tmp_path / "site"
    clone = above / "specrt"
    for package in ("runtime/specrt", "export/specrt_export"):
        (clone / package).mkdir(parents=True)
        (clone / package / "__init__.py").touch()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, clone / name)
    text = (clone / "pyproject.toml").read_text("utf-8").partition("[tool.setuptools.data-files]")
    (clone / "pyproject.toml").write_text(text[0], "utf-8")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=clone, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
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
