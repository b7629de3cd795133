"""One start of this node's workers, from their first moment to the last trace of them.

Owns what belongs to a single start: the death watch, the way to the controller, the fault and its one deadline, and
the ending (workers, what they left in their sessions, controllers). Never restarts anything, never reaps a worker.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException

from ttp.launch.attempts.context import LaunchContext
from ttp.launch.attempts.crash_loop import SHORT_START_S, USAGE_ERROR, refusal
from ttp.launch.attempts.leftover_ranks import LeftoverRanks
from ttp.launch.attempts.signals import signal_name, signals_held_back
from ttp.launch.links.controller_client import ControllerClient
from ttp.launch.links.controller_shutdown import end_controllers, is_controller
from ttp.launch.links.peer_agents import PeerAgents
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.report.exit_status import RankFailure, Recorded, describe, first_failure, outcome_text
from ttp.launch.report.incident import AtOnce, AttemptEnd
from ttp.launch.report.reporter import Start
from ttp.launch.watch.death_watch import Death, DeathWatch
from ttp.launch.watch.oom import OutOfMemory
from ttp.launch.watch.processes import catches, end_workers, exit_status, signal_workers, sweep_sessions
from ttp.launch.watch.shell_ranks import ShellRanks
from ttp.proto.messages import EXIT_CODE_PREEMPTED, SAVED_EXIT_CODES
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp.launch")

LEAVE_GRACE_S = 5.0
"""Between the first worker that left with its state safe and the last: all are told at once."""

UNLED_S = 10.0
"""How long workers without a controller are held: nobody can lead them to a checkpoint. A standby takes over within a second
when the controller died, and within two leases when it was only silent."""

UNPROTECTED_S = 3.0
"""How long workers are held that have never had a controller: nothing can be saved, but those that fail for the same reason do so soon. Where
one has refused its command line they have UNLED_S: they start at different speeds, and a restart is known to be useless when all refuse."""

SHUTDOWN_S = 30.0
"""torchrun's time between SIGTERM and SIGKILL, for workers without a controller: their script may save at a signal."""

EARLY_GRACE_S = 5.0
"""Between another signal and SIGTERM for workers that are still starting: Ctrl-C is lost in an interpreter that imports a
library which swallows it, or that waits in one."""

MEETING_S = 300.0
"""So long after its beginning a start without a controller is taken for one whose ranks have yet to meet; later for one without a session."""

LOOK_S = 0.25
"""Between two looks whether the held workers have a controller."""

EXPIRED_GRACE_S = 5.0
"""After the deadline, between SIGTERM and SIGKILL: survivors have had all their time."""

ASK_AGAIN_S = 1.0
"""At a fault, how long the store is asked for what the ranks told a moment ago."""

SETTLE_S = 10.0
"""How long a worker that has begun to end may take to end altogether before torch is asked about it."""


