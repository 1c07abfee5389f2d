"""Compiles CPU kernels and gamma policy, and lets editable installs put both roots on the path.

Without a C++17 compiler the package is installed without kernels.

setuptools finds packages of two roots by a hook at the end of the import system. A clone called
`specrt` next to a script is then found before it, as an empty namespace package; a package on the
path comes before any such folder.
"""

from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from os import environ, getpid
from pathlib import Path
from shlex import split
from shutil import copyfile, which
from subprocess import CalledProcessError, run
from zipfile import ZipFile

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CompileError

ROOTS = "runtime", "export"
NAME = "specrt_roots.pth"


class PathEntries(editable_wheel):
    """Adds a file of path entries to the wheel of an editable install."""

    def run(self) -> None:
        """Build the wheel, and add the file."""
        super().run()
        text = "".join(f"{Path(root).resolve()}\n" for root in ROOTS).encode()
        for wheel in Path(self.dist_dir).glob("*.whl"):
            add_file(wheel, NAME, text)


def add_file(wheel: Path, name: str, data: bytes) -> None:
    """Write a wheel anew with one more file, and its line in the record."""
    with ZipFile(wheel) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    digest = urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()
    line = f"{name},sha256={digest},{len(data)}\n".encode()
    with ZipFile(wheel, "w") as archive:
        for info, content in entries:
            record = info.filename.endswith(".dist-info/RECORD")
            archive.writestr(info, line + content if record else content)
        archive.writestr(name, data)


SOURCES = Path("runtime/cpp/src")
FLAGS = SOURCES / "kernels" / "compile_flags.txt"
"""Those of the kernels, which CMake reads too: every compiler gives the same bits."""

COMPILER = split(environ.get("CXX", "")) or [next(filter(which, ("c++", "g++", "clang++")), "c++")]
LINKER = split(environ.get("LDCXXSHARED", "")) or [*COMPILER, "-shared", "-pthread"]


def compiled(suffix: str) -> list[str]:
    """Return the files of the library that end so."""
    folders = (SOURCES / "kernels", SOURCES / "speculation")
    return sorted(str(path) for folder in folders for path in folder.glob(f"*{suffix}"))


KERNELS = Extension(
    "specrt.libspecrt_kernels",
    compiled(".cpp"),
    depends=[str(FLAGS), *compiled(".hpp")],
    language="c++",
    optional=True,
)


class SharedLibrary(build_ext):
    """Compiles a plain shared library: no Python module, the same for and by every Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the name without what tells Pythons apart."""
        return "/".join(fullname.split(".")) + ".so"

    def build_extension(self, extension: Extension) -> None:
        """Compile all sources at once, and link them."""
        made = Path(self.get_ext_fullpath(extension.name))
        for folder in (made.parent, Path(self.build_temp)):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            with ThreadPoolExecutor() as pool:
                objects = [*pool.map(self.compile_source, extension.sources)]
            run([*LINKER, *objects, "-o", str(made)], check=True)
        except (OSError, CalledProcessError) as error:
            raise CompileError(f"the CPU kernels were not compiled: {error}") from error

    def compile_source(self, source: str) -> str:
        """Compile a source into an object; return its path."""
        made = str(Path(self.build_temp, source.replace("/", "-")).with_suffix(".o"))
        flags = [*FLAGS.read_text().split(), "-fPIC", "-fvisibility=hidden", "-pthread"]
        run([*COMPILER, *flags, f"-I{SOURCES}", "-c", source, "-o", made], check=True)
        return made

    def copy_extensions_to_source(self) -> None:
        """Put the library next to the package, by a new name first: processes may have mapped it.

        One of sources of before does not stay where these cannot be compiled.
        """
        build_py = self.get_finalized_command("build_py")
        for extension in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(extension.name))
            there = Path(build_py.get_package_dir(extension.name.rpartition(".")[0])) / built.name
            if built.is_file():
                aside = there.with_suffix(f".{getpid()}")
                copyfile(built, aside)
                aside.replace(there)
            else:
                there.unlink(missing_ok=True)


class AnyPython(bdist_wheel):
    """Names wheels by their platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of every Python 3."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[KERNELS],
    cmdclass={"bdist_wheel": AnyPython, "build_ext": SharedLibrary, "editable_wheel": PathEntries},
)
