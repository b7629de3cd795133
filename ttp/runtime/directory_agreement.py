"""The checkpoint directories as all ranks of an attempt see them: who keeps them, which of them the attempt uses, what it may go on
from.

All ranks make one and call its methods in the same order, for they agree by collectives, except where it says otherwise. Owns
that agreement only: what a keeper does in its directories is `ttp.runtime.directory_lock`'.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ttp.checkpoint.format.durable import inodes_in
from ttp.checkpoint.node_local.parts import next_start
from ttp.checkpoint.node_local.store import NodeLocalStore
from ttp.checkpoint.staging import probe_writable
from ttp.checkpoint.store import SharedStore, Store
from ttp.config import Settings
from ttp.errors import CheckpointError, ConfigError, NotWritable
from ttp.exchange import launch_file
from ttp.exchange.agreed import agree
from ttp.exchange.json_collectives import exchange_json
from ttp.exchange.launch_file import Launch
from ttp.groups.vacancy import vacant
from ttp.inputs import checked
from ttp.runtime.directory_lock import NO_ROOM, RunDirectories, check_same, why_unusable
from ttp.runtime.rank_runtime import show
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a directory does not serve, as some rank found it when the attempt began."""

    reason: str
    full: bool
    """All but room is there: its lock is held, and all ranks see the same one."""


def named_directories(save_dirs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str]) -> list[str]:
    """Return the absolute paths of the directories that a program has named. Raises ConfigError for anything but a list of paths."""
    if isinstance(save_dirs, str | os.PathLike):
        save_dirs = [save_dirs]  # a string is a sequence too: of letters, each of which would be a directory
    try:
        named = [str(Path(directory).resolve()) for directory in save_dirs]
    except (TypeError, ValueError):  # no paths; one with NUL
        shown = checked.shown(save_dirs)
        raise ConfigError(f"invalid save_dirs: got {shown}, expected a list of paths, or one path") from None
    if not named:
        raise ConfigError("save_dirs is empty, expected at least one directory for checkpoints")
    return named


