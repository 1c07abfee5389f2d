"""An assistant of Gemma 4 as a torch module, made of transformers' own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrt_export.checkpoint.safetensors_file import map_array
from specrt_export.heads.assistant_format import EMBEDDING, Assistant, AssistantConfig


class AssistantHead(torch.nn.Module):
    """The head: it reads a token, and the state of its target before that token, or its own."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        factory: Any = AutoModelForCausalLM
        self.flags = config
        self.target = torch.nn.ModuleDict(
            {"embed_tokens": torch.nn.Embedding(config.vocabulary, config.target_width)}
        )
        with all_shared():
            whole = config_of(config.whole)
            how = {"attn_implementation": "eager", "dtype": torch.float32}
            self.assistant: Any = factory.from_config(whole, **how)

    def embeds(self, tokens: Tensor) -> Tensor:
        """Return the target's embeddings [..., width] of tokens."""
        scaled: Tensor = self.target["embed_tokens"](tokens) * self.flags.target_width**0.5
        return scaled

    def forward(self, embeds: Tensor, hidden: Tensor, **reads: Any) -> Tensor:
        """Return the normed states of all positions; `reads` is what transformers' layers take.

        Shapes: embeds and hidden [B, S, target_width] -> [B, S, own width].
        """
        joined = self.assistant.pre_projection(torch.cat([embeds, hidden], dim=-1))
        options = {"use_cache": False, "logits_to_keep": slice(None)}
        states: Tensor = self.assistant.model(
            inputs_embeds=joined, **options, **reads
        ).last_hidden_state
        return states

    def fed_back(self, state: Tensor) -> Tensor:
        """Return what the next token is paired with, where the target's state is not known."""
        projected: Tensor = self.assistant.post_projection(state)
        return projected


@contextmanager
def all_shared() -> Iterator[None]:
    """Let transformers make layers none of which has keys of its own.

    Release 5.23 looks for the layer that has, and so refuses its own assistants.
    """
    from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

    kinds: list[Any] = [Gemma4TextConfig, Gemma4UnifiedTextConfig]
    usual = [kind.kv_sharing_modes for kind in kinds]
    for kind in kinds:
        kind.kv_sharing_modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    try:
        yield
    finally:
        for kind, modes in zip(kinds, usual, strict=True):
            kind.kv_sharing_modes = modes


def config_of(config: Mapping[str, Any]) -> Any:
    """Return the configuration of a config.json, as transformers has it."""
    from transformers import AutoConfig

    known = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model(config["model_type"], **known)


def load_assistant(head: Assistant) -> AssistantHead:
    """Return an assistant with the weights of its checkpoint, in fp32."""
    model = AssistantHead(head.config)
    stored = {
        name: torch.from_numpy(map_array(weight).astype(np.float32))
        for name, weight in head.weights.items()
    }
    if head.config.order is not None:
        stored["masked_embedding.token_ordering"] = torch.from_numpy(head.config.order)
    model.target.load_state_dict({EMBEDDING.removeprefix("target."): stored.pop(EMBEDDING)})
    model.assistant.load_state_dict(stored, strict=False)  # what is tied may be left out
    return model.eval()
