"""A trainer of one rank that knows nothing of ttp, with a real controller: what `ttp.protect` promises."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ttp
from ttp.checkpoint import find
from ttp.config import Settings
from ttp.errors import CheckpointMismatch, ConfigError

ON = Settings(enable=True)
OFF = Settings(enable=False)
EPOCHS = 3
BATCHES = 4


class Trainer:
    """Dropout, batch norm, a shuffling loader and a schedule, as in a trainer that was written without ttp."""

    def __init__(
        self, folder: Path, settings: Settings, base: Callable[..., Any], seed: int = 0, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)
        )
        self.optimizer = base(self.model.parameters())
        x = torch.randn(BATCHES * 5, 6, generator=torch.Generator().manual_seed(9))
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=5, shuffle=True)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6], gamma=0.5)
        torch.manual_seed(5)
        schedulers = [self.scheduler]
        self.guard = ttp.protect(
            self.model, self.optimizer, schedulers=schedulers, save_dirs=[folder], settings=settings, **options
        )

    def train(self, dies_at: int = -1, point: str = "backward") -> dict[int, tuple[float, float]]:
        """Return loss and learning rate of each step; raise at a point of the step `dies_at`."""
        reported: dict[int, tuple[float, float]] = {}
        for _ in self.guard.epochs(EPOCHS):
            for (x,) in self.guard.batches(self.loader):
                step = self.guard.step + 1
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                if step == dies_at and point == "backward":
                    raise ZeroDivisionError("the trainer's own mistake")
                rate = self.optimizer.param_groups[0]["lr"]
                self.optimizer.step()
                if step == dies_at and point == "tail":
                    raise ZeroDivisionError("the trainer's own mistake")
                self.scheduler.step()
                reported[step] = (loss.item(), rate)
        return reported

    def close(self) -> list[torch.Tensor]:
        self.guard.close()
        return [value.clone() for value in self.model.state_dict().values()]


BASES: dict[str, Callable[..., Any]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "plain": lambda params: torch.optim.SGD(params, lr=0.02),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("point", ["backward", "tail"])
def test_a_trainer_that_raises_goes_on_as_if_it_had_not(
    tmp_path: Path, base: str, point: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a step, and between the update and the scheduler's step; every rate, loss and weight is the same bits. It says
    where it goes on."""
    caplog.set_level(logging.INFO)
    whole = Trainer(tmp_path / "whole", OFF, BASES[base])
    reported = whole.train()
    weights = whole.close()
    faulted = Trainer(tmp_path / "faulted", ON, BASES[base])
    with pytest.raises(ZeroDivisionError):
        ttp.ttp_to_persist(faulted.train)(dies_at=6, point=point)
    faulted.close()
    again = Trainer(tmp_path / "faulted", OFF, BASES[base], seed=4)
    done = 6 if point == "tail" else 5
    assert again.guard.resumed is not None and again.guard.resumed.step == again.guard.step == done
    assert f"resumed from {again.guard.resumed.path} at step {done} (" in caplog.text + capfd.readouterr().err
    assert again.train() == {step: values for step, values in reported.items() if step > done}
    assert all(torch.equal(a, b) for a, b in zip(again.close(), weights, strict=True))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_trainer_that_is_entered_again_goes_on_as_if_it_had_not(
    tmp_path: Path, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients, batch norm's buffers, the schedule, random numbers and the place in the data go back to the newest step."""
    caplog.set_level(logging.INFO, "ttp")
    states = []
    for name, settings in (("whole", ON), ("rehearsed", Settings(enable=True, rehearse_every=every))):
        trainer = Trainer(tmp_path / name, settings, BASES["SGD"])
        ttp.ttp_to_persist(trainer.train)()
        states.append([*trainer.close(), torch.tensor(trainer.scheduler.get_last_lr())])
    assert all(map(torch.equal, *states))
    assert f"entered again {EPOCHS * BATCHES // every} times, with equal results" in caplog.text


def test_the_end_of_an_epoch_is_where_the_epoch_s_own_work_is_done_again(tmp_path: Path) -> None:
    """A checkpoint of an epoch's last step: no batch of it remains, and its end comes once more."""
    first = Trainer(tmp_path, OFF, BASES["AdamW"], save_interval=BATCHES)
    with pytest.raises(ZeroDivisionError):
        first.train(dies_at=BATCHES + 1)
    first.close()
    again = Trainer(tmp_path, OFF, BASES["AdamW"])
    left = [(epoch, len(list(again.guard.batches(again.loader)))) for epoch in again.guard.epochs(EPOCHS)]
    assert left == [(0, 0), (1, BATCHES), (2, BATCHES)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_loads_the_checkpoint(tmp_path: Path) -> None:
    """`dcp.load` into `get_state_dict` of a fresh model and optimizer gives weights, buffers and moments; so does ttp's reader."""
    trainer = Trainer(tmp_path, OFF, BASES["AdamW"])
    trainer.train()
    path = trainer.guard.save()
    other = torch.nn.Sequential(
        *(type(m)(*a) for m, a in zip(trainer.model, [(6, 8), (8,), (0.2,), (8, 2)], strict=True))
    )
    optimizer = torch.optim.AdamW(other.parameters(), lr=1.0)
    model_state, optim_state = get_state_dict(other, optimizer)
    dcp.load(  # type: ignore[attr-defined]
        {"model": model_state, "optim": optim_state}, checkpoint_id=path, no_dist=True
    )
    set_state_dict(other, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for mine, theirs in zip(trainer.model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(trainer.optimizer.state[mine][key], optimizer.state[theirs][key])
    whole = ttp.open_checkpoint(path)
    assert torch.equal(whole.weights(["0.weight"])["0.weight"], trainer.model.get_parameter("0.weight"))


def test_ttp_clips_as_torch_does(tmp_path: Path) -> None:
    """In norm mode the trainer's own clipping is left out, and the updates are those of `clip_grad_norm_`."""

    def train(limit: float | None, folder: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clip = None if limit is None else ttp.ClipNorm(limit)
        guard = ttp.protect(model, optimizer, clip=clip, save_dirs=[tmp_path / folder], settings=OFF)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 4), step + 1.0)).square().sum().backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if limit is None else 1e9))
            optimizer.step()
            assert limit is None or guard.grad_norm == pytest.approx(norm, rel=1e-5)
        guard.close()
        return [param.detach().clone() for param in model.parameters()]

    for own, ours in zip(train(None, "own"), train(0.5, "ours"), strict=True):
        torch.testing.assert_close(own, ours)


