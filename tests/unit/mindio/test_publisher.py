"""The publisher of a trainer's handlers, on its own: which act comes before which, and what remains when one fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.umasks import mode_of
from ttp.checkpoint.format.file_index import read_contents
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.publish import claim_staging
from ttp.checkpoint.write import write_share
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.mindio.saving import local_save, publisher
from ttp.mindio.saving.local_save import LocalSave
from ttp.mindio.saving.publisher import HandlerPublisher
from ttp.proto.messages import Cause, CauseKind, PublishOrder, ShareResult

STEP = 3
NAME = f"iter_{STEP:07d}_tmp_1_1_1"
CAUSE = Cause(CauseKind.EXITED, (5,), "signal SIGKILL")
SHAPES = {"a": (4,), "b": (2,)}
DEVICE = torch.device("cpu")


class Bench:
    """A staging directory with the shares of rank 1, a trainer whose handlers write down that they were called, and its publishers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[Any] = []
        self.step, self.settled = STEP, True
        self.restores = True
        self.advanced: list[int] = []
        self.on_save: Callable[[], None] = lambda: None
        self.on_rename: Callable[[], None] = lambda: None
        self.shapes: dict[str, tuple[int, ...]] = dict(SHAPES)
        shares = [self.share(1, "a"), self.share(1, "b")]
        self.order = PublishOrder(1, STEP, str(root), NAME, tuple(shares), CAUSE, None, 1)

    def share(self, rank: int, key: str) -> ShareResult:
        values = torch.arange(float(SHAPES[key][0]))
        return write_share(self.root, NAME, rank, [HeldTensor(key, SHAPES[key], 0, values)], {}, suffix=key)

    def save(self, rank: int, step: int, ranks: list[int], args: Any) -> None:
        self.calls.append(("save", rank, step, ranks, args))
        self.on_save()

    def rename(self, step: int, args: Any) -> None:
        self.calls.append(("rename", step, args))
        self.on_rename()

    def await_step(self, step: int, advance: Callable[[int], None]) -> Any:
        restore: Callable[[Any], None] = lambda device: self.calls.append(("restore", device))  # noqa: E731
        randomness = SimpleNamespace(restore=restore) if self.restores else None
        return SimpleNamespace(
            step=self.step, settled=self.settled, randomness=randomness, labelled=lambda step: ("args", step)
        )

    def publisher(self, rank: int = 1) -> HandlerPublisher:
        optimizer: Any = SimpleNamespace(
            expected_tensors=lambda: self.shapes, device=DEVICE, host_state=lambda step: {}
        )
        trainer: Any = SimpleNamespace(
            step_args=self, save_handler=self.save, rename_handler=self.rename, show=lambda state: self.calls.append(("show", state)),
            parts=[[rank]], part_tensors=lambda: self.shapes, leave_to_save_rank=lambda: self.calls.append(("leave",)),
        )  # fmt: skip
        return HandlerPublisher(rank, optimizer, trainer, LocalSave(rank, optimizer, trainer))

    def publish(self, by: HandlerPublisher | None = None) -> str:
        return (by or self.publisher()).publish(self.order, {}, self.advanced.append)

    def left(self) -> list[str]:
        """Return what is in the directory, claims without their numbers."""
        return sorted(path.name.partition("_claim_")[0] for path in self.root.iterdir())


NOTE = f"iter_{STEP:07d}_tmp_published"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(local_save, "read_whole", lambda claim, contents, step, *_: f"the whole of step {step}")
    return Bench(tmp_path)


def test_the_handlers_get_the_state_the_randomness_and_the_objects_of_the_ordered_step(bench: Bench) -> None:
    """In this order."""
    assert bench.publish() == "the trainer's own checkpoint, saved by rank 1"
    assert bench.calls == [
        ("show", f"the whole of step {STEP}"), ("restore", DEVICE), ("save", 1, STEP, [1], ("args", STEP)),
        ("rename", STEP, ("args", STEP)),
    ]  # fmt: skip
    assert bench.left() == [NOTE], "the shares only take room now"
    assert mode_of(bench.root / NOTE) == 0o600


def test_what_was_published_is_not_published_again(bench: Bench) -> None:
    """Its answer was lost, and another rank is ordered to publish: it says where the checkpoint is."""
    said = bench.publish()
    bench.calls.clear()
    assert bench.publish(bench.publisher(3)) == said and not bench.calls


@pytest.mark.parametrize("handler", ["on_save", "on_rename"])
def test_handlers_that_fail_have_published_nothing_and_are_called_anew(bench: Bench, handler: str) -> None:
    """By the next publisher, on the same shares."""

    def fails() -> None:
        assert NOTE not in bench.left(), "it is not published before the rename handler has returned"
        raise OSError("no room")

    setattr(bench, handler, fails)
    with pytest.raises(OSError, match="no room"):
        bench.publish()
    assert bench.left() == [NAME]
    setattr(bench, handler, lambda: None)
    bench.calls.clear()
    assert bench.publish(bench.publisher(3)).endswith("rank 3")
    assert [call[0] for call in bench.calls] == ["show", "restore", "save", "rename"]


def test_a_staging_directory_that_another_publisher_has_is_left_to_it(bench: Bench) -> None:
    """One that was taken for dead wakes up behind its successor: before its handlers, or between them."""

    def taken_over() -> None:
        (claim,) = bench.root.glob(f"{NAME}_claim_*")
        claim.rename(bench.root / f"{NAME}_claim_0123456789ab")

    bench.on_save = taken_over
    with pytest.raises(CheckpointError, match=r"another publisher took .* over while this one saved"):
        bench.publish()
    assert [call[0] for call in bench.calls] == ["show", "restore", "save"] and NOTE not in bench.left()
    bench.calls.clear()
    for path in bench.root.iterdir():
        path.rename(bench.root / "elsewhere")
    with pytest.raises(CheckpointError, match="was taken over by another publisher"):
        bench.publish()
    assert not bench.calls


