"""A checkpoint: fetched from a hub or read from a folder; where the bytes of each weight are."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from specrt.bundle import HEADS
from specrt.errors import CheckpointError, first_line
from specrt.held_file import read_file
from specrt_export.checkpoint.codes import CodedWeight, Floats
from specrt_export.checkpoint.config_number import whole_number
from specrt_export.checkpoint.gguf.model import GgufModel
from specrt_export.checkpoint.gguf.reader import SUFFIX
from specrt_export.checkpoint.hub import (
    ADAPTER,
    CONFIG_FILES,
    NAMED_TEMPLATES,
    WANTED_FILES,
    download,
)
from specrt_export.checkpoint.hub_cache import INDEX, SINGLE, is_hub_name
from specrt_export.checkpoint.prequantized.folder import QuantizedFolder
from specrt_export.checkpoint.prequantized.layouts import PARTS
from specrt_export.checkpoint.prequantized.quantization_config import KEYS, Scheme, read_scheme
from specrt_export.checkpoint.safetensors_file import (
    WeightBytes,
    check_finite,
    map_array,
    read_header,
    same_floats,
)


def _near(name: str) -> str:
    """Return what there is in the folder that a name may be meant for."""
    path = Path(name)
    try:
        there = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, there, n=1)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


NEVER_READ = re.compile(
    r"(rotary_emb\.(original_)?inv_freq|position_ids|(attn|attention)\.(masked_)?bias"
    r"|(en|de)coder\.version|embed_positions\.(weights|_float_tensor)"
    r"|EncDecAttention\.relative_attention_bias\.weight|[dt]2[td])$|(^|\.)mtp(_\w+)?\.|^v_head\."
)
"""Tensors that no model reads: what it computes itself, tables of a trimmed vocabulary, layers that
predict several tokens, and the head that reinforcement learning trains next to a model's own."""


class QuantizedSource(Protocol):
    """What may hold weights in codes: a GGUF file, a folder, what its config.json says of it."""

    @property
    def quantized(self) -> bool:
        """Whether any weight is in codes."""

    def formats(self) -> str:
        """Return what weights are stored as."""

    def check_kept(self) -> None:
        """Refuse codes that no engine holds as they are.

        Raises: CheckpointError.
        """


@dataclass(frozen=True)
class Checkpoint:
    """A model folder that was looked at, with no weight read."""

    folder: Path
    config: dict[str, Any]
    weights: Mapping[str, WeightBytes]
    """Empty when opened with `config_only`."""
    gguf: GgufModel | None = None
    """The file that a folder stands for; the folder is there as long as this is."""
    prequantized: QuantizedFolder | None = None
    """The weights of a folder some of which are in codes."""
    scheme: Scheme | None = None
    """How the config.json of such a folder says that they are stored."""

    @property
    def origin(self) -> Path:
        """What was named: the folder, or the GGUF file."""
        return self.folder if self.gguf is None else self.gguf.file.path

    def number(
        self, key: str, part: Mapping[str, Any] | None = None, default: int | None = None,
        *, least: int = 1,
    ) -> int:  # fmt: skip
        """Return a number of config.json, or of a part of it, as `whole_number` does."""
        config = self.config if part is None else part
        return whole_number(config, key, self.folder / "config.json", default, least=least)

    @property
    def files(self) -> list[Path]:
        """The files that decide what a build makes of it."""
        if self.gguf is not None:
            return list(self.gguf.file.files)
        kinds = (".json", ".safetensors", ".jinja", ".bin")
        own = sorted(path for path in self.folder.iterdir() if path.suffix in kinds)
        # Not links to what was never downloaded: whoever reads a file says that it is missing.
        return [path for path in (*own, *self.named_templates) if path.is_file()]

    @property
    def named_templates(self) -> list[Path]:
        """Chat templates next to the one of a model, for purposes such as `tool_use`."""
        return sorted((self.folder / NAMED_TEMPLATES).glob("*.jinja"))

    @property
    def source(self) -> QuantizedSource | None:
        """What may hold weights in codes; None for a folder of floats."""
        return self.gguf.file if self.gguf is not None else self.prequantized or self.scheme

    @property
    def coded(self) -> dict[str, CodedWeight]:
        """The weights that are stored in codes."""
        if self.prequantized is not None:
            return dict(self.prequantized.weights)
        there = self.gguf.weights if self.gguf is not None else {}
        return {name: weight for name, weight in there.items() if weight.quantized}

    def check_numbers(self) -> None:
        """Refuse NaN and infinity in a folder; in a GGUF file they are met as it is read.

        Raises: CheckpointError naming the first.
        """
        folder = self.prequantized
        if self.gguf is None:
            tensors = self.weights if folder is None else folder.tensors()
            check_finite({n: t for n, t in tensors.items() if not NEVER_READ.search(n)})

    def floats(self, name: str) -> Floats:
        """Return a weight in fp32; of one in codes what they stand for.

        Raises: CheckpointError.
        """
        one = self.coded.get(name) or (self.gguf.weights[name] if self.gguf is not None else None)
        if one is not None:
            return one.floats(0, one.shape[0])
        return map_array(self.weights[name]).astype(np.float32)

    def unpack(self) -> None:
        """Write the weights that lie in another form than graphs read; a folder's never do.

        Raises: CheckpointError.
        """
        if self.gguf is not None:
            self.gguf.unpack()

    @classmethod
    def open(
        cls, name_or_path: str | Path, revision: str | None = None, config_only: bool = False,
        *, weight_only: bool = False,
    ) -> Checkpoint:  # fmt: skip
        """Look at a local folder or GGUF file, or at a hub name downloaded (or cached) first.

        `weight_only` leaves out what quantizes activations, keys and values.
        Raises: CheckpointError, naming the file at fault and what to do about it.
        """
        path = Path(name_or_path).expanduser()
        if path.suffix == SUFFIX and not path.is_dir():
            return cls._open_gguf(path, revision, config_only)
        folder = _folder(name_or_path, revision, config_only)
        _check_adapter(folder)
        path = folder / "config.json"
        config = _json(path, "a checkpoint folder holds one")
        head = named_head(config)
        if head and not config_only:
            folder = _with_pickle(folder, name_or_path, revision)
        weights = {} if config_only else _weights(folder, converts=head is not None)
        part = text_config(config)
        if part is not config:
            config, weights = part, _text_weights(weights)
        scheme = read_scheme(path, config, weight_only=weight_only)
        if scheme is None:
            _check_floats(path, weights)
            return cls(folder, config, MappingProxyType(weights))
        # The graph is that of the model: how its weights are stored is not part of it.
        config = {key: value for key, value in config.items() if key not in KEYS}
        if config_only:
            return cls(folder, config, weights, scheme=scheme)
        found = QuantizedFolder.of(scheme, weights)
        places = MappingProxyType(found.places())
        return cls(folder, config, places, prequantized=found, scheme=scheme)

    @classmethod
    def _open_gguf(cls, path: Path, revision: str | None, config_only: bool) -> Checkpoint:
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} given with the file {path}; a revision belongs to a hub "
                "name, leave it out"
            )
        model = GgufModel.open(path)
        places = {} if config_only else model.places
        return cls(model.folder, model.config, MappingProxyType(places), model)


