"""Which TensorRT there is, what differs between the two, and what they say."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from specrt.engine.tensorrt import library
from specrt.engine.tensorrt.device import BINDINGS
from specrt.engine.tensorrt.library import (
    FLAVOURS,
    Journal,
    lacks_to_build,
    lacks_to_run,
    open_library,
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

    def imported(name: str) -> Any:
        if isinstance(have[name], Exception):
            raise have[name]
        return have[name]

    monkeypatch.setattr(importlib, "import_module", imported)
    open_library.cache_clear()
    yield have
    open_library.cache_clear()


def test_a_library_that_does_not_open_is_told_with_the_remedy(installed: dict[str, Any]) -> None:
    def refused(said: str, name: str = "tensorrt-rtx") -> None:
        with pytest.raises(EngineError, match=said):
            open_library(name)

    refused("'tensort' is no TensorRT backend; did you mean", "tensort")
    refused("not installed: it comes with JetPack", "tensorrt")
    refused("not installed: `pip install tensorrt-rtx`$")
    installed["tensorrt"] = module_double()
    refused("is installed here, and backend tensorrt would use it")
    installed["tensorrt_rtx"] = ImportError("libx.so: cannot open\nand more")
    refused(r"cannot be imported \(libx.so: cannot open\)")
    installed["tensorrt_rtx"] = module_double("tensorrt-rtx")
    assert open_library("tensorrt-rtx").backend == "tensorrt-rtx"  # a failure is not remembered


@pytest.mark.parametrize(
    ("backend", "version", "native"),
    [
        ("tensorrt", "10.13.3.9", False),
        ("tensorrt", "10.15.0rc1", True),
        ("tensorrt-rtx", "1.7.1.116", True),
    ],
)
def test_the_form_follows_the_version(backend: str, version: str, native: bool) -> None:
    found = library_double(backend, version)
    assert found.native is native
    tells = (found.tells_validity, found.tells_capturable, found.tells_aliases)
    assert (*tells, found.has_runtime_config) == (backend == "tensorrt-rtx",) * 4


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
    assert outer.first_error == "two"
    assert (journal.drain(), journal.drain()) == ("two", "")


def test_the_real_library_is_as_written_down() -> None:
    pytest.importorskip("tensorrt_rtx")
    real = open_library("tensorrt-rtx")
    tells = (real.tells_validity, real.tells_capturable, real.tells_aliases)
    assert (*tells, real.native, real.has_runtime_config) == (True,) * 5
    assert {"7.5", "8.6", "12.0"} <= set(real.capabilities)
    with real.messages() as log:
        builder = real.module.Builder(real.logger)  # it must outlive its networks
        network = builder.create_network(0)
        assert not real.module.OnnxParser(network, real.logger).parse(b"no graph")
    assert log.first_error


@pytest.mark.parametrize(
    ("backend", "found", "run", "build"),
    [
        ("tensorrt", NONE, "x is not there; install the NVIDIA driver", "builds on the GPU"),
        ("tensorrt", survey_of("9.0"), "", ""),
        ("tensorrt-rtx", NONE, "install the NVIDIA driver", ""),
        ("tensorrt-rtx", survey_of("8.9"), "", ""),
        ("tensorrt-rtx", survey_of("9.0"), "compute capability 7.5, 8.9, 12.0, 12.1", ""),
    ],
)
def test_what_is_lacking_is_told_with_the_remedy(
    installed: dict[str, Any], backend: str, found: Survey, run: str, build: str
) -> None:
    config = type("Config", (), {"set_compute_capability": None} if "rtx" in backend else {})
    known = dict.fromkeys(("NONE", "CURRENT", "SM75", "SM89", "SM121", "SM120"))
    installed[FLAVOURS[backend].module] = module_double(
        backend, IBuilderConfig=config, ComputeCapability=type("C", (), {"__members__": known})
    )
    installed[BINDINGS] = "installed"
    for lacks, said in (
        (lacks_to_run(backend, found), run), (lacks_to_build(backend, found), build)
    ):  # fmt: skip
        assert bool(lacks) is bool(said)
        assert said in lacks
    del installed[BINDINGS]
    assert "cannot be imported" in lacks_to_run(backend, survey_of("8.9"))
    installed.clear()
    open_library.cache_clear()
    assert "is not installed" in lacks_to_run(backend, survey_of("8.9"))
    assert "is not installed" in lacks_to_build(backend, found)
