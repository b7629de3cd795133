"""Leftover ranks: those of one attempt on this node that still run when another has exited. They have time to exit, and are killed at once
where they cannot.

A stopped process handles neither the controller's order nor SIGTERM. One whose interpreter is held by C code looks like any other to the
system, and only the controller knows that it was silent, and that all is decided: a rank that has lost it may exit with the same code.
Owns their end by SIGKILL, and that they write their stacks before it. Never judges whether all is decided.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Set

from ttp.launch.links.controller_client import ControllerClient
from ttp.launch.watch.death_watch import DeathWatch
from ttp.launch.watch.hang_stacks import ask
from ttp.launch.watch.processes import is_stopped, signal_workers
from ttp.launch.watch.shell_ranks import ShellRanks
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp.launch")

LOOK_S = 0.25
"""Between two looks who is still here."""
ANSWERS_S = 8.0
"""So long after it has sent the ranks away a controller has gone (it waits 5 s for those that do not leave), or cannot be reached."""
PATIENCE_S = 1.0
"""How long ranks that are to leave do so by themselves before the controller is asked about them, and between two such questions:
most are gone by then, and a controller with thousands of ranks is asked by few launchers."""

STOPPED = "stopped"
SILENT = "silent"


def stopped(processes: Mapping[int, int]) -> dict[int, str]:
    """Return those of these ranks (rank -> process) that are stopped now, each with the reason."""
    return {rank: STOPPED for rank, pid in processes.items() if is_stopped(pid)}


class GivenUp:
    """Looks again and again, from the moment when a rank has left on."""

    def __init__(self, ask: Callable[[], frozenset[int] | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`ask()`: which ranks the controller has taken for dead because they were silent; None: it does not say that all is
        decided. May block for a moment."""
        self._ask = ask
        self._clock = clock
        self._asked_s = clock()
        self._asked = False
        self.answered = False
        """All is decided, and those that were silent are known."""

    def among(self, processes: Mapping[int, int], shells: Set[int] = frozenset()) -> dict[int, str]:
        """Return those of these ranks (rank -> process) that are not waited for, each with the reason; none while the controller
        does not say that all is decided: whoever is still here may be needed.

        `shells`: of these ranks only the shells are left that started them, which nobody has heard and nobody has missed.
        """
        due = self._clock() - self._asked_s >= PATIENCE_S
        others = processes.keys() - shells
        if not ((due and others) or ((due or not self._asked) and stopped(processes))):
            return {}
        silent = self._ask()
        self._asked, self._asked_s = True, self._clock()
        if silent is None:
            return {}
        self.answered = due
        named = dict.fromkeys(sorted(silent & others), SILENT) if due else {}
        return named | stopped(processes)


