"""Sizes and counts as people read them (PURE). What machines read has bytes, and plain numbers."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """`1 file`, `2,000 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
