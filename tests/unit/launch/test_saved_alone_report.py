"""What is reported of ranks that saved a step without a controller: what is on disk, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.launch.journals import NOTHING
from tests.unit.launch.test_reporter import KILLED_AT_S, ending, put, written
from ttp.checkpoint.format.manifest import Manifest, write_manifest
from ttp.exchange import saved_alone
from ttp.exchange.saved_alone import SavedAlone
from ttp.launch.report.incident import report_of
from ttp.launch.report.journals import Line
from ttp.launch.report.render import fault_lines
from ttp.launch.report.reporter import Reporter
from ttp.launch.report.saved_alone_report import report_of_save
from ttp.proto.messages import Cause, CauseKind, FileEntry

STEP = 9


def published(folder: Path, step: int = STEP) -> Path:
    """A checkpoint of which the manifest is there."""
    path = folder / f"iter_{STEP:07d}"
    path.mkdir()
    files = tuple(FileEntry(f"__{rank}_0.distcp", 100 + rank, "xxh3_128:" + "0" * 32, rank) for rank in range(2))
    cause = Cause(CauseKind.PREEMPTED, (1,), "SIGTERM")
    state: dict[str, object] = {"optimizer": {"param_groups": []}, "trainer": {}}
    manifest = Manifest(
        step=step, cause=cause, layout={}, files=files, tensors={}, state=state, record=None, created_unix_s=KILLED_AT_S,
        attempt="attempt", term=1, versions={},
    )  # fmt: skip
    write_manifest(path, manifest)
    return path


def account(path: Path | str, error: str = "") -> SavedAlone:
    return SavedAlone(KILLED_AT_S, KILLED_AT_S + 0.5, STEP, str(path), error, (1,), 3, "/a/iter_0000004")


def test_a_save_without_a_controller_is_reported_with_its_step_and_directory(tmp_path: Path) -> None:
    path = published(tmp_path)
    report = report_of_save(0, account(path))
    story = report.incident
    assert story.saved is not None
    assert (story.kind, [one.rank for one in story.culprits], story.steps_lost) == ("preempted", [1], 0)
    assert (story.saved.step, story.saved.path, story.saved.bytes, story.saved.ranks) == (STEP, str(path), 201, (0, 1))
    printed = "\n".join(fault_lines(report))
    assert f"cause   SIGTERM; step {STEP} is finished, and no controller led the ranks" in printed
    assert f"saved   step {STEP} in {path} (201 B, written by ranks 0-1); no step lost" in printed


def test_a_clock_that_was_set_back_in_the_save_hides_nothing(tmp_path: Path) -> None:
    path = published(tmp_path)
    report = report_of_save(0, replace(account(path), began_unix_s=KILLED_AT_S + 60.0))
    assert report.incident.saved is not None and report.incident.saved.step == STEP
    assert report.began_unix_s == KILLED_AT_S + 0.5 and report.incident.took_ms == {
        "seen": 0.0, "frozen": 0.0, "written": 0.0, "published": 0.0, "total": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("missing", ["directory", "manifest", "step", "path"])
def test_what_is_not_on_disk_was_not_saved(tmp_path: Path, missing: str) -> None:
    """Whatever rank 0 wrote: the steps since the newest checkpoint are lost."""
    path, error = tmp_path / f"iter_{STEP:07d}", ""
    if missing == "manifest":
        path.mkdir()
    elif missing == "step":
        published(tmp_path, STEP - 1)
    elif missing == "path":
        error = "CheckpointError: no directory took it"
    story = report_of_save(0, account("" if error else path, error)).incident
    assert story.saved is None
    assert story.not_saved.startswith("no controller led the ranks, and ") and (error or str(path)) in story.not_saved
    assert (story.goes_on_from, story.steps_lost) == ("/a/iter_0000004", STEP - 4)


def test_what_a_lost_controller_makes_of_it_later_does_not_count(tmp_path: Path) -> None:
    """One that was cut off takes all ranks for dead and refuses, before the save or after it."""
    lines: list[Line] = [
        {"unix_s": 1.0, "event": "registered", "fields": {"rank": 1, "host": "node-a", "pid": 71}, "controller": 0},
        *(
            {"unix_s": KILLED_AT_S + after_s, "event": event, "fields": {"reason": "all are silent"}, "controller": 0}
            for after_s in (-5.0, 0.2, 5.0)
            for event in ("suspect", "refused", "exit_sent")
        ),
    ]
    report = report_of(0, lines, NOTHING, report_of_save(0, account(published(tmp_path))))
    assert report is not None and report.incident.saved is not None
    (culprit,) = report.incident.culprits
    assert (culprit.host, culprit.pid) == ("node-a", 71)


def test_the_summary_says_that_the_step_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The controller was killed before it noticed anything: its journal has no fault."""
    start, calm = put("killed", tmp_path), tmp_path / "journal_0.jsonl"
    lines = calm.read_text().splitlines(keepends=True)
    calm.write_text("".join(lines[: 1 + next(n for n, line in enumerate(lines) if '"assembled"' in line)]))
    saved_alone.write(saved_alone.path_of(tmp_path, start.number), account(published(tmp_path)))
    reporter = Reporter(clock=lambda: KILLED_AT_S + 2.0)
    reporter.begin(here=True)
    reporter.end(start, replace(ending(tmp_path), drained_by="SIGTERM"))
    reporter.finish("ended by SIGTERM")
    printed = capsys.readouterr().err
    assert (
        "cause   ttprun received SIGTERM and sent SIGTERM to the ranks; step 9 is finished, and no controller"
        in printed
    )
    assert "faults  0 faults, 1 preemption notice" in printed and "\nsaved   step 9\nlost    0 steps;" in printed
    assert written(tmp_path / "story.jsonl")[-2]["saved"]["step"] == STEP
