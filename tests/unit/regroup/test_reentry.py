"""A rank's part in a recovery without a checkpoint: which exceptions of training are waited behind, and that no order comes too late or twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from ttp.config import Settings
from ttp.errors import ConfigError, Regroup
from ttp.groups.process_groups import GROUPS
from ttp.proto import messages
from ttp.regroup.reentry import Reentry, why_not_in_place

ORDER = messages.Regroup(3, 8, (1,), None)
LONG_S = 30.0


@contextlib.contextmanager
def pause(at_most_s: float) -> Iterator[None]:
    yield


class Device:
    type = "cpu"


class Optimizer:
    device = Device()
    spans_job = True

    def fill(self, replaced: Any) -> None: ...


class Protection:
    """One that is asked what becomes of an exception."""

    def __init__(self, reentry: Reentry, then: str) -> None:
        self.reentry, self.then = reentry, then
        self.held: list[BaseException] = []
        self.released = then == "released before"

    def hold_after(self, exc: BaseException, until: threading.Event) -> None:
        self.held.append(exc)
        if self.then == "ordered":
            self.reentry.order(ORDER)
            assert until.wait(LONG_S)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to this process's groups."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "TCPStore", lambda *arguments, **named: None)
    monkeypatch.setattr(dist, "PrefixStore", lambda *arguments: None)
    monkeypatch.setattr(GROUPS, "leave", lambda: calls.append("leave"))
    monkeypatch.setattr(GROUPS, "close", lambda: calls.append("close"))
    for name in ("meeting", "pollable"):
        monkeypatch.setattr(GROUPS, name, getattr(GROUPS, name))
    return calls


@pytest.fixture
def reentry(left: list[str]) -> Reentry:
    return Reentry(Optimizer(), None, Settings(), 0, lambda successor: None, pause)  # type: ignore[arg-type]


def test_a_collective_that_fails_is_reported_and_an_order_has_training_entered_again(
    reentry: Reentry, left: list[str]
) -> None:
    """The groups are closed while the exception still holds what was under way, and nothing leaves them any more after that."""
    failed, protection = RuntimeError("Connection closed by peer"), Protection(reentry, "ordered")
    assert reentry.enters_again(failed, protection)  # type: ignore[arg-type]
    assert protection.held == [failed] and left[-1] == "close" and left.count("close") == 1
    assert reentry._leaving is not None and not reentry._leaving.is_alive()


def test_an_exception_that_the_order_itself_has_caused_is_not_reported(reentry: Reentry) -> None:
    """Else a recovered rank would have a fault of a step that all have given up."""
    protection = Protection(reentry, "released")
    assert reentry.order(ORDER) == "" and reentry.ordered
    for exc in (RuntimeError("Connection reset by peer"), Regroup("leaves step 9")):
        assert reentry.enters_again(exc, protection) and not protection.held  # type: ignore[arg-type]


@pytest.mark.parametrize("then", ["released", "released before"])
def test_without_an_order_the_exception_is_training_s_end(reentry: Reentry, left: list[str], then: str) -> None:
    protection = Protection(reentry, then)
    assert not reentry.enters_again(RuntimeError("no"), protection)  # type: ignore[arg-type]
    assert len(protection.held) == (then == "released") and not left


@pytest.mark.parametrize("exc", [SystemExit(0), KeyboardInterrupt(), ConfigError("lr: got -1, expected a number >= 0")])
def test_what_ends_a_program_or_would_come_again_ends_it(reentry: Reentry, exc: BaseException) -> None:
    """An order that comes later is answered with that, so that the step is written."""
    protection = Protection(reentry, "ordered")
    assert not reentry.enters_again(exc, protection) and not protection.held  # type: ignore[arg-type]
    assert reentry.order(ORDER) == f"rank 0: training has ended with {type(exc).__name__}" and not reentry.ordered


def test_training_that_has_returned_is_not_entered_again(reentry: Reentry) -> None:
    reentry.close("training has returned")
    reentry.close("a later reason")
    assert reentry.order(ORDER) == "rank 0: training has returned"


def in_place(**settings: Any) -> Settings:
    return Settings(**{"launched": True, "one_node": True, **settings})


@pytest.mark.parametrize(
    ("settings", "asked", "why"),
    [
        ({}, True, ""),
        ({"in_place": "on"}, False, ""),
        ({}, False, "the program has not asked"),
        ({"in_place": "off"}, True, "TTP_IN_PLACE=False"),
        ({"launched": False}, True, "not started by ttprun"),
        ({"one_node": False}, True, "several nodes"),
        ({"shared_dirs": False}, True, "TTP_SHARED_DIRS=False"),
    ],
)
def test_where_it_is_off_the_reason_is_named(settings: dict[str, Any], asked: bool, why: str) -> None:
    said = why_not_in_place(in_place(**settings), Optimizer(), asked, copies=False, own_form=False)  # type: ignore[arg-type]
    assert (why in said) if why else said == ""


def test_an_accelerator_has_to_be_asked_for_by_name() -> None:
    class OnDevice(Optimizer):
        device = type("Device", (), {"type": "cuda"})()

    said = [
        why_not_in_place(in_place(in_place=choice), OnDevice(), True, copies=False, own_form=False)  # type: ignore[arg-type]
        for choice in ("", "on", "cuda")
    ]
    assert "on cuda it was never tried (TTP_IN_PLACE=cuda)" in said[0] and said[1] == said[0] and said[2] == ""
    assert why_not_in_place(in_place(), Optimizer(), True, copies=True, own_form=False) == "copies='memory'"  # type: ignore[arg-type]
