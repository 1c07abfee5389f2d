"""Run llama.cpp: its server, plain, with a draft or with its n-gram lookup, and its own example.

The server keeps models loaded, takes token ids and times itself; it has one way to speculate and
one gamma, so there is a server for each. Mode `example` is llama-speculative-simple, which reads
text, loads its models anew for every prompt, and times itself too.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from peerbench.options import Options, read_options
from peerbench.protocol import AUTO, NGRAM, PLAIN, SPECULATIVE, Completed, Hello, Order, serve
from peerbench.server import LlamaServers, completed

BIN = Path(__file__).parent / ".venvs" / "llamacpp" / "build" / "bin"
EXAMPLE = "example"
CONTEXT = 2048
LOOKUP_NGRAM = 3
ATTEMPTS = 5
SURE = ["--spec-draft-n-max", 8, "--spec-draft-p-min", 0.75]
"""Gamma `auto`: draft on while the draft gives its token three in four."""
ALONE = ["--parallel", 1, "--no-cache-prompt", "--cache-ram", 0, "--no-ui", "--no-slots"]
"""One request at a time, every prompt read anew, no interface."""
_SPEED = re.compile(r"(encoded|decoded) +(\d+) tokens in +([\d.]+) seconds")
_COUNT = re.compile(r"n_(drafted|accept) += (\d+)")


class LlamaCpp:
    """Its servers and its example."""

    def __init__(self, options: Options, stack: ExitStack) -> None:
        self._options = options
        self._servers = LlamaServers(
            BIN / "llama-server", lambda order: [*model_flags(options, order), *ALONE], stack
        )
        self._tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
        command: list[str | Path] = [BIN / "llama-server", "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        versions = {
            "llama-cpp-python": "0.3.36",
            "llama.cpp": _first_line(said.stderr + said.stdout),
        }
        modes = [PLAIN, *options.drafting, NGRAM, *([EXAMPLE] if options.draft else [])]
        self.hello = Hello("llamacpp", modes, versions, options.drafting)

    def complete(self, prompt: Sequence[int], order: Order) -> Completed:
        """Ask the server of this mode and gamma, or run the example."""
        if order.mode == EXAMPLE:
            return self._example(prompt, order)
        answer = self._servers.answer(prompt, order)
        return completed(answer, answer["tokens"])

    def _example(self, prompt: Sequence[int], order: Order) -> Completed:
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(text + "\n")  # the program takes one line end off
            file.flush()
            flags = [*model_flags(self._options, order), "-f", file.name, "--no-escape"]
            flags += ["-n", str(order.max_tokens - 1), "--ignore-eos", "--temp", "0"]
            made, said = run_example(flags)
        ids = self._tokenizer.encode(made.partition(text)[2].rstrip("\n")).ids
        return read_example(said, len(prompt), ids, order.max_tokens)


def model_flags(options: Options, order: Order) -> list[object]:
    """Name models, threads and how to draft; in fp32 the cache is fp32 too."""
    flags: list[object] = ["-m", options.target / "model.gguf", "-c", CONTEXT]
    flags += ["-t", options.threads, "-tb", options.threads]
    caches = ["-ctk", "-ctv"]
    if order.mode in (SPECULATIVE, EXAMPLE):
        flags += ["-md", f"{options.draft}/model.gguf", "--spec-type", "draft-simple"]
        flags += SURE if order.gamma == AUTO else ["--spec-draft-n-max", order.gamma]
        caches += ["-ctkd", "-ctvd"]
    if order.mode == NGRAM:
        flags += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", LOOKUP_NGRAM]
        flags += ["--spec-ngram-simple-size-m", order.gamma]
    if options.precision == "fp32":
        flags += [part for cache in caches for part in (cache, "f32")]
    return flags


def run_example(flags: Sequence[object]) -> tuple[str, str]:
    """Run llama-speculative-simple and return what it wrote and what it logged.

    A thread of its own writes its log, and about one run in forty ends before that thread has
    written all of it; such a run is done again.
    Raises: OSError where it fails, or says too little every time.
    """
    command = [str(BIN / "llama-speculative-simple"), *map(str, flags)]
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode:
            raise OSError(f"the example ended with {done.returncode}: {done.stderr[-300:]}")
        if "accept    =" in done.stderr:
            return done.stdout, done.stderr
    raise OSError(f"the example did not say all of its times in {ATTEMPTS} runs")


def read_example(said: str, prompt: int, ids: list[int], wanted: int) -> Completed:
    """Read what llama-speculative-simple prints about itself.

    Its last round may go beyond the number of tokens wanted: its time is scaled to them, so its
    rate stays what it says. It prints text, not ids, and ids made of text again may be fewer or
    more: they are cut or filled. The prompt's last token is decoded with the output, so no token
    has been delivered when decoding begins.
    Raises: ValueError where it read another prompt than it was given.
    """
    times = {kind: (int(count), float(seconds)) for kind, count, seconds in _SPEED.findall(said)}
    counts = {kind: int(count) for kind, count in _COUNT.findall(said)}
    (encoded, ttft), (decoded, took) = times["encoded"], times["decoded"]
    if encoded != prompt:
        raise ValueError(f"llama.cpp made {encoded} tokens of a prompt of {prompt}")
    tokens = [*ids, *[-1] * wanted][:wanted]
    drafted, accepted = counts["drafted"], counts["accept"]
    decode_ns = round(took * 1e9 * wanted / decoded)
    return Completed(tokens, round(ttft * 1e9), decode_ns, 0, drafted, accepted)


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("version")), "unknown")


@contextmanager
def opening() -> Iterator[LlamaCpp]:
    """Read the options; servers start when they are first asked."""
    with ExitStack() as stack:
        yield LlamaCpp(read_options(__doc__.split("\n")[0]), stack)


if __name__ == "__main__":
    serve(opening)