class LeftoverRanks:
    """Made with its round, and asked by it alone."""

    def __init__(
        self,
        pids: Mapping[int, int],
        behind_shells: ShellRanks,
        watch: DeathWatch,
        courier: ControllerClient,
        ended: set[int],
    ) -> None:
        """`pids`: the workers, by rank. `ended`: the ranks that the launcher has ended, which the round keeps too."""
        self._pids = dict(pids)
        self._behind_shells = behind_shells
        self._watch = watch
        self._courier = courier
        self._ended = ended
        self._given_up: GivenUp | None = None
        self._asks = True
        self._stuck: dict[int, str] = {}
        """Who cannot leave, as far as it was found, and why."""

    def wait_or_kill(self, grace_s: float, left_s: float) -> bool:
        """Let the ranks leave, as one has. Those that cannot are ended as soon as the controller says that all is decided. Say
        whether all have ended in time.

        The time is `grace_s`; while a controller is on the line that does not say so, it begins anew, up to `left_s`: the rank that
        has left may have lost it, and the others may be what it needs.
        """
        given_up = GivenUp(self._courier.given_up)
        now_s = time.monotonic()
        until_s, deadline_s, undecided = now_s + min(grace_s, left_s), now_s + left_s, False
        while not self._watch.wait_all(min(LOOK_S, max(0.0, until_s - time.monotonic()))):
            behind = self._behind_shells.running()
            if (now_s := time.monotonic()) >= until_s:
                before, undecided = undecided, now_s < deadline_s and self._undecided()
                if now_s >= deadline_s or not (undecided or before):
                    return False
                until_s = min(time.monotonic() + grace_s, deadline_s)
            shells = self._behind_shells.pids.keys() - behind.keys()
            self._end(given_up.among(self._standing(behind), shells), behind)
        return True

    def end_given_up(self, sent_away_s: float) -> None:
        """End those that cannot leave, while none has left or failed, once nobody else is here: the end of one is the end of its peers,
        and those may have work of their own.

        `sent_away_s`: since when (monotonic seconds) all is decided. The controller is asked who was silent to it, until it has
        answered or, after ANSWERS_S, has not: then only those that are stopped are known to be stuck.
        """
        behind = self._behind_shells.running()
        standing = self._standing(behind)
        if self._asks:
            self._given_up = self._given_up or GivenUp(self._courier.given_up)
            late = time.monotonic() - sent_away_s > ANSWERS_S
            shells = self._behind_shells.pids.keys() - behind.keys()
            self._stuck |= stopped(standing) if late else self._given_up.among(standing, shells)
            self._asks = not late and not self._given_up.answered
        self._end_all(standing, self._stuck, behind)

    def end_all_stopped(self) -> None:
        """End those that are stopped, if nobody else is here."""
        behind = self._behind_shells.running()
        standing = self._standing(behind)
        self._end_all(standing, stopped(standing), behind)

    def _end_all(self, standing: Mapping[int, int], stuck: Mapping[int, str], behind: Mapping[int, int]) -> None:
        if standing and stuck.keys() >= standing.keys():
            self._end({rank: stuck[rank] for rank in standing}, behind)

    def end_stopped(self) -> None:
        """End those that are stopped: no signal but SIGKILL reaches them."""
        behind = self._behind_shells.running()
        self._end(stopped(self._standing(behind)), behind)

    def _undecided(self) -> bool:
        """Say whether a controller is on the line that has not sent the ranks away."""
        return self._courier.connected and self._courier.given_up() is None

    def ask_for_stacks(self, ranks: Iterable[int]) -> None:
        """Have these say where they stand, before they are ended."""
        if (log_dir := self._courier.log_dir) is not None:
            processes = self._pids | self._behind_shells.pids
            ask(log_dir, {rank: processes[rank] for rank in ranks})

    def _standing(self, behind: Mapping[int, int]) -> dict[int, int]:
        """By rank that has neither ended altogether nor been ended: its own process, or the shell's whose rank has ended.
        `behind`: the ranks behind shells that run."""
        processes = {**self._pids, **behind}
        return {rank: processes[rank] for rank in self._watch.living() if rank not in self._ended}

    def _end(self, found: Mapping[int, str], behind: Mapping[int, int]) -> None:
        """End ranks that have nothing left to save, each for a reason, which must still hold. A shell that started one sees it end,
        and leaves, unless it is stopped as well. `behind`: the ranks behind shells that ran when the reasons were found: one that has
        ended since has left its shell, which may clean up."""
        if not found:
            return
        self.ask_for_stacks(found)  # takes up to `hang_stacks.ASK_S`
        processes = {**self._pids, **behind}
        ended = behind.keys() - self._behind_shells.running().keys()
        reasons = {
            rank: reason
            for rank, reason in found.items()
            if (is_stopped(processes[rank]) if reason == STOPPED else rank not in ended)
        }
        if not reasons:
            return
        told = "; ".join(
            f"{ranks_text(rank for rank in reasons if reasons[rank] == reason)}: {reason}"
            for reason in dict.fromkeys(reasons.values())
        )
        log.warning("%s, and can save nothing any more: killed", told)
        self._ended.update(reasons)
        self._behind_shells.signal([rank for rank in reasons if rank in behind], signal.SIGKILL)
        alone = [rank for rank in reasons if rank not in behind or is_stopped(self._pids[rank])]
        signal_workers((self._pids[rank] for rank in alone), signal.SIGKILL)
