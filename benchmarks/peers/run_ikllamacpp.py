"""Run ik_llama.cpp: its server, plain, with a draft or with its n-gram lookup.

The server answers with text, which it makes tokens of again when asked; ids made of text may be
fewer or more than were decoded, so they are cut or filled.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from peerbench.options import Options, read_options
from peerbench.protocol import AUTO, NGRAM, PLAIN, SPECULATIVE, Completed, Hello, Order, serve
from peerbench.server import LlamaServers, completed

BIN = Path(__file__).parent / ".venvs" / "ikllamacpp" / "build" / "bin"
CONTEXT = 2048
LOOKUP_NGRAM = 3
SURE = ["--draft-max", 8, "--draft-p-min", 0.75]
"""Gamma `auto`: draft on while the draft gives its token three in four."""
ALONE = ["--parallel", 1, "--cache-ram", 0, "--no-slots"]
"""One request at a time, no prompt kept."""


class IkLlamaCpp:
    """Its servers."""

    def __init__(self, options: Options, stack: ExitStack) -> None:
        self._servers = LlamaServers(
            BIN / "llama-server", lambda order: [*model_flags(options, order), *ALONE], stack
        )
        command: list[str | Path] = [BIN / "llama-server", "--version"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        versions = {"ik-llama-cpp-python": "0.1.5", "compiler": said.stderr + said.stdout}
        modes = [PLAIN, *options.drafting, NGRAM]
        self.hello = Hello("ikllamacpp", modes, versions, options.drafting)

    def complete(self, prompt: Sequence[int], order: Order) -> Completed:
        """Ask the server of this mode and gamma, and make tokens of its text."""
        answer = self._servers.answer(prompt, order)
        made = self._servers.of(order).post("/tokenize", {"content": answer["content"]})["tokens"]
        return completed(answer, [*made, *[-1] * order.max_tokens][: order.max_tokens])


def model_flags(options: Options, order: Order) -> list[object]:
    """Name models, threads and how to draft; in fp32 the cache is fp32 too."""
    flags: list[object] = ["-m", options.target / "model.gguf", "-c", CONTEXT]
    flags += ["-t", options.threads, "-tb", options.threads, "--run-time-repack"]
    caches = ["-ctk", "-ctv"]
    if order.mode == SPECULATIVE:
        # Its flash attention ends the server with an assertion while the draft drafts.
        flags += ["-md", f"{options.draft}/model.gguf", "-fa", "off"]
        flags += SURE if order.gamma == AUTO else ["--draft-max", order.gamma, "--draft-p-min", 0]
        caches += ["-ctkd", "-ctvd"]
    if order.mode == NGRAM:
        flags += ["--spec-type", "ngram-simple", "--spec-ngram-size-n", LOOKUP_NGRAM]
        flags += ["--spec-ngram-size-m", order.gamma]
    if options.precision == "fp32":
        flags += [part for cache in caches for part in (cache, "f32")]
    return flags


@contextmanager
def opening() -> Iterator[IkLlamaCpp]:
    """Read the options; servers start when they are first asked."""
    with ExitStack() as stack:
        yield IkLlamaCpp(read_options(__doc__.split("\n")[0]), stack)


if __name__ == "__main__":
    serve(opening)
