"""Where a job's time went: each moment is in one part, the parts are the whole, and what is not known is said."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.launch.journals import journal
from tests.unit.status.jobs import BEGAN, Event, comes, incident
from ttp.exchange.time_marks import SAVED, STEPPED, Mark
from ttp.launch.report.time_use import (
    FALSE_ALARM,
    FAULT,
    IN_PLACE,
    PARTS,
    AttemptTime,
    Loss,
    Pause,
    TimeUse,
    attempt_fields,
    attempt_time,
    read_attempt,
    time_use,
    use_text,
    with_fault,
    with_repeats,
)

STAGES = {"seen": 100.0, "frozen": 200.0, "decided": 50.0, "written": 500.0, "published": 150.0}


def pause(kind: str, began: float, ended: float, stepped: float | None = None, **took_ms: float) -> Pause:
    return Pause(kind=kind, began_unix_s=began, ended_unix_s=ended, took_ms=took_ms, stepped_unix_s=stepped)


def attempt(number: int, begun: float, *pauses: Pause, **more: Any) -> AttemptTime:
    """One of 4 ranks, which come within a second, and whose first step takes another two."""
    known = {"world_size": 4, "assembled_unix_s": begun + 1, "stepped_unix_s": begun + 3, **more}
    return AttemptTime(number=number, begun_unix_s=begun, pauses=pauses, **known)


def used(use: TimeUse | None, *, ranks: int = 4) -> dict[str, Any]:
    """Return the parts that are not 0, in seconds of all ranks; they are the whole."""
    assert use is not None and use.ranks == ranks and tuple(use.rank_s) == PARTS
    assert sum(use.rank_s.values()) == pytest.approx(use.ranks * use.whole_s)
    return {part: pytest.approx(rank_s / ranks) for part, rank_s in use.rank_s.items() if abs(rank_s) > 1e-9}


def test_a_job_without_a_fault_is_its_start_its_steps_its_saves_and_its_end() -> None:
    calm = attempt(0, 0.0, ended_unix_s=93.0, saves=3, saves_s=6.0)
    use = time_use([calm], 100.0)
    assert used(use) == {"start": 3.0, "steps": 84.0, "saves": 6.0, "end": 7.0}
    assert use is not None and use.goodput == pytest.approx(0.84)


def test_a_fault_and_its_restart_last_until_the_next_finished_step() -> None:
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 51.0, **STAGES))
    use = time_use([killed, attempt(1, 58.0, ended_unix_s=100.0)], 100.0, losses={0: Loss(steps=0)})
    parts = {"detect": 0.1, "decide": 0.25, "dump": 0.65, "restart": 10.0}
    assert used(use) == {"start": 3.0, "steps": 86.0, **parts}


def test_a_recovery_in_place_lasts_until_the_next_finished_step_and_a_false_alarm_until_the_gates_open() -> None:
    regrouped = pause(IN_PLACE, 40.0, 42.0, 42.5, seen=100.0, frozen=200.0, regrouped=1700.0)
    both = attempt(0, 0.0, pause(FALSE_ALARM, 20.0, 21.0), regrouped, ended_unix_s=100.0)
    parts = {"detect": 0.1, "decide": 0.2, "regroup": 1.7, "restart": 0.5, "false_alarms": 1.0}
    assert used(time_use([both], 100.0)) == {"start": 3.0, "steps": 93.5, **parts}


def test_what_no_stage_explains_is_deciding() -> None:
    """The fault's total is more than its stages: the ranks were waited for."""
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 52.0, seen=500.0))
    assert used(time_use([killed], 60.0)) == {"start": 3.0, "steps": 47.0, "detect": 0.5, "decide": 1.5, "end": 8.0}
    longer = attempt(0, 0.0, pause(FAULT, 50.0, 52.0, seen=500.0, written=60_000.0))
    assert used(time_use([longer], 60.0)) == {"start": 3.0, "steps": 47.0, "detect": 0.5, "dump": 1.5, "end": 8.0}
    assert used(time_use([killed], 60.0, over=False))["restart"] == pytest.approx(8.0), "the next attempt is awaited"


def test_without_a_mark_a_start_ends_when_all_ranks_are_registered() -> None:
    unmarked = [attempt(0, 0.0, pause(FAULT, 50.0, 51.0), stepped_unix_s=None), attempt(1, 60.0, stepped_unix_s=None)]
    assert used(time_use(unmarked, 100.0)) == {"start": 1.0, "steps": 49.0 + 39.0, "decide": 1.0, "restart": 10.0}
    never = attempt(0, 0.0, stepped_unix_s=None, assembled_unix_s=None)
    assert used(time_use([never], 9.0)) == {"start": 9.0}


