"""Which freeze is in force, and whether the training thread may pass the gate.

Owns the freeze's number, its ticket, and the bar that the training thread looks at. One lock guards them, so that a thaw and an
update that fails at the same moment see each other. Never knows of phases or steps, and never waits for another thread.
"""

from __future__ import annotations

import threading

from ttp.processor.threads import Event


class FreezeState:
    """One gate's. The training thread reads `barred` and calls `tear`; the processor's threads call the rest."""

    __slots__ = ("_lock", "_thawed_ticket", "barred", "final", "freeze_id", "opened", "ticket", "torn")

    def __init__(self, opened: Event) -> None:
        self._lock = threading.Lock()
        self.opened = opened
        """What a thread waits for that finds the bar down."""
        opened.set()
        self.barred = False
        """No update begins: frozen, torn, or final."""
        self.final = False
        """The state was rolled forward: no reopening before `renew`."""
        self.torn = False
        """An update failed half way."""
        self.freeze_id = -1
        """The latest freeze's number; -1 before the first."""
        self.ticket = 0
        """Counts freezes; the last one's is in force while greater than the one thawed last."""
        self._thawed_ticket = 0

    def shut(self, freeze_id: int) -> int:
        with self._lock:
            self.freeze_id = freeze_id
            self.ticket += 1
            self.opened.clear()
            self.barred = True
            return self.ticket

    def reopen(self, ticket: int) -> bool:
        with self._lock:
            if self.final or ticket != self.ticket:
                return self.opened.is_set()
            self._thawed_ticket = ticket
            self.barred = self.torn
            self.opened.set()
            return True

    def shut_since(self, ticket: int) -> bool:
        """No thaw has come since this ticket's freeze."""
        with self._lock:
            return ticket > self._thawed_ticket

    def tear(self) -> None:
        with self._lock:
            self.torn = True
            self.barred = True

    def renew(self) -> None:
        """The training thread enters its training anew: what made this gate final or torn is gone. It stays shut."""
        with self._lock:
            self.final = self.torn = False  # still barred: the gate is closed

    def make_final(self) -> bool:
        """Shut until `renew`, if it is shut; say whether it was."""
        with self._lock:
            self.final = not self.opened.is_set()
            return self.final
