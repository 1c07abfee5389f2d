"""What a plan is made of: the parsed network, its profiles, and the settings of the builder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from specrt.engine.tensorrt.engine_record import (
    CROSS,
    ENCODER,
    FEATURE,
    FEATURES,
    HIDDEN,
    KV_LENGTH,
    LENGTH,
    SOURCE_LENGTH,
    STATE,
    Profile,
    Range,
    SourceShape,
)
from specrt.errors import BuildError
from specrt.geometry import BASE, CONV, EXACT, NEXT_BASE, moves
from specrt_export.compile.monitor import printable
from specrt_export.recipe.recipe_tables import PlanOptions


def profiles(
    role: str,
    prefill: int,
    gammas: Iterable[int],
    kv_lengths: Sequence[int] = (),
    catch_up: int = 2,
) -> tuple[Profile, ...]:
    """Return the profiles of a target or a draft, in the order of the plan.

    `prefill` is the widest pass. `catch_up` is how many tokens a draft may lack after a round of
    its own: a head lacks all that were accepted, and the target's own one. `kv_lengths`, rising,
    are how much passes may read of the KV buffers, the last one all; without any all passes read
    all. Of two profiles that take the same passes the first stays, so gamma 0 is `decode`.
    Raises: BuildError for a prefill that is narrower than what it must take.
    """
    verified = sorted(set(gammas)) if role == "target" else []
    rows = max(verified, default=0) + 1
    least = max(rows, 1 if role == "target" else catch_up)
    if prefill < least:
        raise BuildError(
            f"the prefill width of the {role} is {prefill}; passes near the length limit go "
            f"through it, so it takes at least {least} tokens"
        )
    distinct: dict[tuple[Range, Range], Profile] = {}
    for profile in _listed(role, prefill, rows, verified, catch_up):
        distinct.setdefault((profile.width, profile.rows), profile)
    whole = tuple(distinct.values())
    return tuple(_of_lengths(whole, kv_lengths)) if kv_lengths else whole


def _listed(
    role: str, prefill: int, rows: int, gammas: list[int], catch_up: int
) -> Iterator[Profile]:
    yield Profile("prefill", Range(1, max(1, prefill // 2), prefill), Range(1, 1, rows))
    yield Profile("decode", _only(1), _only(1))
    for gamma in gammas:
        yield Profile(f"verify {gamma}", _only(gamma + 1), _only(gamma + 1))
    if role == "draft":
        yield Profile("catch-up", _only(2), _only(1))
        for width in range(3, catch_up + 1):
            yield Profile(f"catch-up {width}", _only(width), _only(1))


def _of_lengths(whole: Iterable[Profile], lengths: Sequence[int]) -> Iterator[Profile]:
    """Yield a profile of one shape for each KV length, and others with all of them in one."""
    for profile in whole:
        if not profile.fixed:
            every = Range(lengths[0], lengths[-1], lengths[-1])
            yield replace(profile, kv_length=every)
            continue
        for length in lengths:
            yield replace(profile, name=f"{profile.name} of {length}", kv_length=_only(length))


def source_profiles(part: str, source: SourceShape) -> tuple[Profile, ...]:
    """Return the one profile of an encoder, or of cross projections.

    An encoder of tokens reads as many as there are; what else conditions a decoder has one size.
    """
    most = source.positions
    sizes = _only(most)
    if part == ENCODER and not source.features:
        sizes = Range(1, max(1, most // 2), most)
    return (Profile("source", sizes, sizes),)


def _only(size: int) -> Range:
    return Range(size, size, size)


def add_profiles(builder: Any, config: Any, offered: Contract, listed: Iterable[Profile]) -> None:
    """Give a builder's configuration the profiles of a network, numbered as listed.

    Raises: BuildError for one that TensorRT refuses.
    """
    for number, profile in enumerate(listed):
        shapes = builder.create_optimization_profile()
        batch, widths = offered.batch, _sizes(profile.width)
        if not offered.part or not profile.fixed:  # cross projections have one shape
            shapes.set_shape("input_ids", *((batch, width) for width in widths))
        if offered.hidden and not offered.part:
            shapes.set_shape(HIDDEN, *((batch, width, offered.hidden) for width in widths))
        if not offered.part:
            shapes.set_shape("rows", *((rows,) for rows in _sizes(profile.rows)))
        if profile.kv_length is not None:
            shapes.set_shape(KV_LENGTH, *((length,) for length in _sizes(profile.kv_length)))
        if config.add_optimization_profile(shapes) != number:
            raise BuildError(
                f"TensorRT refused the profile {profile.name!r} (width {profile.width.most}, rows "
                f"{profile.rows.most}); its reason is in the messages of the library"
            )


def _sizes(sizes: Range) -> tuple[int, int, int]:
    return sizes.least, sizes.best, sizes.most


_INPUTS = ("input_ids", "start", "rows")


_OUTPUTS = ("logits", "argmax")


_OPTIONAL = ("confidence", "candidates.values", "candidates.ids", FEATURE, STATE)


_COMPUTE = {"HALF": "fp16", "BF16": "bf16", "FLOAT": "fp32"}


_CACHE, _INDEX, _MASK = 0, 2, 3
"""Which inputs of the cache's and the attention's layers are meant."""


@dataclass(frozen=True)
class Contract:
    """What a parsed network offers."""

    batch: int
    compute: str
    candidates: int
    confidence: bool
    reads_prefix: bool
    """Whether a pass says how much of the KV buffers is read."""
    scored: int
    """Entries of the vocabulary that logits are of."""
    feature: int
    """Width of what a target leaves for its head; 0 without one."""
    hidden: int
    """Width of what a head reads next to each token, and leaves; 0 for what is none."""
    part: str = ""
    """`encoder` or `cross` of what conditions a decoder."""


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


def unmasked(model: onnx.ModelProto) -> int:
    """Return how many attentions of a graph have no mask; an encoder's may have none."""
    return sum(n.op_type == "Attention" and len(n.input) <= _MASK for n in model.graph.node)


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


