"""Numerals in English and German: pairs of sentences that need no file.

They are a small language with real grammar: German says the units before the tens and writes all in one word (`three hundred and forty
two`, `dreihundertzweiundvierzig`), so a model has to reorder and cannot translate word by word.
"""

from __future__ import annotations

_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
twenty thirty forty fifty sixty seventy eighty ninety
null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn
zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig
"""
_EN, _EN_TENS, _DE, _DE_TENS = (line.split() for line in _WORDS.strip().splitlines())


def english(number: int) -> str:
    """Return the numeral of 0 to 9999."""
    if number < 20:
        return _EN[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return _EN_TENS[tens - 2] + (f" {_EN[units]}" if units else "")
    word, size, joint = ("hundred", 100, " and ") if number < 1000 else ("thousand", 1000, " ")
    high, low = divmod(number, size)
    joint = " and " if low and low < 100 else joint
    return f"{english(high)} {word}" + (f"{joint}{english(low)}" if low else "")


def german(number: int) -> str:
    """Return the numeral of 0 to 9999."""
    return "eins" if number == 1 else _german(number)


def _german(number: int) -> str:
    if number < 20:
        return _DE[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return (f"{_DE[units]}und" if units else "") + _DE_TENS[tens - 2]
    word, size = ("hundert", 100) if number < 1000 else ("tausend", 1000)
    high, low = divmod(number, size)
    return _german(high) + word + (("eins" if low == 1 else _german(low)) if low else "")
