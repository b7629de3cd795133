"""Checkpoints that were there before an attempt that did not resume from them: they hold no step of it, and keep no name from it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from ttp.checkpoint.format.durable import inodes_in, newest_step, steps_of_run
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.passed_over import is_in, read_notes, write_notes
from ttp.config import Settings
from ttp.errors import CheckpointError
from ttp.mirror.source import read
from ttp.runtime.directory_agreement import JobDirectories

OFF = Settings(enable=False)


class Run:
    """A run whose only weights have the same value in every step."""

    def __init__(self, folder: Path, value: float, **options: Any) -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        self.weight = model.weight
        with torch.no_grad():
            self.weight.fill_(value)
        self.optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.0)
        self.session = ttp.start(self.optimizer, save_dirs=[folder], **{"settings": OFF, **options})

    def train(self, last: int) -> None:
        for step in range(self.optimizer.current_step + 1, last + 1):
            self.weight.sum().backward()  # type: ignore[no-untyped-call]
            self.session.set_step_state(step, {"of": float(self.weight.detach()[0, 0])})
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self) -> Path:
        return Path(self.session.save())

    def close(self) -> None:
        self.session.close()


def refuse(state: Mapping[str, Any]) -> None:
    raise ValueError("mine: is missing, expected a value")


def no_room(path: Path, content: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def weights(path: str | Path) -> list[float]:
    return ttp.open_checkpoint(path).weights()["weight"].flatten().tolist()


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Another run's checkpoint of step 3, with weights of 1."""
    run = Run(tmp_path, 1.0)
    run.train(3)
    path = run.save()
    run.close()
    return path


