"""Chat templates that would stop a device are refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrt.errors import CheckpointError
from specrt_export.check import template_trial
from specrt_export.check.template_trial import check_templates
from specrt_export.checkpoint.checkpoint import Checkpoint
from support.chat_templates import KNOWN


def test_templates_are_rendered_once_under_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in one operation, which nothing on a device interrupts."""
    monkeypatch.setattr(template_trial, "SECONDS", 2)
    checkpoint = Checkpoint(tmp_path, {}, {})
    check_templates(checkpoint)
    for source, told in (
        (KNOWN["qwen3"], ""), ("{{ raise_exception('no') }}", ""), ("{% broken", ""),
        ("{{ range(99999) | batch(1) | list | sum(start=[]) }}", "more than 2 seconds"),
        ("{{ '%99999999999d' % 1 }}", "memory"), ("{{ 'x' * 10 ** 10 }}", "characters"),
    ):  # fmt: skip
        named = [{"name": "tool_use", "template": source}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        if told:
            with pytest.raises(CheckpointError, match=f"{told}.*; correct or remove"):
                check_templates(checkpoint)
        else:
            check_templates(checkpoint)
