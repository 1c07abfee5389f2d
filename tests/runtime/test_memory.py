"""How much memory may be taken: the smaller of what kernel and control group leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.system.machine import available_bytes

MEMINFO = "MemTotal:       24000000 kB\nMemFree:  10 kB\nMemAvailable:    2048 kB\n"


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_the_kernel_tells_what_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert available_bytes(tmp_path / "meminfo", tmp_path / "none") == 2 << 20


@pytest.mark.parametrize(("most", "left"), [("1500000", 700000), ("max", 2 << 20)])
def test_a_control_group_may_leave_less(tmp_path: Path, most: str, left: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    group = written(
        tmp_path,
        memory_max=most + "\n",
        memory_current="1000000\n",
        memory_stat="anon 5\nactive_file 7\ninactive_file 200000\n",
    )
    assert available_bytes(tmp_path / "meminfo", group) == left


def test_a_system_that_does_not_tell_sets_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "meminfo", tmp_path) is None


def test_this_machine_has_some() -> None:
    found = available_bytes()
    assert found is None or found > 1 << 20
