"""Averages of the weights belong to the state of a step: saved, given back, and changed within its update only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ttp
from tests.gates import freeze
from tests.unit.adopt.test_steps import adopt
from ttp.adopt.averages import Averages
from ttp.checkpoint.format.manifest import read_manifest
from ttp.config import Settings
from ttp.errors import CheckpointMismatch, ConfigError
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord

ON, OFF = Settings(enable=True, standbys=0), Settings(enable=False)
STEPS = 8


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))


def new_ema(model: torch.nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)  # type: ignore[no-untyped-call]


class Shadow:
    """An average of one's own, without torch's class: every second step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = [param.detach().clone() for param in model.parameters()]
        self.count = torch.zeros((), dtype=torch.int64)

    def update_parameters(self, model: torch.nn.Module) -> None:
        self.count += 1
        if self.count.item() % 2 == 0:
            for mine, param in zip(self.values, model.parameters(), strict=True):
                mine.lerp_(param.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, **{f"value{place}": value for place, value in enumerate(self.values)}}


class Trainer:
    """One rank with a model, an optimizer and two averages."""

    def __init__(self, folder: Path, settings: Settings, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = new_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.averages: dict[str, Any] = {"ema": new_ema(self.model), "shadow": Shadow(self.model)}
        self.guard = ttp.protect(
            self.model, self.optimizer, averages=self.averages, save_dirs=[folder], settings=settings, **options
        )

    def train(self, dies_at: int = 0, point: str = "") -> None:
        for step in range(self.guard.step + 1, STEPS + 1):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            if (step, point) == (dies_at, "before"):
                raise ZeroDivisionError
            self.optimizer.step()
            if (step, point) == (dies_at, "after"):
                raise ZeroDivisionError

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {**self.model.state_dict(), **self.averages["ema"].state_dict(prefix="ema.")}
        return {name: value.clone() for name, value in {**found, **self.averages["shadow"].state_dict()}.items()}


@pytest.mark.parametrize("point", ["before", "after"])
def test_averages_go_on_as_if_nothing_had_happened(tmp_path: Path, point: str) -> None:
    """Before an update, and right behind it, where a trainer's own call would have come: the same bits as the baseline run."""
    whole = Trainer(tmp_path / "whole", OFF)
    whole.train()
    expected = whole.tensors()
    whole.guard.close()
    faulted = Trainer(tmp_path / "faulted", ON)
    with pytest.raises(ZeroDivisionError):
        ttp.ttp_to_persist(faulted.train)(5, point)
    faulted.guard.close()
    again = Trainer(tmp_path / "faulted", OFF)
    done = 5 if point == "after" else 4
    assert again.guard.step == done == again.averages["shadow"].count.item() == again.averages["ema"].n_averaged.item()
    again.train()
    got = again.tensors()
    again.guard.close()
    assert got.keys() == expected.keys() and all(torch.equal(got[name], value) for name, value in expected.items())
    assert not torch.equal(got["ema.module.0.weight"], got["0.weight"])


def test_the_update_is_what_a_trainers_own_call_would_have_done(tmp_path: Path) -> None:
    """torch's class under `protect` and without ttp: the same bits."""
    trainer = Trainer(tmp_path, OFF)
    trainer.train()
    torch.manual_seed(0)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ema = new_ema(model)
    for step in range(1, STEPS + 1):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)
    mine = trainer.averages["ema"].state_dict()
    assert all(torch.equal(mine[name], value) for name, value in ema.state_dict().items())


def test_a_checkpoint_records_what_the_averages_are(tmp_path: Path) -> None:
    """Under names of their own; a run without them is refused, naming one."""
    trainer = Trainer(tmp_path, OFF)
    trainer.train()
    path = trainer.guard.save()
    trainer.guard.close()
    tensors = read_manifest(Path(path)).tensors
    assert {"average.ema.n_averaged", "average.ema.module.0.weight", "average.shadow.value0"} <= set(tensors)
    model = new_model()
    with pytest.raises(CheckpointMismatch, match=r"average\.ema"):
        ttp.protect(model, torch.optim.AdamW(model.parameters()), save_dirs=[tmp_path], settings=OFF)


def averaging(**options: Any) -> tuple[Any, Any, Gate, Shadow]:
    torch.manual_seed(0)
    shadow = Shadow(torch.nn.Linear(2, 2))
    model, adopted, gate = adopt(averages={"shadow": shadow}, **options)
    return model, adopted, gate, shadow


