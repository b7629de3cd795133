"""Disk faults hit the real writer and publisher where they are ordered, and what they leave is never taken for whole."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.conftest import Job, job
from ttp.chaos.faults.disk import dump_faults
from ttp.chaos.faults.inject import parse_faults
from ttp.checkpoint import find
from ttp.checkpoint.write import write_share
from ttp.errors import CheckpointError, NotWritable

__all__ = ["job"]
TMP = "iter_0000042_tmp_a"
CALLS = [
    ("rename.0", False),
    ("manifest.json.0", False),
    ("iter_0000042.0", False),
    ("latest_checkpointed_iteration.txt.0", True),
]


def write(job: Job, directory: Path, faults: str) -> None:
    dump = dump_faults(parse_faults(faults))
    with dump("write", 42, f"{directory}/{TMP}"):
        write_share(directory, TMP, 0, job.shares(1)[0], {})


@pytest.mark.parametrize(("action", "words"), [("enospc", "No space left"), ("eio", "Input/output error")])
def test_a_failed_fsync_is_a_refusal_that_leaves_no_file(job: Job, tmp_path: Path, action: str, words: str) -> None:
    """Call 0 makes the directory, call 1 is the data's fsync."""
    with pytest.raises(NotWritable, match=words):
        write(job, tmp_path, f"{action}:rank=0,step=42,point=write,call=1")
    assert list((tmp_path / TMP).iterdir()) == []


def test_a_fault_meant_for_one_directory_spares_the_next(job: Job, tmp_path: Path) -> None:
    dump = dump_faults(parse_faults("eio:rank=0,step=42,point=write,times=1"))
    for number, place in enumerate((tmp_path / "a", tmp_path / "b")):
        with dump("write", 42, f"{place}/{TMP}"):
            if number == 0:
                with pytest.raises(NotWritable):
                    write_share(place, TMP, 0, job.shares(1)[0], {})
            else:
                write_share(place, TMP, 0, job.shares(1)[0], {})


def test_a_torn_write_is_found_before_anything_is_published(job: Job, tmp_path: Path) -> None:
    """The disk had said that the bytes are safe; the publisher looks, and the older checkpoint stays the newest."""
    job.save(tmp_path, 41)
    dump = dump_faults(parse_faults("torn:rank=0,step=42,point=write"))
    with dump("write", 42, f"{tmp_path}/{TMP}"):
        result = write_share(tmp_path, TMP, 0, job.shares(1)[0], {})
    with pytest.raises(CheckpointError, match=r"written by rank 0, has \d+ bytes, expected"):
        job.publish(tmp_path, TMP, [result], 42)
    found = find.find_newest_valid([tmp_path])
    assert found is not None and found.manifest.step == 41 and not found.skipped


def test_other_steps_points_and_threads_are_spared(job: Job, tmp_path: Path) -> None:
    write(job, tmp_path / "a", "eio:rank=0,step=41,point=write")
    write(job, tmp_path / "b", "eio:rank=0,step=42,point=publish")
    job.save(tmp_path / "c", 42)


PROCESSES = get_context("forkserver")
"""They are forked from one that has imported all this: a second each."""
PROCESSES.set_forkserver_preload([__name__])


def publish_and_be_killed(directory: Path, call: str) -> None:
    job = Job({"model.w": torch.arange(9.0)})
    results = job.write(directory, TMP, 1)
    dump = dump_faults(parse_faults(f"kill:rank=0,step=42,point=publish,call={call}"))
    with dump("publish", 42, f"{directory}/{TMP}"):
        job.publish(directory, TMP, results, 42)


@pytest.mark.parametrize(("call", "visible"), CALLS)
def test_a_kill_comes_between_the_acts_that_it_names(tmp_path: Path, call: str, visible: bool) -> None:
    """Before the claim, the manifest, the rename that makes it visible, and the tracker."""
    publisher = PROCESSES.Process(target=publish_and_be_killed, args=(tmp_path, call))
    publisher.start()
    publisher.join()
    assert publisher.exitcode == -9
    assert (tmp_path / "iter_0000042").exists() is visible
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
