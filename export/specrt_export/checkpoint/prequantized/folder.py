"""A folder of safetensors with quantized weights: which are in codes, and which in floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrt.errors import CheckpointError
from specrt_export.checkpoint.prequantized.layouts import PARTS, packed_weight
from specrt_export.checkpoint.prequantized.packed_weight import LayerTensors, PackedWeight
from specrt_export.checkpoint.prequantized.quantization_config import INSTEAD, WEIGHT_ONLY, Scheme
from specrt_export.checkpoint.safetensors_file import FLOAT_TYPES, WeightBytes, count_formats

OF_ACTIVATIONS = (
    "input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point",
    "activation_scale", "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point",
)  # fmt: skip
"""Tensors by which activations, keys or values are quantized."""


@dataclass(frozen=True)
class QuantizedFolder:
    """The weights of a folder whose config.json says that they are quantized."""

    folder: Path
    weights: Mapping[str, PackedWeight]
    """By name, those in codes."""
    floats: Mapping[str, WeightBytes]
    """The others."""
    left_out: tuple[str, ...] = ()
    """What quantizes activations, keys or values, where it was asked to leave that out."""

    quantized = True

    @classmethod
    def of(cls, scheme: Scheme, tensors: Mapping[str, WeightBytes]) -> QuantizedFolder:
        """Tell the weights of a folder apart.

        Raises: CheckpointError naming a tensor that has no place in such a checkpoint.
        """
        modules: dict[str, dict[str, WeightBytes]] = defaultdict(dict)
        for name, tensor in tensors.items():
            stem, _, part = name.rpartition(".")
            modules[stem][part] = tensor
        weights, floats = {}, {}
        left_out = dict.fromkeys(scheme.left_out)
        for stem, parts in modules.items():
            module = LayerTensors(stem, parts)
            found = packed_weight(module, scheme)
            taken: set[str] = set()
            if found is not None:
                weight, taken = found
                weights[weight.name] = weight
            for part in sorted(parts.keys() - taken):
                if part in OF_ACTIVATIONS and scheme.weight_only:
                    left_out |= {} if scheme.left_out else {f"tensors {part}": None}
                    continue
                _check_float(module, part, coded=found is not None)
                floats[f"{stem}.{part}" if stem else part] = parts[part]
        if not weights:
            raise CheckpointError(
                f"{scheme.path} says that weights are quantized ({scheme.method}), and all of them "
                "are floats; remove its quantization_config, or fetch the checkpoint again"
            )
        return cls(scheme.path.parent, weights, floats, tuple(left_out))

    def tensors(self) -> dict[str, WeightBytes]:
        """Return the tensors that its weights are made of: scales and zeros, too."""
        modules = [weight.module for weight in self.weights.values()]
        parts = {f"{m.name}.{part}": t for m in modules for part, t in m.tensors.items()}
        return {**self.floats, **parts}

    def places(self) -> dict[str, WeightBytes]:
        """Return where each weight is; of one in codes, where these are."""
        places = dict(self.floats)
        for name, weight in self.weights.items():
            at = weight.module.tensors[weight.layout.part]
            places[name] = WeightBytes(at.file, weight.kind, weight.shape, at.offset, at.bytes)
        return places

    def formats(self) -> str:
        """Return what its weights are stored as, the most frequent first."""
        return count_formats(tensor.dtype for tensor in self.places().values())

    def check_kept(self) -> None:
        """Refuse codes that no engine holds as they are.

        Raises: CheckpointError naming the first tensor of them.
        """
        for weight in self.weights.values():
            weight.check()


def _check_float(module: LayerTensors, part: str, *, coded: bool) -> None:
    """Refuse a tensor that is neither part of a quantized weight nor floats."""
    tensor = module.tensors[part]
    if part in OF_ACTIVATIONS:
        raise CheckpointError(
            f"{tensor.file}: {module.name}.{part} quantizes activations, keys or values, which "
            f"specrt computes in floats. {WEIGHT_ONLY}, {INSTEAD}"
        )
    if part in PARTS or (coded and part == "weight") or tensor.dtype not in FLOAT_TYPES:
        raise module.wrong(
            part, f"is stored as {tensor.dtype}, and is not part of a weight that specrt knows"
        )