def test_shares_that_make_no_whole_are_shown_to_no_handler(bench: Bench) -> None:
    bench.shapes["c"] = (8,)
    with pytest.raises(CorruptCheckpoint, match="'c' of shape"):
        bench.publish()
    assert not bench.calls


@pytest.mark.parametrize("missing", ["save_handler", "rename_handler"])
def test_a_trainer_without_one_of_the_handlers_is_refused_before_anything_is_claimed(
    bench: Bench, missing: str
) -> None:
    """The next publisher may have both."""
    by = bench.publisher()
    setattr(by._trainer, missing, None)
    with pytest.raises(CheckpointError, match="rank 1: step 3 cannot be saved: no handlers"):
        bench.publish(by)
    assert bench.left() == [NAME] and not bench.calls


def test_a_staging_directory_that_was_published_and_is_being_removed_is_not_called_broken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another publisher has left its note after this one looked for it, and half of the shares are gone: no rank wrote them wrong."""

    def claimed_late(root: Path, *more: Any) -> Path | None:
        (root / NOTE).write_text("elsewhere")
        (root / NAME / bench.order.results[0].files[0].name).unlink()
        return claim_staging(root, *more)

    monkeypatch.setattr(publisher, "claim_staging", claimed_late)
    with pytest.raises(CheckpointError, match="was taken over by another publisher"):
        bench.publish()
    assert not bench.calls and bench.publish() == "elsewhere"


def test_the_shares_are_removed_only_once_the_note_is_durable(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that fails in between leaves either what says that the step is published or what it can be published from."""
    acts: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda path, *more, **options: acts.append(f"{name} {path.name.partition('_claim_')[0]}")

    for name in ("write_durably", "fsync_directory"):
        monkeypatch.setattr(publisher, name, noted(name))
    monkeypatch.setattr(publisher, "shutil", SimpleNamespace(rmtree=noted("rmtree")))
    bench.publish()
    assert acts == [f"write_durably {NOTE}", f"fsync_directory {bench.root.name}", f"rmtree {NAME}"]


def test_a_note_that_cannot_be_written_leaves_the_shares_to_the_next_publisher(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes, *, private: bool) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(publisher, "write_durably", full)
        with pytest.raises(OSError, match="no room"):
            bench.publish()
    assert bench.publish(bench.publisher(3)).endswith("rank 3")


def test_handlers_run_without_gradients_and_leave_the_mode_as_it_was(bench: Bench) -> None:
    """They may copy parameters in place."""
    seen: list[bool] = []
    bench.on_save = bench.on_rename = lambda: seen.append(torch.is_grad_enabled())
    bench.publish()
    assert seen == [False, False] and torch.is_grad_enabled()


def test_a_trainer_that_keeps_no_random_numbers_is_saved_without_them(bench: Bench) -> None:
    bench.restores = False
    bench.publish()
    assert [call[0] for call in bench.calls] == ["show", "save", "rename"]


def test_every_long_part_of_a_publish_shows_that_it_progresses(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the controller takes a publisher that reads much, or that waits for its training thread, for one that hangs."""
    counts: list[int] = [0]
    wait = bench.await_step

    def read(*arguments: Any) -> Any:
        contents = read_contents(*arguments)
        counts.append(len(bench.advanced))
        return contents

    def await_step(step: int, advance: Callable[[int], None]) -> Any:
        before = len(bench.advanced)
        advance(7)
        assert bench.advanced[before:] == [7]
        return wait(step, advance)

    for module in (publisher, local_save):
        monkeypatch.setattr(module, "read_contents", read)
    bench.await_step = await_step  # type: ignore[method-assign]
    bench.publish()
    checked, shown = counts[1] - counts[0], counts[2] - counts[1]
    assert checked > 0 and shown > 0


def test_the_shares_are_read_with_torchs_own_metadata(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_whole(claim: Path, *more: Any) -> str:
        assert (claim / ".metadata").exists()
        return "the whole"

    monkeypatch.setattr(local_save, "read_whole", read_whole)
    bench.publish()
    assert bench.calls[0] == ("show", "the whole")


@pytest.mark.parametrize(("step", "settled"), [(STEP - 1, True), (STEP, False)])
def test_objects_of_another_step_are_saved_under_the_ordered_one_and_it_is_said(
    bench: Bench, step: int, settled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench.step, bench.settled = step, settled
    bench.publish()
    assert ("rename", STEP, ("args", STEP)) in bench.calls
    assert f"step {STEP} is saved with the trainer's own objects as they are" in caplog.text


def test_bytes_count_while_handlers_run_and_not_afterwards(bench: Bench) -> None:
    """That is how the controller knows that a long save handler is progressing; also of one that has failed."""
    by, seen = bench.publisher(), []

    def writes() -> None:
        before = by.work_done
        (bench.root.parent / "big").write_bytes(bytes(1 << 20))
        seen.append(by.work_done - before)
        raise OSError("no room")

    bench.on_save = writes
    with pytest.raises(OSError, match="no room"):
        bench.publish(by)
    if not os.path.exists("/proc/self/io"):
        return
    assert seen[0] >= 1 << 20
    done = by.work_done
    (bench.root.parent / "big").write_bytes(bytes(1 << 20))
    assert by.work_done == done >= 1 << 20
