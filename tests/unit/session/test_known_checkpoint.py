"""Which checkpoint a rank reports with its state: the newest that it knows, whoever has written it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ttp
from tests.unit.session.test_session import OFF, do_steps
from ttp.proto.messages import Cause, CauseKind, PublishOrder

CAUSE = Cause(CauseKind.EXITED, (1,), "signal SIGKILL")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[ttp.Session]:
    """One that has saved step 2."""
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    session = ttp.start(optimizer, save_dirs=[tmp_path / "a", tmp_path / "b"], settings=OFF)
    do_steps(model, optimizer, session, 2)
    session.save()
    yield session
    session.close()


def test_what_a_fault_published_before_the_ranks_went_on_is_known_to_all(session: ttp.Session, tmp_path: Path) -> None:
    """It is looked for in every directory; where it is not in sight, the one before is named still."""
    assert session.holder.checkpoint == str(tmp_path / "a/iter_0000002")
    shutil.copytree(tmp_path / "a/iter_0000002", tmp_path / "b/iter_0000004")
    session._saves.published(4)
    assert session.holder.checkpoint == str(tmp_path / "b/iter_0000004") and session.newest_saved == 4
    assert str(tmp_path / "b/iter_0000004") not in session.holder._trusted, "this rank has not read it"
    session._saves.published(5)
    assert session.holder.checkpoint == str(tmp_path / "b/iter_0000004") and session.newest_saved == 5


@pytest.mark.parametrize("of_its_node", [False, True])
def test_a_publisher_knows_what_it_has_published(
    session: ttp.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_its_node: bool
) -> None:
    """Where nodes have directories of their own it is a part of a checkpoint, and names none."""
    path, holder = str(tmp_path / "b/iter_0000003"), session.holder

    class OfItsNode:
        work_done = 0

        def publish(self, *_: object) -> str:
            return path

    monkeypatch.setattr(holder, "_publish", lambda order: path)
    monkeypatch.setattr(holder, "_publisher", OfItsNode() if of_its_node else None)
    order = PublishOrder(
        1, session.optimizer.current_step, str(tmp_path / "b"), "iter_0000002_tmp_1_1_1", (), CAUSE, None, 1
    )
    assert holder.publish(order) == path
    assert holder.checkpoint == (str(tmp_path / "a/iter_0000002") if of_its_node else path)
