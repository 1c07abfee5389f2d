"""Folders of speech bundles whose engines are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from specrt.bundle import EncoderRecord, hash_file, read_manifest
from speech.scripted import EN, END, SETTINGS, SILENT, START, TRANSCRIBE, VOCABULARY
from support.bundles import listed

EXTRACTOR = {"feature_size": 4, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400}


def speech_folder(folder: Path, **files: dict[str, Any] | None) -> Path:
    """Make a bundle of speech; `files` replace those of settings, by their names without .json."""
    settings: dict[str, dict[str, Any] | None] = {
        "generation_config": dict(SETTINGS), "preprocessor_config": EXTRACTOR, **files
    }  # fmt: skip
    for engine in ("target/encoder.onnx", "target/cross.onnx"):
        (folder / engine).parent.mkdir(parents=True, exist_ok=True)
        (folder / engine).write_bytes(engine.encode())
    for name, value in settings.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    manifest = read_manifest(listed(folder))
    encoder = EncoderRecord("target/cross.onnx", 1500, 8, 2, 4, "target/encoder.onnx", 4, 3000)
    geometry = replace(manifest.target.geometry, vocab_size=VOCABULARY)
    made = replace(
        manifest,
        task="automatic-speech-recognition",
        target=replace(manifest.target, geometry=geometry, encoder=encoder),
        draft=None,
        decoder_start=(START, EN, TRANSCRIBE, SILENT),
        eos_token_ids=(END,),
        files={name: hash_file(folder / name) for name in manifest.files},
    )
    (folder / "manifest.json").write_text(made.to_json(), encoding="utf-8")
    return folder
