"""`engine.json`: what a plan was built as and for, read before the plan itself is opened."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, NamedTuple

from specrt.engine.tensorrt.library import ELSEWHERE, FLAVOURS, NATIVE, Library, parse_version
from specrt.engine.tensorrt.plan import Wants
from specrt.errors import BundleError, EngineError, first_line
from specrt.held_file import read_file
from specrt.records import Count, Interval, read
from specrt.system.gpu import Survey, survey
from specrt.system.memory import size

FORMAT = 1

FILE_NAME = "engine.json"

RECORD = ".json"
"""Ends the name of the record next to a plan."""

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

    def takes(self, size: int) -> bool:
        """Tell whether a size is among them."""
        return self.least <= size <= self.most


KV_LENGTH = "kv_length"
"""The input of a plan that says by its size how many positions of the KV buffers are read."""


FEATURE, HIDDEN, STATE = "feature", "hidden", "state"
"""What a target leaves at each position for its head, what a head reads with each token, and what
it goes on from where the target's is not known; all fp32."""


ENCODER, CROSS = "encoder", "cross"
"""Plans that condition the decoder of an encoder-decoder; they lie next to its own."""

SOURCE_LENGTH, LENGTH = "source_length", "length"
"""What tells a decoder how long each row's source is, and cross projections one source."""

FEATURES = "input_features"
"""What an encoder of speech reads."""


class PassShape(NamedTuple):
    """The sizes of one pass."""

    width: int
    rows: int
    kv_length: int = 0
    """Positions of the KV buffers that attention reads; 0 for a plan that reads all."""


@dataclass(frozen=True)
class Profile:
    """One optimisation profile: passes of some widths, and of how many scored rows."""

    name: str
    """`prefill`, `decode`, `catch-up` or `catch-up W` for W tokens, or `verify G` for gamma G;
    ` of N` where N positions of the KV buffers are read."""
    width: Range
    rows: Range
    kv_length: Range | None = None
    """Positions of the KV buffers that are read; None for all."""

    def takes(self, width: int, rows: int, kv_length: int = 0) -> bool:
        """Tell whether a pass fits; with a KV length of 0, whether it fits at any."""
        reads = self.kv_length is None or not kv_length or self.kv_length.takes(kv_length)
        return self.width.takes(width) and self.rows.takes(rows) and reads

    @property
    def fixed(self) -> bool:
        """Whether all its passes have one shape."""
        return all(r.fixed for r in (self.width, self.rows, self.kv_length) if r is not None)


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
    """What the library compiled one profile to."""

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
class SourceShape:
    """The sizes of what a decoder attends to besides its text."""

    positions: Annotated[int, Interval(1, 10**7)]
    """Of the longest source."""
    width: Annotated[int, Interval(1, 10**6)]
    """Of a hidden state."""
    heads: Annotated[int, Interval(1, 10**6)]
    """Of cross keys and values."""
    head_dim: Annotated[int, Interval(1, 10**6)]
    vocabulary: Annotated[int, Interval(0, 10**8)] = 0
    """Token ids that a source is of; 0 where it is features."""
    features: Annotated[int, Interval(0, 10**4)] = 0
    """Channels of a source of features."""
    frames: Annotated[int, Interval(0, 10**6)] = 0
    """Of a source of features: how many it has, always."""


@dataclass(frozen=True)
class BuildSetting:
    """One of the builder's settings that a recipe gave."""

    name: str
    value: str


