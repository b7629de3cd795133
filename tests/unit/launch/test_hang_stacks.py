"""The stacks of a hang: the right entry, the main thread's frames, suspects first."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.waiting import replace_sleep
from ttp.launch.watch.hang_stacks import FRAMES, ask, block_of, gather, main_frames, read_asked, read_blocks
from ttp.launch.watch.processes import catches
from ttp.processor.async_log import AsyncLog
from ttp.processor.stacks import ASKED_NAME, STACKS_SIGNAL, StackWriter, process_text

LONG_S = 30.0
REASON = "no rank has progressed for 3.0 s: rank 1 in READY of step 9"


def save(path: Path, *reasons: str) -> int:
    """Have this process's stacks written as a rank does; return the line at which the main thread waits for them."""
    writer = StackWriter(path, AsyncLog(1))
    for reason in reasons:
        writer.save(reason)
        writer.finish(LONG_S)
    return inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]


def test_the_main_threads_innermost_frames_are_found_in_a_real_entry(tmp_path: Path) -> None:
    """The writer's own thread and others stand in the entry as well, and above it."""
    end = threading.Event()
    other = threading.Thread(target=end.wait, args=(LONG_S,))
    other.start()
    try:
        path = tmp_path / "rank_1" / "stacks.log"
        line = save(path, "another hang", REASON)
    finally:
        end.set()
        other.join()
    frames = main_frames(block_of(path.read_text(), REASON))
    assert len(frames) == FRAMES
    ours = [frame for frame in frames if frame.startswith("in save, ")]
    assert ours[-1].startswith(f"in save, {__file__}:") and abs(int(ours[-1].rpartition(":")[2]) - line) <= 1
    assert not any("_write" in frame for frame in frames)


def test_an_entry_of_another_hang_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "stacks.log"
    save(path, "another hang")
    assert block_of(path.read_text(), REASON) == ""
    assert main_frames("") == () and main_frames("main thread 0x12\nThread 0x0000000000000034 (most") == ()


def test_suspects_come_first_in_the_one_file(tmp_path: Path) -> None:
    """A rank that could save nothing (it is stopped, or on another node) is left out."""
    for rank in (0, 1, 2, 10):
        save(tmp_path / f"rank_{rank}" / "stacks.log", REASON)
    (tmp_path / "rank_3").mkdir()
    save(tmp_path / "rank_²" / "stacks.log", REASON)
    blocks = read_blocks(tmp_path, REASON)
    assert set(blocks) == {0, 1, 2, 10}
    path = tmp_path / "stacks_0.txt"
    gather(path, blocks, [10, 3, 1])
    heads = [line for line in path.read_text().splitlines() if line.startswith("=== ")]
    assert heads == ["=== rank 10 (suspect) ===", "=== rank 1 (suspect) ===", "=== rank 0 ===", "=== rank 2 ==="]


HELD = """
import ctypes, sys, threading
from pathlib import Path
from ttp.processor.stacks import StackWriter
from ttp.processor.async_log import AsyncLog
if sys.argv[2] == "listens":
    StackWriter(Path(sys.argv[1]) / "stacks.log", AsyncLog(1)).listen()
def beat(stop=threading.Event()):
    while not stop.wait(0.001):
        Path(sys.argv[1], "beat").touch()
threading.Thread(target=beat, daemon=True).start()
sys.setswitchinterval(1000)  # the lock is not given up between the two calls: a handler that comes while frames change can crash
libc = ctypes.PyDLL(None)
def stand_in_c():
    libc.write(1, b"held\\n", 5)
    while True:
        libc.sleep(1000)  # with Python's lock held: no thread of this process runs
stand_in_c()
"""


@pytest.mark.skipif(not STACKS_SIGNAL, reason="no real-time signals")
@pytest.mark.parametrize("how", ["listens", "does not"])
def test_a_process_whose_interpreter_is_held_writes_its_stacks_when_asked(tmp_path: Path, how: str) -> None:
    """The signal's handler needs no lock. A process that does not listen is left alone: the signal would end it."""
    folder = tmp_path / "rank_1"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", HELD, str(folder), how], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            ask(tmp_path, {1: process.pid, 2: 2**22 + 1}, within_s=LONG_S if how == "listens" else 0.1)
            assert process.poll() is None
        finally:
            process.kill()
    found = read_asked(tmp_path, {1: process.pid, 2: 5})
    assert set(found) == ({1} if how == "listens" else set())
    if found:
        assert main_frames(found[1])[0].startswith("in stand_in_c, ")
    assert read_asked(tmp_path, {1: process.pid + 1}) == {}, "of another process that had this rank"


@pytest.mark.skipif(not STACKS_SIGNAL, reason="no real-time signals")
def test_a_stopped_process_is_not_asked(tmp_path: Path) -> None:
    """It could not answer: nothing is waited for, and no signal is kept for it."""
    folder = tmp_path / "rank_1"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", HELD, str(folder), "listens"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            begun = time.monotonic()
            ask(tmp_path, {1: process.pid}, within_s=2 * LONG_S)
            assert time.monotonic() - begun < LONG_S
            status = Path(f"/proc/{process.pid}/status").read_text()
            (pending,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
            assert not int(pending, 16) >> (STACKS_SIGNAL - 1) & 1
        finally:
            process.kill()


@pytest.mark.skipif(not STACKS_SIGNAL, reason="no real-time signals")
def test_a_file_that_goes_while_stacks_are_waited_for_costs_its_rank_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is taken away in the middle of a fault: the others are waited for, and nothing is raised."""
    writer = StackWriter(tmp_path / "rank_0" / "stacks.log", AsyncLog(0))
    writer.listen()
    gone = tmp_path / "rank_1" / ASKED_NAME
    gone.parent.mkdir()
    gone.write_text(process_text(os.getpid()))
    replace_sleep(monkeypatch, lambda seconds: gone.unlink(missing_ok=True))
    ask(tmp_path, {0: os.getpid(), 1: os.getpid()}, within_s=LONG_S)
    writer.close()
    assert not gone.exists(), "the wait was reached"
    assert set(read_asked(tmp_path, {0: os.getpid(), 1: os.getpid()})) == {0}


@pytest.mark.skipif(not STACKS_SIGNAL, reason="no real-time signals")
def test_a_process_is_not_asked_by_an_earlier_ones_file(tmp_path: Path) -> None:
    """It has a handler of its own for the signal, which is for something else."""
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / ASKED_NAME).write_text(process_text(os.getpid() + 1))
    came: list[int] = []
    before = signal.signal(STACKS_SIGNAL, lambda number, frame: came.append(number))
    try:
        ask(tmp_path, {0: os.getpid()}, within_s=0.0)
    finally:
        signal.signal(STACKS_SIGNAL, before)
    assert came == []


def test_stacks_are_asked_for_until_the_writer_is_closed(tmp_path: Path) -> None:
    """A user's script may go on after its session: the signal then does nothing."""
    path = tmp_path / "rank_0" / "stacks.log"
    writer = StackWriter(path, AsyncLog(0))
    writer.listen()
    ask(tmp_path, {0: os.getpid()}, within_s=LONG_S)
    writer.close()
    (block,) = read_asked(tmp_path, {0: os.getpid()}).values()
    assert any("in ask, " in frame for frame in main_frames(block))
    ask(tmp_path, {0: os.getpid()}, within_s=0.0)
    assert not catches(os.getpid(), STACKS_SIGNAL)
