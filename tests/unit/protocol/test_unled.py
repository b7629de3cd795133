"""A rank whose job has lost every controller: what it contributes, and how its notice ends without one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.protocol.bench import ProcessorBench, only, registration
from ttp.processor.core.events import (
    BoundaryReached,
    Connect,
    Connected,
    Disconnected,
    Effect,
    ExitProcess,
    LeaveBoundary,
    LocalFault,
    LookForControllers,
    Noticed,
    ProcessorSettings,
    Received,
    ReportUnled,
    SavedAlone,
    SavesAlone,
    Send,
    StartController,
)
from ttp.proto.frozen import replace
from ttp.proto.messages import (
    EXIT_CODE_PERSISTED,
    EXIT_CODE_PREEMPTED,
    Cause,
    CauseKind,
    Exit,
    Freeze,
    Welcome,
)

LEASE_S = 3.0
ALONE_S = ProcessorSettings(0).alone_s


def attached(saves_alone: bool = True, standbys: tuple[str, ...] = ()) -> ProcessorBench:
    """A rank that a controller leads."""
    rank = ProcessorBench(1)
    rank.state = replace(rank.state, settings=replace(rank.state.settings, saves_alone=saves_alone))
    rank.receive(Welcome(1, 3, 1.0, LEASE_S, "any 1 of 4 ranks", standbys))
    return rank


def some(items: tuple[Effect, ...], *kinds: type[Any]) -> list[Any]:
    return [item for item in items if isinstance(item, kinds)]


def reports(effects: tuple[Effect, ...]) -> list[bool]:
    return [effect.unled for effect in only(effects, ReportUnled)]


def refuse(rank: ProcessorBench) -> tuple[Effect, ...]:
    """The stream breaks, and each address of the list refuses the rank; then a tick."""
    effects = list(rank.take(Disconnected("connection reset")))
    for _ in range(1 + len(rank.state.successors)):
        effects += rank.wait(0.3)
        effects += rank.take(Disconnected("connection refused", refused=True))
    return (*effects, *rank.tick())


@pytest.mark.parametrize("standbys", [(), ("c1", "c2")])
def test_a_rank_that_every_controller_refused_contributes_it(standbys: tuple[str, ...]) -> None:
    """At once, and only then: each address of the list is tried."""
    assert reports(refuse(attached(standbys=standbys))) == [True]


def test_a_refusal_of_some_controllers_does_not_count_as_the_loss_of_all() -> None:
    rank = attached(standbys=("c1", "c2"))
    rank.take(Disconnected("connection reset"))
    rank.wait(0.3)
    rank.take(Disconnected("connection refused", refused=True))
    assert not reports(rank.tick())


def test_a_controller_that_is_silent_is_lost_after_two_leases() -> None:
    rank = attached()
    rank.take(Disconnected("connection reset"))
    assert not reports(rank.wait(2 * LEASE_S - 0.2))
    assert reports(rank.wait(0.4)) == [True]
    assert not reports(rank.wait(5.0)), "it is contributed once"


def test_a_rank_with_a_controller_contributes_that_again() -> None:
    rank = attached()
    refuse(rank)
    assert reports(rank.take(Connected(registration(1)))) == [False]
    assert not reports(rank.wait(1.0))


def test_ranks_that_cannot_save_together_contribute_nothing() -> None:
    rank = attached(saves_alone=False)
    assert not reports((*refuse(rank), *rank.wait(10.0)))


def test_before_the_first_welcome_no_controller_is_lost() -> None:
    rank = attached()
    rank.state = replace(rank.state, term=-1)
    assert not reports(refuse(rank))


def test_a_training_thread_that_waits_behind_a_step_goes_on_when_every_controller_is_lost() -> None:
    """Once, and with its notice: the next step's collective counts both."""
    rank = attached()
    rank.take(Noticed("SIGTERM"))
    rank.take(BoundaryReached(7))
    assert len(only(refuse(rank), LeaveBoundary)) == 1
    assert not some(rank.wait(30.0), LeaveBoundary, ExitProcess)
    rank.take(BoundaryReached(8))
    assert len(only(rank.tick(), LeaveBoundary)) == 1


def test_what_is_frozen_stays_behind_its_gate() -> None:
    """A report may have been given: only a controller opens the gate."""
    rank = attached()
    rank.take(BoundaryReached(7))
    rank.freeze()
    effects = (*refuse(rank), *rank.wait(30.0))
    assert not only(effects, LeaveBoundary)
    assert [effect.code for effect in only(effects, ExitProcess)] == [75]