@dataclass(frozen=True)
class EngineRecord:
    """What the runtime must know of a plan besides the model's geometry."""

    format: Annotated[int, Interval(1, FORMAT)]
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
    scored: Annotated[int, Interval(0, 10**8)] = 0
    """Entries of the vocabulary that logits are of; 0 for all."""
    feature: Annotated[int, Interval(0, 10**6)] = 0
    """Width of the output `feature`, which a target leaves for its head; 0 without one."""
    hidden: Annotated[int, Interval(0, 10**6)] = 0
    """Width of a head's input `hidden` and of its output `state`; 0 for what is not a head."""
    part: str = ""
    """`encoder` or `cross` of a plan that conditions a decoder; empty for a model's own."""
    source: SourceShape | None = None
    """Of the plans of an encoder-decoder."""
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
    settings: tuple[BuildSetting, ...] = ()
    messages: tuple[str, ...] = ()
    """Warnings of the library while it built."""

    @property
    def kv_lengths(self) -> tuple[int, ...]:
        """Positions that passes read of the KV buffers, rising; empty where all read all."""
        ranges = [p.kv_length for p in self.profiles if p.kv_length is not None]
        return tuple(sorted({one.most for one in ranges}))

    @property
    def device(self) -> DeviceRecord:
        """What it was built with and for."""
        names = self._setting("capabilities")
        wanted = tuple(names.split(", ")) if names else ()
        return DeviceRecord(
            backend=self.backend,
            version=self.version,
            gpu=self.gpu,
            capabilities=(self.gpu_capability,) if self.gpu_capability else wanted,
            hardware=self._setting("hardware_compatible"),
            newer_versions=self._is_set("version_compatible"),
        )

    @property
    def wants(self) -> Wants:
        """How it has to be opened."""
        return Wants(
            streaming=self._is_set("weight_streaming"),
            stripped=self._is_set("stripped"),
            host_code=self._is_set("version_compatible"),
        )

    def _setting(self, name: str) -> str:
        """Return what a recipe set; only what differs from the library's own choice is kept."""
        return next((s.value for s in self.settings if s.name == name), "")

    def _is_set(self, name: str) -> bool:
        return self._setting(name) == str(True)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_engine_record(path: Path, text: bytes | None = None) -> EngineRecord:
    """Read an `engine.json`; keys that a later version may have written are passed over.

    `text` is what is in it, where it was read.

    Raises: BundleError for one that is missing, of a newer format, or not such a record.
    """
    try:
        data = _load(path, text)
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
        raise BundleError(f"{path} cannot be read ({first_line(error)}); {AGAIN}") from error


def _load(path: Path, text: bytes | None) -> dict[str, Any]:
    if text is None:
        text = read_file(path)
    data = json.loads(text.decode())
    if not isinstance(data, dict):
        raise ValueError(f"it holds {short(data)}; expected an object")
    return data


def _problems(record: EngineRecord) -> Iterator[str]:
    """Yield what does not fit together between fields that are fine by themselves."""
    if not record.profiles:
        yield "profiles is empty; expected at least one"
    if record.part not in ("", ENCODER, CROSS):
        yield f"part is {short(record.part)}; expected {ENCODER} or {CROSS}, or nothing"
    if record.part and record.source is None:
        yield f"part is {record.part}, and source is missing; expected its sizes"
    for profile in record.profiles:
        for name in ("width", "rows", "kv_length"):
            sizes: Range | None = getattr(profile, name)
            if sizes is not None and not sizes.least <= sizes.best <= sizes.most:
                yield (
                    f"{name} of profile {short(profile.name)} is {sizes.least}, {sizes.best}, "
                    f"{sizes.most}; expected rising sizes"
                )


def fixed(record: EngineRecord, width: int, rows: int, kv_length: int = 0) -> int | None:
    """Return the place of the profile for exactly this pass, None where there is none."""
    for i, profile in enumerate(record.profiles):
        if profile.fixed and profile.takes(width, rows, kv_length):
            return i
    return None


def choose(record: EngineRecord, width: int, rows: int, kv_length: int = 0) -> int:
    """Return the place of the profile for a pass: the one for just it, else one that takes it.

    Raises: EngineError with what was asked for, and the passes the plan was built for.
    """
    if 0 < rows <= width:
        exact = fixed(record, width, rows, kv_length)
        if exact is not None:
            return exact
        for i, profile in enumerate(record.profiles):
            if profile.takes(width, rows, kv_length):
                return i
    raise EngineError(
        f"no profile of the plan takes a pass of width {width} with {rows} scored rows"
        f"{_nearest(record, width, rows)}; there are "
        f"{', '.join(map(_described, record.profiles))}; build the bundle "
        "with a recipe that has it"
    )


