"""When a step is computed twice, what is compared, and that the gate lets no freeze be missed meanwhile."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ttp.config import Settings
from ttp.errors import AbortedCollective, ConfigError, DataMismatch, NotRepeatable, Regroup
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord, Phase
from ttp.regroup.rehearsal import Regrouping, differences

RECORD = CommitRecord(6, 1.5, 1.0, False, 1.0, (0.1,), (2.25, math.nan))


@contextlib.contextmanager
def pause(at_most_s: float) -> Iterator[None]:
    yield


class Kept:
    """What was kept."""

    def __init__(self) -> None:
        self.results: list[tuple[int, str]] = []

    def passed(self, step: int) -> None:
        self.results.append((step, ""))

    def failed(self, step: int, unequal: str) -> None:
        self.results.append((step, unequal))


def rehearsing(every: int = 3, rank: int = 1, kept: Kept | None = None) -> tuple[Gate, Regrouping]:
    gate = Gate(rank, state_step=5)
    regrouping = Regrouping(None, gate, every, rank, pause, kept=kept)  # type: ignore[arg-type]
    regrouping.begin_train("train() (loop.py:7)")
    return gate, regrouping


def come_to(gate: Gate, record: CommitRecord) -> None:
    gate.computing(record.step)
    gate.ready(record.step)
    gate.begin_update(record.step, record)


def test_every_nth_step_is_left_once_before_its_update_and_then_done() -> None:
    gate, _ = rehearsing()
    with pytest.raises(Regroup):
        come_to(gate, RECORD)
    assert (gate.phase, gate.step, gate.state_step, gate.records) == (Phase.COMPUTE, 6, 5, ()), "nothing is committed"
    come_to(gate, replace(RECORD))
    assert gate.phase is Phase.UPDATING
    gate.end_update(6)
    for step in (7, 8):
        come_to(gate, replace(RECORD, step=step))
        gate.end_update(step)
    with pytest.raises(Regroup):
        come_to(gate, replace(RECORD, step=9))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sums": (2.25, 1.0)}, "sums was (2.25, nan), then (2.25, 1.0)"),
        ({"grad_norm": math.nextafter(1.5, 2)}, "grad_norm was 1.5, then 1.5000000000000002"),
        ({"learning_rates": (0.2,)}, "learning_rates was (0.1,), then (0.2,)"),
        ({"learning_rates": ()}, "learning_rates was (0.1,), then ()"),
        ({"skipped": True}, "skipped was False, then True"),
        ({"clip_factor": 0.5}, "clip_factor was 1.0, then 0.5"),
        ({"loss_scale": 2.0}, "loss_scale was 1.0, then 2.0"),
    ],
)
def test_another_result_is_named_and_no_update_is_made_with_it(changed: dict[str, object], named: str) -> None:
    kept = Kept()
    gate, _ = rehearsing(kept=kept)
    with pytest.raises(Regroup):
        come_to(gate, RECORD)
    with pytest.raises(
        NotRepeatable, match=r"step 6 gave another result when train\(\) \(loop.py:7\) was called again"
    ) as refused:
        come_to(gate, replace(RECORD, **changed))  # type: ignore[arg-type]
    assert named in str(refused.value) and gate.state_step == 5 and gate.phase is Phase.READY
    assert differences(RECORD, replace(RECORD)) == ""
    [(step, unequal)] = kept.results
    assert step == 6 and named in unequal and unequal in str(refused.value)


@pytest.mark.parametrize(("rank", "results"), [(0, [(6, ""), (9, "")]), (1, [])])
def test_equal_results_are_kept_by_rank_0(rank: int, results: list[tuple[int, str]]) -> None:
    kept = Kept()
    gate, regrouping = rehearsing(rank=rank, kept=kept)
    for step in range(6, 10):
        with contextlib.nullcontext() if step % 3 else pytest.raises(Regroup):
            come_to(gate, replace(RECORD, step=step))
        if step % 3 == 0:
            come_to(gate, replace(RECORD, step=step))
        gate.end_update(step)
        assert kept.results == [result for result in results if result[0] < step], "not before all ranks are past it"
    regrouping.end_train()
    assert kept.results == results[:1]
    regrouping.report()
    assert kept.results == results


def test_what_was_equal_on_rank_0_alone_is_not_kept() -> None:
    """Another rank may have ended the job by its own result, or the groups were made again meanwhile."""
    kept = Kept()
    for lost in (False, True):
        gate, regrouping = rehearsing(rank=0, kept=kept)
        with pytest.raises(Regroup):
            come_to(gate, RECORD)
        come_to(gate, replace(RECORD))
        gate.end_update(6)
        if lost:
            regrouping.renew(lambda group: group)
            regrouping.report()
        else:
            regrouping.end_train(AbortedCollective("rank 1 failed"))
    assert not kept.results


def test_a_function_that_returns_without_the_step_is_named() -> None:
    """It has exhausted what it iterates over: the job would end early, and well."""
    kept = Kept()
    gate, regrouping = rehearsing(kept=kept)
    with pytest.raises(Regroup):
        come_to(gate, RECORD)
    with pytest.raises(
        NotRepeatable, match=r"step 6 was not computed a second time: train\(\) \(loop.py:7\) returned"
    ) as refused:
        regrouping.end_train()
    regrouping.end_train(refused.value)
    regrouping.end_train()
    assert [step for step, _ in kept.results] == [6] and gate.state_step == 5


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        (StopIteration("no more"), "train() (loop.py:7) raised StopIteration when it was entered again: no more"),
        (DataMismatch("another batch"), "raised DataMismatch"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), "raised RuntimeError"),
        (RuntimeError("Trying to backward through the graph a second time"), "raised RuntimeError"),
        (RuntimeError("Connection closed by peer"), ""),
        (ConnectionError("[/gloo/transport/tcp/pair.cc:1] Connection reset by peer"), ""),
        (AbortedCollective("rank 1 failed"), ""),
        (KeyboardInterrupt(), ""),
    ],
)
def test_what_it_raises_when_it_is_entered_again_is_kept_unless_a_peer_may_be_the_cause(
    raised: BaseException, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept()
    gate, regrouping = rehearsing(kept=kept)
    with pytest.raises(Regroup):
        come_to(gate, RECORD)
    regrouping.end_train(raised)
    assert bool(kept.results) == bool(caplog.messages) == bool(named)
    assert not named or (kept.results[0][0] == 6 and named in kept.results[0][1] and named in caplog.text)


def test_what_it_raises_outside_of_a_rehearsal_is_not_kept() -> None:
    kept = Kept()
    gate, regrouping = rehearsing(kept=kept)
    come_to(gate, replace(RECORD, step=7))
    regrouping.end_train(KeyError("x"))
    assert not kept.results


def test_once_train_has_ended_no_step_is_given_up() -> None:
    gate, regrouping = rehearsing()
    regrouping.end_train()
    come_to(gate, RECORD)
    assert gate.phase is Phase.UPDATING


def test_a_framework_with_groups_of_its_own_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="invalid TTP_REHEARSE=every:3: this trainer's framework keeps process groups of its own"
    ):
        Regrouping(None, Gate(0), 3, 0, pause, own_groups=True)  # type: ignore[arg-type]
    Regrouping(None, Gate(0), 0, 0, pause, own_groups=True)  # type: ignore[arg-type]


def test_a_session_that_is_closed_on_the_way_out_is_refused() -> None:
    gate, regrouping = rehearsing()
    regrouping.check_close()
    with pytest.raises(ConfigError, match="closes the session on its way out"):
        try:
            come_to(gate, RECORD)
        finally:
            regrouping.check_close()


@pytest.mark.parametrize(
    ("rehearsed", "every", "reported"),
    [
        (2, 3, "exited and entered again 2 times"),
        (0, 3, "no step was computed twice (TTP_REHEARSE=every:3)"),
        (0, 0, ""),
    ],
)
def test_the_end_reports_once(rehearsed: int, every: int, reported: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ttp")
    regrouping = Regrouping(None, Gate(0), every, 0, pause)  # type: ignore[arg-type]
    regrouping._rehearsed = rehearsed
    regrouping.report()
    assert reported in caplog.text and bool(caplog.text) == bool(reported)
    caplog.clear()
    regrouping.report()
    assert not caplog.text


def test_without_a_decorated_train_no_step_is_left() -> None:
    gate = Gate(0, state_step=5)
    Regrouping(None, gate, 3, 1, pause)  # type: ignore[arg-type]
    come_to(gate, RECORD)
    gate.end_update(6)
    ungated = Regrouping(None, None, 3, 1, pause)  # type: ignore[arg-type]
    ungated.begin_train()


def test_a_step_is_not_given_up_while_the_gate_is_closed() -> None:
    """The controller decides by READY: what was reported must not change behind it."""
    gate, _ = rehearsing()
    gate.computing(6)
    gate.ready(6)
    ticket = gate.shut(1)
    report = gate.settle(ticket, 1, 1.0)
    assert (report.phase, report.step) == (Phase.READY, 6)
    left = threading.Event()

    def train() -> None:
        with contextlib.suppress(Regroup):
            gate.begin_update(6, RECORD)
        left.set()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert not left.wait(0.3)
    assert gate.phase == Phase.READY
    gate.reopen(ticket)
    assert left.wait(10)
    assert gate.phase.name == "COMPUTE"
    thread.join()


@pytest.mark.parametrize("text", ["5", "every:0", "every:", "every:1.5", "every:-1", "always", "every:1234567890123"])
def test_what_is_not_a_number_of_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid TTP_REHEARSE=.*expected every:N"):
        Settings.from_env({"TTP_REHEARSE": text})


def test_the_setting_is_read() -> None:
    assert Settings.from_env({"TTP_REHEARSE": " every:10 "}).rehearse_every == 10
    assert Settings.from_env({}).rehearse_every == 0
