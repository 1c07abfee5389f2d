"""The backends: one record for each library that runs engines, and the table of them.

A new backend is a module with an engine, and a row of `BACKENDS`. Libraries load lazily.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

from specrt.bundle import (
    BLOCK_HEAD,
    CHAIN_HEAD,
    HEADS,
    KINDS,
    KV_HEAD,
    ONNXRUNTIME,
    Manifest,
    ModelRecord,
    installed,
)
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Engine, FusedRounds
from specrt.errors import BundleError, EngineError, SpecrtError, first_line, shortage

OpenEngine = Callable[[EngineSpec], Engine]
"""Opens a compiled engine of one kind of model.

Raises: EngineError when the library refuses it, or memory is short.
"""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine file tells beyond the manifest."""

    lines: tuple[tuple[str, str], ...] = ()
    """Names and values, in the order to be shown."""
    kv_sets: int = 1
    """Sets of KV buffers that its passes need in memory."""


@dataclass(frozen=True)
class Backend:
    """One library that runs engines. Its functions import the library when they are called."""

    runs: Mapping[str, OpenEngine]
    """What opens an engine, by the kind of its model; see `KINDS`."""
    library: Callable[[], str]
    """Returns the library's name and version on this machine."""
    missing: Callable[[], str] = str
    """Returns what this machine lacks to run engines, with the remedy; empty where nothing."""
    missing_to_build: Callable[[], str] | None = None
    """The same for compiling engines, where the library itself compiles them."""
    check_versions: Callable[[Path, Mapping[str, str]], None] = lambda bundle, versions: None
    """Refuses a bundle, by the versions in its manifest, that the library here cannot read.

    Raises: BundleError naming both versions and the remedy.
    """
    notice: Callable[[Mapping[str, str]], str] = lambda versions: ""
    """Returns why a bundle, by the versions in its manifest, is slower here than one built here
    could be, with the remedy; empty where it is not."""
    facts: Callable[[Path], EngineFacts] = lambda engine: EngineFacts()
    """Returns what an engine file tells beyond the manifest."""
    share_threads: Callable[[int], None] = lambda threads: None
    """Lets all engines of this process share their threads."""
    fused_rounds: Callable[[Engine, Engine | None], FusedRounds | None] = lambda target, draft: None
    """Returns what runs whole rounds of a pair; None where the pair cannot have them."""
    host_memory: bool = False
    """Whether weights and KV buffers lie in main memory."""
    packs_rows: bool = False
    """Whether rows of different widths share one pass; see `PackedEngine`."""
    exact: bool = False
    """Whether a row has the same bits at every width, so that output is plain decoding's."""


def backend_named(name: str) -> Backend:
    """Return a backend of the table.

    Raises: EngineError with the known names.
    """
    if name not in BACKENDS:
        raise EngineError(
            f"backend {short(name)} is unknown to this version of specrt; known: "
            f"{', '.join(BACKENDS)}"
        )
    return BACKENDS[name]


def backend_of(manifest: Manifest, model: ModelRecord) -> Backend:
    """Return the backend that runs a model of a bundle.

    Raises: BundleError for one that this version does not know.
    """
    try:
        return backend_named(manifest.backend_of(model))
    except EngineError as error:
        raise BundleError(
            f"bundle {manifest.name!r}: {error}; upgrade specrt, or build the bundle again with "
            "`specrt build RECIPE`"
        ) from error


def require_runs(
    backend: str, kind: str, name: object, error: type[SpecrtError] = BundleError
) -> None:
    """Refuse a model `name` of a kind that a backend does not run.

    Raises: `error`, naming the backends that run it.
    """
    if kind in backend_named(backend).runs:
        return
    able = " or ".join(known for known, one in BACKENDS.items() if kind in one.runs)
    others = ", or with a draft model that scores all" * (kind in ("trimmed", *HEADS.values()))
    raise error(
        f"{name} is {KINDS[kind]}, which {backend} does not run yet; build the pair for "
        f"{able}{others}"
    )


