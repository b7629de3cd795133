"""A rank without a controller, or with a new one: how long it waits, how it leaves, and what it says of that."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ProcessorBench, only, registration
from tests.unit.protocol.test_processor import CAUSE, ERROR, WELCOME
from ttp.errors import ProtocolError
from ttp.processor.core.events import (
    Connect,
    Connected,
    Disconnected,
    ExitProcess,
    LocalFault,
    Log,
    ProcessorSettings,
    ReleaseTraining,
    Tick,
    TrainReturned,
)
from ttp.processor.core.machine import initial
from ttp.processor.core.state import LinkState, RankMode
from ttp.proto.messages import (
    Cause,
    CauseKind,
    Exit,
    FaultReport,
    Finished,
    Freeze,
    Heartbeat,
    KeepAlive,
    Phase,
    Thaw,
    Welcome,
)

UNPROTECTED = "training continues without protection"


def logged(rank: ProcessorBench) -> list[str]:
    return [line.text for line in only(rank.effects, Log)]


def alone_for(rank: ProcessorBench, seconds: float) -> list[str]:
    """Let a rank look for its controller in vain, and return the lines that it logs meanwhile."""
    lines = []
    end = rank.now + seconds
    while rank.now < end:
        if only(rank.tick(after=0.1), Connect):
            lines += logged(rank)
            rank.take(Disconnected("refused", refused=True))
        lines += logged(rank)
    return lines


def back(rank: ProcessorBench) -> None:
    """The controller is there again."""
    while not only(rank.tick(after=0.1), Connect):
        pass
    rank.take(Connected(registration(1)))


# --- training on ---


def test_training_without_a_controller_is_said_once_for_each_loss() -> None:
    """A controller that came back and is lost again is another loss."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    for _ in range(2):
        rank.take(Disconnected("reset"))
        assert "lost the controller: reset" in logged(rank)
        lines = alone_for(rank, 60.0)
        assert sum(UNPROTECTED in line for line in lines) == 1
        assert not any("lost the controller" in line for line in lines), "it was lost once"
        back(rank)
        rank.receive(WELCOME)


def test_a_loss_that_ends_in_time_does_not_count() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    for _ in range(3):
        rank.take(Disconnected("reset"))
        assert not any(UNPROTECTED in line for line in alone_for(rank, 10.0))
        back(rank)
        rank.receive(WELCOME)


def test_a_rank_that_no_controller_ever_welcomed_is_released() -> None:
    """The job never assembled: the training thread is waiting for that."""
    rank = ProcessorBench(connected=False)
    effects = []
    for _ in range(160):
        effects += only(rank.tick(after=0.1), ReleaseTraining)
        if only(rank.effects, Connect):
            rank.take(Disconnected("refused", refused=True))
    assert len(effects) == 1 and rank.state.standing is RankMode.LEAVING and rank.deadline() is None


@pytest.mark.parametrize("loss", ["is new", "was reported"])
def test_a_rank_that_finishes_without_a_controller_leaves_without_its_word(loss: str) -> None:
    """Once: after its time is over no rank is asked anything any more."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(Disconnected("reset"))
    if loss == "was reported":
        assert any(UNPROTECTED in line for line in alone_for(rank, 60.0))
    rank.take(TrainReturned())
    rank.wait(0.1 if loss == "was reported" else 15.1)
    assert only(rank.effects, ReleaseTraining) and rank.state.standing is RankMode.LEAVING
    assert rank.tick(after=1.0) == ()


@pytest.mark.parametrize("fault", [False, True])
def test_a_rank_that_stood_still_itself_waits_for_a_controller_as_long_as_it_would_have(fault: bool) -> None:
    """No controller can have answered while its process was stopped, or before its clock leapt. It asks for a heartbeat first."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    if fault:
        rank.take(ERROR)
    else:
        rank.freeze()
    rank.take(Disconnected("reset"))
    rank.wait(5.0)
    assert not only(rank.tick(after=100.0), ExitProcess)
    assert not only(rank.wait(8.8), ExitProcess)
    assert only(rank.wait(0.3), ExitProcess)


def test_a_rank_that_was_stopped_itself_still_reads_its_controllers_messages() -> None:
    """The controller's messages of that time have still to be read."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.tick(after=1.0)
    rank.tick(after=100.0)
    assert rank.state.link is LinkState.UP
    rank.wait(0.9)
    assert rank.state.link is LinkState.UP, "a heartbeat before it stood still, one of its absence, and one now"
    rank.wait(0.2)
    assert rank.state.link is not LinkState.UP


def test_a_rank_that_is_kept_again_and_again_gives_a_silent_controller_up() -> None:
    """Its training holds the interpreter: of each absence the heartbeat counts that it had planned to wait."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    for _ in range(2):
        rank.tick(after=1.9)
        assert rank.state.link is LinkState.UP
    rank.tick(after=1.9)
    assert rank.state.link is not LinkState.UP


def test_a_frozen_rank_that_had_a_fault_of_its_own_leaves_with_1() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(ERROR)
    rank.freeze()
    rank.take(Disconnected("reset"))
    (leaving,) = only(rank.wait(15.1), ExitProcess)
    assert leaving.code == 1 and "bad batch" in leaving.reason


def test_a_frozen_ranks_own_fault_is_reported_and_starts_no_clock() -> None:
    """Its controller has answered already: it is there."""
    rank = ProcessorBench()
    rank.freeze()
    rank.take(ERROR)
    assert rank.said(FaultReport)
    assert not only(rank.tick(after=60.0), ExitProcess)


