"""A checkpoint whose trainer state cannot be used counts as broken: the next older one is taken."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ttp
from tests.unit.checkpoint.test_manifest import resealed
from tests.unit.session.test_session import OFF, do_steps, new_run
from ttp.adopt.optimizer import AdoptedOptimizer
from ttp.adopt.protect import _check_state as check_guard_state
from ttp.config import Settings
from ttp.errors import CorruptCheckpoint
from ttp.inputs import checked
from ttp.optim.base_state import check_host_state
from ttp.trainer.train import check_state


def check(state: Mapping[str, Any]) -> None:
    checked.integer(state["position"], "position")


@pytest.mark.parametrize(
    "settings", [OFF, Settings(enable=False, shared_dirs=False, host="node-x")], ids=["shared", "own"]
)
def test_the_next_older_checkpoint_is_taken(
    tmp_path: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Directories of all, or of the node; a path that is named is refused."""
    model, optimizer, session = new_run(tmp_path, settings)
    do_steps(model, optimizer, session, 4)
    session.save()
    do_steps(model, optimizer, session, 6)
    newest = Path(session.save())
    session.close()
    body = json.loads((newest / "manifest.json").read_text())
    body["state"]["trainer"]["position"] = -12
    (newest / "manifest.json").write_bytes(resealed(body))
    with pytest.raises(
        CorruptCheckpoint, match=r"manifest\.json: state\.trainer\.position: got -12, expected an integer >= 0"
    ):
        new_run(tmp_path, dataclasses.replace(settings), seed=1)[2].resume(str(newest), check=check)


@pytest.mark.parametrize(
    "settings", [OFF, Settings(enable=False, shared_dirs=False, host="node-x")], ids=["shared", "own"]
)
def test_an_automatic_resume_goes_on_with_the_older_one(tmp_path: Path, settings: Settings) -> None:
    """And says why."""
    model, optimizer, session = new_run(tmp_path, settings)
    do_steps(model, optimizer, session, 4)
    session.save()
    do_steps(model, optimizer, session, 6)
    newest = Path(session.save())
    session.close()
    body = json.loads((newest / "manifest.json").read_text())
    body["state"]["trainer"]["position"] = True
    (newest / "manifest.json").write_bytes(resealed(body))
    point = new_run(tmp_path, settings, seed=1)[2].resume(check=check)
    assert point is not None and point.step == 4 and "state.trainer.position: got True" in point.skipped[0]


def scaled_run(folder: Path, seed: int = 0) -> tuple[torch.nn.Module, ttp.TTPReplicaOptimizer, ttp.Session]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(
        model.named_parameters(), replicas=1, lr=0.05, loss_scale=ttp.LossScale(initial=4.0)
    )
    return model, optimizer, ttp.start(optimizer, save_dirs=[folder], settings=OFF)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_scale": None}, "loss_scale: got None, expected a mapping"),
        ({"loss_scale": ...}, "loss_scale: is missing, expected a value"),
        (
            {"loss_scale": {"scale": 0.0, "good_steps": 0}},
            "loss_scale.scale: got 0.0, expected a finite number above 0",
        ),
        ({"lr": None}, "param_groups[0].lr: got None, expected a number"),
        ({"lr": [0.1]}, "param_groups[0].lr: got [0.1], expected a number"),
        ({"lr": True}, "param_groups[0].lr: got True, expected a number"),
        ({"betas": [0.9]}, "param_groups[0].betas: got [0.9], expected a list of length 2"),
        ({"betas": [0.9, None]}, "param_groups[0].betas[1]: got None, expected a number"),
        ({"betas": 0.9}, "param_groups[0].betas: got 0.9, expected a list"),
        ({"amsgrad": 0.5}, "param_groups[0].amsgrad: got 0.5, expected true or false"),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_an_optimizers_state_that_cannot_be_loaded_is_passed_over_before_anything_is_overwritten(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """For the older one, from which training continues; one that is named is refused, and the weights stay."""
    model, optimizer, session = scaled_run(tmp_path)
    do_steps(model, optimizer, session, 2)
    session.save()
    do_steps(model, optimizer, session, 3)
    newest = Path(session.save())
    session.close()
    body = json.loads((newest / "manifest.json").read_text())
    state = body["state"]["optimizer"]
    for key, value in change.items():
        place = state if key in state else state["param_groups"][0]
        place[key] = value
        if value is ...:
            del place[key]
    (newest / "manifest.json").write_bytes(resealed(body))
    model, optimizer, session = scaled_run(tmp_path, seed=1)
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(CorruptCheckpoint) as caught:
        session.resume(str(newest))
    assert f"manifest.json: state.optimizer.{message}" in str(caught.value)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
    point = session.resume()
    assert point is not None and point.step == 2 and f"state.optimizer.{message}" in point.skipped[0]
    do_steps(model, optimizer, session, 3)
    session.close()


def test_the_settings_of_a_trainers_own_optimizer_are_judged_by_their_kind() -> None:
    """One that is a tensor takes what that can hold; what this run does not set yet, or has as None, may be anything."""
    model = torch.nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    group: dict[str, Any] = {
        "params": model.parameters(),
        "name": "all",
        "span": None,
        "history": [],
        "about": {"a": 1},
    }
    adopted = AdoptedOptimizer(model, torch.optim.AdamW([group], lr=rate))
    good = {"lr": 1, "betas": [0, 0.9], "span": "x", "history": [1, 2], "new": [None], "foreach": 3, "about": {}}
    adopted.check_host_state({"param_groups": [good]})
    adopted.check_host_state(json.loads(json.dumps(adopted.host_state())))
    assert rate == torch.tensor(0.1)
    bad: list[tuple[str, Any, str]] = [
        ("lr", [0.5], "lr: got [0.5], expected a number"),
        ("lr", 1e300, "lr: got 1e+300, expected a number that a tensor of torch.float32 can hold"),
        ("lr", 2**63, f"lr: got {2**63}, expected a number"),
        ("initial_lr", None, "initial_lr: got None, expected a number"),
        ("name", 3, "name: got 3, expected a string"),
        ("about", [], "about: got [], expected a mapping"),
    ]
    for key, value, message in bad:
        with pytest.raises(ValueError) as caught:
            adopted.check_host_state({"param_groups": [{**good, key: value}]})
        assert str(caught.value).startswith(f"param_groups[0].{message}")
    with pytest.raises(ValueError, match=r"k: got nan, expected a number that a tensor of torch.int64 can hold"):
        check_host_state([{"k": torch.tensor(3)}], {"param_groups": [{"k": float("nan")}]})


GOOD = {"consumed_samples": 8, "epoch": 0, "loss_divisor": 1, "order": {}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"consumed_samples": -3}, "consumed_samples: got -3, expected an integer >= 0"),
        ({"consumed_samples": "8"}, "consumed_samples: got '8', expected an integer >= 0"),
        ({"epoch": 1.5}, "epoch: got 1.5, expected an integer >= 0"),
        ({"loss_divisor": 0}, "loss_divisor: got 0, expected an integer >= 1"),
        ({"order": [1]}, "order: got \\[1\\], expected a mapping"),
    ],
)
def test_the_bundled_trainers_state_is_judged(change: dict[str, Any], message: str) -> None:
    """A key that is missing is another trainer's checkpoint, which is another error."""
    check_state(GOOD)
    check_state({})
    with pytest.raises(ValueError, match=f"^{message}"):
        check_state({**GOOD, **change})


