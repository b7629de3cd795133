"""The file of Megatron's distributed optimizer: read when TTP is switched on, and written such that switching it off goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.mindio.test_native import assert_alike, build, protected, steps, through_a_file
from ttp.errors import CheckpointError, CheckpointMismatch
from ttp.mindio.job import current_job, forget_job
from ttp.mindio.state_files import param_state
from ttp.mindio.state_files.whole_state import WholeState

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


@pytest.fixture(autouse=True)
def forgets_every_job() -> Iterator[None]:
    yield
    forget_job()


def distributed_form(model: Any, adam: torch.optim.AdamW, padding: int) -> tuple[dict[str, Any], Any]:
    """Return what a distributed optimizer without TTP keeps of `adam`: its state_dict, and the file's content."""
    params = [dict(model.named_parameters())[name] for name in reversed(NAMES)]
    vectors = {"param": [p.detach() for p in params]}
    vectors |= {key: [adam.state[p][key] for p in params] for key in param_state.MOMENTS}
    flat = {
        key: torch.cat([*(v.float().reshape(-1) for v in values), torch.full((padding,), 7.0)])
        for key, values in vectors.items()
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in adam.param_groups]
    for group in groups:
        group["step"] = int(adam.state[params[0]]["step"])
    return {"optimizer": {"param_groups": groups}}, {0: {torch.float32: flat}}


