"""Editable installs put both roots on the path.

setuptools finds packages of two roots by a hook at the end of the import system. A clone called
`specrt` beside a script is then found before it, as an empty namespace package; a package on the
path comes before any such folder.
"""

from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

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


setup(cmdclass={"editable_wheel": PathEntries})
