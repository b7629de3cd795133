"""A fault that ended in place is judged from outside: a made-up run that is good, and the same run with one thing wrong at a time."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.chaos.test_judge import baseline, line, reported
from ttp.chaos.cli import main
from ttp.chaos.faults.inject import POINTS
from ttp.chaos.faults.scenario import FaultSpec, Moment, Scenario, parse_scenario
from ttp.chaos.matrix import IN_PLACE_EVENTS, NEWCOMER_POINTS, MatrixPlan, cells, ordered
from ttp.chaos.observed.recorder import Record, Recorder, Resumed, Seen
from ttp.chaos.report.result_json import result_of
from ttp.chaos.report.terminal import show_summary
from ttp.chaos.run.campaign import Campaign, JobRun
from ttp.chaos.verdict.fault_outcome import FaultOutcome, Firing, settle
from ttp.chaos.verdict.in_place import finding
from ttp.chaos.verdict.invariants import HELD, UNSEEN, VIOLATED, Run, judge

KEPT, LAST = 5, 8
KEY = (1, 0)


def good_record() -> Record:
    """Two ranks; rank 1 is killed after step 5, another process takes its place, and the job ends with step 8."""
    record = Record(world_size=2, save_dirs=["/c"])
    record.hellos = [(90.0, KEY, rank, 70 + rank) for rank in (0, 1)] + [(100.3, KEY, 1, 81)]
    record.steps = [reported(step, 90.0 + step, rank, 0) for step in range(1, KEPT + 1) for rank in (0, 1)]
    record.steps += [reported(step, 95.0 + step, rank, 0) for step in range(KEPT + 1, LAST + 1) for rank in (0, 1)]
    record.steps.append(reported(KEPT, 100.003, 0, 0))  # it was under way at the kill
    record.journal = [
        line("assembled", 91.0),
        line("death_seen", 100.004, rank=1),
        line("freeze_sent", 100.005),
        line("frozen", 100.02, records=(KEPT - 1, KEPT)),
        line("decided", 100.021),
        line("regroup_sent", 100.022, step=KEPT, replaced=[1]),
        line("replacement_came", 100.3, rank=1, pid=81),
        line("regrouped", 100.4, step=KEPT, replaced=[1]),
    ]
    record.newest_step = LAST
    return record


def made_run(change: Callable[[Record], None] = lambda record: None, kind: str = "kill", *, due: bool = True) -> Run:
    record = good_record()
    incident = FaultOutcome(1, 0, f"{kind} of rank 1", "", ("saved", "in_place"), in_place_due=due)
    incident.firings.append(Firing(kind, "rank 1 (pid 71)", 100.0, "", KEPT, KEY, (1,)))
    incident.over_unix_s = 105.5
    change(record)
    settle(incident, record, "")
    return Run(record, [incident], 0, (), (), baseline(), ())


def verdicts(run: Run) -> dict[str, tuple[str, str]]:
    return {verdict.name: (verdict.state, verdict.text) for verdict in judge(run)}


def test_a_recovery_in_place_holds_with_its_times() -> None:
    run = made_run()
    found = verdicts(run)
    assert {state for state, _ in found.values()} <= {HELD, UNSEEN}, found
    assert found["in place"][0] == found["I12 host state"][0] == HELD
    (incident,) = run.incidents
    assert (incident.outcome, incident.kept_step, incident.saved_step, incident.lost) == ("in_place", KEPT, None, 0)
    assert incident.as_expected and finding(incident) == ""
    stages = {stage: round(ms) for stage, ms in incident.stages_ms.items()}
    assert stages == {"seen": 4, "frozen": 20, "decided": 21, "regrouped": 400, "first_new_step": 1000}


def taken_over(record: Record) -> None:
    """The controller is killed as it opens the gates, and the next one thaws ranks that have all regrouped."""
    record.journal[-1:] = [line("freeze_sent", 100.6), line("took_over", 100.61), line("thawed", 100.62)]


def test_a_takeover_of_ranks_that_have_regrouped_is_a_recovery_in_place() -> None:
    (incident,) = (run := made_run(taken_over)).incidents
    assert (incident.outcome, incident.kept_step) == ("in_place", KEPT) and verdicts(run)["in place"][0] == HELD


def survivor_replaced(record: Record) -> None:
    record.hellos.append((100.35, KEY, 0, 82))


def none_came(record: Record) -> None:
    record.hellos.pop()


def publish_first(record: Record, step: int) -> None:
    """Before the ranks are ordered to regroup."""
    place = next(place for place, one in enumerate(record.journal) if one["event"] == "regroup_sent")
    unix_s = float(record.journal[place]["unix_s"]) - 1e-4
    record.journal.insert(place, line("published", unix_s, step=step, path=f"/c/iter_{step:07d}"))


def another_is_published(record: Record) -> None:
    publish_first(record, KEPT + 1)


def older(record: Record) -> None:
    record.journal[-1]["step"] = KEPT - 1


def skips_a_step(record: Record) -> None:
    record.steps = [one for one in record.steps if one.step != KEPT + 1]


def former_process_trains_on(record: Record) -> None:
    """Long after the fault is over; of its own steps before the gates opened none counts."""
    record.steps += [replace(reported(KEPT, unix_s, 1, 0), pid=71) for unix_s in (99.0, 100.39)]
    record.steps.append(replace(reported(LAST, 200.0, 1, 0), pid=71))
    record.steps.append(replace(reported(LAST, 200.0, 1, 0), pid=81))


def one_rank_only(record: Record) -> None:
    record.steps = [one for one in record.steps if one.rank == 0 or one.step <= KEPT]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (survivor_replaced, "rank 0 was not lost, and has process 82 in place of 70"),
        (none_came, "rank 1 was lost and has the process that it had, 71"),
        (another_is_published, "step 6 was published, and training continued after 5"),
        (older, "it went on after step 4, and step 5 had been finished"),
        (skips_a_step, "rank 0 went on with step 7, expected 6"),
        (former_process_trains_on, "process 71 finished step 8 after process 81 had taken its place as rank 1"),
        (one_rank_only, "rank 1 finished no step afterwards"),
    ],
)
def test_what_is_wrong_after_a_recovery_in_place_is_found(change: Callable[[Record], None], text: str) -> None:
    state, found = verdicts(made_run(change))["in place"]
    assert state == VIOLATED and f"kill of rank 1: {text}" in found
    assert found.count("process 71 finished") == (change is former_process_trains_on)


def test_the_step_may_be_published_first() -> None:
    """TTP_GASP=always."""

    def first(record: Record) -> None:
        publish_first(record, KEPT)

    assert verdicts(made_run(first))["in place"][0] == HELD


def test_a_rank_that_raised_may_keep_its_process_or_have_another_one() -> None:
    """Another one comes where its update was torn; in no case for another rank."""
    assert verdicts(made_run(none_came, "raise"))["in place"][0] == HELD
    assert verdicts(made_run(kind="raise"))["in place"][0] == HELD
    assert verdicts(made_run(survivor_replaced, "raise"))["in place"][0] == VIOLATED


def alone(record: Record) -> None:
    """Rank 1 had finished step 6 by itself when it was killed."""
    record.steps.append(reported(KEPT + 1, 99.9, 1, 0))


def survivor_knew(record: Record) -> None:
    alone(record)
    record.steps.append(reported(KEPT + 1, 99.95, 0, 0))


def test_a_step_that_a_survivor_had_finished_is_lost_whatever_the_journal_says() -> None:
    (incident,) = (run := made_run(survivor_knew)).incidents
    assert (incident.unproven, incident.lost) == (0, 1) and verdicts(run)["in place"][0] == VIOLATED


def test_a_step_that_the_dead_alone_knew_is_trained_again_and_is_not_lost() -> None:
    run = made_run(alone)
    (incident,) = run.incidents
    assert (incident.committed, incident.unproven, incident.lost) == (KEPT + 1, 1, 0)
    assert verdicts(run)["in place"][0] == HELD


def saved_instead(record: Record) -> None:
    record.hellos[-1:] = [(103.0, (1, 1), rank, 80 + rank) for rank in (0, 1)]
    record.steps = [one if one.step <= KEPT else replace(one, key=(1, 1)) for one in record.steps]
    record.journal[-2:] = [
        line("regroup_failed", 100.3, reason="rank 1 died"),
        line("published", 100.4, step=KEPT, path="/c/iter_0000005"),
    ]
    record.resumes = [Resumed(KEPT, 104.0, rank, (1, 1), "/c/iter_0000005", ()) for rank in (0, 1)]
    record.checkpoints = [Seen("/c/iter_0000005", KEPT, 100.4, "", "exited")]


@pytest.mark.parametrize("due", [True, False])
def test_a_fault_that_was_saved_instead_is_a_finding_and_no_violation(tmp_path: Path, due: bool) -> None:
    """With the controller's reason; only where it was to end in place."""
    run = made_run(saved_instead, due=due)
    found = verdicts(run)
    assert run.incidents[0].outcome == "saved" and found["in place"][0] == UNSEEN
    assert VIOLATED not in {state for state, _ in found.values()}, found
    text = "fault 1: kill of rank 1: saved, expected in_place: rank 1 died" if due else ""
    assert finding(run.incidents[0]) == text
    scenario = parse_scenario({"name": "s", "faults": [{"fault": "kill"}]}, "s")
    campaign = Campaign(scenario, ["x"], tmp_path, runs=[JobRun(0, tmp_path, run, judge(run), 1.0)])
    assert result_of(campaign)["findings"] == ([text] if due else [])
    file = io.StringIO()
    show_summary(Console(file=file, width=200), campaign)
    assert (f"finding: {text}" in file.getvalue()) == due


