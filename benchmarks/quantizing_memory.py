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
import os
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from specrt_export.plan.calibration_text import MOST_FITTED, PIECE
from specrt_export.precision import BitBound, Precision
from specrt_export.quantize.bit_allocation import open_search
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
    parser.add_argument("--layers", type=int, default=2, help="2 or more")
    parser.add_argument("--inner", type=int, default=14336, help="14336 or 11008")
    parser.add_argument("--tokens", type=int, default=MOST_FITTED)
    parser.add_argument("--bits-auto", action="store_true", help="also measure parts' bits")
    parser.add_argument("--limit-gb", type=float, default=0.0, help="most data; 0 for no limit")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint there, and use it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        checkpoint = (options.folder or scratch) / f"{options.layers}-{options.inner}"
        graph = checkpoint / "model.onnx"
        if not graph.is_file():
            checkpoint.mkdir(parents=True, exist_ok=True)
            write_checkpoint(checkpoint, options.layers, options.inner)
            command = [sys.executable, "-m", "specrt", "export", str(checkpoint)]
            subprocess.run([*command, "--out", str(graph)], check=True)
        measure(options, checkpoint, graph, scratch)


def measure(options: argparse.Namespace, checkpoint: Path, graph: Path, scratch: Path) -> None:
    """Quantize a checkpoint."""
    pieces = np.random.default_rng(0).integers(3, VOCAB, (options.tokens // PIECE, PIECE))
    text = CalibrationText(list(pieces), scratch / "kept")
    if options.limit_gb:
        most = int(options.limit_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    watch = MemoryWatch()
    begun: list[tuple[str, float, float]] = []

    def progress(part: str, done: float) -> None:
        print(f"{part}, {done:.0%}: most so far {watch.own_bytes / 1e9:.2f} GB", flush=True)
        if not begun or begun[-1][0] != part:
            begun.append((part, time.monotonic(), time.process_time()))

    precision = Precision.of("int4", block=128, calibrated=True, auto=options.bits_auto)
    codes = None
    if options.bits_auto:
        _, codes = open_search(graph, checkpoint, precision, BitBound(max_kl=1.0), text, progress)
    folder = scratch / "quantized"
    quantize(graph, checkpoint, folder, precision, progress, text, codes=codes)
    progress("end", 1.0)
    watch.end()
    layers = [one for one in begun if "layer" in one[0]]
    (_, first, cpu_then), (_, last, cpu_now) = layers[0], layers[-1]
    found, cpu = (last - first) / (options.layers - 1), (cpu_now - cpu_then) / (options.layers - 1)
    rest = begun[-1][1] - last - found  # after the last layer's codes
    written, of_7b = (
        sum(int(np.prod(shape)) for _, shape in shapes(count, options.inner))
        for count in (options.layers, LAYERS_OF_7B)
    )
    print(
        f"{options.layers} layers of {HIDDEN} and {options.inner}, {pieces.size} tokens, on "
        f"{len(os.sched_getaffinity(0))} cores: codes of a layer {found:.1f} s ({cpu:.1f} CPU "
        f"seconds), writing {written / 1e6:.0f} M weights {rest:.1f} s; so {LAYERS_OF_7B} layers "
        f"{(LAYERS_OF_7B * found + rest * of_7b / written) / 60:.1f} min"
    )
    print(
        f"own memory {watch.own_bytes / 1e9:.2f} GB, mapped files {watch.file_bytes / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
