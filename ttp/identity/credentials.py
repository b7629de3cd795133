"""What a process shows to others and checks others by: a key, its certificate, and the authority that it believes.

Owns the form in which they travel from the agent to its processes. Never written to a disk.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ttp.inputs import checked

RETRY_S = 60.0
"""Between two tries to renew. Certificates are asked for half a day before they expire."""


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
    site_host: str = ""
    """Of the site's own authority, in place of the job's: certificates name hosts, and no roles. This host, as its certificate names it."""

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
    """Credentials that are asked for anew once they are old, on a thread of its own: a connection never waits for new ones while there are some.

    Those that there are stay in use where that fails; the next try is RETRY_S later.
    """

    def __init__(self, obtain: Callable[[], Credentials], clock: Callable[[], float] = time.time) -> None:
        """`obtain()` raises OSError or ValueError."""
        self._obtain = obtain
        self._clock = clock
        self._lock = threading.Lock()  # guards the two below
        self._kept: Credentials | None = None
        self._next_unix_s = 0.0

    def __call__(self) -> Credentials:
        """Return them. The first ones are waited for. Raises OSError, ValueError: there were never any."""
        with self._lock:
            kept, now = self._kept, self._clock()
            if kept is not None and now < self._next_unix_s:
                return kept
            self._next_unix_s = now + RETRY_S
        if kept is None:
            return self._renew()
        with contextlib.suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=self._try_to_renew, name="ttp-renew", daemon=True).start()
        return kept

    def _renew(self) -> Credentials:
        new = self._obtain()
        with self._lock:
            self._kept, self._next_unix_s = new, new.renew_unix_s
        return new

    def _try_to_renew(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._renew()
