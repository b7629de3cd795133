"""The signature of a checkpoint's manifest: Ed25519 over the exact bytes of the file, in a file beside it.

    manifest.json.sig     64 bytes, as `openssl pkeyutl -sign -rawin` writes them

Readers that know nothing of it find the manifest as it always was. Owns the keys, which are read once, and the file's name. What a signed
manifest must hold, the manifest decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttp import config
from ttp.checkpoint.format.durable import open_regular, write_durably
from ttp.errors import ConfigError, CorruptCheckpoint
from ttp.inputs import input_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_NAME = "manifest.json.sig"
_SIGNATURE_BYTES = 64
_KEY_BYTES = 1 << 16
"""Of a file: a larger one holds something else."""


@dataclass(frozen=True, slots=True)
class SignKey:
    """A private key."""

    path: str
    _key: Ed25519PrivateKey

    def write_signature(self, directory: Path, manifest: bytes, like: os.stat_result | None = None) -> None:
        """Sign a manifest's content, durably (the name becomes durable with the directory's fsync). Raises OSError."""
        write_durably(directory / SIGNATURE_NAME, self._key.sign(manifest), like=like)


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A public key."""

    path: str
    _key: Ed25519PublicKey

    def check(self, manifest: bytes, signature: bytes | None, where: str) -> None:
        """Raise CorruptCheckpoint unless this key's private one has signed the manifest at `where`. None: nothing was signed."""
        from cryptography.exceptions import InvalidSignature

        if signature is None:
            folder = str(Path(where).parent)
            raise CorruptCheckpoint(
                f"{where} is not signed: expected {SIGNATURE_NAME} beside it. If you trust these files, run"
                f" `ttp ckpt sign --sign-key KEY {folder}`"
            )
        try:
            self._key.verify(signature, manifest)
        except InvalidSignature:
            raise CorruptCheckpoint(
                f"{where} was altered, or another key has signed it: its signature is not one for {self.path}. Name the public key of"
                " the key that signed it, or use another checkpoint"
            ) from None


@dataclass(frozen=True, slots=True)
class Keys:
    """What a job signs its checkpoints with, and whose checkpoints alone it loads; None: it does not."""

    sign: SignKey | None = None
    verify: VerifyKey | None = None


NO_KEYS = Keys()


def read_keys(settings: config.Settings) -> Keys:
    """Return a job's keys. Raises ConfigError."""
    return keys_at(settings.sign_key, settings.verify_key)


def keys_at(sign: str, verify: str) -> Keys:
    """Return the keys in these files; empty: none. Raises ConfigError."""
    return Keys(read_sign_key(sign) if sign else None, read_verify_key(verify) if verify else None)


def key_of_environment() -> VerifyKey | None:
    """Return the key that TTP_VERIFY_KEY names; None: it is not set. Raises ConfigError."""
    path = config.verify_key()
    return read_verify_key(path) if path else None


def read_sign_key(path: str, name: str = "TTP_SIGN_KEY") -> SignKey:
    """Read a private key. `name`: of the option or variable. Raises ConfigError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _read(
        path, name, "private key without a passphrase", lambda pem: load_pem_private_key(pem, None), Ed25519PrivateKey
    )
    return SignKey(path, key)


def read_verify_key(path: str, name: str = "TTP_VERIFY_KEY") -> VerifyKey:
    """Read a public key. `name`: of the option or variable. Raises ConfigError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    return VerifyKey(path, _read(path, name, "public key", load_pem_public_key, Ed25519PublicKey))


def _read(path: str, name: str, kind: str, load: Callable[[bytes], object], cls: type[Any]) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    expected = f"expected an Ed25519 {kind} in PEM form; `ttp ckpt keygen` makes a pair"
    try:
        with input_file.open_regular(path) as stream:
            pem = stream.read(_KEY_BYTES) or b""
    except OSError as error:
        raise ConfigError(f"invalid {name}: got {path} ({error.strerror}), {expected}") from None
    try:
        key = load(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        raise ConfigError(f"invalid {name}: got {path}, which holds no such key, {expected}") from None
    if not isinstance(key, cls):
        raise ConfigError(f"invalid {name}: got {path}, which holds a key of another kind, {expected}")
    return key


def read_signature(directory: Path) -> bytes | None:
    """Return the signature of a checkpoint's manifest; None: it has none. Raises OSError, CorruptCheckpoint for what is not a file."""
    try:
        with open_regular(directory / SIGNATURE_NAME) as stream:
            return stream.read(_SIGNATURE_BYTES + 1)  # a longer one is wrong
    except FileNotFoundError:
        return None
