"""Under what circumstances something was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrt.machine import Machine, this_machine
from specrt.manifest import Manifest, ModelRecord
from specrt.params import SamplingParams


@dataclass(frozen=True)
class Setting:
    """The bundle, the machine and the options of one run."""

    bundle: str
    name: str
    backend: str
    precision: str
    """Of the target, and of the draft where it is another."""
    machine: Machine
    threads: int
    repeats: int
    params: SamplingParams

    @classmethod
    def of(
        cls, bundle: Path, manifest: Manifest, params: SamplingParams, threads: int, repeats: int
    ) -> Setting:
        """Describe a run on this machine."""
        m, machine = manifest, this_machine(manifest.backend)
        target, draft = target_precision(m), _stored(m.draft) if m.draft else ""
        precision = f"{target}, draft {draft}" if draft not in ("", target) else target
        return cls(str(bundle), m.name, m.backend, precision, machine, threads, repeats, params)

    def __str__(self) -> str:
        """Return a line that tells a reader what the figures hold for."""
        p = self.params
        options = [f"temperature {p.temperature:g}"] + [
            f"{name.replace('_', '-')} {value:g}"
            for name, value, unset in (
                ("top_k", p.top_k, 0), ("top_p", p.top_p, 1.0), ("min_p", p.min_p, 0.0),
            )
            if value != unset
        ]  # fmt: skip
        drawn = "greedy" if p.greedy else f"{', '.join(options)} ({p.verifier})"
        return (
            f"{self.name}, {self.backend} {self.precision}, {self.threads} "
            f"thread{'s' if self.threads > 1 else ''} of {self.machine.cpu}, "
            f"{self.machine.library}; {p.max_tokens} tokens a prompt, {drawn}, "
            f"{self.repeats} repeat{'s' if self.repeats > 1 else ''} in turn"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the setting as plain JSON types."""
        p = self.params
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "verifier")
        return {
            "bundle": self.bundle,
            "name": self.name,
            "backend": self.backend,
            "precision": self.precision,
            "machine": asdict(self.machine),
            "threads": self.threads,
            "repeats": self.repeats,
            "sampling": {name: getattr(p, name) for name in names},
        }


def target_precision(manifest: Manifest) -> str:
    """Return what the weights that decide the output are stored as; `fp32` where all are."""
    return _stored(manifest.target)


def _stored(model: ModelRecord) -> str:
    # Looking up a row of the embedding table rounds nothing: it is the same for every width.
    alike = model.head == model.precision
    return model.precision if alike else f"{model.precision} with a head of {model.head}"
