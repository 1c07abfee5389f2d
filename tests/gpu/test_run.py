"""The script that runs everything on a GPU, as far as it goes without one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with nothing to run."""
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    spec.loader.exec_module(module)

    def steps(python: str, gpu: bool) -> Iterator[object]:
        print("began")
        yield module.Step("one", 0)

    monkeypatch.setattr(module, "_steps", steps)
    return module


@pytest.mark.parametrize("place", ["none/x.json", "."])
def test_a_place_that_cannot_be_written_is_refused_before_any_step(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--here", "--out", str(tmp_path / place)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert f"--out {tmp_path / place} cannot be written: " in said.err
    assert "began" not in said.out


def test_the_report_is_written_as_well(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--here", "--out", str(out)])
    assert script.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.read_text(encoding="utf-8").strip()