def test_a_gradient_that_is_not_finite_is_skipped_in_norm_mode(tmp_path: Path) -> None:
    """The step counts, the weights stay."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = ttp.protect(model, optimizer, clip=ttp.ClipNorm(1.0), save_dirs=[tmp_path], settings=OFF)
    before = model.weight.detach().clone()
    (model(torch.ones(1, 2)).sum() * float("inf")).backward()
    optimizer.step()
    assert guard.step == 1 and guard.grad_norm == float("inf") and torch.equal(model.weight, before)


class DeepSpeedOptimizer:
    """As the base of all that DeepSpeed wraps around an optimizer: no torch.optim.Optimizer."""


class DeepSpeedZeroOptimizer(DeepSpeedOptimizer):
    """As ZeRO-1's and ZeRO-2's."""


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot be protected"),
        (lambda model: torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1), "is not the model's"),
        (lambda model: "Adam", "expected a torch.optim.Optimizer"),
        (
            lambda model: DeepSpeedZeroOptimizer(),
            "DeepSpeedZeroOptimizer of DeepSpeed communicates within its step .* use ttp.TTPReplica",
        ),
    ],
)
def test_what_cannot_be_protected_is_refused_at_the_start(
    tmp_path: Path, optimizer: Callable[[torch.nn.Module], Any], words: str
) -> None:
    """With the reason, before anything is started."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=words):
        ttp.protect(model, optimizer(model), save_dirs=[tmp_path], settings=OFF)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"clip": 1.0}, r"clip: got 1\.0, expected ttp\.ClipNorm"),
        ({"schedulers": torch.optim.lr_scheduler.StepLR}, "expected a list of schedulers"),
        ({"save_dirs": []}, "save_dirs is empty"),
        ({"save_dirs": 5}, "invalid save_dirs: got 5, expected a list of paths, or one path"),
        ({"save_dirs": ["a\0b"]}, r"invalid save_dirs: got \['a.x00b'\], expected a list of paths"),
        ({"state": [5]}, r"invalid state: got \[5\], expected a mapping of names to objects"),
        ({"averages": "ema"}, "invalid averages: got 'ema', expected a mapping of names to objects"),
        ({"save_interval": -1}, "save_interval: got -1, expected a number of steps, or 0 for never"),
        ({"save_interval": None}, "save_interval: got None, expected a number of steps"),
        ({"save_interval": 2.5}, r"save_interval: got 2\.5, expected a number of steps"),
        ({"compare_every": "100"}, "compare_every: got '100', expected a number of steps"),
        ({"compare_every": float("inf")}, "compare_every: got inf, expected a number of steps"),
    ],
)
def test_arguments_of_another_kind_are_refused(tmp_path: Path, named: dict[str, Any], words: str) -> None:
    """A number where a clipping is meant, one scheduler where a list is."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    if "schedulers" in named:
        named = {"schedulers": named["schedulers"](optimizer, 3)}
    with pytest.raises(ConfigError, match=words):
        ttp.protect(model, optimizer, **{"save_dirs": [tmp_path], "settings": OFF, **named})


@pytest.mark.parametrize("number", [np.int64(2), 2.0])
def test_a_integers_is_one_whoever_made_it(tmp_path: Path, number: Any) -> None:
    """A file of settings has 1e3 for a thousand."""
    trainer = Trainer(tmp_path, OFF, BASES["plain"], save_interval=number)
    trainer.train()
    trainer.close()
    last = EPOCHS * BATCHES
    assert [path.name for path in find.list_checkpoints([tmp_path])][:1] == [f"iter_{last:07d}"]


def test_one_directory_is_a_list_of_one(tmp_path: Path) -> None:
    """A text is a sequence too: of letters, and `/` is one of them."""
    model = torch.nn.Linear(2, 2)
    guard = ttp.protect(model, torch.optim.SGD(model.parameters(), lr=1), save_dirs=str(tmp_path), settings=OFF)
    assert guard.session.save_dirs == (str(tmp_path.resolve()),)


def test_an_epoch_that_is_gone_on_with_numbers_its_batches_from_its_begin(tmp_path: Path) -> None:
    """So gradient accumulation, which counts them, steps behind the same batches as a baseline run."""
    first = Trainer(tmp_path, OFF, BASES["AdamW"])
    with pytest.raises(ZeroDivisionError):
        first.train(dies_at=3)
    first.guard.save()
    done = first.guard.step
    first.close()
    again = Trainer(tmp_path, OFF, BASES["AdamW"])
    numbers = [index for index, _ in again.guard.enumerate(again.loader)]
    assert 0 < done < BATCHES and numbers == list(range(done, BATCHES))


class Sharpness(torch.optim.SGD):
    """A third party's step, which may call its closure when and as often as it likes."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override, unused-ignore]
        return super().step(closure)


