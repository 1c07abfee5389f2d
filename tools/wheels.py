"""Builds wheels whose kernels run on every Linux with glibc 2.28, for x86-64 and aarch64.

GCC compiles, because it is the better one for these kernels, and Zig links: it has the symbols of
every glibc, so that none is needed that the machines of the wheel's tag may lack. The standard
library of C++ is inside. The same sources and compilers give the same bytes.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
GLIBC = 2, 28
"""What the wheels of NumPy and ONNX Runtime need too."""

MACHINES = "x86_64", "aarch64"
SYSTEM = re.compile(r"lib(c|m|pthread|dl)\.so\.\d|ld-linux-(x86-64|aarch64)\.so\.\d")
"""Libraries that every such Linux has."""

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(*map(eval, sys.argv[2:])))
"""

# Version 2.32 of glibc brought this flag, which the standard library reads: there may be threads.
SINGLE_THREADED = "char __libc_single_threaded = 0;\n"
EXPORTS = "{ global: specrt_*; RegisterCustomOps; local: *; };\n"


def main() -> int:
    """Build a wheel for each machine that is named, into dist."""
    os.umask(0o022)
    out = ROOT / "dist"
    out.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        sources = unpacked_sources(Path(folder))
        for machine in sys.argv[1:] or MACHINES:
            wheel = build_wheel(sources, machine, out)
            check_library(wheel)
            print(f"{wheel.relative_to(ROOT)} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return 0


def unpacked_sources(folder: Path) -> Path:
    """Make a source archive and unpack it: a wheel has what anyone could build from one."""
    archive = folder / _setuptools(ROOT, "build_sdist", str(folder))
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter=_readable)
    return folder / archive.name.removesuffix(".tar.gz")


def _readable(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo:
    """Give a file the mode that it has where everyone may read it, whoever made the clone."""
    return tarfile.data_filter(member, place).replace(mode=0o755 if member.isdir() else 0o644)


def build_wheel(sources: Path, machine: str, out: Path) -> Path:
    """Build the wheel of a machine; return its path."""
    compiler = f"{machine}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        sys.exit(f"{compiler} is missing; Debian: `apt install {package_of(machine)}`")
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    fresh = sources.with_name(machine)  # what another wheel left is in none
    shutil.copytree(sources, fresh)
    environment = {
        "CXX": compiler,
        "LDCXXSHARED": " ".join(linker(machine, compiler, fresh)),
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", "315532800"),  # 1980, as zip has
    }
    options = {"--build-option": ["--plat-name", tag]}
    return out / _setuptools(fresh, "build_wheel", str(out), options, **environment)


def package_of(machine: str) -> str:
    """Return Debian's package of a machine's compiler."""
    return f"g++-{machine.replace('_', '-')}-linux-gnu"


def linker(machine: str, compiler: str, folder: Path) -> list[str]:
    """Return the command that links against the tag's glibc, with the library of C++ inside."""
    flag, exports = folder / "single_threaded.c", folder / "exports.map"
    flag.write_text(SINGLE_THREADED)
    exports.write_text(EXPORTS)
    # GCC's own, where the processor is told apart when the library is loaded, before Zig's.
    names = ("libstdc++.a", "libgcc.a")
    inside = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in names
    ]
    zig = Path(importlib.import_module("ziglang").__file__ or "").with_name("zig")
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    return [
        f"{zig} cc -target {target} -shared -s {' '.join(inside)} -lunwind -lm -lpthread",
        # Zig adds no destructors for where a library is unloaded: this one never is.
        f"{flag.name} -Wl,-z,nodelete -Wl,--gc-sections -Wl,--version-script={exports.name}",
    ]


def check_library(wheel: Path) -> None:
    """Remove a wheel whose library needs what a machine of its tag may lack, and say so."""
    with ZipFile(wheel) as archive, TemporaryDirectory() as folder:
        library = archive.extract("specrt/libspecrt_kernels.so", folder)
        found = subprocess.check_output(["readelf", "-dVW", library], text=True)
        listed = subprocess.check_output(["nm", "-Du", library], text=True)
    versions = {(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", found)}
    faults = [f"GLIBC_{a}.{b}" for a, b in sorted(versions) if (a, b) > GLIBC]
    faults += [
        name for name in re.findall(r"NEEDED.*\[(.*)\]", found) if not SYSTEM.fullmatch(name)
    ]
    # A symbol without a version is in none of the libraries that it was linked with.
    faults += [name for name in re.findall(r"^ +U (.*)$", listed, re.MULTILINE) if "@" not in name]
    if faults:
        wheel.unlink()
        glibc = f"glibc {GLIBC[0]}.{GLIBC[1]}"
        sys.exit(f"{wheel.name} needs {', '.join(faults)}; expected nothing newer than {glibc}")


def _setuptools(folder: Path, hook: str, *arguments: object, **environment: str) -> str:
    """Call a hook of setuptools in a folder; return the name of the file that it made."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, hook, *map(repr, arguments)],
        cwd=folder, env={**os.environ, **environment}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    # Without a library a wheel would be made all the same.
    if done.returncode or "were not compiled" in done.stderr:
        sys.exit(done.stdout + done.stderr)
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