def gammas(record: EngineRecord) -> list[int]:
    """Return the gammas that have a profile of their own, rising."""
    sizes = [p.width.most - 1 for p in record.profiles if p.fixed and p.width == p.rows]
    return sorted({gamma for gamma in sizes if gamma})


def _nearest(record: EngineRecord, width: int, rows: int) -> str:
    """Name the built gammas next to the one asked for, where the pass is one of verification."""
    built = gammas(record)
    if width != rows or width < 2 or not built:
        return ""
    gamma = width - 1
    near = sorted(sorted(built, key=lambda g: abs(g - gamma))[:2])
    words = " and ".join(map(str, near))
    return f" (gamma {gamma}; the nearest built: {words})"


def _described(profile: Profile) -> str:
    return f"{profile.name!r} of width {_span(profile.width)} and rows {_span(profile.rows)}"


def _span(sizes: Range) -> str:
    return str(sizes.most) if sizes.fixed else f"{sizes.least} to {sizes.most}"


def engine_facts(engine: Path) -> tuple[tuple[tuple[str, str], ...], int]:
    """Return what the record of a plan tells, in the order to be shown, and its KV sets."""
    record = read_engine_record(engine.with_name(FILE_NAME))
    return tuple(summary(record)), kv_sets(record.form)


def least_length(lengths: Sequence[int], reach: int) -> int:
    """Return the least KV length that holds so many positions; 0 where passes read all."""
    return next((length for length in lengths if length >= reach), 0)


def kv_sets(form: str) -> int:
    """Return how many sets of KV buffers passes need: decomposed ones read one and write one."""
    return 1 if form == NATIVE else 2


def summary(record: EngineRecord) -> Iterator[tuple[str, str]]:
    """Yield names and values, in the order to be shown."""
    yield "library", f"{record.backend} {record.version}"
    form = "KV buffers in place" if record.form == NATIVE else "whole new KV buffers each pass"
    yield "form", f"{record.form} ({form}), {record.compute}"
    if record.plan_bytes:
        yield (
            "plan",
            f"{size(record.plan_bytes)}, of which {size(record.weight_bytes)} weights",
        )
    if record.capabilities:
        yield "compute capabilities", ", ".join(record.capabilities)
    if record.source is not None:
        one = record.source
        yield (
            "source",
            f"up to {one.positions} positions, {one.heads} cross heads of {one.head_dim}",
        )
    if record.feature:
        yield "features", f"{record.feature} fp32 numbers at each position, for a head"
    if record.hidden:
        yield "reads", f"features of {record.hidden} fp32 numbers, or its own state"
    for setting in record.settings:
        if setting.name != "capabilities" or not record.capabilities:
            yield setting.name, setting.value
    compiled = {one.profile: one for one in record.compiled}
    for profile in record.profiles:
        yield f"profile {profile.name}", _profile(profile, compiled.get(profile.name))
    sizes = sum(profile.fixed for profile in record.profiles)
    streamed = ", as far as streamed weights allow" if record.wants.streaming else ""
    yield "CUDA graphs", f"for {sizes} sizes of pass, captured on their first run{streamed}"
    for message in record.messages:
        yield "warning", message


def _profile(profile: Profile, compiled: Compiled | None) -> str:
    width = str(profile.width.least)
    if not profile.width.fixed:
        width += f" to {profile.width.most}, best {profile.width.best}"
    if compiled is None:
        return f"width {width}"
    text = (
        f"width {width}; {compiled.launches} kernels, {compiled.attention} attention, "
        f"{size(compiled.activation_bytes)} working memory"
    )
    many = compiled.dequantising
    return text + (f"; {many} kernels that only dequantise a weight" if many else "")


AMPERE_PLUS, SAME_CAPABILITY = "ampere+", "same-capability"
"""Hardware compatibility that can be asked of TensorRT."""

