"""Find checkpoints: list the published ones, verify them, open the newest valid one.

Owns the search and the cheap judgement of what is in a folder; changes nothing on disk. The tracker file is a hint for people and other
tools: the search looks at the directories themselves.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ttp.checkpoint.format import keys
from ttp.checkpoint.format.durable import step_of_directory, steps_in, steps_of_run
from ttp.checkpoint.format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ttp.checkpoint.format.signature import VerifyKey, key_of_environment, read_verify_key
from ttp.checkpoint.format.types import HeldTensor
from ttp.checkpoint.reader import Reader, open_verified
from ttp.checkpoint.staging import PRUNED, SUPERSEDED
from ttp.checkpoint.verify import verify
from ttp.errors import CheckpointError, CheckpointMismatch

StrPath = str | os.PathLike[str]
OnSkip = Callable[[Path, str], None]
"""Called with each checkpoint or directory that is passed over, and why."""


class Ranks(Protocol):
    """The ranks that look for a checkpoint together; all of them call each method, in the same order."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank."""


class SingleProcess:
    """One process by itself."""

    index = 0
    count = 1

    def exchange(self, value: Any) -> list[Any]:
        return [value]


def ignore(path: Path, reason: object) -> None:
    """Pass over what is skipped in silence."""


def list_checkpoints(dirs: Iterable[StrPath]) -> list[Path]:
    """Return all published checkpoints of these directories, newest step first (then in the directories' order)."""
    found = [(-step, order, path) for order, directory in enumerate(dirs) for step, path in steps_in(Path(directory))]
    return [path for _, _, path in sorted(found, key=lambda entry: entry[:2])]


def list_readable(
    dirs: Sequence[StrPath],
    on_skip: Callable[[Path, OSError], None],
    listed: Callable[[Sequence[StrPath]], list[Path]] = list_checkpoints,
) -> list[Path]:
    """Return what `listed` finds in these directories, newest step first, without those that cannot be read (`on_skip`). Raises
    OSError when none can be read."""
    found: list[Path] = []
    problems: list[OSError] = []
    for directory in dirs:
        try:
            found += listed([directory])
        except OSError as error:
            problems.append(error)
            on_skip(Path(directory), error)
    if problems and len(problems) == len(dirs):
        raise problems[0]
    return sorted(found, key=lambda path: -step_of(path))


def step_of(path: StrPath) -> int:
    """Return the step that a published checkpoint's directory is named for. Raises CheckpointError for another name."""
    step = step_of_directory(Path(path))
    if step is None:
        raise CheckpointError(f"invalid checkpoint: got {path}, expected a published one's directory, iter_<step>")
    return step


def newest_finite(dirs: Sequence[str], passed_over: Mapping[str, int]) -> Path | None:
    """Return the newest checkpoint of these directories whose manifest says that its state has neither NaN nor infinity, but for those in
    `passed_over` (inode by path); None: there is none. What cannot be read is left out; no checksum is compared."""
    for _, path in steps_of_run(dirs, passed_over):
        try:
            if read_manifest(path).finite:
                return path
        except (CheckpointError, OSError):
            continue
    return None


def first_valid(
    paths: Sequence[StrPath], judge: Callable[[Path], Manifest], *, ranks: Ranks | None = None, on_skip: OnSkip = ignore
) -> Reader | None:
    """Open the first of `paths` that `judge` takes: it raises CheckpointError or OSError for one that is not valid.

    With `ranks`, every rank calls this with the same paths, each judges its share, and all return the same checkpoint.
    """
    ranks = ranks or SingleProcess()
    skipped: list[str] = []
    for path in map(Path, paths):
        manifest, reason = None, ""
        try:
            manifest = judge(path)
        except (CheckpointError, OSError) as error:
            reason = str(error) or type(error).__name__
        reason = next((other for other in ranks.exchange(reason) if other), "")
        if not reason and manifest is not None:
            return open_verified(path, manifest, tuple(skipped))
        skipped.append(f"{path}: {reason}")
        on_skip(path, reason)
    return None


