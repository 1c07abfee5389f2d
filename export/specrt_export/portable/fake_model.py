"""A model as config.json describes it, with the shapes of its weights and none of their bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook

from specrt.errors import ExportError
from specrt_export.portable.graph import OPTIONAL, STRIPS, TIED

LONG_ROPE = "longrope"
"""A rotation with two sets of angles: one for short texts, one for texts beyond a length."""


def causal(_: str) -> Any:
    """Return the class that builds decoders of every type."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def build(
    folder: Path, mode: FakeTensorMode, factory_of: Callable[[str], Any] = causal
) -> tuple[Any, dict[str, Tensor]]:
    """Build a model with fake parameters; return it with the real values of its buffers.

    `factory_of` names the class that builds models of a type.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config = getattr(config, "text_config", None) or config
    factory = factory_of(str(config.model_type))
    with faked(mode):
        # Eager, because some models refuse to be built for a function they do not know.
        model = factory.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return traceable(model), take_buffers(model, mode)


def traceable(model: Any) -> Any:
    """Return a model that computes what it does in operators that trace."""
    for module in model.modules():
        # The angles of short texts, which hold as far as `trained_positions` reaches.
        if getattr(module, "rope_type", None) == LONG_ROPE:
            module.rope_type = "default"
        if hasattr(module, "expand_kv"):
            module.expand_kv = MethodType(_expanded, module)
        if hasattr(module, "recomposition_frequencies"):
            module.recomposition_frequencies = _of_text
    return model.eval()


def _of_text(angles: Tensor) -> Tensor:
    """Return the cosines or sines [B, S, R] of angles [3, B, S, R / 2] by time, height and width.

    The three positions of a token of text are one; transformers scatters theirs into each other.
    """
    return torch.cat((angles[0], angles[0]), -1)


def _expanded(attention: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of multi-head latent attention; see DeepSeek-V2, arXiv:2405.04434.

    transformers writes keys into an empty tensor, which traces into scatters.
    Shapes: latent [B, 1, S, rank]; rotated [B, 1, S, R], which is the end of each head's key;
    returns [B, H, S, N + R] and [B, H, S, V].
    """
    sizes = attention.qk_nope_head_dim, attention.v_head_dim
    heads = attention.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, sum(sizes)))
    keys, values = heads.transpose(1, 2).split(sizes, -1)
    return torch.cat((keys, rotated.expand(-1, keys.shape[1], -1, -1)), -1), values


@contextmanager
def faked(mode: FakeTensorMode) -> Iterator[None]:
    """Give modules that are built meanwhile parameters with a shape and no bytes."""

    def fake(_: torch.nn.Module, __: str, parameter: Tensor | None) -> Any:
        # A tied parameter is registered twice and has to stay one object.
        if parameter is None or mode.is_our_fake(parameter):
            return None
        with mode:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
        made: Any = torch.nn.Parameter(empty, requires_grad=False)
        made._is_hf_initialized = True  # transformers fills in no others
        return made

    handle = register_module_parameter_registration_hook(fake)
    try:
        yield
    finally:
        handle.remove()


