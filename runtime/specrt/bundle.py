"""A built bundle on disk and its manifest: the JSON contract of build machine and device."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from reprlib import repr as short
from shlex import quote
from typing import Annotated, Any

from specrt.errors import BundleError, first_line, shortage
from specrt.geometry import LENT, Geometry
from specrt.held_file import HeldFile, hash_whole, hold, read_file
from specrt.records import Count, Interval, read

ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
"""Packages that bring ONNX Runtime; where both are installed, the last one's files are there."""


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return which packages are installed, and their versions, importing none."""
    from importlib import metadata  # slow to import

    versions = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


FORMAT = 4
"""Of what is built today; bundles of formats 1 to 3 had layers of one shape."""

TASKS = {
    "text-generation": "decoder",
    "text2text-generation": "text2text",
    "automatic-speech-recognition": "speech",
}
"""What a bundle is for, in the names of transformers' pipelines, and the kind of its target."""

CHAIN_HEAD, BLOCK_HEAD, KV_HEAD = "chain head", "block head", "kv head"

HEADS = {
    "eagle3": CHAIN_HEAD, "dflash": BLOCK_HEAD, "mtp": CHAIN_HEAD, "gemma4_assistant": KV_HEAD,
}  # fmt: skip
"""The formats of heads, which draft from the features that their target leaves, and their kinds."""

KINDS = {
    "decoder": "a language model",
    "trimmed": "a draft that scores some entries of the vocabulary only",
    CHAIN_HEAD: "a head that drafts a chain of tokens",
    BLOCK_HEAD: "a head that drafts blocks of tokens",
    KV_HEAD: "a head that attends to its target's keys and values",
    "text2text": "an encoder-decoder of text",
    "speech": "an encoder-decoder of speech",
}
"""The kinds of models that an engine may be of, and how errors say them."""

RINGS = "ort-cpu"
"""The backend whose engines keep rings where layers see few positions."""

FILE_NAME = "manifest.json"

TOKENIZER = "tokenizer.json"

TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"

GENERATION_CONFIG = "generation_config.json"

PREPROCESSOR_CONFIG, PROCESSOR_CONFIG = "preprocessor_config.json", "processor_config.json"
"""Of a feature extractor; checkpoints have either."""

_TOP_READ = {
    TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE, PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
}  # fmt: skip
_BESIDE_READ = {
    f"{part}.{suffix}"
    for part in ("engine", "encoder", "cross")
    for suffix in ("onnx", "data", "plan", "json")
}
"""Names that are read in a bundle, and next to an engine: none may be there and not be listed."""

MOST_ROWS = 64
"""Rows that the KV buffers of an engine may have."""

_MOST_BYTES = 64 << 20
"""Of a manifest."""

_AGAIN = "build the bundle again with `specrt build RECIPE`"


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file of a bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """The checkpoint that a model was built from."""

    formats: str
    """What its tensors are stored as, the most frequent first, as `"Q4_0 197, F32 65"`."""
    files: dict[str, str]
    """The files that hold weights, and their SHA-256."""
    hub: str = ""
    """The name that it was fetched by; empty for a folder or file of the build machine."""
    revision: str = ""
    """The commit that was fetched, or the branch or tag where no commit is known."""
    left_out: str = ""
    """What of a quantized checkpoint is computed in floats here, as `inputs in int8`."""


@dataclass(frozen=True)
class Quality:
    """How far a model is from the one its checkpoint holds, on the recipe's calibration text."""

    kl: float
    """Mean over positions of the KL divergence of its distribution from theirs, in nats."""
    top1: float
    """Share of positions where both find the same token the likeliest."""
    tokens: Count


@dataclass(frozen=True)
class Agreement:
    """How often the draft's likeliest token is the target's, on the text of `Quality`.

    That is the share of drafted tokens that greedy decoding accepts.
    """

    before: float
    """Of the checkpoints."""
    after: float
    """Of the engines."""


