"""Find a compute capability for which plans of TensorRT for RTX run on this GPU.

The library lists the capabilities that it builds for; this GPU need not be among them. Each way to
build a small plan is tried in a process of its own, with a time limit, and the first that gives
right numbers is used from then on.
"""

from __future__ import annotations

from typing import Any

from gpucheck.correctness import TOLERANCES, check_logits
from gpucheck.evidence import OK, CheckError, Evidence, Facts, NotRunError, Results
from gpucheck.supervisor import supervise
from gpucheck.workbench import CURRENT, DEFAULT, Workbench, codelet_source

STAGES = ("build", "validity", "open", "pass", "numbers")
WAY_SECONDS = 90.0


def ways(library: Any, own: str) -> list[str]:
    """Return capabilities to try, the likeliest first; `default` leaves the choice to the library.

    `own` is this GPU's capability, as in `8.7`.
    """
    known = list(library.capabilities)
    current = [CURRENT] if hasattr(library.module.ComputeCapability, CURRENT) else []
    rank = float(own or 0)
    rest = sorted(known, key=lambda name: (float(name) > rank, -float(name)))
    listed = [own] if own in known else []
    return list(dict.fromkeys([DEFAULT, *listed, *current, *rest]))


def probe(bench: Workbench, backend: str, evidence: Evidence) -> None:
    """Try ways until one runs.

    Raises: CheckError where none does; NotRunError where there is no GPU to try them on.
    """
    gpus, library = bench.survey().gpus, bench.library(backend)
    own = gpus[0].capability if gpus else ""
    asked = bench.settings.capability
    candidates = [asked] if asked else ways(library, own)
    evidence.add(listed=own in library.capabilities, ways=candidates)
    folder = bench.settings.work / f"probe-{backend}"
    folder.mkdir(parents=True, exist_ok=True)
    for way in candidates if gpus else candidates[:1]:
        log = folder / f"{way}.json"
        log.unlink(missing_ok=True)
        outcome = supervise(Results(log), way, bench.start_way(backend, way, log), WAY_SECONDS)
        facts = {**outcome.facts, "status": outcome.status, "reason": outcome.reason}
        runs = {"chosen": way} if outcome.status == OK else {}
        evidence.add({way: {**facts, "seconds": outcome.seconds}, **runs})
        if runs:
            return
    first = candidates[0]
    if not gpus:
        raise NotRunError(f"a plan was built, and none is run: {bench.lacks(backend)}")
    raise CheckError(f"no plan runs here; {first}: {evidence.facts[first]['reason']}")


def try_way(bench: Workbench, backend: str, evidence: Evidence) -> None:
    """Build, examine, open, run and compare a small plan; the first stage that fails is the last.

    Each stage is a fact before the next begins, so a crash leaves those that came before it.
    """
    out = bench.settings.work / f"probe-{backend}" / f"plan-{bench.settings.capability or DEFAULT}"
    source = codelet_source("draft")
    built = bench.build_plan(source, out, backend, evidence.part("build"), gammas=())
    bench.require(backend)
    if (library := bench.library(backend)).tells_validity:
        evidence.part("validity").add(_validity(library, built.path.read_bytes()))
    with bench.device(backend) as device:
        engine: Any = bench.open(built, device)
        try:
            evidence.part("open").add(memory_bytes=engine.memory_bytes)
            evidence.part("pass").add(argmax=int(engine.forward([[1]], 0, 1).argmax.item()))
            reference = bench.reference("draft")
            check_logits(engine, reference, TOLERANCES["fp16"], evidence.part("numbers"))
        finally:
            engine.close()


def _validity(library: Any, plan: bytes) -> Facts:
    """Return what the library says about a plan on this GPU; it may still run."""
    try:
        validity, flags = library.runtime().get_engine_validity(plan)
    except Exception as error:  # the answer is only a fact
        return {"unknown": f"{type(error).__name__}: {error}"}
    known = library.module.EngineInvalidityDiagnostics.__members__
    diagnostics = [name for name, bit in known.items() if int(flags) & int(bit)]
    return {"validity": str(validity), "diagnostics": diagnostics}