def test_the_closure_of_a_foreign_optimizer_is_refused(tmp_path: Path) -> None:
    """Its backward pass may run within the update."""
    model = torch.nn.Linear(2, 2)
    optimizer = Sharpness(model.parameters(), lr=0.1)
    ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF)
    with pytest.raises(ConfigError, match=r"Sharpness.step: got a closure"):
        optimizer.step(lambda: model(torch.ones(1, 2)).sum())


def test_a_scheduler_that_follows_evaluations_is_state(tmp_path: Path) -> None:
    """Among those that follow every update it is refused; as state it comes back as it was."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    with pytest.raises(ConfigError, match="give it as state"):
        ttp.protect(model, optimizer, schedulers=[plateau], save_dirs=[tmp_path], settings=OFF)
    plateau.step(1.0)
    guard = ttp.protect(model, optimizer, state={"plateau": plateau}, save_dirs=[tmp_path], settings=OFF)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    guard.save()
    guard.close()
    plateau.load_state_dict({**plateau.state_dict(), "best": 7.0})
    ttp.protect(model, optimizer, state={"plateau": plateau}, save_dirs=[tmp_path], settings=OFF)
    assert plateau.best == 1.0


class Counted:
    """A stateful object with what JSON has no words for."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {"pair": (1, 2), "by": {1: "a"}, "state": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict


def test_other_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Tuples, keys that are numbers and small tensors included; a run with other objects is refused."""
    model = torch.nn.Linear(2, 2)

    def protect(state: dict[str, Any]) -> tuple[torch.optim.SGD, ttp.Guard]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return optimizer, ttp.protect(model, optimizer, state=state, save_dirs=[tmp_path], settings=OFF)

    optimizer, guard = protect({"counted": Counted()})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manifest = Path(guard.save()) / "manifest.json"
    assert json.loads(manifest.read_text())["state"]["trainer"]["position"] == {
        "epoch": 0,
        "batch": 0,
        "ranks": 0,
        "samples": 0,
        "length": 0,
    }
    guard.close()
    fresh = Counted()
    fresh.value = {}
    protect({"counted": fresh})[1].close()
    assert fresh.value["pair"] == (1, 2) and fresh.value["by"] == {1: "a"}
    assert torch.equal(fresh.value["state"], torch.arange(3))
    with pytest.raises(CheckpointMismatch, match="the objects of the run that wrote it"):
        protect({"another": Counted()})


def test_protect_before_the_process_group_is_refused_at_once_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is hung on the optimizer before: the refusal comes first."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"ttp.protect was called without a process group: got WORLD_SIZE=4"):
        ttp.protect(model, optimizer, save_dirs=[tmp_path / "a"], settings=OFF)
    assert not optimizer._optimizer_step_pre_hooks and not (tmp_path / "a").exists()
