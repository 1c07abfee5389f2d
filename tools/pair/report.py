"""The figures of all stages, in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


def add_to_report(out: Path, name: str, figures: dict[str, Any]) -> None:
    """Put one stage's figures into OUT/report.json next to those of the others, and print them."""
    path, aside = out / "report.json", out / "report.json.tmp"
    report = json.loads(path.read_text("utf8")) if path.is_file() else {}
    aside.write_text(json.dumps(report | {name: figures}, indent=2) + "\n", "utf8")
    aside.replace(path)
    click.echo(json.dumps({name: figures}))
