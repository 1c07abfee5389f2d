"""Carry files to a device without network, in parts, and unpack them there; wheels need no pip.

    python benchmarks/gpu/pack.py pack SOURCE... --out FOLDER [--mib 60]
    python benchmarks/gpu/pack.py unpack PART... [--into FOLDER]

A source is a file or a folder, and keeps its name. Parts may come in any order, any number of times
and at different times; a damaged one is refused, and leaves what was there. Once all have come the
files are put in place, and wheels are unpacked into FOLDER/site, where `python benchmarks/gpu`
finds them. Only Python's own library is used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

WORK = Path(__file__).resolve().parents[2] / "engines" / "build" / "gpu-check"
SITE, STAGE, STATE = "site", ".unpack", "state.json"
MAGIC = b"specrt-part 1 "
MOST_MIB = 60
MIB, CHUNK = 1 << 20, 1 << 20


class PackError(Exception):
    """What is wrong, in one line."""


def pack(sources: Sequence[Path], out: Path, part_bytes: int) -> list[Path]:
    """Write parts of at most so many bytes.

    A part is a line with the hash of what follows, a line of JSON, and the bytes of its pieces.
    Raises: PackError.
    """
    files = dict(sorted(_files(sources)))
    _check_wheels([path for path in files.values() if path.suffix == ".whl"])
    if out.exists() and any(out.iterdir()):
        raise PackError(f"{out} is not empty; name a new folder with --out")
    sizes = {name: path.stat().st_size for name, path in files.items()}
    listed = json.dumps(sizes)
    name = hashlib.sha256(listed.encode())
    for path in files.values():
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                name.update(chunk)
    pieces = _pieces(sizes, part_bytes - 2 * len(listed) - 256 * len(sizes) - 512)
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for number, part in enumerate(pieces, 1):
        header = {
            "pack": name.hexdigest(), "part": number, "parts": len(pieces),
            "sizes": sizes, "pieces": part,
        }  # fmt: skip
        body = json.dumps(header).encode() + b"\n" + b"".join(_read(files, part))
        made.append(out / f"part-{number:02}-of-{len(pieces):02}")
        made[-1].write_bytes(MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    return made


def _files(sources: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the name of each file on the device, and the file."""
    for source in (source.resolve() for source in sources):
        if not source.exists():
            raise PackError(f"{source} is not there")
        found = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in found:
            if path.is_file():
                yield path.relative_to(source.parent).as_posix(), path


