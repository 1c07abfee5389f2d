"""Memory and time of `quantizer = "gptq"` on layers of a 7 B model's sizes, with random weights.

    python benchmarks/quantizing_memory.py [--layers 2] [--inner 14336] [--limit-gb 4]

Writes a checkpoint of a few layers into a temporary folder (0.5 GB each, and twice 0.26 GB of
tables), exports it, and quantizes it to int4 in blocks of 128 on as many tokens as a build takes.
Own memory is `RssAnon` and `RssShmem` of /proc/self/status, read every 20 ms: what the process
cannot give back. Pages of mapped files, `RssFile`, are told apart. A limit holds for the process's
data, as the kernel counts it (RLIMIT_DATA), which is more than what is resident.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from specrt_export.checkpoint import Checkpoint
from specrt_export.inputs import MOST_FITTED, PIECE
from specrt_export.portable.exporter import export_graph
from specrt_export.precision import Precision
from specrt_export.quantize.calibration import CalibrationText
from specrt_export.quantize.quantizer import quantize

HIDDEN, HEADS, KV_HEADS, VOCAB, LAYERS_OF_7B = 4096, 32, 8, 32000, 32


def shapes(layers: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each weight of a Llama."""
    keys = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", keys, HIDDEN),
            ("self_attn.v_proj", keys, HIDDEN), ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", inner, HIDDEN), ("mlp.up_proj", inner, HIDDEN),
            ("mlp.down_proj", HIDDEN, inner),
        ):  # fmt: skip
            yield f"model.layers.{layer}.{name}.weight", (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_checkpoint(folder: Path, layers: int, inner: int) -> None:
    """Write random bf16 weights, of the spread that models are begun with."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes(layers, inner):
        size = 2 * int(np.prod(shape))
        place = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        header[name], end = place, end + size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (_, shape) in enumerate(shapes(layers, inner)):
            _write(file, number, shape)


def _write(file: BinaryIO, seed: int, shape: tuple[int, ...]) -> None:
    chance = np.random.default_rng(seed)
    rows = shape[0] if len(shape) > 1 else 1
    for at in range(0, rows, 2048):
        some = (min(2048, rows - at), shape[-1])
        ones = len(shape) == 1
        values = np.ones(some, np.float32) if ones else chance.standard_normal(some, np.float32)
        values *= 1 if ones else 0.02
        file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


class MemoryWatch:
    """The most memory of this process while it runs, its own and pages of mapped files."""

    def __init__(self) -> None:
        self.own_bytes = self.file_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.look()

    def look(self) -> None:
        """Read how much it is now."""
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        own, files = (
            sum(1024 * int(fields[name].split()[0]) for name in names)
            for names in (("RssAnon", "RssShmem"), ("RssFile",))
        )
        self.own_bytes, self.file_bytes = max(own, self.own_bytes), max(files, self.file_bytes)

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join()


def main() -> None:
    """Quantize, and print memory and the time of a layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--inner", type=int, default=14336, help="14336 or 11008")
    parser.add_argument("--limit-gb", type=float, default=0.0, help="most data; 0 for no limit")
    parser.add_argument("--folder", type=Path, help="for the checkpoint, kept there")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(options, scratch)
    finally:
        shutil.rmtree(scratch)


def measure(options: argparse.Namespace, scratch: Path) -> None:
    """Write, export and quantize a checkpoint."""
    write_checkpoint(scratch, options.layers, options.inner)
    graph = export_graph(Checkpoint.open(scratch), scratch / "model.onnx").path
    pieces = np.random.default_rng(0).integers(3, VOCAB, (MOST_FITTED // PIECE, PIECE))
    text = CalibrationText(list(pieces), scratch / "kept")
    if options.limit_gb:
        most = int(options.limit_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    watch, times = MemoryWatch(), list[tuple[str, float]]()
    began = time.monotonic()
    peaks: dict[str, float] = {}

    def progress(part: str, done: float) -> None:
        times.append((part, time.monotonic()))
        peaks[f"{part}, {done:.0%}"] = watch.own_bytes / 1e9

    before = watch.own_bytes
    quantize(
        graph, scratch, scratch / "quantized", Precision.of("int4", block=128, calibrated=True),
        progress, text,
    )  # fmt: skip
    ended = time.monotonic()
    watch.end()
    first = {part: at for part, at in reversed(times)}
    begins = [at for part, at in first.items() if part.startswith("layer")]
    layers = sorted(begins)
    each = (times[-1][1] - layers[0]) / max(1, len(layers) - 1) if len(layers) > 1 else 0.0
    print(f"before: {before / 1e9:.2f} GB; at each step, GB: {peaks}")
    print(
        f"{options.layers} layers of {HIDDEN} and {options.inner}, {pieces.size} tokens: "
        f"{ended - began:.0f} s; a layer {each:.1f} s, {LAYERS_OF_7B} of them "
        f"{LAYERS_OF_7B * each / 60:.1f} min"
    )
    print(f"most own memory {watch.own_bytes / 1e9:.2f} GB, mapped files {watch.file_bytes / 1e9:.2f}")


if __name__ == "__main__":
    main()
