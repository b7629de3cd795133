"""What stands around the steps: batches, a start that fails, recomputed passes, compiled models, the Trainer's callback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ttp
from ttp.adopt import protect, transformers_callback
from ttp.adopt.trainer_state.host_objects import from_json, to_json
from ttp.adopt.trainer_state.position import DataPosition
from ttp.adopt.trainer_state.seen import SeenBatches
from ttp.adopt.transformers_callback import TTPCallback
from ttp.checkpoint import find
from ttp.checkpoint.format.manifest import read_manifest
from ttp.config import Settings
from ttp.errors import CheckpointError, ConfigError
from ttp.proto.messages import Cause, CauseKind
from ttp.session import Session, find_session

OFF = Settings(enable=False)


class Unwatched:
    """Fetches that nothing surrounds."""

    def begin(self, loader: object, epoch: int, done: int, *, refetch: bool | None) -> int:
        return 0

    def before_fetch(self, epoch: int, index: int) -> None:
        pass

    def fetched(self, epoch: int, index: int, batch: object) -> None:
        pass


def test_batches_of_an_epoch_that_is_over_are_refused() -> None:
    """A loop over range(epochs) would get no batch from its second epoch on, and say nothing."""
    position = DataPosition(Unwatched(), SeenBatches(0, 1, "error"))
    assert list(position.batches([1, 2])) == [(0, 1), (1, 2)]
    with pytest.raises(ConfigError, match=r"again after the end of epoch 0, expected once in each epoch"):
        list(position.batches([1, 2]))


def test_batches_that_a_loop_left_go_on_where_it_left_them() -> None:
    """A break is not an end; the next epoch begins anew, and so does one after a load."""
    position = DataPosition(Unwatched(), SeenBatches(0, 1, "error"))
    reported = []
    for epoch in position.epochs(2):
        for _, batch in position.batches("abc"):
            reported.append((epoch, batch))
            if batch == "b":
                break
        reported += [(epoch, batch) for _, batch in position.batches("abc")]
    assert reported == [(epoch, batch) for epoch in (0, 1) for batch in "abc"]
    position.load_state_dict({"epoch": 1, "batch": 2})
    assert list(position.batches("abc")) == [(2, "c")], "its number in the epoch, not in what is left of it"


def test_what_reads_ahead_goes_within() -> None:
    """What was handed out counts: around the guard's batches a prefetcher would have a restart leave one out."""

    def prefetched(batches: Iterable[str]) -> Iterator[str]:
        kept = None
        for batch in batches:
            if kept is not None:
                yield kept
            kept = batch
        if kept is not None:
            yield kept

    within, around = (
        DataPosition(Unwatched(), SeenBatches(0, 1, "error")),
        DataPosition(Unwatched(), SeenBatches(0, 1, "error")),
    )
    assert next(within.batches(prefetched("abc"))) == (0, "a") and within.batch == 1
    assert next(prefetched(batch for _, batch in around.batches("abc"))) == "a" and around.batch == 2


@pytest.mark.parametrize(
    ("world_size", "finds_unused", "reported"), [(3, False, True), (3, True, False), (2, False, False)]
)
def test_ddp_that_rounds_a_restarts_first_step_otherwise_is_known(
    world_size: int, finds_unused: bool, reported: bool
) -> None:
    """Two ranks have one order to add up in, and buckets that are never formed anew keep theirs."""
    model = mock.MagicMock(spec=torch.nn.parallel.DistributedDataParallel)
    model.find_unused_parameters = finds_unused
    assert protect._rounds_anew(model, world_size) is reported
    assert not protect._rounds_anew(torch.nn.Linear(2, 2), world_size)


def test_a_start_that_fails_leaves_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither threads nor a controller go on for a trainer that is not protected, and the next `ttp.start` is not refused."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fails(session: Session, choice: str, **checks: object) -> None:
        raise CheckpointError("got no checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "resume", fails)
        with pytest.raises(CheckpointError, match="no checkpoint"):
            ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF)
    assert find_session() is None and not optimizer._optimizer_step_pre_hooks
    ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF).close()


