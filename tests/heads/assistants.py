"""Random assistants of Gemma 4, their targets, and what transformers drafts with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from heads.conftest import VOCABULARY, save_model
from specrt_export.heads.assistant_module import all_shared

WINDOW = 8
TYPES = ["sliding_attention", "full_attention"]
GEMMA4: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "layer_types": 2 * TYPES, "head_dim": 16,
    "global_head_dim": 32, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0, "rope_parameters": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "model_type": "gemma4_text", "num_hidden_layers": 5, "layer_types": [*2 * TYPES, TYPES[1]],
        "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text", "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
}  # fmt: skip
"""What the target has of its own: a layer that shares keys; keys that are values. The first
assistant scores some clusters of entries only."""


def save_pair(folder: Path, kind: str) -> tuple[Path, Path]:
    """Write the checkpoints of a target and its assistant; return their folders."""
    sizes = {**SIZES, **GEMMA4, **KINDS[kind]}
    target = save_model(folder / "target", 0, **GEMMA4 | KINDS[kind])
    head = save_assistant(folder / "head", sizes, hidden_size=16, intermediate_size=48)
    return target, head


SIZES = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 256}  # fmt: skip


def save_assistant(folder: Path, target: dict[str, Any], **changes: Any) -> Path:
    """Write the checkpoint of a random assistant of a target of some sizes; return its folder."""
    kind, vocabulary = target["model_type"].removesuffix("_text"), target["vocab_size"]
    text = {
        **target, "num_hidden_layers": 4, "num_kv_shared_layers": 4,
        "layer_types": [*2 * TYPES[:1], *TYPES], "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False, **changes,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(
        f"{kind}_assistant", text_config=text, backbone_hidden_size=target["hidden_size"],
        use_ordered_embeddings=kind == "gemma4", num_centroids=vocabulary // 8,
        centroid_intermediate_top_k=5,
    )  # fmt: skip
    torch.manual_seed(5)
    with all_shared():
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3)
    for layer in model.model.layers:
        layer.layer_scalar.uniform_(0.6, 0.9)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(vocabulary))
    model.save_pretrained(folder)
    return folder


class Transformers:
    """Drafts as transformers does, computing everything anew, right or with a fault."""

    def __init__(
        self, target: Path, head: Path, fault: str = "", dtype: torch.dtype = torch.float32
    ) -> None:
        torch.set_num_threads(1)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        self._target, self._fault = load(target, **how).eval(), fault
        with all_shared():
            self._model = load(head, **how).eval()
        config, there = self._target.config, fault == "keys of another layer"
        first = config.num_hidden_layers - config.num_kv_shared_layers - 2 - 2 * there
        self._owners = dict(zip(TYPES, range(first, first + 2), strict=True))
        if fault == "next position":
            self._model.register_forward_pre_hook(self._moved, with_kwargs=True)
        generator: Any = SinglePositionMultiTokenCandidateGenerator
        self._generator = generator(
            self._model, self._target.get_input_embeddings(), self._target.generation_config
        )
        self._generator.main_model_max_length = 1 << 20
        self.logits: NDArray[Any] = np.zeros((0, VOCABULARY))
        """Of the last draft."""

    @staticmethod
    def _moved(_: Any, args: Any, options: Any) -> Any:
        return args, {**options, "position_ids": options["position_ids"] + 1}

    def __call__(self, tokens: Sequence[int], gamma: int) -> list[int]:
        text, cache = torch.tensor([tokens]), transformers.DynamicCache()
        with torch.no_grad():
            read = self._target(text[:, :-1], past_key_values=cache, output_hidden_states=True)
            states = read.hidden_states[-1]
            if self._fault == "state of the token before":
                states = torch.cat([torch.zeros(1, 1, 32), states], dim=1)[:, :-1]
            pairs = {k: (cache.layers[i].keys, cache.layers[i].values)
                     for k, i in self._owners.items()}  # fmt: skip
            left = SimpleNamespace(hidden_states=(states,), shared_kv_states=pairs)
            generator = self._generator
            generator.num_assistant_tokens, generator.is_main_model_prefill = gamma, True
            ids, logits = generator.get_candidates(text, {}, left, False, 0)
        self.logits = logits[0].numpy()
        drafted: NDArray[np.int64] = ids[0, len(tokens) :].numpy()
        return [int(token) for token in drafted]