def _check_wheels(wheels: Sequence[Path]) -> None:
    """Refuse wheels that hold different files of one name: which is used would be chance."""
    seen: dict[str, tuple[int, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                crc, other = seen.setdefault(entry.filename, (entry.CRC, wheel.name))
                if crc != entry.CRC:
                    raise PackError(
                        f"{other} and {wheel.name} both hold {entry.filename}; leave one out"
                    )


def _pieces(sizes: dict[str, int], room: int) -> list[list[tuple[str, int, int]]]:
    """Return for each part which (file, offset, length) it holds."""
    if room < CHUNK // 16:
        raise PackError("parts are too small for so many files; give more --mib")
    parts: list[list[tuple[str, int, int]]] = [[]]
    left = room
    for name, size in sizes.items():
        at = 0
        while at < size or not size:
            if not left:
                parts.append([])
                left = room
            length = min(size - at, left)
            parts[-1].append((name, at, length))
            at, left = at + length, left - length
            if not size:
                break
    return parts


def _read(files: dict[str, Path], pieces: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    for name, at, length in pieces:
        with files[name].open("rb") as file:
            file.seek(at)
            yield file.read(length)


def unpack(parts: Sequence[Path], into: Path) -> list[int]:
    """Take parts in; return the numbers of those that are still missing.

    Raises: PackError.
    """
    missing: list[int] = []
    for path in parts:
        header, body = _open(path)
        done = into / f"{STAGE}-{header['pack'][:16]}"
        if done.exists():
            continue
        _check_python([name for name in header["sizes"] if name.endswith(".whl")])
        missing = _take(header, body, into / STAGE)
        if not missing:
            _finish(header["sizes"], into)
            done.touch()
            shutil.rmtree(into / STAGE)
    return missing


def _open(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return what a part says and holds, if it is whole."""
    data = path.read_bytes()
    end = data.find(b"\n")
    body = memoryview(data)[end + 1 :]
    digest = hashlib.sha256(body).hexdigest().encode()
    if not data.startswith(MAGIC) or data[len(MAGIC) : end] != digest:
        raise PackError(f"{path} is damaged, or no part of a pack; carry it again")
    end = data.index(b"\n", end + 1) - end - 1
    header = json.loads(bytes(body[:end]))
    for name in header["sizes"]:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise PackError(f"{path} would write to {name}, outside of its folder")
    return header, body[end + 1 :]


def _check_python(wheels: Sequence[str]) -> None:
    """Refuse wheels of another Python at once, not when all parts are there."""
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for wheel in wheels:
        python, abi, _ = PurePosixPath(wheel).stem.split("-")[-3:]
        if here not in python.split(".") and "py3" not in python and abi != "abi3":
            raise PackError(f"{wheel} is not for this Python ({here}); pack the wheels for it")


def _take(header: dict[str, Any], body: memoryview, stage: Path) -> list[int]:
    """Write the pieces of a part to where the files grow; return which parts are missing."""
    state_file = stage / STATE
    state = json.loads(state_file.read_text()) if state_file.exists() else {}
    if state.get("pack") != header["pack"]:  # of another pack, which is given up
        shutil.rmtree(stage, ignore_errors=True)
        state = {"pack": header["pack"], "taken": []}
    pieces = [] if header["part"] in state["taken"] else header["pieces"]
    for name, at, length in pieces:
        target = stage / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("r+b" if target.exists() else "w+b") as file:
            file.seek(at)
            file.write(body[:length])
        body = body[length:]
    state["taken"] = sorted({*state["taken"], header["part"]})
    aside = stage / f"{STATE}.part"
    aside.write_text(json.dumps(state))
    aside.replace(state_file)
    return [n for n in range(1, header["parts"] + 1) if n not in state["taken"]]


def _finish(sizes: dict[str, int], into: Path) -> None:
    """Put the files in place, and the contents of wheels into the folder of packages."""
    for name in sizes:
        staged, target = into / STAGE / name, into / name
        if name.endswith(".whl"):
            _install(staged, into / SITE)
        elif staged.exists():  # else it is in place since this was cut off
            target.parent.mkdir(parents=True, exist_ok=True)
            staged.replace(target)


def _install(wheel: Path, site: Path) -> None:
    """Unpack a wheel; what it keeps apart for pip goes where pip would put it, scripts nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for data in site.glob("*.data"):
        for part in ("purelib", "platlib"):
            if (data / part).is_dir():
                shutil.copytree(data / part, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def _mib(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MOST_MIB:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 to {MOST_MIB}")
    return int(text)


def _arguments() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = made.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    packing.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--mib", type=_mib, default=MOST_MIB, metavar="N",
        help=f"Most of a part, up to {MOST_MIB}.  [default: %(default)s]")  # fmt: skip
    unpacking = verbs.add_parser("unpack")
    unpacking.add_argument("parts", nargs="+", type=Path, metavar="PART")
    unpacking.add_argument("--into", type=Path, default=WORK, help="[default: %(default)s]")
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Pack or unpack; return 1 for what is refused."""
    options = _arguments().parse_args(given)
    try:
        if options.verb == "pack":
            made = pack(options.sources, options.out, options.mib * MIB)
            print(f"{len(made)} parts in {options.out}")
        elif missing := unpack(options.parts, options.into):
            print(f"to come: part {', '.join(map(str, missing))}")
        else:
            print(f"complete, in {options.into}")
    except (PackError, OSError, zipfile.BadZipFile) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
