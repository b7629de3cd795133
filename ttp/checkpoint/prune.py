"""Which older checkpoints go while the newest valid ones stay, and how one is removed.

Owns the choice and the removal. Goes by what a restart would load: a checkpoint counts as kept when its checksums were compared,
so that the newest valid one always stays. What is not valid is never removed: somebody may want to look at it. A removal that is cut at
any moment leaves nothing that looks whole and is not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ttp.checkpoint.find import Leftover, State, list_leftovers, list_published, nothing_in, size_of
from ttp.checkpoint.format.durable import fsync_directory, step_directory_name
from ttp.checkpoint.passed_over import MEANING, is_in
from ttp.checkpoint.staging import PRUNED
from ttp.errors import CheckpointError

LINKED = "a symbolic link, which is removed by hand"
PROTECTED = "cannot be removed by this user: no permission to change it"
"""Why a checkpoint that would go is kept."""


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint of a folder; of several nodes: all that is seen of one step."""

    step: int
    paths: tuple[Path, ...]
    may_be_finite: bool = True
    """False where a manifest says that the state holds NaN or infinity."""
    error: str = ""
    """Why it is left alone."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done with each step, newest first."""

    folders: tuple[Path, ...]
    kept: tuple[Step, ...]
    removed: tuple[Step, ...]
    left: tuple[Step, ...]
    """Not valid, links, or another run's, and not touched; `error` says why."""
    unfinished: tuple[Leftover, ...]
    """Half removed by an earlier prune: removed as well."""

    @property
    def going(self) -> list[Path]:
        """What the removal takes away."""
        return [path for step in self.removed for path in step.paths] + [entry.path for entry in self.unfinished]

    @property
    def nbytes(self) -> int:
        """Room that the removal gives back."""
        return sum(map(size_of, self.going))


def choose(
    folders: Sequence[Path],
    steps: Sequence[Step],
    keep: int,
    fault_of: Callable[[Step, bool], str],
    *,
    partial: bool = False,
) -> Plan:
    """Prove `steps`, newest first, valid until `keep` are found; older ones go where they are whole.

    Where none of those kept has a finite state, the newest that has one stays as well. fault_of(step, deep): what is wrong with a step,
    empty: nothing; deep: checksums, not sizes alone. partial: older steps go that are not whole, too. The plan keeps none when none is
    valid: `left` says why.
    """
    kept: list[Step] = []
    removed: list[Step] = []
    left: list[Step] = []
    for step in steps:
        goes = len(kept) >= keep and (any(one.may_be_finite for one in kept) or not step.may_be_finite)
        fault = fault_of(step, not goes)
        if goes and any(path.is_symlink() for path in step.paths):
            left.append(replace(step, error=LINKED))
        elif goes and (partial or not fault):
            if all(map(_is_removable, step.paths)):
                removed.append(step)
            else:
                left.append(replace(step, error=PROTECTED))
        elif fault:
            left.append(replace(step, error=fault))
        else:
            kept.append(step)
    unfinished = [entry for folder in folders for entry in list_leftovers(folder) if PRUNED in entry.path.name]
    return Plan(tuple(folders), tuple(kept), tuple(removed), tuple(left), tuple(unfinished))


def _is_removable(path: Path) -> bool:
    """Tell whether this user may remove the files of a directory."""
    return os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)


def plan_prune(
    folder: Path, keep: int, check: Callable[[Path], object], passed_over: Mapping[str, int] = MappingProxyType({})
) -> Plan:
    """Choose in a folder of whole checkpoints; `check` compares checksums and raises CheckpointError. Those that are `passed_over` (inode by path)
    are neither removed nor counted: the plan leaves them alone.

    Raises CheckpointError where none is valid, OSError where one that may be kept cannot be read.
    """
    published = list_published(folder)
    if not published:
        raise nothing_in(folder)
    listed = [entry for entry in published if not is_in(passed_over, entry.path)]
    states = {entry.step: entry for entry in listed}
    others = [Step(entry.step, (entry.path,), error=MEANING) for entry in published if entry not in listed]

    def fault_of(step: Step, deep: bool) -> str:
        entry = states[step.step]
        if entry.state is not State.COMPLETE:
            return entry.error or entry.state.value
        try:
            if deep:
                check(entry.path)
        except CheckpointError as error:
            return str(error)
        return ""

    steps = [
        Step(entry.step, (entry.path,), entry.manifest is not None and entry.manifest.finite is not False)
        for entry in listed
    ]
    plan = choose([folder], steps, keep, fault_of)
    plan = replace(plan, left=(*plan.left, *others))
    if not plan.kept:
        raise CheckpointError(
            f"{folder} holds no valid checkpoint, so nothing is removed: {'; '.join(step.error for step in plan.left)}"
        )
    return plan


def remove(plan: Plan) -> None:
    """Remove what the plan says, oldest first. What cannot be removed keeps nothing else: the first such is raised as OSError at the end; what was renamed by then
    is gone for every search."""
    removals = [(entry.path, partial(remove_tree, entry.path)) for entry in plan.unfinished]
    removals += [(path, partial(take_away, path, step.step)) for step in reversed(plan.removed) for path in step.paths]
    problems: list[OSError] = []
    for path, remove_it in removals:
        try:
            remove_it()
        except OSError as error:
            problems.append(OSError(error.errno, error.strerror or str(error), str(path)))
    if problems:
        raise problems[0]


def take_away(path: Path, step: int) -> None:
    """Remove the directory of a published name (or a superseded one) of `step`. Raises OSError; CheckpointError for a link."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link to {os.readlink(path)}: remove the link, or the checkpoint, by hand"
        )
    going = path.with_name(f"{step_directory_name(step)}{PRUNED}{uuid.uuid4().hex[:12]}")
    os.rename(path, going)
    fsync_directory(path.parent)  # a power cut must not bring the name back over files that are gone
    remove_tree(going)


def remove_tree(path: Path) -> None:
    """Remove a directory that is not a checkpoint any more."""
    if path.is_symlink():  # of a link the link alone
        path.unlink(missing_ok=True)
    while path.exists():
        with contextlib.suppress(FileNotFoundError):  # an attempt of the job may be cleaning the same away
            shutil.rmtree(path)