def split_directories(
    save_dirs: Sequence[str], found: Sequence[Mapping[str, Failure]]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Return what this attempt uses, what of that serves already, and why each other one does not (found: every rank's failures).

    A directory that is merely full is used: room comes back, and is looked for at every save and every fault. Any other that
    fails on any rank is left alone until the next attempt: its lock may not be held, so that another job may write there by the
    time it is back, or a rank lacks it.
    """
    reasons = {directory: failure.reason for failures in found for directory, failure in failures.items()}
    barred = {directory for failures in found for directory, failure in failures.items() if not failure.full}
    used = tuple(directory for directory in save_dirs if directory not in barred)
    return used, tuple(directory for directory in used if directory not in reasons), reasons


class JobDirectories:
    """The checkpoint directories of one attempt of the job."""

    def __init__(
        self, named: Sequence[str], settings: Settings, rank: int, device: torch.device, on_divergence: str = ""
    ) -> None:
        """Claim and try all of `named`: find out now, not at the fault, that a directory cannot take a checkpoint; on all ranks
        if on one. `on_divergence`: the optimizer's choice, which decides whether saves compare; empty: it has none. Raises NotWritable, ConfigError."""
        self.named = tuple(named)
        """As they were given, in order of preference."""
        self._settings = settings
        self._rank = rank
        self._device = device
        self._on_divergence = on_divergence
        self.store = self._agree_on_store()
        self.keeps = rank == self.store.leader
        """This rank looks after the directories: for all ranks, or for those of its node."""
        self.node = f"node {self.store.node}: " if self.store.node else ""
        """What a directory leader's error begins with."""
        self._mine = RunDirectories(self.named, settings.job_id, settings.round_number == 0, self.store)
        used, serving = agree("save directories", self._prepare)
        self.used, self.serving = tuple(used), tuple(serving)
        if vacant() and self.keeps:
            self._mine.take_over(self.used)
        """Those that this attempt writes into, and those of them that could take a checkpoint at its begin."""
        self.before = {} if vacant() else inodes_in(self.used)
        """Inode of each checkpoint that was there when the attempt began, by path. A process in a lost one's place comes later, and is given
        what the others have passed over."""

    def _agree_on_store(self) -> Store:
        """Return the kind of directories that all ranks have. Raises ConfigError."""
        shared_dirs, host = self._settings.shared_dirs, self._settings.host
        if vacant():
            return SharedStore()  # a node with directories of its own replaces no rank
        start = 0 if shared_dirs else next_start(self.named)
        launch = self._read_launch()
        known = [uuid.uuid4().hex, None] if launch is None else [launch.name, launch.began_after]
        mine = [shared_dirs, host, start, known, self._settings.rehearse_every, self._on_divergence]
        gathered = exchange_json(mine, self._device)
        shared = {bool(value) for value, *_ in gathered}
        if len(shared) > 1:
            alone = [rank for rank, (value, *_) in enumerate(gathered) if not value]
            raise ConfigError(f"TTP_SHARED_DIRS: got False on ranks {alone} only, expected the same on all nodes")
        if len(rehearsals := {int(every) for *_, every, _ in gathered}) > 1:
            raise ConfigError(
                f"TTP_REHEARSE: got every:N with N of {sorted(rehearsals)} (0: not set), expected the same on all nodes"
            )
        choices = [str(choice) for *_, choice in gathered]
        if others := [rank for rank, choice in enumerate(choices) if choice != choices[0]]:
            raise ConfigError(
                f"on_divergence: got {choices[others[0]]!r} on {ranks_text(others)}, {choices[0]!r} on rank 0, expected the same on all ranks"
            )
        if shared_dirs:
            return SharedStore()
        hosts, starts = [str(host) for _, host, *_ in gathered], [int(start) for _, _, start, *_ in gathered]
        launches = [(str(name), after) for _, _, _, (name, after), *_ in gathered]
        name, after = next((each for each in launches if each[1] is not None), launches[0])
        return NodeLocalStore(hosts, max(starts), self._rank, name, after)

    def _read_launch(self) -> Launch | None:
        """Return what the attempt before this one has left on this node, if this node was part of it."""
        if not self._settings.attempt_dir:
            return None
        try:
            return launch_file.read(Path(self._settings.attempt_dir))
        except (OSError, ValueError) as error:
            log.warning("cannot read which launch this attempt belongs to: %s", error)
            return None

    def begin_launch(self, step: int) -> None:
        """All ranks have chosen the checkpoint of `step` (0: none): a restart takes no later one of another launch."""
        if not self.keeps or not self.store.launch or not self._settings.attempt_dir:
            return
        after = step if self.store.began_after is None else self.store.began_after
        try:
            launch_file.write(Path(self._settings.attempt_dir), Launch(self.store.launch, after))
        except OSError as error:
            log.warning(
                "%sa restart may not know which checkpoints are this launch's: %s. Free space there, or set TMPDIR",
                self.node,
                error,
            )

    def _prepare(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        refusal = ""
        if self.keeps:
            try:
                self._mine.claim()
            except NotWritable as error:
                refusal = f"{self.node}{error}"
        # No staging directory is made before old ones are removed.
        gathered = exchange_json([refusal, self._mine.mark, self._mine.failing], self._device)
        refusal = next((text for text, _, _ in gathered if text), "")
        _, mark, unclaimed = gathered[self.store.leader]
        failing = {directory: Failure(reason, full=False) for directory, reason in unclaimed.items()}
        try:
            for directory in () if refusal else self.named:
                if directory not in failing:
                    check_same(directory, mark, self.store.leader, self.store.node)
                    failing |= self._found_failing(directory)
        except NotWritable as error:
            refusal = f"rank {self._rank}: {error}"
        mine = {directory: dataclasses.astuple(failure) for directory, failure in failing.items()}
        answers = exchange_json([refusal, mine], self._device)
        self._mine.remove_mark()
        found = [{directory: Failure(*fields) for directory, fields in each.items()} for _, each in answers]
        used, serving, reasons = split_directories(self.named, found)
        refusals = [text for text, _ in answers if text]
        refusals += [why_unusable(self.named, reasons, self._settings.round_number == 0)]
        if refusals[0]:
            self.release()
            raise NotWritable(refusals[0])
        for directory, reason in reasons.items() if self._rank == 0 else ():
            until = (
                "room is looked for at every save" if directory in used else "it is left alone until the next attempt"
            )
            show(logging.WARNING, f"continuing without a directory: {reason}; {until}")
        return used, serving

    def _found_failing(self, directory: str) -> dict[str, Failure]:
        try:
            probe_writable(directory)
        except NotWritable as error:
            cause = error.__cause__
            full = isinstance(cause, OSError) and cause.errno in NO_ROOM
            return {directory: Failure(f"rank {self._rank}: {error}", full)}
        return {}

    def candidates(self, choice: str) -> list[str]:
        """Return the checkpoints that `Session.resume(choice)` may load, newest first: rank 0's list, or the node's keeper's. A
        refusal of any keeper is raised by every rank (CheckpointError)."""
        paths: list[str] = []
        refusal = ""
        if self.keeps:
            try:
                paths = self._mine.candidates(choice)
            except (CheckpointError, OSError) as error:
                refusal = f"{self.node}{error}"
        answers = exchange_json([refusal, paths], self._device)
        if refusal := next((text for text, _ in answers if text), ""):
            raise CheckpointError(refusal)
        chosen: list[str] = answers[self.store.leader][1]
        return chosen

    def forget_superseded(self, step: int) -> None:
        """This rank has loaded the checkpoint of `step`; when all have, directory leaders remove what it supersedes."""
        exchange_json("", self._device)
        if self.keeps:
            self._mine.forget_superseded(step)

    def release(self) -> None:
        """Give the locks back (this rank alone)."""
        self._mine.release()
