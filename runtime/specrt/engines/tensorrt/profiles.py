"""Which optimisation profile takes a pass."""

from __future__ import annotations

from specrt.engines.tensorrt.record import EngineRecord, Profile, Range
from specrt.errors import EngineError


def is_fixed(profile: Profile) -> bool:
    """Tell whether all passes of a profile have one width and one number of rows."""
    return profile.width.fixed and profile.rows.fixed


def fixed(record: EngineRecord, width: int, rows: int) -> int | None:
    """Return the place of the profile for exactly this pass, None where there is none."""
    for i, profile in enumerate(record.profiles):
        if is_fixed(profile) and profile.takes(width, rows):
            return i
    return None


def choose(record: EngineRecord, width: int, rows: int) -> int:
    """Return the place of the profile for a pass: the one for just it, else one that takes it.

    Raises: EngineError with what was asked for, and the passes the plan was built for.
    """
    if 0 < rows <= width:
        exact = fixed(record, width, rows)
        if exact is not None:
            return exact
        for i, profile in enumerate(record.profiles):
            if profile.takes(width, rows):
                return i
    raise EngineError(
        f"no profile of the plan takes a pass of width {width} with {rows} scored rows"
        f"{_nearest(record, width, rows)}; there are "
        f"{', '.join(map(_said, record.profiles))}; build the bundle with a recipe that has it"
    )


def gammas(record: EngineRecord) -> list[int]:
    """Return the gammas that have a profile of their own, rising."""
    found = [p.width.most - 1 for p in record.profiles if is_fixed(p) and p.width == p.rows]
    return sorted({gamma for gamma in found if gamma})


def _nearest(record: EngineRecord, width: int, rows: int) -> str:
    """Name the built gammas next to the one asked for, where the pass is one of verification."""
    built = gammas(record)
    if width != rows or width < 2 or not built:
        return ""
    gamma = width - 1
    near = sorted(sorted(built, key=lambda g: abs(g - gamma))[:2])
    words = " and ".join(map(str, near))
    return f" (gamma {gamma}; the nearest built: {words})"


def _said(profile: Profile) -> str:
    return f"{profile.name!r} of width {_span(profile.width)} and rows {_span(profile.rows)}"


def _span(sizes: Range) -> str:
    return str(sizes.most) if sizes.fixed else f"{sizes.least} to {sizes.most}"
