"""The files of a bundle that say how its text is read and written: tokenizer, chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from specrt.bundle import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from specrt.errors import CheckpointError, first_line
from specrt.held_file import read_file
from specrt.text.control_tokens import SPECIAL_TOKENS_MAP, read_tokenizer, tokenizer_config
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.plan.generation_settings import generation_config
from specrt_export.plan.pair_vocabulary import lacks_rows

COPIED_FILES = (
    TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE, PREPROCESSOR_CONFIG, PROCESSOR_CONFIG,
)  # fmt: skip


def write_text_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the tokenizer's files into a bundle, with what older and newer files add.

    Raises: CheckpointError for a chat template that cannot be read.
    """
    home = checkpoint.folder
    (folder / TOKENIZER).write_bytes(bundled_tokenizer(checkpoint))
    for name in COPIED_FILES:
        if (home / name).is_file():
            shutil.copyfile(home / name, folder / name)
    named = chat_templates(checkpoint) if checkpoint.named_templates else {}
    if named or (home / SPECIAL_TOKENS_MAP).is_file():
        config = tokenizer_config(home)
        if named:
            (folder / CHAT_TEMPLATE).unlink(missing_ok=True)
            if isinstance(config.get("chat_template"), str):
                named.setdefault("default", config["chat_template"])
            templates = [{"name": name, "template": text} for name, text in named.items()]
            config["chat_template"] = templates
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    settings = generation_config(checkpoint)
    if settings and not (folder / GENERATION_CONFIG).exists():
        (folder / GENERATION_CONFIG).write_text(json.dumps(settings), encoding="utf-8")


def bundled_tokenizer(checkpoint: Checkpoint) -> bytes:
    """Return a target's tokenizer.json without the added tokens that its model has no row for.

    In a prompt they are plain text then.
    """
    data = read_tokenizer(checkpoint.folder / TOKENIZER)
    if not lacks_rows(checkpoint):
        return data
    tokenizer, size = json.loads(data), checkpoint.config["vocab_size"]
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["id"] < size]
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def chat_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the chat templates that are files of their own, by name; one for all is `default`.

    Raises: CheckpointError for one that cannot be read.
    """
    own = checkpoint.folder / CHAT_TEMPLATE
    files = {path.stem: path for path in checkpoint.named_templates}
    files |= {"default": own} if own.exists() else {}
    texts = {}
    for name, path in files.items():
        try:
            texts[name] = read_file(path).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a chat template ({first_line(error)}); correct or "
                "remove it"
            ) from error
    return texts
