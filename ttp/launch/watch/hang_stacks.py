"""The stacks of hanging ranks: requested by a signal, collected in one file, suspects first, with a suspect's innermost frames.

Owns the request and the file. Reads what `processor/stacks.py` wrote in the journals' directory: of ranks on other nodes only where that
directory is shared.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttp import files
from ttp.launch.watch.processes import catches, is_stopped
from ttp.processor.stacks import ASKED_NAME, STACKS_SIGNAL, process_text

ASK_S = 2.0
"""How long a rank has to write its stacks on request."""
_LOOK_S = 0.02
_STACK = "(most recent call first)"

FRAMES = 5
"""Innermost frames that a report quotes."""
_BLOCK = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def block_of(text: str, reason: str) -> str:
    """Return the newest entry of a `stacks.log` that was written for `reason`; empty if there is none."""
    return next((block for block in reversed(_BLOCK.split(text)) if reason in block.partition("\n")[0]), "")


def main_frames(block: str) -> tuple[str, ...]:
    """Return the main thread's innermost frames, the innermost first: `in wait, threading.py:327`.

    The entry names the main thread; where it was cut off (very many threads) there are none.
    """
    named = re.search(r"^main thread 0x0*([0-9a-f]+)$", block, re.M)
    if named is None:
        return ()
    _, found, rest = block.partition(f"hread 0x{int(named[1], 16):016x} ")
    frames: list[str] = []
    for line in rest.splitlines()[1:] if found else ():
        frame = _FRAME.match(line)
        if frame is None or len(frames) == FRAMES:
            break
        frames.append(f"in {frame[3]}, {frame[1]}:{frame[2]}")
    return tuple(frames)


def read_blocks(log_dir: Path, reason: str) -> dict[int, str]:
    """Return the stacks that each rank wrote for a hang's reason, by rank. Raises OSError."""
    found = {}
    for path in log_dir.glob("rank_*/stacks.log"):
        rank = path.parent.name.removeprefix("rank_")
        block = block_of(path.read_text(encoding="utf-8", errors="replace"), reason)
        if rank.isdecimal() and block:
            found[int(rank)] = block
    return found


def ask(log_dir: Path, pids: Mapping[int, int], within_s: float = ASK_S) -> None:
    """Have these ranks of this node (rank -> pid) write their stacks before they are ended. Works also while C code blocks the interpreter; a
    stopped rank is skipped."""
    asked: dict[Path, int] = {}
    for rank, pid in pids.items():
        if is_stopped(pid):
            continue
        path = log_dir / f"rank_{rank}" / ASKED_NAME
        with contextlib.suppress(OSError):
            # The file may be an earlier attempt's: a process that has not opened it may have its script's own handler.
            if STACKS_SIGNAL and catches(pid, STACKS_SIGNAL) and process_text(pid) in path.read_text(errors="replace"):
                asked[path] = path.stat().st_size
                os.kill(pid, STACKS_SIGNAL)
    until_s = time.monotonic() + within_s
    before: dict[Path, int] = {}
    while asked and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        sizes = {}
        for path in asked:
            with contextlib.suppress(OSError):  # its directory may be removed meanwhile
                sizes[path] = path.stat().st_size
        if sizes == before and all(size > asked[path] for path, size in sizes.items()):
            return  # all have begun, and have written nothing since the last check
        before = sizes


def read_asked(log_dir: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """Return the stacks that these ranks (rank -> pid) have written on request, by rank. Raises OSError."""
    found = {}
    for rank, pid in pids.items():
        path = log_dir / f"rank_{rank}" / ASKED_NAME
        if path.exists():
            block = block_of(path.read_text(encoding="utf-8", errors="replace"), process_text(pid))
            if _STACK in block:
                found[rank] = block
    return found


def gather(path: Path, blocks: Mapping[int, str], suspects: Sequence[int]) -> None:
    """Write all ranks' stacks into one file, the suspects' first. Raises OSError."""
    order = [*(rank for rank in suspects if rank in blocks), *sorted(set(blocks) - set(suspects))]
    with open(path, "w", encoding="utf-8", opener=files.opener) as file:
        for rank in order:
            file.write(f"=== rank {rank}{' (suspect)' if rank in suspects else ''} ===\n{blocks[rank]}\n")
