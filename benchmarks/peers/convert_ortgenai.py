"""Make an ONNX Runtime GenAI model of a checkpoint: fp32, or MatMulNBits in int8 or int4.

Run by .venvs/ortgenai/bin/python. Blocks of 32, symmetric, activations in int8 (accuracy level 4,
the builder's default on a CPU), the head included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from peerbench.conversion import convert

QUANTIZED = ["block_size=32", "is_symmetric=true", "accuracy_level=4"]


def make(checkpoint: Path, out: Path, precision: str) -> None:
    """Run the model builder."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = [] if precision == "fp32" else ["--extra_options", *QUANTIZED]
    with tempfile.TemporaryDirectory() as cache:
        paths = ["-i", str(checkpoint), "-o", str(out), "-c", cache]
        subprocess.run([*builder, *paths, "-p", precision, "-e", "cpu", *options], check=True)


if __name__ == "__main__":
    convert(__doc__.split("\n")[0], make)
