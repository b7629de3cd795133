"""The tables at the ends of the files say what is whole: every hole, overlap and damage in them is refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ttp.checkpoint import find
from ttp.checkpoint.format.file_index import TensorEntry, read_contents
from ttp.checkpoint.verify import check_complete
from ttp.errors import CorruptCheckpoint, TornShare

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


def test_every_hole_overlap_and_contradiction_is_refused(job: Job, tmp_path: Path) -> None:
    """The message names the tensor."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 2)
    whole = read_contents(tmp_path / "iter_0000042_tmp_a", results)
    entry = next(e for e in whole.tensors if e.key == "optim.state.norm.exp_avg")
    others = tuple(e for e in whole.tensors if e != entry)

    def refused_as(text: str, **fields: Any) -> None:
        with pytest.raises(CorruptCheckpoint, match=text):
            check_complete(dataclasses.replace(whole, **fields), job.shapes())

    def changed(**fields: Any) -> tuple[TensorEntry, ...]:
        return (*others, dataclasses.replace(entry, **fields))

    assert check_complete(whole, job.shapes()).keys() == job.tensors.keys()
    refused_as("two shares name the same file", files=(*whole.files, whole.files[1]))
    refused_as("'optim.state.norm.exp_avg' of shape .* is in no share", tensors=others)
    refused_as("elements of shape .* are in no box", tensors=changed(sizes=(1, 1, 8)))
    refused_as("leaves the tensor's shape", tensors=changed(offsets=(0, 0, 1)))
    refused_as("is float64 of .* in one share and|has shape", tensors=changed(shape=(1, 9)))
    refused_as("which no share lists", tensors=changed(file="elsewhere.distcp"))
    refused_as("whose last box ended at|which has", tensors=changed(position=10**9))
    refused_as("whose last box ended at", tensors=changed(length=0))
    refused_as("'float77' is not the name of a torch dtype", tensors=changed(dtype="float77"))
    more = (*whole.files, dataclasses.replace(whole.files[1], name="x"))
    extra = dataclasses.replace(entry, key="model.unknown", position=0, length=1, file="x")
    refused_as("'model.unknown' .* belongs to no expected tensor", files=more, tensors=(*whole.tensors, extra))
    twice = dataclasses.replace(entry, file="x", position=0)
    refused_as("overlaps", files=more, tensors=(*whole.tensors, twice))


def test_an_incomplete_staging_directory_is_not_published(job: Job, tmp_path: Path) -> None:
    """A share that no rank reported leaves a hole: the tables of the files are what counts."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 3)
    with pytest.raises(CorruptCheckpoint, match=r"are in no box|is in no share"):
        job.publish(tmp_path, "iter_0000042_tmp_a", results[:2], 42)
    assert find.list_checkpoints([tmp_path]) == []


@pytest.mark.parametrize("where", [-1, -20, -45, -60])
def test_a_damaged_table_of_contents_is_refused_and_its_writer_named(job: Job, tmp_path: Path, where: int) -> None:
    """A flipped byte in the mark, the length, the checksum or the table: nothing is published from a guess."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 2)
    file = tmp_path / "iter_0000042_tmp_a" / "__1_0_0.distcp"
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)
    with pytest.raises(TornShare, match=r"__1_0_0\.distcp, written by rank 1.* table of contents") as caught:
        job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
    assert caught.value.ranks == (1,)
    assert find.list_checkpoints([tmp_path]) == []


def test_a_file_that_ended_short_is_reported_with_its_writers(job: Job, tmp_path: Path) -> None:
    """Every one of them, so that one round is enough to do without them."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 4)
    for rank in (1, 3):
        file = tmp_path / "iter_0000042_tmp_a" / f"__{rank}_0_0.distcp"
        os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(TornShare, match=r"__1_0_0\.distcp, written by rank 1, has \d+ bytes, expected") as caught:
        job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
    assert caught.value.ranks == (1, 3)


def test_where_a_file_is_missing_no_rank_is_said_to_have_torn_one(job: Job, tmp_path: Path) -> None:
    """Perhaps it is the directory that is not the same for all: then no writer is at fault."""
    results = job.write(tmp_path, "iter_0000042_tmp_a", 3)
    (tmp_path / "iter_0000042_tmp_a" / "__2_0_0.distcp").unlink()
    os.truncate(tmp_path / "iter_0000042_tmp_a" / "__1_0_0.distcp", 5)
    with pytest.raises(CorruptCheckpoint, match=r"is .* the same directory on every node") as caught:
        job.publish(tmp_path, "iter_0000042_tmp_a", results, 42)
    assert not isinstance(caught.value, TornShare)
