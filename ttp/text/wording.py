"""Sizes, counts and ranks as people read them (PURE). What machines read has bytes, and plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def size_text(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(nbytes, 1) < 1024:  # not `1024.0 KiB`
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """`1 file`, `2,000 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    listed = sorted(set(ranks))
    return f"rank{'s' if len(listed) > 1 else ''} {runs(listed)}" if listed else "no rank"


def runs(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ascending ranks shortly: `0-3, 8, 12-15`; the first `most` runs of them."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1][1:] = [rank]
        else:
            found.append([rank])
    texts = ["-".join(map(str, run)) for run in found[:most]]
    return ", ".join(texts) + (", ..." if len(texts) < len(found) else "")