@dataclass(frozen=True)
class EncoderRecord:
    """What conditions a decoder on a source: an encoder, and what makes cross keys and values."""

    cross: str
    """The engine that turns hidden states into the cross keys and values of every layer."""
    max_source: Count
    """Most positions of hidden states that a source may come to."""
    width: Count
    """Of a hidden state."""
    heads: Count
    """Of cross keys and values."""
    head_dim: Count
    encoder: str = ""
    """The engine that turns a source into hidden states; empty where a draft reads its target's."""
    features: Annotated[int, Interval(0, 10**4)] = 0
    """Channels of a source of features, such as log-mel bins; 0 where a source is token ids."""
    frames: Annotated[int, Interval(0, 10**6)] = 0
    """Of a source of features: how many it has, always."""

    @property
    def kind(self) -> str:
        """The kind of a model that it conditions."""
        return "speech" if self.features else "text2text"

    def cross_bytes(self, layers: int, batch: int, item_bytes: int) -> int:
        """Return the bytes of all cross keys and values when full."""
        return 2 * layers * batch * self.heads * self.max_source * self.head_dim * item_bytes


@dataclass(frozen=True)
class ModelRecord:
    """One compiled model: its engine, its shape, and what lowering achieved."""

    engine: str
    geometry: Geometry
    model_type: str
    parameters: int
    weight_bytes: int
    """In memory."""
    kv_item_bytes: Annotated[int, Interval(1, 16)]
    fused: dict[str, str]
    """Per rewrite, how many places it took of how many there are, as `"8/8"`."""
    precision: str = "fp32"
    """What the weights of the layers are stored as."""
    embedding: str = "fp32"
    head: str = "fp32"
    """What the embedding table and the last projection are stored as."""
    block: int = 0
    """Weights that share a scale; 0 where none do, or a row shares one."""
    per_row: bool = False
    """Whether weights of 8 bits share one scale for each row."""
    symmetric: bool = True
    """Whether blocks of int4 that the build quantized have no zeros."""
    quality: Quality | None = None
    """None where nothing was measured, because the weights are the checkpoint's."""
    backend: str = ""
    """What runs it; the bundle's when empty."""
    bits: dict[str, str] | None = None
    """Of each part whose bits the build chose, what it is stored as."""
    kind: str = ""
    """One of `HEADS` for a head; empty for a language model."""
    features: Annotated[int, Interval(0, 10**6)] = 0
    """Width of the features that a target leaves at each position for a head, or a head reads."""
    accepted: tuple[float, ...] = ()
    """Of a head: for each position of a draft, the share of rounds on the recipe's calibration text
    in which the target accepted it; empty where that was not measured."""
    vocab_map: str = ""
    """The file with the target's id of each entry that a draft scores, int32 little-endian; empty
    where it scores all of them."""
    encoder: EncoderRecord | None = None
    """Of an encoder-decoder: what its decoder, `engine`, is conditioned by."""

    def cross_bytes(self, batch: int) -> int:
        """Return the bytes of all cross keys and values when full; 0 without an encoder."""
        if self.encoder is None:
            return 0
        return self.encoder.cross_bytes(self.geometry.layers, batch, self.kv_item_bytes)

    @property
    def engine_kind(self) -> str:
        """What a backend must run for its engine: a key of `KINDS`."""
        if self.kind:
            return HEADS[self.kind]
        if self.encoder is not None:
            return self.encoder.kind
        return "trimmed" if self.vocab_map else "decoder"

    @property
    def quantized(self) -> bool:
        """Whether any weights share a scale."""
        return self.block > 0 or self.per_row


