"""The stacks of a hung rank: every thread's, with the reason, appended, and never in the way of anything."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path

import pytest

from ttp.launch.watch.processes import catches
from ttp.processor.async_log import AsyncLog
from ttp.processor.stacks import ASKED_NAME, STACKS_SIGNAL, StackWriter

LONG_S = 30.0


def stand_here(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait(LONG_S)


def test_every_threads_stack_is_written_with_the_reason(tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=stand_here, args=(begun, end))
    thread.start()
    try:
        assert begun.wait(LONG_S)
        path = tmp_path / "rank_3" / "stacks.log"
        writer = StackWriter(path, AsyncLog(3))
        for reason in ("rank 1 in COMPUTE of step 9", "once more"):
            writer.save(reason)
            writer.finish(LONG_S)
    finally:
        end.set()
        thread.join()
    text = path.read_text()
    assert text.index("rank 1 in COMPUTE of step 9") < text.index("in stand_here") < text.index("once more")
    assert "test_every_threads_stack" in text


def test_a_place_that_cannot_be_written_is_reported_and_harms_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    lines: list[str] = []
    log = AsyncLog(3)
    log.log = lambda level, text: lines.append(text)  # type: ignore[method-assign]
    writer = StackWriter(blocked / "stacks.log", log)
    writer.save("a hang")
    writer.finish(LONG_S)
    assert len(lines) == 1 and "could not be written" in lines[0]
    nowhere = StackWriter(None, log)
    nowhere.save("a hang")
    nowhere.finish(LONG_S)


def listening(path: Path) -> tuple[StackWriter, list[str]]:
    lines: list[str] = []
    log = AsyncLog(3)
    log.log = lambda level, text: lines.append(text)  # type: ignore[method-assign]
    writer = StackWriter(path, log)
    writer.listen()
    return writer, lines


@pytest.mark.skipif(not STACKS_SIGNAL, reason="no real-time signals")
@pytest.mark.parametrize("error", [RuntimeError, ValueError, OSError])
def test_a_handler_that_cannot_be_set_is_reported_and_harms_nothing(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`faulthandler.register` raises three kinds of error."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error("no room for another stack")

    monkeypatch.setattr(faulthandler, "register", refuse)
    writer, lines = listening(tmp_path / "stacks.log")
    writer.close()
    assert len(lines) == 1 and "stacks cannot be asked for" in lines[0] and "no room for another stack" in lines[0]


@pytest.mark.skipif(not STACKS_SIGNAL, reason="no real-time signals")
@pytest.mark.parametrize("kind", ["python", "C"])
def test_a_handler_of_the_users_own_stays(tmp_path: Path, kind: str) -> None:
    """Also when the session ends; and the launcher finds no file by which it would ask this process."""
    came: list[int] = []
    own = tmp_path / "own"
    with open(own, "w") as file:
        if kind == "C":
            faulthandler.register(STACKS_SIGNAL, file)
        else:
            before = signal.signal(STACKS_SIGNAL, lambda number, frame: came.append(number))
        try:
            writer, lines = listening(tmp_path / "rank_3" / "stacks.log")
            writer.close()
            assert catches(os.getpid(), STACKS_SIGNAL), "else it would end this process"
            signal.raise_signal(STACKS_SIGNAL)
            assert came == [STACKS_SIGNAL] or own.read_text()
        finally:
            if kind == "C":
                faulthandler.unregister(STACKS_SIGNAL)
            else:
                signal.signal(STACKS_SIGNAL, before)
    assert len(lines) == 1 and "handled or ignored by this process already" in lines[0]
    assert not (tmp_path / "rank_3" / ASKED_NAME).exists()