def open_engine(spec: EngineSpec) -> Engine:
    """Open a compiled engine with the library of its backend.

    Raises: BundleError for a kind that its backend does not run; EngineError when the library is
        missing or refuses the engine, or memory is short.
    """
    require_runs(spec.backend, spec.kind, spec.path)
    try:
        return backend_named(spec.backend).runs[spec.kind](spec)
    except (MemoryError, ImportError) as error:
        remedy = (
            shortage(error) or f"install what runs {spec.backend} bundles: `specrt doctor` names it"
        )
        raise EngineError(
            f"{spec.path} cannot be opened ({first_line(error)}); {remedy}"
        ) from error


def check_versions(bundle: Path, manifest: Manifest) -> None:
    """Refuse a bundle whose engines the libraries of this machine cannot read.

    Raises: BundleError naming both versions and the remedy.
    """
    for model in manifest.models:
        backend_of(manifest, model).check_versions(bundle, manifest.versions)


def notices(manifest: Manifest) -> list[str]:
    """Return why engines are slower here than they could be, with the remedies."""
    found = [backend_of(manifest, model).notice(manifest.versions) for model in manifest.models]
    return [notice for notice in dict.fromkeys(found) if notice]


def host_bytes(manifest: Manifest) -> int:
    """Return the bytes of main memory that weights and full KV buffers take."""
    return sum(
        m.weight_bytes + manifest.kv_bytes(m)
        for m in manifest.models
        if backend_of(manifest, m).host_memory
    )


def _opened_by(place: str) -> OpenEngine:
    """Return a function `module:name` of this package, which is imported when it is called."""

    def opened(spec: EngineSpec) -> Engine:
        module, _, name = place.partition(":")
        engine: Engine = getattr(importlib.import_module(f"specrt.engine.{module}"), name)(spec)
        return engine

    return opened


def _share_pool(threads: int) -> None:
    if threads > 1:
        from specrt.engine.ort.ort_engine import share_pool

        share_pool(threads)


def _onnxruntime() -> str:
    return f"{ONNXRUNTIME[0]} {_loaded() or 'of unknown version'}"


def _loaded() -> str:
    """Return the version of ONNX Runtime as it is loaded; empty where it is not installed.

    Two packages bring it, and where both are installed the metadata of one says nothing.
    """
    try:
        return str(importlib.import_module("onnxruntime").__version__)
    except Exception:  # whoever opens an engine says what is broken
        return ""


def _missing_onnxruntime() -> str:
    return (
        ""
        if importlib.util.find_spec("onnxruntime")
        else "onnxruntime is not installed; pip install specrt"
    )


def _missing_for_cuda() -> str:
    """Return what an ort-cuda bundle would lack; the provider's libraries are tried last."""
    if lacks := _missing_onnxruntime():
        return lacks
    try:
        from specrt.engine.ort.cuda_engine import INSTALL, missing, unloadable
    except Exception as error:  # a broken installation of the library raises anything
        return f"onnxruntime cannot be imported ({first_line(error)}); install it again"
    if lacks := missing():
        return lacks
    absent = unloadable()
    return f"{absent}; {INSTALL}" if absent else ""


def _check_onnxruntime(bundle: Path, versions: Mapping[str, str]) -> None:
    """Refuse a library older than the one that saved the engines; newer ones read them."""
    library, here = ONNXRUNTIME[0], _loaded()
    built = versions.get(library)
    if built is None or not here:
        return
    needed, release = _release(built), _release(here)
    if needed is None:
        raise BundleError(
            f"{bundle} names {short(built)} as its version of {library}; expected one such "
            "as 1.25.1: build the bundle again with `specrt build RECIPE`"
        )
    if release is not None and release < needed:
        raise BundleError(
            f"{bundle} was built with {library} {built}, and {here} is installed here; "
            f"{_upgrade(needed, here)}, or build the bundle again here with `specrt build RECIPE`"
        )


_LAST = {(3, 10): (1, 23)}
"""The last ONNX Runtime for a Python that newer ones have left."""


