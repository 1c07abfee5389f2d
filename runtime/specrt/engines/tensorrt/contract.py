"""Hold a plan to the model it is said to be: its tensors, their shapes and their types."""

from __future__ import annotations

from specrt.engines.tensorrt.plan import Plan, Tensor
from specrt.engines.tensorrt.record import EngineRecord
from specrt.errors import EngineError
from specrt.geometry import Geometry

NATIVE, DECOMPOSED = "native", "decomposed"
KV_TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
CANDIDATES = ("candidates.values", "candidates.ids")
ANY = -1


def cache_names(geometry: Geometry) -> list[str]:
    """Return the names of the KV inputs; those of the outputs begin with `present_`."""
    return [f"{kind}.{i}" for i in range(geometry.layers) for kind in ("key", "value")]


def expected(
    record: EngineRecord, geometry: Geometry, batch: int, max_length: int
) -> dict[str, Tensor]:
    """Return the tensors that a plan of this record must have."""
    rows = (batch, ANY)
    tensors = {
        "input_ids": Tensor(rows, "int64", True),
        "start": Tensor((batch,), "int64", True),
        "rows": Tensor((ANY,), "int64", True),
        "argmax": Tensor(rows, "int64", False),
        "logits": Tensor((*rows, geometry.vocab_size), "float32", False),
    }
    if record.confidence:
        tensors["confidence"] = Tensor(rows, "float32", False)
    if record.candidates:
        for name, kind in zip(CANDIDATES, ("float32", "int64"), strict=True):
            tensors[name] = Tensor((*rows, record.candidates), kind, False)
    shape = (batch, geometry.kv_heads, max_length, geometry.head_dim)
    for name in cache_names(geometry):
        tensors[name] = Tensor(shape, KV_TYPES[record.compute], True)
        tensors[f"present_{name}"] = Tensor(shape, KV_TYPES[record.compute], False)
    return tensors


def check_plan(
    plan: Plan, record: EngineRecord, geometry: Geometry, batch: int, max_length: int
) -> None:
    """Refuse a plan that is not what its record and the manifest say.

    Raises: EngineError with what was found and what they say.
    """
    if record.compute not in KV_TYPES or record.form not in (NATIVE, DECOMPOSED):
        raise _apart(f"computes in {record.compute}, form {record.form}", "fp16, bf16 or fp32, "
                     "native or decomposed")  # fmt: skip
    wanted = expected(record, geometry, batch, max_length)
    for name, tensor in wanted.items():
        found = plan.tensors.get(name)
        if found is None:
            raise _apart(f"has no tensor {name}", _said(tensor))
        if not _same(found, tensor):
            raise _apart(f"has {name} as {_said(found)}", _said(tensor))
    unknown = sorted(plan.tensors.keys() - wanted.keys())
    if unknown:
        raise _apart(f"has a tensor {unknown[0]}", "that there is none")
    if record.form == NATIVE:
        _check_aliases(plan, geometry)


def _check_aliases(plan: Plan, geometry: Geometry) -> None:
    for name in cache_names(geometry):
        alias = plan.aliases(f"present_{name}")
        if alias not in ("", name):
            raise _apart(f"writes present_{name} into {alias}", f"that it goes into {name}")


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Compare; a plan whose profiles all have one size may have it where others have none."""
    return (
        (found.type, found.is_input, len(found.shape))
        == (wanted.type, wanted.is_input, len(wanted.shape))
    ) and all(w in (f, ANY) for f, w in zip(found.shape, wanted.shape, strict=True))


def _said(tensor: Tensor) -> str:
    side = "input" if tensor.is_input else "output"
    return f"{side} {list(tensor.shape)} of {tensor.type}"


def _apart(found: str, wanted: str) -> EngineError:
    return EngineError(
        f"the plan {found}, and its record and the manifest say {wanted}; they do not belong "
        "together: build the bundle again"
    )
