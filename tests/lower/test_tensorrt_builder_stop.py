"""Ctrl-C while TensorRT builds: at the end of a step, with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lower.test_tensorrt_builder_decoder import decoder, save

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, so nothing is built")


CHILD = """
import os, signal, sys
from pathlib import Path
from specrt.engine.tensorrt.library import open_library
from specrt_export.compile.plan_builder import build_plan
from specrt_export.recipe import PlanOptions
from specrt_export.compile.network import profiles

def progress(stage, done):
    print(stage, flush=True)

before = signal.getsignal(signal.SIGINT)
try:
    build_plan(
        Path(sys.argv[1]), Path(sys.argv[2]), open_library("tensorrt-rtx"),
        profiles("target", 64, (1, 2, 4)), PlanOptions(), progress,
    )
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is before)
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = decoder(layers=3, hidden=512, vocabulary=2048)
    return save(model, tmp_path_factory.mktemp("graph"))


def stages(graph: Path, folder: Path, at: str) -> tuple[list[str], int]:
    """Build in a process of its own, and press Ctrl-C once it is at a stage."""
    command = [sys.executable, "-c", CHILD, str(graph), str(folder / "model.plan")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as child:
        assert child.stdout is not None
        said = []
        for line in child.stdout:
            if line.strip() not in said:
                said.append(line.strip())
            if at and line.startswith(at):
                os.kill(child.pid, signal.SIGINT)
                at = ""
        return said, child.wait(timeout=60)


@pytest.mark.parametrize("at", ["profile decode", "profile verify 1"])
def test_ctrl_c_ends_a_build_and_leaves_nothing(graph: Path, tmp_path: Path, at: str) -> None:
    said, code = stages(graph, tmp_path, at)
    assert code == 0
    assert said[-2:] == ["stopping", "interrupted True"]
    assert "plan built" not in said
    assert not any(stage.startswith("profile verify 4") for stage in said)
    assert list(tmp_path.iterdir()) == []


def test_without_ctrl_c_the_same_build_ends_well(graph: Path, tmp_path: Path) -> None:
    said, code = stages(graph, tmp_path, "")
    assert (code, said[-1]) == (0, "plan built")
    assert [path.name for path in tmp_path.iterdir()] == ["model.plan"]
