"""What TensorRT's parser made of a graph, and the optimisation profiles it is built with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from specrt.engine.tensorrt.engine_record import Profile, Range
from specrt.errors import BuildError
from specrt_export.compile.tensorrt.monitor import printable


def profiles(role: str, prefill: int, gammas: Iterable[int]) -> tuple[Profile, ...]:
    """Return the profiles of a target or a draft, in the order of the plan.

    `prefill` is the widest pass. Of two that take the same passes the first stays, so gamma 0 is
    `decode`.
    Raises: BuildError for a prefill that is narrower than what it must take.
    """
    verified = sorted(set(gammas)) if role == "target" else []
    rows = max(verified, default=0) + 1
    least = max(rows, 1 if role == "target" else 2)
    if prefill < least:
        raise BuildError(
            f"the prefill width of the {role} is {prefill}; passes near the length limit go "
            f"through it, so it takes at least {least} tokens"
        )
    found: dict[tuple[Range, Range], Profile] = {}
    for profile in _listed(role, prefill, rows, verified):
        found.setdefault((profile.width, profile.rows), profile)
    return tuple(found.values())


def _listed(role: str, prefill: int, rows: int, gammas: list[int]) -> Iterator[Profile]:
    yield Profile("prefill", Range(1, max(1, prefill // 2), prefill), Range(1, 1, rows))
    yield Profile("decode", _only(1), _only(1))
    for gamma in gammas:
        yield Profile(f"verify {gamma}", _only(gamma + 1), _only(gamma + 1))
    if role == "draft":
        yield Profile("catch-up", _only(2), _only(1))


def _only(size: int) -> Range:
    return Range(size, size, size)


def add_profiles(builder: Any, config: Any, batch: int, wanted: Iterable[Profile]) -> None:
    """Give a builder's configuration its profiles, numbered as listed.

    Raises: BuildError for one that TensorRT refuses.
    """
    for number, profile in enumerate(wanted):
        made = builder.create_optimization_profile()
        made.set_shape("input_ids", *((batch, width) for width in _sizes(profile.width)))
        made.set_shape("rows", *((rows,) for rows in _sizes(profile.rows)))
        if config.add_optimization_profile(made) != number:
            raise BuildError(
                f"TensorRT refused the profile {profile.name!r} (width {profile.width.most}, rows "
                f"{profile.rows.most}); its reason is in the messages of the library"
            )


def _sizes(sizes: Range) -> tuple[int, int, int]:
    return sizes.least, sizes.best, sizes.most


_INPUTS = ("input_ids", "start", "rows")

_OUTPUTS = ("logits", "argmax")

_OPTIONAL = ("confidence", "candidates.values", "candidates.ids")

_COMPUTE = {"HALF": "fp16", "BF16": "bf16", "FLOAT": "fp32"}

_CACHE, _INDEX, _MASK = 0, 2, 3
"""Which inputs of the cache's and the attention's layers are meant."""


@dataclass(frozen=True)
class Contract:
    """What a parsed network offers."""

    batch: int
    layers: int
    compute: str
    candidates: int
    confidence: bool


def check_graph(model: onnx.ModelProto) -> int:
    """Return how many attentions TensorRT is to make, once each KV update says where to write.

    Raises: BuildError for one that does not: TensorRT writes it at 0 then, in every pass.
    """
    for node in model.graph.node:
        if node.op_type == "TensorScatter" and (
            len(node.input) <= _INDEX or not node.input[_INDEX]
        ):
            raise BuildError(
                f"the KV update of {node.input[0]!r} has no place to write at, so it would always "
                "write at 0; it takes the graph's input 'start'"
            )
    return sum(node.op_type == "Attention" for node in model.graph.node)


def parse(library: Any, network: Any, graph: Path) -> None:
    """Parse a graph with its weights.

    Raises: BuildError naming the node, its operator, and TensorRT's reason.
    """
    parser = library.module.OnnxParser(network, library.logger)
    with library.messages() as log:
        parsed = parser.parse_from_file(str(graph))
    if parsed and not parser.num_errors:
        return
    reasons = [_reason(parser.get_error(at)) for at in range(parser.num_errors)]
    # What the parser says of weights that are cut short or missing is in its messages only.
    beside = [
        printable(message.text) for message in log.messages if "WeightsContext" in message.text
    ]
    raise BuildError(
        f"TensorRT cannot parse {graph}: {'; '.join((reasons + beside)[:4]) or 'no reason given'}; "
        "make the graph again with `specrt build RECIPE`"
    )


def _reason(error: Any) -> str:
    place = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_name() else ""
    return place + printable(re.sub(r"^Assertion failed: ", "", error.desc()))


def contract(network: Any, form: str, attentions: int) -> Contract:
    """Return what a network offers, once everything the runtime relies on was found in it.

    `attentions` is how many Attention nodes the graph has.

    Raises: BuildError for an input, an output, a cache update or a mask that is missing or wrong.
    """
    inputs = {tensor.name: tensor for tensor in _tensors(network, "input")}
    outputs = {tensor.name: tensor for tensor in _tensors(network, "output")}
    layers = sum(name.startswith("key.") for name in inputs)
    caches = [f"{kind}.{at}" for at in range(layers) for kind in ("key", "value")]
    present = [f"present_{name}" for name in caches]
    _check_names("input", inputs, [*_INPUTS, *caches], ())
    _check_names("output", outputs, [*_OUTPUTS, *present], _OPTIONAL)
    if not layers:
        raise BuildError("the graph has no KV buffers (key.0, value.0); nothing could be kept")
    if form == "native":
        _check_caches(network, caches)
        _check_masks(network, attentions)
    best = outputs.get("candidates.values")
    return Contract(
        batch=int(inputs["input_ids"].shape[0]),
        layers=layers,
        compute=_compute(inputs["key.0"]),
        candidates=0 if best is None else int(best.shape[-1]),
        confidence="confidence" in outputs,
    )


def _tensors(network: Any, kind: str) -> Iterator[Any]:
    for at in range(getattr(network, f"num_{kind}s")):
        yield getattr(network, f"get_{kind}")(at)


def _check_names(kind: str, found: dict[str, Any], wanted: list[str], may: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted and name not in may]
    if missing or extra:
        wrong = [f"has no {kind} {name!r}" for name in missing[:1]]
        wrong += [f"has an {kind} {name!r} that the runtime does not know" for name in extra[:1]]
        raise BuildError(f"the graph {' and '.join(wrong)}; lower it for TensorRT first")


def _compute(cache: Any) -> str:
    found = _COMPUTE.get(cache.dtype.name)
    if found is None:
        raise BuildError(
            f"{cache.name} is of type {cache.dtype.name}; KV buffers are HALF, BF16 or FLOAT"
        )
    return found


def _check_caches(network: Any, caches: list[str]) -> None:
    """Hold each cache to one update, fed straight from its input, at `start`, to its output."""
    updated = []
    for layer in _layers(network, "KV_CACHE_UPDATE"):
        cache, made = layer.get_input(_CACHE), layer.get_output(0)
        if not cache.is_network_input:
            raise BuildError(
                f"the KV update {layer.name!r} reads {cache.name!r}, which is no input of the "
                "graph; TensorRT updates only inputs in place"
            )
        if made.name != f"present_{cache.name}":
            raise BuildError(
                f"the KV update of {cache.name!r} gives {made.name!r}; expected "
                f"'present_{cache.name}', which shares its memory"
            )
        updated.append(cache.name)
    wrong = [name for name in caches if updated.count(name) != 1]
    if wrong:
        raise BuildError(
            f"{wrong[0]!r} has {updated.count(wrong[0])} KV updates in what TensorRT parsed; "
            "expected one for each KV buffer"
        )


def _check_masks(network: Any, attentions: int) -> None:
    """Hold each attention to a mask: the parser drops some inputs of the operator silently."""
    found = list(_layers(network, "ATTENTION_INPUT"))
    for layer in found:
        if layer.num_inputs <= _MASK or layer.get_input(_MASK) is None:
            raise BuildError(
                f"the attention {layer.name.removesuffix('_AttentionInput')!r} lost its mask: "
                "TensorRT's parser drops what it does not know, and every token would see the "
                "whole buffer"
            )
    if len(found) != attentions:
        raise BuildError(
            f"TensorRT made {len(found)} attention layers of the graph's {attentions}; one that "
            "it takes apart itself was not checked for its mask"
        )


def _layers(network: Any, kind: str) -> Iterator[Any]:
    for at in range(network.num_layers):
        layer = network.get_layer(at)
        if layer.type.name == kind:
            yield layer
