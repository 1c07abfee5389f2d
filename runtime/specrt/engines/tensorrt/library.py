"""The two TensorRT libraries, what differs between them, and the one logger of a process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from specrt.cuda import survey
from specrt.engines.tensorrt.journal import Journal, Log, first_line
from specrt.engines.tensorrt.journal import Message as Message
from specrt.errors import EngineError, did_you_mean

OLDEST, NATIVE_FROM = (10, 3), (10, 15)
"""The first TensorRT that specrt builds for, and the first that updates KV buffers in place."""


@dataclass(frozen=True)
class Flavour:
    """What is known of a library before it is imported."""

    backend: str
    module: str
    title: str
    install: str
    """The remedy where it is missing."""
    magics: tuple[bytes, ...]
    """What its plans begin with."""
    native_from: tuple[int, int]
    """The first version that updates KV buffers in place."""
    builds_without_gpu: bool
    timing_cache_needs_gpu: bool


FLAVOURS = {
    "tensorrt": Flavour(
        "tensorrt", "tensorrt", "TensorRT",
        "it comes with JetPack (make environments with `python -m venv --system-site-packages`), "
        "NVIDIA's containers or NVIDIA's package index",
        (b"ptrt", b"ftrt"), NATIVE_FROM, builds_without_gpu=False, timing_cache_needs_gpu=False,
    ),
    "tensorrt-rtx": Flavour(
        "tensorrt-rtx", "tensorrt_rtx", "TensorRT for RTX",
        "`pip install tensorrt-rtx`",
        (b"vtrt",), (1, 3), builds_without_gpu=True, timing_cache_needs_gpu=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Library:
    """One of the two libraries, imported."""

    flavour: Flavour
    module: Any
    version: str
    number: tuple[int, int, int, int]
    """Major, minor, patch, build; 0 for what the version does not say."""
    journal: Journal
    logger: Any
    """To be given to everything of the library that wants one."""
    tells_validity: bool
    """Whether a runtime can say what is wrong with a plan."""
    tells_capturable: bool
    """Whether a context can say that it may be captured into a CUDA graph."""
    tells_aliases: bool
    """Whether a plan says which outputs share memory with which inputs."""
    has_runtime_config: bool
    """Whether contexts are made from a configuration that knows of kernels made at run time."""
    has_capabilities: bool
    """Whether plans are built for a list of compute capabilities."""

    @property
    def backend(self) -> str:
        """The backend that uses it."""
        return self.flavour.backend

    @property
    def title(self) -> str:
        """Its name and version, for people."""
        return f"{self.flavour.title} {self.version}"

    @property
    def native(self) -> bool:
        """Whether it updates KV buffers in place; otherwise the decomposed form is needed."""
        return self.number[:2] >= self.flavour.native_from

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The compute capabilities it builds for ahead of time; empty where it has no list."""
        if not self.has_capabilities:
            return ()
        names = self.module.ComputeCapability.__members__
        numbers = sorted(int(n[2:]) for n in names if n.startswith("SM") and n[2:].isdigit())
        return tuple(f"{number // 10}.{number % 10}" for number in numbers)

    def messages(self) -> AbstractContextManager[Log]:
        """Collect the messages of a block: `with library.messages() as log`."""
        return self.journal.listen()

    def runtime(self) -> Any:
        """Return a new runtime of the library.

        Raises: EngineError without a driver, where TensorRT would take the interpreter down.
        """
        lacks = survey().problem
        if lacks:
            raise EngineError(f"{self.title} runs on an NVIDIA GPU only: {lacks}; {ELSEWHERE}")
        with self.messages() as log:
            runtime = self.module.Runtime(self.logger)
        if runtime is None:
            raise EngineError(
                f"{self.title} does not start: {log.first_error or 'no reason given'}"
            )
        return runtime


ELSEWHERE = (
    "run the bundle where there is one, or build for this machine with "
    "`specrt build RECIPE --backend ort-cpu`"
)


@functools.cache  # one logger per process, because TensorRT keeps the first one it sees
def open_library(backend: str) -> Library:
    """Import the library of a backend.

    Raises: EngineError naming the remedy where it is missing or broken.
    """
    if backend not in FLAVOURS:
        raise EngineError(f"{backend!r} is no TensorRT backend{did_you_mean(backend, FLAVOURS)}")
    flavour = FLAVOURS[backend]
    if not is_installed(backend):
        raise EngineError(
            f"backend {backend} needs {flavour.title}, which is not installed: {flavour.install}"
            + _other(backend)
        )
    try:
        module = importlib.import_module(flavour.module)
    except Exception as error:  # broken installations raise anything
        raise EngineError(
            f"{flavour.title} is installed but cannot be imported ({first_line(str(error))}): "
            f"{flavour.install}" + _other(backend)
        ) from error
    return describe(flavour, module)


def describe(flavour: Flavour, module: Any) -> Library:
    """Return the record of an imported library, with a logger of its own."""
    journal = Journal()
    runtime, context = module.Runtime, module.IExecutionContext
    engine, config = module.ICudaEngine, module.IBuilderConfig
    strategy = "dynamic_shapes_kernel_specialization_strategy"
    return Library(
        flavour=flavour,
        module=module,
        version=str(module.__version__),
        number=parse_version(str(module.__version__)),
        journal=journal,
        logger=_logger(module, journal),
        tells_validity=hasattr(runtime, "get_engine_validity"),
        tells_capturable=hasattr(context, "is_stream_capturable"),
        tells_aliases=hasattr(engine, "get_aliased_input_tensor"),
        has_runtime_config=hasattr(getattr(module, "IRuntimeConfig", None), strategy),
        has_capabilities=hasattr(config, "set_compute_capability"),
    )


def parse_version(text: str) -> tuple[int, int, int, int]:
    """Return major, minor, patch and build of a version; 0 for what it does not say."""
    parts: list[int] = []
    for part in text.split(".")[:4]:
        if not part.isascii() or not part.isdigit():
            break
        parts.append(int(part))
    major, minor, patch, build = [*parts, 0, 0, 0, 0][:4]
    return major, minor, patch, build


def is_installed(backend: str) -> bool:
    """Tell whether the library of a backend is there, without importing it."""
    try:
        return importlib.util.find_spec(FLAVOURS[backend].module) is not None
    except (ImportError, ValueError):
        return False


def _logger(module: Any, journal: Journal) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            journal.write(int(severity), text)

    return Logger()


def _other(backend: str) -> str:
    other = next(name for name in FLAVOURS if name != backend)
    if not is_installed(other):
        return ""
    return f"; {FLAVOURS[other].title} is installed here, and backend {other} would use it"
