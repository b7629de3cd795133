"""Entries of a store under a message authentication code: whoever reaches the store can write there, and only the job can seal (PURE).

A seal is HMAC-SHA256 over the entry's context and its value. The context is what the entry is for: the job, the attempt or the endpoint, and the
key. An entry of another attempt, or of another key, has another seal. Owns the form of a sealed entry. Never reads a store.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

_MARK = b"ttp1 "
_HEADER = len(_MARK) + 2 * hashlib.sha256().digest_size + 1


class NotSealed(Exception):
    """An entry has no seal, or one that does not fit; its text is one line."""


def seal(key: bytes, context: Sequence[str], value: bytes) -> bytes:
    """Return the entry for a value."""
    return _MARK + _code(key, context, value) + b" " + value


def unseal(key: bytes, context: Sequence[str], entry: bytes) -> bytes:
    """Return the value of an entry. Raises NotSealed: it was not sealed with this key for this context."""
    value = entry[_HEADER:]
    if not entry.startswith(_MARK):
        got = f"{len(entry)} bytes without a seal"
    elif hmac.compare_digest(entry[:_HEADER], _MARK + _code(key, context, value) + b" "):
        return value
    else:
        got = "a seal that does not fit"
    raise NotSealed(
        f"got {got}, expected an entry that this job has sealed as {' / '.join(context)}. Start every node with the same secret, and let no"
        " other program write into the job's stores"
    )


def _code(key: bytes, context: Sequence[str], value: bytes) -> bytes:
    code = hmac.new(key, len(context).to_bytes(8), hashlib.sha256)
    for part in context:
        encoded = part.encode(errors="surrogateescape")
        code.update(len(encoded).to_bytes(8) + encoded)
    code.update(value)
    return code.hexdigest().encode()
