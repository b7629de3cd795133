"""The versions of torch that the tests cover, and what to say of another one (PURE)."""

from __future__ import annotations

import re

TESTED = ("2.13.0", "2.14.1")
"""The first with all tests, the last with the unit tests, tests/chaos/test_launch.py and `make newest` only."""


def untested(version: str) -> str:
    """Return a warning that names both for a version outside the tested range; empty: it is within."""
    oldest, newest = TESTED
    if _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        return ""
    return (
        f"torch {version} is installed, and TTP is tested with torch {oldest} to {newest}: install one of these, or run"
        " `make demo` with this one first"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """`2.14.0a0+git1` -> (2, 14, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
