"""The two TensorRT libraries, what differs between them, and the one logger of a process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrt.engine.tensorrt.device import cuda_bindings
from specrt.errors import EngineError, did_you_mean, first_line, one_line
from specrt.system.gpu import Survey, survey

SEVERITIES = ("internal error", "error", "warning", "info", "verbose")
"""Of TensorRT's messages, the worst first, numbered as TensorRT numbers them."""

_WORST = 2

_REMEMBERED = 32


@dataclass(frozen=True)
class Message:
    """One message of TensorRT."""

    severity: str
    """One of `SEVERITIES`."""
    text: str

    @property
    def is_error(self) -> bool:
        """Whether something failed."""
        return self.severity in SEVERITIES[:_WORST]


@dataclass
class Log:
    """The messages of a block, in order."""

    messages: list[Message] = field(default_factory=list)

    @property
    def first_error(self) -> str:
        """The first line of the first message that something failed; empty where none did."""
        return next((one_line(m.text) for m in self.messages if m.is_error), "")


class Journal:
    """Where all messages of one library go: to the blocks that listen, and errors are remembered.

    TensorRT keeps the first logger it sees and calls it from threads of its own.
    """

    def __init__(self) -> None:
        self._errors: deque[Message] = deque(maxlen=_REMEMBERED)
        self._listening: tuple[Log, ...] = ()

    def write(self, severity: int, text: str) -> None:
        """Take one message."""
        message = Message(SEVERITIES[min(max(severity, 0), len(SEVERITIES) - 1)], text)
        if message.is_error:
            self._errors.append(message)
        for log in self._listening:
            log.messages.append(message)

    def drain(self) -> str:
        """Return the first line of the oldest error since the last call, and forget all."""
        log = Log(list(self._errors))
        self._errors.clear()
        return log.first_error

    @contextmanager
    def listen(self) -> Iterator[Log]:
        """Collect the messages of a block."""
        log = Log()
        self._errors.clear()
        self._listening = (*self._listening, log)
        try:
            yield log
        finally:
            self._listening = tuple(other for other in self._listening if other is not log)


OLDEST, NATIVE_FROM = (10, 3), (10, 15)
"""The first TensorRT that specrt builds for, and the first that updates KV buffers in place."""

LAST_MAJOR = 11
"""The newest major version whose parser is known."""


NATIVE, DECOMPOSED = "native", "decomposed"
"""Forms of a graph: KV buffers are updated in place, or written whole by every pass."""


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
    rtx: bool
    """Whether it is TensorRT for RTX, which builds without a GPU, for all of some capabilities, and
    keeps timings only where there is one."""


FLAVOURS = {
    "tensorrt": Flavour(
        "tensorrt", "tensorrt", "TensorRT",
        "it comes with JetPack (make environments with `python -m venv --system-site-packages`), "
        "NVIDIA's containers or NVIDIA's package index",
        (b"ptrt", b"ftrt"), NATIVE_FROM, rtx=False,
    ),
    "tensorrt-rtx": Flavour(
        "tensorrt-rtx", "tensorrt_rtx", "TensorRT for RTX",
        "`pip install tensorrt-rtx`",
        (b"vtrt",), (1, 3), rtx=True,
    ),
}  # fmt: skip

TENSORRT = tuple(FLAVOURS)
"""The backends that use either library."""


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
        raise EngineError(f"{backend!r} is not a TensorRT backend{did_you_mean(backend, FLAVOURS)}")
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
            f"{flavour.title} is installed but cannot be imported ({first_line(error)}): "
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


def form_of(version: str) -> str | None:
    """Return the form that graphs have for a version of TensorRT; None for one too old."""
    number = parse_version(version)[:2]
    if number < OLDEST:
        return None
    return NATIVE if number >= NATIVE_FROM else DECOMPOSED


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


def lacks_to_run(backend: str, devices: Survey | None = None) -> str:
    """Return what this machine lacks to run plans of a backend; empty where nothing is missing."""
    devices = survey() if devices is None else devices
    if devices.problem:
        return f"{devices.problem}; install the NVIDIA driver"
    try:
        library = open_library(backend)
        cuda_bindings()
    except EngineError as error:
        return str(error)
    known, capability = library.capabilities, devices.gpus[0].capability
    if known and capability and capability not in known:
        return (
            f"{library.title} is for compute capability {', '.join(known)}, and "
            f"{devices.gpus[0].name} has {capability}; build for tensorrt or ort-cuda"
        )
    return ""


def lacks_to_build(backend: str, devices: Survey | None = None) -> str:
    """Return what this machine lacks to build plans for a backend; empty where nothing."""
    try:
        library = open_library(backend)
    except EngineError as error:
        return str(error)
    if library.flavour.rtx:
        return ""
    problem = (survey() if devices is None else devices).problem
    if not problem:
        return ""
    return f"{problem}; {library.flavour.title} builds on the GPU that will run the plan"


SUFFIX = ".kernels"

MOST_KERNELS = 1 << 28
"""Bytes of a file that is taken for kernels."""


def _read_own(path: Path) -> bytes:
    """Read a file that nobody else may write; nothing where others may, or where it is not a file.

    Raises: OSError.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        ours = facts.st_uid in (0, os.geteuid()) and not facts.st_mode & 0o022
        if ours and stat.S_ISREG(facts.st_mode) and facts.st_size <= MOST_KERNELS:
            return file.read(MOST_KERNELS)
        return b""


class KernelCache:
    """A file of kernels compiled at run time; without it every process compiles them again.

    No manifest lists it, because it is made on the device: it counts where only this user or root
    may write it. The library itself holds what it reads to its version, the GPU and the driver, and
    leaves what does not fit aside. A folder that cannot be written to is no reason to complain.
    """

    def __init__(self, plan: Path) -> None:
        self.path = plan.with_suffix(SUFFIX)
        self._cache: Any = None
        self._known = b""

    def attach(self, config: Any) -> None:
        """Let a context use the kernels, and add its own."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            with suppress(OSError):
                self._known = _read_own(self.path)
            if self._known and not self._cache.deserialize(self._known):
                self._known = b""
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the kernels to the file where there are new ones; never raises."""
        cache, self._cache = self._cache, None
        kernels = cache.serialize() if cache is not None else None
        data = b"" if kernels is None else bytes(kernels)
        if not data or data == self._known:
            return
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with os.fdopen(os.open(aside, flags, 0o644), "wb") as file:
                    file.write(data)
                aside.replace(self.path)
            finally:
                aside.unlink(missing_ok=True)