def test_what_is_to_end_in_place_is_one_rank_that_ends_raises_or_stands_still_in_training() -> None:
    scenario = Scenario(name="s", seed=1, faults=(), in_place=True)
    kill = FaultSpec(kind="kill", ranks=(1,), point="now")
    cases: list[tuple[FaultSpec, bool]] = [
        (kill, True),
        (FaultSpec(kind="raise", point="updating"), True),
        (replace(kill, ranks=(0, 1), count=2), False),
        (replace(kill, then=(FaultSpec(kind="kill", ranks=(0,), moment=Moment(event="frozen"), point="now"),)), False),
        (FaultSpec(kind="stop", ranks=(1,), point="now"), True),
        (FaultSpec(kind="gil", ranks=(1,), point="now"), True),
        (FaultSpec(kind="stop", ranks=(1,), point="now", for_s=1.0), False),
        (FaultSpec(kind="hang", ranks=(1,), point="backward"), False),
    ]
    for fault, expected in cases:
        assert scenario.in_place_due(fault) == expected, fault
        assert not replace(scenario, in_place=False).in_place_due(fault)
        assert replace(scenario, nodes=2).in_place_due(fault) == expected
    assert scenario.outcomes(kill) == ("saved", "in_place") and replace(scenario, in_place=False).outcomes(kill) == (
        "saved",
    )
    assert scenario.outcomes(FaultSpec(kind="kill_controller")) == ("unharmed",)
    assert scenario.variables["TTP_IN_PLACE"] == "unrehearsed"
    assert replace(scenario, in_place=False).variables["TTP_IN_PLACE"] == "False"


