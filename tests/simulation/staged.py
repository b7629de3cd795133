"""A simulated job for a script: nothing in it is random, and all that happens is written down in order."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, TypeVar

from tests.simulation.collectives import Collectives, Returned
from tests.simulation.disk import OLDER_STEP, Disk
from tests.simulation.job import Job
from tests.simulation.pieces import OwnDisks, host_of, is_published
from tests.simulation.settings import OwnDirectories, Times
from tests.simulation.training import Training

T = TypeVar("T")

_OF_RANKS = (
    "got Welcome", "got Freeze", "got Thaw", "rolling", "writing", "publishing", "manifest written", "superseded", "renamed", "boundary",
)  # fmt: skip
"""What ranks do in a dump, as the simulated rank calls it; phases are logged for the steps that matter to the script."""
_UNTOLD = ("registered", "agent_attached", "agent_detached", "rank_finished", "stopped")
"""Journal lines of the startup and the end."""


class Steady(random.Random):
    """Every delay is the middle of its range, every choice the first: a script reads the same when others draw more."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def random(self) -> float:
        return 0.5

    def randint(self, a: int, b: int) -> int:
        return a

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Leave it in order."""


class PartialCollectives(Collectives):
    """Collectives that may end before some of their members have the result, as a dying peer's do."""

    def __init__(self, job: Job, hang_chance: float) -> None:
        super().__init__(job.scheduler, job.rng, hang_chance)
        self._clock = job.scheduler
        self.missed: set[tuple[int, int]] = set()
        """(rank, step): this rank gets an error instead of the step's record."""

    def enter(
        self,
        name: str,
        step: int,
        members: tuple[int, ...],
        rank: int,
        done: Callable[[], None],
        fail: Callable[[], None],
        returned: Returned | None = None,
        generation: int = 0,
    ) -> None:
        lost = name == "norm" and (rank, step) in self.missed
        end = (lambda: self._clock.after(0.05, fail)) if lost else done
        super().enter(name, step, members, rank, end, fail, returned, generation)


class StagedJob(Job):
    """A job whose every turn becomes a line of `lines`: (seconds, who, what)."""

    def __init__(
        self,
        training: Training,
        times: Times,
        *,
        agents: bool,
        standbys: int,
        collectives_hang: bool,
        roots: tuple[str, ...],
        own: OwnDirectories | None = None,
    ) -> None:
        self.lines: list[tuple[float, str, str]] = []
        self.logged_steps: frozenset[int] = frozenset()
        """Steps whose phases are worth a line."""
        self._read: dict[int, int] = {}
        super().__init__(Steady(), training, times, agents=agents, standbys=standbys, own=own)
        self.partial = self.collectives = PartialCollectives(self, 1.0 if collectives_hang else 0.0)
        if own is None:
            self.roots, self.disk = roots, Disk(roots)

    def note(self, text: str) -> None:
        super().note(text)
        left = re.match(r"(rank \d+) (leaves with \d+)", text)  # why, the controller has said
        self._tell(*(left.groups() if left else ("", text)))

    def happened(self, name: str, rank: int) -> None:
        if rank >= 0:
            step = name.rpartition(" ")[2]
            named = step.isdigit() and int(step) in self.logged_steps
            if named or name in _OF_RANKS:
                self._tell(f"rank {rank}", name)
        else:
            self._tell_journal()
        super().happened(name, rank)

    def _tell_journal(self) -> None:
        """Whichever controller has written a line just now."""
        for controller in self.controllers:
            for _, line in controller.journal[self._read.get(controller.place, 0) :]:
                left = str(line.fields.get("text")).startswith("exit code 7")  # as it was ordered
                if line.event not in _UNTOLD and not left:
                    self._tell(f"c{controller.place}", f"{line.event}{_fields(line.fields)}")
            self._read[controller.place] = len(controller.journal)

    def _tell(self, who: str | Any, text: str | Any) -> None:
        self.lines.append((self.now, who, text))

    def transcript(self) -> str:
        """Return all lines, and below them what remains on the disk and of the processes."""
        layout = self.training.layout
        lines = [f"shard g{index}: ranks {_value(ranks)}" for index, ranks in enumerate(layout.holders)]
        whose = " on each node" if self.own is not None else ""
        lines += [f"nodes of the ranks: {_value(layout.hosts)}; directories {' '.join(self.roots)}{whose}"]
        lines += [f"{at:8.4f}  {who:<7} {text}".rstrip() for at, who, text in _gathered(self.lines)]
        lost = self.disk.lost if isinstance(self.disk, OwnDisks) else set()
        for (root, name), directory in sorted(self.disk.directories.items()):
            if host_of(root) in lost:
                continue
            if directory.manifest is None or directory.manifest.step == OLDER_STEP or not is_published(name):
                continue
            lines.append(f"disk: {root}/{name}, tracker {self.disk.tracker.get(root, 'none')}")
            for file in (name for name in directory.manifest.files if name in directory.files):
                parts = ", ".join(f"{g} part {i + 1} of {n}" for g, i, n, _ in directory.files[file].parts)
                lines.append(f"disk:   {file}: {parts}")
        if not self.disk.published:
            lines.append("disk: nothing was published")
        if isinstance(self.disk, OwnDisks):
            without = f", without the disk of {' and '.join(sorted(lost))}" if lost else ""
            lines.append(f"disk: a restart loads step {self.disk.recovered()}{without}")
        ends = [f"rank {rank.rank}: {rank.ended or ('stopped' if rank.stopped else 'running')}" for rank in self.ranks]
        lines.append(f"end: {'; '.join(ends)}")
        for c in self.controllers:
            lines.append(f"end: c{c.place}: {'killed' if c.dead else c.over or c.state.stage.value}")
        return "\n".join(lines) + "\n"


def _gathered(read: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Put ranks that do the same at the same moment on one line."""
    lines: list[tuple[float, str, str]] = []
    for at, who, text in read:
        if lines and who.startswith("rank") and lines[-1][1].startswith("rank") and lines[-1][::2] == (at, text):
            lines[-1] = (at, f"{lines[-1][1].replace('rank ', 'ranks ')},{who.removeprefix('rank ')}", text)
            lines[-1] = (at, lines[-1][1].replace("rankss", "ranks"), text)
        else:
            lines.append((at, who, text))
    return lines


def _fields(fields: Any) -> str:
    """Return a journal line's fields in their order; empty ones say nothing, and the start's table is what the script set up."""
    shown = {key: value for key, value in fields.items() if value not in ((), "", None) and key != "rows"}
    if not any(step >= 0 for step in shown.get("backup_steps", ())):
        shown.pop("backup_steps", None)
    return "".join(f" {key}={_value(value)}" for key, value in shown.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return f"({_fields(value).strip()})"
    if isinstance(value, tuple):
        return ",".join(_value(each) if isinstance(each, dict) else str(each) for each in value)
    return repr(value) if isinstance(value, str) and " " in value else str(value)
