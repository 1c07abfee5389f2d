"""Files reach a device in parts, whatever happens to them on the way."""

from __future__ import annotations

import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pack
import pytest
from gpucheck.settings import environment

MIB = 1 << 20
HERE = f"cp{sys.version_info[0]}{sys.version_info[1]}"


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """A folder of graphs, one of wheels, and a file larger than a part."""
    (tmp_path / "graphs" / "deep").mkdir(parents=True)
    (tmp_path / "graphs" / "deep" / "1B.onnx").write_bytes(b"graph")
    (tmp_path / "graphs" / "empty").touch()
    wheels = tmp_path / "wheels"
    wheel(
        wheels,
        f"carried-1.0-{HERE}-{HERE}-linux_x86_64",
        {"carried/__init__.py": "answer = 42", "nvidia/cu13/lib/libcublas.so": ""},
    )
    wheel(wheels, "apart-1.0-py3-none-any", {
        "apart-1.0.data/purelib/apart.py": "import carried", "apart-1.0.data/scripts/run": "#!",
    })  # fmt: skip
    (tmp_path / "plan").write_bytes(random.Random(0).randbytes(3 * MIB))
    return [tmp_path / "graphs", wheels, tmp_path / "plan"]


def test_parts_arrive_in_any_order_and_what_they_hold_runs(
    sources: list[Path], tmp_path: Path
) -> None:
    parts = pack.pack(sources, tmp_path / "parts", MIB)
    assert len(parts) == 4
    assert max(part.stat().st_size for part in parts) <= MIB
    into, shuffled = tmp_path / "device", random.Random(1).sample(parts, len(parts))
    for number, part in enumerate([*shuffled[:2], *shuffled], 1):  # two of them twice
        missing = pack.unpack([part], into)
        assert len(missing) == (4 - number if number < 3 else min(2, 6 - number))
        assert (into / "plan").exists() == (not missing), "nothing half-made is in place"
    assert pack.unpack(parts[:1], into) == [], "it is complete already"
    assert (into / "plan").read_bytes() == sources[2].read_bytes()
    assert (into / "graphs" / "deep" / "1B.onnx").read_bytes() == b"graph"
    assert (into / "graphs" / "empty").exists()
    code = "import apart; print(apart.carried.answer)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(into), capture_output=True, check=True
    )
    assert done.stdout == b"42\n"
    assert environment(into)["LD_LIBRARY_PATH"].startswith(f"{into}/site/nvidia/cu13/lib")


@pytest.mark.parametrize("place", [3, 70, 100, -1])
def test_a_damaged_part_is_refused_and_the_rest_stays(
    sources: list[Path], tmp_path: Path, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, into = pack.pack(sources, tmp_path / "parts", MIB), tmp_path / "device"
    pack.unpack(parts[:2], into)
    whole = parts[2].read_bytes()
    broken = bytearray(whole)
    broken[place] ^= 1
    for damaged in (bytes(broken), whole[:-1], b""):
        parts[2].write_bytes(damaged)
        assert pack.main(["unpack", str(parts[2]), "--into", str(into)]) == 1
        assert "damaged" in capsys.readouterr().err
    parts[2].write_bytes(whole)
    assert pack.unpack(parts[2:], into) == []
    assert (into / "plan").read_bytes() == sources[2].read_bytes()


def test_unpacking_that_was_cut_off_is_finished_by_any_part(
    sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, into = pack.pack(sources, tmp_path / "parts", MIB), tmp_path / "device"

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(zipfile.ZipFile, "extractall", full)
        with pytest.raises(OSError, match="full"):
            pack.unpack(parts, into)
    assert pack.unpack(parts[:1], into) == []
    assert (into / "plan").read_bytes() == sources[2].read_bytes()


def test_what_would_not_work_there_is_refused_here_or_with_the_first_part(
    sources: list[Path], tmp_path: Path
) -> None:
    twin = wheel(tmp_path / "other", "twin-1.0-py3-none-any", {"carried/__init__.py": "answer = 1"})
    with pytest.raises(pack.PackError, match=r"both hold carried/__init__\.py"):
        pack.pack([*sources, twin], tmp_path / "parts", MIB)
    foreign = wheel(tmp_path / "foreign", "a-1-cp27-cp27m-linux_x86_64", {"a.py": ""})
    parts = pack.pack([foreign], tmp_path / "parts", MIB)
    with pytest.raises(pack.PackError, match="not for this Python"):
        pack.unpack(parts, tmp_path / "device")
    with pytest.raises(pack.PackError, match="not empty"):
        pack.pack(sources, tmp_path / "parts", MIB)
    assert pack.main(["pack", str(tmp_path / "nothing"), "--out", str(tmp_path / "new")]) == 1
    with pytest.raises(SystemExit, match="2"):
        pack.main(["pack", str(foreign), "--out", str(tmp_path / "new"), "--mib", "61"])
