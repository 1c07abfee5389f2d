"""Measure what embedding costs: overhead of the C interface, time to the first token, memory.

Builds the library hosted and native, each in a folder of its own, and compiles embedding.c against
them. Overhead: completions through the C interface and through Python, in turn, in one process and
on one core, over engines of the same bundle; a round is what lies between two deliveries. Time and
memory: a C program that opens the bundle by `dlopen`, started anew each time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
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
        ["cc", "-O2", *options, f"-I{headers}", str(SOURCE), "-o", str(made), "-ldl"], check=True
    )
    return made


class Interface:
    """A session behind the C interface, in this process."""

    def __init__(self, library: Path, bundle: Path, helper: Path, gamma: int) -> None:
        self._c = ctypes.CDLL(str(library))
        self._rounds = ctypes.CDLL(str(helper)).rounds
        self._rounds.restype = ctypes.c_int64
        generator, self._params, self._session = (ctypes.c_void_p() for _ in range(3))
        options = (ctypes.c_uint64 * 16)()
        options[0], options[1] = 56, 1  # its size, one thread
        self._require(self._c.specrt_open(str(bundle).encode(), options, ctypes.byref(generator)))
        self._require(self._c.specrt_session_create(generator, ctypes.byref(self._session)))
        self._require(self._c.specrt_params_create(ctypes.byref(self._params)))
        for name, value in (("max_tokens", TOKENS), ("gamma", gamma), ("ignore_eos", 1)):
            self._require(
                self._c.specrt_params_set_integer(
                    self._params, name.encode(), ctypes.c_int64(value)
                )
            )

    def _require(self, status: int) -> None:
        if status != 0:
            self._c.specrt_last_error.restype = ctypes.c_char_p
            raise SystemExit(self._c.specrt_last_error().decode())

    def complete(self, ids: Sequence[int]) -> int:
        """Complete ids; return the nanoseconds it took."""
        given, tokens = (ctypes.c_int64 * len(ids))(*ids), ctypes.c_uint64()
        function = ctypes.cast(self._c.specrt_generate_ids, ctypes.c_void_p)
        took: int = self._rounds(
            function, self._session, given, ctypes.c_size_t(len(ids)), self._params,
            ctypes.byref(tokens),
        )  # fmt: skip
        self._require(min(0, took))
        assert tokens.value == TOKENS
        return took


def overhead(
    libraries: dict[str, Path], bundle: Path, helper: Path, ids: Sequence[int], repeats: int,
    gamma: int,
) -> dict[str, Any]:  # fmt: skip
    """Return microseconds per round, through Python and through the C interface."""
    params = specrt.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    others = {n: Interface(path, bundle, helper, gamma) for n, path in libraries.items()}
    took: dict[str, list[float]] = {name: [] for name in ("python", *others)}
    with specrt.open(bundle, threads=1) as generator:
        for repeat in range(repeats + 1):
            began = perf_counter_ns()
            stream = generator.stream(ids, params, gamma=gamma)
            for _ in stream:
                pass
            spent = {"python": perf_counter_ns() - began}
            rounds = stream.completion.speculation.rounds + 1
            spent |= {name: other.complete(ids) for name, other in others.items()}
            if repeat:  # the first one binds memory
                for name, ns in spent.items():
                    took[name].append(ns / rounds / 1e3)
    found: dict[str, Any] = {f"{name}_us": round(median(us), 1) for name, us in took.items()}
    for name in others:
        apart = [own - base for own, base in zip(took[name], took["python"], strict=True)]
        found[f"{name}_over_python_us"] = round(median(apart), 1)
    return {"gamma": gamma, "rounds": rounds, "repeats": repeats, **found}


def started(program: Path, library: Path, bundle: Path, ids: Sequence[int], repeats: int) -> Any:
    """Return medians of what a fresh process says that opens the library."""
    wheel = Path(onnxruntime.__file__).parent / "capi"
    runtime = sorted(wheel.glob("libonnxruntime.so*"))[-1]
    command = [program, "first", library, bundle, runtime, *map(str, ids)]
    said = [json.loads(subprocess.check_output(command)) for _ in range(repeats + 1)][1:]
    return {name: round(median(one[name] for one in said), 1) for name in said[0]}


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("bundle", nargs="?", type=Path, default=Path("engines/build/codelet"))
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        libraries = {name: built(name, root / name) for name in ("hosted", "native")}
        (root / "made").mkdir()
        program, helper = (compiled(root / "made", shared) for shared in (False, True))
        with specrt.open(asked.bundle, threads=1) as generator:
            ids = generator.tokenizer.encode("def fibonacci(n):\n")
        results: dict[str, Any] = {
            "rounds": [
                overhead(libraries, asked.bundle, helper, ids, asked.repeats, gamma)
                for gamma in (0, 4)
            ],
            "start": {
                name: started(program, library, asked.bundle, ids, max(3, asked.repeats // 3))
                for name, library in libraries.items()
            },
        }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
