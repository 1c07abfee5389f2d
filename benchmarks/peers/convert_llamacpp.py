"""Make a GGUF file of a checkpoint: F32, Q8_0 or Q4_0, every matrix in that type.

Run by .venvs/llamacpp/bin/python. llama.cpp's own converter writes F32 and its own quantizer the
rest. The converter knows a tokenizer by the hash of a sample text; where it does not know the hash,
the pre-tokenizer is named here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from peerbench.conversion import convert

VENV = Path(__file__).parent / ".venvs" / "llamacpp"
SOURCE = VENV / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp"
FULL = "model.f32.gguf"
TYPES = {"int8": "Q8_0", "int4": "Q4_0"}


def make(checkpoint: Path, out: Path, precision: str) -> None:
    """Write `model.gguf` into a folder, with the tokenizer that made its vocabulary."""
    shutil.copy(checkpoint / "tokenizer.json", out)
    _write_full(checkpoint, out / FULL)
    if precision == "fp32":
        (out / FULL).rename(out / "model.gguf")
        return
    program, full = VENV / "build" / "bin" / "llama-quantize", out / FULL
    subprocess.run([program, "--pure", full, out / "model.gguf", TYPES[precision], "2"], check=True)
    full.unlink()


def _write_full(checkpoint: Path, path: Path) -> None:
    sys.path.insert(0, str(SOURCE))
    import convert_hf_to_gguf as script
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def name_pre_tokenizer(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            return pre_tokenizer(checkpoint)

    TextModel.get_vocab_base_pre = name_pre_tokenizer
    sys.argv = ["convert_hf_to_gguf", str(checkpoint), "--outtype", "f32", "--outfile", str(path)]
    if "Qwen3_5" in (checkpoint / "config.json").read_text(encoding="utf-8"):
        sys.argv.append("--no-mtp")  # it takes a head that predicts several tokens for granted
    script.main()


def pre_tokenizer(checkpoint: Path) -> str:
    """Name llama.cpp's pre-tokenizer for byte-level BPE, digits apart or not."""
    given = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    kinds = [part["type"] for part in given.get("pretokenizers", [given])]
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    raise SystemExit(f"{checkpoint} splits text by {kinds}; name llama.cpp's equivalent here")


if __name__ == "__main__":
    convert(__doc__.split("\n")[0], make)
