"""Build a transformers model from its config, with no weight in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook

from specrt.errors import ExportError


def build(folder: Path, mode: FakeTensorMode) -> tuple[Any, dict[str, Tensor]]:
    """Build a model with fake parameters; return it with the real values of its buffers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def fake(_: torch.nn.Module, __: str, parameter: Tensor | None) -> Any:
        # A tied parameter is registered twice and has to stay one object.
        if parameter is None or mode.is_our_fake(parameter):
            return None
        with mode:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        return torch.nn.Parameter(empty, requires_grad=False)

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    factory = cast(Any, AutoModelForCausalLM)
    handle = register_module_parameter_registration_hook(fake)
    try:
        # Eager, because some models refuse to be built for a function they do not know.
        model = factory.from_config(config, attn_implementation="eager", dtype=torch.float32)
    finally:
        handle.remove()
    buffers = dict(model.named_buffers())
    for path, value in buffers.items():
        owner, _, name = path.rpartition(".")
        model.get_submodule(owner)._buffers[name] = mode.from_tensor(value)
    return model.eval(), buffers


def stored_names(model: Any) -> dict[str, str]:
    """Map each parameter of a model to the name its bytes have in a checkpoint.

    A tied parameter has several names and one set of bytes; some models have renamed parameters
    since their checkpoints were written, and transformers knows how.
    Raises: ExportError if a parameter is put together from several stored ones.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, apply_converters, apply_renamings

    changes = get_model_conversion_mapping(model, add_legacy=False)
    # Whether a checkpoint has a prefix is for the attach stage to see, as it is for transformers.
    back = [c.reverse_transform() for c in reversed(changes) if not isinstance(c, PrefixChange)]
    renamings, converters = _split(back)
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if apply_converters(name, converters)[1] is not None:
            raise ExportError(
                f"{type(model).__name__} puts {name} together from several stored weights, so the "
                "graph cannot refer to the checkpoint's own bytes; this model does not export"
            )
        names[name] = first.setdefault(id(parameter), apply_renamings(name, renamings))
    return names


def _split(changes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    from transformers.core_model_loading import WeightRenaming

    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    return renamings, [change for change in changes if change not in renamings]
