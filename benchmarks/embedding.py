"""Measure what embedding costs: overhead of the C interface, time to the first token, memory.

Builds the library hosted and native, each in a folder of its own, and compiles embedding.c against
them. Overhead: completions through the C interface and through Python, in turn, in one process, on
one core and on the same engines, of a model so small that it shows; a round is one token. Time and
memory: a C program that opens the bundle by `dlopen`, started anew each time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any

import onnxruntime

import specrt

SOURCE = Path(__file__).with_suffix(".c")
TOKENS = 64


def built(implementation: str, folder: Path) -> Path:
    """Build and install one implementation; return its shared library."""
    native = ["--native"] if implementation == "native" else []
    command = [sys.executable, "-m", "specrt", "config", "--build", "--to", str(folder), *native]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (library,) = folder.rglob("libspecrt.so")
    return library


def compiled(folder: Path, shared: bool) -> Path:
    """Compile embedding.c to a program, or to a shared library with `rounds`."""
    made = folder / ("embedding.so" if shared else "embedding")
    headers = next(folder.parent.rglob("include"))
    options = ["-shared", "-fPIC"] if shared else []
    subprocess.run(
        ["cc", "-O2", *options, f"-I{headers}", str(SOURCE), "-o", str(made), "-ldl", "-pthread"],
        check=True,
    )
    return made


class Interface:
    """A session behind the C interface, in this process, decoding plainly."""

    def __init__(self, library: Path, bundle: Path, helper: Path) -> None:
        self._c = ctypes.CDLL(str(library))
        self._rounds = ctypes.CDLL(str(helper)).rounds
        self._rounds.restype = ctypes.c_int64
        generator, self._params, self._session = (ctypes.c_void_p() for _ in range(3))
        options = (ctypes.c_uint64 * 7)()
        options[0], options[1] = ctypes.sizeof(options), 1  # its size, one thread
        self._require(self._c.specrt_open(str(bundle).encode(), options, ctypes.byref(generator)))
        self._require(self._c.specrt_session_create(generator, ctypes.byref(self._session)))
        self._require(self._c.specrt_params_create(ctypes.byref(self._params)))
        self._set("gamma", 0)
        self._set("ignore_eos", 1)
        self.max_tokens = TOKENS

    def _set(self, name: str, value: int) -> None:
        given = ctypes.c_int64(value)
        self._require(self._c.specrt_params_set_integer(self._params, name.encode(), given))

    def _require(self, status: int) -> None:
        if status != 0:
            self._c.specrt_last_error.restype = ctypes.c_char_p
            raise SystemExit(self._c.specrt_last_error().decode())

    def complete(self, ids: Sequence[int]) -> int:
        """Complete ids; return the nanoseconds it took."""
        self._set("max_tokens", self.max_tokens)
        given, tokens = (ctypes.c_int64 * len(ids))(*ids), ctypes.c_uint64()
        function = ctypes.cast(self._c.specrt_generate_ids, ctypes.c_void_p)
        took: int = self._rounds(
            function, self._session, given, ctypes.c_size_t(len(ids)), self._params,
            ctypes.byref(tokens),
        )  # fmt: skip
        self._require(min(0, took))
        assert tokens.value == self.max_tokens
        return took


def overhead(interface: Interface, ids: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return microseconds that the hosted library adds to Python, for a completion and per round.

    Both run on the same engines: those of the generator that the library opened, in this process.
    """
    generator = next(o for o in gc.get_objects() if isinstance(o, specrt.Generator))
    apart: dict[int, list[float]] = {1: [], TOKENS: []}
    base: list[float] = []
    for repeat in range(2 * repeats):
        for tokens, found in apart.items():
            interface.max_tokens = tokens
            params = specrt.SamplingParams(max_tokens=tokens, ignore_eos=True)
            took = {}
            for way in ("python", "hosted")[:: 1 if repeat % 2 else -1]:
                if way == "hosted":
                    took[way] = interface.complete(ids)
                    continue
                began = perf_counter_ns()
                for _ in generator.stream(ids, params, gamma=0):
                    pass
                took[way] = perf_counter_ns() - began
            if repeat > 1:  # the first ones bind memory
                found.append((took["hosted"] - took["python"]) / 1e3)
                base += [took["python"] / 1e3] if tokens == TOKENS else []
    rounds = [
        (many - one) / (TOKENS - 1) for one, many in zip(apart[1], apart[TOKENS], strict=True)
    ]
    return {
        "python_us_per_round": round(median(base) / TOKENS, 1),
        "hosted_adds_us_per_completion": round(median(apart[1]), 1),
        "hosted_adds_us_per_round": round(median(rounds), 1),
        "quartiles": [round(at, 1) for at in quantiles(rounds, n=4)[::2]],
        "completions": len(base),
    }


def started(program: Path, library: Path, bundle: Path, ids: Sequence[int], repeats: int) -> Any:
    """Return medians of what a fresh process says that opens the library."""
    wheel = Path(onnxruntime.__file__).parent / "capi"
    runtime = sorted(wheel.glob("libonnxruntime.so*"))[-1]
    command = [*map(str, (program, "first", library, bundle, runtime, *ids))]
    said = [json.loads(subprocess.check_output(command)) for _ in range(repeats + 1)][1:]
    return {name: round(median(one[name] for one in said), 1) for name in said[0]}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("bundle", nargs="?", type=Path, default=Path("engines/build/codelet"))
    parser.add_argument("--small", type=Path, default=Path("engines/build/small"),
                        help="a bundle whose rounds are short; see recipes/small.toml")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        libraries = {name: built(name, root / name) for name in ("hosted", "native")}
        (root / "made").mkdir()
        program, helper = (compiled(root / "made", shared) for shared in (False, True))
        with specrt.open(asked.bundle, threads=1, text_memory_bytes=0) as generator:
            ids = generator.tokenizer.encode("def fibonacci(n):\n")
        del generator
        start = {
            name: started(program, library, asked.bundle, ids, max(3, asked.repeats // 3))
            for name, library in libraries.items()
        }
        interface = Interface(libraries["hosted"], asked.small, helper)
        print(json.dumps({"start": start, **overhead(interface, ids, asked.repeats)}, indent=1))


if __name__ == "__main__":
    main()
