"""Bundles of encoder-decoders, each built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from encoder_decoder.recipes import QUALITY, save_speech, write_recipe
from shared import locked, shared_folder
from support.builds import build
from support.gpu_double import gpu as gpu
from support.gpu_double import kept_graphs

Built = Callable[..., Path]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build a bundle of a target, and a draft if two are named; its recipe's folder is above it."""
    root = shared_folder(tmp_path_factory) / "encoder-decoders"
    root.mkdir(exist_ok=True)

    def make(
        *names: str, precision: str = "fp32", batch: int = 3, backend: str = "ort-cpu",
        version: str = "",
    ) -> Path:  # fmt: skip
        folder = root / "-".join((*names, precision, backend, str(batch), version))
        with locked(folder.with_suffix(".lock")):
            if not (folder / "bundle").exists():
                lines = [f'backend = "{backend}"']
                lines += [QUALITY] if precision.startswith("int") else []
                lines += ["[tensorrt]", f'version = "{version}"'] if version else []
                recipe = write_recipe(folder, names, precision, *lines, batch=batch)
                if "whisper" in names[0]:
                    save_speech(folder / "texts.jsonl", 6, 40)
                with kept_graphs(folder):
                    build(recipe, folder / "bundle")
        return folder / "bundle"

    return make