class Attempt:
    """The workers of one start on this node. Made when they run; `end` must follow, whatever happens."""

    def __init__(
        self,
        launching: LaunchContext,
        *,
        job_id: str,
        job_store: JobStore,
        start_id: str,
        attempt_dir: Path | None = None,
        pids: Mapping[int, int],
        nodes: int,
        hosts_rank_zero: bool,
        node: int = 0,
        begun_unix_s: float = 0.0,
        world_size: int = 0,
    ) -> None:
        """`pids` by global rank. `nodes`: how many nodes take part, this one is number `node`. `start_id`, `attempt_dir`: TTP_START_ID and
        TTP_ATTEMPT_DIR of these workers. `begun_unix_s`: before the first was started; older lines in its journals are another job's."""
        self._launching = launching
        self._start_id = start_id
        self._pids = dict(pids)
        self._nodes = nodes
        self._hosts_rank_zero = hosts_rank_zero
        self._fault: RankFailure | None = None
        self._ended: set[int] = set()
        self._start = Start(number=job_store.round_number, begun_unix_s=begun_unix_s, world_size=world_size)
        self._reporter = launching.reporter
        if self._reporter is not None:
            self._reporter.begin(hosts_rank_zero, self._start.number)
        self._told_to_end = ""
        """The signal after which nothing follows this start here."""
        self._told_by: str | None = None
        """The same, if the ranks were told to leave for it; empty: for another reason; None: they were not."""
        self._at_once = AtOnce()
        self._over_since_s: float | None = None
        """Since when it is known here that the job has failed on another node."""
        self.next = ""
        """What follows this start, in words, once it is known."""
        self.raised: dict[int, Recorded] = {}
        """By rank, the exceptions that workers here recorded, once they were read."""
        self._behind_shells = ShellRanks()
        self._courier = ControllerClient(
            job_store,
            pids,
            lambda address, ranks: launching.open_link(address, job_id, ranks, lambda: self._watch.running()),
            attempt_dir=attempt_dir,
            watch_log_dir=partial(self._reporter.watch, self._start) if self._reporter and hosts_rank_zero else None,
            processes_known=self._follow,
        )
        self._memory = OutOfMemory(pids.values())
        self._watch = DeathWatch(pids, self._courier.report, poll_s=launching.poll_s, explain_kill=self._memory.explain)
        self._neighbours = PeerAgents(job_store, node, nodes) if nodes > 1 else None
        self._stragglers = LeftoverRanks(self._pids, self._behind_shells, self._watch, self._courier, self._ended)
        self._begun_monotonic_s = time.monotonic()
        self._watch.start()
        self._courier.start()
        if self._neighbours is not None:
            self._neighbours.start()

    def _follow(self, told: Mapping[int, str]) -> None:
        """Take in which processes the ranks are (on the courier's thread): a worker may be a shell that has started its rank."""
        for rank, pid in self._behind_shells.add(self._pids, told).items():
            self._watch.follow(rank, pid)

    @property
    def processes(self) -> dict[int, int]:
        """By rank, the rank's own process where it is known, else the worker that may be a shell."""
        return self._pids | self._behind_shells.pids

    @property
    def fault(self) -> RankFailure | None:
        return self._fault

    @property
    def has_controller(self) -> bool:
        """Say whether an active controller leads the workers of this start now, as far as the launcher hears."""
        return self._courier.connected

    @property
    def had_controller(self) -> bool:
        """Say whether the workers of this start ever published a controller."""
        return self._courier.entry is not None

    def led_by_now(self) -> bool:
        """Say whether the workers have a controller, looking once more where none was known: they may have told just now."""
        if not self.had_controller:
            self._courier.look_now(ASK_AGAIN_S)
        return self.had_controller

    @property
    def neighbours(self) -> PeerAgents | None:
        """The way to the other nodes' launchers; None where there is one node only."""
        return self._neighbours

    @property
    def lost_node(self) -> str:
        """Say which node was lost while the ranks have yet to meet: nobody else notices, and they would wait for its ranks until
        torch gives up. Empty: none, or there is a controller that sees to it, or the start is older than MEETING_S."""
        if self._neighbours is None or self.had_controller or self.lasted_s() >= MEETING_S:
            return ""
        return self._neighbours.lost

    @property
    def unreached_store(self) -> str:
        """Say that the workers' store was never reached from this node; empty: it was, or the start is young."""
        return "" if self._neighbours is None else self._neighbours.unreached

    def living(self) -> list[int]:
        """Return the ranks here that have not ended altogether."""
        return self._watch.living()

    def deaths(self) -> dict[int, Death]:
        return self._watch.deaths()

    def outcome(self) -> str:
        """Say in words how the workers here have ended."""
        return outcome_text(self.deaths(), self._ended)

    def failed(self) -> bool:
        """Say whether a worker here has failed."""
        return first_failure(self.deaths()) is not None

    def lasted_s(self) -> float:
        """Return how long this start ran until its first failure (until now, if there was none here)."""
        first = first_failure(self.deaths())
        return (first.seen_monotonic_s if first is not None else time.monotonic()) - self._begun_monotonic_s

    def settling(self) -> bool:
        """Say whether a worker has begun to end, and has not ended altogether: how is known in a moment, unless somebody reaps it.
        One that takes longer than SETTLE_S (uninterruptible sleep) is not waited for."""
        deaths, late_s = self.deaths(), time.monotonic() - SETTLE_S
        return any(rank not in deaths or deaths[rank].seen_monotonic_s > late_s for rank in self._watch.begun())

    def learn(self, statuses: Mapping[int, int], failed: bool) -> None:
        """Take in what torch says of workers that it has reaped before this launcher has seen how they ended: when it speaks of no
        failure, they have succeeded."""
        if failed:
            self._watch.wait_all(ASK_AGAIN_S)  # torch has ended them all
        lost = [rank for rank, death in self.deaths().items() if death.lost]
        for rank in lost:
            if not failed or rank in statuses:
                self._watch.learn(rank, 0 if not failed else statuses[rank])
        if failed and lost:
            log.warning(
                "torch has seen the end of %s first, and has ended the others: they were not held", ranks_text(lost)
            )

    def told_to_leave(self) -> bool:
        """Say whether a worker here left on a notice: that is nobody's failure."""
        return any(death.status == EXIT_CODE_PREEMPTED for death in self.deaths().values())

    def end_given_up(self) -> None:
        """Where the controller has sent all ranks away, for whatever happened on any node: end those here that cannot leave, once there are
        no others. Where the job has failed on another node for good: the same for those that are stopped, after a fault's time."""
        if (sent_s := self._courier.sent_away_monotonic_s) is not None:
            self._stragglers.end_given_up(sent_s)
        if self._neighbours is not None and self._neighbours.failed:
            self._over_since_s = self._over_since_s or time.monotonic()
            if time.monotonic() - self._over_since_s >= self._launching.total_timeout_s:
                self._stragglers.end_all_stopped()

    def left_for_others(self) -> bool:
        """Say whether every worker here has ended, none in failure by itself, and some left on the controller's word: what
        made them leave happened on another node, if it was not a notice."""
        deaths = self.deaths()
        statuses = {death.status for death in deaths.values() if death.failed}
        all_ended = all(rank in deaths and deaths[rank].settled for rank in self._pids)
        return self._nodes > 1 and all_ended and bool(statuses) and statuses <= set(SAVED_EXIT_CODES)

    def refusal(self) -> str:
        """Say why a restart would end the same way: workers have refused what they were given. Empty: it may go better."""
        statuses = {rank: death.status for rank, death in self.deaths().items() if death.failed}
        return refusal(statuses, self.raised, first_start=self._start.number == 0)

    def hold(self, why: str = "") -> None:
        """Let survivors finish: return when every worker here has ended, or when there is nothing left to hold for.

        That is: the fault's deadline has passed (the first call fixes it); a worker has left with its state safe, no controller
        is on the line that has not sent the ranks away, and the others have not followed within LEAVE_GRACE_S (those that
        cannot are ended at once); or for UNLED_S there has been no controller that could lead them (UNPROTECTED_S, if there
        never was one). `why` names a cause that is not a death on this node. A signal to the launcher comes out as torch's
        SignalException.
        """
        first_call = self._fault is None
        fault = self._begin(why)
        if first_call:
            self._courier.look_now(ASK_AGAIN_S)
        if first_call and not self.had_controller:
            if unanswered := self._courier.unanswered:
                log.warning("whether a controller leads the ranks is not known: %s", unanswered)
            else:
                log.warning(
                    "no rank has called ttp.start%s: nothing protects this start, and ranks are not held for a checkpoint",
                    " so far" if self.lasted_s() < SHORT_START_S else "",
                )
        if self._watch.wait_all(0.0):
            return
        log.warning("%s; holding %s for up to %.0f s", fault.cause, ranks_text(self.living()), self._patience_s(fault))
        reason = self._persist(fault)
        if not reason:
            held_s = time.monotonic() - fault.begun_monotonic_s
            log.info("all workers here have ended, %.2f s after the fault", held_s)
            return
        log.error("%s: %s still here (fault: %s): ending them", reason, ranks_text(self.living()), fault.cause)
        self._stragglers.ask_for_stacks(self.living())
        if self.had_controller:  # else their script may save at SIGTERM, when somebody has them go on
            self._stragglers.end_stopped()

    def _persist(self, fault: RankFailure) -> str:
        """Wait for the survivors, and have the beginning and the end of it in the story for machines. Return why not all have ended,
        or empty."""
        number, begun_s, left_s = self._start.number, time.monotonic(), self._patience_s(fault)
        if self._reporter is not None:
            self._reporter.hold(number, fault.cause, sorted(self.living()), left_s)
        why = "the launcher got a signal"
        try:
            why = self._wait_for_survivors(fault)
        finally:
            if self._reporter is not None:
                left = sorted(self.living()) if why else []
                self._reporter.held(number, time.monotonic() - begun_s, why, left)
        return why

    def _wait_for_survivors(self, fault: RankFailure) -> str:
        """Return empty when all have ended, else why they are not waited for any longer."""

        def persisted(deaths: Mapping[int, Death]) -> bool:
            return any(death.status in SAVED_EXIT_CODES for death in deaths.values())

        def only_shells(deaths: Mapping[int, Death]) -> bool:
            shells = self._behind_shells.pids
            return all(rank in deaths and (deaths[rank].settled or rank in shells) for rank in self._pids)

        led_s = time.monotonic()
        while (left_s := self._left_s(fault)) > 0:
            if self._watch.wait(min(LOOK_S, left_s), lambda deaths: persisted(deaths) or only_shells(deaths)):
                break
            saving_alone = self._told_by is not None and self.had_controller and not self.failed()
            if self.has_controller or saving_alone:
                led_s = time.monotonic()
            elif time.monotonic() - led_s >= (unled_s := self._unled_s()):
                return f"no controller has led the ranks for {unled_s:.0f} s"
        grace_s = min(LEAVE_GRACE_S, self._left_s(fault))
        if (
            self._stragglers.wait_or_kill(grace_s, self._left_s(fault))
            if persisted(self.deaths())
            else self._watch.wait_all(grace_s)
        ):
            return ""
        if not persisted(self.deaths()) and only_shells(self.deaths()):
            return f"the ranks have ended, and {LEAVE_GRACE_S:.0f} s have passed: the shells that started them are"
        if persisted(self.deaths()) and self._left_s(fault) > 0:
            return f"others here have left, {LEAVE_GRACE_S:.0f} s have passed"
        return f"TTP_OT, {self._launching.total_timeout_s:.0f} s, has passed"

    def _patience_s(self, fault: RankFailure) -> float:
        left_s = max(0.0, self._left_s(fault))
        return left_s if self.had_controller else min(left_s, self._unled_s())

    def _unled_s(self) -> float:
        """Return how long the workers are held without a controller."""
        refused = any(death.status == USAGE_ERROR for death in self.deaths().values())
        return UNLED_S if self.had_controller or refused or self._courier.unanswered else min(UNLED_S, UNPROTECTED_S)

    def grace_s(self) -> float:
        """Return the time between SIGTERM and SIGKILL for those that are still here after a hold."""
        if self.had_controller or self._fault is None:
            return EXPIRED_GRACE_S
        return max(EXPIRED_GRACE_S, min(SHUTDOWN_S, self._left_s(self._fault)))

    def succeeded(self) -> bool:
        """Say whether every worker here has ended, and well."""
        deaths = self.deaths()
        return all(rank in deaths and deaths[rank].status == 0 for rank in self._pids)

    def take_leave(self, why: str = "the launcher is told to end") -> None:
        """SIGTERM is the workers' notice, and they have the time of a fault to persist.

        They leave by themselves under their controller; what has not left when the others are done is killed. A shell that started
        its rank gets no signal: it would die at once, and with it the rank's exit code.
        """
        fault = self._begin(why)
        self._told_by = self._told_to_end
        self._courier.look_now(ASK_AGAIN_S)
        told, left_s = ranks_text(self.living()), self._left_s(fault)
        log.info("%s: telling %s to leave (SIGTERM); up to %.0f s to persist", why, told, left_s)
        told_alone = self._behind_shells.signal(self.living(), signal.SIGTERM)
        signal_workers((self._pids[rank] for rank in self.living() if rank not in told_alone), signal.SIGTERM)
        if reason := self._persist(fault):
            log.error("%s: %s still here: ending them", reason, ranks_text(self.living()))
            self._stragglers.ask_for_stacks(self.living())
        self.end_workers(signal.SIGKILL, 0.0)
        log.info("%s", self.outcome())

    def end_at_once(self) -> None:
        """End every worker without a word: somebody insists."""
        log.warning("second signal: ending the workers at once")
        self._at_once = AtOnce(frozenset(self.living()), time.time())
        self.end_workers(signal.SIGKILL, 0.0)

    def told_to_end(self, name: str) -> None:
        """Take in that nothing follows this start here: the launcher got that signal."""
        self._told_to_end = name
        self.next = f"none here: the launcher was told to end ({name})"

    def end_unled(self, death_signal: signal.Signals, grace_s: float) -> None:
        """End workers that never had a controller: they are starting, and have nothing to save, or have no session.

        They get the launcher's signal and torch's grace, as under torchrun. Those that are starting and are still there a
        little later are ended by SIGTERM, but for those that have a handler for it: they may be saving.
        """
        if death_signal == signal.SIGTERM or not self.living() or self.lasted_s() >= SHORT_START_S:
            self.end_workers(death_signal, grace_s)
            return
        begun_s = time.monotonic()
        log.info("sending %s to %s", death_signal.name, ranks_text(self.living()))
        self._ended.update(self.living())
        signal_workers((self._pids[rank] for rank in self.living()), death_signal)
        if not self._watch.wait_all(min(EARLY_GRACE_S, grace_s)):
            starting = [rank for rank in self.living() if not catches(self._pids[rank], signal.SIGTERM)]
            if starting:
                log.info("%s still here after %s: ending them by SIGTERM", ranks_text(starting), death_signal.name)
            signal_workers((self._pids[rank] for rank in starting), signal.SIGTERM)
        self.end_workers(None, max(0.0, begun_s + grace_s - time.monotonic()))

    def end_workers(self, death_signal: signal.Signals | None, grace_s: float) -> None:
        """End every worker and what the workers left in their sessions, without reaping them. No signal: they have had it."""
        name = death_signal.name if death_signal is not None else "their signal"
        living = self.living()
        if told := [rank for rank in living if death_signal is None or rank not in self._ended]:
            log.info("ending %s by %s%s", ranks_text(told), name, f", SIGKILL after {grace_s:.0f} s" if grace_s else "")
        self._ended.update(living)
        until_s = time.monotonic() + grace_s
        if death_signal is not None:
            left_behind = [rank for rank in living if exit_status(self._pids[rank]) is not None]
            self._behind_shells.signal(left_behind, death_signal)
        killed = set(end_workers(self._pids.values(), death_signal, grace_s))
        self._behind_shells.wait(living, until_s)
        if killed and death_signal != signal.SIGKILL:
            names = ranks_text(rank for rank, pid in self._pids.items() if pid in killed)
            log.warning("%s did not leave on %s: killed", names, name)
        left = sweep_sessions(self._pids.values(), spare=is_controller)
        if left:
            log.info("ended %d processes that the workers had left: %s", len(left), ", ".join(map(str, left)))
        self._watch.wait_all(1.0)  # so that it reads the statuses before torch takes them

    def close(self, patient: bool = True, notice: Callable[[], str] = str) -> None:
        """End the controllers of this start on this node, and the threads. The workers have been ended before.

        `patient`: controllers that ranks on other nodes may still need have the rest of the fault's time. A signal that raises ends
        that wait, not the rest; it comes out at last. `notice()` names the signal that the launcher got and that did not raise, if any.
        """
        waits_for = self._fault if patient and self._nodes > 1 else None
        try:
            self._close_all(self._left_s(waits_for) if waits_for is not None else 0.0)
        except (SignalException, KeyboardInterrupt) as signalled:
            with signals_held_back():
                name = signal_name(signalled)
                log.warning("%s: ending this start's controllers on this node at once", name)
                self.told_to_end(name)
                self._close_all(0.0)
                self._tell()
            raise
        if name := notice():
            self.told_to_end(name)
        self._tell()

    def _close_all(self, patience_s: float) -> None:
        """End the threads, then the controllers; done again where a signal came in between."""
        self._watch.stop()
        self._memory.close()
        self._courier.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._end_controllers(patience_s)

    def _end_controllers(self, patience_s: float) -> None:
        published = self._courier.entry if self._hosts_rank_zero else None
        end_controllers(self._start_id, published, self._launching.request_shutdown, patience_s=patience_s)

    def _tell(self) -> None:
        """Tell this start's fault, if it had one: all that writes about it has ended here."""
        if self._reporter is None:
            return
        deaths = [death for death in self.deaths().values() if death.failed and death.rank not in self._ended]
        own = [death for death in deaths if death.status not in SAVED_EXIT_CODES or death.rank in self.raised]
        ending = AttemptEnd(
            log_dir=self._courier.log_dir,
            exits={death.rank: death.text for death in own},
            left_saved=any(death.status in SAVED_EXIT_CODES for death in self.deaths().values()),
            raised=self.raised,
            first_exit_unix_s=min((death.seen_unix_s for death in own), default=None),
            next=self.next or (self._fault.cause if self._fault is not None else ""),
            pids=self.processes,
            one_node=self._nodes == 1,
            elsewhere=self._elsewhere(),
            succeeded=self.succeeded(),
            first_step=self._courier.first_step,
            skipped=self._courier.skipped,
            told_by=self._told_by or "",
            at_once=self._at_once,
        )
        self._reporter.end(self._start, ending)

    def _elsewhere(self) -> str | None:
        """Say what ended this start on another node; None: something must have, and it is not known what."""
        if self._neighbours is None:
            return ""
        return self._neighbours.failure or ("" if self._told_to_end or self.succeeded() else None)

    def _begin(self, why: str) -> RankFailure:
        if self._fault is None:
            first = first_failure(self.deaths())
            cause = why or (describe(first) if first is not None else "unknown cause")
            begun_s = first.seen_monotonic_s if first is not None else time.monotonic()
            if self._neighbours is not None:
                if (elsewhere_s := self._neighbours.fault_begun_monotonic_s) is not None and elsewhere_s < begun_s:
                    log.info("the fault began %.0f s ago on another node: its deadline counts", begun_s - elsewhere_s)
                    begun_s = elsewhere_s
                self._neighbours.tell_fault(begun_s)
            self._fault = RankFailure(cause, begun_s, begun_s + self._launching.total_timeout_s)
        return self._fault

    def _left_s(self, fault: RankFailure) -> float:
        return fault.left_s(time.monotonic())
