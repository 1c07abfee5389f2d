"""What `quantization_config` says of a checkpoint, and what of it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

from specrt.errors import CheckpointError, did_you_mean

KEYS = ("quantization_config", "compression_config")
"""Where a config.json says how weights are stored; the second is what older folders have."""

WEIGHT_ONLY = (
    "Set weight_only = true for it in the recipe, or give --weight-only with --target, to keep the "
    "weights as they are and to compute activations in floats"
)
"""What to do about a checkpoint whose activations are quantized, too."""

INSTEAD = "or take the model's floats, which specrt quantizes itself"


@dataclass(frozen=True)
class Scheme:
    """How the quantized weights of a checkpoint are stored."""

    path: Path
    """The config.json that says so."""
    method: str
    bits: tuple[int, ...]
    """Those that codes may have."""
    group: int = 0
    """Inputs that share a scale, 0 for a whole row. The tensors of some methods say it, too."""
    mixed: bool = False
    """Whether some layers have other bits or groups than the rest."""
    first_version: bool = False
    """Whether GPTQ's zeros are stored one less."""
    symmetric: bool = True
    """Whether a weight may come without zeros: then they are in the middle."""
    block_shape: tuple[int, ...] = ()
    """Rows and columns of FP8's blocks."""
    weight_only: bool = False
    """Whether to leave out what quantizes activations, keys and values."""
    left_out: tuple[str, ...] = ()
    """What of that there is, such as `input activations in int8`."""

    quantized = True

    def formats(self) -> str:
        """See `QuantizedSource`."""
        return f"{self.method}, {' and '.join(map(str, self.bits))} bits"

    def check_kept(self) -> None:
        """See `QuantizedSource`: a config that was read has nothing that is not kept."""

    @property
    def precision(self) -> str:
        """What the weights of most layers take the room of."""
        return "int4" if min(self.bits) == 4 else "int8"

    @property
    def block(self) -> int:
        """How many weights share a scale in an engine."""
        return min(self.group or 128, 128)


def read_scheme(
    path: Path, config: Mapping[str, Any], *, weight_only: bool = False
) -> Scheme | None:
    """Return what a config says of its quantized weights; None where it has none.

    `weight_only` leaves out what it says of activations, keys and values.
    Raises: CheckpointError naming the key whose value cannot be kept.
    """
    key = next((key for key in KEYS if config.get(key)), None)
    if key is None:
        return None
    table = _Table(path, key, config[key], [] if weight_only else None)
    method = str(table.get("quant_method", str, "compressed-tensors" if key == KEYS[1] else ""))
    read = METHODS.get(method)
    if read is None:
        raise table.refused(
            "quant_method", f"one of {', '.join(METHODS)}{did_you_mean(method, METHODS)}"
        )
    scheme = read(table)
    left_out = dict.fromkeys(table.left_out or ())
    return replace(scheme, weight_only=weight_only, left_out=tuple(left_out))


class _Table:
    """A table of a config.json, and the name of its place."""

    def __init__(self, path: Path, name: str, values: Any, left_out: list[str] | None) -> None:
        """Take a list that what is left out is added to; with None nothing may be."""
        self.path, self.name, self.left_out = path, name, left_out
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{path}: {name} is {short(values)}; expected an object, fetch the file again"
            )
        self.values = values

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of some type; None counts as left out."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refused(key, f"a value of type {kind.__name__}")
        return value

    def part(self, key: str) -> _Table | None:
        """Return a table within; None where there is none."""
        value = self.values.get(key)
        return (
            None if value is None else _Table(self.path, f"{self.name}.{key}", value, self.left_out)
        )

    def refused(self, key: str, expected: str) -> CheckpointError:
        """Return what says that a value cannot be kept."""
        return CheckpointError(
            f"{self.path}: {self.name}.{key} is {short(self.values.get(key))}; specrt keeps "
            f"{expected}. Take a checkpoint that has it, {INSTEAD}"
        )

    def leave_out(self, key: str, expected: str, what: str, bits: int, kind: str) -> None:
        """Leave out a quantization of activations, where that was asked for.

        Raises: CheckpointError, with the error that it would bring.
        """
        if self.left_out is None:
            raise CheckpointError(
                f"{self.path}: {self.name}.{key} is {short(self.values.get(key))}; specrt keeps "
                f"{expected}. {WEIGHT_ONLY}{_rounding(bits, kind)}, {INSTEAD}"
            )
        self.left_out.append(f"{what} in {'int' if kind == 'int' else 'FP'}{bits}")

    def group(self, key: str) -> int:
        """Return the inputs that share a scale; 0 for a whole row."""
        value: int = self.get(key, int, -1)
        if value == 0 or value < -1:
            raise self.refused(key, "-1 or the inputs that share a scale")
        return max(value, 0)


def _rounding(bits: int, kind: str) -> str:
    """Return in words what rounding activations to a format does: half a step of it."""
    if kind == "int" and 2 <= bits <= 16:
        share = f"{100 / (2**bits - 2):.2g} % of the largest"
    elif kind == "float" and bits in (4, 8):
        share = "a quarter (2^-2) of each" if bits == 4 else "6 % (2^-4) of each"
    else:
        return ""
    return f", without the checkpoint's own rounding of up to {share}"


