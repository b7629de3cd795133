"""Sentence pairs: two files, line by line, or generated ones: English numerals and the same in German.

Numerals are a small language with real grammar: German says the units before the tens and writes all in one word
(`three hundred and forty two`, `dreihundertzweiundvierzig`), so a model has to reorder and cannot translate word by word.
Sentences are read as characters: no tokenizer is needed for any pair of languages.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

PAD, BEGIN, END = 0, 1, 2
FIRST = 3
"""Token of the first character of the vocabulary."""

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


def numerals(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return `count` different pairs, in an order that depends on the seed alone."""
    return [(english(number), german(number)) for number in random.Random(seed).sample(range(10_000), count)]


def aligned(source: Path, target: Path) -> list[tuple[str, str]]:
    """Return the pairs of two files of as many lines; pairs with an empty side are left out. Raises SystemExit."""
    sides = [path.read_text(encoding="utf-8").splitlines() for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise SystemExit(f"{source} has {len(sides[0])} lines, {target} has {len(sides[1])}: wanted aligned files")
    return [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True) if a.strip() and b.strip()]


class Characters:
    """The characters of one language, as tokens."""

    def __init__(self, sentences: list[str]) -> None:
        self._all = sorted(set("".join(sentences)))
        self._token = {character: FIRST + place for place, character in enumerate(self._all)}
        self.size = FIRST + len(self._all)

    def encode(self, sentence: str, length: int) -> torch.Tensor:
        """Return begin, characters (unknown ones left out; cut to `length`) and end."""
        known = [self._token[character] for character in sentence if character in self._token][:length]
        return torch.tensor([BEGIN, *known, END])

    def decode(self, tokens: list[int]) -> str:
        """Return the text up to the first end."""
        end = tokens.index(END) if END in tokens else len(tokens)
        return "".join(self._all[token - FIRST] for token in tokens[:end] if token >= FIRST)


def padded(sentences: list[torch.Tensor]) -> torch.Tensor:
    """Return tokens_BT, short ones filled up with PAD."""
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
