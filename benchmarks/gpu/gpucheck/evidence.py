"""What steps find: written to one JSON file from the moment it is known."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
OK, FAILED, NOT_RUN, RUNNING = "ok", "failed", "not run", "running"
FORMAT = 2


class NotRunError(Exception):
    """A step cannot be done on this machine, which is not a failure."""


class CheckError(Exception):
    """A check found something wrong; its facts are in the evidence already."""


class Evidence:
    """The facts of one step, saved whenever one is added."""

    def __init__(self, save: Callable[[], None] = lambda: None) -> None:
        self.facts: Facts = {}
        self.save = save

    def add(self, facts: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add facts under their names."""
        self.facts.update(facts or {}, **named)
        self.save()

    def part(self, name: str) -> Evidence:
        """Return the evidence of a part, whose facts are one fact of this one."""
        part = Evidence(self.save)
        self.facts[name] = part.facts
        return part


@dataclass(frozen=True)
class Outcome:
    """How a step ended, or that it still runs."""

    key: str
    status: str
    reason: str = ""
    """Why, where the status is not ok; one line."""
    seconds: float = 0.0
    when: str = ""
    facts: Facts = field(default_factory=dict)


class Results:
    """The one file of a machine, replaced in one step at each change.

    Several runs may write it, and a step's own process writes its facts while it runs: what was
    found is there whatever happens to the step, the run or the machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Return all that is known.

        Raises: ValueError for a file that holds something else, which must not be overwritten.
        """
        if not self.path.exists() or not self.path.stat().st_size:
            return {"format": FORMAT, "steps": {}}
        remedy = "name another file with --out"
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path} is not JSON ({error}); {remedy}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or "steps" not in data:
            raise ValueError(f"{self.path} holds no results of format {FORMAT}; {remedy}")
        return data

    def outcome(self, key: str) -> Outcome:
        """Return what is known of a step that was begun."""
        return Outcome(key, **self.read()["steps"][key])

    def put(self, outcome: Outcome) -> Outcome:
        """Replace a step's entry; a step that ran stays when it is not run this time."""
        entry = asdict(outcome)
        del entry["key"]
        with self._changing() as data:
            before = data["steps"].get(outcome.key, {"status": NOT_RUN})
            if before["status"] == NOT_RUN or outcome.status != NOT_RUN:
                data["steps"][outcome.key] = entry
        return outcome

    def update(self, key: str, **fields: Any) -> None:
        """Change fields of a step's entry."""
        with self._changing() as data:
            data["steps"].setdefault(key, {"status": RUNNING}).update(fields)

    def note(self, **facts: Any) -> None:
        """Write facts of the whole run."""
        with self._changing() as data:
            data.update(facts)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        with self.path.with_name(f".{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            data = self.read()
            yield data
            part = self.path.with_name(f".{self.path.name}.part")
            with part.open("w", encoding="utf-8") as file:
                json.dump(_plain(data), file, indent=1, allow_nan=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)


def _plain(value: Any) -> Any:
    """Return what JSON has for any value: no fact is lost for its type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