def _gptq(table: _Table) -> Scheme:
    """Source: GPTQModel, quantization/config.py and nn_modules/qlinear."""
    bits = table.get("bits", int, 4)
    if bits not in (4, 8):
        raise table.refused("bits", "4 and 8")
    version = table.get("checkpoint_format", str) or table.get("format", str, "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise table.refused("checkpoint_format", "'gptq' and 'gptq_v2'")
    if table.values.get("is_marlin_format"):
        raise table.refused("is_marlin_format", "GPTQ's own layout")
    if table.get("pack_dtype", str, "int32") not in ("int32", "torch.int32"):
        raise table.refused("pack_dtype", "'int32'")
    group = table.group("group_size")
    mixed = bool(table.get("dynamic", Mapping, {}))
    return Scheme(table.path, "gptq", (bits,), group, mixed, first_version=version == "gptq")


def _awq(table: _Table) -> Scheme:
    """Source: AutoAWQ, models/_config.py and modules/linear/gemm.py."""
    if table.get("bits", int, 4) != 4:
        raise table.refused("bits", "4")
    version = "version" if table.get("version", str) else "format"
    if table.get(version, str, "gemm").lower() != "gemm":
        raise table.refused(version, "the layout 'gemm'")
    return Scheme(table.path, "awq", (4,), table.group("group_size"))


def _fp8(table: _Table) -> Scheme:
    """Source: transformers, integrations/finegrained_fp8.py; DeepSeek-V3, README_WEIGHTS.md."""
    if table.get("activation_scheme", str, "dynamic") != "dynamic":
        expected = "'dynamic': no activation is quantized here"
        table.leave_out("activation_scheme", expected, "activations", 8, "float")
    if table.get("fmt", str, "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise table.refused("fmt", "'e4m3'")
    return Scheme(table.path, "fp8", (8,), block_shape=_block(table, "weight_block_size"))


def _block(table: _Table, key: str) -> tuple[int, ...]:
    block = table.get(key, list, [])
    if block and (len(block) != 2 or any(type(n) is not int or n < 1 for n in block)):
        raise table.refused(key, "rows and columns of a block, such as [128, 128]")
    return tuple(block)


_FORMATS = (
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip


def _compressed(table: _Table) -> Scheme:
    """Source: compressed-tensors, quantization/quant_config.py."""
    _check_format(table)
    if table.get("quantization_status", str, "compressed") != "compressed":
        raise table.refused("quantization_status", "'compressed'")
    keys = table.part("kv_cache_scheme")
    if keys is not None and keys.values:
        bits, kind = _format(keys)
        expected = "keys and values in floats"
        table.leave_out("kv_cache_scheme", expected, "keys and values", bits, kind)
    sparse = table.part("sparsity_config")
    if sparse is not None and sparse.get("format", str, "dense") != "dense":
        raise sparse.refused("format", "'dense'")
    turned = table.part("transform_config")
    if turned is not None and turned.values.get("config_groups"):
        raise turned.refused("config_groups", "no rotations")
    weights = list(_weights_of_groups(table))
    sizes = {one.get("num_bits", int, 8) for one in weights}
    groups = [one.get("group_size", int, 0) for one in weights]
    blocks = {_block(one, "block_structure") for one in weights} - {()}
    if len(blocks) > 1:
        raise table.refused("config_groups", "one block_structure for all weights")
    symmetric = any(one.get("symmetric", bool, True) for one in weights)
    return Scheme(
        table.path, "compressed-tensors", tuple(sorted(sizes)), max(groups), symmetric=symmetric,
        block_shape=next(iter(blocks), ()),
    )  # fmt: skip


def _format(arguments: _Table) -> tuple[int, str]:
    """Return bits and kind, `int` or `float`, of what is quantized."""
    return arguments.get("num_bits", int, 8), arguments.get("type", str, "int")


def _check_format(table: _Table) -> None:
    if table.get("format", str, _FORMATS[0]) not in _FORMATS:
        raise table.refused("format", ", ".join(_FORMATS))


def _weights_of_groups(table: _Table) -> Iterator[_Table]:
    """Yield what is said of the weights of each group of layers.

    Raises: CheckpointError where a group says that activations are quantized, unless that is left
        out: those of FP8 by each token alone are not, as that rounds nothing that is stored.
    """
    groups = table.part("config_groups")
    if groups is None or not groups.values:
        raise table.refused("config_groups", "at least one group of layers")
    for name in groups.values:
        group = groups.part(name)
        weights = None if group is None else group.part("weights")
        if group is None or weights is None:
            raise groups.refused(name, "groups of layers whose weights are quantized")
        _check_format(group)
        outputs = group.part("output_activations")
        if outputs is not None and outputs.values:
            group.leave_out(
                "output_activations", "activations in floats", "outputs", *_format(outputs)
            )
        inputs = group.part("input_activations")
        if inputs is not None:
            fp8 = {_format(inputs), _format(weights)} == {(8, "float")}
            if not fp8 or inputs.values.get("dynamic") is not True:
                group.leave_out(
                    "input_activations", "weights alone in codes", "inputs", *_format(inputs)
                )
        yield weights


METHODS: dict[str, Callable[[_Table], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
}
"""What reads the table of each `quant_method`; `layouts.LAYOUTS` has the tensors of each."""
