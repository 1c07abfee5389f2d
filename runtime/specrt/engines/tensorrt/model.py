"""What all passes of one model share: its plan, KV buffers and working memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specrt.engines.tensorrt.caches import Caches
from specrt.engines.tensorrt.device import Device
from specrt.engines.tensorrt.memory import Memory
from specrt.engines.tensorrt.plan import Context, Plan
from specrt.engines.tensorrt.record import EngineRecord
from specrt.geometry import Geometry


@dataclass(frozen=True)
class Model:
    """One plan over one set of KV buffers."""

    plan: Plan
    device: Device
    record: EngineRecord
    geometry: Geometry
    batch: int
    caches: Caches
    memory: Memory
    scratch: int
    """Where all contexts have their working memory: they run one after the other."""

    def context(
        self, profile: int, width: int, rows: int, addresses: Mapping[str, int], parity: int = 0
    ) -> Context:
        """Return a context with all its shapes and addresses set."""
        made = self.plan.context(profile, self.scratch)
        self.shape(made, width, rows)
        for name, address in addresses.items():
            made.set_address(name, address)
        self.caches.bind(made, parity)
        return made

    def shape(self, context: Context, width: int, rows: int) -> None:
        """Tell a context the sizes of a pass, of the inputs that may have several."""
        shapes = {"input_ids": (self.batch, width), "rows": (rows,)}
        for name, shape in shapes.items():
            if -1 in self.plan.tensors[name].shape:
                context.set_shape(name, shape)


def scratch_bytes(plan: Plan, record: EngineRecord) -> int:
    """Return the working memory that is enough for every profile of a plan."""
    return max((plan.scratch_bytes(i) for i in range(len(record.profiles))), default=0)
