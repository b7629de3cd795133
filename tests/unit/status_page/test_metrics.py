"""A job's status as Prometheus reads it: the counts, and how many series there are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.status.jobs import (
    BEGAN,
    comes,
    end,
    fault,
    incident,
    inputs,
    job_status,
    journal,
    rank_status,
    report,
    start,
)
from tests.unit.status_page.live_page import NAME
from ttp.launch.report.time_use import PARTS
from ttp.proto.messages import Cause, CauseKind
from ttp.proto.status import FaultStatus, JobStatus, StragglerStatus
from ttp.status.answer import JobView
from ttp.status.ask import Reply
from ttp.status.find_job import Job
from ttp.status.look import look
from ttp.status_page.prometheus import exposition


def looked(log_dir: Path, status: JobStatus | None) -> JobView:
    reply = Reply(status, "" if status is not None else "Connection refused")
    return look(Job(log_dir), all_ranks=True, clock=lambda: BEGAN + 40.0, ask_at=lambda address, job_id: reply)


def samples(view: JobView) -> dict[str, float]:
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(exposition(view).decode())
        for sample in family.samples
    }


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """A job in its second attempt: one fault was saved, one lost steps, one was a false alarm, one cost no restart."""
    frozen = (20.0, "freeze_sent", {"culprits": [0], "text": "silent"})
    journal(tmp_path, 0, *comes(0.0), incident(9.0, 1.0, 8))
    journal(tmp_path, 1, *comes(12.0), frozen, (20.5, "thawed", {}), incident(30.0, 0.25, None, in_place=True))
    inputs(tmp_path, 1, "n0:5/10001")
    report(tmp_path, start(0, 1.0), fault(0, 8.0, 8, lost=3), start(1, 13.0))
    return tmp_path


def test_counters_count_the_whole_job(log_dir: Path) -> None:
    found = samples(looked(log_dir, job_status([rank_status(0), rank_status(1)], job_id="run/1")))
    assert {name: value for name, value in found.items() if name.startswith("ttp_faults_total")} == {
        "ttp_faults_total{saved}": 1, "ttp_faults_total{in_place}": 1, "ttp_faults_total{not_saved}": 0,
        "ttp_faults_total{false_alarm}": 1, "ttp_faults_total{unknown}": 0,
    }  # fmt: skip
    assert found["ttp_fault_causes_total{exited}"] == 2 and found["ttp_fault_causes_total{hung}"] == 0
    assert found["ttp_steps_lost_total"] == 3 and found["ttp_fault_seconds_total"] == pytest.approx(0.5 + 0.5 + 0.25)
    assert (found["ttp_attempt"], found["ttp_job_info{n0}{run}"]) == (1, 1)
    assert found["ttp_fault_in_progress"] == 0 and "ttp_fault_age_seconds" not in found


def test_a_fault_that_is_handled_now_is_not_counted_yet(log_dir: Path) -> None:
    now = FaultStatus(4.5, (Cause(CauseKind.EXITED, (1,), "signal SIGKILL"),))
    found = samples(looked(log_dir, job_status([rank_status(0)], job_id="run/1", stage="freezing", fault=now)))
    assert found["ttp_fault_in_progress"] == 1 and found["ttp_fault_age_seconds"] == 4.5
    assert found["ttp_phase{frozen}"] == 1 and found["ttp_phase{training}"] == 0
    assert sum(value for name, value in found.items() if name.startswith("ttp_faults_total")) == 3


def test_of_ranks_the_worst_is_said(log_dir: Path) -> None:
    ranks = [rank_status(rank, step_s=0.5 + rank / 10, silent_s=float(rank), step=9 - rank) for rank in range(4)]
    found = samples(looked(log_dir, job_status([*ranks, rank_status(4, dead=True, pid=0, step=0, step_s=None)])))
    assert found["ttp_rank_step_duration_max_seconds"] == pytest.approx(0.8) and found["ttp_slowest_rank"] == 3
    assert found["ttp_heartbeat_age_max_seconds"] == 3.0 and found["ttp_rank_steps_behind_max"] == 3
    assert found["ttp_ranks{compute}"] == 4 and found["ttp_ranks{missing}"] == 1


def test_slow_ranks_are_named_and_counted(log_dir: Path) -> None:
    """Sixteen series at most, of the slowest."""
    slow = [StragglerStatus(rank, f"n{rank}", 2.0 - rank / 100, 2.0, 1.0, 40) for rank in range(40)]
    ranks = [rank_status(rank, own_s=1.0 + rank, waited_s=10.0 - rank) for rank in range(4)]
    found = samples(looked(log_dir, job_status(ranks, stragglers=tuple(slow))))
    ratios = {name: value for name, value in found.items() if name.startswith("ttp_straggler_ratio")}
    assert found["ttp_stragglers"] == 40 and len(ratios) == 16 and ratios["ttp_straggler_ratio{n0}{0}"] == 2.0
    assert (found["ttp_rank_own_step_seconds_max"], found["ttp_rank_own_step_seconds_median"]) == (4.0, 3.0)
    assert found["ttp_rank_wait_seconds_max"] == 10.0
    assert "ttp_stragglers" not in samples(looked(log_dir, None)), "not known"
    assert samples(looked(log_dir, job_status(ranks)))["ttp_stragglers"] == 0
    without = [rank_status(rank) for rank in range(4)]
    assert "ttp_stragglers" not in samples(looked(log_dir, job_status(without))), "not compared, as on an accelerator"


def test_sick_nodes_are_counted_each_once(log_dir: Path) -> None:
    """A node may have failed two checks."""
    assert samples(looked(log_dir, job_status([rank_status(0)])))["ttp_sick_nodes"] == 0
    for node, reason in (("n1", "memory: 2 errors"), ("n1", "no clock"), ("n2", "no disk")):
        report(log_dir, (14.0, "sick_node", {"start": 1, "node": node, "reason": reason}))
    assert samples(looked(log_dir, job_status([rank_status(0)])))["ttp_sick_nodes"] == 2


@pytest.mark.parametrize(("loss", "shown"), [(None, None), (2.5, 2.5), (math.nan, math.nan), (math.inf, math.nan)])
def test_a_loss_that_is_not_finite_is_not_a_number(log_dir: Path, loss: float | None, shown: float | None) -> None:
    found = samples(looked(log_dir, job_status([rank_status(0)], loss=loss)))
    assert str(found.get("ttp_loss")) == str(shown)


def test_the_time_of_all_ranks_is_there_by_part(log_dir: Path) -> None:
    """Together it is the whole; where the job's beginning is not known there is none."""
    view = looked(log_dir, job_status([rank_status(0), rank_status(1)], job_id="run/1"))
    found, use = samples(view), view.time_use
    assert use is not None
    parts = {name: value for name, value in found.items() if name.startswith("ttp_rank_time_seconds")}
    assert len(parts) == len(PARTS) and sum(parts.values()) == pytest.approx(use.ranks * use.whole_s)
    assert parts["ttp_rank_time_seconds{steps}"] == pytest.approx(use.rank_s["steps"]) and use.rank_s["steps"] > 0
    assert found["ttp_goodput_ratio_max"] == pytest.approx(use.share)
    found = samples(replace(view, time_use=replace(use, certain=False), goodput=None))
    assert "ttp_goodput_ratio" not in found and found["ttp_goodput_ratio_max"] == pytest.approx(use.share)
    found = samples(replace(view, time_use=None, goodput=None))
    assert not any(name.startswith(("ttp_rank_time", "ttp_goodput")) for name in found)