def contract(network: Any, form: str, attentions: int, unmasked: int = 0) -> Contract:
    """Return what a network offers, once everything the runtime relies on was found in it.

    `attentions` is how many Attention nodes the graph has, and `unmasked` how many of them have no
    mask; only those of an encoder may.

    Raises: BuildError for an input, an output, a cache update or a mask that is missing or wrong.
    """
    inputs = {tensor.name: tensor for tensor in _tensors(network, "input")}
    outputs = {tensor.name: tensor for tensor in _tensors(network, "output")}
    if HIDDEN in outputs or set(inputs) == {HIDDEN, LENGTH}:
        if form == "native":
            _check_masks(network, attentions, unmasked)
        return _source_contract(inputs, outputs)
    caches, recurs = _caches(inputs), BASE in inputs
    present = [f"present_{name}" for name in caches]
    cross = [f"cross_{name}" for name in caches] if SOURCE_LENGTH in inputs else []
    conditions = [SOURCE_LENGTH, *cross] if cross else []
    conditions += [BASE, NEXT_BASE] if recurs else []
    _check_names("input", inputs, [*_INPUTS, *caches, *conditions], (KV_LENGTH, HIDDEN))
    _check_names("output", outputs, [*_OUTPUTS, *present], _OPTIONAL)
    if not caches:
        raise BuildError("the graph has no KV buffers (key.0, value.0); nothing could be kept")
    if form == "native":
        _check_caches(network, [name for name in caches if not (recurs and moves(name))])
        _check_masks(network, attentions)
    best = outputs.get("candidates.values")
    handed = {name: _states(name, {**inputs, **outputs}) for name in (FEATURE, HIDDEN, STATE)}
    if handed[HIDDEN] != handed[STATE]:
        raise BuildError(
            f"the graph reads {HIDDEN} of width {handed[HIDDEN]} and leaves {STATE} of width "
            f"{handed[STATE]}; a head goes on from what it leaves: export it again"
        )
    return Contract(
        batch=int(inputs["input_ids"].shape[0]),
        compute=_compute(inputs[caches[0]]),
        candidates=0 if best is None else int(best.shape[-1]),
        confidence="confidence" in outputs,
        reads_prefix=KV_LENGTH in inputs,
        scored=int(outputs["logits"].shape[-1]),
        feature=handed[FEATURE],
        hidden=handed[HIDDEN],
    )


def _caches(inputs: Iterable[str]) -> list[str]:
    """Return the buffers that layers of a decoder remember by: a key next to each value."""
    parts = [name.partition(".")[::2] for name in inputs]
    attending = dict.fromkeys(at for kind, at in parts if kind in ("key", "value"))
    pairs = [f"{kind}.{at}" for at in attending for kind in ("key", "value")]
    return pairs + [f"{kind}.{at}" for kind, at in parts if kind in (CONV, *EXACT)]


