"""Draw the recorded comparisons as bars: `python benchmarks/peers/plot.py` writes docs/speeds.svg.

A bar is a runtime: its plain decoding, and what its fastest mode adds; of specrt, the base's mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = ("codelet-200M-int4-b32", "codelet-200M-int8")
TO = HERE.parents[1] / "docs" / "speeds.svg"
NAMES = {
    "specrt": "specrt",
    "ikllamacpp": "ik_llama.cpp",
    "llamacpp": "llama.cpp",
    "ortgenai": "ONNX Runtime GenAI",
    "openvino": "OpenVINO GenAI",
}
MODES = {
    "plain": "plain",
    "ngram": "lookup",
    "speculative": "draft model",
    "cascade": "lookup and draft model",
}
LEFT, PITCH, UNIT = 165, 26, 0.55
"""Pixels: the names' column, from one bar to the next, a token per second."""

STYLE = """text{font:13px system-ui,sans-serif;fill:#1d1f21}.q{fill:#5c6166}.h{font-weight:600}\
.s{fill:#096a5b}.b{fill:#6f757b}.s.f{opacity:.55}.b.f{opacity:.45}
@media(prefers-color-scheme:dark){text{fill:#e7e7e4}.q{fill:#a3a8ad}.s{fill:#64d3b9}.b{fill:#8d939a}}"""


def plot() -> str:
    """Return the drawing of all results."""
    bodies, y = [], 0
    for name in RESULTS:
        record = json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
        lines = list(_group(record, y))
        bodies += lines
        y += PITCH * (1 + len({row["peer"] for row in record["rows"]})) + 14
    note = "tokens/s; full colour: plain decoding, faded: what the fastest mode adds"
    bodies.append(f'<text class="q" x="{LEFT}" y="{y + 6}">{note}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {y + 16}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *bodies, "</svg>\n"])


def _group(record: dict[str, Any], top: int) -> Iterator[str]:
    """Draw one comparison: its precision, and a bar for each runtime, the fastest first."""
    yield f'<text class="h" x="{LEFT}" y="{top + 18}">{record["settings"]["precision"]}</text>'
    pairs = [_plain_and_best(record, peer) for peer in record["peers"]]
    pairs.sort(key=lambda pair: -pair[1]["tokens_per_second"])
    for at, (plain, best) in enumerate(pairs, 1):
        yield from _bar(plain, best, top + at * PITCH)


def _plain_and_best(record: dict[str, Any], peer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a runtime's row of plain decoding and its fastest; specrt's is that of the base."""
    rows = [row for row in record["rows"] if row["peer"] == peer and "error" not in row]
    plain = next(row for row in rows if row["mode"] == "plain")
    based = [row for row in rows if f"{peer}:{row['mode']}:{row['gamma']}" == record["base"]]
    return plain, max(based or rows, key=lambda row: row["tokens_per_second"])


def _bar(plain: dict[str, Any], best: dict[str, Any], y: int) -> Iterator[str]:
    slow, fast = plain["tokens_per_second"], best["tokens_per_second"]
    kind, middle = "s" if plain["peer"] == "specrt" else "b", y + 14
    told = f"{fast:.0f}, {MODES[best['mode']]}" + (f"; plain {slow:.0f}" if fast > slow else "")
    yield f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end">{NAMES[plain["peer"]]}</text>'
    for begin, end, shade in ((0, slow, ""), (slow, fast, " f")):
        place = f'x="{LEFT + begin * UNIT:.1f}" y="{y}" width="{(end - begin) * UNIT:.1f}"'
        if end > begin:
            yield f'<rect class="{kind}{shade}" {place} height="18"/>'
    yield f'<text class="q" x="{LEFT + fast * UNIT + 8:.1f}" y="{middle}">{told}</text>'


if __name__ == "__main__":
    TO.write_text(plot(), encoding="utf-8")
