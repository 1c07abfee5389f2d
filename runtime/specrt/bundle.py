"""A built bundle on disk: find it, hold it to its manifest, say what to rebuild."""

from __future__ import annotations

import hashlib
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short

from specrt.errors import BundleError
from specrt.libraries import ONNXRUNTIME, installed
from specrt.manifest import FileRecord, Manifest, read_manifest

BUILD_ROOT = Path("engines/build")
DEFAULT_BUNDLE = BUILD_ROOT / "codelet"


@dataclass(frozen=True)
class Bundle:
    """A directory whose files are what its manifest says they are."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """Open a bundle after checking format, machine, library and files.

        Raises: BundleError naming what is wrong and what to run.
        """
        folder = Path(path)
        bundle = cls(folder, read_manifest(folder))
        bundle._check_machine()
        bundle._check_library()
        bundle._check_files()
        return bundle

    def file(self, name: str) -> Path:
        """Return the path of one file of the bundle."""
        return self.path / name

    def _check_machine(self) -> None:
        built, here = self.manifest.device.get("machine"), platform.machine()
        if built != here:
            raise BundleError(
                f"{self.path} was built for {built}, and this machine is {here}; "
                "build it again here with `specrt build RECIPE`"
            )

    def _check_library(self) -> None:
        """Refuse a library older than the one that saved the engines; newer ones read them.

        TensorRT has rules of its own, which are held to when its plans are opened.
        """
        manifest, library = self.manifest, ONNXRUNTIME[0]
        models = [m for m in (manifest.target, manifest.draft) if m is not None]
        if not any(manifest.backend_of(model).startswith("ort-") for model in models):
            return
        built, there = self.manifest.versions.get(library), installed(ONNXRUNTIME)
        if built is None or not there:
            return
        name, here = next(iter(there.items()))
        needed, found = _release(built), _release(here)
        if needed is None:
            raise BundleError(
                f"{self.path} names {short(built)} as its version of {library}; expected one such "
                "as 1.25.1: build the bundle again with `specrt build RECIPE`"
            )
        if found is not None and found < needed:
            raise BundleError(
                f"{self.path} was built with {library} {built}, and {name} {here} is installed "
                f"here; upgrade it with `pip install '{name}>={needed[0]}.{needed[1]}'`, or build "
                "the bundle again here with `specrt build RECIPE`"
            )

    def _check_files(self) -> None:
        names = self.manifest.files
        with ThreadPoolExecutor(max_workers=4) as pool:
            found = list(pool.map(lambda name: self._record(name, names[name]), names))
        for name, record in zip(names, found, strict=True):
            if record != names[name]:
                raise BundleError(
                    f"{self.file(name)} is not the file that was built (sha256 "
                    f"{record.sha256[:12]}, expected {names[name].sha256[:12]}); "
                    "build the bundle again with `specrt build RECIPE`"
                )

    def _record(self, name: str, expected: FileRecord) -> FileRecord:
        path = self.file(name)
        try:
            size = path.stat().st_size
            if size == expected.bytes:
                return hash_file(path)
        except OSError as error:
            reason = (
                "is missing" if isinstance(error, FileNotFoundError) else f"is unreadable ({error})"
            )
            raise BundleError(
                f"{path} {reason}; build the bundle again with `specrt build RECIPE`"
            ) from error
        raise BundleError(
            f"{path} has {size} bytes, expected {expected.bytes}; build the bundle again with "
            "`specrt build RECIPE`"
        )


def _release(text: str) -> tuple[int, int] | None:
    """Return the (major, minor) a version begins with."""
    match = re.fullmatch(r"([0-9]{1,6})(?:\.([0-9]{1,6})(?:[^0-9].{,99})?)?", text)
    return (int(match[1]), int(match[2] or 0)) if match else None


def hash_file(path: Path) -> FileRecord:
    """Return the size and sha256 of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())
