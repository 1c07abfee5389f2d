"""`specrt doctor`: what this machine can build and run, and what is missing for more."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from specrt.system import doctor


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Report what this machine can build and run."""
    sections = {
        "machine": doctor.machine(),
        "libraries": doctor.libraries(),
        "abilities": doctor.abilities(),
    }
    if as_json:
        print(json.dumps({name: [asdict(f) for f in found] for name, found in sections.items()}))
        return
    for name, found in sections.items():
        print(name)
        for finding in found:
            line = f"  {'ok' if finding.works else '--'}  {finding.name:28}{finding.found}"
            print(line if finding.works else f"{line}  ->  {finding.remedy}")