def test_a_fault_before_the_first_step_is_part_of_no_step() -> None:
    early = attempt(0, 0.0, pause(FAULT, 2.0, 2.5, frozen=500.0), stepped_unix_s=None)
    use = time_use([early, attempt(1, 4.0, ended_unix_s=50.0)], 50.0)
    assert used(use) == {"start": 1.0, "steps": 44.0, "decide": 0.5, "restart": 4.5}


def test_steps_that_are_trained_again_take_a_steps_time_each_but_for_the_first() -> None:
    """The first one's time is the restart's. The second attempt finished 90 steps in 45 s after its first."""
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 51.0))
    again = attempt(1, 52.0, first_step=11, last_step=101, ended_unix_s=100.0)
    use = time_use([killed, again], 100.0, losses={0: Loss(steps=9)})
    assert used(use) == {"start": 3.0, "steps": 47.0 + 45.0 - 4.0, "repeated": 4.0, "decide": 1.0, "restart": 4.0}
    assert use is not None and use.steps_again == 9 and use.goodput == pytest.approx(0.88)
    assert time_use([killed, again], 100.0, losses={0: Loss(steps=9)}, step_s=1.0).rank_s["repeated"] == 32.0  # type: ignore[union-attr]
    more = with_repeats({0: Loss(steps=9)}, {1: 2, 3: 5})
    assert more == {0: Loss(steps=11), 2: Loss(steps=5)}
    assert with_repeats({0: Loss(steps=None)}, {1: 2}) == {0: Loss(steps=None)}


@pytest.mark.parametrize("lost", [Loss(steps=None), Loss(steps=9)], ids=["how many", "how long"])
def test_where_steps_were_trained_again_for_an_unknown_time_the_share_is_a_bound(lost: Loss) -> None:
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 51.0))
    use = time_use([killed, attempt(1, 52.0, ended_unix_s=100.0)], 100.0, losses={0: lost})
    assert use is not None and use.goodput is None and use.share == pytest.approx(0.92)
    assert use_text(use).startswith("at most 92.0 % of 100.0 s x 4 ranks went into new steps; ")


def test_of_the_last_fault_no_step_was_trained_again_so_far() -> None:
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 51.0))
    use = time_use([killed], 60.0, losses={0: Loss(steps=None)})
    assert use is not None and use.goodput == pytest.approx(47 / 60)


def test_an_attempt_with_fewer_ranks_is_short_of_the_others_time() -> None:
    """Lost time is counted in rank-seconds: a node that is not replaced costs its ranks' time until the end."""
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 51.0))
    fewer = attempt(1, 51.0, world_size=3, ended_unix_s=100.0)
    parts = used(time_use([killed, fewer], 100.0))
    assert parts == {
        "start": 3.0,
        "steps": 47.0 + 46.0 * 3 / 4,
        "decide": 1.0,
        "restart": 3.0 * 3 / 4,
        "absent": 49.0 / 4,
    }


def test_what_an_attempt_that_is_not_known_here_did_is_not_known() -> None:
    """Another node's agent was to report attempt 1."""
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 51.0))
    use = time_use([killed, attempt(2, 80.0, ended_unix_s=100.0)], 100.0)
    assert used(use) == {"start": 3.0, "steps": 47.0 + 17.0, "decide": 1.0, "unknown": 29.0, "restart": 3.0}


def test_a_fault_that_is_handled_now_costs_its_time() -> None:
    running = attempt(0, 0.0)
    assert used(time_use([running], 60.0, fault_s=7.0, over=False)) == {"start": 3.0, "steps": 50.0, "now": 7.0}


@pytest.mark.parametrize(
    "attempts", [[], [attempt(1, 0.0)], [attempt(0, 100.0)]], ids=["none", "not the first", "later"]
)
def test_without_the_jobs_beginning_nothing_is_said(attempts: list[AttemptTime]) -> None:
    assert time_use(attempts, 100.0) is None


