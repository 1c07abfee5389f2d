"""`specrt config`: compiler flags of programs that use libspecrt, and building that library."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
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
from specrt.doctor import BUILD_TOOLS
from specrt.errors import BuildError

SHARE = Path("share", "specrt", "cpp")
"""Where an installed package has the sources, under its prefix."""

LAST = 15
"""Lines of a failed build that are shown."""


@dataclass(frozen=True)
class LibraryOptions:
    """The library to compile, and where to install it."""

    prefix: Path
    native: bool = False
    static: bool = False
    onnxruntime: Path | None = None
    """A folder or a library; the installed wheel's when None."""
    tokenizer: Path | None = None
    """A library; when None the installed wheel's of ONNX Runtime GenAI, if there is one."""


def compile_library(options: LibraryOptions) -> None:
    """Compile the library aside, then install it.

    Raises: BuildError for a missing tool, a failed build, and a place that cannot be written to; an
        installed library stays as it is.
    """
    _check_tools()
    sources = _sources()
    with TemporaryDirectory(prefix="specrt-") as folder:
        build, stage = Path(folder, "build"), Path(folder, "stage")
        definitions = [f"-D{name}={value}" for name, value in _definitions(options).items()]
        _run("configuring", ["cmake", "-S", str(sources), "-B", str(build), *definitions])
        cores = str(len(os.sched_getaffinity(0)))
        _run("compiling", ["cmake", "--build", str(build), "--config", "Release", "-j", cores])
        _run("installing", ["cmake", "--install", str(build)], {"DESTDIR": str(stage)})
        _place(stage / options.prefix.relative_to("/"), options.prefix)


def _definitions(options: LibraryOptions) -> dict[str, str]:
    """Return the variables of the CMake build."""
    variables = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_INSTALL_PREFIX": str(options.prefix),
        "CMAKE_INSTALL_LIBDIR": "lib",
        "BUILD_SHARED_LIBS": "OFF" if options.static else "ON",
        "SPECRT_IMPLEMENTATION": "native" if options.native else "hosted",
    }
    if not options.native:
        return {**variables, "SPECRT_PYTHON": sys.executable}
    library = options.onnxruntime or _of_wheel("onnxruntime", "capi/libonnxruntime.so*")
    if library is None:
        raise BuildError(
            "there is no libonnxruntime in this Python; name one with --onnxruntime, or install "
            "it with `pip install onnxruntime`"
        )
    kind = "ROOT" if library.is_dir() else "LIBRARY"
    variables[f"SPECRT_ONNXRUNTIME_{kind}"] = str(library.absolute())
    tokenizer = options.tokenizer or _of_wheel("onnxruntime_genai", "libonnxruntime-genai.so")
    if tokenizer is None:
        print(
            "no tokenizer library, so prompts must be token ids; for texts `pip install --no-deps "
            "onnxruntime-genai` and build again, or name a library with --tokenizer",
            file=sys.stderr,
        )
    else:
        variables["SPECRT_TOKENIZER_LIBRARY"] = str(tokenizer.absolute())
    return variables


def _of_wheel(package: str, pattern: str) -> Path | None:
    """Return a library of an installed package, without importing it."""
    spec = find_spec(package)
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return next((lib for folder in folders for lib in sorted(folder.glob(pattern))), None)


def _check_tools() -> None:
    """Refuse to begin without all that building takes, as CMake would in twenty lines.

    Raises: BuildError naming all that is missing.
    """
    missing = [tool for tool in BUILD_TOOLS if tool.find() is None]
    if missing:
        wanted = " and ".join(f"one of {', '.join(tool.programs)}" for tool in missing)
        remedies = ", ".join(f"`{tool.remedy}`" for tool in missing)
        raise BuildError(
            f"building needs {wanted.replace('one of cmake', 'cmake')}, not on the path: {remedies}"
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
    """Return where the package metadata places the installed sources."""
    from importlib import metadata  # slow to import

    try:
        files = metadata.files("specrt") or []
    except metadata.PackageNotFoundError:
        return []
    ends = (SHARE / "CMakeLists.txt").as_posix()
    return [Path(str(file.locate())).parent for file in files if file.as_posix().endswith(ends)]


def _run(stage: str, command: Sequence[str], more: dict[str, str] | None = None) -> None:
    print(f"{stage} libspecrt", file=sys.stderr)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **(more or {})}, encoding="utf-8", errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate()
        except BaseException:  # with the compilers that it started
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        print("\n".join(output.rstrip().split("\n")[-LAST:]), file=sys.stderr)
        raise BuildError(
            f"{stage} libspecrt failed with status {process.returncode}, as shown above; nothing "
            "was installed"
        )


LIBRARY, STATIC = "libspecrt.so", "libspecrt.a"
_OTHER = {LIBRARY: STATIC, STATIC: LIBRARY}

MANIFEST = Path("lib", "cmake", "specrt", "installed.txt")
"""Under a prefix: every file that a build has put there."""


