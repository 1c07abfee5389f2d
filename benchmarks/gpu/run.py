"""Everything there is to run on a machine with an NVIDIA GPU, in one command.

    python benchmarks/gpu/run.py                 # with Python 3.11 or later; about 3 GB of packages
    python benchmarks/gpu/run.py --here          # in the environment that runs it
    python benchmarks/gpu/run.py --here --no-gpu # what can be done without a GPU

Makes an environment in `.venv-gpu` with onnxruntime-gpu, its CUDA libraries and the tests' needs,
then: `specrt doctor`; the tests marked `gpu`; and for each recipe beside this file (`codelet.toml`:
both models on the GPU, `mixed.toml`: the draft on the CPU) `specrt build`, `specrt verify` against
plain decoding, and `specrt bench`. The last line is one JSON object with each step's status, time
and result; what was skipped says why. Without a GPU, only doctor and the builds are run, and
`rehearse.py` where onnxruntime-gpu is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "benchmarks" / "gpu"
ENVIRONMENT = ROOT / ".venv-gpu"
PROMPTS = ROOT / "benchmarks" / "prompts" / "code.jsonl"
PACKAGES = (
    "onnxruntime-gpu[cuda,cudnn]>=1.31",
    "onnx>=1.20",
    "pytest>=8",
    "hypothesis>=6",
    "scipy",
)
TOLERANCE = "0.1"
"""Logits; what fp16 may move them by on codelet, as the tests hold."""
TAIL = 20


@dataclass(frozen=True)
class Step:
    """One command, and how it went."""

    name: str
    status: int | None
    """None where it was not run."""
    seconds: float = 0.0
    result: Any = None
    """The JSON it printed last, else the end of what it said."""


def main() -> int:
    """Run the steps, print each as it ends, and all of them as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="Install nothing, use this Python.")
    parser.add_argument("--no-gpu", action="store_true", help="Leave out what needs a GPU.")
    parser.add_argument("--out", type=Path, help="File for the JSON as well.")
    options = parser.parse_args()
    if options.out:
        try:
            options.out.open("a").close()  # now, not after an hour of steps
        except OSError as error:
            parser.error(f"--out {options.out} cannot be written: {error.strerror}")
    python = sys.executable if options.here else _install()
    steps = []
    for step in _steps(python, gpu=not options.no_gpu):
        steps.append(step)
        print(f"{step.name}: {'not run' if step.status is None else step.status}", flush=True)
    report = json.dumps({"steps": [asdict(step) for step in steps]})
    if options.out:
        options.out.write_text(report + "\n", encoding="utf-8")
    print(report)
    return 1 if any(step.status for step in steps) else 0


def _install() -> str:
    """Make the environment; specrt goes in without its own dependencies.

    They name `onnxruntime`, which is the same module as `onnxruntime-gpu`: the last one wins.
    """
    python = str(ENVIRONMENT / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    install = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*install, *PACKAGES, *_dependencies()], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    return python


def _dependencies() -> list[str]:
    """Return what specrt needs besides ONNX Runtime."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [d for d in project["dependencies"] if not d.startswith("onnxruntime")]


def _steps(python: str, gpu: bool) -> Iterator[Step]:
    specrt = [python, "-m", "specrt"]
    yield _run("doctor", [*specrt, "doctor", "--json"])
    bundles = []
    for recipe in sorted(HERE.glob("*.toml")):
        if recipe.stem == "ruff":
            continue
        place = ROOT / "engines" / "build" / f"{recipe.stem}-cuda"
        tune = [] if gpu else ["--no-tune"]
        bundles.append(place)
        built = [*specrt, "build", str(recipe), "--out", str(place), *tune]
        yield _run(f"build {recipe.stem}", built)
    if not gpu:
        yield _run("rehearse", [python, str(HERE / "rehearse.py"), *map(str, bundles)], _CUDA)
        yield from (Step(name, None, result="left out by --no-gpu") for name in ("tests", "bench"))
        return
    yield _run("tests", [python, "-m", "pytest", "-q", "-rs", str(ROOT / "tests/gpu")])
    for place in bundles:
        read = ["--prompts", str(PROMPTS), "--json"]
        verify = [*specrt, "verify", str(place), *read, "--tolerance", TOLERANCE]
        yield _run(f"verify {place.name}", verify)
        yield _run(f"bench {place.name}", [*specrt, "bench", str(place), *read])


_CUDA = "has no CUDA provider"


def _run(name: str, command: list[str], excuse: str = "") -> Step:
    """Run one command; saying `excuse` makes it one that was not run."""
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    took = round(time.monotonic() - began, 1)
    lines = done.stdout.strip().splitlines() + done.stderr.strip().splitlines()
    if excuse and done.returncode and any(excuse in line for line in lines):
        return Step(name, None, took, lines[-1])
    return Step(name, done.returncode, took, _result(done.stdout, lines))


def _result(said: str, lines: list[str]) -> Any:
    found = []
    for line in said.strip().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    objects = [one for one in found if isinstance(one, dict)]
    return objects or lines[-TAIL:]


if __name__ == "__main__":
    sys.exit(main())
