"""Imports run one way: a device needs no build machine, and an engine library only when used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import specrt

RUNTIME = Path(specrt.__file__).parent
FILES = sorted(RUNTIME.rglob("*.py"))
BUILD_MACHINE = {"specrt_export", "torch", "onnx", "onnxscript", "onnx_ir", "transformers"}
BACKENDS = {"onnxruntime": ("engines/ort.py", "engines/cuda_session.py", "engines/ort_cuda.py")}
GPU = {"tensorrt", "tensorrt_rtx", "cuda"}
NEVER_AT_START = BUILD_MACHINE | GPU | {*BACKENDS, "jinja2", "click", "rich"}


class Import(NamedTuple):
    """One imported module, and whether it is imported only when a function runs."""

    name: str
    lazy: bool
    line: int


def imports(tree: ast.Module) -> Iterator[Import]:
    """Yield every import but those only a type checker sees."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, lazy, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute here"
                yield Import(child.module or "", lazy, child.lineno)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, lazy or inside)

    yield from walk(tree, False)


def broken(path: str, tree: ast.Module) -> list[str]:
    """Return what a file of the runtime imports that it must not."""
    found = []
    for name, lazy, line in imports(tree):
        top = name.partition(".")[0]
        if top in BUILD_MACHINE and not (lazy and path.startswith("cli/")):
            found.append(f"{path}:{line} imports {name}")
        if top in BACKENDS and not lazy and path not in BACKENDS[top]:
            found.append(f"{path}:{line} imports {name} before it is needed")
        if name.startswith("specrt.engines.") and not lazy and not path.startswith("engines/"):
            found.append(f"{path}:{line} imports {name} before it is needed")
        if name.startswith("specrt.cli") and not path.startswith(("cli/", "__main__.py")):
            found.append(f"{path}:{line} imports {name}")
    return found


def test_there_is_something_to_look_at() -> None:
    names = {str(path.relative_to(RUNTIME)) for path in FILES}
    assert {"speculate.py", "engines/ort.py", "cli/build.py"} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(RUNTIME)))
def test_the_runtime_imports_nothing_of_the_build_machine(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert broken(path.relative_to(RUNTIME).as_posix(), tree) == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("a.py", "import torch.nn", True),
        ("a.py", "from onnx import helper", True),
        ("a.py", "def f():\n    from specrt_export.build import build", True),
        ("cli/a.py", "def f():\n    from specrt_export.build import build", False),
        ("cli/a.py", "from specrt_export.build import build", True),
        ("cli/a.py", "try:\n    import specrt_export\nexcept ImportError: pass", True),
        ("cli/a.py", "class A:\n    import transformers", True),
        ("a.py", "import onnxruntime", True),
        ("a.py", "def f():\n    import onnxruntime", False),
        ("engines/ort.py", "import onnxruntime", False),
        ("a.py", "from specrt.engines.ort import OrtEngine", True),
        ("a.py", "def f():\n    from specrt.engines.ort import OrtEngine", False),
        ("a.py", "from specrt.cli import main", True),
        ("a.py", "import numpy\nfrom specrt.engine import Engine", False),
    ],
)
def test_the_wall_stops_what_it_must(path: str, source: str, wrong: bool) -> None:
    assert bool(broken(path, ast.parse(source))) is wrong


def test_importing_specrt_loads_no_engine_library_and_no_build_machine() -> None:
    code = f"import specrt, sys; print(sorted(set({sorted(NEVER_AT_START)}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
