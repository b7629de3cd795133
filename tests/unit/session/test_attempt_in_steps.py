"""Each step's collective carries the attempt's number: a result of another attempt's commits nothing (see tests/unit/optim/test_participation.py)."""

from __future__ import annotations

from pathlib import Path

import torch

import ttp
from ttp.config import Settings
from ttp.optim.step_agreement.participation import attempt_number


def test_each_attempt_of_a_job_has_a_name_of_its_own() -> None:
    launched = {"TTP_LAUNCHED": "1", "TORCHELASTIC_RUN_ID": "job"}
    names = [Settings.from_env({**launched, "TTP_ATTEMPT": str(number)}).start_name for number in range(3)]
    assert names == ["job/0", "job/1", "job/2"] and len({*map(attempt_number, names)}) == 3


def test_steps_of_the_replica_optimizer_carry_the_attempts_number(tmp_path: Path) -> None:
    settings, model = Settings(enable=True, job_id="job of this test"), torch.nn.Linear(8, 4)
    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), replicas=1, lr=0.05)
    session = ttp.start(optimizer, save_dirs=[tmp_path], settings=settings)
    assert optimizer.spanning.attempt == attempt_number(settings.start_name) != 0
    session.close()


def test_steps_of_a_protected_trainer_carry_the_attempts_number(tmp_path: Path) -> None:
    settings, model = Settings(enable=True, job_id="job of this test"), torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=settings)
    assert guard._adopted._spanning.attempt == attempt_number(settings.start_name) != 0
    guard.close()
