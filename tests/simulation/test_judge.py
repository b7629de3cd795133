"""The rules by which a job is judged: what may cost a restart or a step, and what may not; each with a made-up job or a seed."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation import time_checks
from tests.simulation.checks import (
    _comes_and_goes,
    _has_published,
    _kept_apart,
    _outcome,
    _published_unled,
    _settled_by_the_replaced,
    false_refusal,
    unprotected,
    violations,
)
from tests.simulation.in_place import InPlace
from tests.simulation.scenario import build
from tests.simulation.training import even, ring
from tests.simulation.truth import Snapshot, controllers_faulted


def test_ranks_without_local_copies_cover_no_step_with_them() -> None:
    """Two ranks without a copy both report it as step -1: that does not count as a step that they have in common."""
    job = build(0, ring(3), faults=False).job
    reports = tuple(
        replace(job.ranks[rank].report(), closed=True, state_step=step, backup_step=-1)
        for rank, step in ((0, 1), (1, 0))
    )
    assert Snapshot("refused", 1.0, reports).newest(job, {0, 1}) == 0
    both = tuple(replace(report, backup_step=1) for report in reports)
    assert Snapshot("refused", 1.0, both).newest(job, {0, 1}) == 1


def test_a_refusal_apart_from_the_controller_that_leads_is_judged_only_where_there_is_no_other() -> None:
    """A standby refuses for the one rank that is cut off with it; later the first controller does, whose own ranks no longer cover."""
    scenario = build(1700113574)
    assert not violations(scenario)
    refusals = [snapshot for snapshot in scenario.job.snapshots if snapshot.verdict == "refused"]
    assert [refusal.apart for refusal in refusals] == [True, False]
    scenario.job.snapshots = [refusals[0]]
    (text,) = false_refusal(scenario.job)
    assert text.startswith("I9: step 2 was covered")


def test_a_silent_process_may_end_the_step_after_the_saved_one_and_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs again while the others regroup, which had all contributed to that step."""
    seed, saved = 1700466019, 2
    assert not violations(build(seed))
    monkeypatch.setattr(InPlace, "_decided", lambda self: iter((saved - 1,)))
    assert any(text.startswith("I17: rank 1 begins an update in generation 0") for text in violations(build(seed)))


def test_what_a_silent_rank_ended_does_not_count_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 6 and 7 are cut off with their node and end step 6; rank 0, silent as well, is replaced when step 5 is on disk."""
    seed = 1900017291
    assert not violations(build(seed))
    monkeypatch.setattr(InPlace, "is_silent", lambda self, process: False)
    assert violations(build(seed)) == ["I19: rank 0 is replaced, whose replica is not proven wrong"]


def test_a_lease_that_ends_just_as_the_controller_is_back_may_cost_a_restart() -> None:
    scenario = build(1900084362)
    assert not violations(scenario)
    (absence,) = scenario.job.controllers[0].absences
    scenario.job.controllers[0].absences = [(absence[0], absence[1] - scenario.job.slowest_s)]
    assert _outcome(scenario)[0].startswith("I7: a false alarm cost the job")


def test_a_rank_has_finished_with_the_process_that_trained() -> None:
    """Another one was started in its place for a recovery that did not take place, and gives up by itself."""
    scenario = build(1900219105)
    assert not violations(scenario)
    scenario.job.in_place.former.clear()
    assert _outcome(scenario) == ["I11: rank 1 had not finished"]


def test_a_step_that_a_silent_process_ended_alone_is_not_lost() -> None:
    """Rank 0 is stopped, and has the record of step 3 when it runs again: all others regroup at step 2 by then, and take step 3 next."""
    assert not violations(build(2000061507))


@pytest.mark.parametrize(
    ("vacant", "term", "reachable"), [(True, 1, False), (True, 2, True), (False, 1, True), (True, 3, True)]
)
def test_a_new_process_that_the_leading_controller_does_not_know_is_its_agents_to_end(
    vacant: bool, term: int, reachable: bool
) -> None:
    """It has come to the first controller, which is stopped then; the second says that it is over. Of seed 2000085941."""
    took_over = (1.0, SimpleNamespace(event="takeover_began"))
    job: Any = SimpleNamespace(
        times=SimpleNamespace(lease_s=0.6),
        strikes=[],
        controllers=[
            SimpleNamespace(term=1, journal=[]),
            SimpleNamespace(term=2, journal=[took_over]),
            SimpleNamespace(term=3, journal=[(3.0, took_over[1])]),
        ],
    )
    rank: Any = SimpleNamespace(
        rank=2,
        started=True,
        was_stopped=False,
        ended_s=4.0,
        state=SimpleNamespace(vacant=vacant, term=term),
        route=SimpleNamespace(slowest_s=0.0, rejects=False),
        boundary=SimpleNamespace(saving=False),
    )
    assert time_checks._reachable(job, rank, 2.0) is reachable


def test_the_stream_of_a_process_that_had_ended_before_it_was_replaced_is_a_leftover() -> None:
    """The controller leads the rank whose stream broke, and which comes back to it: its verdict is the job's."""
    assert not violations(build(2000335980))