RTX_FIRST = (8, 0)
"""Plans of TensorRT for RTX with no capability asked for run from here on."""


@dataclass(frozen=True)
class DeviceRecord:
    """The library and the GPU of a machine; of a plan, those it was built with and for."""

    backend: str
    version: str
    gpu: str = ""
    """By name; empty where a plan was built without one."""
    capabilities: tuple[str, ...] = ()
    """Of a machine its GPU's, as in `8.7`. Of a plan those it was asked to be for, if any."""
    hardware: str = ""
    """The hardware compatibility asked for; empty for this GPU only."""
    newer_versions: bool = False
    """Whether later versions of the library were asked to run it."""

    @property
    def library(self) -> str:
        """The library and its version, for people."""
        flavour = FLAVOURS.get(self.backend)
        return f"{flavour.title if flavour else self.backend} {self.version}"


def this_device(
    library: Library, device_id: int = 0, devices: Survey | None = None
) -> DeviceRecord:
    """Return the record of this machine and one of its GPUs.

    Raises: EngineError where there is no such GPU.
    """
    devices = survey() if devices is None else devices
    if lacks := devices.lacks(device_id):
        raise EngineError(f"{library.title} runs on an NVIDIA GPU only: {lacks}; {ELSEWHERE}")
    gpu = devices.gpus[device_id]
    known = (gpu.capability,) if gpu.capability else ()
    return DeviceRecord(library.backend, library.version, gpu.name, known)


def difference(built: DeviceRecord, here: DeviceRecord) -> str:
    """Say what keeps a plan from running here and how to rebuild it; empty where nothing does.

    TensorRT: the version must be the same in all its numbers, or later where that was asked for;
    the capability and the GPU model must be the same, unless hardware compatibility was asked for.
    TensorRT for RTX: no plan runs in another release, a newer one included; the capability must be
    among those asked for, or be 8.0 or later where none was.
    The driver does not matter.
    Source: "Engine Compatibility" and "CPU-Only AOT" in NVIDIA's documentation of TensorRT 11.1
    and TensorRT for RTX 1.7, and "TensorRT Release Properties".
    """
    if built.backend != here.backend:
        differs = [f"it is a plan of {built.library}, and {here.library} was asked to run it"]
    else:
        differs = [*_version(built, here), *_gpu(built, here)]
    if not differs:
        return ""
    return (
        f"{'; '.join(differs)}: build it here with `specrt build RECIPE --backend {here.backend}`"
    )


def _version(built: DeviceRecord, here: DeviceRecord) -> list[str]:
    theirs, ours = parse_version(built.version), parse_version(here.version)
    if not (theirs[3] and ours[3]) or FLAVOURS[built.backend].rtx:
        theirs, ours = (*theirs[:3], 0), (*ours[:3], 0)  # JetPack tells no build number
    if theirs == ours or (built.newer_versions and ours > theirs):
        return []
    return [f"it was built by {built.library}, and here is {here.version}"]


def _gpu(built: DeviceRecord, here: DeviceRecord) -> list[str]:
    if not here.capabilities:
        return []
    (ours,) = here.capabilities
    rtx = FLAVOURS[built.backend].rtx
    if rtx or built.hardware == AMPERE_PLUS:
        wanted = built.capabilities if rtx else ()
        if ours in wanted or (not wanted and _number(ours) >= RTX_FIRST):
            return []
        which = ", ".join(wanted) or "8.0 and later"
        return [f"it is for compute capability {which}, and {here.gpu} has {ours}"]
    if built.capabilities and ours not in built.capabilities:
        return [
            f"it was built on {built.gpu} of compute capability {', '.join(built.capabilities)}, "
            f"and {here.gpu} has {ours}"
        ]
    if built.gpu and built.gpu != here.gpu and built.hardware != SAME_CAPABILITY:
        return [f"it was built on {built.gpu}, and here is {here.gpu}"]
    return []


def _number(capability: str) -> tuple[int, ...]:
    return parse_version(capability)[:2]
