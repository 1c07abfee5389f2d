"""Run ONNX Runtime GenAI: its generator, with a draft model, or with its own n-gram lookup.

A draft model is a second decoder in genai_config.json, so one folder is made that describes both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import onnxruntime_genai as og

from peerbench.options import Options, read_options
from peerbench.protocol import AUTO, NGRAM, PLAIN, SPECULATIVE, Completed, Hello, Order, serve

NGRAM_SIZE = 3
DRAFT_THREADS = 1
"""Two sessions whose threads spin fight over the cores: one thread for the draft is faster."""


class OrtGenai:
    """The target by itself, and the pair where there is a draft."""

    def __init__(self, pair: Path, options: Options) -> None:
        self._alone = _open(options.target, options.threads)
        if options.draft:
            describe_pair(options.target, options.draft, pair)
            self._pair = _open(pair, options.threads, DRAFT_THREADS)
        self.hello = Hello(
            "ortgenai",
            [PLAIN, *options.drafting, NGRAM],
            {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")},
            [*options.drafting, NGRAM],
            {"draft_threads": DRAFT_THREADS, "ngram_size": NGRAM_SIZE},
        )

    def complete(self, prompt: Sequence[int], order: Order) -> Completed:
        """Run the generator token by token, as its documentation does."""
        model = self._pair if order.mode == SPECULATIVE else self._alone
        generator = og.Generator(model, self._params(model, len(prompt), order))
        began = perf_counter_ns()
        generator.append_tokens(list(prompt))
        generator.generate_next_token()
        first = perf_counter_ns()
        for _ in range(order.max_tokens - 1):
            generator.generate_next_token()
        ended = perf_counter_ns()
        made = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        counts = generator.get_speculative_stats() if order.mode != PLAIN else {}
        return Completed(
            made[: order.max_tokens],
            first - began,
            ended - first,
            drafted=counts.get("draft_tokens_proposed"),
            accepted=counts.get("draft_tokens_accepted"),
        )

    def _params(self, model: Any, length: int, order: Order) -> Any:
        params = og.GeneratorParams(model)
        whole = length + order.max_tokens
        # An end token has probability zero until min_length is reached.
        params.set_search_options(do_sample=False, max_length=whole + 32, min_length=whole + 32)
        if order.mode != PLAIN:
            params.set_speculative_options(**_speculation(order))
        return params


def _speculation(order: Order) -> dict[str, Any]:
    width = {"min_adaptive_k": 2} if order.gamma == AUTO else {"max_draft_tokens": order.gamma}
    return {**width, **({"ngram_size": NGRAM_SIZE} if order.mode == NGRAM else {})}


def _open(folder: Path, threads: int, draft_threads: int | None = None) -> Any:
    config = og.Config(str(folder))
    sessions = {"decoder": {"session_options": {"intra_op_num_threads": threads}}}
    if draft_threads:
        sessions["draft"] = {"session_options": {"intra_op_num_threads": draft_threads}}
    config.overlay(json.dumps({"model": sessions}))
    return og.Model(config)


def describe_pair(target: Path, draft: Path, folder: Path) -> None:
    """Write a configuration whose files are links into both models' folders."""
    for name, model in (("target", target), ("draft", draft)):
        (folder / name).symlink_to(model.resolve())
    for file in target.iterdir():
        if file.suffix in {".json", ".jinja"}:
            (folder / file.name).write_bytes(file.read_bytes())
    config = _config(target)
    config["model"]["decoder"]["filename"] = "target/model.onnx"
    config["model"]["draft"] = {
        **_config(draft)["model"]["decoder"],
        "filename": "draft/model.onnx",
    }
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")


def _config(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    return read


@contextmanager
def opening() -> Iterator[OrtGenai]:
    """Load the models."""
    options = read_options(__doc__.split("\n")[0])
    with tempfile.TemporaryDirectory() as folder:
        yield OrtGenai(Path(folder), options)


if __name__ == "__main__":
    serve(opening)
