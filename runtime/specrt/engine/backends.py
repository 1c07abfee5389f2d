"""The backends: one record for each library that runs engines, and the table of them.

A new backend is a module with an engine, and one line in `BACKENDS`. Libraries load lazily.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol

from specrt.bundle import (
    ONNXRUNTIME,
    EncoderRecord,
    Geometry,
    Manifest,
    ModelRecord,
    installed,
)
from specrt.engine.protocol import Engine, FusedRounds
from specrt.errors import BundleError, EngineError, first_line, shortage
from specrt.held_file import HeldFile, hold_folder


class OpenEngine(Protocol):
    """Opens a compiled engine; see `open_engine`."""

    def __call__(  # noqa: D102
        self, path: Path, geometry: Geometry, *, files: Mapping[str, HeldFile], batch: int,
        max_length: int, max_width: int, threads: int, beside: Engine | None,
    ) -> Engine: ...  # fmt: skip


class OpenEncoderDecoder(Protocol):
    """Opens the compiled decoder of an encoder-decoder, and what conditions it beside it."""

    def __call__(  # noqa: D102
        self, path: Path, geometry: Geometry, record: EncoderRecord, *,
        files: Mapping[str, HeldFile], batch: int, max_length: int, max_width: int, threads: int,
        beside: Engine | None,
    ) -> Engine: ...  # fmt: skip


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

    open: OpenEngine
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
    open_encoder_decoder: OpenEncoderDecoder | None = None
    """Opens encoder-decoders; None where it runs none."""
    heads: bool = False
    """Whether it runs heads, and drafts that score some entries of the vocabulary only."""
    blocks: bool = False
    """Whether it runs heads that draft a block in one pass."""
    exact: bool = False
    """Whether a row has the same bits at every width, so that output is that of plain decoding."""


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


def open_engine(
    backend: str, path: Path, geometry: Geometry, *, batch: int, max_length: int, max_width: int,
    threads: int, beside: Engine | None = None, files: Mapping[str, HeldFile] | None = None,
    encoder: EncoderRecord | None = None,
) -> Engine:  # fmt: skip
    """Open a compiled engine with the library of its backend.

    `beside` is the other engine of a pair, whose device may be shared. `files` are those of its
    folder that it may read, all of them when None. `encoder` is what conditions a decoder.
    Raises: EngineError when the library is missing or refuses the engine, or memory is short.
    """
    one = backend_named(backend)
    open_: OpenEngine = one.open
    if encoder is not None:
        if one.open_encoder_decoder is None:
            able = [name for name, other in BACKENDS.items() if other.open_encoder_decoder]
            raise EngineError(
                f"{path} is of an encoder-decoder, which {backend} does not run yet; build it for "
                f"{' or '.join(able)}"
            )
        open_ = partial(one.open_encoder_decoder, record=encoder)
    try:
        return open_(
            path,
            geometry,
            files=hold_folder(path.parent) if files is None else files,
            batch=batch,
            max_length=max_length,
            max_width=max_width,
            threads=threads,
            beside=beside,
        )
    except (MemoryError, ImportError) as error:
        remedy = shortage(error) or f"install what runs {backend} bundles: `specrt doctor` names it"
        raise EngineError(f"{path} cannot be opened ({first_line(error)}); {remedy}") from error


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
        m.weight_bytes + m.kv_bytes(manifest.batch, manifest.max_length)
        for m in manifest.models
        if backend_of(manifest, m).host_memory
    )


def _open_ort_cpu(
    path: Path, geometry: Geometry, *, files: Mapping[str, HeldFile], batch: int, max_length: int,
    max_width: int, threads: int, beside: Engine | None,
) -> Engine:  # fmt: skip
    from specrt.engine.head_engine import HeadEngine
    from specrt.engine.ort.block_engine import OrtBlockEngine
    from specrt.engine.ort.contrib_engine import ContribEngine
    from specrt.engine.ort.ort_engine import OrtEngine, open_session, widths

    session, weights = open_session(path, files, threads)
    sizes = {"batch": batch, "max_length": max_length, "max_width": max_width}
    inputs = widths(session.get_inputs())
    # Graphs of the kernels take the tokens of all rows, and which row each is of.
    make = OrtEngine if "slots" in inputs else ContribEngine
    read = inputs.get("hidden", inputs.get("context"))
    if read is None:
        return make(session, weights, geometry, **sizes)
    features = getattr(beside, "features", None)
    if features is None or features.shape[-1] != read:
        left = "no features" if features is None else f"features of width {features.shape[-1]}"
        raise EngineError(
            f"{path} is a head that reads features of width {read}, and its target leaves {left} "
            "here; build both in one bundle of `ort-cpu`"
        )
    if "context" in inputs:
        return OrtBlockEngine(session, weights, geometry, features, **sizes)
    return HeadEngine(make(session, weights, geometry, **sizes), features)


def _open_ort_cpu_encoder_decoder(
    path: Path, geometry: Geometry, record: EncoderRecord, *, files: Mapping[str, HeldFile],
    batch: int, max_length: int, max_width: int, threads: int, beside: Engine | None,
) -> Engine:  # fmt: skip
    from specrt.engine.ort.encoder_decoder_engine import NEEDS_KERNELS, open_encoder_decoder
    from specrt.engine.ort.kernels import missing_kernels

    if lacks := missing_kernels():
        raise EngineError(f"{path} cannot be opened: {NEEDS_KERNELS}: {lacks}")
    return open_encoder_decoder(
        path, geometry, record, files=files, batch=batch, max_length=max_length,
        max_width=max_width, threads=threads, beside=beside,
    )  # fmt: skip


def _share_pool(threads: int) -> None:
    if threads > 1:
        from specrt.engine.ort.ort_engine import share_pool

        share_pool(threads)


def _open_ort_cuda(
    path: Path, geometry: Geometry, *, files: Mapping[str, HeldFile], batch: int, max_length: int,
    max_width: int, **_: Any,
) -> Engine:  # fmt: skip
    from specrt.engine.ort.cuda_engine import OrtCudaEngine

    return OrtCudaEngine(
        path, geometry, files=files, batch=batch, max_length=max_length, max_width=max_width
    )


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

    def open_plan(
        path: Path, geometry: Geometry, *, files: Mapping[str, HeldFile], batch: int,
        max_length: int, max_width: int, beside: Engine | None, **_: Any,
    ) -> Engine:  # fmt: skip
        from specrt.engine.tensorrt.engine import open_tensorrt
        from specrt.engine.tensorrt.head import beside_target

        engine = open_tensorrt(
            path, geometry, files=files, backend=name, batch=batch, max_length=max_length,
            max_width=max_width, beside=beside,
        )  # fmt: skip
        return beside_target(engine, beside)

    def open_encoder_decoder(
        path: Path, geometry: Geometry, record: EncoderRecord, *, files: Mapping[str, HeldFile],
        batch: int, max_length: int, max_width: int, beside: Engine | None, **_: Any,
    ) -> Engine:  # fmt: skip
        from specrt.engine.tensorrt import tensorrt_encoder_decoder

        return tensorrt_encoder_decoder.open_encoder_decoder(
            path, geometry, record, files=files, backend=name, batch=batch, max_length=max_length,
            max_width=max_width, beside=beside,
        )  # fmt: skip

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
        open_plan, library, missing, missing_to_build=missing_to_build, facts=facts,
        fused_rounds=rounds, open_encoder_decoder=open_encoder_decoder, heads=True,
    )  # fmt: skip


BACKENDS: dict[str, Backend] = {
    "tensorrt": _tensorrt("tensorrt"),
    "tensorrt-rtx": _tensorrt("tensorrt-rtx"),
    "ort-cuda": Backend(
        _open_ort_cuda, _onnxruntime, _missing_for_cuda, check_versions=_check_onnxruntime
    ),
    "ort-cpu": Backend(
        _open_ort_cpu, _onnxruntime, _missing_onnxruntime, check_versions=_check_ort_cpu,
        notice=_kernels_notice, share_threads=_share_pool, host_memory=True, packs_rows=True,
        open_encoder_decoder=_open_ort_cpu_encoder_decoder, heads=True, blocks=True, exact=True,
    ),
}  # fmt: skip
"""By the names that manifests and recipes use, the fastest first."""
