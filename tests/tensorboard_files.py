"""What TensorBoard shows of a folder of its event files."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path


def points(folder: Path) -> dict[str, dict[int, float]]:
    """Return what TensorBoard shows: of steps that are there twice the newer ones."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log"):  # what purge_step writes
                for steps in found.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = float(make_ndarray(value.tensor))
    return found


def single(value: float) -> float:
    """Round as the files do."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def written(folder: Path) -> Counter[tuple[str, int]]:
    """Return how often each point was written, purged ones as well: (curve, step) -> count."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in folder.iterdir() for event in EventFileLoader(str(path)).Load()]
    return Counter((value.tag, event.step) for event in events for value in event.summary.value)
