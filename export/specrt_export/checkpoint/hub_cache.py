"""The cache of the hub on this machine, as huggingface_hub lays it out, read without it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

MAIN = "main"
"""What a model is fetched at where no revision is named."""

COMMIT = re.compile(r"[0-9a-f]{40}")

SINGLE = "model.safetensors"

INDEX = "model.safetensors.index.json"


def is_hub_name(name: str) -> bool:
    """Tell whether a text may be the name of a model on the hub."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None


def cache() -> Path:
    """Return the folder that huggingface_hub keeps models in, without importing it."""
    settings = os.environ
    home = settings.get("XDG_CACHE_HOME") or "~/.cache"
    home = settings.get("HF_HOME") or f"{home}/huggingface"
    named = settings.get("HF_HUB_CACHE") or settings.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(named)).expanduser()


def repository(name: str) -> Path:
    """Return where all that is here of a model lies."""
    return cache() / f"models--{name.replace('/', '--')}"


def cached_models() -> list[str]:
    """Return the names of the models that something is here of."""
    folders = sorted(cache().glob("models--*"))
    return [path.name.removeprefix("models--").replace("--", "/", 1) for path in folders]


def cached_snapshot(name: str, revision: str = "") -> Path | None:
    """Return the folder of a model's files that are here; None where there is none."""
    commit = revision or MAIN
    if not COMMIT.fullmatch(commit):
        try:
            commit = (repository(name) / "refs" / commit).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    folder = repository(name) / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def has_weights(folder: Path) -> bool:
    """Tell whether the weights in a folder are whole; a download that broke off leaves some."""
    if (folder / SINGLE).exists():
        return True
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = set(map(str, index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(shards) and all((folder / shard).exists() for shard in shards)


def weights_bytes(name: str) -> int:
    """Return the bytes that are here of a model, what broke off included."""
    blobs = repository(name) / "blobs"
    return sum(path.stat().st_size for path in blobs.glob("*") if path.is_file())
