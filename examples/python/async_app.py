"""Stream two completions in an asyncio application, and stop one of them.

python examples/python/async_app.py [BUNDLE]

Without BUNDLE it reads engines/build/codelet. The event loop is never blocked: a thread of specrt
runs the model, and only while somebody waits for a chunk.
"""

import asyncio
import sys
from pathlib import Path

import specrt
from specrt.aio import AsyncStream
from specrt.errors import SpecrtError
from specrt.generator import Generator
from specrt.params import SamplingParams

BUNDLE = Path(__file__).parents[2] / "engines" / "build" / "codelet"
SECONDS = 0.2


async def show(name: str, stream: AsyncStream) -> None:
    """Print a completion line by line, as it comes."""
    line = ""
    # However this block is left, the stream is closed, and the next prompt can have its row.
    async with stream:
        async for chunk in stream:
            *whole, line = (line + chunk.text).split("\n")
            for text in whole:
                print(f"{name} | {text}")
    print(f"{name} | {line}")


async def run(generator: Generator) -> None:
    """Read two streams at once; where the bundle has one row, the second waits for the first."""
    endless = generator.astream(
        "import ", SamplingParams(max_tokens=100_000, ignore_eos=True, temperature=0.8, seed=1)
    )
    short = generator.astream("def fibonacci(n):\n", SamplingParams(max_tokens=48))
    first = asyncio.create_task(show("endless", endless))
    second = asyncio.create_task(show("short", short))
    await asyncio.sleep(SECONDS)  # whatever else the application does
    first.cancel()  # and with it the stream that it reads
    await second
    for name, stream in (("endless", endless), ("short", short)):
        done = stream.completion  # what came so far, also of one that was cancelled
        print(f"[{name}: {done.finish_reason}, {len(done.token_ids)} tokens]")


def main(bundle: Path) -> int:
    """Open the bundle before the loop runs, as that takes a while, and close it after."""
    try:
        with specrt.open(bundle) as generator:
            asyncio.run(run(generator))
    except SpecrtError as error:  # its message says what to do
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLE))
