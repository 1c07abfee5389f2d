"""Numbers in English words."""

from __future__ import annotations


def words(text: str, between: str | None = None) -> tuple[str, ...]:
    """Return the words of a list."""
    return tuple(text.split(between))


SMALL = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
TENS = words("_ _ twenty thirty forty fifty sixty seventy eighty ninety")
ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def cardinal(n: int) -> str:
    """Say a number below a million: 4312 is `four thousand three hundred and twelve`."""
    if n < 20:
        return SMALL[n]
    if n < 100:
        ten, one = divmod(n, 10)
        return f"{TENS[ten]} {SMALL[one]}" if one else TENS[ten]
    if n < 1000:
        hundred, rest = divmod(n, 100)
        return f"{SMALL[hundred]} hundred" + (f" and {cardinal(rest)}" if rest else "")
    thousand, rest = divmod(n, 1000)
    link = " and " if 0 < rest < 100 else " "
    return f"{cardinal(thousand)} thousand" + (f"{link}{cardinal(rest)}" if rest else "")


def ordinal(n: int) -> str:
    """Say a rank: 23 is `twenty third`."""
    *before, last = cardinal(n).split()
    if last in ORDINALS:
        last = ORDINALS[last]
    else:
        last = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return " ".join([*before, last])


def rank(n: int) -> str:
    """Write a rank: 23 is `23rd`."""
    ending = "th" if n // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def year(n: int) -> str:
    """Say a year: 1998 is `nineteen ninety eight`, 2005 `two thousand and five`."""
    century, rest = divmod(n, 100)
    if century == 20 and rest < 10:
        return cardinal(n)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def digits(text: str) -> str:
    """Say digits one by one: 0744 is `oh seven double four`."""
    words, i = [], 0
    while i < len(text):
        word = "oh" if text[i] == "0" else SMALL[int(text[i])]
        double = text[i : i + 2] == text[i] * 2
        words.append(f"double {word}" if double else word)
        i += 2 if double else 1
    return " ".join(words)
