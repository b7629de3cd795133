"""What the self-test makes of its jobs' lines: each thing that can be wrong is named, and nothing else."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ttp.selftest.jobs import Jobs, _to_new_step
from ttp.selftest.report import FAILED, NOT_APPLICABLE, PASSED

BEGUN: dict[str, Any] = {"noted": "kernel begun", "unix_s": 10.0, "seconds": 20.0}
RAISES: dict[str, Any] = {"noted": "raises", "unix_s": 10.1, "step": 8}
PUBLISHED: dict[str, Any] = {"event": "published", "unix_s": 10.5, "step": 8}
EQUAL: dict[str, Any] = {"noted": "replicas", "replicas": 2, "differing": 0, "step": 80}
ALTERED: dict[str, Any] = {"noted": "altered", "differing": 3}


def jobs(ranks: int = 2, device: str = "cuda", folder: Path = Path("none")) -> Jobs:
    return Jobs(folder, device, ranks, 3, 0, (), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("notes", "journal", "differences", "status", "reason"),
    [
        ([[BEGUN], [BEGUN, RAISES]], [PUBLISHED], [], PASSED, "saved while it ran"),
        ([[BEGUN, {"noted": "kernel ended", "unix_s": 10.4}], [BEGUN, RAISES]], [PUBLISHED], [], FAILED, "it has waited for it"),
        ([[BEGUN], [BEGUN, RAISES]], [{**PUBLISHED, "unix_s": 31.0}], [], FAILED, "it has waited for it"),
        ([[BEGUN], [BEGUN, RAISES]], [{**PUBLISHED, "step": 7}], [], FAILED, "step 7 was saved, though step 8 was committed"),
        ([[BEGUN], [BEGUN, RAISES]], [{"event": "refused", "reason": "no disk"}], [], FAILED, "nothing was saved: no disk"),
        ([[BEGUN], [BEGUN, RAISES]], [PUBLISHED], ["step 9: loss"], FAILED, "step 9: loss"),
        ([[RAISES]], [PUBLISHED], [], NOT_APPLICABLE, "one rank on the CPU"),
    ],
)  # fmt: skip
def test_a_dump_that_waits_for_the_kernel_is_seen(
    notes: list[list[dict[str, Any]]], journal: list[dict[str, Any]], differences: list[str], status: str, reason: str
) -> None:
    check = jobs()._dump(journal, notes, differences)
    assert check.status == status and reason in check.reason


@pytest.mark.parametrize(
    ("notes", "status", "reason"),
    [
        ([[EQUAL, ALTERED], [EQUAL, ALTERED]], PASSED, "all bits are equal"),
        ([[EQUAL, ALTERED], [{**EQUAL, "differing": 1}, ALTERED]], FAILED, "rank 1: 1 tensors differ"),
        ([[EQUAL, {**ALTERED, "differing": 0}], [EQUAL, ALTERED]], FAILED, "rank 0 did not see weights that were altered"),
        ([[], []], FAILED, "rank 1 has not compared"),
    ],
)  # fmt: skip
def test_replicas_that_were_not_compared_do_not_pass(
    notes: list[list[dict[str, Any]]], status: str, reason: str
) -> None:
    check = jobs()._replicas(notes)
    assert check.status == status and reason in check.reason
    assert jobs(ranks=1)._replicas(notes).status == NOT_APPLICABLE


def test_ready_that_was_not_looked_at_does_not_pass() -> None:
    final, early = {"noted": "ready", "final": True}, {"noted": "ready", "final": False}
    assert jobs()._ready([[final], [final]]).status == PASSED
    assert "rank 1 did not come to the place" in jobs()._ready([[final], []]).reason
    assert jobs()._ready([[final], [early]]).reason.startswith("rank 1 was READY while a kernel ran")
    assert jobs(device="cpu")._ready([[], []]).status == NOT_APPLICABLE


def test_time_to_a_new_step_passes_over_what_is_trained_again() -> None:
    """And over a step that was known from the checkpoint, those before the kill, and one that ended in its very moment."""
    metrics = [
        {"step": 1, "loss": "", "unix_s": 1.0},
        {"step": 2, "loss": "", "unix_s": 2.5001},
        {"event": "resume", "from_step": 1, "unix_s": 4.0},
        {"step": 2, "loss": "", "unix_s": 5.0},
        {"step": 3, "loss": "", "unix_s": 5.5, "recovered": True},
        {"step": 4, "loss": "", "unix_s": 6.0},
    ]
    assert _to_new_step(metrics, 2.5) == 3500.0
    assert _to_new_step(metrics, 6.5) is None


def test_a_job_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    (check,) = jobs(folder=tmp_path).resume_on_the_cpu()
    assert check.status == FAILED and "has no checkpoint" in check.reason
