"""Folders with a manifest, whose engines are none."""

from __future__ import annotations

import platform
from pathlib import Path

from specrt.bundle import FORMAT, Manifest, ModelRecord, hash_file
from specrt.engine.ort.kernels import LAYOUT
from specrt.geometry import Geometry

GEOMETRY = Geometry.uniform(2, 4, 2, 8, 300, 64, (0, 16))
FILES = {
    "target/engine.onnx": b"target engine",
    "draft/engine.onnx": b"draft engine",
    "tokenizer.json": b"{}",
    "empty.json": b"",
}


def record(role: str) -> ModelRecord:
    return ModelRecord(f"{role}/engine.onnx", GEOMETRY, "llama", 1000, 4000, 4, {"rope": "2/2"})


def listed(folder: Path) -> Path:
    """Make a bundle of a folder: all that is there is in the list of its manifest."""
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    manifest = Manifest(
        format=FORMAT, name="pair", backend="ort-cpu", precision="fp32", batch=1, max_length=64,
        prefill=16, gammas=(0, 2, 4), gamma=4, eos_token_ids=(2,), bos_token_id=None,
        target=record("target"), draft=record("draft"),
        versions={"onnxruntime": "1", "kernels": LAYOUT},
        device={"machine": platform.machine()}, source="0" * 64,
        files={name: hash_file(folder / name) for name in names if name != "manifest.json"},
    )  # fmt: skip
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder
