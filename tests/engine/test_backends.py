"""The table of backends: what a manifest names is what opens, and a new backend is one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

import specrt
from engine.tensorrt_site import LENGTH, Site, pair
from specrt.bundle import Bundle
from specrt.engine.backends import BACKENDS, Backend, check_versions, host_bytes
from specrt.errors import BundleError
from specrt.params import SamplingParams
from support.toy import plain


def test_a_backend_from_outside_is_one_line(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    folder, prompt = site.bundle(target, draft, backends=("tables", "tables")), [1, 2, 3]
    with pytest.raises(BundleError, match=rf"'tables'.*{', '.join(BACKENDS)}"):
        specrt.load(folder)
    monkeypatch.setitem(BACKENDS, "tables", Backend(site.table, lambda: "tables 1"))
    with specrt.load(folder) as generator:
        assert generator.models.target is target
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        found = generator.generate(prompt, params, gamma=4)
    assert found.token_ids == plain(target, prompt, 40)
    assert found.speculation.accepted > 0


@pytest.mark.parametrize(
    ("backends", "parts"),
    [(("ort-cpu", "ort-cpu"), 2), (("ort-cuda", "ort-cuda"), 0), (("tensorrt", "ort-cpu"), 1)],
)
def test_only_some_backends_use_main_memory(
    site: Site, backends: tuple[str, str], parts: int
) -> None:
    manifest = Bundle.open(site.bundle(*pair(), backends=backends)).manifest
    model = manifest.target.weight_bytes + manifest.target.geometry.kv_bytes(1, LENGTH, 2)
    assert host_bytes(manifest) == parts * model
    assert host_bytes(replace(manifest, draft=None)) == (backends[0] == "ort-cpu") * model


@pytest.mark.parametrize(
    ("built", "there", "said"),
    [
        (
            "1.30.0",
            {"onnxruntime": "1.29.9"},
            r"onnxruntime 1.30.0, and onnxruntime 1.29.9 .*1.30'",
        ),
        ("1.9", {"onnxruntime-gpu": "1.8.2"}, "pip install 'onnxruntime-gpu>=1.9'"),
        (
            "newest",
            {"onnxruntime": "1.30.0"},
            "names 'newest' as its version .*specrt build RECIPE",
        ),
        *(("1.30.2", {"onnxruntime": here}, "") for here in ("1.30.1", "1.30.0+cu", "2.0", "odd")),
        ("1.30.2", {}, ""),
    ],
)
def test_a_library_older_than_the_one_that_built_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, built: str, there: Mapping[str, str], said: str
) -> None:
    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    for backend in ("ort-cpu", "ort-cuda", "tensorrt"):
        folder = site.bundle(*pair(), backends=(backend, backend), name=backend)
        manifest = replace(Bundle.open(folder).manifest, versions={"onnxruntime": built})
        if said and backend != "tensorrt":
            with pytest.raises(BundleError, match=said):
                check_versions(folder, manifest)
        else:
            check_versions(folder, manifest)