@pytest.mark.parametrize(
    ("another_began_s", "away_s", "late"), [(6.8, 4.2, True), (5.0, 4.2, False), (6.8, 1.0, False)]
)
def test_a_controller_that_is_started_as_ranks_give_up_is_too_late(
    another_began_s: float, away_s: float, late: bool
) -> None:
    """Frozen ranks left after 3 s without a word of the one that led them: no other one was there in time. Of seed 2000607975."""
    job = build(1, even(4), faults=False).job
    led, another = (
        SimpleNamespace(
            place=place, began_s=began_s, dead=False, over="", journal=[], away_s=away, ranks_came=True, led_none=False
        )
        for place, began_s, away in ((0, 0.0, away_s), (job.first_standbys + 1, another_began_s, 0.0))
    )
    job.controllers[:] = [led, another]  # type: ignore[list-item]
    job.ranks[1].gave_up, job.ranks[1].ended_s = True, 6.7
    assert unprotected(job) is late


def test_frozen_ranks_that_gave_up_before_another_controller_came_are_not_held_against_it() -> None:
    scenario = build(2000607975)
    assert not violations(scenario)
    assert [rank.gave_up for rank in scenario.job.ranks] == [False, True, True, True]


@pytest.mark.parametrize(
    ("last_word_s", "led_none", "protects"), [(2.4, False, False), (1.9, False, True), (1.9, True, False)]
)
def test_a_controller_that_ended_with_the_processes_of_a_lost_node_protects_no_other_rank(
    last_word_s: float, led_none: bool, protects: bool
) -> None:
    """Rank 2's leads that process alone, and ends after 2 s. The first one leads the others, and is killed as it publishes: seed 4000009380.
    Just before that, it is known by whom was with the other one: seed 4200054303."""
    job = build(1, even(4), faults=False).job
    first = SimpleNamespace(
        place=0, began_s=0.0, dead=True, over="", journal=[(last_word_s, None)], away_s=0.0, ranks_came=True
    )
    other = SimpleNamespace(
        place=1,
        began_s=0.0,
        dead=False,
        over="refused",
        over_s=2.0,
        journal=[],
        away_s=0.0,
        ranks_came=False,
        led_none=led_none,
    )
    job.controllers[:] = [first, other]  # type: ignore[list-item]
    job.ranks[1].gave_up, job.ranks[1].ended_s = True, 5.4
    assert unprotected(job) is not protects


