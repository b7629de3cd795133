"""Megatron's indexed files: ours are theirs, theirs are read whatever order they are in, and damage is found."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttp.errors import DatasetError
from ttp.trainer.data.megatron_indexed import IndexedTokens, IndexedWriter, prefix_of, token_type

DOCUMENTS = [[5, 6, 7], [], [8], [65499, 0]]


def write(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> IndexedTokens:
    writer = IndexedWriter(prefix, dtype)
    try:
        for document in documents:
            writer.add(document, ends_document=True)
        writer.finish()
    finally:
        writer.abandon()
    return IndexedTokens(prefix)


def test_files_have_the_bytes_that_megatron_writes(tmp_path: Path) -> None:
    """Field by field, put together here by hand."""
    write(tmp_path / "text", DOCUMENTS)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += struct.pack("<4i", 3, 0, 1, 2) + struct.pack("<4q", 0, 6, 6, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert (tmp_path / "text.idx").read_bytes() == expected
    assert (tmp_path / "text.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 65499, 0)
    assert (token_type(65499), token_type(65500)) == ("uint16", "int32")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), min_size=1, max_size=9), st.data())
def test_any_documents_read_back_at_any_place(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], data: st.DataObject
) -> None:
    """As one run of tokens."""
    whole = [token for document in documents for token in document]
    if not whole:
        documents, whole = [[1]], [1]
    tokens = write(tmp_path_factory.mktemp("indexed") / "text", documents, "int32")
    assert tokens.size == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert tokens.read(start, stop).tolist() == whole[start:stop]
    assert tokens.documents.tolist() == list(range(len(documents) + 1))


def test_sequences_in_another_order_than_in_the_file_are_followed(tmp_path: Path) -> None:
    """The index decides, also where it leaves gaps; and what comes after it is left alone."""
    (tmp_path / "text.bin").write_bytes(np.arange(100, dtype="<i8").tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 5, 3, 2)
    index += struct.pack("<3i", 2, 3, 1) + struct.pack("<3q", 8 * 50, 8 * 10, 8 * 99) + struct.pack("<2q", 0, 3)
    (tmp_path / "text.idx").write_bytes(index + b"\x01\x01\x01")
    tokens = IndexedTokens(tmp_path / "text")
    whole = [50, 51, 10, 11, 12, 99]
    for start in range(7):
        for stop in range(start, 7):
            assert tokens.read(start, stop).tolist() == whole[start:stop]


def test_the_prefix_and_either_file_name_the_pair(tmp_path: Path) -> None:
    """A file alone is not a pair."""
    write(tmp_path / "my.text", DOCUMENTS)
    for name in ("my.text", "my.text.bin", "my.text.idx"):
        assert prefix_of(tmp_path / name) == tmp_path / "my.text"
    (tmp_path / "my.text.idx").unlink()
    assert prefix_of(tmp_path / "my.text.bin") is None


def test_the_fingerprint_changes_with_the_tokens(tmp_path: Path) -> None:
    """And is the same for the same ones."""
    first, same, other = (
        write(tmp_path / name, documents).fingerprint()
        for name, documents in (("a", DOCUMENTS), ("b", DOCUMENTS), ("c", [*DOCUMENTS[:3], [65499, 1]]))
    )
    assert first == same != other


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Not written as another one."""
    with pytest.raises(DatasetError, match="ids 3 to 65536 do not fit uint16"):
        write(tmp_path / "text", [[3, 65536]])


@pytest.mark.parametrize(
    ("lengths", "offsets", "expected"),
    [
        ([2, 1], [0, 2**63 - 2], r"text\.bin: has 12 bytes, text\.idx speaks of 9223372036854775806: "),
        ([2**31 - 1, 1], [2**63 - 1, 0], r"text\.bin: has 12 bytes, text\.idx speaks of 9223372036854775807: "),
        ([2, 1], [0, 13], r"text\.bin: has 12 bytes, text\.idx speaks of 15: "),
        ([2, 7], [0, 0], r"text\.bin: has 12 bytes, text\.idx speaks of 14: "),
        ([2, 1], [0, -2], r"text\.idx: got a length or an offset below 0, expected none"),
        ([2, 1], [0, -(2**63)], r"text\.idx: got a length or an offset below 0, expected none"),
        ([2, -1], [0, 4], r"text\.idx: got a length or an offset below 0, expected none"),
    ],
)
def test_sequences_outside_the_file_are_refused_at_the_start(
    tmp_path: Path, lengths: list[int], offsets: list[int], expected: str
) -> None:
    """Also where the end of one is beyond 64 bits: else the first read of it fails, hours later."""
    write(tmp_path / "text", DOCUMENTS)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 1)
    index += struct.pack("<2i", *lengths) + struct.pack("<2q", *offsets) + struct.pack("<q", 2)
    (tmp_path / "text.idx").write_bytes(index)
    with pytest.raises(DatasetError, match=f"{expected}.*; copy both files again, or prepare the text again$"):
        IndexedTokens(tmp_path / "text")


def test_an_index_of_no_sequence_has_no_tokens(tmp_path: Path) -> None:
    """It is whole."""
    write(tmp_path / "text", DOCUMENTS)
    (tmp_path / "text.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 0))
    tokens = IndexedTokens(tmp_path / "text")
    assert tokens.size == 0 and tokens.read(0, 0).tolist() == []


Spoil = Callable[[Path], object]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda prefix: (prefix.parent / "text.bin").write_bytes(b"1234"), "has 4 bytes, text.idx speaks of 12"),
        (lambda prefix: (prefix.parent / "text.bin").write_bytes(b""), "cannot be read"),
        (lambda prefix: (prefix.parent / "text.idx").write_bytes(b"MMIDIDX"), "does not begin with"),
        (lambda prefix: (prefix.parent / "text.idx").write_bytes(b"x" * 60), "does not begin with"),
        (
            lambda prefix: (prefix.parent / "text.idx").write_bytes((prefix.parent / "text.idx").read_bytes()[:-9]),
            "it was cut off",
        ),
        (
            lambda prefix: (prefix.parent / "text.idx").write_bytes(
                b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 2, 8, 0, 1)
            ),
            "version 2, type code 8",
        ),
    ],
)
def test_files_that_are_not_whole_are_refused(tmp_path: Path, spoil: Spoil, expected: str) -> None:
    """When they are opened, with what is wrong."""
    write(tmp_path / "text", DOCUMENTS)
    spoil(tmp_path / "text")
    with pytest.raises(DatasetError, match=f"{expected}.*; copy both files again, or prepare the text again$"):
        IndexedTokens(tmp_path / "text")
