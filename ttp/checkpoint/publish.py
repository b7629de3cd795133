"""Make the shares of all writers one visible checkpoint, or nothing at all.

Owns the order of the acts (complete, checked, durable, then renamed, then the tracker) and the rule that a valid published checkpoint of this run
is never replaced. One of another run, or that the resume has refused, is renamed. Never writes a tensor.

Several publishers may be at work: one that was declared dead may wake up beside its successor. So a publisher first
claims the staging directory by renaming it; whoever loses the claim fails on a name that is gone, and changes nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ttp.checkpoint.format import dcp
from ttp.checkpoint.format.checksum import Checksum, of_file
from ttp.checkpoint.format.durable import advance_tracker, fsync_directory, step_directory_name
from ttp.checkpoint.format.file_index import Contents, read_contents, wrong_files
from ttp.checkpoint.format.manifest import Manifest, sign_manifest, to_bytes, write_manifest
from ttp.checkpoint.format.signature import NO_KEYS, Keys
from ttp.checkpoint.staging import check_files, check_name, claim_of, discard_staging, free_name, names_of_staging
from ttp.checkpoint.verify import check_complete, verify
from ttp.checkpoint.write import write_share
from ttp.errors import CheckpointError, CheckpointMismatch, CorruptCheckpoint, NotWritable
from ttp.proto.messages import Cause, CommitRecord, FileEntry, ShareResult
from ttp.version import VERSION

logger = logging.getLogger(__name__)

PUBLISH_TRIES = 5


def publish(directory: str | os.PathLike[str], tmp_name: str, **fields: Any) -> str:
    """Make `directory/tmp_name` a checkpoint in directories that all ranks share; return its path: see `Publication`."""
    return Publication(Path(directory), tmp_name, **fields).run()


@dataclass(kw_only=True)
class Publication:
    """One publish of a staging directory that holds exactly `results`, by one rank, without a collective.

    After a failure it may be done again by any rank. A valid checkpoint of the same step and tensors that is there already is
    kept and its path returned; a broken one is renamed.
    """

    root: Path = field(kw_only=False)
    tmp_name: str = field(kw_only=False)
    step: int
    results: Sequence[ShareResult]
    cause: Cause
    record: CommitRecord | None
    state: Mapping[str, Any]
    layout: Mapping[str, Any]
    expected: Mapping[str, Sequence[int]] | None = None
    """Shape of every tensor that must be there; None: whatever the shares name."""
    blobs: Mapping[str, object] = field(default_factory=dict)
    """Plain values that this publisher adds (param groups)."""
    rank: int = 0
    term: int = 0
    trusted: Collection[str] = ()
    """Published checkpoints that this run has written or verified itself."""
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """Published checkpoints, inode by path, that were there when the attempt began, and from which it has not resumed."""
    advance: Callable[[int], None] = lambda count: None
    """Called as the work progresses."""
    created_unix_s: float | None = None
    keys: Keys = NO_KEYS

    def run(self) -> str:
        """Publish; return the checkpoint's path.

        Raises CorruptCheckpoint (the shares do not make a whole; TornShare: and whose it is, is known), CheckpointMismatch (the
        step is taken by another model's checkpoint), NotWritable (the file system refused), CheckpointError (the staging directory
        is gone, or a later controller's checkpoint is published). Nothing is visible then, or the checkpoint is whole.
        """
        self.final = self.root / step_directory_name(self.step)
        self.files = [file for result in self.results for file in result.files]
        check_name(self.tmp_name, self.step)
        check_files(self.files)
        self.manifest = self.make_manifest()
        to_bytes(self.manifest)  # a state that JSON cannot carry is found before anything is touched
        try:
            for _ in range(PUBLISH_TRIES):
                if self.is_published() or self._publish_once():
                    break
            else:
                raise CheckpointError(
                    f"step {self.step}: {self.root / self.tmp_name} is gone or was taken over by other publishers, and {self.final}"
                    " is not there, or not this run's: nothing to publish. Publish again, or write the step again in a new staging directory"
                )
            fsync_directory(self.root)
        except OSError as error:
            raise NotWritable(
                f"rank {self.rank} cannot publish step {self.step} in {self.root}: {error.strerror or error} ({error.filename});"
                " make room there or list another checkpoint directory after it"
            ) from error
        try:
            advance_tracker(self.root, self.step)
        except OSError as error:  # the checkpoint is published all the same: the tracker is a hint
            logger.warning(
                "step %d is published as %s, but its tracker was not replaced: %s", self.step, self.final, error
            )
        return str(self.final)

    def _publish_once(self) -> bool:
        """Claim the staging directory, complete it, rename it. False when another publisher came first: look again."""
        own = self.own_files()
        claim = claim_staging(self.root, self.tmp_name, own, self.published_by_other, self.advice)
        if claim is None:
            return False
        try:
            contents = read_contents(claim, [ShareResult(tuple(own))], self.advance)
            self.check(contents)
            for name in sorted(set(os.listdir(claim)) - {file.name for file in own}):
                os.unlink(claim / name)  # of a writer that died, or of a publisher before us
            added = write_share(
                claim.parent,
                claim.name,
                self.rank,
                (),
                self.blobs,
                suffix="blobs",
                make=False,
                advance=self.advance,
                digests=self.keys.sign is not None,
            )
            self.complete(claim, contents, added)
            fsync_directory(claim)
            return self.place(claim)
        except (FileNotFoundError, CheckpointError):
            if claim.exists():
                raise
            return False  # claimed away meanwhile: a publisher that had stood still has woken up

    # --- what is different where each node has directories of its own ---

    advice = "is it the same directory on every node?"
    """Where a file is missing."""

    def make_manifest(self) -> Manifest:
        """Return the manifest without what only the files have."""
        return Manifest(
            step=self.step,
            cause=self.cause,
            layout=self.layout,
            files=(),
            tensors={},
            state=self.state,
            record=self.record,
            created_unix_s=time.time() if self.created_unix_s is None else self.created_unix_s,
            attempt=self.tmp_name,
            term=self.term,
            versions={"torch": str(torch.__version__), "ttp": VERSION},
        )

    def own_files(self) -> list[FileEntry]:
        """Return the files that the staging directory must have here."""
        return self.files

    def published_by_other(self) -> bool:
        """A checkpoint of the step is there, which would say why files are gone."""
        return os.path.lexists(self.final)

    def check(self, contents: Contents) -> None:
        """Prove the shares whole, and note what tensors they hold. Raises CorruptCheckpoint."""
        self.manifest = replace(self.manifest, tensors=check_complete(contents, self.expected))

    def complete(self, claim: Path, contents: Contents, added: ShareResult) -> None:
        """Add torch's metadata and the manifest, durable. `added`: this publisher's plain values."""
        blobs = read_contents(claim, [added])
        contents = replace(contents, files=contents.files + blobs.files, blobs=contents.blobs + blobs.blobs)
        dcp.write_metadata(claim, contents, str(self.final), self.tmp_name, self.advance)
        metadata = claim / dcp.METADATA_NAME
        checksum = Checksum(digest=self.keys.sign is not None)
        text = of_file(metadata, checksum)
        entry = FileEntry(dcp.METADATA_NAME, metadata.stat().st_size, text, self.rank, checksum.digest)
        files = sorted((*contents.files, entry), key=lambda file: file.name)
        self.write_manifest(claim, replace(self.manifest, files=tuple(files), finite=contents.finite))
        if error := wrong_files(claim, files, "all was there before; write the step again in a new staging directory"):
            raise error

    def write_manifest(self, claim: Path, manifest: Manifest) -> None:
        """Write and sign the manifest. A checkpoint that cannot be signed is published all the same: its step would be lost else."""
        content = write_manifest(claim, manifest)
        if self.keys.sign is None:
            return
        try:
            sign_manifest(claim, manifest, content, self.keys.sign)
        except FileNotFoundError:  # another publisher has taken the claim
            raise
        except Exception as error:
            logger.warning(
                "step %d is published without a signature: %s; run `ttp ckpt sign --sign-key %s %s`",
                self.step, error, self.keys.sign.path, self.final,
            )  # fmt: skip

    def place(self, claim: Path) -> bool:
        """Give the finished checkpoint its name. False: the name is taken."""
        try:
            os.rename(claim, self.final)  # fails when it is there: a published directory is never empty
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            raise
        return True

    def is_published(self) -> bool:
        """True when a valid checkpoint of the same tensors is there. A broken one is renamed: False. So is one that was passed over: its bits are
        not this run's state.

        Every byte is read only where there is a doubt. When the staging directory's files are gone, the checkpoint is made of them:
        another publisher came first, and what they hold was durable and checksummed before it was reported; besides, there would
        be nothing to put in its place. What this run wrote or verified is `trusted`. Otherwise the checkpoint is an older
        run's, which may have been skipped at start because it is broken or not signed: there a flipped bit must be found.
        """
        if not os.path.lexists(self.final):
            return False
        contents = self._staged()
        try:
            judged = os.lstat(self.final)
            passed_over = self.passed_over.get(str(self.final)) == judged.st_ino
            if passed_over and contents is None:
                return False  # another publisher is about to rename it
            doubtful = contents is not None and not passed_over and str(self.final) not in self.trusted
            manifest = verify(
                self.final,
                deep=doubtful,
                progress=lambda done, total: self.advance(1),
                key=self.keys.verify if doubtful else None,
            )
        except FileNotFoundError:
            return False
        except CorruptCheckpoint as error:
            if aside := _move_aside(self.final, judged, "_broken_"):
                logger.error("%s is broken and was moved to %s: %s", self.final, aside, error)
            return False
        found = dict(manifest.tensors)
        if contents is not None:
            same = found == check_complete(contents, self.expected)
        else:
            shapes = {key: spec.shape for key, spec in found.items()}
            same = self.expected is None or shapes == {key: tuple(shape) for key, shape in self.expected.items()}
        if not same:
            raise CheckpointMismatch(
                f"{self.final} is already there and belongs to another model or optimizer: checkpoints are never overwritten."
                " Use another checkpoint directory, or move it away"
            )
        if passed_over:
            if aside := _move_aside(self.final, judged, "_replaced_"):
                logger.warning(
                    "%s was there before this attempt, which has not resumed from it and has that step itself now: it was moved to %s",
                    self.final, aside,
                )  # fmt: skip
            return False
        logger.info("%s is already published and valid: kept", self.final)
        discard_staging(self.root, self.tmp_name)
        return True

    def _staged(self) -> Contents | None:
        """Return what the staging directory holds; None when it is gone."""
        for name in names_of_staging(self.root, self.tmp_name):
            try:
                return read_contents(self.root / name, self.results, self.advance)
            except (OSError, CorruptCheckpoint):
                continue
        return None


def claim_staging(
    root: Path, tmp_name: str, files: Sequence[FileEntry], published: Callable[[], bool], advice: str
) -> Path | None:
    """Give a staging directory a name that no other process knows. None when it went away meanwhile.

    Of several (a publisher died over its claim, and a late writer has made the directory anew) the one with the files. published: says
    that another publisher has finished. Raises CheckpointError for another name; CorruptCheckpoint, with `advice`, for missing files.
    """
    found = names_of_staging(root, tmp_name)
    errors = [wrong_files(root / name, files, f"{advice} Write the step again") for name in found]
    for name in (name for name, error in zip(found, errors, strict=True) if error is None):
        claim = claim_of(root, tmp_name)
        try:
            os.rename(root / name, claim)
        except FileNotFoundError:
            return None
        return claim
    # What was listed may have been renamed by another publisher before it was looked at: only what stays put is broken.
    if not errors or errors[0] is None or published() or not all((root / name).is_dir() for name in found):
        return None
    raise errors[0]


def _move_aside(final: Path, judged: os.stat_result, mark: str) -> Path | None:
    """Give the checkpoint that was judged another name, and return that; None: another publisher has done so."""
    aside = free_name(final, mark)
    try:
        os.rename(final, aside)
    except FileNotFoundError:
        return None
    now = os.lstat(aside)
    if (now.st_dev, now.st_ino) != (
        judged.st_dev,
        judged.st_ino,
    ):  # another publisher replaced it since it was judged: put it back
        os.rename(aside, final)
        return None
    fsync_directory(final.parent)
    return aside
