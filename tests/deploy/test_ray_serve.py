"""A fleet on Ray Serve, as it is started by hand: it grows, keeps prefixes together, loses one.

The tests share a fleet, and are to run in their order: the first one makes it grow.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from support.fleets import Watched, complete, descendants, lose, started, until

SERVE = shutil.which("serve", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None or SERVE is None,
        reason="needs Ray Serve: `make test-deploy` installs it",
    ),
]


class Fleet(NamedTuple):
    url: str
    pid: int

    @property
    def replicas(self) -> list[int]:
        """Return the processes of the replicas."""
        return descendants(self.pid, "ServeReplica:default:Replica")


@pytest.fixture(scope="module")
def fleet(codelet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    url = "http://127.0.0.1:8000"  # Ray's own choice
    options = {
        "bundle": codelet, "name": "codelet", "min_replicas": 1, "max_replicas": 2,
        "target_ongoing_requests": 1, "upscale_delay_s": 1,
    }  # fmt: skip
    assert SERVE is not None
    command = [SERVE, "run", "deploy.ray_serve:build", *(f"{k}={v}" for k, v in options.items())]
    env = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    with started(command, url, log, env, seconds=240) as process:
        yield Fleet(url, process.pid)


def replica_of(fleet: Fleet, prompt: str) -> str:
    return complete(fleet.url, prompt)[1]


def prompts_of_two(fleet: Fleet) -> list[str]:
    """Return a prompt of each of two replicas."""
    found: dict[str, str] = {}
    for number in range(32):
        prompt = f"def part_{number}("
        found.setdefault(replica_of(fleet, prompt), prompt)
        if len(found) == 2:
            return [*found.values()]
    raise AssertionError(f"all prompts go to {[*found]}")


def test_one_replica_becomes_two_under_load(fleet: Fleet) -> None:
    assert len(fleet.replicas) == 1
    seen: set[str] = set()

    def busy(number: int) -> None:
        for turn in range(200):
            seen.add(complete(fleet.url, f"def busy_{number}_{turn}(", 200)[1])
            if len(seen) == 2:
                return

    with ThreadPoolExecutor(6) as pool:
        [*pool.map(busy, range(6))]
    assert len(seen) == 2
    assert len(fleet.replicas) == 2


def test_prefixes_stay_on_a_replica(fleet: Fleet) -> None:
    prefixes = [f"# file {n}\n" + f"VALUE_{n} = {n}\n" * 30 for n in range(8)]
    prompts = [(n, f"{prefixes[n]}\ndef part_{turn}(") for turn in range(8) for n in range(8)]
    with ThreadPoolExecutor(2) as pool:
        names = [*pool.map(lambda one: (one[0], replica_of(fleet, one[1])), prompts)]
    assert len({name for _, name in names}) == 2
    hits = 0
    for group in range(8):
        went = [name for n, name in names if n == group]
        hits += sum(a == b for a, b in pairwise(went))
    assert hits / (8 * 7) >= 0.9


def test_a_long_queue_spills(fleet: Fleet) -> None:
    prompt = "# the same beginning\ndef part("
    alone = {replica_of(fleet, prompt) for _ in range(4)}
    assert len(alone) == 1
    with ThreadPoolExecutor(6) as pool:
        names = [*pool.map(lambda _: complete(fleet.url, prompt, 300)[1], range(12))]
    assert {*names} > alone


def test_a_replica_that_dies_takes_only_its_own_streams(fleet: Fleet) -> None:
    one, other = prompts_of_two(fleet)
    streams = [Watched(fleet.url, prompt) for prompt in (one, other)]
    whole, broken = lose(fleet.replicas[0], streams)
    assert (len(whole), len(broken)) == (1, 1)
    assert broken[0].error is not None
    for prompt in (one, other, one):
        assert complete(fleet.url, prompt)[0]
    until(lambda: len(fleet.replicas) == 2, 120)  # Ray starts another one
