"""The table of backends: what a manifest names is what opens, and a new backend is one line."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

import specrt
from specrt.bundle import FORMAT, Geometry, Manifest, ModelRecord, hash_file
from specrt.engine.backends import (
    BACKENDS,
    Backend,
    backend_named,
    check_versions,
    host_bytes,
)
from specrt.engine.protocol import check_bounds
from specrt.errors import BundleError, EngineError
from specrt.params import SamplingParams
from support.toy import TableOutput, byte_level

GEOMETRY = Geometry(1, 1, 1, 4, 270, 64, (0,))


class BigramEngine:
    """An engine in NumPy: the scores after a token are a row of a saved table."""

    def __init__(
        self, path: Path, geometry: Geometry, *, batch: int, max_length: int, max_width: int,
        **_: Any,
    ) -> None:  # fmt: skip
        self.geometry, self.batch = geometry, batch
        self.max_length, self.max_width = max_length, max_width
        self.table: NDArray[np.float32] = np.load(path)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> TableOutput:
        fed, starts = np.asarray(tokens, np.int64), np.asarray(start)
        check_bounds(self, fed.shape[1], int(starts.min()), int(starts.max()))
        logits = self.table[fed[:, -(rows or fed.shape[1]) :]]
        return TableOutput(logits, logits.argmax(-1), np.ones(logits.shape[:2], np.float32))

    def close(self) -> None:
        pass


def model(role: str, backend: str = "") -> ModelRecord:
    return ModelRecord(f"{role}.npy", GEOMETRY, "bigram", 1, 1000, 4, {}, backend=backend)


def manifest_of(backend: str, **options: Any) -> Manifest:
    made = Manifest(
        format=FORMAT, name="bigrams", backend=backend, precision="fp32", batch=1, max_length=64,
        prefill=16, gammas=(0, 2, 4), gamma=4, eos_token_ids=(), bos_token_id=None,
        target=model("target"), draft=model("draft"), versions={},
        device={"machine": platform.machine()}, source="0" * 64, files={},
    )  # fmt: skip
    return replace(made, **options)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of two tables; the draft's is the target's with some noise."""
    rng = np.random.default_rng(5)
    table = rng.standard_normal((270, 270)).astype(np.float32)
    np.save(tmp_path / "target.npy", table)
    np.save(tmp_path / "draft.npy", table + 0.3 * rng.standard_normal(table.shape))
    byte_level(tmp_path)
    files = {path.name: hash_file(path) for path in tmp_path.iterdir()}
    text = manifest_of("bigrams", files=files).to_json()
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_backend_from_outside_is_one_line(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "bigrams", Backend(BigramEngine, lambda: "bigrams 1"))
    with specrt.load(bundle) as generator:
        assert isinstance(generator.models.target, BigramEngine)
        params = SamplingParams(max_tokens=40)
        fast = generator.generate("a prompt", params)
        plain = generator.generate("a prompt", params, gamma=0)
    token, tokens = ord("t"), []
    for _ in range(40):
        token = int(np.load(bundle / "target.npy")[token].argmax())
        tokens.append(token)
    assert fast.token_ids == plain.token_ids == tokens
    assert fast.speculation.accepted > 0


def test_an_unknown_backend_is_named_beside_those_there_are(bundle: Path) -> None:
    with pytest.raises(EngineError, match=rf"'bigrams'.*{', '.join(BACKENDS)}"):
        specrt.load(bundle)


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