def _upgrade(needed: tuple[int, int], here: str) -> str:
    """Return how to get a newer ONNX Runtime."""
    python = sys.version_info[:2]
    if python in _LAST and needed > _LAST[python]:
        major, minor = python
        return (
            f"Python {major}.{minor} has none that new: run it with Python {major}.{minor + 1} or "
            "later"
        )
    there = installed(ONNXRUNTIME)
    name = next((name for name, version in there.items() if version == here), ONNXRUNTIME[0])
    return f"upgrade it with `pip install '{name}>={needed[0]}.{needed[1]}'`"


def _check_ort_cpu(bundle: Path, versions: Mapping[str, str]) -> None:
    from specrt.engine.ort.kernels import check_kernels

    _check_onnxruntime(bundle, versions)
    check_kernels(bundle, versions)


def _kernels_notice(versions: Mapping[str, str]) -> str:
    from specrt.engine.ort.kernels import kernels_notice

    return kernels_notice(versions)


def _release(text: str) -> tuple[int, int] | None:
    """Return the (major, minor) a version begins with."""
    match = re.fullmatch(r"([0-9]{1,6})(?:\.([0-9]{1,6})(?:[^0-9].{,99})?)?", text)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _tensorrt(name: str) -> Backend:
    """Return the record of one of the TensorRT libraries, which keep version rules of their own."""

    def library() -> str:
        from specrt.engine.tensorrt.library import open_library

        try:  # the library itself: on a Jetson it is part of the system, and no package tells
            return f"{name} {open_library(name).version}"
        except EngineError:
            return f"{name} of unknown version"

    def missing() -> str:
        from specrt.engine.tensorrt.library import lacks_to_run

        return lacks_to_run(name)

    def missing_to_build() -> str:
        from specrt.engine.tensorrt.library import lacks_to_build

        return lacks_to_build(name)

    def facts(engine: Path) -> EngineFacts:
        from specrt.engine.tensorrt.engine_record import engine_facts

        return EngineFacts(*engine_facts(engine))

    def rounds(target: Engine, draft: Engine | None) -> FusedRounds | None:
        from specrt.engine.tensorrt.fused_round import fused_rounds

        return fused_rounds(target, draft)

    return Backend(
        _PLANS, library, missing, missing_to_build=missing_to_build, facts=facts,
        fused_rounds=rounds,
    )  # fmt: skip


_PLAN = _opened_by("tensorrt.engine:open_tensorrt")
_PLANS_OF_PARTS = _opened_by("tensorrt.tensorrt_encoder_decoder:open_encoder_decoder")
_PLANS = {
    "decoder": _PLAN,
    "trimmed": _PLAN,
    CHAIN_HEAD: _opened_by("tensorrt.head:open_head"),
    "text2text": _PLANS_OF_PARTS,
    "speech": _PLANS_OF_PARTS,
}

_DECODER = _opened_by("ort.openers:open_decoder")
_ENCODER_DECODER = _opened_by("ort.encoder_decoder_engine:open_encoder_decoder")

BACKENDS: dict[str, Backend] = {
    "tensorrt": _tensorrt("tensorrt"),
    "tensorrt-rtx": _tensorrt("tensorrt-rtx"),
    "ort-cuda": Backend(
        {"decoder": _opened_by("ort.cuda_engine:OrtCudaEngine")},
        _onnxruntime,
        _missing_for_cuda,
        check_versions=_check_onnxruntime,
    ),
    "ort-cpu": Backend(
        {
            "decoder": _DECODER,
            "trimmed": _DECODER,
            CHAIN_HEAD: _opened_by("ort.openers:open_head"),
            BLOCK_HEAD: _opened_by("ort.openers:open_block_head"),
            KV_HEAD: _opened_by("ort.openers:open_kv_head"),
            "text2text": _ENCODER_DECODER,
            "speech": _ENCODER_DECODER,
        },
        _onnxruntime,
        _missing_onnxruntime,
        check_versions=_check_ort_cpu,
        notice=_kernels_notice,
        share_threads=_share_pool,
        host_memory=True,
        packs_rows=True,
        exact=True,
    ),
}
"""By the names that manifests and recipes use, the fastest first."""