def test_steps_that_an_attempt_repeated_are_lost_too(log_dir: Path) -> None:
    """Though the fault before had kept them: a checkpoint that was broken, say."""
    report(log_dir, (14.0, "again", {"start": 1, "steps": 5}))
    assert samples(looked(log_dir, job_status([rank_status(0)], job_id="run/1")))["ttp_steps_lost_total"] == 3 + 5


def test_ten_thousand_ranks_have_as_many_series_as_two(log_dir: Path) -> None:
    def count(ranks: int) -> int:
        many = [rank_status(rank, host=f"n{rank}", cause=None) for rank in range(ranks)]
        return len(samples(looked(log_dir, job_status(many, standbys=tuple(f"n{i}:6/2" for i in range(64))))))

    assert count(10_000) == count(2) < 120


def test_where_no_controller_answers_what_is_not_known_has_no_sample(log_dir: Path) -> None:
    found = samples(looked(log_dir, None))
    assert found["ttp_controller_answers"] == 0 and found["ttp_phase{unknown}"] == 1
    for name in ("ttp_step_duration_median_seconds", "ttp_shard_live_holders_min", "ttp_checkpoint_age_seconds"):
        assert name not in found


def test_a_job_that_has_ended_has_ranks_that_have_and_no_pace(log_dir: Path) -> None:
    """What its files know of a step's time is a mean."""
    report(log_dir, end(35.0, 20, 20))
    found = samples(replace(looked(log_dir, None), step_s=0.5))
    assert found["ttp_phase{ended}"] == 1 and found["ttp_ranks{ended}"] == 2 and found["ttp_ranks{unknown}"] == 0
    assert "ttp_step_duration_median_seconds" not in found and "ttp_rank_steps_behind_max" not in found


def test_whatever_a_job_is_called_the_text_is_read(log_dir: Path) -> None:
    name = 'a"b\\c\nd\u2028é{x}'
    view = replace(looked(log_dir, job_status([rank_status(0)])), job=f"{name}/1")
    families = {family.name: family for family in text_string_to_metric_families(exposition(view).decode())}
    (sample,) = families["ttp_job_info"].samples
    assert sample.labels["run"] == name


def test_a_kind_of_fault_that_is_new_is_counted_as_another(log_dir: Path) -> None:
    view = looked(log_dir, job_status([rank_status(0)]))
    odd: Any = replace(view.faults[0], kind="of a later version", outcome="of a later version")
    found = samples(replace(view, faults=[odd] * 5))
    assert found["ttp_fault_causes_total{other}"] == 5 and found["ttp_faults_total{unknown}"] == 5


def test_every_name_follows_prometheus_conventions(log_dir: Path) -> None:
    """Base units, `_total` for counters alone, one prefix."""
    for family in text_string_to_metric_families(exposition(looked(log_dir, None)).decode()):
        assert NAME.fullmatch(family.name) and family.documentation.endswith(".")
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
        assert not family.name.endswith(("_ms", "_minutes", "_percent", "_mib", "_count", "_sum", "_bucket"))
