"""The table of backends: what a manifest names is what opens, and a new backend is one line."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import specrt
from engine.tensorrt_site import Site, pair
from specrt.bundle import FORMAT, Geometry, Manifest, ModelRecord
from specrt.engine.backends import BACKENDS, Backend, backend_named, check_versions, host_bytes
from specrt.errors import BundleError, EngineError
from specrt.params import SamplingParams
from support.toy import plain

GEOMETRY = Geometry(1, 1, 1, 4, 270, 64, (0,))


def model(role: str, backend: str = "") -> ModelRecord:
    return ModelRecord(f"{role}.npy", GEOMETRY, "bigram", 1, 1000, 4, {}, backend=backend)


def manifest_of(backend: str, **options: Any) -> Manifest:
    made = Manifest(
        format=FORMAT, name="pair", backend=backend, precision="fp32", batch=1, max_length=64,
        prefill=16, gammas=(0, 2, 4), gamma=4, eos_token_ids=(), bos_token_id=None,
        target=model("target"), draft=model("draft"), versions={},
        device={"machine": platform.machine()}, source="0" * 64, files={},
    )  # fmt: skip
    return replace(made, **options)


def test_a_backend_from_outside_is_one_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    folder, prompt = site.bundle(target, draft, backends=("tables", "tables")), [1, 2, 3]
    with pytest.raises(EngineError, match=rf"'tables'.*{', '.join(BACKENDS)}"):
        specrt.load(folder)
    monkeypatch.setitem(BACKENDS, "tables", Backend(site.table, lambda: "tables 1"))
    with specrt.load(folder) as generator:
        assert generator.models.target is target
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        found = generator.generate(prompt, params, gamma=4)
    assert found.token_ids == plain(target, prompt, 40)
    assert found.speculation.accepted > 0


@pytest.mark.parametrize(
    ("target", "draft", "parts"),
    [("ort-cpu", "", 2), ("tensorrt", "", 0), ("ort-cuda", "", 0), ("tensorrt", "ort-cpu", 1)],
)
def test_only_some_backends_use_main_memory(target: str, draft: str, parts: int) -> None:
    manifest = manifest_of(target, draft=model("draft", draft))
    assert host_bytes(manifest) == parts * (1000 + GEOMETRY.kv_bytes(1, 64, 4))
    assert host_bytes(replace(manifest, draft=None)) == (1000 + 2 * 4 * 64 * 4) * (
        target == "ort-cpu"
    )


VERSIONS = [
    ("1.30.0", {"onnxruntime": "1.29.9"}, r"onnxruntime 1.30.0, and onnxruntime 1.29.9 .*>=1.30'"),
    ("1.9", {"onnxruntime": "1.8.2"}, ">=1.9'"),
    ("1.30.0", {"onnxruntime-gpu": "1.29.9"}, "pip install 'onnxruntime-gpu>=1.30'"),
    ("newest", {"onnxruntime": "1.30.0"}, "names 'newest' as its version .*specrt build RECIPE"),
    ("9" * 9, {"onnxruntime": "1.30.0"}, "names '9"),
    *(("1.30.2", {"onnxruntime": here}, "") for here in ("1.30.1", "1.30.0+cu13", "2.0", "odd")),
    ("1.30.2", {}, ""),
]
"""Built with, installed here, and how that is refused: by an older library, and no other."""


@pytest.mark.parametrize(("built", "there", "said"), VERSIONS)
def test_a_library_older_than_the_one_that_built_is_refused(
    monkeypatch: pytest.MonkeyPatch, built: str, there: Mapping[str, str], said: str
) -> None:
    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    for backend in ("ort-cpu", "ort-cuda", "tensorrt"):
        manifest = manifest_of(backend, versions={"onnxruntime": built})
        if said and backend != "tensorrt":
            with pytest.raises(BundleError, match=said):
                check_versions(Path("pair"), manifest)
        else:
            check_versions(Path("pair"), manifest)


def test_every_backend_names_its_library_and_what_it_lacks() -> None:
    for name in BACKENDS:
        backend = backend_named(name)
        assert backend.library().startswith(("onnxruntime ", f"{name} "))
        assert backend.missing() == "" or any(c in backend.missing() for c in ";:`")
    assert backend_named("ort-cpu").missing() == ""
