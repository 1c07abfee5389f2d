"""Who may import what, and in which words: tables, checked file by file."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from specrt.generator import Generator
from specrt.params import SamplingParams

ROOT = Path(__file__).parents[1]
HOMES = {"specrt": ROOT / "runtime", "specrt_export": ROOT / "export"}

# Rooms from the top down. A file imports from its own room and from rooms below it only; `!` names
# rooms below that it must not reach all the same. A file belongs to the longest name that fits.
HOUSE = """
specrt.__main__
specrt.cli
specrt.bench
specrt.c_host
specrt.serve
specrt.speech
specrt_export.builder
specrt_export.align
specrt_export.check
specrt_export.plan
specrt_export.compile
specrt_export.estimate
specrt_export.recipe
specrt_export.lower
specrt_export.quantize
specrt_export.lint
specrt_export.portable
specrt_export.heads
specrt_export.checkpoint
specrt_export.precision
specrt_export.atomic_folder
specrt_export
specrt.remote
specrt.llm
specrt.loading
specrt.tuning
specrt.session
specrt.remote.link
specrt.generator
specrt.request_factory
specrt.prompts
specrt.aio
specrt.scheduler
specrt.completion
specrt.speculation
specrt.sampling
specrt.doctor
specrt.engine.tensorrt
specrt.engine.ort
specrt.engine
specrt.system
specrt.text
specrt.generation_config
specrt.bundle specrt.params
specrt.geometry
specrt.speech.log_mel specrt.speech.wav
specrt.constraints
specrt.json_schema
specrt.traces
specrt.records
specrt.held_file
specrt.remote.frames
specrt.errors
specrt
"""
ORDER = {
    room: floor
    for floor, line in enumerate(reversed(HOUSE.strip().splitlines()))
    for room in line.split()
}
BUILD_MACHINE = {"torch", "onnx", "onnxscript", "onnx_ir", "transformers", "safetensors", "optimum"}
ENGINE_LIBRARIES = {"onnxruntime", "tensorrt", "tensorrt_rtx", "cuda"}
OPENERS = ("specrt.engine.", "specrt_export")
NEVER_AT_START = BUILD_MACHINE | ENGINE_LIBRARIES
NEVER_AT_START |= {"specrt_export", "jinja2", "click", "rich", "llguidance"}
NEVER_AT_START |= {"websockets", "starlette", "fastapi", "uvicorn"}


def modules() -> dict[str, Path]:
    found = {}
    for package, home in HOMES.items():
        for path in sorted((home / package).rglob("*.py")):
            parts = path.relative_to(home).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool, bool]]:
    """Yield each import: its module, whether it is lazy, whether only types need it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from ((name, lazy, True) for name, _, _ in imports(node))
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in MODULES else node.module or ""), lazy, False
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imports(node, inside)


def room(name: str) -> str:
    while name not in ORDER:
        name = name.rpartition(".")[0]
    return name


def faults(name: str, tree: ast.AST) -> list[str]:
    """Return what a module imports that it must not."""
    own, wrong = room(name), []
    for target, lazy, typing in imports(tree):
        top = target.partition(".")[0]
        if top in HOMES:
            floor, other = ORDER[own], room(target)
            opener = name == "specrt.engine.backends" and lazy
            facade = name == "specrt" and (lazy or typing)
            if other != own and ORDER[other] >= floor and not (opener or facade):
                wrong.append(f"{name} imports {target}, which is not below it")
            if (
                top == "specrt_export"
                and name.startswith("specrt.")
                and not ((lazy or typing) and own == "specrt.cli")
            ):
                wrong.append(f"{name} imports {target}: a device has no build machine")
        elif top in BUILD_MACHINE and name.startswith("specrt.") and own != "specrt.cli":
            wrong.append(f"{name} imports {target}: a device has no {top}")
        elif top in ENGINE_LIBRARIES and not lazy and not own.startswith(OPENERS):
            wrong.append(f"{name} imports {target} before it is needed")
    return wrong