def named(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return list(model.named_parameters())


@pytest.mark.parametrize("padding", [0, 3])
def test_ttp_is_switched_on_with_the_moments_of_a_distributed_optimizer(tmp_path: Path, padding: int) -> None:
    """Whatever its data-parallel size was: only the padding differs."""
    model, adam = build()
    steps(model, adam, range(1, 4))
    adam.param_groups[0]["lr"] = 0.025
    state, content = through_a_file(distributed_form(model, adam, padding))
    torch.save(content, tmp_path / "distrib_optim.pt")
    other, base = build()
    other.load_state_dict(model.state_dict())
    optimizer = protected(other, base)
    optimizer.load_state_dict(state)
    optimizer.load_parameter_state(str(tmp_path / "distrib_optim.pt"))
    optimizer.current_step = 3
    assert optimizer.param_groups[0]["lr"] == 0.025
    steps(model, adam, range(4, 7))
    steps(other, optimizer, range(4, 7))
    assert_alike(other, model)


def test_the_file_and_the_state_are_those_that_a_distributed_optimizer_writes(tmp_path: Path) -> None:
    """The last parameter first; the count of steps is in the param groups, as Apex keeps it."""
    model, adam = build()
    optimizer = protected(model, adam)
    steps(model, optimizer, range(1, 4))
    optimizer.save_parameter_state(str(tmp_path / "distrib_optim.pt"))
    other, plain = build()
    steps(other, plain, range(1, 4))
    _, expected = distributed_form(other, plain, 0)
    found = torch.load(tmp_path / "distrib_optim.pt", weights_only=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert [group["step"] for group in optimizer.state_dict()["optimizer"]["param_groups"]] == [3, 3]


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_the_vector_is_a_multiple_of_the_data_parallel_size(tmp_path: Path, ranks: int) -> None:
    model, adam = build()
    optimizer = protected(model, adam)
    steps(model, optimizer, range(1, 2))
    state = WholeState.from_dict(optimizer.state_dict())
    param_state.save(tmp_path / "file", state, [named(model)], ranks)
    size = torch.load(tmp_path / "file")[0][torch.float32]["param"].numel()
    assert size % ranks == 0 and 0 <= size - sum(p.numel() for p in model.parameters()) < ranks
    loaded = param_state.load(tmp_path / "file", [named(model)], dict.fromkeys(NAMES, 1))
    assert loaded.keys() == state.tensors.keys()
    assert all(torch.equal(tensor, state.tensors[key]) for key, tensor in loaded.items())


def test_chunks_and_gradient_types_have_a_vector_each(tmp_path: Path) -> None:
    first, adam = build()
    second, _ = build()
    second[1].to(torch.bfloat16)
    optimizer = protected(first, adam)
    steps(first, optimizer, range(1, 2))
    whole = WholeState.from_dict(optimizer.state_dict())
    param_state.save(tmp_path / "file", whole, [named(first), named(second)], 1)
    found = torch.load(tmp_path / "file")
    assert {number: list(buffers) for number, buffers in found.items()} == {
        0: [torch.float32],
        1: [torch.float32, torch.bfloat16],
    }
    loaded = param_state.load(tmp_path / "file", [named(first), named(second)], dict.fromkeys(NAMES, 1))
    assert all(torch.equal(tensor, whole.tensors[key]) for key, tensor in loaded.items())


def test_with_ttp_before_and_after_the_file_is_not_needed(tmp_path: Path) -> None:
    """`state_dict` has everything; a trainer that asks for the file as well changes nothing by it."""
    model, adam = build()
    optimizer = protected(model, adam)
    steps(model, optimizer, range(1, 3))
    state = through_a_file(optimizer.state_dict())
    other, base = build()
    resumed = protected(other, base)
    resumed.load_state_dict(state)
    resumed.load_parameter_state(str(tmp_path / "distrib_optim.pt"))
    assert resumed.current_step == 2


def test_a_checkpoint_is_a_pause_until_the_next_step_and_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the trainer wrote the file alone, and asks again a step later."""
    model, adam = build()
    optimizer = protected(model, adam)
    reported: list[str] = []
    for name in ("long_pause", "end_pause"):
        monkeypatch.setattr(current_job(), name, lambda name=name: reported.append(name))
    steps(model, optimizer, range(1, 2))
    reported.clear()
    optimizer.save_parameter_state(str(tmp_path / "distrib_optim.pt"))
    assert reported == ["long_pause"]
    steps(model, optimizer, range(2, 3))
    assert reported[:1] == ["long_pause"] and set(reported[1:]) == {"end_pause"}
    assert optimizer.need_write_file() and optimizer.state_dict()["step"] == 2


def test_a_state_without_its_file_starts_no_training(tmp_path: Path) -> None:
    model, adam = build()
    steps(model, adam, range(1, 3))
    state, _ = distributed_form(model, adam, 0)
    other, base = build()
    optimizer = protected(other, base)
    optimizer.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"optimizer\.load_parameter_state\(filename\)"):
        steps(other, optimizer, range(3, 4))
    optimizer.reload_model_params()
    steps(other, optimizer, range(3, 4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda content: {0: {torch.float32: {**content[0][torch.float32], "exp_avg": torch.zeros(9)}}},
            "got 9 elements as 'exp_avg'",
        ),
        (
            lambda content: {0: {torch.float32: {"param": content[0][torch.float32]["param"]}}},
            "got NoneType as 'exp_avg'",
        ),
        (
            lambda content: {0: {torch.float32: {k: torch.zeros(1 << 17) for k in content[0][torch.float32]}}},
            "got 131072 elements",
        ),
        (lambda content: {}, "got 0 buffers of model chunk 0, expected 1"),
        (lambda content: [1], "got 0 buffers of model chunk 0, expected 1"),
    ],
)
def test_another_models_file_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    model, adam = build()
    steps(model, adam, range(1, 3))
    state, content = distributed_form(model, adam, 0)
    torch.save(change(content), tmp_path / "file")
    other, base = build()
    optimizer = protected(other, base)
    optimizer.load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match=says):
        optimizer.load_parameter_state(str(tmp_path / "file"))


def test_param_groups_without_a_count_or_of_another_number_are_refused() -> None:
    """Without the count the moments' bias could not be corrected."""
    model, adam = build()
    steps(model, adam, range(1, 3))
    state, _ = distributed_form(model, adam, 0)
    groups = state["optimizer"]["param_groups"]
    optimizer = protected(*build())
    with pytest.raises(CheckpointMismatch, match="expected 2 with a 'step' each"):
        optimizer.load_state_dict({"optimizer": {"param_groups": groups[:1]}})
    without = [{key: value for key, value in group.items() if key != "step"} for group in groups]
    with pytest.raises(CheckpointMismatch, match="expected 2 with a 'step' each"):
        optimizer.load_state_dict({"optimizer": {"param_groups": without}})


def test_an_optimizer_without_moments_writes_no_such_file(tmp_path: Path) -> None:
    model, adam = build()
    optimizer = protected(model, torch.optim.SGD(adam.param_groups, lr=0.1))
    steps(model, optimizer, range(1, 2))
    with pytest.raises(CheckpointMismatch, match="expected Adam's moments"):
        optimizer.save_parameter_state(str(tmp_path / "file"))
