"""Stream two prompts at once with asyncio, and stop one of them when its time is up.

python examples/python/async_app.py [BUNDLE]
"""

import asyncio
import sys
from pathlib import Path

import specrt

BUNDLE = Path(__file__).parents[2] / "engines" / "build" / "codelet"


async def show(name: str, stream: specrt.AsyncStream) -> None:
    """Print a completion line by line as it comes."""
    line = ""
    async for chunk in stream:
        *whole, line = (line + chunk.text).split("\n")
        for text in whole:
            print(f"{name}| {text}")
    print(f"{name}| {line}")


async def limited(name: str, stream: specrt.AsyncStream, seconds: float) -> None:
    """Do so for a while; a task that is cancelled frees its row at once."""
    try:
        await asyncio.wait_for(show(name, stream), seconds)
    except asyncio.TimeoutError:
        print(f"{name} ran out of time")


async def main(bundle: Path) -> None:
    """Let the first run to its end, and the second until its time is up."""
    short = specrt.SamplingParams(max_tokens=48)
    long = specrt.SamplingParams(max_tokens=100_000, ignore_eos=True)
    with specrt.open(bundle) as generator:
        streams = [generator.astream("def f(n):\n", short), generator.astream("import ", long)]
        await asyncio.gather(show("first", streams[0]), limited("second", streams[1], 0.05))
    for name, stream in zip(("first", "second"), streams, strict=True):
        done = stream.completion
        print(f"[{name}: {done.finish_reason}, {len(done.token_ids)} tokens]")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLE))