@pytest.mark.parametrize("resumes", [True, False])
def test_a_step_that_an_earlier_run_has_published_is_written_all_the_same(
    tmp_path: Path, earlier: Path, resumes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the resume has refused it, or the script does not resume. The earlier run's is kept under another name."""
    run = Run(tmp_path, 2.0)
    if resumes:
        assert run.session.resume(check=refuse) is None
    run.train(3)
    assert run.save() == earlier and weights(earlier) == [2.0, 2.0]
    assert read_manifest(earlier).state["trainer"] == {"of": 2.0}
    aside = earlier.with_name("iter_0000003_replaced_1")
    assert weights(aside) == [1.0, 1.0] and f"was moved to {aside}" in caplog.text
    inode = os.lstat(earlier).st_ino
    for trusted in (
        run.session.holder._trusted,
        frozenset[str](),
    ):  # by the rank that has published it, and by another one
        run.session.holder._trusted = trusted
        assert run.save() == earlier and os.lstat(earlier).st_ino == inode, "its own is kept"
    run.close()


def test_what_is_moved_aside_is_not_read_first(tmp_path: Path, earlier: Path) -> None:
    """A fault waits for its checkpoint. So a flipped bit in the older one is not found."""
    file = max(earlier.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run = Run(tmp_path, 2.0)
    run.train(3)
    assert run.save() == earlier and weights(earlier) == [2.0, 2.0]
    assert [path.name for path in tmp_path.glob("iter_0000003_*")] == ["iter_0000003_replaced_1"]
    run.close()


def test_what_was_resumed_from_is_kept(tmp_path: Path, earlier: Path) -> None:
    inode = os.lstat(earlier).st_ino
    run = Run(tmp_path, 2.0)
    assert run.session.resume() is not None
    assert run.save() == earlier and os.lstat(earlier).st_ino == inode
    assert not list(tmp_path.glob("*_replaced_*"))
    run.close()


def test_a_step_that_appears_during_the_attempt_is_kept(tmp_path: Path) -> None:
    """Another publisher of this run has put it there."""
    run = Run(tmp_path, 2.0)
    run.train(3)
    path = run.save()
    inode = os.lstat(path).st_ino
    run.session.holder._trusted = frozenset()
    assert run.save() == path and os.lstat(path).st_ino == inode
    run.close()


def test_a_process_in_a_lost_ones_place_is_given_what_the_others_have_passed_over(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins after this attempt's own were written, so it does not look by itself."""
    run = Run(tmp_path, 2.0)
    assert run.session.holder.passed_over == {str(earlier): os.lstat(earlier).st_ino}
    run.close()
    monkeypatch.setattr("ttp.runtime.directory_agreement.vacant", lambda: 1)
    monkeypatch.setattr(JobDirectories, "_prepare", lambda self: (self.named, self.named))
    assert JobDirectories([str(tmp_path)], OFF, 1, torch.device("cpu")).before == {}
    run.session.holder.pass_over({"/c/iter_0000042": 7})
    assert run.session.holder.passed_over == {"/c/iter_0000042": 7}


def test_the_end_knows_that_an_earlier_runs_checkpoint_holds_no_step_of_this_one(
    tmp_path: Path, earlier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was damaged: steps behind it are not on disk."""
    next(earlier.glob("*.distcp")).unlink()
    run = Run(tmp_path, 2.0)
    assert run.session.resume() is None
    run.train(2)
    run.close()
    assert "TTP has no checkpoint of step 2, the last one: none was written" in caplog.text
    run = Run(tmp_path, 2.0)
    run.train(2)
    run.save()
    run.close()
    assert caplog.text.count("TTP has no checkpoint") == 1


def test_checkpoints_from_before_the_one_that_was_resumed_from_are_this_runs_history(
    tmp_path: Path, earlier: Path
) -> None:
    """They count, and go, as others do."""
    first = Run(tmp_path, 1.0)
    assert first.session.resume() is not None
    first.train(5)
    path = first.save()
    first.train(7)
    newest = first.save()
    first.close()
    for file in newest.iterdir():
        file.unlink()
    run = Run(tmp_path, 1.0, keep_checkpoint_max=1)
    assert set(run.session.holder.passed_over) == {str(earlier), str(path), str(newest)}, "before it has resumed"
    point = run.session.resume()
    assert point is not None and point.path == str(path)
    assert set(run.session.holder.passed_over) == {str(newest)}
    run.train(6)
    run.save()
    run.close()
    assert sorted(each.name for each in tmp_path.glob("iter_*")) == ["iter_0000006", "iter_0000007"]


def test_another_folders_checkpoint_of_the_step_that_was_resumed_from_is_not_its_history(
    tmp_path: Path, earlier: Path
) -> None:
    run = Run(tmp_path, 2.0)
    run.session.holder.pass_over({"/b/iter_0000002": 1, "/b/iter_0000003": 2, "/b/iter_0000004": 3})
    assert run.session.resume() is not None
    assert run.session.holder.passed_over == {"/b/iter_0000003": 2, "/b/iter_0000004": 3}
    run.close()


def test_a_run_that_does_not_resume_keeps_what_it_saves(tmp_path: Path, earlier: Path) -> None:
    """Checkpoints of higher steps do not count as newer ones of this run."""
    run = Run(tmp_path, 2.0, keep_checkpoint_max=1)
    run.train(1)
    path = run.save()
    run.close()
    assert weights(path) == [2.0, 2.0] and weights(earlier) == [1.0, 1.0]


def test_the_mirror_is_given_what_the_resume_has_passed_over(tmp_path: Path, earlier: Path) -> None:
    """Not before: what is loaded may be copied still."""
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    mirrored = Settings(
        enable=False, launched=True, attempt_dir=str(attempt), mirror=f"file://{tmp_path}/mirror", mirror_optional=True
    )
    (tmp_path / "mirror").mkdir()
    run = Run(tmp_path, 2.0, settings=mirrored)
    before = read(attempt)
    assert before is not None and before.passed_over == {}
    assert run.session.resume(check=refuse) is None
    assert read(attempt) == replace(before, passed_over={str(earlier): os.lstat(earlier).st_ino})
    run.close()


def test_a_resume_notes_beside_the_checkpoints_what_it_has_passed_over(
    tmp_path: Path, earlier: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `ttp ckpt prune` and `ttp status`. The next resume replaces the note."""
    run = Run(tmp_path, 2.0)
    assert run.session.resume(check=refuse) is None
    assert read_notes([tmp_path]) == {str(earlier): os.lstat(earlier).st_ino}
    run.close()
    monkeypatch.setattr("ttp.checkpoint.passed_over.write_durably", no_room)
    run = Run(tmp_path, 2.0)
    assert run.session.resume(check=refuse) is None
    assert f"{tmp_path}/.ttp_passed_over.json cannot be written: No space left on device" in caplog.text
    run.close()
    run = Run(tmp_path, 2.0)
    assert run.session.resume() is not None
    assert read_notes([tmp_path]) == {} and not (tmp_path / ".ttp_passed_over.json").exists()
    run.close()
    run = Run(tmp_path, 2.0)
    assert run.session.resume() is not None and caplog.text.count("cannot be written") == 1
    run.close()


def test_a_rank_that_does_not_look_after_the_directories_notes_nothing(tmp_path: Path, earlier: Path) -> None:
    run = Run(tmp_path, 2.0)
    run.session._search._directories.keeps = False
    assert run.session.resume(check=refuse) is None
    assert read_notes([tmp_path]) == {}
    run.close()


def test_a_note_names_what_is_in_its_own_folder(tmp_path: Path) -> None:
    """Which has another path where it was moved, or on another node."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    folders = [tmp_path / "a", tmp_path / "b"]
    write_notes(map(str, folders), {f"{tmp_path}/a/iter_0000042": 7, f"{tmp_path}/b/iter_0000043": 8})
    folders[0].rename(tmp_path / "c")
    assert read_notes([tmp_path / "c"]) == {f"{tmp_path}/c/iter_0000042": 7}
    assert read_notes(folders) == {f"{tmp_path}/b/iter_0000043": 8}
    assert not is_in({f"{tmp_path}/a/iter_0000042": 7}, tmp_path / "a" / "iter_0000042"), "it is not there any more"


@pytest.mark.parametrize("content", ["", "[]", '{"iter_0000042": "7"}', "{"])
def test_a_damaged_note_is_refused_by_what_removes(tmp_path: Path, content: str) -> None:
    (tmp_path / ".ttp_passed_over.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"ttp_passed_over.json is damaged: .*Start the job again, .* or remove it"
    ):
        read_notes([tmp_path])


def test_a_difference_of_replicas_names_a_checkpoint_of_this_run(tmp_path: Path, earlier: Path) -> None:
    run = Run(tmp_path, 2.0)
    run.train(2)
    path = run.save()
    run.train(4)
    assert run.session._saves._checkpoint_before(4) == str(path)
    run.close()


def test_one_that_takes_the_name_later_is_another_one(tmp_path: Path, earlier: Path) -> None:
    before = inodes_in([str(tmp_path)])
    assert newest_step([str(tmp_path)], before) == 0 and newest_step([str(tmp_path)], {}) == 3
    earlier.rename(tmp_path / "elsewhere")
    run = Run(tmp_path, 2.0)
    run.train(3)
    path = run.save()
    assert steps_of_run([str(tmp_path)], before) == [(3, path)]
    assert newest_step([str(tmp_path / "nowhere")], {}) == 0
    run.close()
