"""keep_checkpoint_max: what a run removes beside its training, and what never goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.checkpoint.damage import flip_a_bit
from tests.unit.checkpoint.test_prune import steps
from ttp.checkpoint import verify
from ttp.checkpoint.format.durable import inodes_in
from ttp.errors import ConfigError
from ttp.runtime.retention import Retention, check_keep

if TYPE_CHECKING:
    from tests.unit.checkpoint.conftest import Job


def kept_of(folder: Path, retention: Retention) -> list[int]:
    retention.saved_in([str(folder)])
    retention.close()
    return steps(folder)


def test_the_newest_valid_ones_stay_after_every_save(job: Job, tmp_path: Path) -> None:
    """Broken ones do not count and do not go; where nothing is valid, nothing goes."""
    paths = {step: job.save(tmp_path, step) for step in (10, 20, 30)}
    assert kept_of(tmp_path, Retention(2)) == [20, 30]
    paths[40], paths[50] = job.save(tmp_path, 40), job.save(tmp_path, 50)
    flip_a_bit(paths[50])
    assert kept_of(tmp_path, Retention(2)) == [30, 40, 50]
    for step in (30, 40):
        flip_a_bit(paths[step])
    assert kept_of(tmp_path, Retention(1)) == [30, 40, 50]


def test_every_checkpoint_is_read_once(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saves often does not read all that it keeps each time; one that was written anew is read again."""
    read: list[str] = []

    def note(path: Path, **given: Any) -> object:
        read.append(path.name)
        return found(path, **given)

    found = verify.verify
    monkeypatch.setattr("ttp.runtime.retention.verify.verify", note)
    retention = Retention(2)
    for step in (10, 20, 30):
        job.save(tmp_path, step)
        kept_of(tmp_path, retention)
    assert read == ["iter_0000010", "iter_0000020", "iter_0000030"] and steps(tmp_path) == [20, 30]


def test_another_runs_checkpoints_of_higher_steps_neither_count_nor_go(job: Job, tmp_path: Path) -> None:
    """This run's would be removed as soon as they are written. One that takes a name of theirs is this run's."""
    for step in (80, 90):
        job.save(tmp_path, step)
    passed_over = inodes_in([str(tmp_path)])
    retention = Retention(2, None, lambda: passed_over)
    job.save(tmp_path, 10)
    assert kept_of(tmp_path, retention) == [10, 80, 90]
    for step in (20, 30):
        job.save(tmp_path, step)
    assert kept_of(tmp_path, retention) == [20, 30, 80, 90]
    job.save(tmp_path, 90, attempt="b", passed_over=passed_over)
    assert kept_of(tmp_path, retention) == [30, 80, 90]


@pytest.mark.parametrize("keep", [0, -1, True, 2.5, "4"])
def test_a_number_that_keeps_nothing_is_refused(keep: object) -> None:
    with pytest.raises(ConfigError, match=r"invalid keep_checkpoint_max: got .*, expected an integer >= 1"):
        check_keep(keep, shared_dirs=True)


def test_directories_of_nodes_own_are_refused() -> None:
    """No node can tell alone whether a step is whole."""
    check_keep(None, shared_dirs=False)
    with pytest.raises(ConfigError, match="TTP_SHARED_DIRS=False"):
        check_keep(2, shared_dirs=False)
