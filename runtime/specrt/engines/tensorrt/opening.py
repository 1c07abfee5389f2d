"""Open the plan of a bundle: hold it to this machine, and share the device of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrt.engine import Engine
from specrt.engines.tensorrt.contract import ANY
from specrt.engines.tensorrt.cuda import CudaDevice
from specrt.engines.tensorrt.device import Device
from specrt.engines.tensorrt.engine import TensorRtEngine
from specrt.engines.tensorrt.fingerprint import difference, this_device
from specrt.engines.tensorrt.library import Library, open_library
from specrt.engines.tensorrt.plan import Plan
from specrt.engines.tensorrt.record import (
    AGAIN,
    FILE_NAME,
    EngineRecord,
    Profile,
    read_engine_record,
)
from specrt.engines.tensorrt.rounds import Rounds
from specrt.engines.tensorrt.trt_plan import TrtPlan, open_plan
from specrt.errors import EngineError
from specrt.geometry import Geometry


class Lease:
    """A device that is closed with the last engine on it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._holders = set[int]()

    def take(self, holder: object) -> None:
        """Keep the device open for somebody."""
        self._holders.add(id(holder))

    def drop(self, holder: object) -> None:
        """Close the device if this was the last one; twice is once."""
        if id(holder) in self._holders:
            self._holders.discard(id(holder))
            if not self._holders:
                self.device.close()


class OpenedEngine(TensorRtEngine):
    """An engine that holds its device open."""

    def __init__(
        self, lease: Lease, plan: Plan, record: EngineRecord, geometry: Geometry, *, batch: int,
        max_length: int, max_width: int,
    ) -> None:  # fmt: skip
        self.lease = lease
        lease.take(self)
        super().__init__(
            plan, lease.device, record, geometry, batch=batch, max_length=max_length,
            max_width=max_width,
        )  # fmt: skip

    def close(self) -> None:
        """Give everything back, the device too if nobody else is on it."""
        super().close()
        self.lease.drop(self)


def open_tensorrt(
    path: Path, geometry: Geometry, *, backend: str, batch: int, max_length: int, max_width: int,
    beside: Engine | None = None,
) -> OpenedEngine:  # fmt: skip
    """Open a plan, on the device of the engine `beside` it where that is one of TensorRT too.

    Raises: EngineError saying what differs from where it was built, or what is missing; BundleError
        for a record that cannot be read.
    """
    record = read_engine_record(path.with_name(FILE_NAME))
    library = open_library(backend)
    differs = difference(record.device, this_device(library))
    if differs:
        raise EngineError(f"{path} does not run here: {differs}")
    lease = beside.lease if isinstance(beside, OpenedEngine) else Lease(CudaDevice())
    try:
        plan = _plan(path, record, library, lease.device)
    except BaseException:
        if not isinstance(beside, OpenedEngine):
            lease.device.close()
        raise
    return OpenedEngine(
        lease, plan, record, geometry, batch=batch, max_length=max_length, max_width=max_width
    )


def _plan(path: Path, record: EngineRecord, library: Library, device: Any) -> TrtPlan:
    """Open a plan that has the profiles of its record."""
    plan = open_plan(path, library, device, record.wants)
    try:
        check_profiles(path, plan, record.profiles)
    except BaseException:
        plan.close()
        raise
    return plan


def check_profiles(path: Path, plan: TrtPlan, profiles: Sequence[Profile]) -> None:
    """Refuse a plan whose profiles are not those of its record, before a pass finds out.

    Raises: EngineError naming the first that differs.
    """
    again = f"they do not belong together: {AGAIN}"
    if plan.profiles != len(profiles):
        raise EngineError(
            f"{path} has {plan.profiles} profiles, and {FILE_NAME} says {len(profiles)}; {again}"
        )
    for number, profile in enumerate(profiles):
        ranges = plan.ranges(number)
        for name, sizes in (("input_ids", profile.width), ("rows", profile.rows)):
            if name not in ranges or ANY not in plan.tensors[name].shape:
                continue  # tensors are held to the manifest elsewhere; one size needs no range
            found = [shape[-1] for shape in ranges[name]]
            wanted = [sizes.least, sizes.best, sizes.most]
            if found != wanted:
                raise EngineError(
                    f"{path} takes {name} of {_listed(found)} in profile {number}, and {FILE_NAME} "
                    f"says {_listed(wanted)} ({profile.name!r}); {again}"
                )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def whole_rounds(target: Engine, draft: Engine | None) -> Rounds | None:
    """Return what runs rounds of a pair in one launch; None where the pair cannot have them."""
    if not isinstance(target, TensorRtEngine) or not isinstance(draft, TensorRtEngine):
        return None
    rounds = Rounds(target, draft)
    return rounds if rounds.gammas else None