def _source_contract(inputs: dict[str, Any], outputs: dict[str, Any]) -> Contract:
    """Return what an encoder offers, or a network of cross projections."""
    part = ENCODER if HIDDEN in outputs else CROSS
    if part == ENCODER:
        given = FEATURES if FEATURES in inputs else "input_ids"
        names, made = [given], [HIDDEN]
    else:
        names = [HIDDEN, LENGTH]
        layers = sum(name.startswith("cross_key.") for name in outputs)
        made = [f"cross_{kind}.{at}" for at in range(layers) for kind in ("key", "value")]
    _check_names("input", inputs, names, ())
    _check_names("output", outputs, made, ())
    width = _states(HIDDEN, {**inputs, **outputs})
    kept = _compute(outputs[made[0]]) if part == CROSS else ""
    return Contract(1, kept, 0, False, False, 0, 0, width, part)


def _states(name: str, tensors: dict[str, Any]) -> int:
    """Return the width of what target and head hand over, which is fp32; 0 where it is not there.

    Raises: BuildError for one of another type.
    """
    tensor = tensors.get(name)
    if tensor is None:
        return 0
    if tensor.dtype.name != "FLOAT":
        raise BuildError(f"{name} is of type {tensor.dtype.name}; expected FLOAT: lower it again")
    return int(tensor.shape[-1])


def _tensors(network: Any, kind: str) -> Iterator[Any]:
    for at in range(getattr(network, f"num_{kind}s")):
        yield getattr(network, f"get_{kind}")(at)


def _check_names(
    kind: str, present: dict[str, Any], required: list[str], may: tuple[str, ...]
) -> None:
    missing = [name for name in required if name not in present]
    extra = [name for name in present if name not in required and name not in may]
    if missing or extra:
        wrong = [f"has no {kind} {name!r}" for name in missing[:1]]
        wrong += [f"has an {kind} {name!r} that the runtime does not know" for name in extra[:1]]
        raise BuildError(f"the graph {' and '.join(wrong)}; lower it for TensorRT first")


def _compute(cache: Any) -> str:
    compute = _COMPUTE.get(cache.dtype.name)
    if compute is None:
        raise BuildError(
            f"{cache.name} is of type {cache.dtype.name}; KV buffers are HALF, BF16 or FLOAT"
        )
    return compute


def _check_caches(network: Any, caches: list[str]) -> None:
    """Hold each cache to one update, fed straight from its input, at `start`, to its output."""
    updated = []
    for layer in _layers(network, "KV_CACHE_UPDATE"):
        cache, output = layer.get_input(_CACHE), layer.get_output(0)
        if not cache.is_network_input:
            raise BuildError(
                f"the KV update {layer.name!r} reads {cache.name!r}, which is not an input of the "
                "graph; TensorRT updates only inputs in place"
            )
        if output.name != f"present_{cache.name}":
            raise BuildError(
                f"the KV update of {cache.name!r} gives {output.name!r}; expected "
                f"'present_{cache.name}', which shares its memory"
            )
        updated.append(cache.name)
    wrong = [name for name in caches if updated.count(name) != 1]
    if wrong:
        raise BuildError(
            f"{wrong[0]!r} has {updated.count(wrong[0])} KV updates in what TensorRT parsed; "
            "expected one for each KV buffer"
        )


def _check_masks(network: Any, attentions: int, unmasked: int = 0) -> None:
    """Hold each attention to a mask: the parser drops some inputs of the operator silently."""
    made = list(_layers(network, "ATTENTION_INPUT"))
    bare = [one for one in made if one.num_inputs <= _MASK or one.get_input(_MASK) is None]
    if len(bare) > unmasked:
        raise BuildError(
            f"the attention {bare[0].name.removesuffix('_AttentionInput')!r} lost its mask: "
            "TensorRT's parser drops what it does not know, and every token would see the "
            "whole buffer"
        )
    if len(made) != attentions:
        raise BuildError(
            f"TensorRT made {len(made)} attention layers of the graph's {attentions}; one that "
            "it takes apart itself was not checked for its mask"
        )


def _layers(network: Any, kind: str) -> Iterator[Any]:
    for at in range(network.num_layers):
        layer = network.get_layer(at)
        if layer.type.name == kind:
            yield layer


CURRENT = "current"
"""Among `capabilities`: the GPU that builds."""

COMPATIBILITY = {
    "ampere+": "AMPERE_PLUS",
    "same-capability": "SAME_COMPUTE_CAPABILITY",
}
"""Values of `hardware_compatible`, and TensorRT's names for them."""


_MOST_LEVEL = 5


_MOST_STREAMS = 64


def check_options(options: PlanOptions, library: Any, gpu: bool) -> None:
    """Refuse what is out of range, and by name what the library does not offer here.

    Raises: BuildError.
    """
    _check_ranges(options)
    if library.flavour.rtx:
        _check_rtx(options, gpu)
        capability_names(options.capabilities, library.module)
    elif options.capabilities:
        raise BuildError(
            f"capabilities is {', '.join(options.capabilities)}, but tensorrt builds for the GPU "
            'it runs on; use hardware_compatible = "ampere+", or the backend tensorrt-rtx'
        )


