"""What a trainer would lose without noticing is said, once and on rank 0: its place in the data, and weights that no rank has saved."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from tests.shown import ROOT
from ttp.adopt import usage
from ttp.config import Settings

OFF = Settings(enable=False)
EPOCHS = 3
BATCHES = 4
UNCOUNTED = "the first 2 steps of this attempt took no batch from guard.batches(loader) or guard.enumerate(loader): "
UNSAVED = "TTP wrote no checkpoint in this attempt, "


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said to the user, line by line."""
    lines: list[str] = []
    monkeypatch.setattr(usage, "show", lambda level, line: lines.append(line))
    return lines


class Trainer:
    """A model of two weights on batches that are numbers."""

    def __init__(self, folder: Path, settings: Settings = OFF, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = [torch.full((1, 2), float(number)) for number in range(BATCHES)]
        self.guard = ttp.protect(self.model, self.optimizer, save_dirs=[folder], settings=settings, **options)

    def learn(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().sum().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        """Train through the guard's batches."""
        for batch in self.guard.batches(self.loader[:count]):
            self.learn(batch)


class Place:
    """A trainer's own place in its data."""

    batch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch = state_dict["batch"]


Loop = Callable[[Trainer], Iterator[torch.Tensor]]


def plain(trainer: Trainer) -> Iterator[torch.Tensor]:
    for _ in range(EPOCHS):
        yield from trainer.loader


def own_batches(trainer: Trainer) -> Iterator[torch.Tensor]:
    for _ in trainer.guard.epochs(EPOCHS):
        yield from trainer.loader


def batches(trainer: Trainer) -> Iterator[torch.Tensor]:
    for _ in trainer.guard.epochs(EPOCHS):
        yield from trainer.guard.batches(trainer.loader)


def numbered(trainer: Trainer) -> Iterator[torch.Tensor]:
    for _ in trainer.guard.epochs(EPOCHS):
        for _, batch in trainer.guard.enumerate(trainer.loader):
            yield batch


def by_step(trainer: Trainer) -> Iterator[torch.Tensor]:
    for step in range(trainer.guard.step + 1, EPOCHS * BATCHES + 1):
        yield trainer.loader[step % BATCHES]


def by_resumed(trainer: Trainer) -> Iterator[torch.Tensor]:
    done = trainer.guard.resumed.step if trainer.guard.resumed else 0
    for step in range(done + 1, EPOCHS * BATCHES + 1):
        yield trainer.loader[step % BATCHES]


def skipping(trainer: Trainer) -> Iterator[torch.Tensor]:
    for epoch in trainer.guard.epochs(EPOCHS):
        for index, batch in enumerate(trainer.loader):
            if epoch * BATCHES + index >= trainer.guard.step:
                yield batch


def telling(trainer: Trainer) -> Iterator[torch.Tensor]:
    for batch in plain(trainer):
        yield batch
        assert trainer.guard.step > 0  # as a line of its log does


@pytest.mark.parametrize("loop", [batches, numbered, by_step, by_resumed, skipping])
def test_a_trainer_that_keeps_its_place_gets_no_warning_and_goes_on_where_it_stood(
    tmp_path: Path, said: list[str], loop: Loop
) -> None:
    """By the guard's batches, or as a function of the step: after a fault every step is done once."""
    first = Trainer(tmp_path, save_interval=1)
    for batch in loop(first):
        first.learn(batch)
        if first.guard.step == BATCHES + 2:
            break
    first.guard.close()
    again = Trainer(tmp_path, save_interval=1)
    for batch in loop(again):
        again.learn(batch)
    again.guard.close()
    assert again.guard.step == EPOCHS * BATCHES and said == []


@pytest.mark.parametrize(
    ("loop", "lost", "done"),
    [
        (plain, "the whole loop", BATCHES + 2 + EPOCHS * BATCHES),
        (telling, "the whole loop", BATCHES + 2 + EPOCHS * BATCHES),
        (own_batches, "the interrupted epoch", 2 + EPOCHS * BATCHES),
    ],
)
def test_batches_that_are_not_counted_are_reported_with_what_a_restart_does_again(
    tmp_path: Path, said: list[str], loop: Loop, lost: str, done: int
) -> None:
    """Once in each attempt, at the second step, when nothing was restarted yet; a log that reads guard.step keeps no place."""
    first = Trainer(tmp_path, save_interval=1)
    for batch in loop(first):
        assert said == [] or first.guard.step >= 2
        first.learn(batch)
        if first.guard.step == BATCHES + 2:
            break
    first.guard.close()
    assert len(said) == 1 and said[0].startswith(f"{UNCOUNTED}a restart begins {lost} at its first batch again, ")
    again = Trainer(tmp_path, save_interval=1)
    for batch in loop(again):
        again.learn(batch)
    again.guard.close()
    assert again.guard.step == done, "so the warning is right"
    assert len(said) == 2
    assert said[1].startswith(f"{UNCOUNTED}this attempt, after step {BATCHES + 2}, began {lost} at")


def test_one_step_alone_is_not_a_loop(tmp_path: Path, said: list[str]) -> None:
    """A step to warm up, before the first batch."""
    trainer = Trainer(tmp_path, save_interval=1)
    trainer.learn(trainer.loader[0])
    trainer.steps(3)
    trainer.guard.close()
    assert said == []


def test_state_of_the_trainer_s_own_may_be_its_place(tmp_path: Path, said: list[str]) -> None:
    """A loader that has `state_dict`, for one."""
    trainer = Trainer(tmp_path, save_interval=1, state={"place": Place()})
    for batch in plain(trainer):
        trainer.learn(batch)
    trainer.guard.close()
    assert said == []


@pytest.mark.parametrize("given", ["", "after", "schedulers", "state"])
def test_a_schedule_that_ttp_does_not_know_is_reported(tmp_path: Path, said: list[str], given: str) -> None:
    """A restart would begin it again. Built before ttp.protect or after it; once, at the second step."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler: Any = None if given == "after" else torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    options = {"schedulers": {"schedulers": [scheduler]}, "state": {"state": {"scheduler": scheduler}}}.get(given, {})
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF, **options)  # type: ignore[arg-type]
    scheduler = scheduler or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(guard.step + 1, 5):
        assert len(said) == (step > 2 and given in ("", "after"))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    guard.save()
    guard.close()
    assert all("the optimizer has a scheduler of torch that ttp.protect was not given" in line for line in said)


def test_rank_0_speaks_for_all(tmp_path: Path, said: list[str]) -> None:
    trainer = Trainer(tmp_path)
    trainer.guard.session.rank = 1
    for batch in plain(trainer):
        trainer.learn(batch)
    trainer.guard.close()
    assert said == []


def test_a_job_that_ends_with_nothing_saved_is_reported(tmp_path: Path, said: list[str]) -> None:
    """Once, with what to do; the steps are those of this attempt."""
    trainer = Trainer(tmp_path)
    trainer.steps(3)
    assert said == []
    trainer.guard.close()
    assert len(said) == 1 and said[0].startswith(
        f"{UNSAVED}steps 1 to 3: unless the trainer saves the weights itself, they are lost; call guard.save()"
    )


def test_a_newer_checkpoint_that_was_there_before_holds_none_of_its_steps(tmp_path: Path, said: list[str]) -> None:
    """It was not resumed from: all its files are gone."""
    first = Trainer(tmp_path)
    first.steps(5)
    path = Path(first.guard.save())
    first.guard.close()
    for file in path.iterdir():
        file.unlink()
    second = Trainer(tmp_path)
    second.steps(3)
    second.guard.close()
    assert len(said) == 1 and said[0].startswith(f"{UNSAVED}steps 1 to 3: ")


def test_an_interval_that_never_came_is_reported(tmp_path: Path, said: list[str]) -> None:
    """The job was shorter; one that went on from a checkpoint is as always at its end, without a warning."""
    trainer = Trainer(tmp_path, save_interval=1000)
    trainer.steps(3)
    trainer.guard.close()
    assert len(said) == 1 and said[0].startswith(UNSAVED) and "save_interval is 1000" in said[0]


def test_an_attempt_that_resumed_and_saved_nothing_is_informed_of_its_own_steps(
    tmp_path: Path, said: list[str]
) -> None:
    """The checkpoint that it began with has none of them. With an interval the last steps are the trainer's own choice."""
    first = Trainer(tmp_path, save_interval=2)
    first.steps(2)
    first.guard.close()
    second = Trainer(tmp_path, save_interval=10)
    second.steps(4)
    second.guard.close()
    assert said == []
    third = Trainer(tmp_path)
    third.steps(4)
    third.guard.close()
    assert len(said) == 1 and said[0].startswith(f"{UNSAVED}steps 3 to 4: ")


def saves(trainer: Trainer) -> None:
    trainer.guard.save()


def saves_by_session(trainer: Trainer) -> None:
    ttp.current_session().save()


def saves_itself(trainer: Trainer) -> None:
    torch.save(trainer.model.state_dict(), os.devnull)


@pytest.mark.parametrize("save", [saves, saves_by_session, saves_itself])
def test_what_was_saved_is_not_reported(tmp_path: Path, said: list[str], save: Callable[[Trainer], None]) -> None:
    """By ttp, or by the trainer as far as it can be seen: it took the model's state."""
    trainer = Trainer(tmp_path)
    trainer.steps(3)
    save(trainer)
    trainer.guard.close()
    assert said == []


@pytest.mark.parametrize(("step", "reported"), [(3, 0), (2, 1)])
def test_what_others_published_meanwhile_is_not_reported(
    tmp_path: Path, said: list[str], step: int, reported: int
) -> None:
    """Rank 1 left without close(): it counted as dead, and the last step is on disk. An older one does not do."""
    trainer = Trainer(tmp_path)
    trainer.steps(3)
    (tmp_path / f"iter_{step:07d}").mkdir()
    trainer.guard.close()
    assert len(said) == reported


def test_a_job_that_did_no_step_gets_no_warning(tmp_path: Path, said: list[str]) -> None:
    Trainer(tmp_path).guard.close()
    assert said == []


def test_a_trainer_that_raises_has_a_dying_gasp(tmp_path: Path, said: list[str]) -> None:
    """The controller reports the outcome, on every way out."""
    trainer = Trainer(tmp_path, Settings(enable=True))

    @ttp.ttp_to_persist
    def train() -> None:
        trainer.steps(2)
        raise ZeroDivisionError("the trainer's own mistake")

    with pytest.raises(ZeroDivisionError):
        train()
    trainer.guard.close()
    assert said == []


def test_an_exception_on_its_way_is_the_news(tmp_path: Path, said: list[str]) -> None:
    """Of a trainer that closes in `finally`: other ranks may be saving the step."""
    trainer = Trainer(tmp_path)
    with pytest.raises(ZeroDivisionError):
        try:
            trainer.steps(2)
            raise ZeroDivisionError("the trainer's own mistake")
        finally:
            trainer.guard.close()
    assert said == []


SCRIPT = """
import sys, torch, ttp
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
guard = ttp.protect(model, optimizer, save_dirs=[sys.argv[1]])
for batch in guard.batches([torch.ones(1, 2)] * 3):
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("end", "reported"),
    [
        ("", 1),
        pytest.param("guard.save()", 0, marks=pytest.mark.long),
        pytest.param("guard.close(); guard.close()", 1, marks=pytest.mark.long),
        pytest.param("raise ZeroDivisionError('its own mistake')", 0, marks=pytest.mark.long),
        pytest.param("import os\nif not os.fork(): sys.exit()\nos.wait()", 1, marks=pytest.mark.long),
    ],
)
def test_a_process_that_ends_without_closing_is_reported_too(tmp_path: Path, end: str, reported: int) -> None:
    """Once, however it ends, and not by a child; where an exception ends it, that is the news."""
    script = tmp_path / "train.py"
    script.write_text(f"{SCRIPT}{end}\n")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "save")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ENABLE_TTP": "False", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr.count(UNSAVED) == reported, done.stderr
    assert (f"ttp: warning: {UNSAVED}steps 1 to 3: " in done.stderr) == bool(reported), done.stderr


def test_the_model_is_as_it_was_found(tmp_path: Path) -> None:
    """While it is protected it can be copied; afterwards nothing of the guard remains in it."""
    trainer = Trainer(tmp_path)
    other = copy.deepcopy(trainer.model)
    assert other.state_dict().keys() == trainer.model.state_dict().keys()
    trainer.guard.close()
    model: Any = trainer.model
    assert not (model._state_dict_pre_hooks or model._forward_pre_hooks or model._forward_hooks)
