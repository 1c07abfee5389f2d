"""Carry what a device without network needs, in parts small enough to be copied one at a time.

    python -m pip download --dest wheels onnxruntime-gpu tensorrt-rtx cuda-bindings onnx ...
    python benchmarks/gpu                                     # builds bundles, exports graphs
    python benchmarks/gpu/pack.py pack parts --wheels wheels
    python benchmarks/gpu/pack.py unpack parts                # on the device; no pip

A pack holds wheels, and of the folder that gpu-check works in the bundles and exported graphs.
Unpacking puts them back into that folder, wheels as importable packages, which gpu-check finds.
Every part has its SHA-256 in the index; one that is missing or damaged is named, and then nothing
is unpacked.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpucheck.settings import PACKAGES, WORK

PART_BYTES = 60 << 20
INDEX = "pack.json"
FORMAT = 1
WHEELS, GRAPHS = "wheels", "graphs"
CHUNK = 1 << 20


class PackError(Exception):
    """A pack cannot be written or read; the message says which part, and the remedy."""


class PartWriter(io.RawIOBase):
    """A stream that is cut into files of a bounded size."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._file: Any = None
        self._hash = hashlib.sha256()
        self._size = 0
        self.parts: list[dict[str, Any]] = []

    def writable(self) -> bool:
        """Tell that it is an output."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes, into as many parts as it takes."""
        rest = memoryview(data)
        while rest:
            if self._file is None:
                self._file = (self._folder / f"part-{len(self.parts):04}").open("wb")
                self._hash, self._size = hashlib.sha256(), 0
            piece, rest = rest[: self._limit - self._size], rest[self._limit - self._size :]
            self._file.write(piece)
            self._hash.update(piece)
            self._size += len(piece)
            if self._size == self._limit:
                self.end_part()
        return len(data)

    def end_part(self) -> None:
        """Close the part that is being written, and note its size and hash."""
        if self._file is not None:
            name = Path(self._file.name).name
            self._file.close()
            self._file = None
            entry = {"name": name, "bytes": self._size, "sha256": self._hash.hexdigest()}
            self.parts.append(entry)


class PartReader(io.RawIOBase):
    """The parts of a pack as one stream."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = iter(files)
        self._file: Any = None

    def readable(self) -> bool:
        """Tell that it is an input."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read from the part at hand, or the next one."""
        while True:
            if self._file is None:
                path = next(self._files, None)
                if path is None:
                    return 0
                self._file = path.open("rb")
            if count := int(self._file.readinto(buffer)):
                return count
            self.end_part()

    def end_part(self) -> None:
        """Close the part at hand."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Close the stream."""
        self.end_part()
        super().close()


def pack(out: Path, work: Path, wheels: Path | None = None, limit: int = PART_BYTES) -> int:
    """Write the parts and their index into a new folder; return how many parts there are.

    Raises: PackError where there is nothing to pack, or the folder holds something.
    """
    files = list(contents(work, wheels))
    if not files:
        raise PackError(
            f"nothing to pack: {work} holds no bundle or graph, and no wheels are given"
        )
    if out.exists() and any(out.iterdir()):
        raise PackError(f"{out} is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    writer = PartWriter(out, limit)
    with tarfile.open(fileobj=writer, mode="w|", bufsize=CHUNK) as archive:
        for path, name in files:
            archive.add(path, name, recursive=False)
    writer.end_part()
    index = {"format": FORMAT, "parts": writer.parts, "files": [name for _, name in files]}
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return len(writer.parts)


def contents(work: Path, wheels: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield the files of a pack, and their names in it."""
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        yield wheel, f"{WHEELS}/{wheel.name}"
    for graph in sorted((work / GRAPHS).glob("*.onnx")):
        yield graph, f"{GRAPHS}/{graph.name}"
    for manifest in sorted(work.glob("*/manifest.json")):
        for path in sorted(manifest.parent.rglob("*")):
            if path.is_file():
                yield path, path.relative_to(work).as_posix()


def unpack(parts: Path, work: Path) -> list[str]:
    """Check every part, then put the files where gpu-check works; return their names.

    Raises: PackError for a pack that is incomplete, damaged, or would write elsewhere.
    """
    files = checked_parts(parts)
    work.mkdir(parents=True, exist_ok=True)
    names = []
    try:
        with (
            io.BufferedReader(PartReader(files), CHUNK) as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            for member in archive:
                archive.extract(member, work, filter="data")
                names.append(member.name)
    except (tarfile.TarError, EOFError) as error:
        raise PackError(f"{parts} holds no pack: {error}; pack it again") from error
    for wheel in sorted((work / WHEELS).glob("*.whl")):
        install(wheel, work / PACKAGES)
    shutil.rmtree(work / WHEELS, ignore_errors=True)
    return names


def checked_parts(folder: Path) -> list[Path]:
    """Return the parts in their order, each with the size and hash of the index.

    Raises: PackError.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        entries = [(e["name"], e["bytes"], e["sha256"]) for e in index["parts"]]
        if index["format"] != FORMAT or any(Path(name).name != name for name, _, _ in entries):
            raise PackError(f"{folder / INDEX} is no index of format {FORMAT}; pack it again")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise PackError(f"{folder / INDEX} cannot be read ({reason}); copy it again") from error
    for name, size, sha256 in entries:
        path = folder / name
        if not path.is_file():
            raise PackError(f"{path} is missing; copy it")
        found = path.stat().st_size
        if found != size:
            raise PackError(f"{path} has {found} bytes, expected {size}; copy it again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise PackError(f"{path} is damaged: its SHA-256 is not {sha256}; copy it again")
    return [folder / name for name, _, _ in entries]


def install(wheel: Path, site: Path) -> None:
    """Put the packages of a wheel where Python imports them from; scripts are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            target = Path(name)
            if ".." in target.parts or target.is_absolute():
                raise PackError(f"{wheel.name} would write {name} elsewhere; fetch it again")
            if target.parts[0].endswith(".data"):
                if target.parts[1] not in ("purelib", "platlib"):
                    continue
                target = Path(*target.parts[2:])
            if name.endswith("/"):
                continue
            (site / target).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, (site / target).open("wb") as file:
                shutil.copyfileobj(source, file, CHUNK)


def main(given: Sequence[str] | None = None) -> int:
    """Pack or unpack; return 1 with one line where that cannot be done."""
    parser = argparse.ArgumentParser(
        "pack.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("pack", "unpack"))
    parser.add_argument("parts", type=Path, help="Folder of the parts.")
    parser.add_argument("--work", type=Path, default=WORK, help="Folder of gpu-check.")
    parser.add_argument("--wheels", type=Path, help="Folder of wheels to be packed.")
    options = parser.parse_args(given)
    try:
        if options.verb == "pack":
            count = pack(options.parts, options.work, options.wheels)
            print(f"{options.parts}: {count} parts of at most {PART_BYTES >> 20} MiB, and {INDEX}")
        else:
            names = unpack(options.parts, options.work)
            print(f"{options.work}: {len(names)} files unpacked")
    except (PackError, OSError, zipfile.BadZipFile) as error:
        print(f"pack.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