@pytest.mark.parametrize(
    ("kind", "struck_s", "excused"),
    [("node cut off", 0.12, True), ("node cut off", -0.5, False), ("exception", 0.12, False)],
)
def test_a_controller_that_receives_nothing_while_the_next_one_is_cut_off_may_refuse(
    kind: str, struck_s: float, excused: bool
) -> None:
    """The next one led the two ranks on its side, who left; the first takes all others for dead meanwhile. Of seed 4200011244."""
    job: Any = SimpleNamespace(
        times=SimpleNamespace(lease_s=0.6, freeze_timeout_s=3.0, progress_timeout_s=3.0),
        controllers=[
            SimpleNamespace(absences=[(0.225, 2.065)], leaps=[], ahead_s=0.0),
            SimpleNamespace(absences=[], leaps=[], ahead_s=0.0),
        ],
        journal=[(0.724, SimpleNamespace(event="takeover_began"))],
        strikes=[SimpleNamespace(kind=kind, at_s=struck_s)],
    )
    assert _kept_apart(job, 2.066) is excused


@pytest.mark.parametrize(("behind_s", "excused"), [(0.9, True), (0.5, False), (0.0, False)])
def test_a_controller_whose_clock_is_behind_for_a_lease_as_a_node_is_cut_off_keeps_ranks_apart(
    behind_s: float, excused: bool
) -> None:
    """Some of its ranks leave it for the next one, which decides without the others. Of seed 4500299707."""
    job: Any = SimpleNamespace(
        times=SimpleNamespace(lease_s=0.6, freeze_timeout_s=3.0, progress_timeout_s=3.0),
        controllers=[SimpleNamespace(absences=[], leaps=[(0.293, 0.293 + behind_s)], ahead_s=-behind_s)],
        journal=[(1.068, SimpleNamespace(event="takeover_began"))],
        strikes=[SimpleNamespace(kind="node cut off", at_s=0.51 if behind_s else 0.2)],
    )
    assert _kept_apart(job, 1.738) is excused


@pytest.mark.parametrize(
    ("killed_s", "away_s", "excused"), [(4.81, 5.28, True), (4.70, 5.28, False), (5.4, 5.28, True), (4.81, 2.9, False)]
)
def test_a_controller_that_goes_away_as_it_gathers_the_ranks_of_a_lost_one_may_cost_a_restart(
    killed_s: float, away_s: float, excused: bool
) -> None:
    """It has not met all of them, and no other controller leads. Of seed 4800099500."""
    job: Any = SimpleNamespace(
        times=SimpleNamespace(lease_s=0.6, orphan_timeout_s=3.0),
        controllers=[
            SimpleNamespace(absences=[], leaps=[], killed_s=killed_s),
            SimpleNamespace(absences=[(5.355, 5.355 + away_s)], leaps=[], killed_s=float("inf")),
        ],
        journal=[(9.546, SimpleNamespace(event="refused"))],
        strikes=[],
    )
    assert _comes_and_goes(job) is excused


@pytest.mark.parametrize(
    ("dead", "over", "published", "excused"),
    [
        (True, "", [("/a", 2)], True), (True, "", [("/a", 1)], False), (True, "", [], False),
        (False, "", [("/a", 2)], False), (False, "step 2 is saved in /a", [("/a", 2)], True), (False, "step 2 is saved in /a", [], False),
    ],
)  # fmt: skip
def test_a_publisher_whose_controller_has_died_may_publish_without_a_word(
    dead: bool, over: str, published: list[tuple[str, int]], excused: bool
) -> None:
    """Its messages do not arrive until it gives up, and no other rank lives. Of seeds 5000048054 and 5000288204."""
    decided = SimpleNamespace(event="decided", fields={"step": 2})
    job: Any = SimpleNamespace(
        controller=SimpleNamespace(dead=dead, place=0, journal=[], over=over),
        journal=[(2.2, decided)],
        disk=SimpleNamespace(published=published),
    )
    assert _published_unled(job) is excused


@pytest.mark.parametrize(("alive", "kind"), [(True, "silent"), (False, "silent"), (True, "exited")])
def test_a_lost_nodes_process_may_train_on_while_the_others_regroup(alive: bool, kind: str) -> None:
    """Another one has its place, and is not meant. Of seed 4250003833."""
    death = SimpleNamespace(event="death_seen", fields={"rank": 0, "kind": kind, "pid": 100})
    former: Any = SimpleNamespace(rank=0, pid=100, alive=alive)
    in_place = InPlace.__new__(InPlace)
    in_place.job = SimpleNamespace(journal=[(1.0, death)], ranks=[SimpleNamespace(rank=0, pid=10100)])  # type: ignore[assignment]
    in_place.former = [former]
    assert in_place.trains_on(0) is (former if alive and kind == "silent" else None)


