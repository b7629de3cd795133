"""What the examples of other people's trainers bring along: sentence pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.examples.loading import module_of


def test_numerals_are_translated() -> None:
    """German says units before tens, in one word; every number has a translation of its own."""
    pairs = module_of("translation/pairs.py")
    assert [(pairs.english(n), pairs.german(n)) for n in (0, 1, 17, 21, 101, 342, 2100)] == [
        ("zero", "null"),
        ("one", "eins"),
        ("seventeen", "siebzehn"),
        ("twenty one", "einundzwanzig"),
        ("one hundred and one", "einhunderteins"),
        ("three hundred and forty two", "dreihundertzweiundvierzig"),
        ("two thousand one hundred", "zweitausendeinhundert"),
    ]
    assert len({side for pair in pairs.numerals(10_000) for side in pair}) == 20_000


def test_files_that_are_not_aligned_are_refused(tmp_path: Path) -> None:
    """With both numbers of lines; a pair with an empty side is left out."""
    pairs = module_of("translation/pairs.py")
    (tmp_path / "a").write_text("one\n\nthree\n")
    (tmp_path / "b").write_text("eins\nzwei\n")
    with pytest.raises(SystemExit, match=r"has 3 lines, .* has 2"):
        pairs.aligned(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").write_text("eins\nzwei\ndrei\n")
    assert pairs.aligned(tmp_path / "a", tmp_path / "b") == [("one", "eins"), ("three", "drei")]


def test_characters_come_back_from_their_tokens() -> None:
    """Begin and end are tokens of their own, unknown characters are left out."""
    pairs = module_of("translation/pairs.py")
    characters = pairs.Characters(["abc", "de"])
    tokens = characters.encode("bad!", 8).tolist()
    assert (tokens[0], tokens[-1]) == (pairs.BEGIN, pairs.END) and characters.decode(tokens[1:]) == "bad"
