"""The stacks that a hung job's ranks have saved: gathered into one file, suspects first, and where a suspect stood.

Reads what `ttp/processor/stacks.py` wrote under the journals' folder: of ranks on other nodes only where that folder is shared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

FRAMES = 5
"""Innermost frames that a story quotes."""
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
    """Return what each rank has saved for a hang's reason, by rank. Raises OSError."""
    found = {}
    for path in log_dir.glob("rank_*/stacks.log"):
        rank = path.parent.name.removeprefix("rank_")
        block = block_of(path.read_text(encoding="utf-8", errors="replace"), reason)
        if rank.isdigit() and block:
            found[int(rank)] = block
    return found


def gather(path: Path, blocks: Mapping[int, str], suspects: Sequence[int]) -> None:
    """Write all ranks' stacks into one file, the suspects' first. Raises OSError."""
    order = [*(rank for rank in suspects if rank in blocks), *sorted(set(blocks) - set(suspects))]
    with open(path, "w", encoding="utf-8") as file:
        for rank in order:
            file.write(f"=== rank {rank}{' (suspect)' if rank in suspects else ''} ===\n{blocks[rank]}\n")
