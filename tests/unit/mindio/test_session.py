"""One rank with a real controller: what the trainer's handlers are given at a fault, and what becomes of their answers."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ports import free_port
from ttp import mindio
from ttp.errors import CheckpointError, CheckpointMismatch, ConfigError, Overtaken
from ttp.mindio.job import current_job, forget_job
from ttp.mindio.modellink import TTPReplicaOptimizer
from ttp.mindio.saving.step_args import StepArgsBox
from ttp.mindio.state_files.whole_state import WholeState

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgets_every_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test has a folder and a port of its own, and leaves no session."""
    monkeypatch.setenv("TTP_MINDIO_DIR", str(tmp_path / "mindio"))
    monkeypatch.setenv("TTP_CONTROLLER_PORT", str(free_port()))
    monkeypatch.setenv("TTP_STANDBYS", "0")
    yield
    forget_job()


def new_trainer(local_copy: bool = False) -> tuple[torch.nn.Module, TTPReplicaOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    adam = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, TTPReplicaOptimizer(
        adam, 1.0, False, False, False, False, False, torch.float32, None, model, local_copy
    )


def do_step(model: torch.nn.Module, optimizer: TTPReplicaOptimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = model(torch.full((2, 8), float(step))).square().mean()
    loss.backward()
    optimizer.reduce_model_grads(None, None)
    assert optimizer.step(None, None)[0]
    optimizer.gather_model_params(None, None)
    return float(loss.detach())


def protect(local_copy: bool = False) -> None:
    mindio.ttp_init_controller(0, 1, 1, local_copy)
    mindio.ttp_start_controller("127.0.0.1", 8000)
    mindio.ttp_init_processor(0, [0], 1, 1, 1, local_copy)
    mindio.ttp_start_processor("127.0.0.1", 8000)


def run_into_a_fault(
    model: torch.nn.Module,
    optimizer: TTPReplicaOptimizer,
    save: Callable[..., None],
    rename: Callable[..., int],
    local_copy: bool = False,
) -> None:
    """Three steps, then an exception in the fourth's backward."""
    protect(local_copy)
    mindio.ttp_register_save_ckpt_handler(save)
    mindio.ttp_register_rename_handler(rename)

    def train() -> None:
        for step in range(1, 5):
            if step == 4:
                optimizer.zero_grad()
                raise ZeroDivisionError("the trainer's own mistake")
            do_step(model, optimizer, step)
            mindio.ttp_set_ckpt_args((step, model, optimizer, "schedule"))

    with pytest.raises(ZeroDivisionError):
        mindio.ttp_to_persist(train)()


def journal(tmp_path: Path) -> list[dict[str, Any]]:
    """End the session, so that the controller has written all of its journal, and return the lines."""
    current_job().close()
    (path,) = (tmp_path / "mindio").glob("ttp_log/journal_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_handlers_get_rank_step_ranks_and_the_trainers_objects(tmp_path: Path) -> None:
    """At a fault, after the decision: save on the save rank with the state of the step, then rename; and no shards remain."""
    model, optimizer = new_trainer()
    calls: list[Any] = []

    def save(save_rank: int, step: int, rank_list: list[int], args: Any) -> None:
        calls.append((save_rank, step, rank_list, args[0], args[3]))
        assert args[1] is model and args[2] is optimizer and not optimizer.error_dump
        optimizer.set_dump_args(save_rank + 1, step, rank_list)
        assert not optimizer.need_write_file(), "another rank writes"
        optimizer.set_dump_args(save_rank, step, rank_list)
        assert optimizer.error_dump and optimizer.need_write_file() and optimizer.current_step == 3
        assert optimizer.save_args == {"rank": 0, "step": 3, "rank_list": [0]}
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "tmp.pt")

    def rename(args: Any) -> int:
        calls.append(("rename", args[0]))
        (tmp_path / "tmp.pt").rename(tmp_path / "final.pt")
        return 0

    run_into_a_fault(model, optimizer, save, rename)
    assert calls == [(0, 3, [0], 3, "schedule"), ("rename", 3)]
    assert [line["event"] for line in journal(tmp_path)][-3:].count("exit_sent") == 1
    assert any(line["event"] == "published" for line in journal(tmp_path))
    assert not list((tmp_path / "mindio").rglob("*.distcp"))

    whole_model, whole = new_trainer()
    losses = [do_step(whole_model, whole, step) for step in range(1, 7)]
    resumed_model, resumed = new_trainer()
    found = torch.load(tmp_path / "final.pt", weights_only=True)
    resumed_model.load_state_dict(found["model"])
    resumed.load_state_dict(found["optimizer"])
    assert resumed.current_step == 3
    assert [do_step(resumed_model, resumed, step) for step in range(4, 7)] == losses[3:]


def test_a_rename_that_fails_is_not_a_checkpoint(tmp_path: Path) -> None:
    """The handler's 1 refuses the dump, with its reason in the journal."""
    model, optimizer = new_trainer()
    run_into_a_fault(model, optimizer, lambda *_: None, lambda args: 1)
    (refused,) = [line for line in journal(tmp_path) if line["event"] == "refused"]
    assert "the rename handler returned 1" in refused["fields"]["reason"]


def test_a_save_handler_that_raises_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Its exception is the reason; the rename handler is not called."""
    model, optimizer = new_trainer()

    def save(*_: object) -> None:
        raise OSError("no room for the trainer's file")

    def rename(args: Any) -> int:
        raise AssertionError("rename was called")

    run_into_a_fault(model, optimizer, save, rename)
    (refused,) = [line for line in journal(tmp_path) if line["event"] == "refused"]
    assert "no room for the trainer's file" in refused["fields"]["reason"]


def test_the_newer_handlers_get_their_own_arguments(tmp_path: Path) -> None:
    """`save(step, save_info, args, ctx)` and `rename(step, args)`, which raises in place of returning 1."""
    model, optimizer = new_trainer()
    calls: list[Any] = []
    protect()
    mindio.tft_register_save_ckpt_handler(
        lambda step, info, args, ctx: calls.append((step, info, args[0], ctx)), "context"
    )
    mindio.tft_register_rename_handler(lambda step, args: calls.append((step, args[0])), "context")

    @mindio.tft_exception_handler
    def train() -> None:
        do_step(model, optimizer, 1)
        mindio.tft_set_step_args((1, model))
        optimizer.zero_grad()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert calls == [(1, [{"type": 0, "ranks": [0]}], 1, "context"), (1, 1)]


def own_step(optimizer: Any, clip_grad: float | None = None) -> float:
    """Megatron's base class's `step`, with the lines of MindIO's patch."""
    grad_norm = float("nan") if clip_grad is None else optimizer.clip_grad_norm(clip_grad)
    optimizer.begin_to_update(optimizer.current_step)
    optimizer.optimizer.step()
    optimizer.end_to_update()
    return float(grad_norm)


def do_own_step(model: torch.nn.Module, optimizer: TTPReplicaOptimizer, step: int, clip: float | None = None) -> float:
    optimizer.zero_grad()
    model(torch.full((2, 8), float(step))).square().mean().backward()
    optimizer.reduce_model_grads(None, None)
    return own_step(optimizer, clip)


def assert_same_parameters(model: torch.nn.Module, other: torch.nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("clip_grad", [None, 1.0])
def test_a_trainers_own_step_may_clip_begin_and_end_the_update(clip_grad: float | None) -> None:
    """The patch of the base class: `clip_grad_norm`, or the constructor's limit, begin_to_update, optimizer.step(), end_to_update give the
    bits of `step`, and its norm."""
    model, optimizer = new_trainer()
    other_model, other = new_trainer()
    for step in range(1, 4):
        other.zero_grad()
        other_model(torch.full((2, 8), float(step))).square().mean().backward()
        _, expected, _ = other.step(None, None)
        norm = do_own_step(model, optimizer, step, clip_grad)
        assert clip_grad is None or norm == expected
        assert expected is not None and expected > 1.0 and optimizer.current_step == step
    assert_same_parameters(model, other_model)
    with pytest.raises(ConfigError, match="without a step that the ranks have agreed on"):
        mindio.ttp_start_updating_os(-1)


def test_a_trainers_own_limit_of_the_norm_is_that_of_its_update() -> None:
    """Megatron's `clip_grad_norm(clip_grad)`, and its attribute `clip_grad`: any limit, another one each step, or 0 for none."""
    model, optimizer = new_trainer()
    expected_model, _ = new_trainer()
    plain = torch.optim.AdamW(expected_model.parameters(), lr=0.05)
    for step, limit in ((1, 0.5), (2, 0.01), (3, 0.0)):
        plain.zero_grad()
        expected_model(torch.full((2, 8), float(step))).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(expected_model.parameters(), limit or float("inf")).item()
        plain.step()
        if step == 2:
            optimizer.clip_grad = limit
            assert do_step(model, optimizer, step) and optimizer.core.last_record is not None
            norm = optimizer.core.last_record.grad_norm
        else:
            norm = do_own_step(model, optimizer, step, limit)
        assert norm == pytest.approx(expected, rel=1e-4)
        for mine, theirs in zip(model.parameters(), expected_model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_norm(2.0)
    with pytest.raises(
        ConfigError, match=r"invalid clip_grad: got 3[.]0, expected 2[.]0, on which the ranks have agreed for step 4"
    ):
        optimizer.clip_grad_norm(3.0)
    with pytest.raises(ConfigError, match="build it with log_num_zeros_in_grad=True"):
        optimizer.count_zeros()
    with pytest.raises(ConfigError, match="the update that was begun is that of step 4"):
        optimizer.end_updating(7)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("caught", ["in the collective", "by its error", "at the gate"])
def test_a_step_that_the_work_thread_has_done_ends_as_any_other_for_the_trainer(
    monkeypatch: pytest.MonkeyPatch, caught: str, own: bool
) -> None:
    """A rank that was READY is overtaken: in the spanning collective, by a dead peer's error, or at the gate. The trainer's own `step`, and the
    optimizer's, return, the update is done once, and the bookkeeping follows."""
    model, optimizer = new_trainer()
    other_model, other = new_trainer()
    do_step(other_model, other, 1)
    core, usual, begun = optimizer.core, optimizer.core.agree, []

    def agree() -> Any:
        record, ending = usual()
        if caught != "at the gate":
            core.roll_forward(record)
            raise RuntimeError("connection closed by peer") if caught == "by its error" else Overtaken("done")
        return record, ending

    def begin_update(record: Any) -> None:
        begun.append(record.step)
        core.roll_forward(record)
        raise Overtaken("done")

    monkeypatch.setattr(core, "agree", agree)
    monkeypatch.setattr(core, "begin_update", begin_update)
    monkeypatch.setattr(core, "end_update", lambda step: pytest.fail("the gate was not taken"))
    monkeypatch.setattr(current_job(), "overtaken_after", lambda error, step: step == 1)
    if own:
        do_own_step(model, optimizer, 1, 1.0)
    else:
        do_step(model, optimizer, 1)
    assert optimizer.current_step == 1 and begun == [1] * (caught == "at the gate")
    assert_same_parameters(model, other_model)


def test_an_error_of_the_collective_that_no_rank_made_up_for_is_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No work thread has done the step: nothing is updated."""
    model, optimizer = new_trainer()

    def agree() -> Any:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(optimizer.core, "agree", agree)
    with pytest.raises(RuntimeError, match="connection closed"):
        do_step(model, optimizer, 1)
    assert optimizer.current_step == 0


def test_the_optimizer_and_the_processor_agree_on_local_copies() -> None:
    """One of them with and one without would promise what is not there."""
    new_trainer(local_copy=True)
    with pytest.raises(ConfigError, match="was built with local_copy=True"):
        mindio.ttp_init_processor(0, [0], 1, 1, 1, False)


@pytest.mark.parametrize(("local_copy", "kept"), [(True, 2), (False, -1)])
def test_a_local_copy_is_kept_where_it_is_asked_for_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, local_copy: bool, kept: int
) -> None:
    """At a fault after step 3 a rank with local copies has step 2 as well, and the start says which mode it is."""
    model, optimizer = new_trainer(local_copy)
    with caplog.at_level("INFO", logger="ttp"):
        run_into_a_fault(model, optimizer, lambda *_: None, lambda args: 0, local_copy)
    modes = {True: "local copy: every rank keeps the state of the step before", False: "barrier: the optimizer's own"}
    assert modes[local_copy] in caplog.text and modes[not local_copy] not in caplog.text
    (frozen,) = [line["fields"] for line in journal(tmp_path) if line["event"] == "frozen"]
    assert (frozen["state_steps"], frozen["backup_steps"]) == ([3], [kept])


def test_the_controller_listens_on_the_port_that_the_trainer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TTP_CONTROLLER_PORT does not say otherwise."""
    monkeypatch.delenv("TTP_CONTROLLER_PORT")
    port = free_port()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    new_trainer()
    mindio.ttp_init_controller(0, 1)
    mindio.ttp_start_controller("127.0.0.1", port)
    mindio.ttp_init_processor(0, [0], 1, 1)
    with pytest.raises(ConfigError, match=f"got 8000, expected the controller's, {port}"):
        mindio.ttp_start_processor("127.0.0.1", 8000)
    mindio.ttp_start_processor("127.0.0.1", port)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_current_step_counts_from_the_loaded_iteration() -> None:
    """Set once before the first step; later it is the optimizer's own."""
    model, optimizer = new_trainer()
    optimizer.current_step = 40
    do_step(model, optimizer, 41)
    assert optimizer.current_step == 41
    optimizer.current_step = 41
    with pytest.raises(ConfigError, match="counted by the optimizer"):
        optimizer.current_step = 43


def test_a_foreign_optimizers_state_is_refused() -> None:
    """Nothing is changed, and the message says what to do."""
    _, optimizer = new_trainer()
    with pytest.raises(CheckpointMismatch, match="reload_model_params"):
        optimizer.load_state_dict({"momenta": {}, "scaler": None})
    with pytest.raises(CheckpointMismatch, match="got param groups of NoneType"):
        optimizer.load_state_dict({"optimizer": {}, "grad_scaler": None})
    state = WholeState.from_dict(optimizer.state_dict())
    wrong = WholeState(1, {**state.tensors, "model.weight": torch.zeros(3)}, state.host)
    with pytest.raises(CheckpointMismatch, match=r"model.weight.*shape \(3,\), expected shape \(4, 8\)"):
        optimizer.load_state_dict(wrong.to_dict())
    assert optimizer.current_step == 0


def test_objects_of_a_step_are_waited_for_until_it_is_settled() -> None:
    """Random numbers are those of the settled step; a thread that has left is not waited for."""
    box = StepArgsBox()
    advanced: list[int] = []
    with pytest.raises(CheckpointError, match="has not called ttp_set_ckpt_args"):
        box.await_step(1, advanced.append, wait_s=0.05)
    box.put(1, (1, "objects"))
    assert not box.await_step(1, advanced.append, wait_s=0.05).settled and advanced
    box.settle(2, CPU)
    assert not box.await_step(1, advanced.append, wait_s=0.05).settled, "another step's objects were not given"
    random.seed(1)
    box.settle(1, CPU)
    expected = random.random()
    got = box.await_step(1, advanced.append, wait_s=60)
    assert got.labelled(1) == (1, "objects") and got.labelled(2) == (2, "objects")
    assert got.randomness is not None
    got.randomness.restore(CPU)
    assert random.random() == expected
    box.close()
    assert box.await_step(2, advanced.append, wait_s=60).step == 1


def test_a_dump_without_handlers_says_what_is_missing(tmp_path: Path) -> None:
    """A fault before they were registered."""
    model, optimizer = new_trainer()
    protect()

    @mindio.ttp_to_persist
    def train() -> None:
        do_step(model, optimizer, 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    (refused,) = [line for line in journal(tmp_path) if line["event"] == "refused"]
    assert "no handlers; call ttp_register_save_ckpt_handler" in refused["fields"]["reason"]
    assert current_job().save_handler is None


def test_what_a_fault_would_miss_is_said_after_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """Handlers and arguments that were never given, and a loop that no decorator holds."""
    model, optimizer = new_trainer()
    protect()
    for step in (1, 2, 3):
        do_step(model, optimizer, step)
    reported = caplog.text
    mindio.ttp_to_persist(lambda: None)()  # the controller ends when all ranks have finished
    calls = "ttp_register_save_ckpt_handler, ttp_register_rename_handler, ttp_set_ckpt_args after every iteration"
    assert reported.count(f"a fault would save nothing: the trainer has not called {calls}") == 1
    assert reported.count("outside of a function decorated with ttp.mindio.ttp_to_persist") == 1


def test_a_complete_trainer_receives_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warnings are for what is missing."""
    model, optimizer = new_trainer()
    run_into_a_fault(model, optimizer, lambda *_: None, lambda args: 0)
    warned = ("would save nothing", "outside of a function", "its training thread did not")
    assert [text for text in warned if text in caplog.text] == []


def test_a_save_handler_that_names_no_dump_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `set_dump_args` the save rank writes all the same: a collective would wait for the dead."""
    model, optimizer = new_trainer()
    reported: list[object] = []

    def save(save_rank: int, step: int, rank_list: list[int], args: Any) -> None:
        monkeypatch.setattr("ttp.mindio.optimizer.gather_whole", lambda core: reported.append("a collective"))
        reported.append(optimizer.need_write_file())
        reported.append(optimizer.state_dict()["step"])

    run_into_a_fault(model, optimizer, save, lambda args: 0)
    assert reported == [True, 3]


def test_a_reported_error_ends_in_a_dump(tmp_path: Path) -> None:
    """The newer decorator of MindIO's own: report, wait, leave when the answer is not RETRY; a state that is not a fault changes nothing."""
    model, optimizer = new_trainer()
    saved: list[int] = []
    protect()
    mindio.tft_register_save_ckpt_handler(lambda step, info, args, ctx: saved.append(step))
    mindio.tft_register_rename_handler(lambda step, args: None)
    for step in (1, 2):
        do_step(model, optimizer, step)
        mindio.tft_set_step_args((step, model))
    optimizer.zero_grad()
    mindio.tft_report_error(mindio.ReportState.RS_NORMAL)
    assert mindio.tft_get_repair_type() == "unknown"
    mindio.tft_report_error(mindio.ReportState.RS_UCE.value)
    assert mindio.tft_wait_next_action() == mindio.Action.EXIT.value
    assert saved == [2] and mindio.tft_get_repair_type() == "dump"
    assert "the trainer reported RS_UCE" in json.dumps(journal(tmp_path))


def test_a_dump_that_is_asked_for_is_a_notice_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SIGTERM does as well: all ranks finish the step in flight, save it and exit."""
    new_trainer()
    protect()
    reported: list[str] = []
    protection = current_job()._protection
    assert protection is not None
    monkeypatch.setattr(protection.processor, "preempted", reported.append)
    assert (mindio.tft_notify_controller_dump(), mindio.tft_notify_controller_change_strategy("dump")) == (0, 0)
    assert reported == ["tft_notify_controller_dump"] * 2