def test_a_roll_forward_takes_the_weights_into_the_average() -> None:
    """A survivor that was READY finishes the step on another thread: weights and average are of one step."""
    model, adopted, gate, shadow = averaging()
    adopted.optimizer.step()
    gate.computing(2)
    gate.ready(2)
    adopted._steps._ready = 2
    before = shadow.values[0].clone()
    assert adopted.roll_forward(CommitRecord(2, 0.0, 1.0, False, 1.0, (0.1,), ())) == 2
    assert shadow.count.item() == 2
    assert torch.equal(shadow.values[0], torch.lerp(before, model.weight.detach(), 0.5))
    held = next(t for tensors in adopted.holdings(2).values() for t in tensors if t.key == "average.shadow.value0")
    assert torch.equal(held.values.view(2, 2), shadow.values[0])


def test_a_skipped_step_is_not_averaged() -> None:
    """It changed nothing."""
    model, adopted, _, shadow = averaging(clip=ttp.ClipNorm(1.0))
    model.weight.grad = torch.full((2, 2), float("inf"))
    adopted.optimizer.step()
    assert adopted.current_step == 1 and shadow.count.item() == 0


def test_an_average_that_raises_leaves_a_torn_state_and_no_closed_gate() -> None:
    """As an update that raises: a freeze does not wait for it, and nothing of this rank is saved."""
    _, adopted, gate, shadow = averaging()
    shadow.values = shadow.values[:1]
    with pytest.raises(ConfigError, match=r"got another tensor than when ttp\.protect was called"):
        adopted.optimizer.step()
    _, adopted, gate, shadow = averaging()
    shadow.count.zero_().add_(1)
    adopted._state._averages.loaded()
    shadow.update_parameters = lambda model: [][0]  # type: ignore[method-assign]
    with pytest.raises(IndexError):
        adopted.optimizer.step()
    report = freeze(gate, 1, 2.0)
    assert (report.closed, report.torn) == (True, True)
    with pytest.raises(Exception, match="in the middle of the update of step 1"):
        adopted.holdings()


def test_the_trainers_own_call_is_found() -> None:
    """Averaging twice a step would be a silent change of what is trained; a module's buffers may be changed by its passes."""
    model, adopted, _, shadow = averaging()
    adopted.optimizer.step()
    shadow.update_parameters(model)
    with pytest.raises(ConfigError, match="leave your own call out"):
        adopted.optimizer.step()
    base = new_model()
    ema = new_ema(base)
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    state = ttp.adopt.optimizer.AdoptedOptimizer(base, optimizer, averages={"ema": ema})
    for _ in range(2):
        optimizer.zero_grad()
        base(torch.ones(3, 4)).sum().backward()
        ema(torch.ones(3, 4))  # an evaluation in train mode changes its statistics
        optimizer.step()
    assert state.current_step == 2
    ema.update_parameters(base)
    with pytest.raises(ConfigError, match=r"average\.ema\.module\..* was changed between two steps"):
        optimizer.step()


class Copies(Shadow):
    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values[0].clone()}


class Plain(Shadow):
    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9}


@pytest.mark.parametrize(
    ("averages", "words"),
    [
        (lambda model: {"ema": model}, "expected torch.optim.swa_utils.AveragedModel, or an object"),
        (lambda model: {"a.b": new_ema(model)}, "name without a dot"),
        (lambda model: {"own": Copies(model)}, "returns copies"),
        (lambda model: {"own": Plain(model)}, "decay: got a float, expected tensors"),
        (lambda model: {"ema": new_ema(model).to("meta")}, "on meta, expected tensors on cpu"),
    ],
)
def test_what_is_not_an_average_is_refused_at_the_start(
    tmp_path: Path, averages: Callable[[torch.nn.Module], dict[str, Any]], words: str
) -> None:
    """With its name and what was expected."""
    model = new_model()
    with pytest.raises(ConfigError, match=words):
        ttp.protect(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            averages=averages(model),
            save_dirs=[tmp_path],
            settings=OFF,
        )


def test_an_average_may_have_tensors_on_the_cpu_beside_those_of_the_device() -> None:
    """torch's own counts there, and offloaded weights are there. A device without memory stands for one."""
    elsewhere = torch.device("meta")
    ema = new_ema(torch.nn.Linear(2, 2, device=elsewhere))
    assert {str(value.device) for value in ema.state_dict().values()} == {"cpu", "meta"}
    assert len(Averages({"ema": ema}, elsewhere).tensors()) == 3
    with pytest.raises(ConfigError, match=r"weight: .* meta, expected tensors on cpu or cuda; keep"):
        Averages({"ema": ema}, torch.device("cuda"))
