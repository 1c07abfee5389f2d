"""Run specrt: a bundle, plain, with its default drafter, or with one drafter by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from specrt.bundle import Manifest, read_manifest
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import SamplingParams

from peerbench.protocol import PLAIN, SPECULATIVE, Completed, Hello, Order, serve

DRAFTERS = ["ngram", "model", "cascade"]
"""The first needs no draft model."""


class Specrt:
    """A bundle's generator. Mode `speculative` takes the bundle's drafter, others name one."""

    def __init__(self, generator: Generator, manifest: Manifest) -> None:
        self._generator = generator
        versions = {name: version(name) for name in ("specrt", "onnxruntime")}
        speculative = [SPECULATIVE, *DRAFTERS[: None if manifest.draft else 1]]
        names = ("precision", "embedding", "head", "block")
        settings = {name: getattr(manifest.target, name) for name in names}
        self.hello = Hello(
            "specrt", [PLAIN, *speculative], versions, adaptive=speculative, settings=settings
        )

    def complete(self, prompt: Sequence[int], order: Order) -> Completed:
        """Stream one completion and take its own times."""
        params = SamplingParams(
            max_tokens=order.max_tokens, ignore_eos=True, temperature=0.0, seed=0
        )
        plain = order.mode == PLAIN
        drafter = order.mode if order.mode in DRAFTERS else None
        stream = self._generator.stream(
            prompt, params, gamma=0 if plain else order.gamma, drafter=drafter
        )
        done = stream.finish()
        (first, count), last = done.timings.arrivals[0], done.timings.arrivals[-1][0]
        return Completed(
            done.token_ids,
            first - done.timings.began_ns,
            last - first,
            first=count,
            drafted=done.speculation.drafted,
            accepted=done.speculation.accepted,
        )


@contextmanager
def opening() -> Iterator[Specrt]:
    """Open the bundle in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    with load(
        given.bundle, threads=given.threads, owns_process=True, text_memory_bytes=0
    ) as generator:
        yield Specrt(generator, read_manifest(given.bundle))


if __name__ == "__main__":
    serve(opening)
