"""Pairs of a text as it is said and as it is written, from a seed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from zlib import crc32

from itn.items import CLOSED, KINDS, Item
from itn.numbers import SMALL
from itn.sentences import (
    CODAS,
    ENDINGS,
    LOOSE,
    ONSETS,
    PHRASES,
    SYLLABLES,
    TRAINED,
    UNSEEN,
    VOWELS,
    WORDS,
)

CHOICE = re.compile(r"\[([^]]*)\]")
DRAWN = re.compile(r"\{(\w+)\}")
ONE_IN = 8  # values of open kinds are held out


@dataclass(frozen=True)
class Pair:
    """A source and the one answer that is right."""

    source: str
    answer: str


def is_held_out(kind: str, item: Item) -> bool:
    """Tell whether a value is kept from training."""
    return kind not in CLOSED and crc32(f"{kind} {item.written}".encode()) % ONE_IN == 0


def pairs(
    seed: int, held_out: bool = False, sentences: Sequence[int] = (1, 2, 3), loose: float = 0.0
) -> Iterator[Pair]:
    """Yield pairs without end, the same for the same arguments.

    So large a share of the sentences as `loose` says are items among words in no order.

    Held-out pairs have other sentences than those for training, and in them every value of a kind
    with many values (KINDS but CLOSED) is one that training pairs never have.
    """
    rng = Random(f"{seed} {held_out}")
    while True:
        templates = UNSEEN if held_out else TRAINED
        chosen = rng.sample(templates, rng.choice(sentences))
        made = [
            _loose(rng, held_out)
            if loose and rng.random() < loose
            else _sentence(rng, template, held_out)
            for template in chosen
        ]
        yield Pair(" ".join(one.spoken for one in made), " ".join(one.written for one in made))


def exact_matches(wanted: Sequence[Pair], answers: Sequence[str]) -> int:
    """Count the answers that are right to the letter."""
    return sum(pair.answer == answer for pair, answer in zip(wanted, answers, strict=True))


def _sentence(rng: Random, template: str, held_out: bool) -> Item:
    template = CHOICE.sub(lambda found: rng.choice(found[1].split("|")), template)
    spoken, written, at = "", "", 0
    for found in DRAWN.finditer(template):
        copied, item = template[at : found.start()], _draw(rng, found[1], held_out)
        spoken, written, at = (
            spoken + copied + item.spoken,
            written + copied + item.written,
            found.end(),
        )
    return Item(spoken + template[at:], written + template[at:])


def _loose(rng: Random, held_out: bool) -> Item:
    spoken: list[str] = []
    written: list[str] = []
    for _ in range(rng.randint(1, 2)):
        for _ in range(rng.randint(1, 6)):
            word = _any_word(rng)
            spoken.append(word)
            written.append(word)
        item = _draw(rng, rng.choice(list(KINDS)), held_out)
        spoken.append(item.spoken)
        written.append(item.written)
    if rng.random() < 0.6:
        word = _any_word(rng)
        spoken.append(word)
        written.append(word)
    first = spoken[0][0].upper() + spoken[0][1:]
    return Item(" ".join([first, *spoken[1:]]) + ".", " ".join([first, *written[1:]]) + ".")


def _any_word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        word = rng.choice(LOOSE)
    elif kind < 0.5:
        word = rng.choice(PHRASES)
    elif kind < 0.65:
        word = _spelled(rng)
    elif kind < 0.8:
        word = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3)))
    else:
        word = _word(rng, rng.choice(("name", "town", "goods", "company")))
    return word + "," if rng.random() < 0.1 else word


def _spelled(rng: Random) -> str:
    while True:
        parts = (ONSETS, VOWELS, CODAS) * rng.randint(1, 2)
        word = "".join(rng.choice(part) for part in parts)
        if word not in (*SMALL, "past"):
            return word


def _draw(rng: Random, kind: str, held_out: bool) -> Item:
    if kind not in KINDS:
        word = _word(rng, kind)
        return Item(word, word)
    while True:
        item = KINDS[kind](rng)
        if kind in CLOSED or is_held_out(kind, item) == held_out:
            return item


def _word(rng: Random, kind: str) -> str:
    made_up = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()
    if kind == "company":
        return f"{made_up} {rng.choice(ENDINGS)}"
    if kind == "goods" or rng.random() < 0.5:
        return rng.choice(WORDS[kind])
    return made_up
