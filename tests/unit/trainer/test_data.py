"""What a step trains on is a function of (seed, position), whatever the ranks."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.conftest import MakeConfig
from tests.unit.trainer.test_tokenizer import train_tokenizer
from ttp.errors import ConfigError, DatasetError
from ttp.trainer.data.batches import Sequences, count_sequences, micro_batch_starts, open_sequences, open_text, permute
from ttp.trainer.data.megatron_indexed import IndexedWriter
from ttp.trainer.data.tokenizer import open_tokenizer
from ttp.trainer.data.tokens import ArrayTokens, FileText, Joined, MemoryText, manual, token_files


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


@given(st.integers(1, 700), st.binary(min_size=1, max_size=80))
@settings(max_examples=60, deadline=None)
def test_any_count_and_key_give_a_permutation(count: int, key: bytes) -> None:
    """Of [0, count): every index once, the same for the same key."""
    images = [permute(index, count, key) for index in range(count)]
    assert sorted(images) == list(range(count))
    assert images[count // 2] == permute(count // 2, count, key)


@given(st.integers(1, 2**48), st.data())
@settings(max_examples=60, deadline=None)
def test_a_permutation_of_any_size_needs_no_table(count: int, data: st.DataObject) -> None:
    """Images of different indices lie in range and differ, with as many sequences as any text has."""
    chosen = data.draw(st.sets(st.integers(0, count - 1), max_size=40))
    images = {permute(index, count, b"42:7") for index in chosen}
    assert len(images) == len(chosen)
    assert all(0 <= image < count for image in images)


@given(st.integers(1, 30), st.integers(0, 2**63 - 1), st.integers(0, 200), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_resumed_order_needs_the_position_only(count: int, seed: int, position: int, more: int) -> None:
    """Whoever asks for a position gets the same sequence, having read those before or not; each epoch takes all."""
    text = MemoryText("text", bytes(index % 251 for index in range(2 * count + 1)))
    first = Sequences(text, 2, seed=seed, shuffle=True)
    taken = [first.sample(index).tobytes() for index in range(position + more)]
    second = Sequences(text, 2, seed=seed, shuffle=True)
    assert [second.sample(index).tobytes() for index in range(position, position + more)] == taken[position:]
    start = (position // count) * count
    epoch = sorted(second.sample(start + index).tobytes() for index in range(count))
    assert epoch == sorted(text.read(2 * index, 2 * index + 3).tobytes() for index in range(count))


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
    with pytest.raises(
        DatasetError, match=r"no such file or folder; name a text file or folder .*dataset_config.dataset_dir"
    ):
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
    with pytest.raises(DatasetError, match=r"picture: holds zero bytes, so it is not text"):
        FileText(tmp_path)


def test_what_is_held_out_is_never_trained_on(small_config: MakeConfig, tmp_path: Path) -> None:
    """The last share of the sequences, in the same order whatever the seed; without a share nothing is held out."""
    (tmp_path / "text").write_bytes(bytes(1 + index % 255 for index in range(16 * 40 + 1)))
    keys = {"dataset_config.dataset_dir": tmp_path / "text"}
    opened = open_sequences(small_config({**keys, "dataset_config.validation_share": 0.1}))
    assert opened.held_out is not None and (opened.training.count, opened.held_out.count) == (36, 4)
    held_out = [opened.held_out.sample(index).tobytes() for index in range(4)]
    whole = (tmp_path / "text").read_bytes()
    assert sorted(held_out) == sorted(whole[16 * index : 16 * index + 17] for index in range(36, 40))
    other = open_sequences(small_config({**keys, "dataset_config.validation_share": 0.1, "training_config.seed": 7}))
    assert other.held_out is not None and [other.held_out.sample(index).tobytes() for index in range(4)] == held_out
    trained = {opened.training.sample(index).tobytes() for index in range(72)}
    assert len(trained) == 36 and not trained & set(held_out)
    assert open_sequences(small_config({**keys, "dataset_config.validation_share": 0})).held_out is None
    (tmp_path / "text").write_bytes(b"x" * 17)
    with pytest.raises(DatasetError, match="nothing remains to train on"):
        open_sequences(small_config({**keys, "dataset_config.validation_share": 0.1}))


def test_token_files_of_every_kind_are_the_same_tokens(small_config: MakeConfig, tmp_path: Path) -> None:
    """.npy, raw .bin of a said type, .bin with .idx (either name, or none of the ends), and a folder of them."""
    ids = np.arange(600) % 300
    np.save(tmp_path / "ids.npy", ids.astype(np.int32))
    ids.astype(np.uint16).tofile(tmp_path / "raw.bin")
    writer = IndexedWriter(tmp_path / "text", "int32")
    for part in (ids[:100], ids[100:]):
        writer.add(part, ends_document=True)
    writer.finish()
    (tmp_path / "folder").mkdir()
    for name in ("raw.bin", "text.bin", "text.idx", "ids.npy"):
        (tmp_path / "folder" / name).write_bytes((tmp_path / name).read_bytes())
    for name in ("ids.npy", "raw.bin", "text", "text.bin", "text.idx"):
        config = small_config({"dataset_config.dataset_dir": tmp_path / name, "model_config.vocab_size": 300})
        tokens, tokenizer = open_text(config)
        assert tokens.read(90, 350).tolist() == ids[90:350].tolist() and tokens.size == 600 and tokenizer is None
        assert open_sequences(config).training.batch(0, 2)[0].shape == (2, 16)
    tokens, _ = open_text(small_config({"dataset_config.dataset_dir": tmp_path / "folder"}))
    assert tokens.size == 1800 and tokens.read(595, 605).tolist() == [*ids[595:], *ids[:5]]
    np.save(tmp_path / "ids.npy", ids + 1)
    other, _ = open_text(small_config({"dataset_config.dataset_dir": tmp_path / "ids.npy"}))
    assert other.fingerprint() != tokens.fingerprint()


def test_an_index_without_its_tokens_is_refused(tmp_path: Path) -> None:
    """By itself, in a folder alone, and in a folder beside a whole pair: nothing is left out in silence."""
    for folder, names in {"alone": "b", "beside": "ab"}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            writer = IndexedWriter(tmp_path / folder / name, "uint16")
            writer.add([1, 2, 3], ends_document=True)
            writer.finish()
        (tmp_path / folder / "b.bin").unlink()
    for path in ("alone", "beside", "alone/b.idx"):
        with pytest.raises(
            DatasetError, match=r"b\.idx: the file with the tokens is missing, expected b\.bin beside it"
        ):
            token_files(tmp_path / path, "uint16")
    with pytest.raises(DatasetError, match="folder: no token file is in it"):
        Joined("folder", [])


def test_ids_that_the_model_has_not_are_refused(small_config: MakeConfig, tmp_path: Path) -> None:
    """Where they are met in a token file; of a tokenizer, before anything is read."""
    np.save(tmp_path / "ids.npy", np.arange(340))
    config = small_config({"dataset_config.dataset_dir": tmp_path / "ids.npy", "dataset_config.shuffle": "false"})
    sequences = open_sequences(config).training
    sequences.batch(0, 14)
    with pytest.raises(
        DatasetError, match=r"has the token ids 240 to 256, and model_config\.vocab_size is 256: raise it"
    ):
        sequences.batch(15, 1)
    train_tokenizer(tmp_path / "tok")
    with pytest.raises(ConfigError, match=r"vocab_size: got 256, expected \d+ or more, the tokenizer"):
        open_text(small_config({"dataset_config.tokenizer": tmp_path / "tok"}))


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, ids=np.arange(9))
    return stream.getvalue()


def npy_with(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUM",
        b"nothing",
        npz(),
        npz()[:-30],
        pickle.dumps([1, 2]),
        npy_with("{'descr': '<u2', 'fortran_order': False, 'shape': (9,), }")[:-64],
        npy_with("{'descr': '<u2', 'fortran_order': False, 'shape': (9"),
        npy_with("  {\n 1\n"),
        npy_with("{'descr': '<u2', 'fortran_order': False, 'shape': (-9,), }"),
        npy_with("{'descr': '<u4', 'fortran_order': False, 'shape': (4611686018427387904,), }"),
        npy_with("{'descr': '<u2', 'fortran_order': False, 'shape': (18446744073709551616,), }"),
        npy_with("{'descr': '|O', 'fortran_order': False, 'shape': (9,), }"),
        npy_with("{'descr': '<u2', 'fortran_order': False, 'shape': (9,), }" + "\n" * 20_000),
        npy_with("?\n" * 3_000),
    ],
)
def test_damaged_arrays_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    """At the start, whatever numpy makes of them; the file is named, and what to do."""
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        token_files(path, "uint16")
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be read as an array of token ids (")
    assert message.endswith("), expected a file of numpy.save; write it again, or name another file")
    assert "\n" not in message and len(message) < len(str(path)) + 250


@pytest.mark.parametrize("content", [b"", b"123"])
def test_raw_ids_that_are_not_whole_are_refused(tmp_path: Path, content: bytes) -> None:
    """With the type that the configuration gives them."""
    (tmp_path / "raw.bin").write_bytes(content)
    with pytest.raises(DatasetError, match=r"raw\.bin: cannot be read .*, expected raw ids of uint16; write it again"):
        token_files(tmp_path / "raw.bin", "uint16")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros(9), "float64 of shape"),
        (np.zeros((3, 3), np.int32), r"shape \(3, 3\), expected integers in one dimension; write it again so"),
        (np.zeros(3, [(f"field_{number}", "u2") for number in range(300)]), r"^.{0,600}$"),
    ],
)
def test_arrays_that_are_not_token_ids_are_refused(tmp_path: Path, array: npt.NDArray[Any], expected: str) -> None:
    """By type and shape; a file that is not an array, too."""
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(DatasetError, match=expected):
        ArrayTokens(tmp_path / "ids.npy", "uint16")
    (tmp_path / "ids.npy").write_bytes(b"nothing")
    with pytest.raises(DatasetError, match="cannot be read as an array of token ids"):
        ArrayTokens(tmp_path / "ids.npy", "uint16")


def test_the_default_text_is_tokenized_too(small_config: MakeConfig, tmp_path: Path) -> None:
    """With a tokenizer Python's manual becomes ids, kept where the configuration says."""
    keys = {
        "dataset_config.tokenizer": train_tokenizer(tmp_path / "tok"),
        "dataset_config.cache_dir": tmp_path / "cache",
        "model_config.vocab_size": 300,
    }
    tokens, tokenizer = open_text(small_config(keys))
    assert tokenizer == str((tmp_path / "tok" / "tokenizer.json").resolve())
    assert 100_000 < tokens.size < manual().size
    assert open_text(small_config(keys))[0].fingerprint() == tokens.fingerprint()
    assert open_tokenizer(tokenizer).decode(tokens.read(0, 2000).tolist()) in manual().read(0, 99999).tobytes().decode()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_text_is_refused(tmp_path: Path) -> None:
    """Found when it is opened, not in the middle of training."""
    (tmp_path / "secret").write_text("0123456789")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(DatasetError, match=r"secret: cannot be read"):
        FileText(tmp_path)
