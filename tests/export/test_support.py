"""Models without a portable graph are refused by name, before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrt.errors import ExportError

pytest.importorskip("onnx_ir", reason="exporting needs more: make setup-export")

from export.zoo import MODELS

pytestmark = pytest.mark.export
torch = pytest.importorskip("torch", reason="needs the export extra")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "mamba"}, "mamba cannot be exported: .*recurrent state.*rolled back"),
        ({"model_type": "qwen3_next"}, "recurrent state"),
        ({"model_type": "jamba"}, "recurrent state"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
            r"recurrent state \(linear_attention\)",
        ),
        ({"model_type": "mixtral", "num_local_experts": 8}, "experts .num_local_experts is 8"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "n_routed_experts is 256"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "gemma3", "text_config": {}}, "multimodal"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        (
            {"model_type": "phi3", "rope_parameters": {"rope_type": "su"}},
            "rope type 'su' changes",
        ),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}},
            "quantised .gptq.*Export the checkpoint it was quantised from",
        ),
        ({"model_type": "acme", "auto_map": {"AutoConfig": "x.Y"}}, "own checkpoint .auto_map."),
        ({"model_type": "acme"}, "does not know this model type"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "gptj"}, "GPTJForCausalLM computes attention itself"),
    ],
)
def test_a_model_is_refused_with_its_reason(config: dict[str, Any], message: str) -> None:
    from specrt_export.portable.exporter import check_support

    with pytest.raises(ExportError, match=message):
        check_support(config)


def test_the_zoo_is_supported() -> None:
    import transformers

    from specrt_export.portable.exporter import check_support

    for kind, _, _ in MODELS.values():
        check_support(getattr(transformers, kind)().to_dict())


def test_a_refusal_comes_before_any_work(tmp_path: Path) -> None:
    from specrt_export.checkpoint import Checkpoint
    from specrt_export.portable.exporter import export_graph

    stages: list[str] = []
    checkpoint = Checkpoint(tmp_path, {"model_type": "mamba"}, {})
    with pytest.raises(ExportError, match="mamba"):
        export_graph(checkpoint, tmp_path / "out.onnx", progress=stages.append)
    assert stages == []
    assert list(tmp_path.iterdir()) == []


def test_a_mask_that_is_not_a_window_is_refused() -> None:
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        chunked_overlay,
        sliding_window_causal_mask_function,
    )

    from specrt_export.portable.trace import Hook

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


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({0: (8, 8), 1: (8, 4)}, "keys and values of 2 shapes"),
        ({0: (8, 8)}, r"for layers \[0\] of 2"),
    ],
)
def test_uneven_layers_are_refused(shapes: dict[int, tuple[int, int]], message: str) -> None:
    from specrt_export.portable.trace import Hook, measure

    hook = Hook()
    hook.windows = dict.fromkeys(shapes, 0)

    def model(past_key_values: Any, **_: Any) -> None:
        for layer, sizes in shapes.items():
            past_key_values.update(*(torch.zeros(1, 2, 5, size) for size in sizes), layer)

    model.config = SimpleNamespace(num_hidden_layers=2, model_type="uneven")  # type: ignore[attr-defined]
    with pytest.raises(ExportError, match=message):
        measure(model, hook)


def test_an_attention_with_more_terms_is_refused() -> None:
    from specrt_export.portable.trace import Hook

    q = torch.zeros(1, 1, 1, 4)
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ExportError, match="Linear adds 's_aux' to its attention"):
        Hook().attention(module, q, q, q, None, s_aux=q)
    module.layer_idx = 0
    with pytest.raises(ExportError, match="builds its attention mask itself"):
        Hook().attention(module, q, q, q, None)
