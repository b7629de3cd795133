"""What is asked of a trainer's handlers when they are registered, and what their answers mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ttp import mindio
from ttp.errors import CheckpointError, ConfigError
from ttp.mindio.job import current_job, forget_job
from ttp.mindio.modellink import TTPReplicaOptimizer
from ttp.mindio.saving import save_handlers
from ttp.mindio.saving.local_save import LocalSave
from ttp.mindio.saving.publisher import HandlerPublisher
from ttp.mindio.saving.step_args import StepArgs
from ttp.proto.messages import Cause, CauseKind, FileEntry, PublishOrder, ShareResult


@pytest.fixture(autouse=True)
def forgets_every_job() -> Iterator[None]:
    """No test leaves what it declared to the next."""
    yield
    forget_job()


class Trainer:
    """Handlers that are methods, with names and defaults of their own."""

    def save(self, rank: int, at: int, ranks: list[int], objects: Any, folder: str = "output") -> int:
        return 7

    def rename(self, objects: Any) -> int:
        return 0


def test_handlers_may_be_methods_and_have_defaults() -> None:
    """They are called by position, so names do not count; what the save handler returns does not either."""
    mindio.ttp_register_save_ckpt_handler(Trainer().save)
    mindio.ttp_register_rename_handler(Trainer().rename)
    save_handlers.save_handler(Trainer().save)(0, 3, [0], None)
    save_handlers.rename_handler(Trainer().rename)(3, None)
    save_handlers.save_handler(print)(0, 3, [0], None)


@pytest.mark.parametrize(
    ("register", "function"),
    [
        (mindio.ttp_register_save_ckpt_handler, lambda step, args: None),
        (mindio.ttp_register_save_ckpt_handler, lambda *, save_rank, step, rank_list, args: None),
        (mindio.ttp_register_rename_handler, lambda step, args: 0),
        (mindio.tft_register_save_ckpt_handler, lambda save_rank, step, rank_list: None),
        (mindio.tft_register_rename_handler, lambda args: 0),
        (mindio.ttp_register_save_ckpt_handler, "save"),
    ],
)
def test_a_handler_that_could_not_be_called_is_refused_at_the_start(
    register: Callable[[Any], None], function: Any
) -> None:
    """Not at the fault, where it would cost the checkpoint; the message has what it is called with."""
    with pytest.raises(ConfigError, match=r"(save|rename) handler.*(is called with|expected a function of) \(.*args"):
        register(function)


@pytest.mark.parametrize("status", [1, 2, True, False, "done"])
def test_only_0_and_nothing_mean_that_the_checkpoint_is_visible(status: object) -> None:
    """A bool is neither: 0 is success, and False looks like failure."""
    for rename in (
        save_handlers.rename_handler(lambda args: status),
        save_handlers.newer_rename_handler(lambda *_: status),
    ):
        with pytest.raises(CheckpointError, match=f"step 3: the rename handler returned {status!r}, expected 0"):
            rename(3, None)
    save_handlers.rename_handler(lambda args: None)(3, None)
    save_handlers.newer_rename_handler(lambda *_: 0)(3, None)


@pytest.mark.parametrize("error", [OSError("no room"), SystemExit(3)])
def test_whatever_a_handler_raises_says_whose_it_is(error: BaseException) -> None:
    """`sys.exit` too, which would end the work thread and leave everybody waiting for it."""

    def fail(*_: object) -> None:
        raise error

    with pytest.raises(CheckpointError, match=f"step 3: the save handler raised {type(error).__name__}: {error}"):
        save_handlers.save_handler(fail)(0, 3, [0], None)
    with pytest.raises(CheckpointError, match="step 3: the rename handler raised"):
        save_handlers.newer_rename_handler(fail)(3, None)


@pytest.mark.parametrize(
    ("tmp_name", "file", "refusal"),
    [
        (
            "iter_0000003",
            "a",
            "invalid name of a staging directory: got 'iter_0000003', expected iter_0000003_tmp_NAME",
        ),
        ("iter_0000002_tmp_1_1_1", "a", "expected iter_0000003_tmp_NAME"),
        ("iter_0000003_tmp_1_1_1", "../iter_0000002/a", "invalid file of rank 0"),
    ],
)
def test_an_order_to_publish_that_names_no_staging_directory_is_refused_before_any_handler_is_called(
    tmp_path: Path, tmp_name: str, file: str, refusal: str
) -> None:
    job = current_job()
    called: list[object] = []
    job.save_handler = save_handlers.save_handler(lambda *given: called.append(given))
    job.rename_handler = save_handlers.rename_handler(lambda *given: called.append(given))
    for name in ("iter_0000003", "iter_0000002", "iter_0000002_tmp_1_1_1", "iter_0000003_tmp_1_1_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("a")
    share = ShareResult((FileEntry(file, 1, "0" * 64, 0),))
    cause = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
    order = PublishOrder(1, 3, str(tmp_path), tmp_name, (share,), cause, None, 1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=refusal):
        core = new_optimizer()[1].core
        HandlerPublisher(0, core, job, LocalSave(0, core, job)).publish(order, {}, lambda count: None)
    assert sorted(tmp_path.rglob("*")) == before and not called


def test_a_list_of_arguments_says_the_saved_step_as_well_as_a_tuple() -> None:
    """What the trainer gave stays as it was."""
    given = [41, "model"]
    assert StepArgs(41, given).labelled(42) == [42, "model"] and given == [41, "model"]
    assert StepArgs(41, (41, "model")).labelled(42) == (42, "model")
    assert StepArgs(41, {"iteration": 41}).labelled(42) == {"iteration": 41}


def test_a_lone_rank_may_have_no_replica() -> None:
    """`len(dp_ranks) // 2` is 0 there; it is not needed."""
    mindio.ttp_init_controller(0, 1, replica=0)
    mindio.ttp_init_processor(0, [0], 1, 1, replica=0)


def test_local_copies_are_compared_in_either_order() -> None:
    """The processor may be declared before the optimizer is built."""
    mindio.ttp_init_processor(0, [0], 1, 1, enable_local_copy=True)
    with pytest.raises(ConfigError, match="built with local_copy=False"):
        new_optimizer()


def new_optimizer() -> tuple[torch.nn.Module, TTPReplicaOptimizer]:
    model = torch.nn.Linear(4, 2)
    adam = torch.optim.AdamW(model.parameters())
    return model, TTPReplicaOptimizer(adam, 1.0, False, False, False, False, False, torch.float32, None, model)


def test_a_step_without_a_processor_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank finds out at the first fault; a run with ENABLE_TTP=False wants it so."""
    for value, times in (("True", 1), ("False", 0)):
        monkeypatch.setenv("ENABLE_TTP", value)
        model, optimizer = new_optimizer()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert caplog.text.count("nothing is protected: a step was done without ttp_start_processor") == times
        caplog.clear()
        forget_job()
