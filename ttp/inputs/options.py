"""Numbers on a command line: types for argparse that refuse what is out of bounds, in one line.

Owns the bounds' wording. Never a default and never an option's name: argparse says the name.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from ttp.inputs import checked

MOST = 2**31 - 1


def whole(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """Return a type for integers from `least` to `most`."""

    def read(text: str) -> int:
        sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
        # Python refuses thousands of digits by an exception of its own.
        value = sign * int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {checked.shown(text)}, expected an integer from {least} to {most}")
        return value

    return read


def above_zero(what: str, most: float, least: float = 0.0) -> Callable[[str], float]:
    """Return a type for numbers above 0, from `least` to `most`. `what`: of which they are, for the message."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value <= most and value >= least):
            bounds = f"from {least:g}" if least else "above 0"
            raise argparse.ArgumentTypeError(f"got {checked.shown(text)}, expected {what} {bounds}, at most {most:g}")
        return value

    return read
