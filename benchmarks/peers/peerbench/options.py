"""The flags that every runner takes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from peerbench.protocol import SPECULATIVE


@dataclass(frozen=True)
class Options:
    """Converted models and how to run them."""

    target: Path
    draft: Path | None
    threads: int
    precision: str

    @property
    def drafting(self) -> list[str]:
        """Modes that need a draft model, where there is one."""
        return [SPECULATIVE] if self.draft else []


def read_options(purpose: str) -> Options:
    """Read a runner's command line."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--target", type=Path, required=True, help="what the converter made")
    parser.add_argument("--draft", type=Path, help="the same of the draft, where there is one")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", required=True)
    return Options(**vars(parser.parse_args()))