def linked(checkpoint: Checkpoint, weights: Mapping[str, WeightBytes], folder: Path) -> Checkpoint:
    """Return a checkpoint with other weights, whose files `folder` then has links to.

    So weights of several checkpoints are in one folder, as a graph wants them.
    """
    folder.mkdir(parents=True)
    files = dict.fromkeys(weight.file for weight in weights.values())
    places = {file: folder / f"{number}-{file.name}" for number, file in enumerate(files)}
    for file, place in places.items():
        place.symlink_to(file.resolve())
    moved = {name: replace(weight, file=places[weight.file]) for name, weight in weights.items()}
    return replace(checkpoint, weights=MappingProxyType(moved))


TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
}
"""Multimodal model types whose text part is a decoder of its own, and the type of that."""

_OF_TEXT = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How the names of its weights begin in a checkpoint of the whole, today's and older ones, and in a
checkpoint of its own."""

_OF_OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision_tower|audio_tower|multi_modal_projector|vision_embedder|embed_vision"
    r"|embed_audio)\."
)
"""How the names of weights begin that a text part does not read."""

_OF_ALL = ("bos_token_id", "eos_token_id", "pad_token_id", *KEYS)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model's text part as if it were a checkpoint.

    The same object is that of a model that has no other parts.
    """
    text, kind = config.get("text_config"), config.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS or not isinstance(text, dict):
        return config
    kept = {key: config[key] for key in _OF_ALL if key in config}
    return {**kept, **text, "model_type": TEXT_PARTS[kind]}


def _text_weights(weights: dict[str, WeightBytes]) -> dict[str, WeightBytes]:
    """Return the weights of the text part, named as if it were a checkpoint of its own."""
    named = {name: w for name, w in weights.items() if not _OF_OTHER_PARTS.match(name)}
    for prefix, own in _OF_TEXT.items():
        named = {
            own + name.removeprefix(prefix) if name.startswith(prefix) else name: weight
            for name, weight in named.items()
        }
    return named


def _check_floats(path: Path, weights: Mapping[str, WeightBytes]) -> None:
    """Refuse codes that nothing says how to read.

    Raises: CheckpointError.
    """
    for name, weight in weights.items():
        if name.rpartition(".")[2] in PARTS:
            raise CheckpointError(
                f"{weight.file}: {name} is part of a quantized weight, and {path} has no "
                "quantization_config that says how it is stored; fetch both again, of one "
                "checkpoint"
            )


def _check_adapter(folder: Path) -> None:
    """Refuse the weights of an adapter, and a model that transformers would add one to.

    Raises: CheckpointError.
    """
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER}), which no engine has; save it and its model as "
            "one: `AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()"
            f".save_pretrained(new)`, or remove {ADAPTER} if the weights have it in them"
        )


