"""Sign a checkpoint that is published already.

Owns the order: what is signed was verified first, and what other readers need of the manifest stays, and who may read it. Whoever signs vouches for the files as
they are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ttp.checkpoint.format.checksum import check, digest_of, for_file, of_file
from ttp.checkpoint.format.durable import fsync_directory
from ttp.checkpoint.format.manifest import MANIFEST_NAME, Manifest, read_bytes, sign_manifest, write_manifest
from ttp.checkpoint.format.signature import SignKey
from ttp.checkpoint.verify import Progress, files_here, verify
from ttp.errors import CheckpointError, CorruptCheckpoint
from ttp.proto.messages import FileEntry


def sign(path: Path, key: SignKey, progress: Progress | None = None) -> Manifest:
    """Verify a published checkpoint and sign it; return its manifest. A manifest without SHA-256 is replaced by one that has them.

    Raises CorruptCheckpoint, with nothing changed; CheckpointError for a node's part that lists files of other nodes without SHA-256; OSError.
    """
    content, like = read_bytes(path), (path / MANIFEST_NAME).stat()
    manifest = verify(path, deep=False)
    here = {file.name for file in files_here(path, manifest)}
    total, done = sum(file.nbytes for file in manifest.files if file.name in here), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    def with_digest(file: FileEntry) -> FileEntry:
        """Read a file once, for both."""
        sums = for_file(file, digest=True)
        check(path / file.name, file, of_file(path / file.name, sums, advance))
        if digest_of(file) not in ("", sums.digest):
            raise CorruptCheckpoint(
                f"{path / file.name} was altered: SHA-256 {sums.digest}, expected {digest_of(file)}"
            )
        return file if digest_of(file) else replace(file, digest=sums.digest)

    files = tuple(with_digest(file) if file.name in here else file for file in manifest.files)
    if away := next((file for file in files if not digest_of(file)), None):
        raise CheckpointError(
            f"{path}: {away.name} has no SHA-256: it is on another node. Copy the *.distcp files of all nodes' parts of that step into this"
            " folder"
        )
    signed = replace(manifest, files=files)
    if files != manifest.files:
        content = write_manifest(path, signed, like)
    sign_manifest(path, signed, content, key, like)
    fsync_directory(path)
    return signed
