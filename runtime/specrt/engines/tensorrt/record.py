"""`engine.json`: what a plan was built as, read before the plan itself is opened."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any

from specrt.engines.tensorrt.fingerprint import DeviceRecord
from specrt.engines.tensorrt.weights import Wants
from specrt.errors import BundleError
from specrt.schema import Count, Span, read

FORMAT = 1
FILE_NAME = "engine.json"
PLAN = "engine.plan"
"""The plan it describes, in the same folder."""
AGAIN = "build the bundle again with `specrt build RECIPE`"
"""The remedy where a plan and its record are not as they were built."""


@dataclass(frozen=True)
class Range:
    """The sizes an input may take in a profile, and the one its kernels were chosen for."""

    least: Count
    best: Count
    most: Count

    @property
    def fixed(self) -> bool:
        """Whether there is only one size."""
        return self.least == self.most


@dataclass(frozen=True)
class Profile:
    """One optimisation profile: passes of some widths, and of how many scored rows."""

    name: str
    """`prefill`, `decode`, `catch-up`, or `verify G` for gamma G."""
    width: Range
    rows: Range

    def takes(self, width: int, rows: int) -> bool:
        """Tell whether a pass of this width and so many rows fits."""
        return (
            self.width.least <= width <= self.width.most
            and self.rows.least <= rows <= self.rows.most
        )


@dataclass(frozen=True)
class Kernel:
    """Kernels of one kind that a pass launches."""

    name: str
    """As the library calls it, without what numbers layers and builds."""
    kind: str
    """`kgen` (generated), `gemm`, `runtime_fusion` (a product with what surrounds it)."""
    count: int


@dataclass(frozen=True)
class Compiled:
    """What the library made of one profile."""

    profile: str
    activation_bytes: int
    """Working memory of a context."""
    kernels: tuple[Kernel, ...]

    @property
    def launches(self) -> int:
        """Kernels of one pass."""
        return sum(kernel.count for kernel in self.kernels)

    @property
    def attention(self) -> str:
        """`gemv`, `gemm` or both: the fused attention kernels; `none` where it is written out."""
        kinds = (kind for kind in ("gemv", "gemm") if self._having(f"_{kind}_mha"))
        return " and ".join(kinds) or "none"

    @property
    def dequantising(self) -> int:
        """Kernels that do nothing but write out a quantized weight, in every pass."""
        return sum(kernel.count for kernel in self.kernels if writes_weight(kernel.name))

    def _having(self, part: str) -> bool:
        return any(part in kernel.name for kernel in self.kernels)


_WEIGHT_WORDS = {"Repl", "Resh", "Tran", "Move", "Cast", "Mul"}


def writes_weight(name: str) -> bool:
    """Tell whether a kernel only scales codes: casts around one product, and moves."""
    words = re.findall("[A-Z][a-z]+", name.removeprefix("__myl_"))
    return set(words) <= _WEIGHT_WORDS and "CastMulCast" in name and words.count("Mul") == 1


@dataclass(frozen=True)
class Setting:
    """One of the builder's settings that a recipe gave."""

    name: str
    value: str


@dataclass(frozen=True)
class EngineRecord:
    """What the runtime must know of a plan besides the model's geometry."""

    format: Annotated[int, Span(1, FORMAT)]
    backend: str
    """`tensorrt` or `tensorrt-rtx`."""
    version: str
    """Of the library that built it."""
    form: str
    """`native`: KV buffers are updated in place, inputs and outputs at one address.
    `decomposed`: each pass writes whole new KV buffers, for TensorRT before 10.15."""
    compute: str
    """`fp16`, `bf16` or `fp32`: what KV buffers hold."""
    profiles: tuple[Profile, ...]
    """In the order of the plan."""
    candidates: int = 0
    """How many of the best scores of each row the plan cuts out for sampling."""
    confidence: bool = False
    """Whether it tells the probability of the likeliest token."""
    plan_bytes: int = 0
    sha256: str = ""
    """Of the plan."""
    weight_bytes: int = 0
    """Of weights in device memory; those that two profiles want in two layouts count twice."""
    compiled: tuple[Compiled, ...] = ()
    """As `profiles`."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities it was built for; of tensorrt-rtx only."""
    gpu: str = ""
    """That it was built on, and for; empty where none was needed."""
    gpu_capability: str = ""
    driver: str = ""
    """Of the machine that built it."""
    settings: tuple[Setting, ...] = ()
    messages: tuple[str, ...] = ()
    """Warnings of the library while it built."""

    @property
    def device(self) -> DeviceRecord:
        """What it was built with and for."""
        asked = self._setting("capabilities")
        wanted = tuple(asked.split(", ")) if asked else ()
        return DeviceRecord(
            backend=self.backend,
            version=self.version,
            gpu=self.gpu,
            capabilities=(self.gpu_capability,) if self.gpu_capability else wanted,
            driver=self.driver,
            hardware=self._setting("hardware_compatible"),
            newer_versions=self._asked("version_compatible"),
        )

    @property
    def wants(self) -> Wants:
        """How it has to be opened."""
        return Wants(
            streaming=self._asked("weight_streaming"),
            stripped=self._asked("stripped"),
            host_code=self._asked("version_compatible"),
        )

    def _setting(self, name: str) -> str:
        """Return what a recipe set; only what differs from the library's own choice is kept."""
        return next((s.value for s in self.settings if s.name == name), "")

    def _asked(self, name: str) -> bool:
        return self._setting(name) == str(True)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_engine_record(path: Path) -> EngineRecord:
    """Read an `engine.json`; keys that a later version may have written are passed over.

    Raises: BundleError for one that is missing, of a newer format, or not such a record.
    """
    try:
        data = _load(path)
        written = data.get("format")
        if type(written) is int and written > FORMAT:
            raise BundleError(
                f"{path} has format {short(written)}, and this specrt reads up to {FORMAT}; "
                f"upgrade specrt, or {AGAIN} with this version"
            )
        known = {field.name for field in fields(EngineRecord)}
        record = read(EngineRecord, {key: data[key] for key in data if key in known})
        for problem in _problems(record):
            raise ValueError(problem)
        return record
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read ({error}); {AGAIN}") from error


def _load(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError("it is no file")
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"it holds {short(data)}; expected an object")
    return data


def _problems(record: EngineRecord) -> Iterator[str]:
    """Yield what does not fit together between fields that are fine by themselves."""
    if not record.profiles:
        yield "profiles is empty; expected at least one"
    for profile in record.profiles:
        for name, sizes in (("width", profile.width), ("rows", profile.rows)):
            if not sizes.least <= sizes.best <= sizes.most:
                yield (
                    f"{name} of profile {short(profile.name)} is {sizes.least}, {sizes.best}, "
                    f"{sizes.most}; expected rising sizes"
                )
