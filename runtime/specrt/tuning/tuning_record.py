"""The record of tuning a bundle on one machine, and its file.

The record lies next to the manifest, in a file of its own: the manifest stays what the build
machine wrote, and the costs are of the machine that runs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any

from specrt.bundle import Bundle
from specrt.engine.backends import backend_named, backend_of
from specrt.engine.protocol import CudaGraphs
from specrt.errors import BundleError, SpecrtError
from specrt.held_file import check_place, read_file, replacing
from specrt.params import AUTO, Gamma
from specrt.records import Count, Interval, read
from specrt.speculation.costs import Costs, shared_widths
from specrt.speculation.drafters import DRAFTERS
from specrt.system.machine import Machine, this_machine

FORMAT = 2

FILE_NAME = "tuning.json"

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class TunedSetting:
    """Counts and time of one drafter at one gamma over the prompts of a tuning."""

    drafter: str
    fixed_gamma: int | None
    """None where the gamma was chosen round by round."""
    emitted: Count
    decode_ns: Annotated[int, Interval(1, 2**63 - 1)]
    rounds: int
    drafted: int
    evaluated: int
    accepted: int

    @property
    def gamma(self) -> Gamma:
        """The gamma, or `auto`."""
        return AUTO if self.fixed_gamma is None else self.fixed_gamma

    @property
    def tokens_per_second(self) -> float:
        """Emitted / time to decode them."""
        return self.emitted / self.decode_ns * 1e9

    @property
    def acceptance_rate(self) -> float:
        """Accepted / evaluated; 0 where nothing was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted / rounds."""
        return self.emitted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Tuning:
    """Costs and best defaults of a bundle, and what they hold for.

    Units: nanoseconds, whole ones, as in `Costs`.
    """

    format: int
    date: str
    source: str
    """Of the manifest: it changes where the bundle is built again from something else."""
    machine: Machine
    threads: Count
    pools: Annotated[int, Interval(1, 2)]
    """Thread pools of the engines: one for both, as `share_pool` makes it, or one for each.

    For people: costs hold whatever the pools, and the gamma policy follows what rounds take.
    """
    verify_ns: tuple[int, ...]
    draft_ns: tuple[int, ...]
    outside_ns: int
    fixed_gamma: int | None
    """The gamma that is best here; None where choosing it round by round is."""
    drafter: str
    """The drafter that is best here; empty where no prompts were given."""
    settings: tuple[TunedSetting, ...]
    cuda_graphs: CudaGraphs | None = None
    """What was captured while costs were measured; None where nothing captures."""

    @property
    def gamma(self) -> Gamma:
        """The gamma that is best here, or `auto`."""
        return AUTO if self.fixed_gamma is None else self.fixed_gamma

    @property
    def costs(self) -> Costs:
        """What passes cost here.

        Raises: BundleError for costs that no machine has.
        """
        return Costs(
            tuple(map(float, self.verify_ns)),
            tuple(map(float, self.draft_ns)),
            float(self.outside_ns),
        )

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_tuning(bundle: Bundle, threads: int) -> tuple[Tuning | None, str | None]:
    """Return the tuning of a bundle, or the reason to ignore it; neither where there is no record.

    `threads` are those of the engines about to run.
    """
    path = bundle.file(FILE_NAME)
    if not os.path.lexists(path):
        return None, None
    try:
        tuning = read_record(path)
        for problem in _problems(tuning, bundle):
            raise ValueError(problem)
    except (OSError, ValueError, RecursionError, SpecrtError) as error:
        reason = str(error).split(";")[0]
        return None, f"{path} is ignored, it is damaged ({reason}); {_again(bundle, threads)}"
    stale = _stale(tuning, bundle, threads)
    if stale is not None:
        return None, (
            f"{path} is ignored: {stale}; until then gamma auto learns what passes cost while it "
            "decodes"
        )
    return tuning, None


def write_tuning(folder: Path, tuning: Tuning) -> Path:
    """Write a tuning next to the manifest of a bundle, replacing an older one.

    Raises: BundleError when the bundle cannot be written to; the older one stays.
    """
    place = folder / FILE_NAME
    with _writing(place), replacing(place) as file:
        file.write(tuning.to_json().encode())
    return place


def check_writable(folder: Path) -> None:
    """Check that a tuning can be written, before it is measured.

    Raises: BundleError with the remedy.
    """
    with _writing(folder / FILE_NAME):
        check_place(folder / FILE_NAME)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BundleError(
            f"{place} cannot be written ({error.strerror}); make {place.parent} writable, or copy "
            "the bundle to a place that is and tune it there"
        ) from error


def read_record(path: Path) -> Tuning:
    """Read a record from a file that may hold anything, of any machine.

    Raises: OSError, ValueError.
    """
    data: Any = json.loads(read_file(path, _MOST_BYTES))
    if not isinstance(data, dict):
        raise ValueError(f"it holds {short(data)}, expected an object")
    written = data.get("format")
    if written != FORMAT:
        raise ValueError(f"format {short(written)}, expected {FORMAT}")
    known = {f.name for f in fields(Tuning)}
    return read(Tuning, {k: v for k, v in data.items() if k in known})


def _problems(tuning: Tuning, bundle: Bundle) -> Iterator[str]:
    """Yield what is wrong between the fields of a record, and with its bundle."""
    gammas = bundle.manifest.gammas
    _ = tuning.costs  # refuses costs that no machine has
    lengths = len(tuning.verify_ns), len(tuning.draft_ns)
    most, manifest = max(gammas), bundle.manifest
    packs = backend_of(manifest, manifest.target).packs_rows
    wide = shared_widths(most, manifest.batch if packs else 1, manifest.max_width)
    expected = max([most + 1, *wide]), most + 1
    if lengths != expected:
        yield f"{lengths[0]} and {lengths[1]} costs, expected {expected[0]} and {expected[1]}"
    if bundle.manifest.draft is not None and not all(tuning.draft_ns[1:]):
        yield "the draft costs nothing"
    choices = [(tuning.fixed_gamma, tuning.drafter)]
    choices += [(setting.fixed_gamma, setting.drafter) for setting in tuning.settings]
    for gamma, drafter in choices:
        if gamma is not None and gamma not in gammas:
            yield f"gamma {gamma}, expected one of {short(gammas)}"
        if drafter not in ("", *DRAFTERS):
            yield f"drafter {short(drafter)}, expected one of {', '.join(DRAFTERS)}"


def _stale(tuning: Tuning, bundle: Bundle, threads: int) -> str | None:
    """Return why a sound record does not hold here, and the remedy; None where it holds."""
    again = _again(bundle, threads)
    if tuning.source != bundle.manifest.source:
        return f"the bundle was built again since; {again}"
    differs = tuning.machine.difference(
        this_machine(backend_named(bundle.manifest.backend).library())
    )
    if differs is not None:
        return f"it was measured {differs}; {again}"
    if tuning.threads != threads:
        return f"it was measured with {tuning.threads} threads, not {threads}; {again}"
    return None


def _again(bundle: Bundle, threads: int) -> str:
    every = threads == len(os.sched_getaffinity(0))
    return f"run `specrt tune {bundle.path}{'' if every else f' --threads {threads}'}`"