def take_buffers(model: torch.nn.Module, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Replace the buffers of a model by fake ones; return their values."""
    buffers = dict(model.named_buffers())
    for path, value in buffers.items():
        owner, _, name = path.rpartition(".")
        model.get_submodule(owner)._buffers[name] = mode.from_tensor(value)
    return buffers


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a model, none of them tied: a checkpoint tells which are, not its config.json.

    Many configs tie an embedding and a head of which the file holds both.
    """

    names: dict[str, str]
    """The name in a checkpoint of each weight."""
    tied: dict[str, tuple[str, ...]]
    """For each weight that the config ties, the names of all that are tied to it, its own too."""
    optional: dict[str, NDArray[np.float32]]
    """Those that a checkpoint may not hold, and what they are then."""
    strips: dict[str, list[str]]
    """Of weights whose rows lie in several of a checkpoint: these, in their order."""

    @classmethod
    def of(cls, model: Any, mode: FakeTensorMode, buffers: dict[str, Tensor]) -> StoredWeights:
        """Untie the weights of a model, and take from `buffers` those that a checkpoint may hold.

        Raises: ExportError if a weight is put together from several stored ones otherwise.
        """
        optional = {}
        for path, module in model.named_modules():
            kept = module._buffers.keys() - module._non_persistent_buffers_set
            for name in sorted(kept):
                whole = f"{path}.{name}".lstrip(".")
                if buffers[whole].is_floating_point():
                    optional[whole] = buffers.pop(whole).numpy()
            if hasattr(module, "create_weight"):  # a table that most checkpoints leave out
                optional[f"{path}.weight"] = module.create_weight().numpy()
        tied = _untie(model, mode)
        names, strips = stored_names(model, optional)
        optional = {names[name]: value for name, value in optional.items()}
        # A name of today is read, too, as transformers does.
        either: dict[str, tuple[str, ...]]
        either = {stored: (stored, name) for name, stored in names.items() if stored != name}
        either |= {names[n]: tuple(names[o] for o in tied[n]) for n in tied}
        return cls(names, either, optional, strips)

    def facts(self, graph: Any) -> dict[str, str]:
        """Return what a graph says of such weights among its own."""
        there = graph.graph.initializers.keys()
        tied = {name: others for name, others in self.tied.items() if name in there}
        optional = sorted(self.optional.keys() & there)
        strips = {name: parts for name, parts in self.strips.items() if name in there}
        facts = (TIED, tied), (OPTIONAL, optional), (STRIPS, strips)
        return {k: json.dumps(v) for k, v in facts if v}


def _untie(model: Any, mode: FakeTensorMode) -> dict[str, tuple[str, ...]]:
    """Give every name of a tied parameter one of its own; return all names of each."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = {}
    with faked(mode):
        for names in (names for names in groups.values() if len(names) > 1):
            for name in names:
                owner, _, own = name.rpartition(".")
                shape = model.get_parameter(name).shape
                model.get_submodule(owner).register_parameter(
                    own, torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
                )
                tied[name] = tuple(names)
    return tied


def stored_names(
    model: Any, optional: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Map each parameter of a model, and what is `optional`, to its name in a checkpoint.

    A tied parameter has several names and one set of bytes; some models have renamed parameters
    since their checkpoints were written, and transformers knows how. By those names come the strips
    of parameters that a checkpoint holds in several.
    Raises: ExportError if a parameter is put together from several stored ones otherwise.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings

    changes = get_model_conversion_mapping(model, add_legacy=False)
    # Whether a checkpoint has a prefix is for the attach stage to see, as it is for transformers.
    back = [c.reverse_transform() for c in reversed(changes) if not isinstance(c, PrefixChange)]
    renamings = [change for change in back if isinstance(change, WeightRenaming)]
    converters = [change for change in back if not isinstance(change, WeightRenaming)]
    first: dict[int, str] = {}
    names = {name: apply_renamings(name, renamings) for name in optional}
    strips: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), apply_renamings(name, renamings))
        if parts := _strips(model, name, converters):
            strips[names[name]] = [apply_renamings(part, renamings) for part in parts]
    return names, strips


def _strips(model: Any, name: str, converters: Sequence[Any]) -> list[str]:
    """Return the weights of a checkpoint that a parameter's rows lie in, none if it is one of them.

    Raises: ExportError.
    """
    from transformers.core_model_loading import Chunk, SplitModulelist

    for converter in converters:
        found, pattern = converter.rename_source_key(name)
        if pattern is None:
            continue
        parts, steps = converter.target_patterns, converter.operations
        by_expert = any(isinstance(one, SplitModulelist) and one.dim == 0 for one in steps)
        cuts = [one for one in steps if isinstance(one, Chunk) and one.dim == int(by_expert)]
        if len(cuts) + by_expert != len(steps) or by_expert != any("*" in part for part in parts):
            raise ExportError(
                f"{type(model).__name__} puts {name} together from several stored weights, but not "
                "as rows of one after those of another, so the graph cannot refer to the "
                "checkpoint's own bytes; this model does not export"
            )
        experts = range(model.get_parameter(name).shape[0]) if by_expert else [0]
        named = [found.replace(parts[0], part) for part in parts]
        return [part.replace("*", str(expert)) for expert in experts for part in named]
    return []
