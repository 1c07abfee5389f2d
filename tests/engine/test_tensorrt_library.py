"""Which TensorRT there is, what differs between the two, and what they say."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest

from specrt.engine.tensorrt import library
from specrt.engine.tensorrt.library import (
    FLAVOURS,
    Journal,
    first_line,
    lacks_to_build,
    lacks_to_run,
    open_library,
    parse_version,
)
from specrt.errors import EngineError
from specrt.system import Gpu, Survey
from support.tensorrt_double import library_double, module_double

NONE = Survey(problem="no NVIDIA driver: x is not there")


def survey_of(capability: str) -> Survey:
    return Survey((Gpu(0, "A GPU", capability, 8 << 30),), "", (13, 0), "580.65.06")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return what is installed: a module, or what its import raises."""
    have: dict[str, Any] = {}
    monkeypatch.setattr(library, "is_installed", lambda name: FLAVOURS[name].module in have)
    real = importlib.import_module

    def imported(name: str) -> Any:
        found = have.get(name)
        if isinstance(found, Exception):
            raise found
        return real(name) if found is None else found

    monkeypatch.setattr(importlib, "import_module", imported)
    open_library.cache_clear()
    yield have
    open_library.cache_clear()


@pytest.mark.parametrize(("backend", "other"), list(permutations(FLAVOURS)))
def test_a_library_that_does_not_open_is_told_with_the_remedy(
    installed: dict[str, Any], backend: str, other: str
) -> None:
    def refusal(name: str = backend) -> str:
        with pytest.raises(EngineError) as refused:
            open_library(name)
        return str(refused.value)

    assert refusal().endswith(f"which is not installed: {FLAVOURS[backend].install}")
    installed[FLAVOURS[other].module] = module_double(other)
    assert f"is installed here, and backend {other} would use it" in refusal()
    assert "'tensort' is no TensorRT backend; did you mean" in refusal("tensort")
    installed[FLAVOURS[backend].module] = ImportError("libx.so: cannot open\nand more")
    assert "cannot be imported (libx.so: cannot open)" in refusal()
    installed[FLAVOURS[backend].module] = module_double(backend)
    assert open_library(backend).backend == backend  # a failure is not remembered


@pytest.mark.parametrize(
    ("backend", "version", "native"),
    [
        ("tensorrt", "10.13.3.9", False),
        ("tensorrt", "10.15.1.29", True),
        ("tensorrt-rtx", "1.7.1.116", True),
    ],
)
def test_the_form_follows_the_version(backend: str, version: str, native: bool) -> None:
    found = library_double(backend, version)
    assert found.native is native
    assert found.title == f"{FLAVOURS[backend].title} {version}"
    tells = (found.tells_validity, found.tells_capturable, found.tells_aliases)
    assert (*tells, found.has_runtime_config) == (backend == "tensorrt-rtx",) * 4


def test_versions_are_read_as_far_as_they_are_numbers() -> None:
    for text, number in ("10.3.0.26", (10, 3, 0, 26)), ("10.3.0rc1", (10, 3, 0, 0)), ("", (0,) * 4):
        assert parse_version(text) == number


def test_messages_go_to_the_blocks_that_listen() -> None:
    journal = Journal()
    journal.write(0, "before")
    with journal.listen() as outer:
        journal.write(3, "one")
        with journal.listen() as inner:
            journal.write(1, "two\nlines")
        journal.write(9, "three")
    journal.write(1, "after")
    said = [(m.severity, m.text) for m in outer.messages]
    assert said == [("info", "one"), ("error", "two\nlines"), ("verbose", "three")]
    assert [m.text for m in inner.messages] == ["two\nlines"]
    assert (outer.first_error, inner.first_error) == ("two", "two")
    assert (journal.drain(), journal.drain()) == ("two", "")
    assert first_line("  \n ") == ""
    assert len(first_line("x" * 9999)) < 1000


def test_the_real_library_is_as_written_down() -> None:
    pytest.importorskip("tensorrt_rtx")
    real = open_library("tensorrt-rtx")
    tells = (real.tells_validity, real.tells_capturable, real.tells_aliases)
    assert (*tells, real.native, real.has_runtime_config) == (True,) * 5
    assert {"7.5", "8.6", "12.0"} <= set(real.capabilities)
    with real.messages() as log:
        builder = real.module.Builder(real.logger)  # it must outlive its networks
        network = builder.create_network(0)
        parser = real.module.OnnxParser(network, real.logger)
        assert not parser.parse(b"no graph")
    assert log.first_error


RTX_GPUS = dict.fromkeys(("NONE", "CURRENT", "SM75", "SM89", "SM121", "SM120"))


@pytest.mark.parametrize(
    ("backend", "found", "lacking", "run", "build"),
    [
        ("tensorrt", NONE, "", "x is not there; install the NVIDIA driver", "builds on the GPU"),
        ("tensorrt", survey_of("9.0"), "", "", ""),
        ("tensorrt", survey_of("9.0"), "library", "is not installed", "is not installed"),
        ("tensorrt", survey_of("9.0"), "bindings", "bindings are missing", ""),
        ("tensorrt-rtx", NONE, "", "install the NVIDIA driver", ""),
        ("tensorrt-rtx", survey_of("8.9"), "", "", ""),
        ("tensorrt-rtx", survey_of("9.0"), "", "compute capability 7.5, 8.9, 12.0, 12.1", ""),
        ("tensorrt-rtx", survey_of(""), "", "", ""),
    ],
)
def test_what_is_lacking_is_told_with_the_remedy(
    installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    backend: str, found: Survey, lacking: str, run: str, build: str,
) -> None:  # fmt: skip
    def bindings() -> None:
        if lacking == "bindings":
            raise EngineError("bindings are missing")

    monkeypatch.setattr(library, "cuda_bindings", bindings)
    config = type("Config", (), {"set_compute_capability": None} if "rtx" in backend else {})
    capabilities = type("C", (), {"__members__": RTX_GPUS})
    if lacking != "library":
        installed[FLAVOURS[backend].module] = module_double(
            backend, IBuilderConfig=config, ComputeCapability=capabilities
        )
    for lacks, said in (
        (lacks_to_run(backend, found), run), (lacks_to_build(backend, found), build)
    ):  # fmt: skip
        assert bool(lacks) is bool(said)
        assert said in lacks
