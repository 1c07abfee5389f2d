"""How much of what a bundle drafts its target accepts, on a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specrt.bundle import TOKENIZER, Bundle
from specrt.errors import BuildError
from specrt.loading import load
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from specrt_export.plan.model_inputs import read_calibration

PROMPTS, PROMPT, WRITTEN = 16, 64, 32
"""Places of the text that the target goes on from, tokens before each, and tokens written there."""


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
