"""What an operator reads about a fault, and which failure is called its root."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ttp.launch.report.exit_status import (
    RankFailure,
    describe,
    exception_text,
    first_failure,
    outcome_text,
    recorded_by,
    sort_root_cause_first,
    summarize,
)
from ttp.launch.watch.death_watch import Death
from ttp.proto.messages import Cause, CauseKind


def death(rank: int, status: int | None, seen_s: float) -> Death:
    text = "exiting" if status is None else f"exit code {status}" if status >= 0 else "signal SIGKILL"
    return Death(rank, 100 + rank, seen_s, seen_s, text, status, status is not None)


def failure(rank: int, exitcode: int, error_file: str = "") -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=error_file)


def write_error(path: Path, message: str, unix_s: float) -> str:
    """Write an error file as torch's `@record` does, at a given moment."""
    extra = {"py_callstack": "Traceback ...", "timestamp": str(int(unix_s))}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    os.utime(path, (unix_s, unix_s))
    return str(path)


def root_of(failures: dict[int, ProcessFailure]) -> int:
    return ChildFailedError("job", failures).get_first_failure()[0]


def test_the_first_to_fail_is_the_cause() -> None:
    """Neither a clean end nor one that is still unknown is a failure."""
    assert first_failure({0: death(0, 0, 1.0), 1: death(1, None, 2.0)}) is None
    found = first_failure({0: death(0, 1, 5.0), 1: death(1, -9, 4.0), 2: death(2, 0, 1.0)})
    assert found is not None and found.rank == 1


def test_a_survivor_is_the_cause_only_if_no_other_rank_failed() -> None:
    """Another node's fault shows here as survivors that persisted."""
    found = first_failure({0: death(0, 75, 1.0), 1: death(1, -9, 4.0)})
    assert found is not None and found.rank == 1
    found = first_failure({0: death(0, 75, 1.0), 1: death(1, 75, 0.5)})
    assert found is not None and found.rank == 1


def test_a_preempted_rank_is_a_cause_before_those_that_followed_it() -> None:
    """One preempted rank of a healthy job: it explains the restart, whoever was seen to end first."""
    deaths = {0: death(0, 75, 1.0), 1: death(1, 76, 2.0), 2: death(2, 75, 1.5)}
    found = first_failure(deaths)
    assert found is not None and found.rank == 1
    text = outcome_text(deaths)
    assert (
        text
        == "rank 1: exited on a preemption notice (exit code 76); ranks 0, 2: exited for the restart (exit code 75)"
    )


def test_lines_name_ranks_pids_and_causes() -> None:
    """The exact words, since people search for them."""
    assert describe(death(2, -9, 1.0)) == "rank 2 (pid 102) ended: signal SIGKILL"
    assert describe(death(2, 1, 1.0)) == "rank 2 (pid 102) ended: exit code 1"
    assert describe(death(0, 75, 1.0)) == "rank 0 (pid 100) exited for the restart (exit code 75)", "it is not at fault"
    deaths = {0: death(0, 75, 3.0), 1: death(1, 75, 3.1), 2: death(2, -9, 1.0), 3: death(3, 1, 2.0)}
    assert outcome_text(deaths) == (
        "rank 2: signal SIGKILL; rank 3: exit code 1; ranks 0-1: exited for the restart (exit code 75)"
    )
    ended = outcome_text({0: death(0, -9, 5.0), 1: death(1, -9, 1.0)}, ended={0})
    assert ended == "rank 1: signal SIGKILL; rank 0: ended by ttprun (signal SIGKILL)"


def test_the_killed_rank_is_torchs_root_cause_within_the_same_second() -> None:
    """torch compares whole seconds and takes the first of equals; after a hold it reads all at one moment."""
    failures = sort_root_cause_first(
        {0: failure(0, 75), 1: failure(1, 75), 2: failure(2, -9), 3: failure(3, 1)},
        {0: 10.2, 1: 10.3, 2: 10.5, 3: 10.4},
    )
    assert list(failures) == [3, 2, 0, 1]
    assert root_of(failures) == 3
    assert failures[3].timestamp == 10


