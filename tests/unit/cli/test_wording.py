"""Sizes and counts in sentences."""

from __future__ import annotations

import pytest

from ttp.text.wording import counted, ranks_text, runs, size_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    """Binary units."""
    assert size_text(nbytes) == text


def test_one_has_no_plural() -> None:
    """And thousands are set apart."""
    assert [counted(count, "file") for count in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]


def test_ranks_are_named_shortly() -> None:
    """Runs of them by their ends, in order; of many the first runs."""
    assert [ranks_text(ranks) for ranks in ([3], [5, 0, 1, 2], [])] == ["rank 3", "ranks 0-2, 5", "no rank"]
    assert runs([0, 2, 3, 5], 2) == "0, 2-3, ..." and runs([0, 2, 3], 2) == "0, 2-3"
