"""What is said one way and written another: amounts, dates, times, codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from itn.numbers import cardinal, digits, ordinal, rank, words, year

MONTHS = words(
    "January February March April May June July August September October November December"
)
DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LETTERS = words(
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november "
    "oscar papa quebec romeo sierra tango uniform victor whiskey xray yankee zulu"
)
CURRENCIES = (("£", "pound", "pence"), ("$", "dollar", "cents"), ("€", "euro", "cents"))
UNITS = {
    "length": {"metres": "m", "kilometres": "km", "centimetres": "cm", "miles": "mi"},
    "weight": {"kilograms": "kg", "grams": "g", "tonnes": "t"},
    "volume": {"litres": "l", "millilitres": "ml", "gallons": "gal"},
    "duration": {"minutes": "min", "hours": "h", "seconds": "s"},
    "power": {"kilowatts": "kW", "volts": "V", "amps": "A"},
    "heat": {"degrees": "°C"},
}


@dataclass(frozen=True)
class Item:
    """One thing in both forms."""

    spoken: str
    written: str


def count(rng: Random) -> Item:
    """Draw a number of 2 to 999,999, all lengths as often."""
    n = rng.randint(2, 10 ** rng.randint(1, 6) - 1)
    return Item(cardinal(n), f"{n:,}")


def money(rng: Random) -> Item:
    """Draw an amount in pounds, dollars or euros."""
    sign, whole, part = rng.choice(CURRENCIES)
    n, cents = rng.randint(2, 10 ** rng.randint(1, 5) - 1), rng.randint(1, 99)
    said, style = f"{cardinal(n)} {whole}s", rng.randrange(3)
    if style == 0:
        return Item(said, f"{sign}{n:,}")
    if style == 1 and cents > 9:
        return Item(f"{said} {cardinal(cents)}", f"{sign}{n:,}.{cents:02}")
    cents += cents == 1
    return Item(f"{said} and {cardinal(cents)} {part}", f"{sign}{n:,}.{cents:02}")


def date(rng: Random) -> Item:
    """Draw a day of 1900 to 2039; it is written as ISO 8601 has it."""
    month, y = rng.randrange(12), rng.randint(1900, 2039)
    day = rng.randint(1, DAYS[month])
    said = rng.choice(
        (f"the {ordinal(day)} of {MONTHS[month]}", f"{MONTHS[month]} the {ordinal(day)}")
    )
    return Item(f"{said} {year(y)}", f"{y}-{month + 1:02}-{day:02}")


def time(rng: Random) -> Item:
    """Draw a time of day; it is written on 24 hours."""
    h, m = rng.randrange(24), rng.choice((rng.randrange(60), rng.randrange(0, 60, 5)))
    part = "morning" if h < 12 else "afternoon" if h < 18 else "evening"
    this, after = (cardinal((x - 1) % 12 + 1) for x in (h, h + 1))
    if m == 0:
        said = f"{this} o'clock"
    elif m % 5 == 0 and rng.random() < 0.7:
        minutes = {15: "a quarter", 30: "half"}.get(min(m, 60 - m), cardinal(min(m, 60 - m)))
        said = f"{minutes} past {this}" if m <= 30 else f"{minutes} to {after}"
    else:
        said = f"{this} {'oh ' if m < 10 else ''}{cardinal(m)}"
    return Item(f"{said} in the {part}", f"{h:02}:{m:02}")


def phone(rng: Random) -> Item:
    """Draw a telephone number, said digit by digit."""
    numbers = "0" + "".join(rng.choices("0123456789", k=10))
    groups = numbers[:5], numbers[5:8], numbers[8:]
    return Item(", ".join(map(digits, groups)), " ".join(groups))


def percent(rng: Random) -> Item:
    """Draw a percentage with up to two decimals."""
    number = _decimal(rng, 100)
    return Item(f"{number.spoken} percent", f"{number.written}%")


def measure(units: dict[str, str], rng: Random) -> Item:
    """Draw a number with one of the units."""
    unit, short = rng.choice(list(units.items()))
    number = _decimal(rng, 1000)
    if rng.random() < 0.2:
        n = rng.randint(2, 60)
        number = Item(f"{cardinal(n)} and a half", f"{n}.5")
    return Item(f"{number.spoken} {unit}", f"{number.written} {short}")


def place(rng: Random) -> Item:
    """Draw a rank of 1st to 199th."""
    n = rng.randint(1, 199)
    return Item(ordinal(n), rank(n))


def code(rng: Random) -> Item:
    """Draw a reference: two or three letters, three or four digits."""
    letters = rng.choices(LETTERS, k=rng.randint(2, 3))
    numbers = "".join(rng.choices("0123456789", k=rng.randint(3, 4)))
    said = f"{' '.join(letters)} {digits(numbers)}"
    return Item(said, "".join(word[0].upper() for word in letters) + f"-{numbers}")


def _decimal(rng: Random, below: int) -> Item:
    n = rng.randint(2, below - 1)
    decimals = "".join(rng.choices("123456789", k=rng.choice((0, 1, 1, 2))))
    if not decimals:
        return Item(cardinal(n), str(n))
    return Item(f"{cardinal(n)} point {_apart(decimals)}", f"{n}.{decimals}")


def _apart(text: str) -> str:
    """Say decimals: 44 is `four four`."""
    return " ".join(cardinal(int(digit)) for digit in text)


KINDS: dict[str, Callable[[Random], Item]] = {
    "count": count,
    "money": money,
    "date": date,
    "time": time,
    "phone": phone,
    "percent": percent,
    "place": place,
    "code": code,
    **{name: partial(measure, units) for name, units in UNITS.items()},
}
"""What a sentence can have in braces, by name."""
CLOSED = ("place",)
"""Kinds with so few values that all of them are trained on."""
