"""Every verdict can be VIOLATED: a made-up run that is good, and the same run with one thing wrong at a time."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ttp.chaos.faults.scenario import parse_scenario
from ttp.chaos.observed.leaks import MIB, Curve, Sample
from ttp.chaos.observed.recorder import Record, ReportedStep, Resumed, Seen
from ttp.chaos.report.html_page import page
from ttp.chaos.report.result_json import result_of, write_result
from ttp.chaos.run.campaign import Campaign, JobRun, comparable, read_baseline, write_baseline
from ttp.chaos.verdict.fault_outcome import ENDED, NOT_REACHED, OVERDUE, FaultOutcome, Firing, of_ended_job, settle
from ttp.chaos.verdict.invariants import HELD, UNSEEN, VIOLATED, Run, judge
from ttp.errors import ConfigError

KILLED_S = 100.0
SAVED, LAST = 5, 8


def reported(step: int, unix_s: float, rank: int, start: int) -> ReportedStep:
    return ReportedStep(step, unix_s, rank, (1, start), float(step).hex(), ((step / 7).hex(),))


def line(event: str, unix_s: float, **fields: Any) -> dict[str, Any]:
    return {"event": event, "unix_s": unix_s, "controller": 0, **fields}


def good_record() -> Record:
    """Two ranks; rank 1 is killed after step 5; the job goes on at step 6 and ends with step 8."""
    record = Record(world_size=2, save_dirs=["/c"])
    record.hellos = [(90.0, (1, 0), rank, 70 + rank) for rank in (0, 1)]
    record.hellos += [(103.0, (1, 1), rank, 80 + rank) for rank in (0, 1)]
    record.steps = [reported(step, 90.0 + step, rank, 0) for step in range(1, SAVED + 1) for rank in (0, 1)]
    record.steps += [reported(step, 99.0 + step, rank, 1) for step in range(SAVED + 1, LAST + 1) for rank in (0, 1)]
    record.resumes = [Resumed(SAVED, 104.0, rank, (1, 1), "/c/iter_0000005", ()) for rank in (0, 1)]
    record.journal = [
        line("assembled", 91.0),
        line("death_seen", 100.004, rank=1),
        line("freeze_sent", 100.005),
        line("frozen", 100.02, records=(SAVED - 1, SAVED)),
        line("decided", 100.021),
        line("written", 100.1),
        line("published", 100.2, step=SAVED, path="/c/iter_0000005"),
        line("assembled", 103.5),
    ]
    record.checkpoints = [Seen("/c/iter_0000005", SAVED, 100.2, "", "exited")]
    record.tracker = [(100.2, "/c", SAVED), (110.0, "/c", LAST)]
    record.newest_step = LAST
    record.memory = {((1, start), rank): held(start, rank) for start in (0, 1) for rank in (0, 1)}
    return record


def held(start: int, rank: int, mib_a_step: float = 0.0) -> Curve:
    """A rank that was looked at 50 times before or after the fault."""
    made = Curve((1, start), rank, 70 + 10 * start + rank)
    for number in range(50):
        step = 500 * start + 10 * number
        nbytes = int((200 + mib_a_step * step) * MIB)
        made.add(Sample((50.0 if start == 0 else 110.0) + number / 4, step, nbytes))
    return made


def baseline() -> Record:
    return Record(
        world_size=2, steps=[reported(step, 10.0 + step, 0, 0) for step in range(1, LAST + 1)], newest_step=LAST
    )


def good_run(change: Callable[[Record], None] = lambda record: None) -> Run:
    record = good_record()
    incident = FaultOutcome(1, 0, "kill of rank 1", "", ("saved",))
    incident.firings.append(Firing("kill", "rank 1 (pid 71)", KILLED_S, "", SAVED, (1, 0), (1,)))
    incident.over_unix_s = 105.5
    change(record)
    settle(incident, record, "")
    return Run(record, [incident], 0, (), (), baseline(), ())


def states(run: Run) -> dict[str, str]:
    return {verdict.name.split()[0]: verdict.state for verdict in judge(run)}


def test_a_good_run_holds_in_every_verdict_with_its_times() -> None:
    """Nothing lost, and each stage is reported in milliseconds since the kill."""
    run = good_run()
    assert set(states(run).values()) == {HELD}, judge(run)
    (incident,) = run.incidents
    assert (incident.outcome, incident.committed, incident.saved_step, incident.lost) == ("saved", SAVED, SAVED, 0)
    expected = {
        "seen": 4,
        "frozen": 20,
        "decided": 21,
        "written": 100,
        "published": 200,
        "resumed": 4000,
        "first_new_step": 5000,
    }
    assert {stage: round(value) for stage, value in incident.stages_ms.items()} == expected


@pytest.mark.parametrize(
    "event",
    [
        line("published", 104.5, step=SAVED, path="/c/iter_0000005"),
        line("decided", 113.0),
    ],
    ids=["the step that an attempt without a new one has loaded", "a controller that had been stopped decides"],
)
def test_what_changes_nothing_is_not_a_violation(event: dict[str, Any]) -> None:
    """The second attempt ends before its first new step, and finds the same step; a fenced controller continues with what it had received."""

    def change(record: Record) -> None:
        record.journal += [event, {**line("took_over", 111.0), "controller": 1}]

    assert states(good_run(change))["I4"] == states(good_run(change))["I8"] == HELD


@pytest.mark.parametrize("order, event", [("write_sent", "written"), ("publish_sent", "published")])
def test_a_stopped_controller_receives_late_what_was_done_in_time(order: str, event: str) -> None:
    """It had given the order while it led; one that it gives afterwards must be carried out by no rank."""

    def state(ordered_s: float) -> str:
        def change(record: Record) -> None:
            received = line(event, 115.0, step=SAVED, path="/c/iter_0000005")
            record.journal += [line(order, ordered_s), {**line("took_over", 111.0), "controller": 1}, received]

        return states(good_run(change))["I8"]

    assert (state(110.5), state(114.9)) == (HELD, VIOLATED)


def test_a_step_that_the_dead_alone_knew_is_trained_again_and_no_violation() -> None:
    """Rank 1 had step 6 finished when it died; no survivor had its commit record, so that no rank could prove it."""

    def change(record: Record) -> None:
        _finished_more((SAVED,), 1)(record)
        record.steps.insert(0, reported(SAVED + 1, 50.0, 0, -1))  # of an earlier attempt, which fell back

    alone = good_run(change)
    assert {name for name, state in states(alone).items() if state != HELD} == set(), judge(alone)
    assert (alone.incidents[0].unproven, alone.incidents[0].lost) == (1, 1), "and reported as trained again"


@pytest.mark.parametrize(
    ("records", "ranks", "steps", "unproven"),
    [
        ((SAVED, SAVED + 1), (1,), 1, 0),
        ((), (1,), 1, 0),
        ((SAVED,), (0, 1), 1, 0),
        ((SAVED,), (1,), 2, 1),
    ],
    ids=["a survivor has its record", "no survivor reported", "a survivor had finished it", "two steps"],
)
def test_a_step_that_was_not_known_to_the_dead_alone_is_lost(
    records: tuple[int, ...], ranks: tuple[int, ...], steps: int, unproven: int
) -> None:
    """The journal alone excuses nothing: what ranks had reported to the harness counts, and one step is the most."""
    run = good_run(_finished_more(records, *ranks, steps=steps))
    assert states(run)["I6"] == VIOLATED
    assert run.incidents[0].unproven == unproven and run.incidents[0].lost == steps


def _finished_more(records: tuple[int, ...], *ranks: int, steps: int = 1) -> Callable[[Record], None]:
    """These ranks had finished so many steps more when rank 1 was killed; survivors report these records."""

    def changed(record: Record) -> None:
        record.journal[3] = line("frozen", 100.02, records=records)
        record.steps += [reported(SAVED + 1 + more, 99.5, rank, 0) for rank in ranks for more in range(steps)]

    return changed


def test_what_an_earlier_fault_broke_is_not_a_fall_back_whatever_the_reason_says() -> None:
    """Ranks share the looking: another file of the same checkpoint is named."""

    def change(before: str, after: str) -> Callable[[Record], None]:
        def changed(record: Record) -> None:
            record.resumes.insert(0, Resumed(0, 90.5, 0, (1, 0), "", (before,)))
            for place, one in enumerate(record.resumes[1:], 1):
                record.resumes[place] = replace(one, skipped=(after,))

        return changed

    (same,) = good_run(change("/c/iter_0000011/a is missing", "/c/iter_0000011/b has other bytes")).incidents
    (other,) = good_run(change("/c/iter_0000011/a is missing", "/c/iter_0000012/a is missing")).incidents
    assert (same.outcome, other.outcome) == ("saved", "fell_back")


def _wrong_bits(record: Record) -> None:
    record.steps[-1] = ReportedStep(LAST, 107.0, 1, (1, 1), (9.5).hex(), record.steps[-1].sums)


def _missing_step(record: Record) -> None:
    record.steps = [one for one in record.steps if one.step != 7]


def _older_step(record: Record) -> None:
    record.journal[6] = line("published", 100.2, step=SAVED - 1, path="/c/iter_0000004")


def _published_twice(record: Record) -> None:
    record.journal.insert(7, line("published", 102.4, step=SAVED, path="/d/iter_0000005"))


def _published_again_in_the_same_start(record: Record) -> None:
    record.journal.insert(7, line("published", 102.4, step=SAVED, path="/c/iter_0000005"))


def _tracker_back(record: Record) -> None:
    record.tracker.append((111.0, "/c", SAVED))


def _broken_checkpoint(record: Record) -> None:
    record.checkpoints[0] = Seen("/c/iter_0000005", -1, 100.2, "a file is missing", "")


def _misnamed(record: Record) -> None:
    record.checkpoints[0] = Seen("/c/iter_0000005", 4, 100.2, "", "exited")


def _went_on(record: Record) -> None:
    record.steps.append(reported(SAVED + 1, 100.3, 0, 0))


def _regrouped(record: Record) -> None:
    """The step is on disk first, then the ranks regroup, and train on in the same attempt."""
    record.journal += [
        line("regroup_sent", 100.21, freeze_id=1, step=SAVED),
        line("regrouped", 100.25, freeze_id=1, step=SAVED),
    ]


def _went_on_regrouped(record: Record) -> None:
    _regrouped(record)
    _went_on(record)


def _went_on_and_regrouped(record: Record) -> None:
    _regrouped(record)
    record.steps.append(reported(SAVED + 1, 100.22, 0, 0))


def _regrouped_and_published(record: Record) -> None:
    """A recovery in place, and then another fault of the same injection, which was published: from there on no step."""
    orders = [line("regroup_sent", 100.11, freeze_id=1, step=SAVED), line("regrouped", 100.15, freeze_id=1, step=SAVED)]
    place = next(place for place, one in enumerate(record.journal) if one["event"] == "published")
    record.journal[place:place] = orders
    _went_on(record)


def _opened_by_a_successor(record: Record) -> None:
    """And the controller that was stopped finds it later."""
    record.journal += [line("regroup_sent", 100.21, freeze_id=1, step=SAVED), line("thawed", 100.25)]
    record.journal.append(line("regrouped", 103.9, freeze_id=1, step=SAVED))
    _went_on(record)


def _wrong_load(record: Record) -> None:
    record.resumes = [Resumed(3, 104.0, rank, (1, 1), "/c/iter_0000003", ()) for rank in (0, 1)]


def _parted_load(record: Record) -> None:
    record.resumes[0] = Resumed(3, 104.0, 0, (1, 1), "/c/iter_0000003", ())


def _silent_restart(record: Record) -> None:
    record.journal = [one for one in record.journal if one["event"] not in ("published",)]


def _fenced_decides(record: Record) -> None:
    record.journal[2:2] = [{**line("took_over", 95.0), "controller": 1}]


@pytest.mark.parametrize(
    ("change", "violated"),
    [
        (_wrong_bits, {"I3", "I12"}),
        (_missing_step, {"I3", "I12"}),
        (_older_step, {"I6", "I7", "I10"}),
        (_published_twice, {"I4"}),
        (_published_again_in_the_same_start, {"I4"}),
        (_tracker_back, {"I4"}),
        (_broken_checkpoint, {"I1", "I5"}),
        (_misnamed, {"I2"}),
        (_went_on, {"I7"}),
        (_went_on_regrouped, set()),
        (_went_on_and_regrouped, {"I7"}),
        (_regrouped_and_published, {"I7"}),
        (_opened_by_a_successor, set()),
        (_wrong_load, {"I10"}),
        (_parted_load, {"I10"}),
        (_silent_restart, {"I9", "outcomes"}),
        (_fenced_decides, {"I8"}),
    ],
)
def test_one_thing_wrong_is_found(change: Callable[[Record], None], violated: set[str]) -> None:
    """Each verdict looks at what it says that it looks at."""
    found = {name for name, state in states(good_run(change)).items() if state == VIOLATED}
    assert found == violated


@pytest.mark.parametrize(
    ("status", "finished", "became"), [(0, True, NOT_REACHED), (0, False, ENDED), (1, True, ENDED)]
)
def test_a_fault_in_whose_course_the_job_ended_is_excused_where_all_ranks_had_finished(
    status: int, finished: bool, became: str
) -> None:
    """A job that ends with status 0 and never said so has lost what was to come."""
    run = good_run()
    run.record.journal += [line("finished", 106.0, ranks=2)] if finished else []
    incident = copy.deepcopy(run.incidents[0])
    settle(incident, run.record, of_ended_job(status, run.record))
    verdicts = states(Run(run.record, (incident,), status, (), (), run.baseline, ()))
    assert incident.outcome == became and incident.complete == (became != NOT_REACHED)
    assert (verdicts["I11"], verdicts["outcomes"]) == ((HELD, HELD) if became == NOT_REACHED else (VIOLATED, VIOLATED))


def test_what_is_left_behind_a_bad_end_and_a_late_one_are_found() -> None:
    """I11: status, processes, temporary files, deadlines."""
    run = good_run()
    for wrong in (
        Run(run.record, run.incidents, 1, (), (), run.baseline, ()),
        Run(run.record, run.incidents, 0, ("pid 7: python",), (), run.baseline, ()),
        Run(run.record, run.incidents, 0, (), ("/c/iter_0000009_tmp_1",), run.baseline, ()),
    ):
        assert states(wrong)["I11"] == VIOLATED
    late = copy.deepcopy(run.incidents[0])
    settle(late, run.record, OVERDUE)
    assert states(Run(run.record, [late], 0, (), (), run.baseline, ()))["I11"] == VIOLATED


def test_final_tensors_count_and_without_a_baseline_run_nothing_is_claimed() -> None:
    """A difference of the last checkpoints is I3; what was not seen is said so."""
    run = good_run()
    assert (
        states(Run(run.record, run.incidents, 0, (), (), run.baseline, ("weight: its bits differ",)))["I3"] == VIOLATED
    )
    alone = states(Run(run.record, run.incidents, 0, (), (), None, None))
    assert alone["I3"] == alone["I12"] == UNSEEN


def test_steps_that_carry_nothing_hold_nothing() -> None:
    """No sum and a norm of 0 are the same in a run that has diverged: bits were not seen then, but in the checkpoints."""

    def mute(record: Record) -> None:
        record.steps = [dataclasses.replace(reported, grad_norm=(0.0).hex(), sums=()) for reported in record.steps]

    run, whole = good_run(mute), baseline()
    mute(whole)
    unseen = states(Run(run.record, run.incidents, 0, (), (), whole, None))
    assert unseen["I3"] == unseen["I12"] == UNSEEN
    in_files = states(Run(run.record, run.incidents, 0, (), (), whole, ()))
    assert (in_files["I3"], in_files["I12"]) == (HELD, UNSEEN)
    whole.steps.append(reported(LAST + 1, 30.0, 0, 0))
    assert states(Run(run.record, run.incidents, 0, (), (), whole, ()))["I12"] == VIOLATED


def test_checkpoints_of_one_step_are_compared() -> None:
    """A dying gasp behind the last periodic save has no counterpart in the baseline run; an older newest one means that one is missing."""
    found = [Path(f"/run/iter_{step:07d}") for step in (62, 60, 30)]
    assert comparable(found, Path("/baseline/iter_0000060")) == found[1]
    assert comparable(found, Path("/baseline/iter_0000061")) is None
    assert comparable(found, Path("/baseline/iter_0000070")) == found[0]
    assert comparable([], Path("/baseline/iter_0000070")) is None


def test_a_checkpoint_that_was_corrupted_must_be_skipped_aloud() -> None:
    """Loaded all the same: violated; an older one with the reason: `fell_back`."""
    run = good_run()
    corrupt = Firing("corrupt", "iter_0000005/a.distcp", 100.3, "", SAVED, (1, 0))
    run.incidents[0].firings.append(corrupt)
    assert states(run)["I10"] == VIOLATED

    def skip(record: Record) -> None:
        record.resumes = [
            Resumed(0, 104.0, rank, (1, 1), "/c/iter_0000000", ("iter_0000005: bits",)) for rank in (0, 1)
        ]

    again = good_run(skip)
    assert again.incidents[0].outcome == "fell_back" and again.incidents[0].lost == SAVED


def test_what_an_earlier_fault_has_broken_is_not_a_fall_back_of_a_later_one() -> None:
    """It stays there, and every attempt skips it, until the job has come past its step."""

    def skip(record: Record) -> None:
        broken = ("iter_0000007: bits",)
        record.resumes = [Resumed(SAVED, 104.0, rank, (1, 1), "/c/iter_0000005", broken) for rank in (0, 1)]
        record.resumes.insert(0, Resumed(0, 89.0, 0, (1, 0), "", broken))

    run = good_run(skip)
    assert run.incidents[0].outcome == "saved" and run.incidents[0].lost == 0


def test_a_rank_that_grows_is_named_with_its_attempt_and_the_limit() -> None:
    """In one attempt of one rank; a limit above it holds; in a job that was seen for too short nothing is claimed."""

    def leak(record: Record) -> None:
        record.memory[(1, 1), 1] = held(1, 1, 0.0625)

    run = good_run(leak)
    verdict = next(one for one in judge(run) if one.name == "memory")
    assert verdict.state == VIOLATED and "rank 1 (pid 81) in attempt 1: 62.5 MiB in 1,000 steps" in verdict.text
    assert "1 of 4 curves" in verdict.text and "over 32 MiB" in verdict.text and "rank 0" not in verdict.text
    assert states(dataclasses.replace(run, growth_mib=63.0))["memory"] == HELD
    short = good_run(lambda record: record.memory.clear())
    verdict = next(one for one in judge(short) if one.name == "memory")
    assert verdict.state == UNSEEN and "not judged" in verdict.text


def test_a_leak_of_the_baseline_run_is_reported_as_its_own() -> None:
    """The run with no fault is the longest attempt of all."""
    run = good_run()
    assert run.baseline is not None
    run.baseline.memory[(1, 0), 0] = held(0, 0, 0.0625)
    verdict = next(one for one in judge(run) if one.name == "memory")
    assert verdict.state == VIOLATED and "the baseline run's rank 0 (pid 70) in attempt 0: 62.5 MiB" in verdict.text


def test_a_baseline_run_is_kept_and_read_back(tmp_path: Path) -> None:
    """What runs of a later campaign are compared with; another file is refused."""
    path = tmp_path / "baseline.json"
    write_baseline(path, baseline(), None)
    record, final = read_baseline(path)
    assert final is None and record.world_size == 2
    assert judge(Run(good_record(), (), 0, (), (), record, ()))[2].state == HELD
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"expected the baseline\.json"):
        read_baseline(path)


def campaign(tmp_path: Path) -> Campaign:
    scenario = parse_scenario({"name": "a <b>", "seed": 3, "faults": [{"fault": "kill"}]}, "here")
    run = good_run()
    skipped = FaultOutcome(2, 0, "kill of rank random", "", ("saved",))
    settle(skipped, run.record, NOT_REACHED)
    run = Run(run.record, [*run.incidents, skipped], 0, (), (), run.baseline, ())
    made = Campaign(scenario, ["ttprun", "train.py"], tmp_path, baseline=baseline())
    made.runs.append(JobRun(0, tmp_path, run, judge(run), 12.0))
    return made


def test_the_report_is_one_page_with_its_pictures_and_every_fault(tmp_path: Path) -> None:
    """Whole from the JSON alone: four pictures, the verdicts, the names quoted, nothing loaded from elsewhere."""
    written = write_result(campaign(tmp_path))
    content = json.loads((tmp_path / "result.json").read_text())
    assert content == json.loads(json.dumps(written)) and content["good"] and content["not_reached"] == 1
    text = page(content)
    pictures = text.split("<svg")[1:]
    assert len(pictures) == 4
    for picture in pictures:
        ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
    assert "#2e4057" in pictures[0], "the fault is in the loss curves"
    assert "a &lt;b&gt;" in text and "I12 host state" in text and "not reached" in text
    assert {(entry["run"], entry["start"], entry["rank"]) for entry in content["memory"]} == {
        ("run 0", start, rank) for start in (0, 1) for rank in (0, 1)
    }
    assert "4 of 4 curves" in text and "limit 32 MiB" in text
    assert "src=" not in text and "<script" not in text


def test_a_result_without_memory_is_drawn_as_it_was(tmp_path: Path) -> None:
    """Of an older harness, or a job that was over at once."""
    content = write_result(campaign(tmp_path))
    for entry in content["memory"]:
        entry["points"] = []
    assert "No rank was seen" in page(content)
    del content["memory"]
    assert page(content).count("<svg") == 3


def test_a_result_with_a_violation_is_not_good(tmp_path: Path) -> None:
    """The banner and the exit status follow it."""
    made = campaign(tmp_path)
    run = good_run(_wrong_bits)
    made.runs.append(JobRun(1, tmp_path, run, judge(run), 12.0))
    content = result_of(made)
    assert not content["good"] and "Violated" in page(content)
