"""Model parts saved by several ranks: who is asked, what becomes of a rank that is lost, raises, or has a handler that hangs."""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.waiting import LONG_S, until
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.write import write_share
from ttp.errors import CheckpointError
from ttp.mindio.saving import local_save, save_calls
from ttp.mindio.saving.local_save import LocalSave, Saving
from ttp.mindio.saving.publisher import HandlerPublisher
from ttp.mindio.saving.save_calls import Call, Watcher, savings
from ttp.proto.messages import Cause, CauseKind, PublishOrder

STEP = 3
NAME = f"iter_{STEP:07d}_tmp_1_1_1"
PARTS = [[0, 2], [1, 3]]


class Job:
    """Four ranks of two model parts, each with a watcher of its own; all have written shares."""

    def __init__(self, root: Path, writers: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.root = root
        self.calls: list[Any] = []
        self.on_save: dict[int, Callable[[], None]] = {}
        self.frozen = dict.fromkeys(range(4), True)
        self.looked = [threading.Event() for _ in range(4)]
        shares = []
        for rank in writers:
            values = HeldTensor(f"t{rank}", (2,), 0, torch.zeros(2))
            shares.append(write_share(root, NAME, rank, [values], {}))
        self.shapes: dict[str, tuple[int, ...]] = {f"t{rank}": (2,) for rank in writers}
        cause = Cause(CauseKind.EXITED, (9,), "signal SIGKILL")
        self.order = PublishOrder(1, STEP, str(root), NAME, tuple(shares), cause, None, 1)
        self.saves = [self._save(rank) for rank in range(4)]
        self.watchers = [Watcher(r, root, self.saves[r], functools.partial(self._is_frozen, r)) for r in range(4)]
        for watcher in self.watchers:
            watcher.start()

    def _is_frozen(self, rank: int) -> bool:
        self.looked[rank].set()
        return self.frozen[rank]

    def thaw(self, *ranks: int) -> None:
        """Have these ranks answer no call that begins from now on: what they look for meanwhile is waited for."""
        for rank in ranks:
            self.frozen[rank] = False
            self.looked[rank].clear()
            assert self.looked[rank].wait(LONG_S)

    def _save(self, rank: int) -> LocalSave:
        def handler(save_rank: int, step: int, ranks: list[int], args: Any) -> None:
            self.on_save.get(rank, lambda: None)()
            self.calls.append(("save", rank, save_rank, ranks))

        def rename(step: int, args: Any) -> None:
            self.calls.append(("rename", rank, args))

        box = SimpleNamespace(
            await_step=lambda *_: SimpleNamespace(
                step=STEP, settled=True, randomness=None, labelled=lambda step: ("args", step)
            )
        )
        self.trainer: Any = SimpleNamespace(
            step_args=box, save_handler=handler, rename_handler=rename, parts=PARTS, part_tensors=lambda: self.shapes,
            show=lambda state: self.calls.append(("show", rank)), leave_to_save_rank=lambda: self.calls.append(("leave", rank)),
        )  # fmt: skip
        optimizer: Any = SimpleNamespace(
            host_state=lambda step: {}, expected_tensors=lambda: self.shapes, device=torch.device("cpu")
        )
        return LocalSave(rank, optimizer, self.trainer)

    def publish(self, rank: int = 0) -> str:
        optimizer: Any = SimpleNamespace(expected_tensors=lambda: self.shapes)
        by = HandlerPublisher(rank, optimizer, self.saves[rank]._trainer, self.saves[rank])
        return by.publish(self.order, {}, lambda count: None)

    def saved(self) -> list[tuple[int, int, list[int]]]:
        return sorted(call[1:] for call in self.calls if call[0] == "save")

    def stop(self) -> None:
        for watcher in self.watchers:
            watcher.stop()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(local_save, "read_whole", lambda *_: "the part's state")
    monkeypatch.setattr(local_save, "_bytes_written", lambda: 0)  # all ranks are one process here
    monkeypatch.setattr(save_calls, "POLL_S", 0.01)
    monkeypatch.setattr(save_calls, "_BEAT_S", 0.05)
    found = Job(tmp_path)
    yield found
    found.stop()


def left(root: Path) -> list[str]:
    return sorted(path.name.partition("_claim_")[0].partition("_saves_")[0] for path in root.iterdir())


def test_the_save_handler_runs_on_every_rank_of_each_list_and_the_rename_handler_on_one(job: Job) -> None:
    """The publisher saves its own model part, the lowest rank of another part that one; only these read the shares."""
    reported = job.publish()
    assert reported == "the trainer's own checkpoint, saved and published, 2 model parts, by rank 0"
    assert job.saved() == [(0, 0, [0, 2]), (1, 1, [1, 3]), (2, 0, [0, 2]), (3, 1, [1, 3])]
    assert sorted(call[1] for call in job.calls if call[0] == "show") == [0, 1]
    assert sorted(call[1] for call in job.calls if call[0] == "leave") == [2, 3], "need_write_file is false there"
    assert job.calls[-1] == ("rename", 0, ("args", STEP))
    until(lambda: left(job.root) == [f"iter_{STEP:07d}_tmp_published"], "the call's end on every rank")


def test_a_save_rank_that_is_lost_is_followed_by_another_of_its_part(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies in its handler: rank 3 saves the part; what the other part has saved stays."""
    monkeypatch.setattr(save_calls, "SILENT_S", 3.0)
    dying = threading.Event()

    def dies() -> None:
        job.watchers[1].stop()
        dying.wait()

    job.on_save[1] = dies
    try:
        job.publish()
    finally:
        dying.set()
    assert (3, 3, [3]) in job.saved() and job.saved().count((0, 0, [0, 2])) == 1
    assert [call for call in job.calls if call[0] == "rename"] == [("rename", 0, ("args", STEP))]


def test_a_rank_of_the_list_that_is_lost_costs_nothing_once_the_save_rank_is_done(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_calls, "SILENT_S", 3.0)
    job.thaw(2)
    job.publish()
    assert job.saved() == [(0, 0, [0]), (1, 1, [1, 3]), (3, 1, [1, 3])]


def test_an_answer_that_comes_into_being_as_a_call_is_removed_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun under the folder's old name, and is there when all that was in it has been removed."""
    call = tmp_path / f"iter_0000003{save_calls._MARK}x"
    call.mkdir()
    remove, late = shutil.rmtree, [".rank_1.json.tmp"]

    def rmtree(folder: Path, **options: Any) -> None:
        remove(folder, **options)
        if late:
            folder.mkdir()
            (folder / late.pop()).touch()

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save_calls._remove(call)
    assert not late and not list(tmp_path.iterdir())


def test_a_handler_that_raises_on_another_rank_is_not_a_checkpoint(job: Job) -> None:
    """Its reason is the publisher's, and the next publisher has all called again."""

    def fails() -> None:
        until(lambda: len(job.saved()) == 3, "the other ranks' saves: they are not to come during the next call")
        raise OSError("no room for the trainer's file")

    job.on_save[3] = fails
    with pytest.raises(CheckpointError, match=r"rank 3: .*no room for the trainer's file"):
        job.publish()
    assert not any(call[0] == "rename" for call in job.calls) and left(job.root) == [NAME]
    del job.on_save[3]
    job.calls.clear()
    job.publish(2)
    assert job.saved() == [(0, 2, [0, 2]), (1, 1, [1, 3]), (2, 2, [0, 2]), (3, 1, [1, 3])]


def test_a_part_of_which_no_rank_answers_cannot_be_saved(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_calls, "SILENT_S", 3.0)
    job.thaw(1, 3)
    with pytest.raises(CheckpointError, match=r"step 3: no rank that has the model part of ranks \[1, 3\] answers"):
        job.publish()


def test_a_rank_that_wrote_nothing_saves_where_no_writer_answers(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 wrote the part's shares and is gone; rank 3 has the trainer's objects."""
    monkeypatch.setattr(save_calls, "SILENT_S", 3.0)
    job.thaw(1)
    call = Call.begin(tmp_path, STEP, lambda count: None)
    assert call.usable(0, PARTS, {1}, set()) == {0, 3}
    assert savings(STEP, PARTS, {0, 3}, 0) == (Saving(STEP, 0, (0,)), Saving(STEP, 3, (3,)))
    call.end()


def test_a_hanging_handler_of_an_earlier_publisher_is_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 hangs in its handler, the controller gives the publisher up, and the next one has rank 3 save the part."""
    begun, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        hangs.wait()

    job.on_save[1] = hang
    first: list[BaseException] = []

    def publish() -> None:
        try:
            job.publish(0)
        except (CheckpointError, OSError) as error:
            first.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    assert begun.wait(LONG_S)
    until(lambda: (2, 0, [0, 2]) in job.saved(), "rank 2's save")
    monkeypatch.setattr(save_calls, "SILENT_S", 3.0)
    try:
        job.publish(2)
    finally:
        hangs.set()
    thread.join()
    assert (3, 3, [3]) in job.saved()
    assert first, "its shares and its call are gone"
    assert [call[1] for call in job.calls if call[0] == "rename"] == [2]