def test_the_parts_are_the_whole_whatever_the_moments() -> None:
    """Clocks of several nodes, and times that files of a broken disk may have."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def moment() -> float:
        return rng.choice((rng.uniform(-50, 400), float(rng.randrange(300))))

    for _ in range(400):
        attempts = []
        for number in range(rng.randrange(1, 5)):
            kinds = [rng.choice((IN_PLACE, FALSE_ALARM)) for _ in range(rng.randrange(3))] + [FAULT] * (
                rng.random() < 0.6
            )
            stages = {name: rng.uniform(0, 30_000) for name in STAGES if rng.random() < 0.7}
            pauses = [pause(kind, moment(), moment(), rng.choice((None, moment())), **stages) for kind in kinds]
            known: dict[str, Any] = {
                name: rng.choice((None, moment())) for name in ("assembled_unix_s", "stepped_unix_s", "ended_unix_s")
            }
            sizes: dict[str, Any] = {
                "world_size": rng.randrange(5),
                "saves_s": rng.uniform(0, 90),
                "first_step": rng.randrange(9),
            }
            begun = float(number and moment())
            attempts.append(
                AttemptTime(
                    number=number, begun_unix_s=begun, pauses=tuple(pauses), last_step=rng.randrange(60), **known, **sizes
                )
            )  # fmt: skip
        kept = [each for each in attempts if each.number == 0 or rng.random() < 0.8]
        losses = {each.number: Loss(steps=rng.choice((None, 0, 7)), kept_step=rng.choice((None, 3))) for each in kept}
        use = time_use(kept, 300.0, losses=losses, fault_s=rng.choice((0.0, 20.0)), over=rng.random() < 0.5)
        assert use is not None
        used(use, ranks=use.ranks)
        assert all(rank_s >= -1e-6 for rank_s in use.rank_s.values()), use.rank_s
        assert read_attempt(json.loads(json.dumps(attempt_fields(kept[-1])))) == kept[-1]


# --- an attempt, by its journal ---


def lines_of(*events: Event) -> list[dict[str, Any]]:
    lines = [
        {"unix_s": BEGAN + seconds, "event": event, "fields": fields, "controller": 0}
        for seconds, event, fields in events
    ]
    return list(lines)


def test_an_attempts_moments_are_in_its_journal_and_rank_0s_marks() -> None:
    events = (
        *comes(0.0),
        (3.0, "freeze_sent", {"freeze_id": 1}),
        (4.5, "thawed", {"freeze_id": 1}),
        (6.0, "freeze_sent", {"freeze_id": 2}),
        incident(8.0, 2.0, 20, in_place=True),
        incident(30.0, 1.0, 40),
        (31.0, "freeze_sent", {"freeze_id": 4}),
        incident(32.0, 0.5, None),
    )
    marks = [
        Mark(BEGAN + 2.0, STEPPED, 1),
        Mark(BEGAN + 5.5, SAVED, 9, 0.75),
        Mark(BEGAN + 9.0, STEPPED, 21),
        Mark(BEGAN + 20.0, SAVED, 30, 0.5),
    ]
    found = attempt_time(0, lines_of(*events), marks, BEGAN)
    assert (found.world_size, found.assembled_unix_s, found.stepped_unix_s) == (2, BEGAN + 1.0, BEGAN + 2.0)
    assert (found.first_step, found.last_step, found.saves, found.saves_s) == (1, 30, 2, 1.25)
    assert [(each.kind, each.began_unix_s - BEGAN, each.ended_unix_s - BEGAN) for each in found.pauses] == [
        (FALSE_ALARM, 3.0, 4.5), (IN_PLACE, 6.0, 8.0), (FAULT, 29.0, 30.0),
    ]  # fmt: skip
    assert found.pauses[1].stepped_unix_s == BEGAN + 9.0 and found.fault == found.pauses[2]
    sooner = with_fault(found, BEGAN + 28.5, {"seen": 1000.0, "total": 1500.0})
    assert sooner.fault == pause(FAULT, BEGAN + 28.5, BEGAN + 30.0, seen=1000.0) and len(sooner.pauses) == 3


def test_what_a_stopped_controller_takes_for_a_fault_after_the_end_is_none() -> None:
    found = attempt_time(
        0, lines_of(*comes(0.0), (9.0, "finished", {"ranks": 2}), incident(12.0, 1.0, None)), [], BEGAN
    )
    assert found.pauses == () and found.ended_unix_s == BEGAN + 9.0
    assert used(time_use([found], BEGAN + 12.0), ranks=2) == {"start": 1.0, "steps": 8.0, "end": 3.0}


def test_a_real_journals_fault_has_its_stages() -> None:
    found = attempt_time(0, journal("killed"), [], journal("killed")[0]["unix_s"])
    assert found.world_size == 4 and found.last_step == 7 and found.fault is not None
    use = time_use([found], found.fault.ended_unix_s + 5.0)
    parts = used(use)
    assert use is not None and parts["end"] == pytest.approx(5.0)
    assert 1e3 * use.rank_s["dump"] / 4 == pytest.approx(65.0 + 27.0, abs=1.0), "written and published"


def test_the_text_names_the_parts_with_their_share_and_time() -> None:
    killed = attempt(0, 0.0, pause(FAULT, 50.0, 51.0, seen=100.0, frozen=240.0, written=660.0))
    use = time_use([killed, attempt(1, 58.0, ended_unix_s=100.0)], 100.0)
    assert use is not None
    assert use_text(use) == (
        "86.0 % of 100.0 s x 4 ranks went into new steps; start 3.0 % (3.0 s), detecting faults 0.1 % (0.100 s), freezing and deciding 0.2 %"
        " (0.240 s), emergency checkpoints 0.7 % (0.660 s), restarts until the next step 10.0 % (10.0 s)"
    )
    assert use_text(replace(use, whole_s=7200.0)).split(" x ")[0] == "1.2 % of 120 min"