@dataclass(frozen=True)
class Manifest:
    """Everything a device needs to know about a bundle before it opens an engine."""

    format: Annotated[int, Interval(1, FORMAT)]
    name: str
    backend: str
    precision: str
    batch: Count
    max_length: Count
    prefill: Count
    """Widest prefill pass, in tokens."""
    gammas: tuple[int, ...]
    """Every gamma a verify pass was built for, 0 included."""
    gamma: int | None
    """The default gamma of requests; None leaves it to `auto`."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    target: ModelRecord
    draft: ModelRecord | None
    versions: dict[str, str]
    device: dict[str, str]
    source: str
    """Hash of what the bundle was built from; another one means that it is stale."""
    files: dict[str, FileRecord]
    acceptance: Agreement | None = None
    """None where nothing is quantized, or there is no draft."""
    origins: dict[str, Provenance] = field(default_factory=dict)
    """Of each model, by its role; empty in bundles of before it was kept."""
    task: str = "text-generation"
    """One of `TASKS`."""
    decoder_start: tuple[int, ...] = ()
    """Tokens that a text of an encoder-decoder begins with; its prompt is the source."""
    drafter: str = ""
    """The default drafter where tuning chose none; the draft model, or else lookup, when empty."""
    snapshot_bytes: Annotated[int, Interval(0, 1 << 40)] = 256 << 20
    """Most bytes of snapshots of rows whose layers have recurrent states."""

    @property
    def max_width(self) -> int:
        """Widest pass the engines accept."""
        return max(self.prefill, max(self.gammas) + 1)

    def backend_of(self, model: ModelRecord) -> str:
        """Return what runs one of the models."""
        return model.backend or self.backend

    @property
    def models(self) -> tuple[ModelRecord, ...]:
        """The target, and the draft where there is one."""
        return (self.target, self.draft) if self.draft else (self.target,)

    def kv_bytes(self, *models: ModelRecord) -> int:
        """Return the bytes of all KV buffers of some models when full; of all, unless told which.

        A target's features count, and so do cross keys and values.
        """
        total = 0
        for model in models or self.models:
            total += self.own_kv_bytes(model) + model.cross_bytes(self.batch)
            features = 0 if model.kind else model.features
            total += 4 * self.batch * self.max_length * features
        return total

    def own_kv_bytes(self, model: ModelRecord) -> int:
        """Return the bytes of what the layers of a model remember; on a CPU they keep rings."""
        keeps_rings = self.backend_of(model) == RINGS and not model.kind
        width = self.max_width if keeps_rings else 0
        return model.geometry.kv_bytes(self.batch, self.max_length, model.kv_item_bytes, width)

    def to_json(self) -> str:
        """Return the manifest as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a bundle's manifest.

    Raises: BundleError when it is missing, of a newer format, or not a manifest.
    """
    path = folder / FILE_NAME
    data = _load(path)
    written = data["format"]
    if type(written) is int and written > FORMAT:
        raise BundleError(
            f"{folder} has bundle format {short(written)}, and this specrt reads up to {FORMAT}; "
            "upgrade specrt, or build the bundle again with this version"
        )
    known = {f.name for f in fields(Manifest)}  # a later version may write more
    try:
        manifest = read(Manifest, {k: v for k, v in data.items() if k in known})
        for problem in _problems(manifest):
            raise ValueError(problem)
    except ValueError as error:
        raise BundleError(f"{path} is not a complete manifest ({error}); {_AGAIN}") from error
    return manifest


def _load(path: Path) -> dict[str, Any]:
    """Read an object that has a format, whatever else is in it."""
    folder = path.parent
    try:
        data = json.loads(read_file(path, _MOST_BYTES), object_pairs_hook=_object)
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError(f"it holds {short(data)}; expected an object with `format`")
    except (FileNotFoundError, NotADirectoryError):
        there = "is not a bundle: it has no manifest.json"
        what = there if folder.exists() else "does not exist"
        raise BundleError(f"{folder} {what}; {missing(folder)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            f"{path} cannot be read ({first_line(error)}); {shortage(error) or _AGAIN}"
        ) from error
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON whose names differ: readers disagree on which of two counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{short(twice)} is there twice; expected one of a name")
    return values


def missing(folder: Path) -> str:
    """Return the remedy for a folder without a manifest: the bundle meant, or how to build one."""
    if (folder.suffix == ".gguf" and folder.is_file()) or (folder / "config.json").is_file():
        return f"it is a checkpoint, build one with `specrt build --target {quote(str(folder))}`"
    here = [path for place in (BUILD_ROOT, folder.parent) for path in _bundles(place)]
    names = {path.name: path for path in here}
    if folder.suffix == ".toml" and folder.is_file():
        name = folder.parent.name if folder.stem == "recipe" else folder.stem
        if name in names:
            return f"it is a recipe, and its bundle is {str(names[name])!r}"
        return f"it is a recipe, build its bundle with `specrt build {quote(str(folder))}`"
    near = get_close_matches(folder.name, names, n=1)
    around = [path for path in folder.parents if folder.is_file() and (path / FILE_NAME).is_file()]
    likely = [*around, *(names[name] for name in near), *_bundles(folder)]
    if likely:
        return f"did you mean {str(likely[0])!r}?"
    return "build one with `specrt build RECIPE`, or a name that `specrt list` has in its place"


def _bundles(place: Path) -> list[Path]:
    return sorted(path.parent for path in place.glob(f"*/{FILE_NAME}"))


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield what does not fit together between fields that are fine by themselves."""
    m, ends = manifest, manifest.eos_token_ids
    listed = [m.target.engine, *([m.draft.engine] if m.draft else []), TOKENIZER]
    listed += [model.vocab_map for model in m.models if model.vocab_map]
    for encoder in (model.encoder for model in m.models if model.encoder):
        listed += filter(None, (encoder.cross, encoder.encoder))
    vocab = m.target.geometry.vocab_size
    checks = [
        (m.batch > MOST_ROWS, f"batch is {m.batch}; expected 1 to {MOST_ROWS}"),
        (0 not in m.gammas, f"gammas is {short(m.gammas)}; expected 0 among them"),
        (m.gamma is not None and m.gamma not in m.gammas,
         f"gamma is {m.gamma}; expected one of {short(m.gammas)}"),
        (m.max_width > m.max_length,
         f"prefill or gammas asks for passes of {m.max_width}; expected up to {m.max_length}"),
        (any(r.quality and r.quality.top1 > 1 for r in m.models),
         "quality.top1 is above 1; expected a share"),
        (any(r.kind not in ("", *HEADS) for r in m.models),
         f"kind is {short([r.kind for r in m.models])}; expected one of {short(('', *HEADS))} "
         "each"),
        (any(not 0 <= share <= 1 for r in m.models for share in r.accepted),
         "accepted has a number that is not a share; expected 0 to 1"),
        (m.target.kind != "" or m.target.vocab_map != "",
         "the target is a head or has a vocab_map; expected a language model"),
        (m.draft is not None and m.draft.kind != ""
         and not 0 < m.draft.features == m.target.features,
         f"the head reads features of width {m.draft and m.draft.features}, and the target leaves "
         f"{m.target.features}; expected one width of both"),
        (any(one.kind == LENT and not m.target.geometry.lends(one)
             for r in m.models for one in r.geometry.memories),
         "a layer reads what no layer of the target keeps; expected one of the same sizes there"),
        (any((r.encoder.features > 0) != (r.encoder.frames > 0) for r in m.models if r.encoder),
         "an encoder has features without frames, or frames without features; expected both of "
         "speech, and none of text"),
        (m.task not in TASKS, f"task is {short(m.task)}; expected one of {short(tuple(TASKS))}"),
        (m.task != _task_of(m.target),
         f"task is {short(m.task)}; expected {_task_of(m.target)!r}, which is what the "
         "target's encoder is for"),
        (len({r.encoder is None for r in m.models}) > 1,
         "one of target and draft has an encoder; expected both, or none"),
        (m.target.encoder is not None and not m.target.encoder.encoder,
         "the target has no encoder of its own; expected one"),
        (bool(m.decoder_start) != (m.target.encoder is not None),
         f"decoder_start is {short(m.decoder_start)}; expected tokens with an encoder, and none "
         "without"),
        (len(m.decoder_start) > m.max_length,
         f"decoder_start has {len(m.decoder_start)} tokens; expected up to max_length, "
         f"{m.max_length}"),
        (max(m.decoder_start, default=0) >= vocab,
         f"decoder_start is {short(m.decoder_start)}; expected ids below {vocab}"),
        (m.acceptance is not None and max(m.acceptance.before, m.acceptance.after) > 1,
         "acceptance is above 1; expected shares"),
        (max(ends, default=0) >= vocab,
         f"eos_token_ids is {short(ends)}; expected ids below {vocab}"),
        ((m.bos_token_id or 0) >= vocab,
         f"bos_token_id is {m.bos_token_id}; expected an id below {vocab}"),
    ]  # fmt: skip
    yield from (problem for wrong, problem in checks if wrong)
    yield from (f"files lacks {short(name)}; expected it" for name in listed if name not in m.files)
    yield from (
        f"files names {short(name)}; expected a place inside the bundle"
        for name in m.files
        if not _inside(name)
    )
    for role, model in zip(("target", "draft"), m.models, strict=False):
        yield from (f"{role}.geometry.{problem}" for problem in model.geometry.problems())


