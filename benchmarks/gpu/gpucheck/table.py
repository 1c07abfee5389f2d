"""Results as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpucheck.step import OK, Outcome
from gpucheck.wanted import Figure

_LONGEST = 100


def steps_table(outcomes: Sequence[Outcome]) -> str:
    """Return steps, a line each."""
    rows = [("step", "backend", "status", "seconds", "what")]
    for one in outcomes:
        rows.append((one.step, one.backend or "-", one.status, f"{one.seconds:.1f}", _what(one)))
    return aligned(rows)


def figures_table(found: Sequence[Figure]) -> str:
    """Return every figure that is wanted, a line each."""
    wanted = [("figure", "backend", "wanted", "found", "met")]
    for figure in found:
        said = "not measured" if figure.found is None else f"{figure.found:.3f}"
        met = {None: "-", True: "yes", False: "no"}[figure.met]
        wanted.append((figure.name, figure.backend or "-", figure.wanted, said, met))
    return aligned(wanted)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with their columns under each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _what(one: Outcome) -> str:
    said = one.reason if one.status != OK else _headline(one.facts)
    return said if len(said) <= _LONGEST else said[: _LONGEST - 3] + "..."


def _headline(facts: dict[str, Any]) -> str:
    """Return what matters most of a step's facts."""
    if "bytes_per_second" in facts:
        return f"{facts['bytes_per_second'] / 1e9:.0f} GB/s"
    if "decode_of_bound" in facts:
        return f"decode at {facts['decode_of_bound']:.0%} of the bandwidth bound"
    if "largest_relative_error" in facts:
        return f"at most {facts['largest_relative_error']:.1e} of the spread off"
    if "unexplained" in facts:
        return f"{facts['tokens']} tokens, {len(facts['divergences'])} near-ties"
    if "ways_that_run" in facts:
        return f"runs: {', '.join(facts['ways_that_run']) or 'none tried'}"
    speeds = {k: v for k, v in facts.items() if isinstance(v, dict) and "tokens_per_second" in v}
    if "0" in speeds:
        best = max(speeds, key=lambda key: speeds[key]["tokens_per_second"])
        top = speeds[best]
        return (
            f"plain {speeds['0']['tokens_per_second']:.0f} tokens/s, gamma {best} "
            f"{top['tokens_per_second']:.0f} ({top['speedup']:.2f}x)"
        )
    ratios = [
        f"{key}: {one['changed_over_as_it_is']:.2f}"
        for key, one in facts.items()
        if isinstance(one, dict) and "changed_over_as_it_is" in one
    ]
    return "changed over as it is, " + ", ".join(ratios) if ratios else ""