def test_a_step_that_is_given_up_leaves_the_modules_as_the_step_before_did(tmp_path: Path) -> None:
    """One that was frozen late stays so; nothing remains of an evaluation, nor of what the step given up has set."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF)
    guard.session.regrouping.rehearses = True

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    model(torch.ones(1, 2))
    model.eval()
    guard._step_back()
    assert [each.training for each in model.modules()] == [True, True, True], "before the first step"
    step()
    model[1].eval()
    step()
    model.train()
    model(torch.ones(1, 2))
    model.eval()
    guard._step_back()
    assert [each.training for each in model.modules()] == [True, True, False]
    assert guard.step == 2
    model.train()
    guard._take(3)  # ready, and given up before its update
    model.eval()
    guard._step_back()
    assert [each.training for each in model.modules()] == [True, True, False]
    guard.close()


def test_a_disk_that_refuses_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank learns of it, in the same step; the next interval tries again."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF, save_interval=2)

    def full(session: Session, step: int | None = None, **asked: bool) -> str:
        raise CheckpointError("step 2: no directory took the periodic checkpoint")

    said: list[str] = []
    monkeypatch.setattr(protect, "show", lambda level, line: said.append(line))
    with monkeypatch.context() as patch:
        patch.setattr(Session, "save", full)
        for _ in range(2):
            optimizer.step()
    assert said == ["step 2: no directory took the periodic checkpoint; training continues without this checkpoint"]
    for _ in range(2):
        optimizer.step()
    assert guard.step == 4 and [path.name for path in find.list_checkpoints([tmp_path])] == ["iter_0000004"]


def test_a_pass_that_is_computed_again_in_backward_draws_the_same_noise(tmp_path: Path) -> None:
    """Activation checkpointing of the whole model: other noise than in the pass would make wrong gradients."""

    def gradient(again: bool, folder: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = ttp.protect(model, optimizer, save_dirs=[tmp_path / folder], settings=OFF)
        x = torch.ones(3, 4)
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.square().sum().backward()
        guard.close()
        grad = model[0].weight.grad
        assert isinstance(grad, torch.Tensor)
        return grad

    assert torch.equal(gradient(True, "again"), gradient(False, "once"))


@pytest.mark.parametrize("how", ["the model is compiled", "a wrapper of it is called"])
def test_a_compiled_model_is_compiled_once(tmp_path: Path, how: str) -> None:
    """Hooks that were traced would be compiled anew in every step, until torch gives up."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called = model
    if how == "the model is compiled":
        model.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)  # type: ignore[assignment]
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF)
    passes: list[int] = []
    begin_pass = guard._adopted.begin_pass
    guard._adopted.begin_pass = lambda: passes.append(guard.step) or begin_pass()  # type: ignore
    for _ in range(4):
        called(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert (passes, len(graphs)) == ([0, 1, 2, 3], 1)


def test_an_empty_tensor_comes_back() -> None:
    """With its shape and type."""
    value = from_json(to_json(torch.zeros(0, 3, dtype=torch.int64), "state"))
    assert value.shape == (0, 3) and value.dtype is torch.int64


class Ranks:
    """Stands for torch.distributed: this process is one of two ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return self._rank


def test_a_checkpoint_records_who_requested_it(tmp_path: Path) -> None:
    """The interval that was given, or the trainer by its own call."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ttp.protect(model, optimizer, save_dirs=[tmp_path], settings=OFF, save_interval=2)
    for _ in range(3):
        optimizer.step()
    guard.save()
    guard.close()
    causes = {path.name: read_manifest(path).cause for path in find.list_checkpoints([tmp_path])}
    assert causes == {
        "iter_0000002": Cause(CauseKind.PERIODIC, (), "periodic checkpoint of step 2"),
        "iter_0000003": Cause(CauseKind.REQUESTED, (), "requested checkpoint of step 3"),
    }


def test_all_ranks_raise_where_rank_0_cannot_make_the_trainer_s_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for what rank 0 broadcasts: it is the refusal then."""
    model = torch.nn.Linear(2, 2)
    guard = ttp.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), save_dirs=[tmp_path], settings=OFF)
    guard.save()
    guard.close()
    sent: list[Any] = []

    def broadcast(value: Any, device: torch.device) -> Any:
        sent.append(value)
        return sent[0]

    monkeypatch.setattr(transformers_callback, "broadcast_json", broadcast)
    trainer = SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path / "trainer")))
    raised = []
    for rank in (0, 1):
        monkeypatch.setattr(transformers_callback, "dist", Ranks(rank))
        with pytest.raises(CheckpointError, match=r"was not written by a transformers\.Trainer") as error:
            TTPCallback(save_dirs=[tmp_path]).checkpoint(trainer)
        raised.append(str(error.value))
    assert len(sent) == 2 and raised[0] == raised[1]
