"""The job's secret, and the keys that are derived from it.

Owns where the secret comes from and what it must look like. Never shown: not in a message, not in a representation. Only agents have it; what
ranks and controllers get is derived from it (`authority.py`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ttp.errors import ConfigError
from ttp.inputs.input_file import open_regular

LEAST_BYTES, MOST_BYTES = 16, 4096
MADE_BYTES = 32
VARIABLE, FILE_VARIABLE = "TTP_SECRET", "TTP_SECRET_FILE"
HOW_TO_MAKE = "Make one with: (umask 077; openssl rand -hex 32 > FILE)"
_EXPOSED = stat.S_IRWXO | stat.S_IWGRP


@dataclass(frozen=True, slots=True)
class Secret:
    """What all agents of a job know, and no other process. Its representation does not show it."""

    value: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """Eight hexadecimal digits that say which secret this is, for messages: two nodes can be compared by it."""
        return hashlib.sha256(b"ttp secret name\0" + self.value).hexdigest()[:8]

    def key(self, purpose: str, length: int = 32) -> bytes:
        """Return a key for one purpose (HKDF-SHA256, RFC 5869): nothing is learned from it about the secret or another key."""
        return HKDF(SHA256(), length, salt=b"ttp 1", info=purpose.encode(errors="surrogateescape")).derive(self.value)


def make_secret() -> Secret:
    """Return a new one, of 256 random bits."""
    return Secret(secrets.token_bytes(MADE_BYTES))


def from_text(text: bytes, source: str) -> Secret:
    """Return what a variable or a file holds, without the white space around it. Raises ConfigError."""
    value = text.strip()
    if not LEAST_BYTES <= len(value) <= MOST_BYTES:
        raise ConfigError(
            f"invalid {source}: got {len(value)} bytes, expected {LEAST_BYTES} to {MOST_BYTES}. {HOW_TO_MAKE}"
        )
    return Secret(value)


def from_file(path: Path, option: str = FILE_VARIABLE, what: str = "secret") -> Secret:
    """Read a secret, or another value that is as secret. `what`: its name in messages. Raises ConfigError, also where other users can read the file."""
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MOST_BYTES + 64) or b""
    except OSError as error:
        raise ConfigError(
            f"invalid {option}={str(path)[:500]!r}: {error.strerror or error}, expected a file with the job's {what}. {HOW_TO_MAKE}"
        ) from None
    if mode & _EXPOSED:
        raise ConfigError(
            f"invalid {option}={str(path)!r}: got mode {stat.S_IMODE(mode):04o}, expected a file that other users cannot read and its group"
            " cannot write. Run chmod 600 on it; in Kubernetes set the volume's defaultMode to 0400"
        )
    return from_text(content, f"{what} in {str(path)!r}")


@dataclass(frozen=True, slots=True)
class SecretSource:
    """Where this node's agent gets the secret: taken out of its environment before anything is started that would inherit it."""

    text: str = field(default="", repr=False)
    file: str = ""

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> SecretSource:
        """Remove the variables, and keep what they say."""
        return cls(environ.pop(VARIABLE, ""), environ.pop(FILE_VARIABLE, "").strip())

    def read(self) -> Secret | None:
        """Return the secret, None: none is given. Read before each attempt, so that a file may be replaced between two. Raises ConfigError."""
        if self.text.strip() and self.file:
            raise ConfigError(
                f"invalid {VARIABLE}: got it and {FILE_VARIABLE}={self.file!r}, expected one of them. Remove one"
            )
        if self.file:
            return from_file(Path(self.file))
        return from_text(self.text.encode(errors="surrogateescape"), VARIABLE) if self.text.strip() else None
