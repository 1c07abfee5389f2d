"""What becomes of a plan's weights when it is opened: streamed, or filled in from beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.engines.tensorrt.library import Library
from specrt.errors import EngineError

GRAPH = "engine.onnx"
"""Beside a stripped plan: the graph, whose weights lie beside it in turn."""


@dataclass(frozen=True)
class Wants:
    """What a plan was built to be opened with."""

    streaming: bool = False
    """Weights stay in host memory, as far as the device has no room for them."""
    stripped: bool = False
    """Weights are not in the plan."""
    host_code: bool = False
    """The plan brings a runtime of its own, for later versions of the library."""


WHOLE = Wants()
"""A plan that holds all it needs."""


def supply(engine: Any, path: Path, library: Library, wants: Wants) -> None:
    """Give a deserialized plan its weights; to be done before it has contexts.

    Raises: EngineError where the library refuses.
    """
    if wants.stripped:
        _refit(engine, path.with_name(GRAPH), library)
    if wants.streaming:
        _stream(engine, path, library)


def _stream(engine: Any, path: Path, library: Library) -> None:
    """Keep as many weights on the device as fit; what is refused leaves the budget as it was."""
    with library.messages() as log:
        budget = engine.get_weight_streaming_automatic_budget()
        engine.weight_streaming_budget_v2 = budget
        taken = engine.weight_streaming_budget_v2
    if taken != budget:
        said = log.first_error or "no reason given"
        raise EngineError(
            f"{library.title} cannot stream the weights of {path} with {budget} bytes of them on "
            f"the GPU: {said}; close what else uses it, or build without weight_streaming"
        )


def _refit(engine: Any, graph: Path, library: Library) -> None:
    if not graph.is_file():
        raise EngineError(
            f"{graph} is missing, and the plan beside it holds no weights: build the bundle again"
        )
    module = library.module
    with library.messages() as log:
        refitter = module.Refitter(engine, library.logger)
        parser = module.OnnxParserRefitter(refitter, library.logger)
        done = parser.refit_from_file(str(graph)) and refitter.refit_cuda_engine()
    if not done:
        raise EngineError(
            f"{library.title} cannot fill the plan from {graph}: "
            f"{log.first_error or 'no reason given'}; build the bundle again"
        )
