"""Checkpoints in place of a bundle: built into the cache once, by one process, or not at all."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import pytest

from cli.conftest import Run
from specrt.bundle import read_manifest
from specrt.cli.cache import bundle_of, cache
from specrt.errors import BuildError, CheckpointError, SpecrtError
from support.bundles import listed

LLAMA = '{"model_type": "llama", "max_position_embeddings": 64}'


@dataclass
class Builds:
    """Stands for the builder: leaves a bundle of no engines, and counts."""

    places: list[Path] = field(default_factory=list)
    meanwhile: Callable[[Path], None] = lambda _: None

    def __call__(self, plan: Any, place: Path, **_: object) -> list[str]:
        self.places.append(place)
        self.meanwhile(place)
        part = place.with_name(f".{place.name}.1.x.part")
        listed(part)
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
        return []


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    made = Builds()
    monkeypatch.setattr("specrt.cli.cache.build_bundle", made)
    monkeypatch.setattr("specrt.doctor.missing_exporter", lambda: None)
    return made


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "specrt"


def checkpoint(place: Path) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text(LLAMA)
    (place / "model.safetensors").write_bytes(b"weights")
    return place


def test_the_first_use_builds_and_the_second_opens(
    builds: Builds, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = checkpoint(tmp_path / "big"), checkpoint(tmp_path / "small")
    place = bundle_of(target, draft)
    said = capsys.readouterr()
    assert place.is_relative_to(root)
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert f"into {place}; `rm -r {place}` removes it" in line
    assert all(str(name) in line for name in (target, draft))
    read_manifest(place)
    assert bundle_of(target, draft) == place
    assert builds.places == [place]
    assert capsys.readouterr().err == ""
    shutil.rmtree(place)
    assert bundle_of(target, draft) == place
    assert len(builds.places) == 2


@pytest.mark.usefixtures("builds", "root")
def test_a_bundle_is_inspected_by_the_name_of_its_pair(cli: Run) -> None:
    assert "codelet is built once" in cli("inspect", "codelet").err


def later(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


CHANGES: dict[str, Callable[[Path, Path], Any]] = {
    "another size": lambda big, _: (big / "model.safetensors").write_bytes(b"more weights"),
    "another time": lambda big, _: later(big / "model.safetensors"),
    "another configuration": lambda big, _: later(big / "config.json"),
    "a shard": lambda big, _: (big / "model-00002.safetensors").write_bytes(b""),
    "another draft": lambda _, small: later(small / "model.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_checkpoint_is_another_bundle(
    change: Callable[[Path, Path], Any], builds: Builds, root: Path, tmp_path: Path
) -> None:
    target, draft = checkpoint(tmp_path / "big"), checkpoint(tmp_path / "small")
    before = bundle_of(target, draft)
    (target / "notes.txt").write_text("of no model")
    assert bundle_of(target, draft) == before
    change(target, draft)
    assert bundle_of(target, draft) not in (before, bundle_of(target), bundle_of(draft))
    assert len(builds.places) == 4
    assert len({place.name for place in root.glob("bundles/[!.]*")}) == 4


def test_of_two_processes_one_builds(
    builds: Builds, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = checkpoint(tmp_path / "big")
    began, waits, end = Event(), Event(), Event()

    class Notes(io.StringIO):
        def write(self, text: str) -> int:
            if "another process builds" in text:
                waits.set()
            return len(text)

    monkeypatch.setattr("sys.stderr", Notes())

    def wait(_: Path) -> None:
        began.set()
        assert end.wait(20)

    builds.meanwhile = wait
    found: list[Path] = []
    both = [Thread(target=lambda: found.append(bundle_of(target))) for _ in range(2)]
    both[0].start()
    assert began.wait(20)
    both[1].start()
    assert waits.wait(20)
    assert found == []
    end.set()
    for thread in both:
        thread.join(20)
    assert len(found) == 2
    assert len(set(found)) == len(builds.places) == 1


def test_a_cache_that_takes_nothing_is_one_line(
    builds: Builds, root: Path, tmp_path: Path, cli: Run
) -> None:
    target = checkpoint(tmp_path / "big")
    root.parent.write_text("a file where the cache belongs")
    said = cli("generate", target, "--prompt", "a").refusal
    assert str(root.parent) in said
    assert "XDG_CACHE_HOME" in said
    assert builds.places == []
    root.parent.unlink()

    def fill(place: Path) -> None:
        error = OSError(errno.ENOSPC, "No space left on device", str(place))
        raise BuildError(f"the build stopped: {error}") from error

    builds.meanwhile = fill
    with pytest.raises(BuildError, match=r"No space left on device.*XDG_CACHE_HOME") as caught:
        bundle_of(target)
    assert "\n" not in str(caught.value)


def test_the_cache_is_where_the_specification_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for given, place in ((str(tmp_path / "x"), "x"), ("relative", ".cache"), ("", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)  # a relative one is to be ignored
        assert cache() == tmp_path / place / "specrt"
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    with pytest.raises(BuildError, match=r"no home folder .*XDG_CACHE_HOME"):
        cache()


def test_a_bundle_is_itself(builds: Builds, root: Path, tmp_path: Path) -> None:
    bundle = listed(tmp_path / "bundle")
    (bundle / "config.json").write_text("{}")
    assert bundle_of(bundle) == bundle
    assert bundle_of(tmp_path / "nothing") == tmp_path / "nothing"
    with pytest.raises(SpecrtError, match=r"--draft is 'x.gguf', and .* is not a checkpoint"):
        bundle_of(bundle, Path("x.gguf"))
    with pytest.raises(CheckpointError, match="expected a GGUF file or a checkpoint's folder"):
        bundle_of(checkpoint(tmp_path / "big"), bundle)
    assert builds.places == []
    assert not root.exists()


@pytest.mark.parametrize("verb", ["generate", "chat", "verify", "bench", "tune"])
def test_every_verb_that_runs_a_bundle_takes_a_checkpoint(
    verb: str, root: Path, tmp_path: Path, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to where nothing can export it: that is one line with the remedy, and leaves nothing."""
    monkeypatch.setattr("specrt.doctor.missing_exporter", lambda: "torch")
    target = checkpoint(tmp_path / "big")
    more = ("--prompts", "x.jsonl") if verb in ("verify", "bench") else ()
    said = cli(verb, target, "--draft", target, *more).refusal
    assert "needs torch; install it with `make setup-export`" in said
    assert not root.exists()
    missing = cli(verb, tmp_path / "none.gguf", *more).refusal
    assert "none.gguf cannot be read: No such file or directory" in missing
