"""Run transformers on torch: `generate`, alone, with an assistant model, or with prompt lookup.

fp32 only: its int8 and int4 on a CPU need kernels from other packages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from time import perf_counter_ns
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from peerbench.options import Options, read_options
from peerbench.protocol import AUTO, NGRAM, PLAIN, Completed, Hello, Order, serve


class Arrivals(BaseStreamer):
    """Notes when tokens arrive and how many; the prompt comes first and is not one of them."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []

    def put(self, value: torch.Tensor) -> None:
        """Note one delivery."""
        self.noted.append((perf_counter_ns(), value.numel()))

    def end(self) -> None:
        """Need nothing at the end."""


class Transformers:
    """A target and its assistant."""

    def __init__(self, options: Options) -> None:
        if options.precision != "fp32":
            raise SystemExit(f"transformers runs fp32 here, not {options.precision}")
        torch.set_num_threads(options.threads)
        self._target = _load(options.target)
        self._draft: Any = _load(options.draft) if options.draft else None
        self.hello = Hello(
            "transformers",
            [PLAIN, *options.drafting, NGRAM],
            {name: version(name) for name in ("transformers", "torch")},
            options.drafting,
        )

    def complete(self, prompt: Sequence[int], order: Order) -> Completed:
        """Generate with a streamer that takes the times."""
        arrivals = Arrivals()
        ids = torch.tensor([list(prompt)])
        began = perf_counter_ns()
        with torch.inference_mode():
            made = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=order.max_tokens,
                streamer=arrivals,
                **self._speculation(order),
            )
        first, last = arrivals.noted[1], arrivals.noted[-1]
        tokens = made[0, len(prompt) :].tolist()
        return Completed(tokens, first[0] - began, last[0] - first[0], first=first[1])

    def _speculation(self, order: Order) -> dict[str, Any]:
        if order.mode == NGRAM:
            if order.gamma == AUTO:
                raise ValueError("prompt lookup has no policy of its own; give a gamma")
            return {"prompt_lookup_num_tokens": order.gamma}
        if order.mode == PLAIN:
            return {}
        wish = self._draft.generation_config
        if order.gamma == AUTO:  # the defaults: a confidence threshold that adapts, at most 20
            wish.num_assistant_tokens, wish.assistant_confidence_threshold = 20, 0.4
        else:
            wish.num_assistant_tokens, wish.assistant_confidence_threshold = order.gamma, 0
        wish.num_assistant_tokens_schedule = "constant"
        return {"assistant_model": self._draft}


def _load(folder: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None  # so that nothing ends early
    return model


@contextmanager
def opening() -> Iterator[Transformers]:
    """Load both models."""
    yield Transformers(read_options(__doc__.split("\n")[0]))


if __name__ == "__main__":
    serve(opening)
