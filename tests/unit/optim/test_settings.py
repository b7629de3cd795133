"""The settings of param groups: what a checkpoint can carry is kept as plain values, all else is refused before the update."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ttp.checkpoint.format.manifest import check_json_value
from ttp.errors import ConfigError
from ttp.optim import base_state
from ttp.optim.replica_optimizer import TTPReplicaOptimizer


def make(**settings: Any) -> tuple[torch.nn.Linear, TTPReplicaOptimizer]:
    model = torch.nn.Linear(4, 4)
    groups = [{"params": list(model.named_parameters()), **settings}]
    return model, TTPReplicaOptimizer(groups, torch.optim.AdamW, replicas=1, lr=0.5)


def update(model: torch.nn.Linear, optimizer: TTPReplicaOptimizer) -> None:
    torch.autograd.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array(0.25), 0.25),
        (torch.tensor([0.25]), 0.25),
        ([np.float32(0.5), (np.bool_(True), "name")], [0.5, (True, "name")]),
    ],
)
def test_numbers_of_numpy_and_torch_are_plain_numbers_in_a_checkpoint(value: Any, plain: Any) -> None:
    """As a table of NumPy gives them; set at the beginning, or on the way."""
    model, optimizer = make(own=value)
    assert optimizer.host_state()["param_groups"][0]["own"] == plain
    optimizer.param_groups[0]["later"] = value
    update(model, optimizer)
    (saved,) = optimizer.host_state()["param_groups"]
    assert saved["own"] == saved["later"] == plain
    check_json_value(saved, "param_groups")


def test_a_weight_decay_of_numpy_updates_as_the_same_number_does() -> None:
    decay = np.linspace(0.04, 0.4, 10, dtype=np.float32)
    results = []
    for values in (decay, decay.tolist()):
        torch.manual_seed(0)
        model, optimizer = make()
        for step in range(3):
            optimizer.param_groups[0]["weight_decay"] = values[step]
            update(model, optimizer)
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("value", "got"), [({1, 2}, "a set"), (torch.float32, "a dtype"), (len, "a builtin"), ([{"x": b""}], "a bytes")]
)
def test_a_setting_that_no_checkpoint_can_carry_is_refused_before_the_update(value: Any, got: str) -> None:
    """Not at the fault, when nothing could be saved."""
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\.own.* is " + got):
        make(own=value)
    model, optimizer = make()
    optimizer.param_groups[0]["own"] = value
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\.own.* is .*Keep it outside the param groups"):
        update(model, optimizer)
    assert optimizer.current_step == 0


def test_most_settings_are_known_to_be_plain_at_once() -> None:
    """Each step looks at all of them, and there may be a param group for each parameter."""
    group = {"lr": 0.5, "amsgrad": False, "foreach": None, "name": "rows", "count": 3, "betas": (0.9, 0.95)}
    with mock.patch.object(base_state, "check_json_value") as checked:
        assert base_state.settings_of([group]) == [group]
    assert [call.args for call in checked.call_args_list] == [((0.9, 0.95), "param_groups[0].betas")]
