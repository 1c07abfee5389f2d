"""Use specrt inside an application: open a bundle once, and share it between threads.

python examples/python/embed.py [BUNDLE]

Without BUNDLE it reads engines/build/codelet.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import specrt
from specrt.completion import Completion
from specrt.errors import SpecrtError
from specrt.generator import Generator
from specrt.params import SamplingParams

BUNDLE = Path(__file__).parents[2] / "engines" / "build" / "codelet"
PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import os\n", "for line in lines:\n"]


def answer(generator: Generator, prompt: str) -> Completion:
    """Complete a prompt, and stop at the first empty line.

    Any thread may call this: the completions share the engines, and wait for one another where
    these have fewer rows than there are threads.
    """
    stream = generator.stream(prompt, SamplingParams(max_tokens=48))
    for _chunk in stream:  # a chunk for each round of draft and verification
        if "\n\n" in stream.completion.text:
            stream.cancel()  # the loop ends here, and another thread has the row
    return stream.completion  # `generator.generate(...)` returns the same without a loop


def main(bundle: Path) -> int:
    """Answer all prompts in four threads."""
    try:
        # After the `with`, engines and memory are given back.
        with specrt.open(bundle) as generator, ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(answer, generator, prompt) for prompt in PROMPTS]
            for prompt, task in zip(PROMPTS, tasks, strict=True):
                done = task.result()
                rate = done.speculation.tokens_per_round
                print(f"{prompt + done.text}\n[{done.finish_reason}; {rate:.1f} tokens a round]\n")
    except SpecrtError as error:  # no bundle, or not for this machine; the message says what to do
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUNDLE))