def _task_of(target: ModelRecord) -> str:
    """Return what a bundle with such a target is for."""
    kind = "decoder" if target.encoder is None else target.encoder.kind
    return next((task for task, own in TASKS.items() if own == kind), "")


def _inside(name: str) -> bool:
    place = PurePosixPath(name)
    return bool(place.parts) and not place.is_absolute() and ".." not in place.parts


BUILD_ROOT = Path("engines/build")

DEFAULT_BUNDLE = BUILD_ROOT / "codelet"


@dataclass(frozen=True)
class Bundle:
    """A directory whose files are what its manifest says they are."""

    path: Path
    manifest: Manifest
    held: Mapping[str, HeldFile] = field(default_factory=dict, repr=False)
    """What was hashed, by name: to be read instead of the files."""

    @classmethod
    def open(cls, path: str | Path, *, without_target: bool = False) -> Bundle:
        """Open a bundle after checking format, machine and files.

        `without_target` leaves the target's files alone, which need not be there.
        Raises: BundleError naming what is wrong and what to run.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        _check_machine(folder, manifest)
        check_unlisted(folder, manifest)
        names = list(manifest.files)
        if without_target:
            home = PurePosixPath(manifest.target.engine).parent
            names = [name for name in names if not PurePosixPath(name).is_relative_to(home)]
        with ThreadPoolExecutor(max_workers=4) as pool:
            held = pool.map(lambda name: hold_listed(folder, manifest, name), names)
            return cls(folder, manifest, dict(zip(names, held, strict=True)))

    def beside(self, engine: str) -> dict[str, HeldFile]:
        """Return what was hashed in the folder of an engine, by name in it."""
        folder = PurePosixPath(engine).parent
        return {
            PurePosixPath(name).relative_to(folder).as_posix(): file
            for name, file in self.held.items()
            if PurePosixPath(name).is_relative_to(folder)
        }

    def file(self, name: str) -> Path:
        """Return the path of one file of the bundle."""
        return self.path / name


def _check_machine(folder: Path, manifest: Manifest) -> None:
    built, here = manifest.device.get("machine"), platform.machine()
    if built != here:
        raise BundleError(
            f"{folder} was built for {built}, and this machine is {here}; "
            "build it again here with `specrt build RECIPE`"
        )


def check_unlisted(folder: Path, manifest: Manifest) -> None:
    """Refuse files that would be read if they were listed: nobody knows who put them there.

    Raises: BundleError.
    """
    homes = {PurePosixPath(model.engine).parent for model in manifest.models}
    read = [PurePosixPath(name) for name in _TOP_READ]
    read += [home / name for home in homes for name in _BESIDE_READ]
    for name in sorted(map(str, read)):
        if name not in manifest.files and os.path.lexists(folder / name):
            raise BundleError(
                f"{folder / name} is not in the list of {FILE_NAME}: it came there, or was taken "
                f"off the list, after the build; remove it, or {_AGAIN}"
            )


def hold_listed(folder: Path, manifest: Manifest, name: str) -> HeldFile:
    """Open a file that the manifest lists, and return what was hashed.

    Raises: BundleError when it is not the file that was built.
    """
    path, expected = folder / name, manifest.files[name]
    try:
        held = hold(path, expected.bytes)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        reason = "is missing" if gone else f"is unreadable ({error.strerror or error})"
        raise BundleError(f"{path} {reason}; {shortage(error) or _AGAIN}") from error
    if held.facts.st_size != expected.bytes:
        raise BundleError(
            f"{path} has {held.facts.st_size} bytes, expected {expected.bytes}; {_AGAIN}"
        )
    if held.sha256 != expected.sha256:
        raise BundleError(
            f"{path} is not the file that was built (sha256 {held.sha256[:12]}, expected "
            f"{expected.sha256[:12]}); {_AGAIN}"
        )
    return held


def hash_file(path: Path) -> FileRecord:
    """Return the size and sha256 of a file."""
    return FileRecord(*hash_whole(path))
