"""What a trace refuses: masks, layers and attentions that a portable graph cannot express."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specrt.errors import ExportError
from specrt.geometry import ATTENTION, SHARED, LayerMemory
from specrt_export.portable.fake_model import StoredWeights, build
from specrt_export.portable.hook import Hook, Probe, experts
from specrt_export.portable.trace import trace

pytestmark = pytest.mark.export


def test_a_mask_that_is_not_a_window_is_refused() -> None:
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        chunked_overlay,
        sliding_window_causal_mask_function,
    )

    def checked(rule: Callable[..., Any], window: int | None) -> None:
        hook = Hook()
        hook.begin(torch.zeros(1, 1, dtype=torch.int64))
        hook.mask(kv_length=4, mask_function=rule, local_size=window)
        hook.check_masks()

    checked(causal_mask_function, None)
    checked(sliding_window_causal_mask_function(8), 8)
    for rule, window in (
        (bidirectional_mask_function, None),
        (sliding_window_causal_mask_function(9), 8),
        (chunked_overlay(8, torch.zeros(1, dtype=torch.int64)), 8),
    ):
        with pytest.raises(ExportError, match="neither causal nor a sliding window"):
            checked(rule, window)


def test_an_attention_with_more_terms_is_refused() -> None:
    q = torch.zeros(1, 1, 1, 4)
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ExportError, match="Linear adds 's_aux' to its attention"):
        Hook().attention(module, q, q, q, None, s_aux=q)
    module.layer_idx = 0
    with pytest.raises(ExportError, match="builds its attention mask itself"):
        Hook().attention(module, q, q, q, None)


@pytest.mark.parametrize(
    ("kind", "other"), [("NemotronH", {}), ("GptOss", {}), ("Mixtral", {"hidden_act": "relu"})]
)
def test_experts_of_another_kind_are_refused(kind: str, other: dict[str, Any]) -> None:
    """Without a gate; with biases; gated by another function."""
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": 2, **other}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = sys.modules[getattr(transformers, f"{kind}Model").__module__]
    module, x = getattr(model, f"{kind}Experts")(config), torch.zeros(1, 8)
    with pytest.raises(ExportError, match=f"{kind}Experts has .*silu or gelu, without biases"):
        experts(module, x, x.long(), x)


def test_a_layer_that_shares_keys_has_the_window_of_their_owner() -> None:
    key, value = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
    hook, probe = Hook(), Probe(2, 1)
    probe.update(key, value, 0)
    hook.read = {0: (key, value), 1: (key, value)}
    hook.windows = {0: 8, 1: 8}
    owner = LayerMemory(ATTENTION, 2, 4, 4, 8)
    assert probe.memories(hook, 2, "toy") == (owner, LayerMemory(SHARED, owner=0))
    hook.read[1] = key, value.clone()
    assert probe.memories(hook, 2, "toy") == (owner, owner)
    hook.read[1], hook.windows[1] = (key, value), 0
    with pytest.raises(
        ExportError, match="layer 1 of toy reads the keys of layer 0 within a windo"
    ):
        probe.memories(hook, 2, "toy")


def test_positions_that_begin_at_the_padding_token_are_refused(tmp_path: Path) -> None:
    from transformers import RobertaConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    RobertaConfig(is_decoder=True, intermediate_size=8, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ExportError, match=r"from its padding token on; expected .* from 0"):
        trace(tmp_path)


def test_a_buffer_that_checkpoints_hold_is_read_from_them(tmp_path: Path) -> None:
    from transformers import Gemma4TextConfig

    Gemma4TextConfig(
        vocab_size=9, vocab_size_per_layer_input=9, hidden_size=8, num_hidden_layers=2,
        intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    ).save_pretrained(tmp_path)  # fmt: skip
    mode = FakeTensorMode()
    model, buffers = build(tmp_path, mode)
    stored = StoredWeights.of(model, mode, buffers)
    scales = {f"model.layers.{layer}.layer_scalar" for layer in range(2)}
    assert scales == stored.optional.keys() <= stored.names.keys()
    assert not scales & buffers.keys()


def test_what_transformers_says_of_a_config_is_passed_on_past_its_colon(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 66, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ExportError, match=r"StrictData.*hidden size \(66\) is not a multiple") as e:
        trace(tmp_path)
    assert "\n" not in str(e.value)
