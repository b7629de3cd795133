"""What a step trains on is a function of (seed, position), whatever the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ttp.errors import DatasetError
from ttp.trainer.data import Sequences, count_sequences, micro_batch_starts, permute
from ttp.trainer.tokens import FileText, MemoryText, manual


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1000, 4097])
def test_permutation_takes_every_index_once(count: int) -> None:
    """A permutation of [0, count), another one for another key."""
    orders = [[permute(i, count, key) for i in range(count)] for key in (b"1:0", b"1:1", b"2:0")]
    for order in orders:
        assert sorted(order) == list(range(count))
    if count >= 100:
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert orders[0] != sorted(orders[0])


def test_permutation_leaves_no_trace_of_the_order() -> None:
    """Neighbours land anywhere: the correlation of index and image is that of chance."""
    count = 4000
    images = torch.tensor([permute(i, count, b"seed") for i in range(count)], dtype=torch.float64)
    pairs = torch.stack([torch.arange(count, dtype=torch.float64), images])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4 / count**0.5
    steps = torch.stack([images[:-1], images[1:]])
    assert abs(float(torch.corrcoef(steps)[0, 1])) < 4 / count**0.5


def test_order_is_frozen() -> None:
    """These values may never change: a checkpoint's position means them."""
    assert [permute(i, 10, b"42:0") for i in range(10)] == [4, 0, 7, 2, 6, 5, 1, 9, 3, 8]


def sequences(shuffle: bool = True, seed: int = 1) -> Sequences:
    return Sequences(MemoryText("text", bytes(range(101))), 10, seed=seed, shuffle=shuffle)


def test_sequences_overlap_by_the_target_of_the_last_token() -> None:
    """101 bytes are ten sequences of 10 inputs and 10 targets."""
    ordered = sequences(shuffle=False)
    assert ordered.count == 10
    tokens_BT, targets_BT = ordered.batch(3, 2)
    assert tokens_BT.tolist() == [list(range(30, 40)), list(range(40, 50))]
    assert targets_BT.tolist() == [list(range(31, 41)), list(range(41, 51))]
    assert tokens_BT.dtype == torch.int64


def test_epochs_take_every_sequence_once_in_their_own_order() -> None:
    """Shuffled anew each epoch; the same again for the same seed."""
    first, second = ([sequences().sample(e * 10 + i).tobytes() for i in range(10)] for e in (0, 1))
    everything = sorted(sequences(shuffle=False).sample(i).tobytes() for i in range(10))
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert first != [sequences(seed=2).sample(i).tobytes() for i in range(10)]
    assert sequences().epoch(9) == 0 and sequences().epoch(10) == 1
    assert [sequences(shuffle=False).sample(10 + i).tobytes() for i in range(10)] == everything


def positions(consumed: int, steps: int, dp: int, batch: int, micro: int) -> tuple[list[list[int]], int]:
    """Return what each step of a run takes, over all ranks, and the position after it."""
    taken = []
    for _ in range(steps):
        step = [
            first + i
            for rank in range(dp)
            for first in micro_batch_starts(consumed, batch_size=batch, micro_batch_num=micro, dp_rank=rank, dp_size=dp)
            for i in range(batch)
        ]
        taken.append(step)
        consumed += batch * micro * dp
    return taken, consumed


def test_ranks_share_a_step_without_gap_or_overlap() -> None:
    """Each position once, in contiguous steps."""
    taken, consumed = positions(0, 3, dp=4, batch=2, micro=3)
    assert consumed == 72
    for step, numbers in enumerate(taken):
        assert sorted(numbers) == list(range(24 * step, 24 * step + 24))


def test_another_world_goes_on_from_the_same_position() -> None:
    """dp 4, then dp 2 with another micro-batch, then dp 3: the exact sequence 0, 1, 2, ... is consumed."""
    consumed, everything = 0, []
    for dp, batch, micro in ((4, 2, 1), (2, 1, 3), (3, 2, 2)):
        taken, consumed = positions(consumed, 5, dp, batch, micro)
        everything += [number for step in taken for number in sorted(step)]
    assert everything == list(range(consumed))


def test_default_text_is_the_manual_and_the_same_every_time() -> None:
    """`pydoc_data.topics`, sorted by topic."""
    first, second = manual(), manual()
    assert first.size > 200_000
    assert first.fingerprint() == second.fingerprint()
    assert b"assert" in first.read(0, 5000).tobytes()


def test_folder_is_read_sorted_and_recursively_without_hidden_files(tmp_path: Path) -> None:
    """One text over file borders with the end of text between, read at any offset; an empty file takes no room."""
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {"c.txt": "CCC", "b/2": "BB", "b/1": "Ä", "a": "", ".hidden": "x", ".git/config": "y"}.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    text = FileText(tmp_path)
    whole = "Ä\0BB\0CCC".encode()
    assert text.size == len(whole)
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1):
            assert text.read(start, stop).tobytes() == whole[start:stop]
    assert FileText(tmp_path / "c.txt").read(1, 3).tobytes() == b"CC"
    before = text.fingerprint()
    (tmp_path / "c.txt").write_text("CCCC")
    assert FileText(tmp_path).fingerprint() != before


def test_text_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Missing, empty, too short, not text, changed under way."""
    with pytest.raises(DatasetError, match=r"no such file or folder; set dataset_config.dataset_dir"):
        FileText(tmp_path / "missing")
    with pytest.raises(DatasetError, match=r"the folder has no files"):
        FileText(tmp_path)
    (tmp_path / "short").write_text("0123456789")
    with pytest.raises(DatasetError, match=r"has 10 tokens: one sequence takes 11; .* lower model_config.seq_length"):
        count_sequences(FileText(tmp_path / "short"), 10)
    text = FileText(tmp_path / "short")
    (tmp_path / "short").write_text("01234")
    with pytest.raises(DatasetError, match=r"ends at byte 5, .* changed during training"):
        text.read(0, 10)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(DatasetError, match=r"picture: holds zero bytes, so it is no text"):
        FileText(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_text_is_refused(tmp_path: Path) -> None:
    """Found when it is opened, not in the middle of training."""
    (tmp_path / "secret").write_text("0123456789")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(DatasetError, match=r"secret: cannot be read"):
        FileText(tmp_path)
