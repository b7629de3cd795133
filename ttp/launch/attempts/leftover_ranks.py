"""Leftover ranks: those on this node that still run after another rank has exited. Those that cannot exit by themselves are killed.

A stopped process handles neither the controller's order nor SIGTERM. A process whose interpreter is blocked in C code looks healthy to the
operating system: only the controller knows that the rank was silent, and that the shutdown is decided.
Owns their end by SIGKILL, and the stacks that they write before it. Never decides whether the shutdown is decided.
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
"""Between two checks which ranks still run."""
ANSWERS_S = 8.0
"""So long after its order to exit a controller has exited itself (it waits 5 s for leftover ranks), or is unreachable."""
PATIENCE_S = 1.0
"""How long ranks have to exit before the controller is asked about them, and between two such requests: most have exited by then, and a
controller with thousands of ranks receives few requests."""

STOPPED = "stopped"
EMPTY = "started in a lost rank's place, and not filled"
SILENT = "silent"


def stopped(processes: Mapping[int, int]) -> dict[int, str]:
    """Return those of these ranks (rank -> process) that are stopped now, each with the reason."""
    return {rank: STOPPED for rank, pid in processes.items() if is_stopped(pid)}


class StuckRanks:
    """Finds the leftover ranks that cannot exit by themselves; polled once a rank has exited."""

    def __init__(self, ask: Callable[[], frozenset[int] | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`ask()`: which ranks the controller has declared dead because they were silent; None: the shutdown is not decided, as far as is
        known. May block briefly."""
        self._ask = ask
        self._clock = clock
        self._asked_s = clock()
        self._asked = False
        self.answered = False
        """The shutdown is decided, and the silent ranks are known."""

    def among(self, processes: Mapping[int, int], shells: Set[int] = frozenset()) -> dict[int, str]:
        """Return those of these ranks (rank -> process) that may be killed, each with the reason. None while the shutdown is undecided: any
        rank may still be needed.

        `shells`: of these ranks only the shells that started them still run, which the controller never saw.
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
    """The leftover ranks of one attempt, used by that attempt only."""

    def __init__(
        self,
        pids: Mapping[int, int],
        behind_shells: ShellRanks,
        watch: DeathWatch,
        controller: ControllerClient,
        ended: set[int],
        vacant: Callable[[], Set[int]] = frozenset,
    ) -> None:
        """`pids`: the workers, by rank. `ended`: the ranks that the agent has ended. The attempt changes both. `vacant()`: ranks whose processes hold
        nothing so far: one that no controller leads, as it never came to one, receives no order to exit."""
        self._pids = pids
        self._behind_shells = behind_shells
        self._watch = watch
        self._controller = controller
        self._ended = ended
        self._vacant = vacant
        self._given_up: StuckRanks | None = None
        self._over_since_s: float | None = None
        self._asks = True
        self._stuck: dict[int, str] = {}
        """Ranks that were found unable to exit, with the reason."""

    def wait_or_kill(self, grace_s: float, left_s: float) -> bool:
        """Wait for the ranks to exit after the first has; kill those that cannot once the shutdown is decided. Return whether all have exited.

        The time is `grace_s`. It starts again, up to `left_s`, while a connected controller is undecided: the rank that has exited may have
        lost its controller, which may still need the others.
        """
        given_up = StuckRanks(self._controller.given_up)
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
            standing = self._standing(behind)
            self._end(given_up.among(standing, shells) | self._empty(standing, now_s), behind)
        return True

    def _empty(self, standing: Mapping[int, int], now_s: float) -> dict[int, str]:
        """Return the ranks that hold nothing, once the order to exit is so old that those that receive it have exited."""
        sent_s = self._controller.sent_away_monotonic_s
        if sent_s is None or now_s < sent_s + PATIENCE_S:
            return {}
        return dict.fromkeys(sorted(self._vacant() & standing.keys()), EMPTY)

    def end_given_up(self, sent_away_s: float) -> None:
        """Kill the ranks that cannot exit, before any has exited or failed, once no other rank runs here: to end one ends its peers, which may
        still be working.

        `sent_away_s`: since when (monotonic seconds) the shutdown is decided. The controller is asked which ranks were silent. Without an
        answer after ANSWERS_S only stopped ranks count as unable to exit.
        """
        behind = self._behind_shells.running()
        standing = self._standing(behind)
        if self._asks:
            self._given_up = self._given_up or StuckRanks(self._controller.given_up)
            late = time.monotonic() - sent_away_s > ANSWERS_S
            shells = self._behind_shells.pids.keys() - behind.keys()
            self._stuck |= stopped(standing) if late else self._given_up.among(standing, shells)
            self._asks = not late and not self._given_up.answered
        self._end_all(standing, self._stuck, behind)

    def end_all_stopped(self, after_s: float) -> None:
        """Kill the stopped ranks, if no other rank runs here, once so much time has passed since the first call: since the job has failed on
        another node."""
        self._over_since_s = self._over_since_s or time.monotonic()
        if time.monotonic() - self._over_since_s < after_s:
            return
        behind = self._behind_shells.running()
        standing = self._standing(behind)
        self._end_all(standing, stopped(standing), behind)

    def _end_all(self, standing: Mapping[int, int], stuck: Mapping[int, str], behind: Mapping[int, int]) -> None:
        if standing and stuck.keys() >= standing.keys():
            self._end({rank: stuck[rank] for rank in standing}, behind)

    def end_stopped(self) -> None:
        """Kill the stopped ranks: they handle no other signal."""
        behind = self._behind_shells.running()
        self._end(stopped(self._standing(behind)), behind)

    def _undecided(self) -> bool:
        """Return whether a connected controller has not ordered the ranks to exit."""
        return self._controller.connected and self._controller.given_up() is None

    def ask_for_stacks(self, ranks: Iterable[int]) -> None:
        """Have these ranks write their stacks before they are ended."""
        if (log_dir := self._controller.log_dir) is not None:
            processes = {**self._pids, **self._behind_shells.pids}
            ask(log_dir, {rank: processes[rank] for rank in ranks})

    def _standing(self, behind: Mapping[int, int]) -> dict[int, int]:
        """Return, by rank that has neither exited nor been ended, its own process, or that of the shell whose rank has exited.
        `behind`: the ranks behind shells that still run."""
        processes = {**self._pids, **behind}
        return {rank: processes[rank] for rank in self._watch.living() if rank not in self._ended}

    def _end(self, found: Mapping[int, str], behind: Mapping[int, int]) -> None:
        """Kill ranks that cannot exit, each for a reason, which must still hold. A shell that started one exits with it, unless it is stopped
        as well. `behind`: the ranks behind shells that ran when the reasons were found. Where one has exited since, its shell may clean up."""
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
        killed = ", ".join(
            f"{ranks_text(rank for rank in reasons if reasons[rank] == reason)} ({reason})"
            for reason in dict.fromkeys(reasons.values())
        )
        log.warning("killed %s: these ranks have nothing more to save and cannot exit by themselves", killed)
        self._ended.update(reasons)
        self._behind_shells.signal([rank for rank in reasons if rank in behind], signal.SIGKILL)
        alone = [rank for rank in reasons if rank not in behind or is_stopped(self._pids[rank])]
        signal_workers((self._pids[rank] for rank in alone), signal.SIGKILL)