@pytest.mark.parametrize(
    ("reason", "stopped_s", "late"),
    [("superseded by c2", 5.51, False), ("superseded by c2", 5.4, True), ("asked to end", 5.51, True)],
)
def test_a_rank_whose_controller_is_superseded_as_the_job_ends_may_leave_later(
    monkeypatch: pytest.MonkeyPatch, reason: str, stopped_s: float, late: bool
) -> None:
    """The other one has saved the step and sent its own ranks away. Of seed 4400212978."""
    monkeypatch.setattr(time_checks, "controllers_faulted", lambda *_: False)
    monkeypatch.setattr(time_checks, "_reachable", lambda *_: True)
    stopped = SimpleNamespace(event="stopped", fields={"reason": reason})
    job: Any = SimpleNamespace(
        times=SimpleNamespace(lease_s=0.6), controllers=[], journal=[(stopped_s, stopped)],
        ranks=[SimpleNamespace(rank=1, started_s=0.1, ended_s=8.53)],
    )  # fmt: skip
    assert bool(time_checks._left_late(job, 5.49)) is late


@pytest.mark.parametrize(
    ("said_s", "verdict_s", "excused"),
    [(2.26, 2.43, True), (2.26, 3.5, False), (1.9, 2.43, False), (2.31, 2.43, False)],
)
def test_the_last_word_of_a_controller_that_was_superseded_then_may_be_lost(
    said_s: float, verdict_s: float, excused: bool
) -> None:
    """Its rank waits for another one, and the one that superseded it does not know it. Of seed 5000307464."""
    job: Any = SimpleNamespace(times=SimpleNamespace(heartbeat_s=0.2))
    controller: Any = SimpleNamespace(
        journal=[
            (said_s, SimpleNamespace(event="exit_sent")),
            (2.3, SimpleNamespace(event="stopped", fields={"reason": "superseded by c1"})),
        ]
    )
    assert time_checks._superseded_as_it_ended(job, controller, verdict_s) is excused


def test_a_process_that_was_to_get_its_state_may_be_replaced_anew() -> None:
    """Rank 2's came to the first controller, which is superseded before it got its state; the next one does not know what it waits for."""
    assert not violations(build(4000177786))


def test_ranks_that_did_not_come_to_a_new_controller_were_silent() -> None:
    """It does not know which processes they are."""
    assert not violations(build(4000189666))


def test_a_newcomer_does_not_make_the_processes_of_a_lost_node_count() -> None:
    """Its controller leads rank 3's process there, in whose place another trains: its verdict is not the job's."""
    assert not violations(build(4000192728))


def test_a_silent_rank_that_came_to_a_controller_that_is_cut_off_with_it_is_silent_still() -> None:
    """Rank 4 has ended step 3, and is with rank 5's controller: the first one, which leads the others, saves step 2 and replaces both."""
    assert not violations(build(4000265160))


def test_a_job_of_which_all_have_trained_to_the_end_is_over_whoever_is_killed_then() -> None:
    """Ranks 0 and 1 are, with the controller that knows it; ranks 2 and 3, which are cut off, leave by themselves. Had one not returned, it would be lost."""
    scenario = build(4100067386)
    assert not violations(scenario)
    for controller in scenario.job.controllers:
        controller.journal = [(at, line) for at, line in controller.journal if line.event != "rank_finished"]
    assert _outcome(scenario) == ["I9: neither published nor refused nor finished: "]


