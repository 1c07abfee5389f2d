"""`specrt config`: what a build in C or C++ needs of libspecrt, and building that library."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import specrt
from specrt.errors import BuildError

SHARE = Path("share", "specrt", "cpp")
"""Where an installed package has the sources, under its prefix."""

LAST = 15
"""Lines of a failed build that are shown."""


@dataclass(frozen=True)
class Wanted:
    """Which library to compile, and where it goes."""

    prefix: Path
    native: bool = False
    onnxruntime: Path | None = None
    """A folder or a library; that of the installed wheel when None."""
    tokenizer: Path | None = None
    """A library; that of the installed wheel of ONNX Runtime GenAI, if there is one, when None."""


def compile_library(wanted: Wanted) -> None:
    """Compile the library aside, and install it once that succeeded.

    Raises: BuildError for a tool that is not there, a build that fails, and a place that cannot be
        written to; what is installed already stays.
    """
    cmake = _tool("cmake", "pip install cmake")
    _compiler()
    sources = _sources()
    with TemporaryDirectory(prefix="specrt-") as folder:
        made, stage = Path(folder, "build"), Path(folder, "stage")
        definitions = [f"-D{name}={value}" for name, value in _definitions(wanted).items()]
        _run("configuring", [cmake, "-S", str(sources), "-B", str(made), *definitions])
        cores = str(len(os.sched_getaffinity(0)))
        _run("compiling", [cmake, "--build", str(made), "--config", "Release", "-j", cores])
        _run("installing", [cmake, "--install", str(made)], {"DESTDIR": str(stage)})
        _place(stage / wanted.prefix.relative_to("/"), wanted.prefix)


def _definitions(wanted: Wanted) -> dict[str, str]:
    """Return what CMake is told."""
    told = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_PREFIX": str(wanted.prefix),
        "CMAKE_INSTALL_LIBDIR": "lib",
        "SPECRT_VERSION": specrt.__version__,
        "SPECRT_IMPLEMENTATION": "native" if wanted.native else "hosted",
    }
    if not wanted.native:
        return {**told, "SPECRT_PYTHON": sys.executable}
    library = wanted.onnxruntime or _of_wheel("onnxruntime", "capi/libonnxruntime.so*")
    if library is None:
        raise BuildError(
            "there is no libonnxruntime in this Python; name one with --onnxruntime, or install "
            "it with `pip install onnxruntime`"
        )
    kind = "ROOT" if library.is_dir() else "LIBRARY"
    told[f"SPECRT_ONNXRUNTIME_{kind}"] = str(library.absolute())
    tokenizer = wanted.tokenizer or _of_wheel("onnxruntime_genai", "libonnxruntime-genai.so")
    if tokenizer is None:
        print(
            "no tokenizer library: prompts will have to be token ids. For texts `pip install "
            "--no-deps onnxruntime-genai` and build again, or name a library with --tokenizer",
            file=sys.stderr,
        )
    else:
        told["SPECRT_TOKENIZER_LIBRARY"] = str(tokenizer.absolute())
    return told


def _of_wheel(package: str, pattern: str) -> Path | None:
    """Return a library of an installed package, which is not imported."""
    spec = find_spec(package)
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return next((lib for folder in folders for lib in sorted(folder.glob(pattern))), None)


def _tool(name: str, remedy: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is not on the path, and building needs it; `{remedy}`")
    return found


def _compiler() -> None:
    """Refuse to begin where there is nothing to compile with.

    CMake would say so too, in twenty lines.
    """
    for tools, asked, packages in (
        (("c++", "g++", "clang++"), "CXX", "g++"),
        (("make", "gmake", "ninja"), "CMAKE_GENERATOR", "make"),
    ):
        if not os.environ.get(asked) and not any(map(shutil.which, tools)):
            raise BuildError(
                f"none of {', '.join(tools)} is on the path, and building needs one; install it, "
                f"such as with `apt install {packages}`"
            )


def _sources() -> Path:
    """Return the C++ sources: of the repository in an editable install, else of the wheel."""
    places = [Path(specrt.__file__).parents[1] / "cpp", Path(sys.prefix) / SHARE]
    for place in [*places, *_recorded()]:
        if (place / "CMakeLists.txt").is_file():
            return place
    raise BuildError(
        f"the C++ sources are not in {Path(sys.prefix) / SHARE}; install specrt again with `pip "
        "install --force-reinstall --no-deps specrt`"
    )


def _recorded() -> list[Path]:
    """Return where the package was installed to, if not beside this Python."""
    from importlib import metadata  # slow to import

    try:
        files = metadata.files("specrt") or []
    except metadata.PackageNotFoundError:
        return []
    ends = (SHARE / "CMakeLists.txt").as_posix()
    return [Path(str(file.locate())).parent for file in files if file.as_posix().endswith(ends)]


def _run(doing: str, command: Sequence[str], more: dict[str, str] | None = None) -> None:
    print(f"{doing} libspecrt", file=sys.stderr)
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **(more or {})}, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        print("\n".join(done.stdout.rstrip().split("\n")[-LAST:]), file=sys.stderr)
        raise BuildError(
            f"{doing} libspecrt failed with status {done.returncode}, as shown above; nothing was "
            "installed"
        )


def _place(stage: Path, prefix: Path) -> None:
    """Move files to where they belong: all beside their places first, then each into its own."""
    files = [path for path in sorted(stage.rglob("*")) if path.is_symlink() or path.is_file()]
    pairs = [(path, prefix / path.relative_to(stage)) for path in files]
    beside = [(place.with_name(f".{place.name}.new"), place) for _, place in pairs]
    try:
        for (path, place), (new, _) in zip(pairs, beside, strict=True):
            place.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            shutil.copy2(path, new, follow_symlinks=False)
        for new, place in beside:
            new.replace(place)
    except OSError as error:
        raise BuildError(
            f"{prefix} cannot be written to ({error.strerror}); name another folder with --to"
        ) from error
    finally:
        for new, _ in beside:
            with suppress(OSError):
                new.unlink()


LIBRARY = "libspecrt.so"


@click.command("config")
@click.option("--cflags", is_flag=True, help="Print what the compiler needs.")
@click.option("--libs", is_flag=True, help="Print what the linker needs.")
@click.option("--cmake-dir", is_flag=True, help="Print the folder that find_package needs.")
@click.option("--prefix", is_flag=True, help="Print where the library is installed.")
@click.option("--version", is_flag=True, help="Print its release and implementation.")
@click.option("--build", is_flag=True, help="Compile the library and install it.")
@click.option(
    "--to", "place", type=click.Path(path_type=Path, file_okay=False),
    help="Where the library goes, or is; default: beside this Python.",
)  # fmt: skip
@click.option("--native", is_flag=True, help="Build the one that needs no Python.")
@click.option(
    "--onnxruntime", type=click.Path(path_type=Path, exists=True),
    help="ONNX Runtime for --native: its folder or library; default: that of the wheel.",
)  # fmt: skip
@click.option(
    "--tokenizer", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Library that reads tokenizer.json for --native; default: that of the wheel "
    "onnxruntime-genai. Without one prompts are token ids.",
)  # fmt: skip
def command(
    cflags: bool, libs: bool, cmake_dir: bool, prefix: bool, version: bool, build: bool,
    place: Path | None, native: bool, onnxruntime: Path | None, tokenizer: Path | None,
) -> None:  # fmt: skip
    """Print what a build in C or C++ needs of libspecrt, or --build that library."""
    if not native and (onnxruntime or tokenizer):
        raise click.UsageError("--onnxruntime and --tokenizer belong to --native")
    if native and not build:
        raise click.UsageError("--native says what to --build; ask for both")
    asked = any((cflags, libs, cmake_dir, prefix, version))
    if not build and not asked:
        raise click.UsageError("nothing was asked; expected --cflags, --libs, --build or others")
    where = Path(sys.prefix) if place is None else place.absolute()
    if build:
        compile_library(Wanted(where, native, onnxruntime, tokenizer))
    if not asked:
        flags = f"specrt config{_to(where)} --cflags --libs"
        kind = "native" if native else "hosted"
        print(f"installed {_find(where).library}, {kind}; compile with `{flags}`")
        return
    found = _find(where)
    told = (
        (version, found.version() if version else ""),
        (prefix, _quoted(found.prefix)),
        (cmake_dir, _quoted(found.folder / "cmake" / "specrt")),
        (cflags, f"-I{_quoted(found.prefix / 'include')}"),
        (libs, f"-L{_quoted(found.folder)} -Wl,-rpath,{_quoted(found.folder)} -lspecrt"),
    )
    print(" ".join(text for wanted, text in told if wanted))


@dataclass(frozen=True)
class Installed:
    """A library that was built, and the folder it is in."""

    prefix: Path
    folder: Path

    @property
    def library(self) -> Path:
        """What programs link."""
        return self.folder / LIBRARY

    def version(self) -> str:
        """Return release and implementation, as `specrt_version` begins."""
        told = (self.folder / "pkgconfig" / "specrt.pc").read_text(encoding="utf-8")
        lines = dict(line.partition(mark)[::2] for mark in ("=", ": ") for line in told.split("\n"))
        return f"{lines['Version']} {lines['implementation']}"


def _find(prefix: Path) -> Installed:
    for name in ("lib", "lib64"):
        if (prefix / name / LIBRARY).exists():
            return Installed(prefix, prefix / name)
    raise BuildError(
        f"there is no {LIBRARY} in {prefix / 'lib'}; build it with "
        f"`specrt config --build{_to(prefix)}`"
    )


def _to(prefix: Path) -> str:
    return "" if prefix == Path(sys.prefix) else f" --to {_quoted(prefix)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
