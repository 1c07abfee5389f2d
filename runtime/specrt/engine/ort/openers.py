"""Opens the engines of `ort-cpu`: one function for each kind of model."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.head_engine import HeadEngine
from specrt.engine.ort.block_engine import OrtBlockEngine
from specrt.engine.ort.contrib_engine import ContribEngine
from specrt.engine.ort.ort_engine import OrtEngine, open_session, widths
from specrt.engine.protocol import Engine, PackedEngine
from specrt.errors import EngineError


def open_decoder(spec: EngineSpec) -> Engine:
    """Open a language model."""
    session, weights = open_session(spec.path, spec.files, spec.threads)
    return _decoder(spec, session, weights)


def open_head(spec: EngineSpec) -> Engine:
    """Open a head that drafts a chain of tokens.

    Raises: EngineError also where the target leaves no features of its width.
    """
    session, weights = open_session(spec.path, spec.files, spec.threads)
    features = _target_features(spec, widths(session.get_inputs()).get("hidden"))
    return HeadEngine(_decoder(spec, session, weights), features)


def open_block_head(spec: EngineSpec) -> Engine:
    """Open a head that drafts a block in one pass.

    Raises: EngineError also where the target leaves no features of its width.
    """
    session, weights = open_session(spec.path, spec.files, spec.threads)
    features = _target_features(spec, widths(session.get_inputs()).get("context"))
    return OrtBlockEngine(session, weights, spec, features)


def open_kv_head(spec: EngineSpec) -> Engine:
    """Open a head that attends to its target's keys and values, and keeps none.

    Raises: EngineError also where the target leaves no features of its width, or other buffers.
    """
    session, weights = open_session(spec.path, spec.files, spec.threads)
    features = _target_features(spec, widths(session.get_inputs()).get("hidden"))
    engine = OrtEngine(session, weights, spec)
    there = {} if spec.target is None else spec.target.traits.buffers
    missing = sorted({*spec.geometry.lent.values()} - there.keys())
    if missing:
        raise EngineError(
            f"{spec.path} is a head that reads {', '.join(missing)} of its target, which has no "
            "such buffers here; build both in one bundle of `ort-cpu`"
        )
    engine.lend({name: there[own] for name, own in spec.geometry.lent.items()})
    return HeadEngine(engine, features, remembers=False)


def _decoder(spec: EngineSpec, session: Any, weights: tuple[Any, ...]) -> PackedEngine:
    # Graphs of the kernels take the tokens of all rows, and which row each is of.
    lowered_for_kernels = "slots" in widths(session.get_inputs())
    make = OrtEngine if lowered_for_kernels else ContribEngine
    return make(session, weights, spec)


def _target_features(spec: EngineSpec, width: int | None) -> NDArray[np.float32]:
    """Return what the target leaves for a head that reads features of a width.

    Raises: EngineError where that is nothing, or of another width.
    """
    features = None if spec.target is None else spec.target.traits.features
    if features is None or features.shape[-1] != width:
        left = "no features" if features is None else f"features of width {features.shape[-1]}"
        raise EngineError(
            f"{spec.path} is a head that reads features of width {width or 0}, and its target "
            f"leaves {left} here; build both in one bundle of `ort-cpu`"
        )
    return features
