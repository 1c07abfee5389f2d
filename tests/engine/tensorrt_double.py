"""Plans in NumPy that run on the device in NumPy, and engines over them.

What TensorRT would forgive or punish in silence fails here with an AssertionError: addresses that
are missing or not aligned, work enqueued without shapes, a context captured before it was run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.numpy_device import POISON, NumpyDevice
from runtime.toy import TableEngine
from specrt.bundle import Geometry
from specrt.engine.tensorrt.device import ALIGNMENT, Block
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import EngineRecord, Profile, Range
from specrt.engine.tensorrt.library import NATIVE
from specrt.engine.tensorrt.passes import CANDIDATES, KV_TYPES, cache_names, expected
from specrt.engine.tensorrt.plan import Tensor


class NumpyContext:
    """One way to run a plan, in one profile."""

    def __init__(self, plan: NumpyPlan, profile: Profile, scratch: int, needs: int) -> None:
        self._plan, self._profile = plan, profile
        self._scratch, self._needs = scratch, needs
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self._warm = False

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self._plan.enter("set_shape")
        tensor = self._plan.tensors[name]
        assert tensor.is_input
        assert len(shape) == len(tensor.shape)
        assert all(t in (-1, s) for t, s in zip(tensor.shape, shape, strict=True))
        self._warm = self._warm and self.shapes.get(name) == shape
        self.shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        self._plan.enter("set_address")
        assert name in self._plan.tensors, name
        assert address % ALIGNMENT == 0, f"{name} is bound to {address}, which is not aligned"
        self.addresses[name] = address

    def capturable(self) -> bool:
        return self._plan.capturable

    def enqueue(self) -> None:
        plan = self._plan
        plan.enter("enqueue", captured=self._warm)
        assert self.addresses.keys() == plan.tensors.keys(), "not every tensor has an address"
        width, rows = self.shapes["input_ids"][1], self.shapes["rows"][0]
        assert self._profile.takes(width, rows), (self._profile, width, rows)
        self._warm = True
        addresses = dict(self.addresses)
        plan.device.put(lambda: self._run(addresses, width, rows))

    def _run(self, addresses: Mapping[str, int], width: int, rows: int) -> None:
        device = self._plan.device
        if self._needs:
            device.at(self._scratch, self._needs)[:] = POISON
        self._plan.run(addresses, width, rows)
        if self._needs:
            device.at(self._scratch, self._needs)[:] = POISON


class NumpyPlan:
    """A plan that looks its logits up in a table by the tokens that its KV buffers hold.

    Every number of a key is the token plus 1, of a value its opposite; all must agree. Positions
    in `broken_at` have scores that are not numbers.
    """

    def __init__(
        self, device: NumpyDevice, record: EngineRecord, toy: TableEngine, geometry: Geometry,
        *, batch: int = 1, scratch: int = 1000, broken_at: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.device, self.record, self.toy, self.geometry = device, record, toy, geometry
        self.batch, self.max_length = batch, toy.max_length
        self.tensors: Mapping[str, Tensor] = expected(record, geometry, batch, toy.max_length)
        self.contexts = 0
        self.closed = 0
        self._scratch = scratch
        self.broken_at = broken_at
        self.renamed: dict[str, str] = {}
        self.sized = record.profiles
        self.capturable = True

    def enter(self, call: str, *, captured: bool = True) -> None:
        """Count a call with the device's."""
        assert not self.closed, f"{call} after the plan was closed"
        self.device.enter(call, captured=captured)

    @property
    def profiles(self) -> int:
        return len(self.sized)

    def ranges(self, profile: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the shapes that the plan itself was built for, whatever its record says."""
        sized = self.sized[profile]
        width, rows = ((sizes.least, sizes.best, sizes.most) for sizes in (sized.width, sized.rows))
        return {
            "input_ids": tuple((self.batch, size) for size in width),
            "rows": tuple((size,) for size in rows),
        }

    def scratch_bytes(self, profile: int) -> int:
        """Return something else for every profile, and for some nothing."""
        return self._scratch * (profile + 1) // 2

    def aliases(self, output: str) -> str:
        if output in self.renamed:
            return self.renamed[output]
        native = self.record.form == NATIVE and output.startswith("present_")
        return output.removeprefix("present_") if native else ""

    def context(self, profile: int, scratch: int) -> NumpyContext:
        self.enter("context", captured=False)
        needs = self.scratch_bytes(profile)
        if needs:
            self.device.at(scratch, needs)
        self.contexts += 1
        return NumpyContext(self, self.record.profiles[profile], scratch, needs)

    def close(self) -> None:
        self.closed += 1
        assert self.closed == 1, "a plan was closed twice"

    def run(self, addresses: Mapping[str, int], width: int, rows: int) -> None:
        """Do one pass on the bytes at the addresses."""
        fed = self._array(addresses["input_ids"], np.int64, (self.batch, width)).copy()
        start = self._array(addresses["start"], np.int64, (self.batch,)).copy()
        wanted = self._array(addresses["rows"], np.int64, (rows,)).copy()
        assert ((wanted >= 0) & (wanted < width)).all(), wanted
        assert ((fed >= -1) & (fed < self.geometry.vocab_size)).all(), fed
        seen = self._update(addresses, fed % self.geometry.vocab_size, start)
        logits = self._array(addresses["logits"], np.float32, (self.batch, rows, self.vocab))
        for b in range(self.batch):
            for r, row in enumerate(wanted):
                until = int(start[b] + row) + 1
                logits[b, r] = np.nan if until in self.broken_at else self.toy.row(seen[b, :until])
        self._tell(addresses, logits)

    @property
    def vocab(self) -> int:
        return self.geometry.vocab_size

    def _update(
        self, at: Mapping[str, int], fed: NDArray[Any], start: NDArray[Any]
    ) -> NDArray[Any]:
        """Write the KV buffers; return the tokens that they hold, of which all must be sure."""
        held = []
        for name in cache_names(self.geometry):
            source, to = self._cache(at[name]), self._cache(at[f"present_{name}"])
            if self.record.form == NATIVE:
                assert at[name] == at[f"present_{name}"], f"{name} is not updated in place"
            else:
                assert not np.shares_memory(source, to), f"{name} is read and written at once"
                to[:] = source
            sign = 1 if name.startswith("key") else -1
            for b, first in enumerate(start):
                for s, token in enumerate(fed[b]):
                    if 0 <= first + s < self.max_length:  # others are ignored, as TensorRT does
                        to[b, :, first + s] = self._packed(np.float32(sign * (token + 1)))
            tokens = self._unpacked(to) * sign - 1
            assert (tokens == tokens[:, :1, :, :1]).all(), f"{name} disagrees with itself"
            held.append(tokens[:, 0, :, 0].astype(np.int64))
        assert all((h == held[0]).all() for h in held), "the layers disagree"
        return held[0]

    def _cache(self, address: int) -> NDArray[Any]:
        g, kind = self.geometry, KV_TYPES[self.record.compute]
        shape = (self.batch, g.kv_heads, self.max_length, g.head_dim)
        cache: NDArray[Any] = self._array(address, "uint16" if kind == "bfloat16" else kind, shape)
        return cache

    def _packed(self, value: Any) -> Any:
        if self.record.compute == "bf16":
            return np.float32(value).view(np.uint32) >> 16
        return value

    def _unpacked(self, cache: NDArray[Any]) -> NDArray[Any]:
        if self.record.compute == "bf16":
            return (cache.astype(np.uint32) << 16).view(np.float32)
        return cache.astype(np.float32)

    def _tell(self, at: Mapping[str, int], logits: NDArray[np.float32]) -> None:
        shape = logits.shape[:2]
        argmax = self._array(at["argmax"], np.int64, shape)
        broken = np.isnan(logits).any(-1)
        argmax[:] = np.where(broken, -1, logits.argmax(-1))
        if self.record.confidence:
            confidence = self._array(at["confidence"], np.float32, shape)
            confidence[:] = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        if self.record.candidates:
            wanted = (*shape, self.record.candidates)
            ids = np.argsort(-logits, axis=-1, kind="stable")[..., : self.record.candidates]
            self._array(at[CANDIDATES[0]], np.float32, wanted)[:] = np.take_along_axis(
                logits, ids, -1
            )
            self._array(at[CANDIDATES[1]], np.int64, wanted)[:] = ids

    def _array(self, address: int, kind: Any, shape: tuple[int, ...]) -> Any:
        dtype = np.dtype(kind)
        count = int(np.prod(shape))
        return self.device.at(address, count * dtype.itemsize).view(dtype).reshape(shape)


def target_profiles(gammas: Collection[int], prefill: int) -> tuple[Profile, ...]:
    """Return the profiles of a target."""
    one = Range(1, 1, 1)
    most = max([1, *(gamma + 1 for gamma in gammas)])
    verify = [Profile(f"verify {g}", *[Range(g + 1, g + 1, g + 1)] * 2) for g in gammas]
    wide = Profile("prefill", Range(1, max(1, prefill // 2), prefill), Range(1, 1, most))
    return (wide, Profile("decode", one, one), *verify)


def draft_profiles(prefill: int) -> tuple[Profile, ...]:
    """Return the profiles of a draft."""
    one = Range(1, 1, 1)
    wide = Profile("prefill", Range(1, max(1, prefill // 2), prefill), one)
    return wide, Profile("decode", one, one), Profile("catch-up", Range(2, 2, 2), one)


GAMMAS = (1, 2, 3, 4, 8)
PREFILL = 16


def geometry_of(toy: TableEngine, layers: int = 2) -> Geometry:
    """Return a geometry with several layers, heads and numbers in each."""
    vocabulary = toy.geometry.vocab_size
    return Geometry(layers, 4, 2, 3, vocabulary, toy.max_length, (0,) * layers)


def record_of(profiles: tuple[Profile, ...], **options: Any) -> EngineRecord:
    """Return the record of a plan."""
    said: dict[str, Any] = {"backend": "tensorrt", "version": "11.0", "form": NATIVE}
    return EngineRecord(1, **{**said, "compute": "fp16", **options}, profiles=profiles)


def opened(
    device: NumpyDevice, toy: TableEngine, profiles: tuple[Profile, ...] | None = None, *,
    capture: bool = True, scratch: Block | None = None, broken_at: Collection[int] = (),
    **options: Any,
) -> TensorRtEngine:  # fmt: skip
    """Return an engine that answers as a table does; `options` are those of its record."""
    record = record_of(profiles or target_profiles(GAMMAS, PREFILL), **options)
    geometry = geometry_of(toy)
    plan = NumpyPlan(device, record, toy, geometry, batch=toy.batch, broken_at=broken_at)
    return TensorRtEngine(
        plan, device, record, geometry, batch=toy.batch, max_length=toy.max_length,
        max_width=PREFILL, scratch=scratch, capture=capture,
    )  # fmt: skip
