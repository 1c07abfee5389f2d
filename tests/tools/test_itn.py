"""Inverse text normalisation: what is said is what is written, and held-out values are apart."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

import pytest

from itn.items import KINDS
from itn.sentences import TRAINED, UNSEEN
from itn.task import is_held_out, pairs


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_value_is_said_in_one_sentence_and_written_in_another_side(kind: str) -> None:
    """Values that training has are not those that are held out, and both sides have some."""
    items = [KINDS[kind](Random(n)) for n in range(400)]
    held = {item.written for item in items if is_held_out(kind, item)}
    kept = {item.written for item in items if not is_held_out(kind, item)}
    assert not held & kept
    assert kept
    assert bool(held) == (kind != "place")


def test_held_out_pairs_have_no_sentence_of_training() -> None:
    fixed = [re.split(r"[\[{|\]}]", template)[0] for template in TRAINED]
    for pair in islice(pairs(4, held_out=True, sentences=(1,)), 100):
        assert not any(len(begin) > 10 and pair.source.startswith(begin) for begin in fixed)
    assert not set(TRAINED) & set(UNSEEN)
