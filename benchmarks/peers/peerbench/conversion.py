"""What every converter's command line does: a checkpoint in, a finished folder out or nothing."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

PRECISIONS = ("fp32", "int8", "int4")


def convert(purpose: str, make: Callable[[Path, Path, str], None]) -> None:
    """Read CHECKPOINT OUT --precision, let `make(checkpoint, folder, precision)` fill a folder.

    The folder gets its name when it is complete: an interrupted run leaves nothing half-made.
    """
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("out", type=Path, help="folder to make; replaced where it exists")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    given = parser.parse_args()
    if not (given.checkpoint / "config.json").is_file():
        parser.error(f"{given.checkpoint} holds no config.json; give a checkpoint's folder")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=given.out.name, dir=given.out.parent) as aside:
        partial = Path(aside).resolve() / "model"
        partial.mkdir()
        make(given.checkpoint.resolve(), partial, given.precision)
        shutil.rmtree(given.out, ignore_errors=True)
        partial.rename(given.out)
