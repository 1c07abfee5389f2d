"""How long a stage goes on, and the learning rate on the way."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

WARMUP_STEPS = 40
FINAL_RATE = 0.03  # learning rate at the end, as a share of its peak
PAUSE_SECONDS = 20.0  # a longer step was a stopped process, not work


@dataclass
class Clock:
    """Training time against a budget and a wall-clock deadline, and steps against a limit."""

    budget: float
    deadline: float  # Unix time
    limit: int  # steps
    active: float = 0.0
    steps: int = 0
    last: float = 0.0  # monotonic time at the end of the last step

    def tick(self) -> None:
        """End a step. One over PAUSE_SECONDS was a pause: it counts as a mean step at most."""
        now = time.monotonic()
        took, self.last = now - self.last, now
        if took > PAUSE_SECONDS and self.steps:
            took = min(took, self.active / self.steps)
        self.active += took
        self.steps += 1

    def done(self) -> float:
        """Return the share of the stage that is done, 0 to 1, replanned from what is left."""
        left = min(self.budget - self.active, self.deadline - time.time())
        if left <= 0 or self.steps >= self.limit:
            return 1.0
        return max(self.active / (self.active + left), self.steps / self.limit)


def next_time(clock: datetime | None) -> float:
    """Return the Unix time nearest to now at which it is that hour and minute in UTC."""
    if clock is None:
        return math.inf
    now, day = datetime.now(timezone.utc), timedelta(days=1)
    then = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    return (now + (then - now + day / 2) % day - day / 2).timestamp()


def rate(done: float, steps: int, hold: float) -> float:
    """Return the learning rate's factor: warm-up, peak until `hold`, then down in a line."""
    decay = max(0.0, (done - hold) / (1 - hold))
    return min(1.0, (steps + 1) / WARMUP_STEPS) * (1 - decay * (1 - FINAL_RATE))
