"""Whether a text is the same one is seen in its contents, at a cost that does not grow with it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.trainer.data import spots
from ttp.trainer.data.megatron_indexed import IndexedTokens, IndexedWriter
from ttp.trainer.data.spots import BLOCK, BLOCKS, EDGE, spot_hash
from ttp.trainer.data.text_cache import prepared
from ttp.trainer.data.tokenizer import Bytes
from ttp.trainer.data.tokens import FileText, Tokens, token_files

LONG = 3 * BLOCKS * BLOCK
"""Tokens of a text of which not all is hashed."""


class Counted:
    """Any number of tokens, and which of them were read."""

    name = "counted"

    def __init__(self, size: int) -> None:
        self.size = size
        self.read_ranges: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        self.read_ranges.append((start, stop))
        return np.zeros(stop - start, np.uint8)

    def fingerprint(self) -> str:
        return spot_hash(self, "")


@pytest.mark.parametrize("size", [BLOCKS * BLOCK + 1, LONG, 10**9, 10**13 + 7])
def test_long_text_is_looked_at_in_equal_distances(size: int) -> None:
    """Both ends as before, and blocks from the first token to the last: as many for any size."""
    text = Counted(size)
    text.fingerprint()
    first, *blocks, last = text.read_ranges
    assert (first, last) == ((0, EDGE), (size - EDGE, size))
    assert len(blocks) == BLOCKS and {stop - start for start, stop in blocks} == {BLOCK}
    assert (blocks[0][0], blocks[-1][1]) == (0, size)
    distances = {after[0] - before[0] for before, after in itertools.pairwise(blocks)}
    assert max(distances) - min(distances) <= 1


@given(st.integers(0, BLOCKS * BLOCK))
def test_short_text_is_hashed_whole(size: int) -> None:
    """Where it is no longer than the blocks of a long one."""
    text = Counted(size)
    text.fingerprint()
    assert text.read_ranges == [(0, size)]


def test_what_is_known_of_a_text_and_its_size_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts of equal spots differ by them."""
    monkeypatch.setattr(spots, "spots", lambda size: [])
    assert len({spot_hash(Counted(size), known) for size in (1, 2) for known in "ab"}) == 4


def text_folder(root: Path, content: npt.NDArray[Any]) -> Tokens:
    (root / "text").mkdir(exist_ok=True)
    whole = content.astype(np.uint8).tobytes()
    for name, part in (("a", whole[: LONG // 3]), ("b", whole[LONG // 3 :])):
        (root / "text" / name).write_bytes(part)
        os.utime(root / "text" / name, ns=(0, 0))
    return FileText(root / "text")


def array(root: Path, content: npt.NDArray[Any]) -> Tokens:
    np.save(root / "ids.npy", content.astype(np.uint16))
    found = token_files(root / "ids.npy", "uint16")
    assert found is not None
    return found


def indexed(root: Path, content: npt.NDArray[Any]) -> Tokens:
    writer = IndexedWriter(root / "text", "uint16")
    writer.add(content, ends_document=True)
    writer.finish()
    return IndexedTokens(root / "text")


Make = Callable[[Path, npt.NDArray[Any]], Tokens]


@pytest.mark.parametrize("make", [text_folder, array, indexed])
def test_text_of_equal_size_that_was_edited_is_another_one(tmp_path: Path, make: Make) -> None:
    """At its ends and between them; the same contents are the same text."""
    content = np.arange(LONG) % 250 + 1
    known = make(tmp_path, content).fingerprint()
    assert make(tmp_path, content).fingerprint() == known
    middles = [(start + stop) // 2 for start, stop in spots.spots(LONG)]
    for place in (0, *middles[:: BLOCKS // 4], LONG - 1):
        edited = content.copy()
        edited[place] += 1
        assert make(tmp_path, edited).fingerprint() != known, place


def test_sequences_in_another_order_are_another_text(tmp_path: Path) -> None:
    """The index decides what is read: of equal lengths and the same token file, too."""
    tokens = IndexedWriter(tmp_path / "text", "uint16")
    for part in ([1, 2], [3, 4], [5, 6]):
        tokens.add(part, ends_document=True)
    tokens.finish()
    known = IndexedTokens(tmp_path / "text").fingerprint()
    index = (tmp_path / "text.idx").read_bytes()
    offsets = np.asarray([0, 4, 8], "<i8").tobytes()
    assert index.count(offsets) == 1
    (tmp_path / "text.idx").write_bytes(index.replace(offsets, np.asarray([0, 8, 4], "<i8").tobytes()))
    assert IndexedTokens(tmp_path / "text").fingerprint() != known


def test_lengths_and_type_of_tokens_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is seen of the tokens."""
    monkeypatch.setattr(spots, "spots", lambda size: [])
    found: set[str] = set()
    for dtype in ("uint16", "int32"):
        for cut in (1, 2):
            writer = IndexedWriter(tmp_path / "text", dtype)
            for part in (range(cut), range(cut, 4)):
                writer.add(list(part), ends_document=True)
            writer.finish()
            found.add(IndexedTokens(tmp_path / "text").fingerprint())
        np.save(tmp_path / "ids.npy", np.arange(4, dtype=dtype))
        tokens = token_files(tmp_path / "ids.npy", "uint16")
        assert tokens is not None
        found.add(tokens.fingerprint())
    assert len(found) == 6


def test_names_and_cuts_of_text_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is seen of the contents: of two files that become others of the same length, too."""
    monkeypatch.setattr(spots, "spots", lambda size: [])
    found: set[str] = set()
    for names in ({"a": "12", "b": "3"}, {"a": "1", "b": "23"}, {"a": "12", "c": "3"}):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        for name, content in names.items():
            (folder / name).write_text(content)
        found.add(FileText(folder).fingerprint())
    assert len(found) == 3


def test_edit_between_the_spots_of_a_prepared_text_is_seen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files were hashed as a whole when it was prepared, so that their hash costs nothing."""
    monkeypatch.setattr(spots, "spots", lambda size: [(0, 1)])
    (tmp_path / "text").write_text("the cat")
    known = prepared(tmp_path / "text", Bytes(), tmp_path / "cache", "text").fingerprint()
    assert prepared(tmp_path / "text", Bytes(), tmp_path / "cache", "text").fingerprint() == known
    (tmp_path / "text").write_text("the mat")
    assert prepared(tmp_path / "text", Bytes(), tmp_path / "cache", "text").fingerprint() != known
