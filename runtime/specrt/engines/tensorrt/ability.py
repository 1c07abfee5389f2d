"""What a machine lacks to run or to build TensorRT plans."""

from __future__ import annotations

from specrt.cuda import Survey, survey
from specrt.engines.tensorrt.bindings import cuda_bindings
from specrt.engines.tensorrt.library import open_library
from specrt.errors import EngineError


def lacks_to_run(backend: str, found: Survey | None = None) -> str:
    """Say what this machine lacks to run plans of a backend; empty where nothing is missing."""
    found = survey() if found is None else found
    if found.problem:
        return f"{found.problem}; install the NVIDIA driver"
    try:
        library = open_library(backend)
        cuda_bindings()
    except EngineError as error:
        return str(error)
    known, ours = library.capabilities, found.gpus[0].capability
    if known and ours and ours not in known:
        return (
            f"{library.title} is for compute capability {', '.join(known)}, and "
            f"{found.gpus[0].name} has {ours}; build for tensorrt or ort-cuda"
        )
    return ""


def lacks_to_build(backend: str, found: Survey | None = None) -> str:
    """Say what this machine lacks to build plans for a backend; empty where nothing is missing."""
    try:
        library = open_library(backend)
    except EngineError as error:
        return str(error)
    if library.flavour.builds_without_gpu:
        return ""
    problem = (survey() if found is None else found).problem
    if not problem:
        return ""
    return f"{problem}; {library.flavour.title} builds on the GPU that will run the plan"
