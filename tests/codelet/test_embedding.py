"""codelet as a library in somebody else's process: what it leaves as it was, and gives back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/python"


def ran(*arguments: object) -> str:
    """Run Python in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


HOSTED = """
import asyncio, gc, json, logging, os, signal, sys, threading, warnings, weakref

def state():
    return [
        [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        [str(handler) for handler in logging.root.handlers],
        logging.root.level,
        [str(one) for one in warnings.filters],
        dict(os.environ),
        os.getcwd(),
        sorted(thread.name for thread in threading.enumerate()),
        sys.getswitchinterval(),
        sys.getrecursionlimit(),
        [str(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
    ]

import numpy, tokenizers, onnxruntime  # what they do when imported is theirs
before = state()
from specrt import SamplingParams, open

async def read(generator):
    async with generator.astream("import ", SamplingParams(max_tokens=40)) as stream:
        async for _ in stream:
            break
    await generator.agenerate("import ", SamplingParams(max_tokens=8))

with open(sys.argv[1], threads=1) as generator:
    generator.generate("def f(", SamplingParams(max_tokens=8))
    asyncio.run(read(generator))
heavy = {"torch", "onnx", "transformers", "tensorrt", "cuda", "rich", "click", "matplotlib"}
print(json.dumps([before, state(), sorted(heavy & set(sys.modules))]))

gc.disable()
generator = open(sys.argv[1], threads=1)
stream = generator.stream("import ", SamplingParams(max_tokens=99), gamma="auto")
next(stream)
generator.generate("def f(", SamplingParams(max_tokens=9), gamma=2)
engines = [weakref.ref(generator.models.target), weakref.ref(generator.models.draft)]
del generator, stream
print([engine() for engine in engines])

generator = open(sys.argv[1], threads=1)
long = SamplingParams(max_tokens=400, ignore_eos=True)
running = generator.stream("def f(", long)
next(running)

async def leave():
    global awaited
    awaited = generator.astream("def g(", long)
    await awaited.__anext__()

asyncio.run(leave())
print("left")
"""


def test_a_process_is_left_as_it_was_and_may_leave_things_open(codelet: Path) -> None:
    """A generator that nobody refers to is gone with its engines; one still open ends nothing."""
    states, dropped, left = ran("-c", HOSTED, codelet).splitlines()
    before, after, heavy = json.loads(states)
    assert (after, heavy) == (before, [])
    assert (dropped, left) == ("[None, None]", "left")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("embed", ["[cancelled; ", "[length; "]),
        ("async_app", ["\n[short: length, 48 tokens]", "\n[endless: cancelled, "]),
    ],
)
def test_an_example_runs_as_it_says(codelet: Path, name: str, shown: list[str]) -> None:
    printed = ran(EXAMPLES / f"{name}.py", codelet)
    assert [text for text in shown if text not in printed] == []