def _folder(name_or_path: str | Path, revision: str | None, config_only: bool) -> Path:
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} given with the local folder {folder}; "
                "a revision belongs to a hub name, leave it out"
            )
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file; give the folder that holds config.json, or a GGUF file"
        )
    name = str(name_or_path)
    if not is_hub_name(name):
        raise CheckpointError(
            f"there is no folder {name}{_near(name)}, and a hub name looks like 'owner/model'; "
            "name one"
        )
    try:
        return download(name, revision, CONFIG_FILES if config_only else WANTED_FILES)
    except CheckpointError as error:
        raise CheckpointError(f"there is no folder {name}{_near(name)}, and {error}") from error


def _json(path: Path, why: str) -> dict[str, Any]:
    try:
        data = json.loads(read_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; {why}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({first_line(error)}); fetch it again"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not an object")
    return data


HEAD_NAMES = {
    **{kind: kind for kind in HEADS}, "dspark": "dflash",
    "gemma4assistant": "gemma4_assistant", "gemma4unifiedassistant": "gemma4_assistant",
}  # fmt: skip
"""The format of a head, by what the name of its class has in it."""


def head_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of classes in a config.json, by which a head is told from a model."""
    classes = config.get("architectures")
    names = classes if isinstance(classes, list) else []
    return [str(name) for name in (*names, config.get("speculators_model_type", ""))]


def named_head(config: Mapping[str, Any]) -> str | None:
    """Return the format of the head whose class a config.json names; None where it does not."""
    names = " ".join(head_names(config)).lower()
    return next((kind for part, kind in HEAD_NAMES.items() if part in names), None)


PICKLE = "pytorch_model.bin"
"""Where many heads have their weights."""


def _with_pickle(folder: Path, name_or_path: str | Path, revision: str | None) -> Path:
    """Fetch the pickle of a head that has nothing else; return its folder."""
    there = any((folder / name).exists() for name in (SINGLE, INDEX, PICKLE))
    if there or Path(name_or_path).expanduser().is_dir():
        return folder
    return download(str(name_or_path), revision, (*CONFIG_FILES, PICKLE))


def _converted(pickle: Path) -> Path:
    """Return the tensors of a pickle as safetensors, converted once and kept in a cache.

    Nothing that a pickle says is run: what is not a tensor is refused.
    Raises: CheckpointError.
    """
    facts = pickle.resolve().stat()
    known = f"{pickle.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrt" / "heads"
    made = cache / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.safetensors"
    if made.is_file():
        return made
    aside = made.with_name(f".{made.name}.{os.getpid()}")
    try:
        import torch
        from safetensors.torch import save_file

        tensors = torch.load(pickle, map_location="cpu", weights_only=True)
        cache.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, aside)
        aside.replace(made)
    except Exception as error:  # the library raises whatever a damaged file makes it raise
        raise CheckpointError(
            f"{pickle} cannot be converted ({first_line(error)}); save its tensors as "
            f"{SINGLE} next to it"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return made


def _weights(folder: Path, *, converts: bool = False) -> dict[str, WeightBytes]:
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _sharded(folder)
    if converts and (folder / PICKLE).is_file():
        return read_header(_converted(folder / PICKLE))
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder} holds pickled weights ({pickles[0]}), which run code when read; save them "
            "as safetensors: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)"
        )
    raise CheckpointError(
        f"{folder} has neither {SINGLE} nor {INDEX}; fetch the weights, or export the graph "
        "alone with --config-only"
    )


def _sharded(folder: Path) -> dict[str, WeightBytes]:
    index = _json(folder / INDEX, "fetch it again").get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{folder / INDEX} has no weight_map; fetch it again")
    shards: dict[str, dict[str, WeightBytes]] = {}
    for shard in sorted(set(map(str, index.values()))):
        # Graphs refer to shards by bare name, so that they travel with the folder.
        if Path(shard).name != shard:
            raise CheckpointError(f"{folder / INDEX} names {shard!r}; expected a bare file name")
        shards[shard] = read_header(folder / shard)
    for name, shard in index.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{folder / INDEX} places {name} in {shard}, which does not hold it; "
                "fetch both again, they are of different versions"
            )
    return _all_of(shards)


def _all_of(shards: Mapping[str, Mapping[str, WeightBytes]]) -> dict[str, WeightBytes]:
    """Return every tensor of some shards, also those that their index leaves out.

    transformers takes the names from the shards, too.
    Raises: CheckpointError for a tensor that two of them hold with different values.
    """
    found: dict[str, WeightBytes] = {}
    for tensors in shards.values():
        for name, weight in tensors.items():
            first = found.setdefault(name, weight)
            if first is not weight and not same_floats(first, weight):
                raise CheckpointError(
                    f"{first.file} and {weight.file.name} both hold {name}, with different values; "
                    "expected it in one of them: fetch the checkpoint again"
                )
    return found