def test_the_first_exception_is_the_root_though_its_process_ended_later(tmp_path: Path) -> None:
    """Rank 1 raised at 10.0 and took three seconds to leave; rank 0 fell over it meanwhile."""
    failures = sort_root_cause_first(
        {0: failure(0, 1, write_error(tmp_path / "0.json", "RuntimeError: reset by peer", 11.0)),
         1: failure(1, 1, write_error(tmp_path / "1.json", "ValueError: boom", 10.0))},
        {0: 12.0, 1: 13.0},
    )  # fmt: skip
    assert root_of(failures) == 1
    assert exception_text(failures[1]).startswith("ValueError: boom (traceback: ")


def test_an_error_file_does_not_outrun_a_kill_by_rounding(tmp_path: Path) -> None:
    """The file's own timestamp is cut to whole seconds: 10.52 would become 10, before the kill at 10.5."""
    failures = sort_root_cause_first(
        {1: failure(1, 1, write_error(tmp_path / "1.json", "RuntimeError: reset by peer", 10.52)), 2: failure(2, -9)},
        {1: 10.9, 2: 10.5},
    )
    assert root_of(failures) == 2


def test_a_persisted_rank_that_recorded_an_exception_can_be_the_root(tmp_path: Path) -> None:
    """It raised, was held, persisted, and left with 75 like the others."""
    failures = sort_root_cause_first(
        {0: failure(0, 75), 1: failure(1, 75, write_error(tmp_path / "1.json", "ValueError: boom", 10.0))},
        {0: 9.0, 1: 13.0},
    )
    assert root_of(failures) == 1


def test_a_killed_worker_has_no_exception_to_quote() -> None:
    """torch puts a placeholder where there is no file."""
    assert exception_text(failure(0, -9)) == ""


def test_the_exceptions_of_all_failed_workers_are_read(tmp_path: Path) -> None:
    """But not of one that left with its state safe after another had failed."""
    files = [write_error(tmp_path / f"{rank}.json", f"ValueError: {rank}\nmore", 10.0) for rank in range(3)]
    errors = recorded_by({0: failure(0, 1, files[0]), 1: failure(1, 1, files[1]), 2: failure(2, 75, files[2])})
    assert {rank: (each.name, each.line) for rank, each in errors.items()} == {
        0: ("ValueError", "ValueError: 0"),
        1: ("ValueError", "ValueError: 1"),
    }
    assert list(recorded_by({2: failure(2, 75, files[2]), 0: failure(0, -9)})) == [2]


def test_torchs_report_quotes_an_exception_without_its_traceback(tmp_path: Path) -> None:
    """The failure itself, and its error file, are as they were: `@record` copies that for whoever started the launcher."""
    failed = failure(0, 1, write_error(tmp_path / "0.json", "ValueError: boom", 10.0))
    report = str(ChildFailedError("job", {0: summarize(failed)}))
    assert "ValueError: boom (in the error file)" in report and "Traceback ..." not in report
    assert (
        "Traceback ..." in str(ChildFailedError("job", {0: failed}))
        and summarize(failed).error_file == failed.error_file
    )
    assert summarize(killed := failure(0, -9)) is killed


def test_a_long_exception_is_quoted_in_brief_beside_the_whole_one(tmp_path: Path) -> None:
    """The worker's traceback and the report have all of it; ttprun's own lines and torch's report have its beginning."""
    said = "CheckpointMismatch: /ckpt/iter_0000012: 'model.weight' has shape (1, 8), needed (1, 10):\nit was written by another model"
    failed = failure(0, 1, write_error(tmp_path / "0.json", said, 10.0))
    brief = "CheckpointMismatch: /ckpt/iter_0000012: 'model.weight' has shape (1, 8), needed (1, 10): it was writ..."
    assert exception_text(failed) == f"{brief} (traceback: {tmp_path / '0.json'})"
    assert f"{brief} (in the error file)" in str(ChildFailedError("job", {0: summarize(failed)}))
    assert Cause(CauseKind.EXCEPTION, (0,), said).brief == brief
    assert Cause(CauseKind.HUNG, (0,), said).brief == said, "it has no other source"


def test_a_fault_has_one_deadline() -> None:
    """The remaining time is never below zero."""
    fault = RankFailure("rank 2 died", 100.0, 220.0)
    assert fault.left_s(100.0) == 120.0 and fault.left_s(219.0) == 1.0 and fault.left_s(500.0) == 0.0
