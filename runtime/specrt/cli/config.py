"""`specrt config`: what a build in C or C++ needs of libspecrt, and building that library."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from specrt.errors import BuildError

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
        from specrt.cli.compiling import Wanted, compile_library

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
