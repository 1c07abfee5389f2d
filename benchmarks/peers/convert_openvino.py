"""Make an OpenVINO model of a checkpoint: fp32, or weights in int8 or int4.

Run by .venvs/openvino-convert/bin/python. int8 is symmetric per output channel, the only int8 that
NNCF offers; int4 is symmetric in groups of 32, embedding and head included.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from peerbench.conversion import convert

WEIGHTS = {
    "fp32": ["--weight-format", "fp32"],
    "int8": ["--weight-format", "int8", "--sym"],
    "int4": ["--weight-format", "int4", "--sym", "--group-size", "32", "--ratio", "1.0",
             "--all-layers"],
}  # fmt: skip


def make(checkpoint: Path, out: Path, precision: str) -> None:
    """Export with optimum-intel, keys and values as states."""
    export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    task = ["--task", "text-generation-with-past", "--library", "transformers"]
    paths = ["--model", str(checkpoint), str(out)]
    subprocess.run([*export, *task, *WEIGHTS[precision], *paths], check=True)


if __name__ == "__main__":
    convert(__doc__.split("\n")[0], make)
