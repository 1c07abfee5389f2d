"""The one file that all runs of a machine end in."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpucheck.step import NOT_RUN, Outcome

FORMAT = 1


def slug(gpu: str) -> str:
    """Return a GPU's name as part of a file name; `none` where there is none."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-") or "none"


def read_results(path: Path) -> dict[str, Any]:
    """Return what earlier runs left; of a file that is no such thing nothing is kept.

    Raises: ValueError for a file that holds something else, which must not be overwritten.
    """
    if not path.exists() or not path.stat().st_size:
        return {"format": FORMAT, "steps": {}}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); name another file with --out") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or "steps" not in data:
        raise ValueError(f"{path} holds no results of this script; name another file with --out")
    return data


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time change a file of results: slices may run side by side."""
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add(path: Path, outcomes: list[Outcome], facts: dict[str, Any]) -> dict[str, Any]:
    """Merge outcomes into the file and return all it holds; the file is replaced in one step.

    A step that ran is not forgotten because a later run left it out.
    """
    with locked(path):
        data = read_results(path)
        for outcome in outcomes:
            before = data["steps"].get(outcome.key)
            if before and before["status"] != NOT_RUN and outcome.status == NOT_RUN:
                continue
            data["steps"][outcome.key] = asdict(outcome)
        data |= facts
        aside = path.with_name(f".{path.name}.part")
        aside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    return data
