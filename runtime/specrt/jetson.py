"""What a Jetson is: its JetPack, the TensorRT that comes with it, and how it is set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_JETPACKS = {
    "35": ("5", "8.5"),
    "36.2": ("6.0 DP", "8.6"),
    "36.3": ("6.0", "8.6"),
    "36.4.0": ("6.1", "10.3"),
    "36.4.3": ("6.2", "10.3"),
    "36.4.4": ("6.2.1", "10.3"),
    "36.5.0": ("6.2.2", "10.3"),
    "36.5.2": ("6.2.3", "10.3"),
    "36": ("6", "10.3"),
    "38.2": ("7.0", "10.13"),
    "38.4": ("7.1", "10.13"),
    "38": ("7", "10.13"),
    "39.2.0": ("7.2", "10.16"),
    "39.2.1": ("7.2.1", "10.16"),
    "39": ("7", "10.16"),
}
"""JetPack and its TensorRT by release of Jetson Linux; the longest that fits counts.

Source: NVIDIA's JetPack archive; TensorRT of 7.2 as seen on boards.
"""


@dataclass(frozen=True)
class Jetson:
    """A Jetson; what is not told is empty."""

    model: str
    release: str
    """Of Jetson Linux, as in `36.4.3`."""
    jetpack: str
    tensorrt: str
    """The version that this JetPack brings, as in `10.3`."""
    power_mode: str

    def form(self, version: str = "") -> str:
        """Return the form of lowering a version of TensorRT gets; by default JetPack's own."""
        from specrt.engines.tensorrt.contract import DECOMPOSED, NATIVE
        from specrt.engines.tensorrt.library import NATIVE_FROM, OLDEST

        found = re.match(r"(\d+)\.(\d+)", version or self.tensorrt)
        if found is None:
            return ""
        number = int(found[1]), int(found[2])
        if number < OLDEST:
            return "none: specrt needs TensorRT 10.3, which JetPack 6.1 brings"
        return NATIVE if number >= NATIVE_FROM else DECOMPOSED


def read_jetson(root: Path = _ROOT) -> Jetson | None:
    """Return what this Jetson is; None on any other machine."""
    model = _text(root / "proc" / "device-tree" / "model")
    release = _release(_text(root / "etc" / "nv_tegra_release"))
    if not release and "jetson" not in model.lower():
        return None
    jetpack, tensorrt = _jetpack(release)
    return Jetson(model or "Jetson", release, jetpack, tensorrt, power_mode(root))


def power_mode(root: Path = _ROOT) -> str:
    """Return the power mode by name, by number where no name is known, empty where none is set."""
    found = re.search(r"pmode:(\d+)", _text(root / "var" / "lib" / "nvpmodel" / "status"))
    if found is None:
        return ""
    number = int(found[1])
    named = r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>"
    names = dict(re.findall(named, _text(root / "etc" / "nvpmodel.conf")))
    return str(names.get(str(number), f"mode {number}"))


def _release(text: str) -> str:
    found = re.search(r"R(\d+)\s*\(release\),\s*REVISION:\s*(\d+(?:\.\d+)*)", text)
    return f"{found[1]}.{found[2]}" if found else ""


def _jetpack(release: str) -> tuple[str, str]:
    parts = [*release.split("."), "0", "0"][:3] if release else []
    for length in range(len(parts), 0, -1):
        known = _JETPACKS.get(".".join(parts[:length]))
        if known:
            return known
    return "", ""


def _text(path: Path) -> str:
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    return "".join(c if c.isprintable() or c.isspace() else "" for c in text).strip()