def test_a_second_fault_does_not_make_the_wait_for_an_answer_longer() -> None:
    rank = ProcessorBench()
    rank.take(ERROR)
    rank.tick(after=10.0)
    rank.take(LocalFault(Cause(CauseKind.EXCEPTION, (1,), "another"), ""))
    (leaving,) = only(rank.tick(after=5.1), ExitProcess)
    assert "bad batch" in leaving.reason, "the first one is the cause"


def test_a_false_alarm_is_an_answer_to_no_later_fault() -> None:
    rank = ProcessorBench()
    rank.freeze(1)
    rank.receive(Thaw(1))
    rank.take(ERROR)
    assert not only(rank.tick(after=14.9), ExitProcess)
    assert only(rank.tick(after=0.2), ExitProcess)


def test_a_frozen_rank_that_is_found_again_waits_on() -> None:
    rank = ProcessorBench()
    rank.freeze()
    rank.take(Disconnected("reset"))
    rank.tick(after=10.0)
    rank.take(Connected(registration(1)))
    assert not only(rank.tick(after=60.0), ExitProcess)


def test_training_returns_once() -> None:
    rank = ProcessorBench()
    rank.take(TrainReturned())
    assert rank.said(Finished)
    with pytest.raises(ProtocolError, match="returned twice"):
        rank.take(TrainReturned())


def test_a_rank_that_leaves_sends_no_heartbeats_any_more() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.receive(Exit(75, "saved"))
    assert rank.tick(after=5.0) == () and rank.state.heartbeat_at > rank.now


# --- another controller ---


def test_a_new_controller_is_introduced_and_the_first_is_not() -> None:
    """With what remains behind it."""
    rank = ProcessorBench()
    rank.state = initial(ProcessorSettings(1, address="c0"), 0.0)
    rank.tick()
    rank.take(Connected(registration(1)))
    assert not logged(rank), "the first controller, before any standby is known"
    rank.receive(Welcome(1, 1, 1.0, 3.0, "any 1 of 4 ranks", ("c1", "c2"), 2))
    assert not logged(rank)
    for place, behind in ((1, "1 standby controller"), (2, "no standby controller")):
        rank.take(Disconnected("refused", refused=True))
        rank.tick()
        rank.take(Connected(registration(1)))
        assert logged(rank) == [f"attached to the controller at c{place}"]
        rank.receive(Welcome(1, 1 + place, 1.0, 3.0, "any 1 of 4 ranks", ("c1", "c2"), 2))
        (line,) = logged(rank)
        assert line.startswith(f"controller of term {1 + place}; the job survives any 1 of 4 ranks; behind it {behind}")
        rank.receive(Welcome(1, 1 + place, 1.0, 3.0, "", ("c1", "c2"), 2))
        assert not logged(rank), "it is known"


def test_a_controller_before_two_standbys_is_introduced_with_their_number() -> None:
    rank = ProcessorBench()
    rank.receive(Welcome(1, 1, 1.0, 3.0, "", ("c1", "c2")))
    rank.receive(Welcome(1, 2, 1.0, 3.0, "", ()))
    assert logged(rank) == ["controller of term 2; behind it 2 standby controllers"]


def test_a_controller_that_fell_silent_is_said_to_have() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.tick(after=1.0)
    rank.tick(after=1.0)
    rank.tick(after=1.1)
    assert "nothing received from the controller for 3 s" in logged(rank)
    assert not only(rank.effects, Connect), "it is the only one: there is a pause before it is tried again"
    assert rank.state.link is LinkState.DOWN and rank.state.lost_since == rank.now


def test_heartbeats_stop_with_the_stream_and_begin_again_with_the_welcome() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.tick()
    assert rank.said(Heartbeat)
    rank.take(Disconnected("reset"))
    rank.tick(after=1.0)
    assert not rank.said(Heartbeat) and only(rank.effects, Connect)
    rank.take(Connected(registration(1)))
    rank.tick(after=1.0)
    assert not rank.said(Heartbeat)
    rank.receive(WELCOME)
    rank.tick()
    assert rank.said(Heartbeat)


def test_a_new_stream_begins_a_new_lease() -> None:
    """However long it received nothing before."""
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.take(Disconnected("reset"))
    for _ in range(20):
        if only(rank.tick(after=1.0), Connect):
            rank.take(Disconnected("timed out"))
    back(rank)
    assert not only(rank.tick(after=0.5), Connect) and rank.state.link is LinkState.UP


def test_after_every_stream_the_pause_before_the_next_try_counts_anew() -> None:
    rank = ProcessorBench()
    rank.take(Disconnected("reset"), after=5.0)
    assert rank.deadline() == pytest.approx(5.2)
    assert not only(rank.tick(after=0.15), Connect) and only(rank.tick(after=0.1), Connect)
    assert not only(rank.tick(after=1.0), Connect), "it is being tried"


def test_the_last_of_two_welcomes_sets_the_pace() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    rank.receive(Welcome(1, 4, 0.5, 2.0, ""))
    rank.tick()
    assert rank.said(Heartbeat) and rank.deadline() == pytest.approx(0.5)
    rank.take(Tick(Phase.COMPUTE, 1), after=0.5)
    assert rank.said(Heartbeat) and (rank.state.lease_s, rank.state.term) == (2.0, 4)


def test_a_sign_of_life_prolongs_the_lease() -> None:
    rank = ProcessorBench()
    rank.receive(WELCOME)
    for _ in range(10):
        rank.tick(after=1.0)
        rank.receive(KeepAlive())
        assert rank.state.link is LinkState.UP
    rank.receive(Freeze(1, CAUSE), after=1.0)
    assert rank.state.received_s == rank.now
