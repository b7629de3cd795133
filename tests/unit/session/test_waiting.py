"""What a rank logs that has come to the end of its training while others train on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ttp.config import Settings
from ttp.errors import ControllerError
from ttp.processor.gate import Gate
from ttp.proto.messages import Phase
from ttp.proto.status import JobStatus, RankStatus
from ttp.runtime import rank_runtime

SETTINGS = Settings(enable=True)


class WaitingProcessor:
    """A processor whose rank is let go after so many waits; it keeps how long each may last."""

    controller = "node-a:71"

    def __init__(self, waits: int) -> None:
        self._left = waits
        self.pauses: list[float] = []

    def finished(self) -> None: ...

    def release_at_exit(self) -> None: ...

    def wait_for_verdict(self, timeout_s: float) -> bool:
        if timeout_s == 0.0:
            return False
        self.pauses.append(timeout_s)
        self._left -= 1
        return self._left < 0


def waiting(processor: WaitingProcessor, world_size: int = 3, local_rank: int = 0) -> rank_runtime.Protection:
    protected = object.__new__(rank_runtime.Protection)
    parts = {"processor": processor, "gate": Gate(1, state_step=7), "_rank": 1, "_world_size": world_size}
    for name, part in (parts | {"_settings": replace(SETTINGS, local_rank=local_rank)}).items():
        setattr(protected, name, part)
    return protected


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said while a rank waits, where ranks 0 and 2 of 4 train and rank 3 is dead."""
    lines: list[str] = []
    monkeypatch.setattr(rank_runtime, "show", lambda level, line: lines.append(line))

    def status(address: str, *, job_id: str, timeout_s: float) -> JobStatus:
        assert (address, job_id) == ("node-a:71", SETTINGS.start_name)
        ranks = [
            RankStatus(rank, "a", 70 + rank, True, Phase.COMPUTE, 8, rank == 3, None, rank == 1) for rank in range(4)
        ]
        return JobStatus(job_id, 1, 4, "running", "", tuple(ranks), None, 71)

    monkeypatch.setattr(rank_runtime, "request_status", status)
    return lines


def test_a_rank_that_waits_for_others_at_its_end_says_for_whom(reported: list[str]) -> None:
    """After half a minute, and after twice as long each time; a job that ends together logs nothing."""
    processor = WaitingProcessor(2)
    waiting(processor).part(None)
    assert processor.pauses == [30.0, 60.0, 120.0] and reported == [
        "rank 1 waits in close() since step 7 for ranks 0, 2, which still train, 30 s so far",
        "rank 1 waits in close() since step 7 for ranks 0, 2, which still train, 90 s so far",
    ]
    reported.clear()
    waiting(WaitingProcessor(1)).finished()
    assert reported[0].startswith("rank 1 waits at the end of train since step 7 for ranks 0, 2")
    reported.clear()
    waiting(WaitingProcessor(0)).finished()
    assert not reported


def test_a_rank_of_a_large_job_waits_without_asking(reported: list[str]) -> None:
    """Each answer names all ranks; 10,000 ranks that ask would keep the controller from its work."""
    waiting(WaitingProcessor(1), world_size=10_000).finished()
    assert reported == ["rank 1 waits at the end of train since step 7 for ranks that still train, 30 s so far"]
    waiting(WaitingProcessor(1), world_size=10_000, local_rank=1).finished()
    assert len(reported) == 1, "one rank of each node logs it"


def test_a_wait_is_reported_when_the_controller_does_not_answer(
    reported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason."""

    def silent(address: str, *, job_id: str, timeout_s: float) -> JobStatus:
        raise ControllerError("no answer")

    monkeypatch.setattr(rank_runtime, "request_status", silent)
    waiting(WaitingProcessor(1)).finished()
    assert "since step 7 for the others (no answer), 30 s so far" in reported[0]
