"""The job's secret as its agents share it: given to each of them, or made by node 0 and published in the rendezvous store.

A given secret is published nowhere. Entries of the rendezvous store are sealed with a key of it, but for one, which is plain:

    ttp/secret/<run id>   the name of the secret that the nodes have (`Secret.name`); `none`: node 0 makes one; `off`: TTP_TLS=False

So nodes that have different secrets find that out when they meet. A secret that node 0 publishes protects from accidents only: whoever reaches the
store can read it. Owns that entry, and the seals of the rendezvous store. Never logs a secret.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from ttp.errors import ConfigError
from ttp.exchange.sealed_store import Seal, sealed
from ttp.identity.secret import Secret, from_text, make_secret

log = logging.getLogger("ttp.launch")

Read = Callable[[], Secret | None]

NONE, OFF = "none", "off"
UNSAFE = {NONE: "no secret", OFF: "TTP_TLS=False"}
"""What a node has that was given none."""
_NAME = re.compile(f"[0-9a-f]{{8}}|{NONE}|{OFF}")
_GIVEN = "-"
"""In place of a secret that every node was given."""


class OtherSecret(ConfigError):
    """This node's secret is not that of the nodes that it has met."""


class JobSecret:
    """One agent's part in it."""

    def __init__(self, run_id: str, read: Read | None = None) -> None:
        """`read()`: the secret that this node was given, if any (raises ConfigError); None: the job does without (TTP_TLS=False)."""
        self.run_id = run_id
        self._read = read
        self._given = read() if read is not None else None
        self._before = ""
        """The name of the secret that was replaced."""
        self.met = False
        """This agent has met others: it does not leave the job for what the plain entry says."""
        self._warned: set[str] = set()

    @property
    def name(self) -> str:
        """What this node has, for the others to compare."""
        return self._given.name if self._given is not None else OFF if self._read is None else NONE

    def read(self) -> bool:
        """Read the secret again, as a file may be replaced between two attempts; return whether it was. One that cannot be read any more is
        kept."""
        before = self.name
        try:
            found = self._read() if self._read is not None else None
        except ConfigError as error:
            self._warn(f"the job's secret cannot be read again, and stays as it is: {error}")
            return False
        self._given = found if found is not None else self._given
        if before == self.name:
            return False
        log.info("the job's secret was replaced: %s, before %s", self.name, before)
        self._before = before
        return True

    def compare(self, store: Store) -> None:
        """See that the nodes that meet in this store have the same secret. Raises OtherSecret where this one has not met them before."""
        key = f"ttp/secret/{self.run_id}"
        theirs = _text(store.compare_set(key, "", self.name))
        if theirs == self._before or not _NAME.fullmatch(theirs):
            theirs = _text(store.compare_set(key, theirs, self.name))
        if theirs == self.name:
            return
        own, others = (UNSAFE.get(name, f"secret {name}") for name in (self.name, theirs))
        text = (
            f"invalid secret on this node: got {own}, expected that of the nodes that have met for job {self.run_id!r}: {others}. Give every"
            " node the same --secret-file (TTP_SECRET_FILE), and start it again"
        )
        if not self.met:
            raise OtherSecret(text)
        self._warn(text)

    def sealed(self, store: Store, *context: str) -> Store:
        """Return a rendezvous store with its entries sealed, where every node was given the secret."""
        return sealed(store, self.seal(*context))

    def seal(self, *context: str, secret: Secret | None = None) -> Seal | None:
        """Return how entries are sealed, with the given secret or with this one; None: there is none, and they are plain."""
        used = self._given or secret
        if used is None or self._read is None:
            return None
        return Seal(used.key(f"rendezvous {self.run_id}"), (self.run_id, *context), log)

    def choose(self) -> tuple[Secret, str]:
        """Return an attempt's secret, and what node 0 publishes of it: nothing of a given one."""
        if self._given is not None:
            return self._given, _GIVEN
        made = Secret(make_secret().value.hex().encode())
        return made, made.value.decode()

    def take(self, published: str) -> Secret:
        """Return an attempt's secret, from what node 0 has published. Raises ConfigError."""
        return self._given or from_text(published.encode(), "secret from node 0")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _text(entry: bytes) -> str:
    return entry.decode(errors="replace")
