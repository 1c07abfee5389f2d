"""Try a small plan on a GPU that the library's list may not have, and write down what happens.

Each way of building is tried in a process of its own, which leaves a line after every stage: what
came before a crash is known.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpucheck import checks
from gpucheck.bare import build_bare, shapes_of
from gpucheck.codelet import reference
from gpucheck.environment import why_not
from gpucheck.lowered import lower, mark
from gpucheck.models import codelet_source
from gpucheck.place import HERE, MAX_LENGTH, PREFILL, Place
from gpucheck.step import CheckError, Facts, NotRunError
from specrt.engine.tensorrt.engine_record import FORMAT, PLAN, EngineRecord, Profile, Range
from specrt.engine.tensorrt.library import is_installed, open_library
from specrt_export.compile.monitor import read_header
from specrt_export.lower.lazy_tensor import ENGINE

DEFAULT = "default"
STAGES = ("build", "validity", "deserialize", "pass", "numbers")
_PATIENCE_S = 180
_WIDTHS = (1, 2, 5, 9)
Say = Callable[[str, Facts], None]


def ways(backend: str) -> list[str]:
    """Return how plans may be asked for: as it is, for this GPU, for each capability there is."""
    module: Any = open_library(backend).module
    known = getattr(getattr(module, "ComputeCapability", None), "__members__", {})
    return [DEFAULT, *(name for name in known if name != "NONE")]


def probe(place: Place, backend: str, asked: Sequence[str] | None = None) -> Facts:
    """Try every way.

    Raises: CheckError where the default one does not run on a GPU that the library lists.
    """
    if not is_installed(backend):
        raise NotRunError(f"{backend} is not installed")
    folder = place.work / f"probe-{backend}"
    shutil.rmtree(folder, ignore_errors=True)
    lower(codelet_source("draft"), folder / "graph")
    mark(folder / "graph")
    facts: Facts = {"stages": list(STAGES), "gpu": [g.name for g in place.found.gpus]}
    for way in ways(backend) if asked is None else asked:
        facts[way] = _tried(folder, backend, way)
    runs = [way for way in facts if isinstance(facts[way], dict) and facts[way].get("runs")]
    facts["ways_that_run"] = runs
    facts["listed"] = is_listed(place, backend)
    if facts["listed"] and DEFAULT not in runs:
        raise CheckError(
            f"a plan built as it is does not run here: {facts[DEFAULT]['ended']}", facts
        )
    return facts


def is_listed(place: Place, backend: str) -> bool:
    """Tell whether the library says that it knows this GPU; what it does on others is found out."""
    gpus = place.found.gpus
    return bool(gpus) and gpus[0].capability in open_library(backend).capabilities


def verdict(steps: dict[str, Any], backend: str) -> str:
    """Say why plans of a backend do not run, as an earlier probe found; empty where they may."""
    facts = steps.get(f"probe@{backend}", {}).get("facts", {})
    if not facts.get("gpu") or DEFAULT in facts.get("ways_that_run", [DEFAULT]):
        return ""
    return f"the probe found that plans do not run here: {facts.get(DEFAULT, {}).get('ended', '')}"


def _tried(folder: Path, backend: str, way: str) -> Facts:
    log = folder / f"{way}.jsonl"
    command = [sys.executable, str(HERE / "check.py"), "--probe", backend, way, str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
        ended = "" if not done.returncode else _how(done.returncode, done.stderr)
    except subprocess.TimeoutExpired:
        ended = f"stopped after {_PATIENCE_S} s"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    facts: Facts = {}
    for line in lines:
        facts |= json.loads(line)
    failed = next((s for s in STAGES if s in facts and not facts[s]["ok"]), None)
    reached = next((s for s in reversed(STAGES) if s in facts), "nothing")
    facts["runs"] = "numbers" in facts and failed is None
    if failed:
        ended = f"{failed}: {facts[failed]['said']}"
    facts["ended"] = ended or f"reached {reached}"
    return facts


def _how(code: int, said: str) -> str:
    last = (said.strip().splitlines() or [""])[-1]
    return f"the process ended with {code}" + (f": {last[:300]}" if last else "")


def child(backend: str, way: str, folder: Path) -> None:
    """Go through the stages of one way, leaving a line after each."""
    with (folder / f"{way}.jsonl").open("w", encoding="utf-8") as log:

        def say(stage: str, facts: Facts) -> None:
            log.write(json.dumps({stage: facts}) + "\n")
            log.flush()

        stages(backend, way, folder, say)


def stages(backend: str, way: str, folder: Path, say: Say) -> None:
    """Build, ask, deserialize, run and compare; the first stage that fails is the last."""
    plan = folder / way / PLAN
    if not _stage("build", say, lambda: _build(backend, way, folder, plan)):
        return
    if lacks := why_not(backend, _survey()):
        say("validity", {"ok": True, "said": f"not run: {lacks}"})
        return
    if open_library(backend).tells_validity:
        _stage("validity", say, lambda: _validity(backend, plan))
    opened: dict[str, Any] = {}
    if not _stage("deserialize", say, lambda: _open(backend, plan, opened)):
        return
    try:
        if _stage("pass", say, lambda: _pass(opened["engine"])):
            _stage("numbers", say, lambda: _numbers(opened["engine"]))
    finally:
        opened["engine"].close()
        opened["device"].close()


def _survey() -> Any:
    from specrt.system.gpu import survey

    return survey()


def _stage(name: str, say: Say, run: Callable[[], Facts]) -> bool:
    try:
        facts = run()
    except Exception as error:  # whatever the library says is what is looked for
        facts = getattr(error, "facts", {})
        say(name, {"ok": False, "said": " ".join(str(error).split())[:600], **facts})
        return False
    say(name, {"ok": True, "said": "", **facts})
    return True


def profiles() -> dict[str, tuple[int, int]]:
    """Return width and rows of each profile of the small plan."""
    return {f"width {width}": (width, 1) for width in _WIDTHS}


def _build(backend: str, way: str, folder: Path, plan: Path) -> Facts:
    shapes = {
        name: {**shapes_of(width), "rows": (rows,)} for name, (width, rows) in profiles().items()
    }
    capability = "" if way == DEFAULT else way
    made = build_bare(
        open_library(backend), folder / "graph" / ENGINE, plan, shapes, capability=capability
    )
    head = plan.read_bytes()[:64]
    return {
        "bytes": plan.stat().st_size,
        "capabilities": list(read_header(head).capabilities),
        "mask": head[32] if head[:4] == b"vtrt" else None,
        "kernels": {one.profile: one.launches for one in made},
    }


def _validity(backend: str, plan: Path) -> Facts:
    library = open_library(backend)
    validity, flags = library.runtime().get_engine_validity(plan.read_bytes())
    known = library.module.EngineInvalidityDiagnostics.__members__
    return {
        "validity": str(validity),
        "diagnostics": [name for name, bit in known.items() if int(flags) & int(bit)],
    }


def record(backend: str) -> EngineRecord:
    """Return what the runtime has to know of the small plan."""

    def only(size: int) -> Range:
        return Range(size, size, size)

    return EngineRecord(
        FORMAT, backend, open_library(backend).version, "native", "fp16",
        tuple(Profile(n, only(w), only(r)) for n, (w, r) in profiles().items()),
        candidates=64, confidence=True,
    )  # fmt: skip


def _open(backend: str, path: Path, opened: dict[str, Any]) -> Facts:
    from gpucheck.bandwidth import open_device
    from specrt.engine.tensorrt.engine import TensorRtEngine
    from specrt.engine.tensorrt.plan import open_plan

    device = opened["device"] = open_device()
    plan = open_plan(path, open_library(backend), device)
    geometry = codelet_source("draft").geometry
    opened["engine"] = TensorRtEngine(
        plan, device, record(backend), geometry, batch=1, max_length=MAX_LENGTH,
        max_width=PREFILL,
    )  # fmt: skip
    return {"profiles": len(profiles()), "scratch_bytes": plan.scratch_bytes(0)}


def _pass(engine: Any) -> Facts:
    done = engine.forward([[1]], 0, 1)
    return {"argmax": int(done.argmax.item())}


def _numbers(engine: Any) -> Facts:
    from gpucheck import passes

    shapes = [(width, 1) for width in (*_WIDTHS, 5, 1)]
    tokens = passes.text(engine, sum(width for width, _ in shapes))
    found, held, at, worst = passes.run_shapes(engine, tokens, shapes), reference("draft"), 0, 0.0
    passes.alive(found)
    held.reset(1, tokens.shape[1])
    for one, (width, _) in zip(found, shapes, strict=True):
        wanted, _ = held(tokens[:, at : at + width], [at], [width - 1])
        worst, at = max(worst, passes.relative(one.logits, wanted)), at + width
    facts = {"largest_relative_error": worst, "tolerance": checks.TOLERANCES["fp16"]}
    if not worst <= checks.TOLERANCES["fp16"]:
        raise CheckError(f"scores are {worst:.1e} of their spread off", facts)
    return facts