def test_the_cells_in_place_need_no_dump() -> None:
    """Every fault of a step, and a second one on the way back to each process that there is; none that only a dump meets."""
    made = cells("in-place")
    names = [cell.name for cell in made]
    assert len(names) == len(set(names)) and f"kill/{POINTS[0]}/first" in names
    assert {cell.phase for cell in made if cell.kind == "kill of a new process"} == {
        *NEWCOMER_POINTS,
        "replacement_came",
        "regrouped",
    }
    assert {cell.phase for cell in made if cell.kind == "kill_controller"} >= set(IN_PLACE_EVENTS)
    for cell in made:
        assert not any(fault.point in ("write", "publish") for fault in (cell.fault, *cell.fault.then)), cell
    assert ordered(MatrixPlan(output=Path(), which="in-place"))[0] in made


def test_the_memory_of_a_process_that_was_replaced_is_kept() -> None:
    recorder = Recorder()
    hello = {"type": "hello", "unix_s": 1.0, "world_size": 2, "save_dirs": []}
    for pid in (71, 81):
        recorder.receive({"rank": 1}, KEY, {**hello, "pid": pid})
    assert [curve.pid for curve in recorder.record.curves()] == [71, 81]
    assert recorder.record.memory[KEY, 1].pid == 81


def test_a_step_is_of_the_process_that_reports_it() -> None:
    """A former one has a connection of its own until it ends."""
    recorder = Recorder()
    hello = {"type": "hello", "unix_s": 1.0, "world_size": 2, "save_dirs": []}
    for pid in (71, 81):
        recorder.receive({"rank": 1, "pid": pid}, KEY, {**hello, "pid": pid})
    step = {"type": "step", "step": 6, "unix_s": 2.0, "grad_norm": "", "sums": []}
    for pid in (81, 71):
        recorder.receive({"rank": 1, "pid": pid}, KEY, step)
    assert [one.pid for one in recorder.record.steps] == [81, 71]


def test_the_cells_of_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """They lose nodes, which is never in place."""
    assert main(["matrix", "--in-place", "--nodes"]) == 2
    assert "--in-place: got" in capsys.readouterr().out