def _place(stage: Path, prefix: Path) -> None:
    """Copy all files next to their places first, then rename each into its own."""
    files = [path for path in sorted(stage.rglob("*")) if path.is_symlink() or path.is_file()]
    known = {str(path.relative_to(stage)) for path in files} | {*_listed(prefix), str(MANIFEST)}
    (stage / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
    (stage / MANIFEST).write_text("".join(f"{name}\n" for name in sorted(known)), "utf-8")
    files.append(stage / MANIFEST)
    pairs = [(path, prefix / path.relative_to(stage)) for path in files]
    beside = [(place.with_name(f".{place.name}.new"), place) for _, place in pairs]
    try:
        for (path, place), (new, _) in zip(pairs, beside, strict=True):
            place.parent.mkdir(parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            shutil.copy2(path, new, follow_symlinks=False)
        for new, place in beside:
            new.replace(place)
        for _, place in pairs:  # linkers take the shared one of two
            if place.name in _OTHER:
                place.with_name(_OTHER[place.name]).unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(
            f"{prefix} cannot be written to ({error.strerror}); name another folder with --to"
        ) from error
    finally:
        for new, _ in beside:
            with suppress(OSError):
                new.unlink()


def _listed(prefix: Path) -> list[str]:
    try:
        return (prefix / MANIFEST).read_text("utf-8").splitlines()
    except OSError:  # the place is looked at when it is written to
        return []


def remove_library(prefix: Path) -> None:
    """Remove every file that builds have put under a prefix, and folders that are empty then.

    Raises: BuildError where none has, or a file cannot be removed.
    """
    names = _listed(prefix)
    if not names:
        raise BuildError(
            f"there is no {prefix / MANIFEST}; name the folder that --build installed to with --to"
        )
    try:
        for name in names:
            (prefix / name).unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(f"{error.filename} cannot be removed ({error.strerror})") from error
    for folder in sorted({*(prefix / name for name in names)}, reverse=True):
        for parent in folder.relative_to(prefix).parents[:-1]:
            with suppress(OSError):  # it has files of others
                (prefix / parent).rmdir()


_STATIC_FLAGS = " -lstdc++ -lm -lpthread -ldl"
"""What a program needs besides that is linked with a static library."""


@click.command("config")
@click.option("--cflags", is_flag=True, help="Print the flags of the compiler.")
@click.option("--libs", is_flag=True, help="Print the flags of the linker.")
@click.option("--cmake-dir", is_flag=True, help="Print the folder for find_package.")
@click.option("--prefix", is_flag=True, help="Print the prefix of the installed library.")
@click.option("--version", is_flag=True, help="Print its release and implementation.")
@click.option("--build", is_flag=True, help="Compile the library and install it.")
@click.option(
    "--to", "place", type=click.Path(path_type=Path, file_okay=False),
    help="Prefix of the library.  [default: that of this Python]",
)  # fmt: skip
@click.option("--uninstall", is_flag=True, help="Remove what --build has installed.")
@click.option("--native", is_flag=True, help="Build the library that needs no Python.")
@click.option("--static", is_flag=True, help="Build a static library.")
@click.option(
    "--onnxruntime", type=click.Path(path_type=Path, exists=True),
    help="ONNX Runtime for --native: its folder or library.  [default: that of the wheel]",
)  # fmt: skip
@click.option(
    "--tokenizer", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Library that reads tokenizer.json for --native; without one prompts are token ids.  "
    "[default: that of the wheel onnxruntime-genai]",
)  # fmt: skip
def command(
    cflags: bool, libs: bool, cmake_dir: bool, prefix: bool, version: bool, build: bool,
    place: Path | None, uninstall: bool, native: bool, static: bool, onnxruntime: Path | None,
    tokenizer: Path | None,
) -> None:  # fmt: skip
    """Print the flags to compile C or C++ programs with libspecrt, or --build that library."""
    if not native and (onnxruntime or tokenizer):
        raise click.UsageError("--onnxruntime and --tokenizer belong to --native")
    if (native or static) and not build:
        name = "--native" if native else "--static"
        raise click.UsageError(f"{name} chooses what to --build; give both")
    query = any((cflags, libs, cmake_dir, prefix, version))
    if not build and not query and not uninstall:
        raise click.UsageError(
            "no option; expected --cflags, --libs, --cmake-dir, --prefix, --version, --build or "
            "--uninstall"
        )
    if uninstall and (build or query):
        raise click.UsageError("--uninstall goes alone, or with --to; leave the others out")
    where = Path(sys.prefix) if place is None else place.absolute()
    if uninstall:
        remove_library(where)
        print(f"removed libspecrt from {where}")
        return
    if build:
        compile_library(LibraryOptions(where, native, static, onnxruntime, tokenizer))
    if not query:
        flags = f"specrt config{_to(where)} --cflags --libs"
        kind = "native" if native else "hosted"
        print(f"installed {_find(where).library}, {kind}; compile with `{flags}`")
        return
    library = _find(where)
    answers = (
        (version, library.version() if version else ""),
        (prefix, _quoted(library.prefix)),
        (cmake_dir, _quoted(library.folder / "cmake" / "specrt")),
        (cflags, f"-I{_quoted(library.prefix / 'include')}"),
        (libs, library.link_flags()),
    )
    print(" ".join(text for wanted, text in answers if wanted))


@dataclass(frozen=True)
class Installed:
    """An installed library, as programs link it."""

    prefix: Path
    library: Path

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.library.parent

    def link_flags(self) -> str:
        """Return the flags of the linker."""
        folder, more = _quoted(self.folder), _STATIC_FLAGS * (self.library.name == STATIC)
        return f"-L{folder} -Wl,-rpath,{folder} -lspecrt{more}"

    def version(self) -> str:
        """Return release and implementation, as `specrt_version` begins."""
        text = (self.folder / "pkgconfig" / "specrt.pc").read_text(encoding="utf-8")
        lines = dict(line.partition(mark)[::2] for mark in ("=", ": ") for line in text.split("\n"))
        return f"{lines['Version']} {lines['implementation']}"


def _find(prefix: Path) -> Installed:
    for name in (LIBRARY, STATIC):
        for folder in ("lib", "lib64"):
            if (prefix / folder / name).exists():
                return Installed(prefix, prefix / folder / name)
    raise BuildError(
        f"there is no {LIBRARY} in {prefix / 'lib'}; build it with "
        f"`specrt config --build{_to(prefix)}`"
    )


def _to(prefix: Path) -> str:
    return "" if prefix == Path(sys.prefix) else f" --to {_quoted(prefix)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
