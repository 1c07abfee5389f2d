"""Use specrt inside an application: open a bundle once, and share it between threads.

python examples/python/embed.py [BUNDLE]
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import specrt
from specrt import SpecrtError

BUNDLE = Path(__file__).parents[2] / "engines" / "build" / "codelet"
PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import os\n", "for line in lines:\n"]


def answer(generator: specrt.Generator, prompt: str) -> specrt.Completion:
    """Complete a prompt in whichever thread asks; completions share the rows of the engines."""
    stream = generator.stream(prompt, specrt.SamplingParams(max_tokens=48))
    for chunk in stream:
        if "\n\n\n" in chunk.text:  # enough: the row is free for the next at once
            stream.cancel()
    return stream.completion


def main(bundle: Path) -> int:
    """Answer all prompts, in four threads over one generator, and give everything back."""
    try:
        # What `open` returns closes itself: engines, memory, threads.
        with specrt.open(bundle) as generator, ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(answer, generator, prompt) for prompt in PROMPTS]
            for prompt, task in zip(PROMPTS, tasks, strict=True):
                done = task.result()
                counts = f"{len(done.token_ids)} tokens, {done.speculation.tokens_per_round:.1f}"
                print(f"{prompt.strip()!r}: {counts} a round, {done.finish_reason}")
    except SpecrtError as error:  # no bundle, or one for another machine, a pass that failed
        print(error, file=sys.stderr)
        return 1
    print("closed")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLE))
