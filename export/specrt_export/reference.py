"""Run a checkpoint on transformers: the reference its portable graph is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specrt_export.checkpoint import Checkpoint
from specrt_export.portable import Logits, Tokens
from specrt_export.trace import quiet


class Reference:
    """The checkpoint as transformers runs it: fp32, eager attention, no cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformers import AutoModelForCausalLM

        with quiet(), no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
            )
        self._model = loaded.eval()

    def __call__(self, tokens: Tokens) -> Logits:
        """Return the logits [B, S, V] of whole sequences [B, S]."""
        with torch.no_grad():
            output = self._model(input_ids=torch.from_numpy(tokens), use_cache=False)
        logits: Logits = output.logits.numpy()
        return logits


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar of its own."""
    from transformers.utils import logging

    switch: Any = logging
    shown = switch.is_progress_bar_enabled()
    switch.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            switch.enable_progress_bar()
