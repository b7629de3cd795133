"""The lines of an attempt's journals, as one: of its controllers those that led.

Owns which lines count. Loads no torch: `ttp status` reads them, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from ttp.controller.core.facts.incident import NO_RANKS_TEXT
from ttp.inputs import checked
from ttp.inputs.input_file import open_text

Line = Mapping[str, Any]
"""`{"unix_s", "event", "fields", "controller"}`: the controller is 0 for the one that the attempt began with, i for a standby."""


def read_journals(log_dir: Path, start: int, since_unix_s: float) -> list[Line]:
    """Return the lines of an attempt's leading controllers, in order of time, without lines that were cut off.

    Where an earlier launch's may be there as well, those before the first that is as new as `since_unix_s` are not the attempt's: controllers
    only append. Raises OSError, and ValueError for a line that no controller writes; what its fields must hold, their readers know.
    """
    lines: list[Line] = []
    for path in _journals(log_dir, start):
        place = int(path.stem.rpartition("_")[2]) if path.stem.startswith("standby") else 0
        with open_text(path) as file:
            read = [
                _read_line(text, f"{path.name}, line {number}")
                for number, text in enumerate(file, 1)
                if text.endswith("\n")
            ]
        own = dropwhile(lambda line: line["unix_s"] < since_unix_s, read)
        lines += [{**line, "controller": place} for line in _in_order(own)]
    try:
        return leading_lines(lines)
    except (LookupError, TypeError) as error:
        raise ValueError(f"got a line whose fields no controller writes ({type(error).__name__}: {error})") from None


def _in_order(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield a controller's lines with times that never go back: the clock may have been set back between two of them."""
    back_s, last_unix_s = 0.0, float("-inf")
    for line in lines:
        back_s = max(back_s, last_unix_s - line["unix_s"])
        last_unix_s = line["unix_s"] + back_s
        yield {**line, "unix_s": last_unix_s}


def _read_line(text: str, where: str) -> dict[str, Any]:
    try:
        line = checked.mapping(json.loads(text), "line")
        checked.number(*checked.field(line, "unix_s", ""))
        checked.string(*checked.field(line, "event", ""))
        checked.mapping(*checked.field(line, "fields", ""))
    except RecursionError:
        raise ValueError(f"{where}: got values nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return line


def journal_sizes(log_dir: Path, start: int) -> Mapping[str, int]:
    """Return the sizes of an attempt's journals: where they are as before, so are the lines. Empty where they cannot be looked at."""
    try:
        return {path.name: path.stat().st_size for path in _journals(log_dir, start)}
    except OSError:
        return {}


def _journals(log_dir: Path, start: int) -> Iterator[Path]:
    yield from log_dir.glob(f"journal_{start}.jsonl")
    yield from log_dir.glob(f"standby_{start}_*.jsonl")


def leading_lines(lines: Sequence[Line]) -> list[Line]:
    """Return an attempt's lines in order of time without those of standbys that did not lead it. One to which only processes on lost nodes have come
    leads nothing that counts: others have their places, and train on. Nor has one anything to report that continues when its ranks have gone to a later one."""
    took_over: dict[int, float] = {}
    led_from: dict[int, float] = {}
    came: dict[int, set[str]] = {}
    lost: set[str] = set()
    for line in lines:
        if line["event"] in ("takeover_began", "took_over"):
            led_from.setdefault(line["controller"], line["unix_s"])
            if line["event"] == "took_over":
                took_over.setdefault(line["controller"], line["unix_s"])
        elif line["event"] == "registered":
            came.setdefault(line["controller"], set()).add(line["fields"].get("host", ""))
        elif line["event"] == "take_places_sent":
            lost.add(line["fields"]["lost"])
    led_from = {standby: since_s for standby, since_s in led_from.items() if not came.get(standby, {""}) <= lost}
    led_from[0] = float("-inf")
    kept = [
        line
        for line in lines
        if line["unix_s"] >= led_from.get(line["controller"], float("inf")) and not _is_left(line, took_over)
    ]
    return sorted(kept, key=lambda line: float(line["unix_s"]))


def _is_left(line: Line, took_over: Mapping[int, float]) -> bool:
    """Say whether this is the verdict of a controller without ranks, which a later one has taken over."""
    fields = line["fields"]
    left = f"{fields.get('reason', '')}{fields.get('not_saved', '')}".startswith(NO_RANKS_TEXT)
    return left and any(
        controller > line["controller"] and at_s <= line["unix_s"] for controller, at_s in took_over.items()
    )
