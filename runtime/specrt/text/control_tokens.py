"""Which tokens control a conversation: no text of a message becomes one of them.

Special tokens do: those that `tokenizer.json` has as special, and those that the files next to it
name. So do added tokens that are not special where a chat template writes them, as `</think>` of
Qwen and `[INST]` of others. Other added tokens are vocabulary: runs of blanks, words, tags that
the model was trained to read in text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

from specrt.bundle import TOKENIZER_CONFIG
from specrt.errors import CheckpointError, first_line
from specrt.held_file import read_file

SPECIAL_TOKENS_MAP = "special_tokens_map.json"

_LISTS = ("additional_special_tokens", "extra_special_tokens")

_ALWAYS = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""No vocabulary has names of this form for text."""

_MARKED = re.compile(r"(?=.*\w).*[<>\[\]{}|\uff5c:#@]", re.DOTALL)

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model")


def is_control(name: str, literals: Sequence[str]) -> bool:
    """Tell whether an added token that is not special controls conversations of a template.

    `literals` are the texts written in the template. It may write a role between two of them, and
    the closing tag of a pair alone.
    """
    if _ALWAYS.fullmatch(name):
        return True
    if not _MARKED.match(name):
        return False
    written, sought = "\0".join(["", *literals, ""]).casefold(), name.casefold()
    if sought.replace("/", "") in written.replace("/", ""):
        return True
    parts = [sought.partition(role) for role in _ROLES]
    return any(
        role and f"{head}\0" in written and f"\0{tail}" in written for head, role, tail in parts
    )


def token_name(value: Any) -> str | None:
    """Return the text of a token as configurations name one, None for what is not one."""
    name = value.get("content") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else None


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a tokenizer, with what only the map of special tokens names.

    Raises: CheckpointError for a file that is there and holds something else.
    """
    config, named = (_read(folder / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP))
    given = {key: value for key, value in config.items() if value is not None}
    newer = "added_tokens_decoder" in config  # such files name all; transformers reads no map then
    return {**config, **named, **given} if newer else {**config, **named}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_file(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read as JSON ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise _damaged(path, f"holds {short(found)}, not an object")
    for key in _LISTS:
        if not isinstance(found.get(key) or [], (list, dict)):
            raise _damaged(path, f"has the {key} {short(found[key])}, not a list")
    return found


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}; fetch it again, or remove it")


def read_tokenizer(path: Path) -> bytes:
    """Return what `tokenizer.json` holds, special tokens that only its configuration names in it.

    Raises: OSError, CheckpointError.
    """
    data = read_file(path)
    named = set(_special_names(tokenizer_config(path.parent)))
    if not named:
        return data
    try:
        state = json.loads(data)
        added = _with_special(state, named)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return data  # whoever reads it says what is wrong
    if added == state["added_tokens"]:
        return data
    return json.dumps({**state, "added_tokens": added}, ensure_ascii=False).encode()


def _special_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of special tokens in a configuration."""
    values = [value for key, value in config.items() if key.endswith("_token")]
    for key in _LISTS:
        listed = config.get(key) or ()
        values += listed.values() if isinstance(listed, Mapping) else listed
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        values += [t for t in decoder.values() if isinstance(t, Mapping) and t.get("special")]
    yield from filter(None, map(token_name, values))


def _with_special(state: Mapping[str, Any], named: set[str]) -> list[dict[str, Any]]:
    """Return the added tokens of a tokenizer, of which some names are special.

    Words of the vocabulary join them where they look like control tokens: checkpoints name words
    such as `!` for padding, too.
    """
    added = [{**t, "special": t["special"] or t["content"] in named} for t in state["added_tokens"]]
    words = state["model"]["vocab"]
    ids = words if isinstance(words, Mapping) else {word: at for at, (word, _) in enumerate(words)}
    for name in sorted(named - {t["content"] for t in added} & ids.keys(), key=ids.__getitem__):
        if _MARKED.match(name):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": ids[name], "content": name, **flags, "special": True})
    return sorted(added, key=lambda token: int(token["id"]))
