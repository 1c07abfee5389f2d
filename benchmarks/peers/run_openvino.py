"""Run OpenVINO GenAI: its LLM pipeline, with a draft model, or with its own prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from time import perf_counter_ns
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from peerbench.options import Options, read_options
from peerbench.protocol import AUTO, NGRAM, PLAIN, SPECULATIVE, Completed, Hello, Order, serve

LOOKUP_NGRAM = 3
CONFIDENCE = 0.4
"""Gamma `auto`: the threshold that its own examples give."""


class Arrivals(genai.StreamerBase):  # type: ignore[misc]
    """Notes when tokens arrive and how many."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int]] = []

    def write(self, tokens: int | list[int]) -> genai.StreamingStatus:
        """Note one delivery and go on."""
        self.noted.append((perf_counter_ns(), 1 if isinstance(tokens, int) else len(tokens)))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Need nothing at the end."""


class OpenVino:
    """One pipeline a mode; the operating system keeps one copy of a file's weights in its cache."""

    def __init__(self, options: Options) -> None:
        properties = device_properties(options)
        self._opening = {
            PLAIN: lambda: genai.LLMPipeline(str(options.target), "CPU", **properties),
            SPECULATIVE: lambda: genai.LLMPipeline(
                str(options.target),
                "CPU",
                draft_model=genai.draft_model(str(options.draft), "CPU", **properties),
                scheduler_config=_scheduler(),
                **properties,
            ),
            NGRAM: lambda: genai.LLMPipeline(
                str(options.target),
                "CPU",
                prompt_lookup=True,
                scheduler_config=_scheduler(),
                **properties,
            ),
        }
        self._pipelines: dict[str, Any] = {}
        names = ("openvino", "openvino-genai")
        versions = {name: version(name) for name in names}
        modes = [PLAIN, *options.drafting, NGRAM]
        settings = {name: str(value) for name, value in properties.items()}
        self.hello = Hello("openvino", modes, versions, options.drafting, settings)

    def complete(self, prompt: Sequence[int], order: Order) -> Completed:
        """Generate with a streamer that takes the times."""
        if order.mode not in self._pipelines:
            self._pipelines[order.mode] = self._opening[order.mode]()
        arrivals = Arrivals()
        ids = ov.Tensor(np.array([prompt], np.int64))
        config = generation(order)
        began = perf_counter_ns()
        result = self._pipelines[order.mode].generate(ids, config, arrivals)
        (first, count), last = arrivals.noted[0], arrivals.noted[-1][0]
        tokens = [int(token) for token in result.tokens[0]]
        drafted, accepted = _counts(result.extended_perf_metrics)
        return Completed(tokens, first - began, last - first, count, drafted, accepted)


def generation(order: Order) -> genai.GenerationConfig:
    """Describe greedy decoding of exactly so many tokens, speculative as ordered."""
    config = genai.GenerationConfig(
        max_new_tokens=order.max_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
    )
    if order.mode == PLAIN:
        return config
    if order.gamma == AUTO:
        config.assistant_confidence_threshold = CONFIDENCE
        return config
    config.num_assistant_tokens = order.gamma
    if order.mode == NGRAM:
        config.max_ngram_size = LOOKUP_NGRAM
    return config


def device_properties(options: Options) -> dict[str, Any]:
    """Choose threads, and in fp32 hold arithmetic and cache to fp32; else the defaults."""
    chosen: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
    if options.precision == "fp32":
        chosen |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return chosen


def _counts(metrics: Any) -> tuple[int | None, int | None]:
    """Return tokens drafted and accepted; only a pipeline that drafts has counted them."""
    if not hasattr(metrics, "get_num_draft_tokens"):
        return None, None
    return metrics.get_num_draft_tokens(), metrics.get_num_accepted_tokens()


def _scheduler() -> genai.SchedulerConfig:
    """Read every prompt anew, as everyone else does."""
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.cache_size = 1
    return config


@contextmanager
def opening() -> Iterator[OpenVino]:
    """Read the options; models are loaded when a mode is first asked for."""
    yield OpenVino(read_options(__doc__.split("\n")[0]))


if __name__ == "__main__":
    serve(opening)
