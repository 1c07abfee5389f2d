"""Which peers there are, where their environments lie, and how a checkpoint gets to them."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from peerbench.conversion import PRECISIONS

HERE = Path(__file__).parents[1]


class MissingError(Exception):
    """Something that has to be made first."""


@dataclass(frozen=True)
class Kind:
    """A peer: its environments and the precisions it runs in here."""

    name: str
    converter: str | None
    """Environment of the converter; None where the checkpoint is read as it is."""
    precisions: tuple[str, ...] = PRECISIONS
    reads: str = ""
    """The peer whose converted models it reads, where it has no converter of its own."""

    def command(self, models: Models) -> list[str | Path]:
        """Return what starts the runner, its models converted. Raises: MissingError."""
        python = environment(self.name, self.name)
        flags: list[str | Path] = ["--target", self._model(models.target, models)]
        if models.draft:
            flags += ["--draft", self._model(models.draft, models)]
        flags += ["--threads", str(models.threads), "--precision", models.precision]
        return [python, HERE / f"run_{self.name}.py", *flags]

    def _model(self, checkpoint: Path, models: Models) -> Path:
        if self.converter is None:
            return checkpoint
        peer = self.reads or self.name
        out = models.work / f"{peer}-{label(checkpoint)}-{models.precision}"
        if not out.is_dir():
            _convert(peer, self.converter, checkpoint, out, models.precision)
        return out


@dataclass(frozen=True)
class Models:
    """The pair that everyone runs, or a target alone."""

    target: Path
    draft: Path | None
    precision: str
    threads: int
    work: Path
    """Where converted models are kept."""


PEERS = {
    kind.name: kind
    for kind in (
        Kind("llamacpp", "llamacpp"),
        Kind("ikllamacpp", "llamacpp", reads="llamacpp"),
        Kind("openvino", "openvino-convert"),
        Kind("ortgenai", "ortgenai"),
        Kind("transformers", None, ("fp32",)),
    )
}


def environment(name: str, peer: str) -> Path:
    """Return an environment's Python. Raises: MissingError."""
    python = HERE / ".venvs" / name / "bin" / "python"
    if not python.exists():
        raise MissingError(
            f"{peer} is not set up; run benchmarks/peers/setup_{peer}.sh, or leave it out "
            "with --peers"
        )
    return python


def label(checkpoint: Path) -> str:
    """Name a checkpoint by its folder and a digest that changes when its files do."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    digest.update((checkpoint / "config.json").read_bytes())
    return f"{checkpoint.name}-{digest.hexdigest()[:8]}"


def _convert(peer: str, converter: str, checkpoint: Path, out: Path, precision: str) -> None:
    python = environment(converter, peer)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_name(out.name + ".log")
    script = HERE / f"convert_{peer}.py"
    with log.open("wb") as said:
        command: list[str | Path] = [python, script, checkpoint, out, "--precision", precision]
        done = subprocess.run(command, stdout=said, stderr=said, check=False)
    if done.returncode:
        raise MissingError(f"{peer} could not convert {checkpoint} to {precision}; see {log}")
