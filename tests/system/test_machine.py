"""What a time depends on is read from the system, whatever the system tells."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from specrt.system import Machine, available_bytes, this_machine, vector_units

X86 = """processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Some Xeon @ 2.00GHz
flags\t\t: fpu avx2 avx512f amx_tile rdpid

processor\t: 1
model name\t: another
flags\t\t: sve
"""
ARM = """processor\t: 0
Features\t: fp asimd asimddp sve
CPU implementer\t: 0x41
CPU part\t: 0xd42
"""
LIBRARY = "onnxruntime 1.31.1"


def test_an_x86_processor_is_its_name_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(X86)
    machine = this_machine(LIBRARY, tmp_path)
    assert machine.cpu == "Some Xeon @ 2.00GHz, cpu family 6 model 143"
    assert machine.vector_units == vector_units(tmp_path) == "avx2, avx512f, amx_tile"
    assert (machine.accelerator, machine.library) == ("", LIBRARY)


def test_an_arm_board_is_its_parts_and_its_name_or_its_gpus(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM)
    (tmp_path / "device-tree").mkdir()
    (tmp_path / "device-tree" / "model").write_bytes(b"Some Board Developer Kit\0")
    machine = this_machine("", tmp_path)
    assert machine.cpu == "CPU implementer 0x41 CPU part 0xd42"
    assert machine.vector_units == "asimd, asimddp, sve"
    assert machine.accelerator == "Some Board Developer Kit"
    for number, name in enumerate(("Small GPU", "Large GPU")):
        folder = tmp_path / "driver/nvidia/gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    assert this_machine("", tmp_path).accelerator == "Small GPU, Large GPU"


@pytest.mark.parametrize(
    "cpuinfo", [None, b"", b"\xff\xfe\0", b"model name\t: " + b"\x1b" + b"x" * 999]
)
def test_a_system_that_tells_nothing_useful_is_still_a_machine(
    tmp_path: Path, cpuinfo: bytes | None
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_bytes(cpuinfo)
    machine = this_machine("a\nlibrary", tmp_path)
    for text in (machine.cpu, machine.vector_units, machine.accelerator, machine.library):
        assert text.isprintable()
        assert len(text) <= 255
    assert machine.cpu


def test_every_difference_is_named() -> None:
    here = Machine("cpu", "avx2", 2, "", LIBRARY)
    for name in (field.name for field in fields(Machine)):
        other = replace(here, **{name: 4 if name == "cores" else "else"})  # type: ignore[arg-type]
        difference = here.difference(other)
        assert difference is not None
        assert difference.startswith(name.replace("_", " "))
        assert difference.endswith("4" if name == "cores" else "else")
    assert here.difference(here) is None


@pytest.mark.parametrize(("most", "left"), [("1500000", 700000), ("max", 2 << 20), ("", 2 << 20)])
def test_the_kernel_or_a_control_group_limits_memory(tmp_path: Path, most: str, left: int) -> None:
    meminfo = "MemTotal:       24000000 kB\nMemFree:  10 kB\nMemAvailable:    2048 kB\n"
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "memory.max").write_text(most + "\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 7\ninactive_file 200000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == left


def test_a_system_that_does_not_tell_sets_no_limit(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "meminfo", tmp_path) is None
    assert (available_bytes() or 1 << 30) > 1 << 20