@pytest.mark.parametrize(("leap_s", "by_s", "away"), [(-1.7, 1.5, True), (-1.7, 1.8, False), (1.7, 1.5, False)])
def test_a_controller_is_away_until_a_clock_that_leapt_back_has_caught_up(
    leap_s: float, by_s: float, away: bool
) -> None:
    """It sends nothing meanwhile, and its ranks leave it: rank 1's order to exit was lost with its stream. Of seed 4500037996."""
    job = build(1, even(4), faults=False).job
    job.scheduler.now = 0.0
    job.controllers[0].jump(leap_s)
    assert controllers_faulted(job, by_s, 3.0) is away


@pytest.mark.parametrize(
    ("empty", "led_none", "over", "excused"),
    [
        (True, True, "step 1 is saved in /a/iter_0000001", True),
        (False, True, "step 1 is saved in /a/iter_0000001", False),
        (True, False, "step 1 is saved in /a/iter_0000001", False),
        (
            True,
            True,
            "no dying-gasp checkpoint: no live rank can write",
            True,
        ),  # those that were replaced do not cover: seed 4700437559
        (True, False, "no dying-gasp checkpoint: no live rank can write", False),
        (True, True, "", False),
        (True, False, "no dying-gasp checkpoint: all ranks are dead; the job goes on from /a/iter_0000000", True),
        (False, False, "no dying-gasp checkpoint: all ranks are dead; the job goes on from /a/iter_0000000", False),
    ],
)
def test_processes_in_whose_places_others_are_may_save_or_die_where_none_that_counts_has_any_state(
    empty: bool, led_none: bool, over: str, excused: bool
) -> None:
    """Ranks 0 and 1 are lost with their node as they replace the other two, which had been cut off. Of seeds 4500020783 and 4700223056."""
    ranks = [SimpleNamespace(rank=rank, state=SimpleNamespace(vacant=rank == 2 or empty)) for rank in (1, 2, 3)]
    job: Any = SimpleNamespace(
        ranks=ranks, killed={1: 2.5}, controllers=[SimpleNamespace(led_none=led_none, over=over)]
    )
    assert _settled_by_the_replaced(job) is excused


@pytest.mark.parametrize(
    "seed",
    [
        4500020783,
        4500037996,
        4500240781,
        4500299707,
        4700223056,
        4700437559,
        4700618853,
        4700807795,
        4700968544,
        4800099500,
        5000048054,
        5000288204,
        5000307464,
        5000779737,
        5000924261,
    ],
)
def test_a_job_that_was_judged_wrongly_is_not_any_more(seed: int) -> None:
    """A change of the simulation makes it another job: then the tests of the rules remain."""
    assert not violations(build(seed))


@pytest.mark.parametrize(
    ("killed_s", "ordered", "on_disk", "nothing_lost"),
    [(2.0, 3, [("/a", 3)], True), (2.0, 3, [], False), (2.0, 2, [("/a", 2)], False), (inf, 3, [("/a", 3)], False)],
    ids=["published", "not on disk", "an older step", "its controller lives"],
)
def test_a_refused_step_that_a_lost_controllers_publisher_has_put_on_disk_is_not_lost(
    killed_s: float, ordered: int, on_disk: list[tuple[str, int]], nothing_lost: bool
) -> None:
    """Of seed 5000924261."""
    journal = [(1.9, SimpleNamespace(event="publish_sent", fields={"step": ordered}))]
    controllers = [SimpleNamespace(killed_s=killed_s, journal=journal)]
    job: Any = SimpleNamespace(controllers=controllers, disk=SimpleNamespace(published=on_disk))
    assert _has_published(job, 3, 2.1) is nothing_lost


def test_a_clock_that_leaps_twice_is_behind_by_both() -> None:
    controller = build(1, even(4), faults=False).job.controllers[0]
    scheduler = controller.job.scheduler
    for scheduler.now, leap_s in ((0.0, -1.0), (0.5, -1.0), (1.0, 1.7)):
        controller.jump(leap_s)
    assert controller.leaps == [(0.0, 0.5), (0.5, 1.0), (1.0, 1.0)]
    controller.jump(-1.0)
    assert controller.leaps[-1] == (1.0, 2.0)
