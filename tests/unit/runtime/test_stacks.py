"""The stacks of a hung rank: every thread's, with the reason, appended, and never in the way of anything."""

from __future__ import annotations

import threading
from pathlib import Path

from ttp.processor.stacks import StackWriter
from ttp.processor.voice import Voice

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
        writer = StackWriter(path, Voice(3))
        for reason in ("rank 1 in COMPUTE of step 9", "once more"):
            writer.save(reason)
            writer.finish(LONG_S)
    finally:
        end.set()
        thread.join()
    text = path.read_text()
    assert text.index("rank 1 in COMPUTE of step 9") < text.index("in stand_here") < text.index("once more")
    assert "test_every_threads_stack" in text


def test_a_place_that_cannot_be_written_is_told_and_harms_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    lines: list[str] = []
    voice = Voice(3)
    voice.say = lambda level, text: lines.append(text)  # type: ignore[method-assign]
    writer = StackWriter(blocked / "stacks.log", voice)
    writer.save("a hang")
    writer.finish(LONG_S)
    assert len(lines) == 1 and "could not be written" in lines[0]
    nowhere = StackWriter(None, voice)
    nowhere.save("a hang")
    nowhere.finish(LONG_S)
