"""Run a portable graph on ONNX Runtime, and its model on transformers, to compare them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from specrt.errors import ExportError
from specrt.geometry import Geometry
from specrt_export.checkpoint import Checkpoint
from specrt_export.mapped import map_weights
from specrt_export.trace import quiet
from specrt_export.weights import ATTACHED

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]


class GraphRun:
    """A portable graph on the CPU provider, its weights mapped from the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, graph: Path) -> None:
        model = onnx.load(graph, load_external_data=False)
        meta = {entry.key: entry.value for entry in model.metadata_props}
        if meta.get(ATTACHED) != "true":
            raise ExportError(
                f"{graph} has no weights yet ({ATTACHED} is {meta.get(ATTACHED)!r}); "
                "attach a checkpoint to it first"
            )
        self.geometry = Geometry.from_json(json.loads(meta["specrt.geometry"]))
        # Held as long as the session is: it reads the mapped bytes in place.
        self._weights = {
            weight.name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                weight.array, weight.onnx_type
            )
            for weight in map_weights(model, checkpoint.folder)
        }
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_external_initializers(list(self._weights), list(self._weights.values()))
        self._session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._buffers: dict[str, NDArray[np.float32]] = {}

    def reset(self, batch: int, length: int) -> None:
        """Start over with KV buffers of `batch` rows and `length` positions."""
        one = self.geometry
        names = [value.name for value in self._session.get_inputs()[3:]]
        shape = (batch, one.kv_heads, length, one.head_dim)
        # Not zero: what lies beyond a row's length must not matter.
        self._buffers = {name: np.full(shape, 3.0, np.float32) for name in names}

    def __call__(
        self, tokens: Tokens, start: Sequence[int], rows: Sequence[int]
    ) -> tuple[Logits, Tokens]:
        """Feed tokens [B, S] at `start` of each row; return logits [B, R, V] and argmax [B, R]."""
        feed = {
            "input_ids": tokens,
            "start": np.array(start, np.int64),
            "rows": np.array(rows, np.int64),
            **self._buffers,
        }
        names = ["logits", "argmax", *(f"present_{name}" for name in self._buffers)]
        logits, argmax, *written = self._session.run(names, feed)
        self._buffers = dict(zip(self._buffers, written, strict=True))
        return logits, argmax


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
