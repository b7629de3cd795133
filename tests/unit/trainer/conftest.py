"""A model and a run so small that a step takes a millisecond."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.unit.forkserver import fork_server
from ttp.trainer.config.loader import load_config
from ttp.trainer.config.schema import Config, ModelConfig

if TYPE_CHECKING:
    from tests.unit.trainer.layouts import Result, Training

DEADLINE_S = 240.0

SMALL: dict[str, Any] = {
    "model_config.num_layers": 2,
    "model_config.hidden_size": 32,
    "model_config.ffn_hidden_size": 64,
    "model_config.seq_length": 16,
    "dataset_config.batch_size": 2,
    "training_config.training_iters": 6,
    "training_config.device": "cpu",
}


@pytest.fixture
def small_keys() -> dict[str, Any]:
    """Return the keys that make gpt_tiny small."""
    return dict(SMALL)


MakeConfig = Callable[..., Config]


@pytest.fixture
def small_model() -> ModelConfig:
    """Return a small model's configuration."""
    return ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16)


@pytest.fixture
def small_config() -> MakeConfig:
    """Return a function that gives gpt_tiny, made small, with changed keys."""

    def make(changes: Mapping[str, Any] | None = None) -> Config:
        overrides = {**SMALL, **(changes or {})}
        return load_config(
            "gpt_tiny", [(key, "null" if value is None else str(value)) for key, value in overrides.items()]
        )

    return make


TrainAll = Callable[..., "dict[str, Result]"]


@pytest.fixture
def train_all(tmp_path: Path) -> TrainAll:
    """Return a function that does trainings (layouts.py) one after the other on one world of ranks, as many as the largest needs,
    and gives the results by name."""
    return lambda *trainings, deadline_s=DEADLINE_S: run_trainings(tmp_path, trainings, deadline_s)


def run_trainings(folder: Path, trainings: Sequence[Training], deadline_s: float = DEADLINE_S) -> dict[str, Result]:
    """Do the trainings in `folder`; every rank must end well."""
    from tests.unit.trainer import layouts

    context = fork_server()
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in trainings]
    ports = [store.port for store in stores]
    ranks = [
        context.Process(target=layouts.rank_main, args=(rank, ports, tuple(trainings), str(folder), deadline_s))
        for rank in range(max(training.axes.ranks for training in trainings))
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + deadline_s + 5  # stacks first
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if list(folder.glob("error_*")):
            break
        time.sleep(0.05)
    failed = bool(list(folder.glob("error_*")))
    late = [] if failed else [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error_*")))
    stacks = "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(folder.glob("stacks_*")))
    assert not late, f"ranks {late} still ran after {deadline_s:.0f} s\n{errors}\n{stacks}"
    assert not errors, errors
    assert len(list(folder.glob("done_*"))) == len(ranks), [process.exitcode for process in ranks]
    for path in folder.glob("done_*"):
        path.unlink()
    return {training.name: layouts.Result(folder / training.name) for training in trainings}
