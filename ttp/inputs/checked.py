"""Checks of values that come from outside (PURE): JSON, YAML. A violation names its path, the value and what is expected.

Owns the checks; knows no format. Never changes a value: an integer that stands for a float becomes one, no more.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

INT64_MAX = 2**63 - 1
DEEPEST = 64
"""Levels of lists and mappings within each other; what is nested deeper is refused before anything recurses into it."""


class Invalid(ValueError):
    """A value is not what is expected: `state.trainer.samples: got -3, expected an integer >= 0`."""

    def __init__(self, path: str, value: object, expected: str) -> None:
        super().__init__(f"{shown_path(path)}: got {shown(value)}, expected {expected}")


def shown_path(path: str) -> str:
    """Return a path, of keys or of a file, for a message: short, one line. It comes from outside too."""
    plain = path.encode("unicode_escape").decode() if not path.isprintable() else path
    return plain if len(plain) <= 300 else f"{plain[:150]}...{plain[-150:]}"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict, self.maxstring, self.maxlong, self.maxother = 2, 4, 4, 80, 40, 60

    def repr_int(self, value: int, level: int) -> str:
        return super().repr_int(value, level) if value.bit_length() < 4096 else f"<{value.bit_length()} bits>"


def shown(value: object) -> str:
    """Return a value for a message: short, one line, whatever it is."""
    return _Short().repr(value).encode("ascii", "backslashreplace").decode()


def integer(value: object, path: str, least: int = 0, most: int = INT64_MAX) -> int:
    """Return an integer within bounds. Raises Invalid."""
    if type(value) is not int or not least <= value <= most:
        bound = f"an integer >= {least}" if most == INT64_MAX else f"an integer from {least} to {most}"
        raise Invalid(path, value, bound)
    return value


def number(value: object, path: str, least: float = -math.inf, most: float = math.inf) -> float:
    """Return a finite number within bounds. Raises Invalid."""
    if type(value) is int and abs(value) <= INT64_MAX:
        value = float(value)
    if type(value) is not float or not math.isfinite(value) or not least <= value <= most:
        bounds = [f">= {least:g}"] if least > -math.inf else []
        bounds += [f"<= {most:g}"] if most < math.inf else []
        raise Invalid(path, value, " ".join(["a finite number", " and ".join(bounds)]).rstrip())
    return value


def boolean(value: object, path: str) -> bool:
    """Return a boolean. Raises Invalid."""
    if type(value) is not bool:
        raise Invalid(path, value, "true or false")
    return value


def optional_boolean(value: object, path: str) -> bool | None:
    """Return a boolean, or None for null and for a key that older versions do not write. Raises Invalid."""
    return None if value is None else boolean(value, path)


def string(value: object, path: str) -> str:
    """Return a string that UTF-8 can carry and C can hold. Raises Invalid."""
    if type(value) is not str or "\0" in value or not _encodes(value):
        raise Invalid(path, value, "a string without NUL and lone surrogates")
    return value


def file_name(value: object, path: str) -> str:
    """Return the name of a file within its directory. Raises Invalid."""
    name = string(value, path)
    if name in ("", ".", "..") or "/" in name or len(name.encode()) > 255:
        raise Invalid(path, value, "a file name of 1 to 255 bytes, without a directory")
    return name


def mapping(value: object, path: str) -> dict[str, Any]:
    """Return a mapping with strings as keys. Raises Invalid."""
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise Invalid(path, value, "a mapping of strings to values")
    return value


def items(value: object, path: str) -> Iterator[tuple[Any, str]]:
    """Yield each item of a list with its path. Raises Invalid."""
    if type(value) is not list:
        raise Invalid(path, value, "a list")
    return ((item, f"{path}[{number}]") for number, item in enumerate(value))


def integers(value: object, path: str) -> tuple[int, ...]:
    """Return a list of integers >= 0. Raises Invalid."""
    return tuple(integer(item, where) for item, where in items(value, path))


def are_naturals(values: Iterable[object]) -> bool:
    """Say whether all are integers >= 0: the quick check of tables with a million rows."""
    return all(type(value) is int and 0 <= value <= INT64_MAX for value in values)


def inodes(value: object, path: str) -> dict[str, int]:
    """Return a mapping of paths to inodes. Raises Invalid."""
    return {name: integer(inode, f"{path}.{name}", most=2**64 - 1) for name, inode in mapping(value, path).items()}


def field(fields: dict[str, Any], name: str, path: str) -> tuple[Any, str]:
    """Return a required value of a mapping, with its path. Raises Invalid."""
    where = f"{path}.{name}" if path else name
    if name not in fields:
        raise ValueError(f"{shown_path(where)}: is missing, expected a value")
    return fields[name], where


def check_depth(value: object, path: str, deepest: int = DEEPEST) -> None:
    """Refuse what is nested deeper than `deepest` levels. Raises Invalid. Does not recurse."""
    level: list[Any] = [value]
    for _ in range(deepest + 1):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise Invalid(path, value, f"at most {deepest} levels of lists and mappings within each other")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
