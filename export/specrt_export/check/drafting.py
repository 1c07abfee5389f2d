"""How much of what a bundle drafts its target accepts, on a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specrt.bundle import TOKENIZER, Bundle
from specrt.engine.backends import backend_named
from specrt.errors import BuildError
from specrt.loading import load
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from specrt_export.compile.compiler import Progress
from specrt_export.heads.mtp_format import KIND as MTP
from specrt_export.plan.build_plan import BuildPlan
from specrt_export.plan.calibration_text import read_calibration

PROMPTS, PROMPT, WRITTEN = 16, 64, 32
"""Places of the text that the target goes on from, tokens before each, and tokens written there."""


def measured_acceptance(plan: BuildPlan, bundle: Path, progress: Progress) -> tuple[float, ...]:
    """Return what is accepted of a head's drafts, by position; empty where it cannot be measured.

    Raises: BuildError for too few.
    """
    least = plan.quality.min_acceptance
    if plan.calibration is None:
        progress(
            "warning: nothing tells how much of what the head drafts is accepted; name a text as "
            "`calibration` in [quality]",
            0.98,
        )
        return ()
    if missing := backend_named(plan.target.options.backend).missing():
        progress(
            f"warning: how much of what the head drafts is accepted is not measured ({missing}); "
            "build it for ort-cpu too, or where it will run",
            0.98,
        )
        return ()
    progress("draft", 0.98)
    shares = acceptance_by_position(bundle, plan.calibration)
    if shares[0] < least:
        carried = plan.draft is not None and plan.draft.kind == MTP
        raise BuildError(
            f"the target accepts {shares[0]:.2f} of the first tokens that the head drafts, and "
            f"quality.min_acceptance is {least}; the head may be of another target, "
            + ("" if carried else "read other layers (`layers` in [draft]), ")
            + "or be trained on text with another chat template"
            + ('. Build without it by `kind = "none"` in [draft]' if carried else "")
        )
    return tuple(shares)


def acceptance_by_position(bundle: Path, text: Path) -> list[float]:
    """Return, for each position of a draft, the share of rounds in which it was accepted.

    The target goes on greedily from places all over the text, with the widest gamma.
    Raises: BuildError for a text that is missing or too short.
    """
    manifest = Bundle.open(bundle).manifest
    tokenizer = Tokenizer(bundle / TOKENIZER, manifest.bos_token_id)
    most = manifest.max_length - WRITTEN
    pieces = read_calibration(text, tokenizer, max(1, min(PROMPT, most))).scored[:PROMPTS]
    gamma = max(manifest.gammas)
    accepted = np.zeros(gamma)
    rounds = 0
    params = SamplingParams(max_tokens=WRITTEN, ignore_eos=True)
    with load(bundle, text_memory_bytes=0) as generator:
        for piece in pieces:
            done = generator.generate(piece.tolist(), params, gamma=gamma, drafter="model")
            for one in done.speculation.log:
                if one.drafted == gamma:
                    rounds += 1
                    accepted[: one.accepted] += 1
    if not rounds:
        raise BuildError(
            f"no draft of {gamma} tokens fits {manifest.max_length} positions; raise max_length"
        )
    return [float(share) for share in accepted / rounds]
