"""Completions with chosen times."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.bench.measure import PLAIN, Configuration, PassTime, Sample
from specrt.completion import SpeculationStats
from specrt.speculation.round import Round

DRAFTING = Configuration(2, "model")
US = 1000
"""Nanoseconds."""


def rounds(count: int, drafted: int, accepted: int, draft_us: int, verify_us: int) -> list[Round]:
    """Return so many equal rounds."""
    source = "model" if drafted else ""
    times = draft_us * US, verify_us * US
    return [Round([*range(accepted + 1)], drafted, accepted, *times, source)] * count


def sample(
    log: Sequence[Round],
    *,
    decode_us: int,
    inside_us: int,
    draft_inside_us: int = 0,
    pair: tuple[int, int] = (0, 0),
    tokens: Sequence[int] = (1, 2, 3, 4, 5),
    configuration: Configuration = DRAFTING,
) -> Sample:
    """Return a completion whose target passes took `inside_us` of `decode_us`."""
    counts = SpeculationStats(*configuration)
    for round_ in log:
        counts.add(round_, len(round_.tokens))
    share = decode_us * US / max(1, counts.emitted)
    return Sample(
        prompt=pair[0],
        repeat=pair[1],
        tokens=tuple(tokens),
        ttft_ns=9000 * US,
        decode_ns=decode_us * US,
        gaps_ns=(share,) * counts.emitted,
        counts=counts,
        target=PassTime(inside_us * US, len(log)),
        draft=PassTime(draft_inside_us * US, sum(r.drafted for r in log)),
    )


def plain(pair: tuple[int, int] = (0, 0), slow: int = 1, **options: object) -> Sample:
    """Return four plain steps of 1000 us, 900 of them inside the target, and 100 of overhead."""
    return sample(
        rounds(4, 0, 0, 0, 1000 * slow),
        decode_us=4400 * slow,
        inside_us=3600 * slow,
        pair=pair,
        configuration=PLAIN,
        **options,  # type: ignore[arg-type]
    )


def drafting(pair: tuple[int, int] = (0, 0), slow: int = 1, **options: object) -> Sample:
    """Return two rounds that draft 2, keep 1, and emit the same four tokens in 3000 us."""
    return sample(
        rounds(2, 2, 1, 200 * slow, 1200 * slow),
        decode_us=3000 * slow,
        inside_us=2200 * slow,
        draft_inside_us=300 * slow,
        pair=pair,
        **options,  # type: ignore[arg-type]
    )