def test_every_import_goes_down() -> None:
    assert len(MODULES) > 50
    assert [fault for name, tree in trees().items() for fault in faults(name, tree)] == []


def test_a_portable_graph_is_built_without_torch() -> None:
    """The quick start installs none."""
    asked = "specrt_export.builder, specrt_export.compile.ort_cpu_compiler"
    script = f"import sys\nsys.modules.update(torch=None, transformers=None)\nimport {asked}"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_modules_import_each_other() -> None:
    """Lazily or not."""
    edges = {
        name: {
            target
            for target, _, typing in imports(tree)
            if target in MODULES and target != name and not typing
        }
        for name, tree in trees().items()
        if name != "specrt"
    }
    TopologicalSorter(edges).prepare()  # it raises and names them where some do


def test_the_table_stops_what_it_must() -> None:
    def wrong(name: str, source: str) -> bool:
        return bool(faults(name, ast.parse(source)))

    assert wrong("specrt.params", "import torch.nn")
    assert wrong(
        "specrt.text.tokenizer", "def f():\n    from specrt_export.recipe.recipe import read_recipe"
    )
    assert wrong("specrt.cli.build", "from specrt_export.recipe.recipe import read_recipe")
    assert not wrong("specrt.cli.build", "def f():\n    from specrt_export import recipe")
    assert wrong("specrt.sampling.noise", "from specrt.speculation.round import Round")
    assert wrong("specrt.sampling.noise", "def f():\n    from specrt.generator import Generator")
    assert not wrong("specrt.speculation.round", "from specrt.sampling.noise import Noise")
    assert wrong("specrt.completion", "import onnxruntime")


def test_files_and_classes_have_names_of_their_own() -> None:
    files = [path.stem for path in MODULES.values() if path.stem not in ("__init__", "__main__")]
    classes = [
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    for names in (files, classes):
        assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_token_passes_few_files(generator: Generator) -> None:
    """Those whose functions run between two chunks; the command that prints them is one more."""
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    stream = generator.stream([57] * 20, params, gamma="auto", drafter="model")
    next(stream)
    passed = set()
    sys.setprofile(lambda frame, event, _: passed.add(frame.f_code.co_filename))
    try:
        for _ in range(6):
            next(stream)
    finally:
        sys.setprofile(None)
    stream.close()
    ours = sorted(str(path) for path in MODULES.values() if str(path) in passed)
    assert 9 < len(ours) <= 13, ours


NOT_PLAIN = {
    r"(?<!fall )(?<!falls )(?<!falling )(?<!furthest )\bbehind (?!OpenAI|`)\w": "after, of",
    r"(?<!-)\bbeside \w": "next to, with",
    r"(?<![Tt]here )\b(?:is|are) no (?!longer|more|other|less|reason|such|faster)\w": "is not a",
}
"""Words of comments, docstrings and messages, and what replaces them."""


def sentences(code: str) -> Iterator[str]:
    """Yield what a module says: its comments, and texts of several words."""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield " ".join(token.string.split())


def test_words_are_plain() -> None:
    said = [
        f"{name}: {found.group()!r} ({plain}) in {sentence[:90]}"
        for name, path in MODULES.items()
        for sentence in sentences(path.read_text("utf-8"))
        for words, plain in NOT_PLAIN.items()
        for found in re.finditer(words, sentence)
    ]
    assert said == []


def test_the_first_line_of_a_docstring_names_its_subject() -> None:
    firsts = [
        (name, node.value.value.strip().partition("\n")[0])
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    assert len(firsts) > 5000
    assert [one for one in firsts if re.search(r"\b(those|that) of\b", one[1], re.I)] == []


def test_importing_specrt_loads_no_engine_library_and_no_build_machine() -> None:
    code = (
        "import specrt, sys; specrt.SamplingParams(json_schema={}), specrt.Generator; "
        f"print(sorted(set({sorted(NEVER_AT_START)}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