def find_newest_valid(
    dirs: Sequence[StrPath],
    *,
    deep: bool = True,
    ranks: Ranks | None = None,
    on_skip: OnSkip = ignore,
    key: VerifyKey | None = None,
) -> Reader | None:
    """Open the newest valid checkpoint of `dirs`; None: there is none. Directories that cannot be read are passed over as well.

    With `ranks`, every rank calls this, each checks its share of the files. key: who must have signed it. Raises OSError when none of `dirs` can be read.
    """
    ranks = ranks or SingleProcess()
    names = [str(path) for path in list_readable(dirs, lambda directory, error: on_skip(directory, str(error)))]
    share = (ranks.index, ranks.count)
    names = ranks.exchange(names if ranks.index == 0 else [])[0]  # the first rank's list
    return first_valid(names, lambda path: verify(path, deep=deep, share=share, key=key), ranks=ranks, on_skip=on_skip)


# --- what a path means to the commands ---


def is_checkpoint(path: Path) -> bool:
    """Tell a checkpoint from a folder of them."""
    return step_of_directory(path.absolute()) is not None or (path / MANIFEST_NAME).exists()


def folder_at(path: Path) -> Path:
    """Return the folder of checkpoints that `path` means: itself, a checkpoint's parent, `checkpoints` of an output folder.

    Raises CheckpointError where it is not a folder.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory: expected a checkpoint (iter_0000042) or a folder of checkpoints"
        )
    if is_checkpoint(path):
        return path.absolute().parent
    below = path / "checkpoints"
    return below if below.is_dir() and not steps_in(path) else path


def all_at(path: Path) -> list[Path]:
    """Return the checkpoint that `path` is, or all published ones of the folder, newest first, valid or not.

    Raises CheckpointError when there is none.
    """
    folder = folder_at(path)
    found = [path] if is_checkpoint(path) else list_checkpoints([folder])
    if not found:
        raise nothing_in(folder)
    return found


def nothing_in(folder: Path) -> CheckpointError:
    """Return the error for a folder without checkpoints."""
    if (folder / ".metadata").exists():
        return CheckpointError(
            f"no checkpoint in {folder}: it has .metadata and no {MANIFEST_NAME}, so torch.distributed.checkpoint wrote it"
            " alone; load it with that"
        )
    return CheckpointError(
        f"no checkpoint in {folder}: expected directories like iter_0000042; name the folder that was given as save_dirs"
    )


def open_at(path: Path, judge: Callable[[Path], Manifest], on_skip: OnSkip = ignore) -> Reader:
    """Open the checkpoint at `path`, or the newest one of the folder `path` that `judge` takes. Raises CheckpointError.

    Where the job removes one that is being judged, there are newer ones: the folder is listed again.
    """
    if is_checkpoint(path):
        return open_verified(path, judge(path))
    refused: dict[Path, CheckpointError | OSError] = {}

    def judge_once(each: Path) -> Manifest:
        if each not in refused:
            try:
                return judge(each)
            except (CheckpointError, OSError) as error:
                if is_gone(each):
                    raise _Removed from None
                refused[each] = error
                on_skip(each, str(error))
        raise refused[each]

    while True:
        paths = all_at(path)
        try:
            found = first_valid(paths, judge_once)
        except _Removed:
            continue
        if found is None:
            raise CheckpointError(
                f"{paths[0].parent} holds no valid checkpoint: {'; '.join(map(str, refused.values()))}"
            )
        return found


class _Removed(Exception):
    """A checkpoint was removed while it was judged."""


def is_gone(path: Path) -> bool:
    """Tell a published checkpoint that was removed since it was listed: its name goes first."""
    return not os.path.lexists(path)


# --- what is in a folder ---

_BESIDE = re.compile(r"iter_\d{7,}_\w.*")
_MEANINGS = (
    (PRUNED, "half removed; the next prune, or attempt of a job, removes it"),
    ("_tmp", "a staging directory; it is being written, or the next attempt of a job removes it"),
    ("_broken_", "was broken and renamed; remove it when it is not needed"),
    (
        "_replaced_",
        "was there before a run that did not resume from it, and wrote that step itself; remove it when it is not needed",
    ),
    (SUPERSEDED, "superseded by a later write of that step; goes when all ranks have loaded a newer step"),
)


class State(enum.Enum):
    COMPLETE = "complete"
    """Names, sizes and completeness are right; the checksums were not compared."""
    PART = "part of a node"
    BROKEN = "broken"
    UNREADABLE = "unreadable"
    """The system did not let us look."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One published checkpoint: `manifest` or, if there is no good one, `error`."""

    path: Path
    state: State
    manifest: Manifest | None
    error: str

    @property
    def step(self) -> int:
        return step_of_directory(self.path) or 0

    @property
    def nbytes(self) -> int:
        """What it takes here: of a node's part the files of its ranks."""
        return size_of(self.path)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory beside the published ones."""

    path: Path
    meaning: str
    nbytes: int


def list_published(folder: Path) -> list[Listed]:
    """Return every published checkpoint of a folder, newest first, after the cheap checks; without what is removed meanwhile."""
    entries = [judged(path) for path in list_checkpoints([folder])]
    return [entry for entry in entries if entry.manifest is not None or not is_gone(entry.path)]


def judged(path: Path) -> Listed:
    """Return what one checkpoint is after the cheap checks."""
    try:
        manifest = verify(path, deep=False)
    except CheckpointError as error:
        return Listed(path, State.BROKEN, None, str(error))
    except OSError as error:
        return Listed(path, State.UNREADABLE, None, f"{error.filename or path}: {error.strerror or error}")
    return Listed(path, State.PART if manifest.hosts else State.COMPLETE, manifest, "")


def list_leftovers(folder: Path) -> list[Leftover]:
    """Return what unfinished writes, removals and damage have left in a folder, by name."""
    found = []
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if _BESIDE.fullmatch(name) and path.is_dir():
            meaning = next((text for mark, text in _MEANINGS if mark in name), "not a name of TTP's")
            found.append(Leftover(path, meaning, size_of(path)))
    return found


def size_of(path: Path) -> int:
    """Return the bytes of all files of a directory; what goes meanwhile counts nothing."""
    nbytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                nbytes += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return nbytes


# --- for programs ---

_MODEL = keys.model_key("")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A valid checkpoint. Made by `ttp.open_checkpoint`."""

    path: str
    step: int
    cause: str
    """Why it was written: `periodic`, `requested`, or what ended the job."""
    layout: Mapping[str, Any]
    """What `ttp.start(layout=...)` was given, and the optimizer's own layout."""
    state: Mapping[str, Any]
    """What `set_step_state(step, ...)` was given."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the model's parameters, by name."""
    skipped: tuple[str, ...]
    """Newer checkpoints that were not valid, with the reason each."""
    _reader: Reader = field(repr=False, compare=False)

    def weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Return parameters (all of them, or `names`) whole, on the CPU, in float32: the optimizer's masters.

        Raises CheckpointMismatch for a name that is not there, CorruptCheckpoint when the bytes cannot be read.
        """
        chosen = list(self.shapes if names is None else names)
        for name in chosen:
            if name not in self.shapes:
                raise CheckpointMismatch(
                    f"{self.path} has no parameter {name!r}; it has {', '.join(sorted(self.shapes))}"
                )
        found = {name: torch.empty(self.shapes[name], dtype=torch.float32) for name in chosen}
        self._reader.read_into(
            [HeldTensor(keys.model_key(name), self.shapes[name], 0, tensor.view(-1)) for name, tensor in found.items()]
        )
        return found


def open_checkpoint(path: StrPath, *, deep: bool = True, key: StrPath | None = None) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest valid one of the directory `path`; any process may call this, without a process
    group, an optimizer, or knowledge of the layout that wrote it.

    deep: compare checksums. key: file of the public key that must have signed it; None: the one that TTP_VERIFY_KEY names, if it is set.
    Raises CheckpointError when none is there, CorruptCheckpoint when the one that is named is broken or not signed, ConfigError (the key).
    """
    signer = key_of_environment() if key is None else read_verify_key(os.fspath(key), "key")
    reader = open_at(Path(path), lambda each: verify(each, deep=deep, key=signer))
    manifest = reader.manifest
    state = manifest.state.get("trainer")
    return Checkpoint(
        path=str(reader.path),
        step=manifest.step,
        cause=manifest.cause.kind.value,
        layout=manifest.layout,
        state=state if isinstance(state, dict) else {},
        shapes={k.removeprefix(_MODEL): spec.shape for k, spec in manifest.tensors.items() if k.startswith(_MODEL)},
        skipped=reader.skipped,
        _reader=reader,
    )
