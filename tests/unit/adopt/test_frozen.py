"""Parameters that are thawed or frozen on the way: requires_grad, which a checkpoint does not have, is compared after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from ttp.adopt.adopted_state import parameters_of
from ttp.adopt.trainer_state import seen
from ttp.adopt.trainer_state.frozen_parameters import MAX_NAMES, FrozenParameters, check_frozen
from ttp.adopt.trainer_state.seen import SeenBatches
from ttp.config import Settings
from ttp.errors import DataMismatch

OFF = Settings(enable=False)
WHAT = "step {step} does not train the parameters that this run trained before the restart: got {how}. requires_grad is in no checkpoint"


def model_of(layers: int = 2, frozen: bool = True) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    model[0].requires_grad_(not frozen)
    return model


def frozen_of(model: torch.nn.Module) -> FrozenParameters:
    return FrozenParameters(parameters_of(model))


class Thawing:
    """A trainer whose first layer is frozen at first."""

    def __init__(self, folder: Path, sets: Callable[[int, Any], object], frozen: bool = True, **options: Any) -> None:
        """`sets(step, layer)`: in front of each step."""
        self.model, self.sets = model_of(frozen=frozen), sets
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard = ttp.protect(self.model, self.optimizer, save_dirs=[folder], settings=OFF, **options)

    def train(self, until: int, begins_next: bool = False) -> int:
        """Save behind step `until`, with the first forward pass of the next one or without; return the newest step."""
        try:
            for step in range(self.guard.step + 1, until + 1 + begins_next):
                self.sets(step, self.model[0])
                loss = self.model(torch.ones(1, 2)).sum()
                if step <= until:
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
            self.guard.save()
            return self.guard.step
        finally:
            self.guard.close()


def thaws_in(step: int) -> Callable[[int, Any], object]:
    return lambda now, layer: layer.requires_grad_(True) if now == step else None


def thaws_from(step: int) -> Callable[[int, Any], object]:
    return lambda now, layer: layer.requires_grad_(now >= step)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(seen, "show", lambda level, line: lines.append(line))
    return lines


@pytest.mark.parametrize("begins_next", [False, True])
def test_parameters_that_a_restart_freezes_again_are_an_error(
    tmp_path: Path, begins_next: bool, said: list[str]
) -> None:
    """Whether the next step had begun before the fault or not. It may be accepted."""
    Thawing(tmp_path, thaws_in(2)).train(3, begins_next)
    text = WHAT.format(step=4, how=r"2 frozen, expected 0 \(0.weight, 0.bias\)").replace("(`", r"\(`")
    with pytest.raises(
        DataMismatch, match=text + ".*in front of the step's first forward pass.*on_data_mismatch='warn'"
    ):
        Thawing(tmp_path, thaws_in(2)).train(4)
    assert not said
    assert Thawing(tmp_path, thaws_in(2), on_data_mismatch="warn").train(5) == 5
    assert len(said) == 1 and "2 frozen, expected 0 (0.weight, 0.bias)" in said[0]


def test_parameters_that_a_restart_trains_again_are_an_error(tmp_path: Path) -> None:
    def freezes(now: int, layer: Any) -> None:
        if now == 2:
            layer.requires_grad_(False)

    Thawing(tmp_path, freezes, frozen=False).train(3)
    with pytest.raises(DataMismatch, match=r"got 0 frozen, expected 2 \(0.weight, 0.bias\)"):
        Thawing(tmp_path, freezes, frozen=False).train(4)


@pytest.mark.parametrize("begins_next", [False, True])
@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_trainer_that_sets_them_by_the_step_goes_on(
    tmp_path: Path, saved: int, begins_next: bool, frozen: bool, said: list[str]
) -> None:
    """Whatever they were as it called ttp.protect."""
    Thawing(tmp_path, thaws_from(3), frozen).train(saved, begins_next)
    assert Thawing(tmp_path, thaws_from(3), frozen).train(5) == 5
    assert Thawing(tmp_path, thaws_from(3), frozen).train(7) == 7
    may_begin_anew = saved == 2 and not (frozen or begins_next)  # trained in step 3, as before step 1
    assert len(said) == may_begin_anew and all("by intention" in line for line in said)


@pytest.mark.parametrize("begins_next", [False, True])
def test_a_change_in_the_first_step_itself_is_the_trainers_own(
    tmp_path: Path, begins_next: bool, said: list[str]
) -> None:
    Thawing(tmp_path, thaws_in(4)).train(3)
    assert Thawing(tmp_path, thaws_in(4)).train(5, begins_next) == 5 and not said


def test_what_may_be_a_change_in_the_first_step_is_only_warned_of(tmp_path: Path, said: list[str]) -> None:
    """Frozen behind ttp.protect in each attempt: as the run began, but not as this attempt did."""

    def sets(now: int, layer: Any) -> None:
        if now == 2:
            layer.requires_grad_(True)

    def begin() -> Thawing:
        trainer = Thawing(tmp_path, sets, frozen=False)
        trainer.model[0].requires_grad_(False)
        return trainer

    begin().train(3)
    assert begin().train(4) == 4
    assert len(said) == 1 and "step 4 does not train" in said[0] and "change in step 4 by intention" in said[0]


# --- the record ---


def record_of(model: torch.nn.Module, steps: int = 3) -> dict[str, Any]:
    frozen = frozen_of(model)
    for step in range(1, steps + 1):
        frozen.keep(step)
    return frozen.record()


def test_a_record_has_two_steps_and_few_names() -> None:
    """Of many a number and a digest. A step that begins again counts once."""
    few, many = model_of(), model_of(MAX_NAMES)
    many.requires_grad_(False)
    assert [[step, count, names] for step, count, _, names in record_of(few)["steps"]] == [
        [2, 2, ["0.weight", "0.bias"]],
        [3, 2, ["0.weight", "0.bias"]],
    ]
    assert [[step, count, names] for step, count, _, names in record_of(many)["steps"]] == [
        [2, 2 * MAX_NAMES, []],
        [3, 2 * MAX_NAMES, []],
    ]
    frozen = frozen_of(few)
    for step in (1, 2, 2):
        frozen.keep(step)
    assert [row[0] for row in frozen.record()["steps"]] == [1, 2]
    check_frozen(record_of(few), "frozen")


@pytest.mark.parametrize(("layers", "how"), [(2, "(0.weight, 0.bias)"), (3, "(0.weight, 0.bias, 1.weight and others)")])
def test_a_few_names_are_shown(layers: int, how: str) -> None:
    before, now = model_of(3), model_of(3, frozen=False)
    before[:layers].requires_grad_(False)
    before[: layers - 1].requires_grad_(False)
    if layers == 2:
        before[1].requires_grad_(True)
    frozen = frozen_of(now)
    frozen.expect(record_of(before), compares=True)
    assert frozen.differing(3)[0].endswith(how)


def test_of_many_only_the_number_is_shown() -> None:
    before = model_of(MAX_NAMES)
    before.requires_grad_(False)
    frozen = frozen_of(model_of(MAX_NAMES))
    frozen.expect(record_of(before), compares=True)
    assert frozen.differing(3) == (f"got 2 frozen, expected {2 * MAX_NAMES}", True)
    assert frozen.differing(3) == ("", False), "compared once"


def test_another_model_is_not_compared_and_wrappers_change_no_name() -> None:
    record = record_of(model_of(3))
    for model, differs in ((model_of(2, frozen=False), False), (model_of(3, frozen=False), True)):
        frozen = frozen_of(torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"_orig_mod": model})}))
        frozen.expect(record, compares=True)
        assert bool(frozen.differing(3)[0]) is differs
        frozen.expect(record, compares=True)
        frozen.expect(None, compares=True)
        assert frozen.differing(3) == ("", False)


@pytest.mark.parametrize(("rank", "world_size", "compares"), [(1, 2, True), (0, 2, False), (0, 3, True), (1, 3, False)])
def test_one_rank_compares_in_a_job_of_any_size(rank: int, world_size: int, compares: bool, said: list[str]) -> None:
    """The one that published the record, or rank 0. What the run began with is known to all."""
    written = SeenBatches(1, 2, "warn", frozen_of(model_of()))
    written.forward(1, (), [], counted=True)
    written.forward(2, (), [], counted=True)
    again = SeenBatches(rank, world_size, "warn", frozen_of(model_of(frozen=False)))
    again.expect(written.record())
    again.forward(2, (), [], counted=True)
    assert bool(said) is compares
    assert again.record()["frozen"]["first"] == written.record()["frozen"]["first"]


def test_an_older_checkpoint_is_not_compared(said: list[str]) -> None:
    again = SeenBatches(0, 2, "error", frozen_of(model_of()))
    record = SeenBatches(0, 2, "error", frozen_of(model_of(frozen=False))).record()
    del record["frozen"]
    seen.check_record(record, "seen")
    again.expect(record)
    again.forward(2, (), [], counted=True)
    assert not said


@pytest.mark.parametrize(
    "change",
    [
        {"model": 1},
        {"first": None},
        {"steps": {}},
        {"steps": [[1, 0, ""]]},
        {"steps": [["1", 0, "", []]]},
        {"steps": [[1, 0, 5, []]]},
        {"steps": [[1, 0, "", [5]]]},
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    record = SeenBatches(0, 2, "error", frozen_of(model_of())).record()
    seen.check_record(record, "seen")
    with pytest.raises(ValueError, match=rf"seen.frozen.{next(iter(change))}"):
        seen.check_record({**record, "frozen": {**record["frozen"], **change}}, "seen")
