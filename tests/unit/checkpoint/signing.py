"""Keys of tests, and checkpoints that are signed with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.unit.checkpoint.conftest import Job
from tests.unit.checkpoint.test_manifest import resealed
from ttp.checkpoint.format.checksum import Checksum, of_file
from ttp.checkpoint.format.manifest import MANIFEST_NAME, read_bytes
from ttp.checkpoint.format.signature import Keys, read_sign_key, read_verify_key
from ttp.checkpoint.write import write_share
from ttp.proto.messages import ShareResult


def make_keys(folder: Path, name: str = "job") -> Keys:
    """Return a pair; its files are NAME.pem and NAME.pub.pem."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return Keys(read_sign_key(str(private)), read_verify_key(str(public)))


def write(job: Job, directory: Path, tmp_name: str, holders: int = 3) -> list[ShareResult]:
    """Write all shares as ranks do that have a key."""
    shares = enumerate(job.shares(holders))
    return [write_share(directory, tmp_name, rank, share, {}, digests=True) for rank, share in shares]


def save_signed(job: Job, directory: Path, step: int, keys: Keys, attempt: str = "a", **fields: Any) -> Path:
    """Publish a checkpoint of three holders."""
    tmp_name = f"iter_{step:07d}_tmp_{attempt}"
    blobs = {"optim.param_groups.0.lr": 0.5}
    results = write(job, directory, tmp_name)
    return job.publish(directory, tmp_name, results, step, keys=keys, **({"blobs": blobs} | fields))


def alter_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as somebody does who knows its form: it is sealed again."""
    body = json.loads(read_bytes(path))
    change(body)
    (path / MANIFEST_NAME).write_bytes(resealed(body))


def fix_checksums(path: Path) -> None:
    """Have the manifest name the checksums that its files have now."""

    def change(body: dict[str, Any]) -> None:
        for file in body["files"]:
            file["checksum"] = of_file(path / file["name"], Checksum())

    alter_manifest(path, change)
