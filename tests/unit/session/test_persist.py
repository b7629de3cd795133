"""What the decorator asks of the session: whether its function may be entered again, and by which name messages call it."""

from __future__ import annotations

from typing import Any

import pytest

import ttp
from ttp import session as module
from ttp.errors import NotRepeatable, Regroup


class Reentry:
    def __init__(self) -> None:
        self.whys: list[str] = []

    @property
    def closed(self) -> bool:
        return bool(self.whys)

    def close(self, why: str) -> None:
        self.whys.append(why)

    def begin(self, not_yet: str) -> None:
        self.whys.append("begun")


class Regrouping:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.refuses = False

    def begin_train(self, train: str) -> None:
        self.calls.append(f"begin {train}")

    def make_again(self) -> None:
        self.calls.append("groups made again")

    def step_back(self) -> None:
        self.calls.append("step back")

    def enter(self) -> None:
        self.calls.append("enter")

    def end_train(self, exc: BaseException | None = None) -> None:
        self.calls.append(f"end {type(exc).__name__}")
        if self.refuses and exc is None:
            raise NotRepeatable("a step was not computed again")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process's session, without its threads."""
    made: Any = object.__new__(module.Session)
    made.calls, made.rank, made._over, made.begun, made.enters_again_after = [], 0, False, False, ""
    made._protection, made.reentry, made.regrouping = None, Reentry(), Regrouping(made.calls)
    made.hold_after = lambda exc: made.calls.append(f"hold {type(exc).__name__}")
    made.hold_until_all_finish = lambda: made.calls.append("finished")
    monkeypatch.setattr(module, "_current", made)
    return made


def train() -> str:
    return "done"


LINE = train.__code__.co_firstlineno


def test_a_function_is_begun_by_its_name_and_place(session: Any) -> None:
    assert ttp.ttp_to_persist(train)() == "done"
    assert session.calls == [
        f"begin train() (test_persist.py:{LINE})",
        "groups made again",
        "enter",
        "end NoneType",
        "finished",
    ]
    assert session.reentry.whys == ["begun"]


def test_one_that_says_so_is_neither_rehearsed_nor_entered_again(
    session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ttp")
    decorated = ttp.ttp_to_persist(in_place=False)(train)
    assert decorated() == "done" and decorated.__name__ == "train"
    assert session.calls == ["enter", "end NoneType", "finished"]
    why = f"train() (test_persist.py:{LINE}) is not to be entered again: ttp_to_persist(in_place=False)"
    assert session.reentry.whys == [why] and caplog.messages == [
        f"a rank that dies costs a checkpoint and a restart from now on: {why}"
    ]


def test_in_place_true_is_the_plain_decorator(session: Any) -> None:
    assert ttp.ttp_to_persist(in_place=True)(train)() == "done"
    assert session.reentry.whys == ["begun"]


def test_a_return_that_the_rehearsal_refuses_is_held_for_as_an_exception(session: Any) -> None:
    session.regrouping.refuses = True
    with pytest.raises(NotRepeatable):
        ttp.ttp_to_persist(train)()
    assert session.calls[-3:] == ["end NoneType", "end NotRepeatable", "hold NotRepeatable"]


def test_a_function_that_leaves_for_a_rehearsal_is_called_again(session: Any) -> None:
    session.reentry = None
    times = []

    def leaves_once() -> int:
        times.append(1)
        if len(times) == 1:
            raise Regroup("step 3 is given up")
        return len(times)

    assert ttp.ttp_to_persist(leaves_once)() == 2
    assert session.calls[1:] == ["enter", "groups made again", "step back", "enter", "end NoneType", "finished"]


def test_one_that_leaves_as_its_session_begins_is_begun_then(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers.Trainer's does, within it: there is nothing to step back."""
    session.reentry = None
    monkeypatch.setattr(module, "_current", None)
    times = []

    def starts_a_session() -> int:
        times.append(1)
        if len(times) == 1:
            monkeypatch.setattr(module, "_current", session)
            raise Regroup("the session begins")
        return len(times)

    assert ttp.ttp_to_persist(starts_a_session)() == 2
    assert [call.split()[0] for call in session.calls] == ["begin", "enter", "end", "finished"]
