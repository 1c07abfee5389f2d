"""Fixtures that every room shares: the codelet bundle and exported graphs, each made once."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import specrt
from portable import zoo
from portable.zoo import Exported
from shared import REPOSITORY, locked, shared_folder
from specrt.generator import Generator
from specrt.text.tokenizer import Tokenizer
from specrt_export.recipe.recipe import read_recipe
from speech.tiny_whisper import save_pair
from support.builds import build, is_fresh
from support.toy import byte_level

FIRST = ("cpp", "kernels", "portable", "lower", "compile", "check", "export")
"""Folders whose tests take longest, so that no worker begins one of them last."""

settings.register_profile("specrt", deadline=None)  # no test fails by the clock
settings.load_profile("specrt")

# A shell ignores Ctrl-C for what it runs in the background, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


LACKING = {
    "chromium": "the page at `/` (apt-get install chromium)",
    "clang++": "what Clang compiles (apt-get install clang)",
    "nvidia-smi": "what needs an NVIDIA GPU and its driver",
}
"""What is skipped where a program is not installed, and the remedy."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say how long all tests take, and what is skipped and why, before they begin."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    narrowed = config.args != config.getini("testpaths") or config.option.keyword
    if reporter is None or narrowed:
        return
    absent = [f"{what}: no {name}" for name, what in LACKING.items() if not shutil.which(name)]
    reporter.write_line("all tests take six to eight minutes on two cores that nothing else uses")
    for line in (*absent, "long variants, which run with ARGS='-m nightly'"):
        reporter.write_line(f"skipped: {line}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders that take longest."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(REPOSITORY / "tests").parts[0]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=rank)


@pytest.fixture(scope="session")
def engines() -> Path:
    """The folder of recipes."""
    return REPOSITORY / "engines"


@pytest.fixture(scope="session")
def draft(engines: Path) -> tuple[Path, Path]:
    """The portable graph of codelet's draft, and its checkpoint."""
    folder = engines / "codelet"
    return folder / "portable" / "draft.onnx", folder / "checkpoint" / "draft"


@pytest.fixture(scope="session")
def target(engines: Path) -> tuple[Path, Path]:
    """The portable graph of codelet's target, where three queries share keys; its checkpoint."""
    folder = engines / "codelet"
    return folder / "portable" / "target.onnx", folder / "checkpoint" / "target"


@pytest.fixture(scope="session")
def code_prompts() -> Path:
    """The prompt file that codelet is measured on."""
    return REPOSITORY / "benchmarks" / "prompts" / "code.jsonl"


@pytest.fixture(scope="session")
def codelet(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Path:
    """The bundle of engines/codelet, built by whichever worker comes first."""
    shared = shared_folder(tmp_path_factory)
    recipe = read_recipe(engines / "codelet" / "recipe.toml")
    bundle = shared / "codelet"
    with locked(shared / "codelet.lock"):
        if not is_fresh(recipe, bundle):
            build(recipe, bundle)
    return bundle


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a small random Whisper, built by whichever worker comes first."""
    shared = shared_folder(tmp_path_factory) / "whisper"
    with locked(shared.with_suffix(".lock")):
        if not (shared / "bundle").exists():
            build(read_recipe(save_pair(shared)), shared / "bundle")
    return shared / "bundle"


@pytest.fixture(scope="session")
def generator(codelet: Path) -> Iterator[Generator]:
    """Codelet, opened once for each worker, on one core so that workers do not fight for them."""
    with specrt.load(codelet, threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The toy engines' tokenizer: byte-level, so that token i is byte i."""
    return Tokenizer(byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def exported() -> Callable[[str], Exported]:
    """Exports an architecture of the zoo, or finds it exported by this or an earlier run."""
    return zoo.exported
