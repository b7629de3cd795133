"""With consequences for replicas that differ, a save compares them first; the checkpoint that is named is from before a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ttp
from tests.unit.session.test_session import OFF, do_steps
from ttp.errors import ConfigError, ReplicasDiffer
from ttp.runtime.step_copies import CopyOptions, begin_copies


def run(folder: Path, choice: str, compare_every: int = 0) -> tuple[Any, ttp.TTPReplicaOptimizer, ttp.Session]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(
        model.named_parameters(), replicas=1, lr=0.05, compare_every=compare_every, on_divergence=choice
    )
    return model, optimizer, ttp.start(optimizer, save_dirs=[folder], settings=OFF)


def count(optimizer: ttp.TTPReplicaOptimizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps at which replicas are compared."""
    steps: list[int] = []
    compare = optimizer.check_replicas

    def counted() -> None:
        steps.append(optimizer.current_step)
        compare()

    monkeypatch.setattr(optimizer, "check_replicas", counted)
    return steps


@pytest.mark.parametrize(
    ("choice", "compare_every", "expected"), [("report", 0, []), ("stop", 0, [3]), ("repair", 0, [3]), ("stop", 3, [3])]
)
def test_a_save_compares_once_where_that_has_consequences(
    choice: str, compare_every: int, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not again where the step was compared already, or was loaded."""
    model, optimizer, session = run(tmp_path, choice, compare_every)
    steps = count(optimizer, monkeypatch)
    do_steps(model, optimizer, session, 3)
    session.save()
    session.save()
    assert steps == expected
    session.close()
    model, optimizer, session = run(tmp_path, choice, compare_every)
    steps = count(optimizer, monkeypatch)
    assert session.resume() is not None
    session.save()
    assert not steps
    session.close()


def test_no_checkpoint_is_written_of_replicas_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, session = run(tmp_path, "stop")
    for last in (2, 4):
        do_steps(model, optimizer, session, last)
        session.save()
    do_steps(model, optimizer, session, 5)

    def differ() -> None:
        raise ReplicasDiffer("they differ")

    monkeypatch.setattr(optimizer, "check_replicas", differ)
    with pytest.raises(ReplicasDiffer):
        session.save()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    named = optimizer.on_divergence.checkpoint_before
    assert [Path(named(step)).name for step in (5, 4, 3, 1)] == ["iter_0000004", "iter_0000004", "iter_0000002", ""]
    with pytest.raises(ReplicasDiffer, match=f"No checkpoint from before it was found in {tmp_path}: begin anew where"):
        optimizer.on_divergence.checkpoint_before = lambda step: ""
        optimizer.on_divergence.settle(5, "they differ", (), 0)
    session.close()


def test_ranks_that_choose_differently_are_refused_as_the_session_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ttp.runtime.directory_agreement.exchange_json", lambda value, device: [value, [*value[:-1], "report"]]
    )
    with pytest.raises(ConfigError, match="on_divergence: got 'report' on rank 1, 'stop' on rank 0"):
        run(tmp_path, "stop")


def test_copies_in_memory_are_refused_beside_it(tmp_path: Path) -> None:
    """One may be of a step that was never compared, and would be resumed from."""
    session = run(tmp_path, "stop")[2]
    arguments = (CopyOptions("memory"), session.holder, OFF, [str(tmp_path)], cast(Any, object()))
    with pytest.raises(
        ConfigError, match="copies='memory': got on_divergence='stop': a copy may be of replicas that differ"
    ):
        begin_copies(*arguments, own_form=False)
    session.close()
