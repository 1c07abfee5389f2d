"""Builds that cannot end well leave what was there."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lower.builds import PROFILES, left, make, nothing
from lower.test_tensorrt_builder_decoder import decoder, save
from specrt.engine.tensorrt.library import Library
from specrt.errors import BuildError
from specrt_export.compile.monitor import CancelledError
from specrt_export.compile.plan_builder import Room, build_plan
from specrt_export.recipe import PlanOptions

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, so nothing is built")


def test_too_small_a_workspace_is_said(graph: Path, library: Library, tmp_path: Path) -> None:
    small = save(decoder(hidden=64), tmp_path / "graph")  # written out, so that it needs some
    with pytest.raises(BuildError, match=r"within workspace limit.*workspace_mib is 1; give more"):
        build_plan(small, tmp_path / "p", library, PROFILES, PlanOptions(workspace_mib=1), nothing)
    assert left(tmp_path) == ["graph"]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_leaves_what_was_there(
    graph: Path, library: Library, tmp_path: Path
) -> None:
    out = tmp_path / "model.plan"
    out.write_bytes(b"earlier")
    with files_up_to(1 << 20), pytest.raises(BuildError, match="could not be written, with"):
        make(graph, library, out)
    assert left(tmp_path) == ["model.plan"]
    assert out.read_bytes() == b"earlier"
    make(graph, library, out)
    assert out.read_bytes().startswith(b"vtrt")


def test_too_little_memory_is_told_and_built_all_the_same(
    graph: Path, library: Library, tmp_path: Path
) -> None:
    stages: list[str] = []
    build_plan(
        graph, tmp_path / "p", library, PROFILES[1:2], PlanOptions(),
        lambda stage, done: stages.append(stage), room=Room(64 << 20),
    )  # fmt: skip
    assert "warning: building this plan may take 4" in stages[0]
    assert "of memory, and 64 MiB is free" in stages[0]
    assert (tmp_path / "p").is_file()


def test_a_cancelled_build_ends_in_any_thread(
    graph: Path, library: Library, tmp_path: Path
) -> None:
    asked, found = [], []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 40

    def work() -> None:
        try:
            build_plan(
                graph, tmp_path / "p", library, PROFILES, PlanOptions(), nothing,
                cancelled=cancelled,
            )  # fmt: skip
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert [type(error) for error in found] == [CancelledError]
    assert left(tmp_path) == []