def test_a_preempted_rank_goes_on_to_the_step_that_all_save() -> None:
    """Longer than it waits for a controller; one with a fault besides gives up as ever."""
    for fault, exits in ((False, 0), (True, 1)):
        rank = attached()
        rank.take(Noticed("SIGTERM"))
        refuse(rank)
        if fault:
            rank.take(LocalFault(Cause(CauseKind.PEER_ERROR, (1,), "connection closed by peer"), ""))
        assert len(only(rank.wait(60.0), ExitProcess)) == exits


def test_a_step_that_hangs_is_not_waited_for_for_ever() -> None:
    """Where no controller finds hangs: other ranks may be stopped."""
    rank = attached()
    rank.take(Noticed("SIGTERM"))
    refuse(rank)
    effects = rank.wait(rank.state.settings.boundary_s + 0.1)
    assert not only(effects, ExitProcess) and rank.state.faults, "the notice is reported, but no controller receives it"
    assert not only(rank.wait(ALONE_S - 1.0), ExitProcess)
    (leaving,) = only(rank.wait(2.0), ExitProcess)
    assert leaving.code == 1
    assert (
        leaving.reason == f"after SIGTERM, the step that is saved without a controller did not end within {ALONE_S:g} s"
    )


def test_a_save_that_hangs_is_not_waited_for_for_ever() -> None:
    """It has its whole time, whenever the controller was lost; of one that leads the rank since, too."""
    for led in (False, True):
        rank = saving() if not led else attached()
        if led:
            rank.take(SavesAlone(8))
        assert not only(rank.wait(ALONE_S - 1.0), ExitProcess)
        (leaving,) = only(rank.wait(2.0), ExitProcess)
        assert (leaving.code, leaving.reason) == (1, f"the save without a controller did not end within {ALONE_S:g} s")


def saving() -> ProcessorBench:
    rank = attached()
    rank.take(Noticed("SIGTERM"))
    refuse(rank)
    rank.take(SavesAlone(8))
    return rank


def test_a_rank_that_saves_alone_turns_to_no_controller() -> None:
    """Nor does it start or look for one, register with one that answers late, or give up."""
    rank = saving()
    asked = (Connect, LookForControllers, StartController, ExitProcess)
    assert not some(rank.wait(60.0), *asked)
    rank.take(Connected(registration(1)))
    assert not only(rank.effects, Send) and not some(rank.wait(5.0), Send, *asked)


@pytest.mark.parametrize(
    "message", [Exit(EXIT_CODE_PERSISTED, "refused"), Freeze(9, Cause(CauseKind.EXITED, (0,), "exited"))]
)
def test_a_rank_that_saves_alone_obeys_no_controller(message: Any) -> None:
    """One that came back before the save began, and leads this rank since."""
    rank = attached()
    rank.take(SavesAlone(8))
    assert rank.take(Received(message)) == ()
    assert not some(rank.wait(30.0), Send, ExitProcess)


@pytest.mark.parametrize(("notice", "code"), [(True, EXIT_CODE_PREEMPTED), (False, EXIT_CODE_PERSISTED)])
def test_a_rank_exits_after_the_save_with_the_status_of_one_that_was_led(notice: bool, code: int) -> None:
    rank = attached()
    if notice:
        rank.take(Noticed("SIGTERM"))
    rank.take(SavesAlone(8))
    (leaving,) = only(rank.take(SavedAlone(8, "/a/iter_0000008")), ExitProcess)
    assert leaving.code == code and leaving.reason == "step 8 was saved without a controller: /a/iter_0000008"


@pytest.mark.parametrize("led", [True, False])
def test_a_notice_in_the_save_changes_its_exit_status_alone(led: bool) -> None:
    """Another rank's notice was the first. A controller that leads this rank since receives none, and no time for a step begins."""
    rank = attached()
    if not led:
        refuse(rank)
    rank.take(SavesAlone(8))
    assert rank.take(Noticed("SIGTERM")) == () == rank.take(Noticed("SIGTERM"))
    assert not some(rank.wait(rank.state.settings.boundary_s + 1.0), Send, LocalFault, ExitProcess)
    (leaving,) = only(rank.take(SavedAlone(8, "/a/iter_0000008")), ExitProcess)
    assert leaving.code == EXIT_CODE_PREEMPTED


def test_a_rank_whose_save_failed_does_not_exit_as_if_it_had_not() -> None:
    (leaving,) = only(saving().take(SavedAlone(8, "", "no space left on device")), ExitProcess)
    assert leaving.code == 1 and "step 8 could not be saved without a controller: no space left" in leaving.reason
