"""A loss or a gradient that is not finite: noticed from what a step computes anyway, and a saved state is marked."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from ttp.adopt.numbers import PassNumbers
from ttp.checkpoint.format.manifest import read_manifest
from ttp.checkpoint.write import is_finite
from ttp.config import Settings
from ttp.errors import ConfigError, NonFinite

OFF = Settings(enable=False)


class Loss(torch.nn.Module):
    """A model that returns its output, its loss, or both."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.returns = returns

    def forward(self, x: torch.Tensor) -> Any:
        output = self.layer(x)
        loss = output.square().mean()
        return {"output": output, "loss": loss, "both": {"loss": loss, "logits": output}}[self.returns]


def train(folder: Path, returns: str, bad_at: int, **options: Any) -> tuple[Loss, ttp.Guard, list[int]]:
    """Do three steps, the input of one with a NaN; return the steps that changed the weights."""
    torch.manual_seed(0)
    model = Loss(returns)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ttp.protect(model, optimizer, save_dirs=[folder], settings=OFF, **options)
    changed = []
    for step in range(guard.step + 1, 4):
        x = torch.full((2, 3), float(step))
        if step == bad_at:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        before = model.layer.bias.detach().clone()
        output = model(x)
        loss = output["loss"] if isinstance(output, dict) else output
        (loss if loss.numel() == 1 else loss.square().mean()).backward()
        optimizer.step()
        if not torch.equal(before, model.layer.bias):
            changed.append(step)
    return model, guard, changed


@pytest.mark.parametrize("returns", ["output", "loss", "both"])
def test_the_first_step_that_is_not_finite_is_warned_of_with_rank_and_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, returns: str
) -> None:
    """Once, though all that follow are not finite either; and the saved state says so."""
    caplog.set_level(logging.WARNING, "ttp")
    _, guard, changed = train(tmp_path, returns, bad_at=2)
    said = [record.message for record in caplog.records if "finite" in record.message]
    assert len(said) == 1 and said[0].startswith("step 2: the ") and "rank 0" in said[0], said
    assert "training continues with it (on_nonfinite='warn')" in said[0]
    assert changed == [1, 2, 3]
    assert read_manifest(Path(guard.save())).finite is False
    guard.close()


@pytest.mark.parametrize("clip", [None, ttp.ClipNorm(1.0)])
@pytest.mark.parametrize("returns", ["output", "loss"])
def test_a_step_that_is_not_finite_is_skipped(tmp_path: Path, returns: str, clip: ttp.ClipNorm | None) -> None:
    _, guard, changed = train(tmp_path, returns, bad_at=2, on_nonfinite="skip", clip=clip)
    assert changed == [1, 3] and guard.step == 3
    assert read_manifest(Path(guard.save())).finite is True
    guard.close()


@pytest.mark.parametrize("returns", ["output", "loss"])
def test_training_is_stopped_before_an_update_that_is_not_finite(tmp_path: Path, returns: str) -> None:
    with pytest.raises(NonFinite, match=r"step 2: the .* rank 0.*: expected finite numbers"):
        train(tmp_path, returns, bad_at=2, on_nonfinite="stop")
    ttp.current_session().close()


def test_a_finite_run_is_neither_warned_of_nor_marked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, guard, changed = train(tmp_path, "both", bad_at=0)
    assert changed == [1, 2, 3] and "finite" not in caplog.text
    assert read_manifest(Path(guard.save())).finite is True
    guard.close()


def test_another_choice_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="invalid on_nonfinite: got 'ignore', expected 'warn', 'skip' or 'stop'"):
        train(tmp_path, "loss", bad_at=0, on_nonfinite="ignore")


def test_numbers_of_passes_whose_step_was_left_out_are_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As GradScaler does with an overflow: the next pass begins with cleared gradients."""
    model = Loss("output")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF, on_nonfinite="stop")
    for value in (math.inf, 1.0):
        optimizer.zero_grad()
        model(torch.full((2, 3), value)).square().mean().backward()
    optimizer.step()
    assert guard.step == 1
    guard.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64])
def test_a_state_is_not_finite_with_nan_or_infinity(dtype: torch.dtype) -> None:
    """-inf alone beside others is what a mask holds."""
    whole = torch.tensor([1.0, -2.0]).to(dtype)
    assert is_finite(whole) and is_finite(torch.tensor([], dtype=dtype)) and is_finite(torch.tensor([7]))
    assert not is_finite(torch.tensor([1.0, math.nan]).to(dtype))
    if dtype is not torch.float8_e4m3fn:  # it has no infinity
        assert not is_finite(torch.tensor([1.0, math.inf]).to(dtype))
        assert is_finite(torch.tensor([0.0, -math.inf]).to(dtype))


def test_a_rank_names_what_it_knows() -> None:
    numbers = PassNumbers()
    assert float(numbers.zero_or_nan(torch.device("cpu"))) == 0.0 and "another rank" in numbers.where(3)
    numbers.look_at({"loss": torch.tensor(math.inf)})
    assert math.isnan(float(numbers.zero_or_nan(torch.device("cpu")))) and "loss of rank 3" in numbers.where(3)
    numbers.forget()
    assert numbers.are_finite()


class TwoOutputs(torch.autograd.Function):
    """Gives none for an output that is not used, as DDP's own function with find_unused_parameters does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return value * 2, value * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> Any:
        return None if first is None else first * 2


def test_an_output_that_the_loss_does_not_use_has_no_gradient() -> None:
    """The loss is computed within the model as a rule, and the logits are returned beside it."""
    numbers = PassNumbers()
    value = torch.ones(3, requires_grad=True)
    used, unused = TwoOutputs.apply(value)  # type: ignore[no-untyped-call]
    numbers.look_at((used, unused))
    used.sum().backward()
    assert value.grad is not None and numbers.are_finite()
