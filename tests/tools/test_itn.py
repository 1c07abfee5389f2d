"""Inverse text normalisation: what is said is what is written, and held-out values are apart."""

from __future__ import annotations

import re
from datetime import date
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from itn.items import KINDS, MONTHS
from itn.numbers import cardinal, ordinal, year
from itn.sentences import LOOSE, TRAINED, UNSEEN
from itn.task import is_held_out, pairs

ONES = {cardinal(n): n for n in range(20)} | {cardinal(n): n for n in range(20, 100, 10)}


def number(said: str) -> int:
    """Read a number as a person does, from left to right."""
    total = part = 0
    for word in said.replace(" and ", " ").split():
        if word == "hundred":
            part *= 100
        elif word == "thousand":
            total, part = total + part * 1000, 0
        else:
            part += ONES[word]
    return total + part


@given(st.integers(0, 999_999))
def test_a_number_is_read_back(n: int) -> None:
    assert number(cardinal(n)) == n


def test_a_date_that_is_written_is_the_one_that_is_said() -> None:
    rng, years = Random(3), {year(n): n for n in range(1900, 2040)}
    days = {ordinal(n): n for n in range(1, 32)}
    for _ in range(300):
        item = KINDS["date"](rng)
        month = next(name for name in MONTHS if name in item.spoken)
        day, _, said = (
            item.spoken.replace(f" of {month}", "|").replace(f"{month} ", "").partition("|")
        )
        if not said:  # "November the ninth nineteen ten"
            day = max((one for one in days if day.startswith(f"the {one} ")), key=len)
            said = item.spoken.partition(f"the {day} ")[2]
        found = date(years[said.strip()], MONTHS.index(month) + 1, days[day.removeprefix("the ")])
        assert item.written == found.isoformat(), item


def test_one_seed_gives_the_same_pairs_and_another_others() -> None:
    several = [list(islice(pairs(*of), 20)) for of in ((1,), (1,), (2,), (1, True))]
    assert several[0] == several[1]
    assert not set(several[0]) & set(several[2])
    assert not set(several[0]) & set(several[3])


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


def test_what_is_no_item_is_copied() -> None:
    for pair in islice(pairs(5, loose=1.0), 200):
        said, written = pair.source.split(), pair.answer.split()
        assert any(character.isdigit() for character in pair.answer)
        assert said[0][0].isupper()
        copied = set(LOOSE) - {"a", "in", "of", "the"}  # which items have, too
        assert [w for w in written if w in copied] == [w for w in said if w in copied]
