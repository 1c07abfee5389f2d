"""The optimisation profiles of a plan: which widths get kernels of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from specrt.engines.tensorrt.record import Profile, Range
from specrt.errors import BuildError


def profiles(role: str, prefill: int, gammas: Iterable[int]) -> tuple[Profile, ...]:
    """Return the profiles of a target or a draft, in the order of the plan.

    `prefill` is the widest pass. Of two that take the same passes the first stays, so gamma 0 is
    `decode`.
    Raises: BuildError for a prefill that is narrower than what it must take.
    """
    verified = sorted(set(gammas)) if role == "target" else []
    rows = max(verified, default=0) + 1
    least = max(rows, 1 if role == "target" else 2)
    if prefill < least:
        raise BuildError(
            f"the prefill width of the {role} is {prefill}; passes near the length limit go "
            f"through it, so it takes at least {least} tokens"
        )
    found: dict[tuple[Range, Range], Profile] = {}
    for profile in _listed(role, prefill, rows, verified):
        found.setdefault((profile.width, profile.rows), profile)
    return tuple(found.values())


def _listed(role: str, prefill: int, rows: int, gammas: list[int]) -> Iterator[Profile]:
    yield Profile("prefill", Range(1, max(1, prefill // 2), prefill), Range(1, 1, rows))
    yield Profile("decode", _only(1), _only(1))
    for gamma in gammas:
        yield Profile(f"verify {gamma}", _only(gamma + 1), _only(gamma + 1))
    if role == "draft":
        yield Profile("catch-up", _only(2), _only(1))


def _only(size: int) -> Range:
    return Range(size, size, size)


def add_profiles(builder: Any, config: Any, batch: int, wanted: Iterable[Profile]) -> None:
    """Give a builder's configuration its profiles, numbered as listed.

    Raises: BuildError for one that TensorRT refuses.
    """
    for number, profile in enumerate(wanted):
        made = builder.create_optimization_profile()
        made.set_shape("input_ids", *((batch, width) for width in _sizes(profile.width)))
        made.set_shape("rows", *((rows,) for rows in _sizes(profile.rows)))
        if config.add_optimization_profile(made) != number:
            raise BuildError(
                f"TensorRT refused the profile {profile.name!r} (width {profile.width.most}, rows "
                f"{profile.rows.most}); its reason is in the messages of the library"
            )


def _sizes(sizes: Range) -> tuple[int, int, int]:
    return sizes.least, sizes.best, sizes.most
