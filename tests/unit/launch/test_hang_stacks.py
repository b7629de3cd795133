"""The stacks of a hang: the right entry, the main thread's frames, suspects first."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

from ttp.launch.hang_stacks import FRAMES, block_of, gather, main_frames, read_blocks
from ttp.processor.stacks import StackWriter
from ttp.processor.voice import Voice

LONG_S = 30.0
REASON = "nobody has got on for 3.0 s: rank 1 in READY of step 9"


def save(path: Path, *reasons: str) -> int:
    """Have this process's stacks written as a rank does; return the line at which the main thread waits for them."""
    writer = StackWriter(path, Voice(1))
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
    blocks = read_blocks(tmp_path, REASON)
    assert set(blocks) == {0, 1, 2, 10}
    path = tmp_path / "stacks_0.txt"
    gather(path, blocks, [10, 3, 1])
    heads = [line for line in path.read_text().splitlines() if line.startswith("=== ")]
    assert heads == ["=== rank 10 (suspect) ===", "=== rank 1 (suspect) ===", "=== rank 0 ===", "=== rank 2 ==="]
