"""One attempt: this node's workers from their start until all of their processes have ended.

Owns the death watch, the controller client, the hold, and the end of the workers, of leftover processes in their sessions, and of the
controllers. Never restarts anything, never reaps a worker.
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
from ttp.launch.attempts.faults import Faults, log_unprotected
from ttp.launch.attempts.leftover_ranks import LeftoverRanks
from ttp.launch.attempts.replacements import Forker, Replacements
from ttp.launch.attempts.signals import signal_name, signals_held_back
from ttp.launch.links.controller_client import ControllerClient
from ttp.launch.links.controller_shutdown import end_controllers, is_controller
from ttp.launch.links.peer_agents import NODE_REPLACED, PeerAgents
from ttp.launch.rendezvous.fresh_store import JobStore
from ttp.launch.report.exit_status import RankFailure, Recorded, first_failure, outcome_text
from ttp.launch.report.incident import AtOnce, AttemptEnd
from ttp.launch.report.reporter import AttemptStart
from ttp.launch.watch.death_watch import Death, DeathWatch
from ttp.launch.watch.oom import OutOfMemory
from ttp.launch.watch.processes import catches, end_workers, exit_status, signal_workers, sweep_sessions
from ttp.launch.watch.shell_ranks import ShellRanks
from ttp.proto.messages import EXIT_CODE_PREEMPTED, SAVED_EXIT_CODES, CauseKind
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp.launch")

LEAVE_GRACE_S = 5.0
"""Between the first and the last worker that exits with its state saved: all receive the order at the same time."""

UNLED_S = 10.0
"""How long workers are held without a controller, or three leases: a standby takes over in a second, or in two leases of a silent controller."""

UNPROTECTED_S = 3.0
"""How long the agent waits for workers that never had a controller: nothing can be saved, but peers with the same failure exit soon. Where one has
rejected its command line they have UNLED_S: a restart is known to be useless only when all reject it. Without a worker it waits so long for a controller."""

SHUTDOWN_S = 30.0
"""torchrun's time between SIGTERM and SIGKILL, for workers without a controller: their script may save at a signal."""

EARLY_GRACE_S = 5.0
"""Between another signal and SIGTERM for workers that are still starting: an interpreter that imports a library may lose Ctrl-C."""

MEETING_S = 300.0
"""Until so long after its begin, the ranks of an attempt without a controller are still connecting; later, the attempt has no session."""

LOOK_S = 0.25
"""Between two checks whether the workers have a controller."""

