"""The fingerprint names what a time depends on, on any machine that tells."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from specrt.system.machine import Machine, this_machine, vector_units

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
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


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path


def test_an_x86_processor_is_its_name_and_numbers(proc: Path) -> None:
    (proc / "cpuinfo").write_text(X86)
    machine = this_machine("ort-cpu", proc)
    assert machine.cpu == "Some Xeon @ 2.00GHz, cpu family 6 model 143"
    assert machine.vector_units == vector_units(proc) == "avx2, avx512f, amx_tile"
    assert machine.accelerator == ""
    assert machine.library.startswith("onnxruntime 1.")


def test_an_arm_board_is_its_parts_and_its_name(proc: Path) -> None:
    (proc / "cpuinfo").write_text(ARM)
    (proc / "device-tree").mkdir()
    (proc / "device-tree" / "model").write_bytes(b"Some Board Developer Kit\0")
    machine = this_machine("tensorrt-none", proc)
    assert machine.cpu == "CPU implementer 0x41 CPU part 0xd42"
    assert machine.vector_units == "asimd, asimddp, sve"
    assert machine.accelerator == "Some Board Developer Kit"
    assert machine.library == "tensorrt-none of unknown version"


def test_gpus_are_named(proc: Path) -> None:
    for number, name in enumerate(("Small GPU", "Large GPU")):
        folder = proc / "driver/nvidia/gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    assert this_machine("ort-cuda", proc).accelerator == "Small GPU, Large GPU"


@pytest.mark.parametrize(
    "said", [None, b"", b"\xff\xfe\0", b"model name\t: " + b"\x1b" + b"x" * 999]
)
def test_a_system_that_tells_nothing_useful_is_still_a_machine(
    proc: Path, said: bytes | None
) -> None:
    if said is not None:
        (proc / "cpuinfo").write_bytes(said)
    machine = this_machine("ort-cpu", proc)
    for text in (machine.cpu, machine.vector_units, machine.accelerator, machine.library):
        assert text.isprintable()
        assert len(text) <= 255
    assert machine.cpu


def test_this_machine_is_itself() -> None:
    assert this_machine("ort-cpu").difference(this_machine("ort-cpu")) is None


@pytest.mark.parametrize("name", [f.name for f in fields(Machine)])
def test_every_difference_is_named(name: str) -> None:
    here = Machine("cpu", "avx2", 2, "", "onnxruntime 1.31.1")
    other = replace(here, **{name: 4 if name == "cores" else "else"})  # type: ignore[arg-type]
    said = here.difference(other)
    assert said is not None
    assert said.startswith(name.replace("_", " "))
    assert said.endswith("4" if name == "cores" else "else")