GUARDED = {"schedulers": [], "state": {}, "position": {"epoch": 0, "batch": 3}, "seed": 2**64 - 1}


SEEN = {"rank": 0, "world_size": 2, "first": "", "batches": [[0, 1, "ab"]], "passes": [[3, "cd", [0.5]]]}
WATCHED = {
    **GUARDED,
    "schedulers": [{}],
    "ticks": [2],
    "seen": SEEN,
    "loaders": [],
    "fed": True,
    "passes": 1,
    "all_passes": 3,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ticks": [10**18]}, r"ticks\[0\]: got 10+, expected an integer from 0 to 1000000"),
        ({"ticks": []}, r"ticks: got \[\], expected one value for each scheduler"),
        ({"loaders": [{"epoch": 0, "batch": 1}]}, r"loaders\[0\]\.states: is missing, expected a value"),
        (
            {"loaders": [{"epoch": 0, "batch": 1, "states": [{"__ttp__": "tensor"}]}]},
            r"loaders\[0\]\.states\[0\]: cannot be read: KeyError",
        ),
        ({"fed": 1}, "fed: got 1, expected true or false"),
        ({"passes": -1}, "passes: got -1, expected an integer >= 0"),
        ({"seen": {**SEEN, "rank": None}}, r"seen\.rank: got None, expected an integer >= 0"),
        ({"seen": {**SEEN, "batches": [[0, 1]]}}, r"seen\.batches\[0\]: got \[0, 1\], expected a list of three values"),
        ({"seen": {**SEEN, "passes": [[3, 4, []]]}}, r"seen\.passes\[0\]: got 4, expected a string"),
        (
            {"seen": {**SEEN, "passes": [[3, "", ["x"]]]}},
            r"seen\.passes\[0\]: got \['x'\], expected a list of learning rates",
        ),
    ],
)
def test_the_guards_record_of_its_data_is_judged(change: dict[str, Any], message: str) -> None:
    """An older checkpoint has none."""
    check_guard_state(WATCHED)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_guard_state({**WATCHED, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": 3}, "position: got 3, expected a mapping"),
        ({"position": {"epoch": 0}}, r"position\.batch: is missing, expected a value"),
        ({"position": {"epoch": 0, "batch": -1}}, r"position\.batch: got -1, expected an integer >= 0"),
        ({"seed": "7"}, "seed: got '7', expected an integer"),
        ({"schedulers": {}}, "schedulers: got {}, expected a list"),
        ({"schedulers": [{"__ttp__": "tensor", "dtype": "nothing"}]}, r"schedulers\[0\]: cannot be read: "),
        ({"state": {"rng": {"__ttp__": "dict", "items": [[[], 1]]}}}, r"state\.rng: cannot be read: TypeError"),
    ],
)
def test_the_guards_state_is_judged(change: dict[str, Any], message: str) -> None:
    """What `ttp.protect` has saved."""
    check_guard_state(GUARDED)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_guard_state({**GUARDED, **change})