EXPIRED_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL after the deadline: survivors have had all their time."""

ASK_AGAIN_S = 1.0
"""At a fault, how long the store is read once more for what the ranks have just published."""

SETTLE_S = 10.0
"""How long a worker may take from the first sign of its exit to the end of its process before torch is called."""


class Attempt:
    """The workers of one attempt on this node. Made when they run; `close` must follow, whatever happens."""

    def __init__(
        self,
        launching: LaunchContext,
        *, job_id: str, job_store: JobStore, start_id: str, attempt_dir: Path | None = None, pids: Mapping[int, int],
        nodes: int, hosts_rank_zero: bool, node: int = 0, begun_unix_s: float = 0.0, world_size: int = 0,
        forker: Forker | None = None, vacant: int = 0,
    ) -> None:  # fmt: skip
        """`pids`: by global rank. `nodes`: how many nodes take part; this one is number `node`. `start_id`, `attempt_dir`: TTP_START_ID and
        TTP_ATTEMPT_DIR of these workers. `begun_unix_s`: before the first was started; older journal lines are another job's.
        `forker`: has forked these workers; None: they were executed. `vacant`: see Replacements."""
        self._launching = launching
        self._start_id = start_id
        self.pids = dict(pids)
        """The workers, by rank; another process may take one's place (`replacements.py`)."""
        self._nodes = nodes
        self._hosts_rank_zero = hosts_rank_zero
        self._ended: set[int] = set()
        self._start = AttemptStart(
            number=job_store.round_number, begun_unix_s=begun_unix_s, world_size=world_size, begins_here=hosts_rank_zero and not vacant,
        )  # fmt: skip
        self._reporter = launching.reporter
        if self._reporter is not None:
            self._reporter.begin(hosts_rank_zero, self._start.number)
        self._signal = ""
        """The signal that ends the agent after this attempt."""
        self._drained_by: str | None = None
        """The same, if the ranks were drained for it; empty: for another reason; None: they were not drained."""
        self._at_once = AtOnce()
        self.next = ""
        """What follows this attempt, for people, once it is known."""
        self.raised: dict[int, Recorded] = {}
        """By rank, the exceptions that workers on this node recorded, once they were read."""
        self._behind_shells = ShellRanks()
        self._controller = ControllerClient(
            job_store,
            pids,
            lambda address, ranks: launching.open_link(address, job_id, ranks, self._replacements),
            attempt_dir=attempt_dir,
            watch_log_dir=partial(self._reporter.follow, self._start) if self._reporter and hosts_rank_zero else None,
            processes_known=self._follow,
        )
        self._memory = OutOfMemory(pids.values())
        self._watch = DeathWatch(
            pids, lambda death: self._replacements.report(death), poll_s=launching.poll_s, explain_kill=self._memory.explain
        )  # fmt: skip
        self.peers = PeerAgents(job_store, node, nodes, seated=start_id if vacant else "") if nodes > 1 else None
        """The connection to the other nodes' agents; None: there is one node."""
        self._faults = Faults(launching.total_timeout_s, self.peers)
        self._replacements = Replacements(
            self.pids, forker, nodes=nodes, watch=self._watch, controller=self._controller, faults=self._faults,
            memory=self._memory, behind_shells=self._behind_shells, identities=launching.identities, copies=launching.copies,
            health=launching.health, vacant=vacant,
        )  # fmt: skip
        leftover = (self.pids, self._behind_shells, self._watch, self._controller, self._ended)
        self._leftovers = LeftoverRanks(*leftover, self._replacements.vacant)
        self._begun_monotonic_s = time.monotonic()
        self._watch.start()
        self._controller.start()
        if self.peers is not None:
            self.peers.start()

    def _follow(self, published: Mapping[int, str]) -> None:
        """Learn the ranks' own processes, on the client's thread: a worker may be a shell that has started its rank."""
        for rank, pid in self._behind_shells.add(self.pids, published).items():
            self._watch.follow(rank, pid)

    @property
    def processes(self) -> dict[int, int]:
        """By rank, the rank's own process where it is known, else the worker that may be a shell."""
        return self.pids | self._behind_shells.pids

    @property
    def fault(self) -> RankFailure | None:
        return self._faults.current

    @property
    def has_controller(self) -> bool:
        """Return whether the agent has a connection to an active controller of this attempt now."""
        return self._controller.connected

    @property
    def had_controller(self) -> bool:
        """Return whether the workers of this attempt ever published a controller."""
        return self._controller.entry is not None

    def led_by_now(self) -> bool:
        """Return whether the workers have published a controller, by a fresh look where none was known."""
        if not self.had_controller:
            self._controller.look_now(ASK_AGAIN_S)
        return self.had_controller

    @property
    def lost_node(self) -> str:
        """Which node was lost while the ranks are still connecting: without it they would wait until torch's timeout. Empty: none, or a
        controller handles it, or the attempt is older than MEETING_S."""
        if self.peers is None or self.had_controller or self.lasted_s() >= MEETING_S:
            return ""
        return self.peers.lost

    @property
    def was_replaced(self) -> bool:
        """Return whether this node was taken for lost, and another one has its place in this attempt."""
        return self.peers is not None and self.peers.was_replaced

    @property
    def unreached_store(self) -> str:
        """Why the workers' store was never reached from this node; empty: it was, or the attempt has just begun."""
        return "" if self.peers is None else self.peers.unreached

    def living(self) -> list[int]:
        """Return the ranks on this node whose processes have not ended."""
        return self._watch.living()

    def deaths(self) -> dict[int, Death]:
        return self._watch.deaths()

    def outcome(self) -> str:
        """Return how the workers on this node ended, as text."""
        return outcome_text(self.deaths(), self._ended)

    def failed(self) -> bool:
        """Return whether a worker on this node has failed, but for one that is ended to be replaced."""
        return self._failed(self.deaths())

    def _failed(self, deaths: Mapping[int, Death]) -> bool:
        ending = self._replacements.ending()
        return first_failure({rank: death for rank, death in deaths.items() if rank not in ending}) is not None

    def lasted_s(self) -> float:
        """Return how long this attempt ran until its first failure (until now, if there was none on this node)."""
        first = first_failure(self.deaths())
        return (first.seen_monotonic_s if first is not None else time.monotonic()) - self._begun_monotonic_s

    def settling(self) -> bool:
        """Return whether a worker is exiting, its status not known yet, or being replaced. One that takes longer than SETTLE_S does not count."""
        deaths, late_s = self.deaths(), time.monotonic() - SETTLE_S
        ending = self._replacements.ending().union(self._watch.begun())
        return any(rank not in deaths or deaths[rank].seen_monotonic_s > late_s for rank in ending)

    def learn(self, statuses: Mapping[int, int], failed: bool) -> None:
        """Take over torch's exit statuses of workers that it reaped before the death watch saw them. `failed` is False: they succeeded."""
        if failed:
            self._watch.wait_all(ASK_AGAIN_S)  # torch has ended all workers
        lost = self._watch.learn_lost(statuses if failed else dict.fromkeys(self.pids, 0))
        if failed and lost:
            log.warning(
                "torchelastic detected the exit of %s first and killed its peers; no emergency checkpoint was possible",
                ranks_text(lost),
            )

    def made_a_step(self, ask: Callable[[], bool | None]) -> bool | None:
        """Return whether a rank has completed a step; None: not known, or a worker here exited on a preemption notice. `ask()`: a store that may be lost."""
        if any(death.status == EXIT_CODE_PREEMPTED for death in self.deaths().values()):
            return None
        return True if self._controller.first_step is not None else ask()

    def end_given_up(self) -> None:
        """Kill leftover ranks once all others here have exited: after the controller has ordered all ranks to exit, those that cannot; after the
        job has failed on another node and a fault's time has passed, those that are stopped."""
        if (sent_s := self._controller.sent_away_monotonic_s) is not None:
            self._leftovers.end_given_up(sent_s)
        if self.peers is not None and self.peers.failed:
            self._leftovers.end_all_stopped(self._launching.total_timeout_s)

    def left_for_others(self) -> bool:
        """Return whether every worker here has exited, none failed by itself, and some exited on the controller's order: the fault, if it is
        one, is on another node."""
        deaths = self.deaths()
        statuses = {death.status for death in deaths.values() if death.failed}
        all_ended = all(rank in deaths and deaths[rank].settled for rank in self.pids)
        return self._nodes > 1 and all_ended and bool(statuses) and statuses <= set(SAVED_EXIT_CODES)

    def lost_ranks_elsewhere(self) -> bool:
        """Return whether the controller froze the ranks because others were lost, and not for a node that joins."""
        return self._controller.frozen_by in (CauseKind.SILENT, CauseKind.EXITED)

    def refusal(self, new_step: bool) -> str:
        """Return why a restart would fail the same way, or is not to be made. Empty: it may succeed."""
        statuses = {rank: death.status for rank, death in self.deaths().items() if death.failed}
        return refusal(statuses, self.raised, first_start=self._start.number == 0, new_step=new_step)

    def hold(self, why: str = "") -> bool:
        """Wait for the survivors: return when every worker here has ended and none can be replaced, or when waiting saves nothing. Return whether the
        attempt continues: every process that had failed was replaced. It stops waiting in three other cases:

        - the fault's deadline has passed, which the first call sets;
        - a worker has exited with its state saved, no connected controller is undecided, and the others have not followed within
          LEAVE_GRACE_S (those that cannot are killed at once);
        - there was no controller for UNLED_S (for UNPROTECTED_S, if there never was one).

        `why`: a cause that is not a death on this node. A signal to the agent is raised as torch's SignalException.
        """
        deaths, first_call = self.deaths(), self.fault is None
        if not (why or self._failed(deaths)):
            return True
        fault = self._faults.begin(why, deaths)
        if first_call and not self.led_by_now():
            log_unprotected(self._controller.unanswered, self.lasted_s() < SHORT_START_S)
        if self._watch.wait_all(0.0) and (why or not self._replacements.possible()):
            return False
        what = f"holding {ranks_text(living)}" if (living := self.living()) else "waiting for the controller's order"
        log.warning("%s; %s for up to %.0f s", fault.cause, what, self._patience_s(fault))
        reason = self._persist(fault, replaceable=not why)
        held_s = time.monotonic() - fault.begun_monotonic_s
        if reason is None:
            log.info("other processes took the place of all that had failed, %.2f s after the fault", held_s)
            self._faults.recovered()
            return True
        if not reason:
            log.info("all workers on this node exited %.2f s after the fault", held_s)
            return False
        log.error("%s; terminating %s (fault: %s)", reason, ranks_text(self.living()), fault.cause)
        self._leftovers.ask_for_stacks(self.living())
        if self.had_controller:  # else their script may save at SIGTERM once it is resumed
            self._leftovers.end_stopped()
        return False

    def _persist(self, fault: RankFailure, *, replaceable: bool = False) -> str | None:
        """Wait for the survivors, and write the begin and the end of the wait to story.jsonl. Return why not all have exited, or empty; None
        where every failed process was replaced, if that is waited for."""
        number, begun_s, left_s = self._start.number, time.monotonic(), self._patience_s(fault)
        if self._reporter is not None:
            self._reporter.hold(number, fault.cause, sorted(self.living()), left_s)
        why: str | None = "the agent received a signal"
        try:
            with self._launching.mirror.paused():
                why = self._wait_for_survivors(fault, replaceable)
        finally:
            if self._reporter is not None:
                left = sorted(self.living()) if why else []
                self._reporter.held(number, time.monotonic() - begun_s, why or "", left)
        return why

    def _wait_for_survivors(self, fault: RankFailure, replaceable: bool) -> str | None:
        """Return empty when all have exited, None when all that had failed were replaced, else why the wait has ended."""

        def persisted(deaths: Mapping[int, Death]) -> bool:
            return any(death.status in SAVED_EXIT_CODES for death in deaths.values())

        def only_shells(deaths: Mapping[int, Death]) -> bool:
            shells = self._behind_shells.pids
            return all(rank in deaths and (deaths[rank].settled or rank in shells) for rank in self.pids)

        def decided(deaths: Mapping[int, Death]) -> bool:
            return persisted(deaths) or (only_shells(deaths) and not (replaceable and self._replacements.possible()))

        led_s = time.monotonic()
        while (left_s := self._faults.left_s(fault)) > 0:
            self._replacements.settle()
            self._watch.wait(
                min(LOOK_S, left_s), lambda deaths: decided(deaths) or (replaceable and not self._failed(deaths))
            )
            if decided(deaths := self.deaths()):
                break
            if replaceable and not self._failed(deaths):
                return None
            saving_alone = self._drained_by is not None and self.had_controller and not self.failed()
            if self.was_replaced:
                return NODE_REPLACED
            if self.has_controller or saving_alone:
                led_s = time.monotonic()
            elif time.monotonic() - led_s >= (unled_s := self._unled_s()):
                return f"the ranks had no controller for {unled_s:.0f} s"
        grace_s = min(LEAVE_GRACE_S, left_s := self._faults.left_s(fault))
        if self._leftovers.wait_or_kill(grace_s, left_s) if persisted(self.deaths()) else self._watch.wait_all(grace_s):
            return ""
        if not persisted(self.deaths()) and only_shells(self.deaths()):
            return f"the ranks exited {LEAVE_GRACE_S:.0f} s ago, but not the shells that started them"
        if persisted(self.deaths()) and self._faults.left_s(fault) > 0:
            return f"other ranks on this node saved and exited {LEAVE_GRACE_S:.0f} s ago"
        return f"TTP_OT ({self._launching.total_timeout_s:.0f} s) expired"

    def _patience_s(self, fault: RankFailure) -> float:
        left_s = max(0.0, self._faults.left_s(fault))
        return left_s if self.had_controller else min(left_s, self._unled_s())

    def _unled_s(self) -> float:
        """Return how long to wait for workers without a controller, or for a controller where none runs: not before the first step."""
        if not self.living():
            return UNPROTECTED_S if self._controller.first_step is not None else 0.0
        refused = any(death.status == USAGE_ERROR for death in self.deaths().values())
        unled_s = max(UNLED_S, 3.0 * self._controller.lease_s)
        return unled_s if self.had_controller or refused or self._controller.unanswered else min(UNLED_S, UNPROTECTED_S)

    def grace_s(self) -> float:
        """Return the time between SIGTERM and SIGKILL for workers that still run after a hold."""
        if self.had_controller or self.fault is None:
            return EXPIRED_GRACE_S
        return max(EXPIRED_GRACE_S, min(SHUTDOWN_S, self._faults.left_s(self.fault)))

    def succeeded(self) -> bool:
        """Return whether every worker on this node has exited with status 0."""
        deaths = self.deaths()
        return all(rank in deaths and deaths[rank].status == 0 for rank in self.pids)

    def drain(self, why: str = "the agent is shutting down") -> str:
        """Send the workers SIGTERM, their preemption notice, and give them a fault's time to save and exit. Return why not all have; empty: all have.

        Leftover ranks are killed when the others are done. A shell that started its rank gets no signal: the rank's exit code would be lost with it.
        """
        self._replacements.stop(why)
        fault = self._faults.begin(why, self.deaths())
        self._drained_by = self._signal
        self._controller.look_now(ASK_AGAIN_S)
        living, left_s = ranks_text(self.living()), self._faults.left_s(fault)
        log.info("%s: sending SIGTERM to %s, which have up to %.0f s to save and exit", why, living, left_s)
        signalled = self._behind_shells.signal(self.living(), signal.SIGTERM)
        signal_workers((self.pids[rank] for rank in self.living() if rank not in signalled), signal.SIGTERM)
        if reason := self._persist(fault) or "":
            log.error("%s; killing %s", reason, ranks_text(self.living()))
            self._leftovers.ask_for_stacks(self.living())
        self.end_workers(signal.SIGKILL, 0.0)
        log.info("%s", self.outcome())
        return reason

    def end_at_once(self) -> None:
        """Kill every worker: a second signal was received."""
        log.warning("second signal received: killing the workers")
        self._at_once = AtOnce(frozenset(self.living()), time.time())
        self.end_workers(signal.SIGKILL, 0.0)

    def note_signal(self, name: str) -> None:
        """Note that the agent received that signal: no attempt follows on this node."""
        self._signal = name
        self.next = f"no restart on this node: the agent received {name}"

    def end_unled(self, death_signal: signal.Signals, grace_s: float) -> None:
        """End workers that never had a controller: they are still starting, or their script has no session.

        They receive the agent's signal and have torch's grace, as under torchrun. Those that are starting and ignore it receive SIGTERM soon
        after, unless they have a handler for SIGTERM: they may be saving.
        """
        self._replacements.stop("the attempt is being ended")
        if death_signal == signal.SIGTERM or not self.living() or self.lasted_s() >= SHORT_START_S:
            self.end_workers(death_signal, grace_s)
            return
        begun_s = time.monotonic()
        log.info("sending %s to %s", death_signal.name, ranks_text(self.living()))
        self._ended.update(self.living())
        signal_workers((self.pids[rank] for rank in self.living()), death_signal)
        if not self._watch.wait_all(min(EARLY_GRACE_S, grace_s)):
            starting = [rank for rank in self.living() if not catches(self.pids[rank], signal.SIGTERM)]
            if starting:
                log.info("%s did not exit on %s; sending SIGTERM", ranks_text(starting), death_signal.name)
            signal_workers((self.pids[rank] for rank in starting), signal.SIGTERM)
        self.end_workers(None, max(0.0, begun_s + grace_s - time.monotonic()))

    def end_workers(self, death_signal: signal.Signals | None, grace_s: float) -> None:
        """End every worker and the leftover processes in the workers' sessions, without reaping them. No signal: they have received it."""
        self._replacements.stop("the attempt is being ended")
        living = self.living()
        if ending := [rank for rank in living if death_signal is None or rank not in self._ended]:
            action = "waiting for" if death_signal is None else f"sending {death_signal.name} to"
            log.info("%s %s%s", action, ranks_text(ending), f"; SIGKILL after {grace_s:.0f} s" if grace_s else "")
        self._ended.update(living)
        until_s = time.monotonic() + grace_s
        if death_signal is not None:
            left_behind = [rank for rank in living if exit_status(self.pids[rank]) is not None]
            self._behind_shells.signal(left_behind, death_signal)
        killed = set(end_workers(self.pids.values(), death_signal, grace_s))
        self._behind_shells.wait(living, until_s)
        if killed and death_signal != signal.SIGKILL:
            names = ranks_text(rank for rank, pid in self.pids.items() if pid in killed)
            log.warning("killed %s: no exit within %.0f s", names, grace_s)
        left = sweep_sessions(self.pids.values(), spare=is_controller)
        if left:
            log.info("ended %d leftover processes of the workers: %s", len(left), ", ".join(map(str, left)))
        self._watch.wait_all(1.0)  # it reads the statuses before torch reaps the workers

    def close(self, patient: bool = True, notice: Callable[[], str] = str) -> None:
        """End the controllers of this attempt on this node, and the threads. The workers have ended before.

        `patient`: controllers that ranks on other nodes may still need have the rest of the fault's time. A signal that raises ends only that
        wait, and is raised again at the end. `notice()` names a signal that the agent received and that did not raise.
        """
        waits_for = self.fault if patient and self._nodes > 1 else None
        try:
            self._close_all(self._faults.left_s(waits_for) if waits_for is not None else 0.0)
        except (SignalException, KeyboardInterrupt) as signalled:
            with signals_held_back():
                name = signal_name(signalled)
                log.warning("%s: ending this attempt's controllers on this node without waiting", name)
                self.note_signal(name)
                self._close_all(0.0)
                self._report_end()
            raise
        if name := notice():
            self.note_signal(name)
        self._report_end()

    def _close_all(self, patience_s: float) -> None:
        """End the threads, then the controllers; called again where a signal interrupted it."""
        self._replacements.close()
        self._watch.stop()
        self._memory.close()
        self._controller.close()
        if self.peers is not None:
            self.peers.close()
        self._end_controllers(patience_s)

    def _end_controllers(self, patience_s: float) -> None:
        published = self._controller.entry if self._hosts_rank_zero else None
        end_controllers(self._start_id, published, self._launching.request_shutdown, patience_s=patience_s)

    def _report_end(self) -> None:
        """Report this attempt's fault, if it had one: all that writes about it on this node has ended."""
        if self._reporter is None:
            return
        deaths = [death for death in self.deaths().values() if death.failed and death.rank not in self._ended]
        own = [death for death in deaths if death.status not in SAVED_EXIT_CODES or death.rank in self.raised]
        ending = AttemptEnd(
            log_dir=self._controller.log_dir, exits={death.rank: death.text for death in own}, raised=self.raised,
            left_saved=any(death.status in SAVED_EXIT_CODES for death in self.deaths().values()),
            first_exit_unix_s=min((death.seen_unix_s for death in own), default=None),
            next=self.next or (self.fault.cause if self.fault is not None else ""), pids=self.processes,
            one_node=self._nodes == 1, elsewhere=self._elsewhere(), succeeded=self.succeeded(),
            first_step=self._controller.first_step, skipped=self._controller.skipped,
            drained_by=self._drained_by or "", at_once=self._at_once,
        )  # fmt: skip
        self._reporter.end(self._start, ending)

    def _elsewhere(self) -> str | None:
        """Return what ended this attempt on another node; None: something has, and it is not known what."""
        if self.peers is None:
            return ""
        return self.peers.failure or ("" if self._signal or self.succeeded() else None)
