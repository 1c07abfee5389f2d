"""What a dependent project relies on: one version, public names, a README that holds."""

import re
from importlib.metadata import version
from pathlib import Path

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


def test_ci_runs_the_command_that_the_readme_names() -> None:
    assert "make -s test" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "`make test`" in (ROOT / "README.md").read_text(encoding="utf-8")
