"""A pack arrives as it was, or says in one line which part did not."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pack
import pytest
from gpucheck.settings import SCRIPT
from hypothesis import given, settings
from hypothesis import strategies as st


def work_folder(folder: Path, sizes: list[int]) -> dict[str, bytes]:
    """Write a folder that gpu-check worked in; return what of it has to arrive."""
    rng, files = np.random.default_rng(len(sizes)), {"bundle/manifest.json": b"{}"}
    for number, size in enumerate(sizes):
        name = f"graphs/{number}.onnx" if number % 2 else f"bundle/deep/{number}.data"
        files[name] = rng.bytes(size)
    for name, data in {**files, "gpu-none.json": b"{}", "probe/x.plan": b"x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return files


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 40_000), max_size=6), st.integers(700, 30_000))
def test_everything_arrives_in_parts_of_a_bounded_size(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    root = tmp_path_factory.mktemp("pack")
    files = work_folder(root / "work", sizes)
    count = pack.pack(root / "parts", root / "work", limit=limit)
    parts = [p for p in (root / "parts").iterdir() if p.name != pack.INDEX]
    assert len(parts) == count
    assert all(0 < part.stat().st_size <= limit for part in parts)
    assert sorted(pack.unpack(root / "parts", root / "there")) == sorted(files)
    for name, data in files.items():
        assert (root / "there" / name).read_bytes() == data


def wheel(path: Path, files: dict[str, str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def test_packages_of_wheels_can_be_imported_by_gpu_check(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels" / "quokka-1-py3-none-any.whl", {
        "quokka/__init__.py": "TAIL = 1\n", "quokka-1.dist-info/METADATA": "Name: quokka\n",
        "quokka-1.data/purelib/quokka/more.py": "", "quokka-1.data/scripts/q": "",
    })  # fmt: skip
    pack.pack(tmp_path / "parts", tmp_path / "nothing", tmp_path / "wheels")
    pack.unpack(tmp_path / "parts", tmp_path / "work")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT)!r}); from pathlib import Path\n"
        "from gpucheck.settings import add_packages\n"
        f"add_packages(Path({str(tmp_path / 'work')!r}))\n"
        "import quokka.more, subprocess; sys.exit(subprocess.call("
        "[sys.executable, '-c', 'import quokka']))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not list(tmp_path.rglob("scripts"))


def test_a_wheel_writes_nowhere_else(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels" / "bad-1-py3-none-any.whl", {"../../outside.py": ""})
    pack.pack(tmp_path / "parts", tmp_path / "nothing", tmp_path / "wheels")
    with pytest.raises(pack.PackError, match="outside"):
        pack.unpack(tmp_path / "parts", tmp_path / "work" / "deep")
    assert not list(tmp_path.rglob("outside.py"))


def flip(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


DAMAGES = {
    "flipped": flip,
    "short": lambda part: part.write_bytes(part.read_bytes()[:-1]),
    "missing": lambda part: part.unlink(),
    "swapped": lambda part: part.write_bytes(part.with_name("part-0000").read_bytes()),
    "index": lambda part: (part.parent / pack.INDEX).write_text("{"),
    "no index": lambda part: (part.parent / pack.INDEX).unlink(),
    "outside": lambda part: (part.parent / pack.INDEX).write_text(
        json.dumps({"format": 1, "parts": [{"name": "../x", "bytes": 0, "sha256": ""}]})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pack_is_one_line_and_nothing_is_unpacked(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work_folder(tmp_path / "work", [5000, 5000, 5000])
    pack.pack(tmp_path / "parts", tmp_path / "work", limit=4000)
    DAMAGES[damage](tmp_path / "parts" / "part-0002")
    status = pack.main(["unpack", str(tmp_path / "parts"), "--work", str(tmp_path / "there")])
    shown = capsys.readouterr()
    assert (status, shown.out, shown.err.count("\n")) == (1, "", 1)
    named = pack.INDEX if damage in ("index", "no index", "outside") else "part-0002"
    assert named in shown.err
    assert "again" in shown.err or "copy it" in shown.err
    assert not (tmp_path / "there").exists()
