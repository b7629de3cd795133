"""What a process shows to others and checks others by: a key, its certificate, and the authority that it believes.

Owns the form in which they travel from the agent to its processes. Never written to a disk.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ttp.inputs import checked


@dataclass(frozen=True, slots=True)
class Credentials:
    """PEM each. Representations do not show the keys."""

    key: bytes = field(repr=False)
    certificate: bytes
    authority: bytes
    renew_unix_s: float
    """From then on new ones are asked for; these are valid for some time longer."""
    store_key: bytes = field(default=b"", repr=False)
    """For entries in the attempt's store (`sealed.py`)."""
    by_site: bool = False
    """Of the site's own authority, in place of the job's: certificates name hosts, and no roles."""

    def encode(self) -> dict[str, Any]:
        """Return them as JSON has it."""
        return {
            "key": self.key.decode(),
            "certificate": self.certificate.decode(),
            "authority": self.authority.decode(),
            "renew_unix_s": self.renew_unix_s,
            "store_key": base64.b64encode(self.store_key).decode(),
        }

    @classmethod
    def decode(cls, content: object) -> Credentials:
        """Raises ValueError."""
        fields = checked.mapping(content, "credentials")
        key, certificate, authority, store_key = (
            checked.string(*checked.field(fields, name, ""))
            for name in ("key", "certificate", "authority", "store_key")
        )
        return cls(
            key=key.encode(),
            certificate=certificate.encode(),
            authority=authority.encode(),
            renew_unix_s=checked.number(*checked.field(fields, "renew_unix_s", "")),
            store_key=base64.b64decode(store_key, validate=True),
        )


class Renewed:
    """Credentials that are asked for anew once they are old; those that there are stay in use where that fails."""

    def __init__(self, obtain: Callable[[], Credentials], clock: Callable[[], float] = time.time) -> None:
        """`obtain()` raises OSError or ValueError."""
        self._obtain = obtain
        self._clock = clock
        self._kept: Credentials | None = None

    def __call__(self) -> Credentials:
        """Return them. Raises OSError, ValueError: there were never any."""
        kept = self._kept
        if kept is None or self._clock() >= kept.renew_unix_s:
            try:
                self._kept = kept = self._obtain()
            except (OSError, ValueError):
                if kept is None:
                    raise
        return kept
