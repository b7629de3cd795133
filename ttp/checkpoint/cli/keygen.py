"""`ttp ckpt keygen`: a new pair of Ed25519 keys, in the PEM form that openssl has too.

Owns the files' names and modes; never replaces a file.
"""

from __future__ import annotations

import argparse
import os

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from rich.console import Console
from rich.markup import escape

from ttp.checkpoint.cli.output import Answer, Status, UsageError

_NAME = "ttp"
"""Of the keys in a folder."""


def run(given: argparse.Namespace, console: Console) -> Answer:
    """Make both files."""
    prefix = str(given.prefix / _NAME if given.prefix.is_dir() else given.prefix)
    private, public = f"{prefix}.pem", f"{prefix}.pub.pem"
    for path in (private, public):
        if os.path.lexists(path):
            raise UsageError(f"{path} is there already: expected a new name; keygen never overwrites a key")
    key = Ed25519PrivateKey.generate()
    _write(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _write(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o666)
    shown = [
        f"{escape(private)}: the private key, for --sign-key; whoever can read it can sign",
        f"{escape(public)}: the public key, for --key and TTP_VERIFY_KEY",
    ]
    return Answer(Status.YES, {"private": private, "public": public}, shown)


def _write(path: str, pem: bytes, mode: int) -> None:
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(pem)