def _check_ranges(options: PlanOptions) -> None:
    level, workspace = options.optimization_level, options.workspace_mib
    if level is not None and not 0 <= level <= _MOST_LEVEL:
        raise BuildError(f"optimization_level is {level}; expected 0 to {_MOST_LEVEL}")
    if workspace is not None and not 1 <= workspace < 1 << 32:
        raise BuildError(f"workspace_mib is {workspace}; expected 1 or more")
    if options.aux_streams is not None and not 0 <= options.aux_streams <= _MOST_STREAMS:
        raise BuildError(f"aux_streams is {options.aux_streams}; expected 0 to {_MOST_STREAMS}")
    if options.hardware_compatible not in ("", *COMPATIBILITY):
        raise BuildError(
            f"hardware_compatible is {options.hardware_compatible!r}; expected "
            f"{' or '.join(COMPATIBILITY)}, or nothing for the GPU that builds"
        )


def _check_rtx(options: PlanOptions, gpu: bool) -> None:
    """Name the first option that TensorRT for RTX ignores or fails at (seen with 1.7.1)."""
    if options.optimization_level is not None:
        raise BuildError(
            "optimization_level has no effect on tensorrt-rtx, which chooses its kernels on the "
            "device; leave it out"
        )
    if options.hardware_compatible:
        raise BuildError(
            "tensorrt-rtx has no hardware_compatible; its plans serve every GPU it knows, or those "
            'listed in capabilities = ["8.9", "12.0"]'
        )
    if options.version_compatible:
        raise BuildError(
            "tensorrt-rtx cannot make version_compatible plans (its package lacks the lean "
            "runtime they carry); build again with the version the device has"
        )
    if CURRENT in options.capabilities and not gpu:
        raise BuildError(
            f"capability {CURRENT} is that of this machine's GPU, and it has none; name the "
            'device\'s, as in capabilities = ["8.9"]'
        )
    if options.stripped and not gpu:
        raise BuildError(
            "tensorrt-rtx cannot make stripped plans on a machine without a GPU; build on one "
            "that has one, or leave stripped out"
        )


def capability_names(capabilities: tuple[str, ...], module: Any) -> list[str]:
    """Return the library's names of compute capabilities: `SM89` for `8.9`.

    Raises: BuildError for one it does not build for, with the list of those it does.
    """
    known = {
        f"{name[2:-1]}.{name[-1]}": name
        for name in dir(getattr(module, "ComputeCapability", None))
        if name.startswith("SM") and name[2:].isdigit()
    }
    listed = ", ".join(sorted(known, key=float))
    known[CURRENT] = "CURRENT"
    for capability in capabilities:
        if capability not in known:
            raise BuildError(
                f"tensorrt-rtx builds no plans for compute capability {capability!r}; it knows "
                f"{listed}; for other GPUs use the backend tensorrt"
            )
    return [known[capability] for capability in dict.fromkeys(capabilities)]


def configure(config: Any, module: Any, options: PlanOptions) -> None:
    """Set a builder's configuration; call `check_options` before.

    Raises: BuildError for a flag that this version of the library does not have.
    """
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace_mib is not None:
        pool = module.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, options.workspace_mib << 20)
    if options.aux_streams is not None:
        config.max_aux_streams = options.aux_streams
    if options.hardware_compatible:
        level = COMPATIBILITY[options.hardware_compatible]
        config.hardware_compatibility_level = _named(
            module, "HardwareCompatibilityLevel", level, "hardware_compatible"
        )
    for name in ("version_compatible", "weight_streaming", "stripped"):
        if getattr(options, name):
            flag = "STRIP_PLAN" if name == "stripped" else name.upper()
            config.set_flag(_named(module, "BuilderFlag", flag, name))
    # A pass whose memory the library takes while it runs cannot be captured as a CUDA graph; one
    # that streams its weights takes memory anyway, and the library refuses both flags together.
    if hasattr(module.BuilderFlag, "REQUIRE_USER_ALLOCATION") and not options.weight_streaming:
        config.set_flag(module.BuilderFlag.REQUIRE_USER_ALLOCATION)
    names = capability_names(options.capabilities, module)
    if names:
        config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        config.set_compute_capability(getattr(module.ComputeCapability, name), index)


def _named(module: Any, kind: str, name: str, option: str) -> Any:
    value = getattr(getattr(module, kind, None), name, None)
    if value is None:
        raise BuildError(
            f"{option} is not offered by version {getattr(module, '__version__', 'unknown')} of "
            "this library; leave it out, or build with a newer one"
        )
    return value
