"""The elastic agent of a node: torch's own, except that survivors of a fault keep running until they have saved.

torch's agent sends SIGTERM to every worker as soon as one has failed. This one waits until the survivors have written an emergency checkpoint
and exited (exit code 75), or until the fault's deadline. Then torch's agent counts, logs and limits restarts as usual.

Owns the decision to restart or to stop. It overrides methods that `SimpleElasticAgent` declares for subclasses. Their names begin with an
underscore: `torch_names.py` lists them and the tested versions of torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import uuid
from contextlib import nullcontext
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException

from ttp.config import start_name
from ttp.exchange.first_step import progress_key
from ttp.launch.attempts.attached_spare import AttachedSpare
from ttp.launch.attempts.attempt import SHUTDOWN_S, Attempt
from ttp.launch.attempts.attempt_directory import AttemptDirectory
from ttp.launch.attempts.begin import begin_attempt
from ttp.launch.attempts.context import LaunchContext
from ttp.launch.attempts.crash_loop import CrashLoop
from ttp.launch.attempts.signals import ShutdownSignals
from ttp.launch.endings import Drained, NotEnded, NotStarted, not_ended, raise_if_never_met
from ttp.launch.health.seat import Seat
from ttp.launch.links.peer_agents import NODE_REPLACED
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.rendezvous.multi_endpoint import ROUND_S
from ttp.launch.rendezvous.waiting_spare import UnfitSpare
from ttp.launch.report.exit_status import exception_text, recorded_by, sort_root_cause_first, traceback_text
from ttp.launch.torch_log import end_line_kept
from ttp.launch.warm_start import LearnedImports, WarmStart, forking
from ttp.launch.watch.processes import children_leading_sessions, end_workers, exit_status
from ttp.text.streams import replace_lost
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp.launch")

NEWS_S = 2 * ROUND_S
"""How long after its own workers' exit an agent may still learn that another node waits."""
NEWS_LOOK_S = 0.05

OTHERS_S = 300.0
"""torch's time for other nodes' workers to end after this one's have succeeded."""
TELL_S = 5.0

BROKEN_ROUNDS = 5
"""After so many rendezvous in a row that broke when they were complete, a node leaves: it is probably the cause itself."""
REJOIN_PAUSE_S = 1.0


SET_CHANGES = "the set of nodes changes (another node's fault, or a joining node)"


class HoldAgent(LocalElasticAgent):
    """Runs one node's workers, attempt after attempt, and lets the survivors of a fault save before it restarts them.

    `spec.rdzv_handler` must be a FreshStoreRendezvous. `agent_arguments` go to LocalElasticAgent.
    """

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, launching: LaunchContext, **agent_arguments: Any
    ) -> None:
        if not isinstance(spec.rdzv_handler, FreshStoreRendezvous):
            raise TypeError(f"HoldAgent needs a FreshStoreRendezvous, got {type(spec.rdzv_handler).__name__}")
        super().__init__(spec, logs_specs, **agent_arguments)
        self._rendezvous_handler = spec.rdzv_handler
        self._launching = launching
        self.seat = Seat(launching.health, spec.rdzv_handler, launching.reporter)
        self._spare = AttachedSpare(launching, spec.local_world_size, spec.rdzv_handler.decode)
        spec.rdzv_handler.attached = self._spare
        self._attempt: Attempt | None = None
        self._signals = ShutdownSignals()
        self._attempt_directory = AttemptDirectory()
        self._pids: dict[int, int] = {}
        """The workers of the last attempt, by rank."""
        self._lost_starts: list[tuple[str, str]] = []
        """The last attempts in a row that ended because a node was lost: which node, and why its store was never reached (empty: it was)."""
        self.failure_reason = ""
        """Why the job failed on this node, once it has."""
        self._crash_loop = CrashLoop(launching.futile_starts)
        self._warm_start: WarmStart | None = None
        """What has forked the last attempt's workers, and can fork one again; None: none can be."""
        self._learned = LearnedImports()
        self._pause_s = 0.0
        """Back-off before the next rendezvous."""
        # torch must be polled to collect the results of Python functions (`--run-path`), and to find workers in uninterruptible sleep.
        self._always_ask_torch = callable(spec.entrypoint) or bool(
            os.environ.get("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT")
        )

    # --- called by torch's agent, in this order ---

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the rendezvous before an attempt, and agree on the ranks.

        A node that dies meanwhile leaves it incomplete: the others join again. One whose rendezvous breaks repeatedly leaves, or whose health
        check fails (before it joins), so that the others can continue without it."""
        self._signals.install()
        raise_if_never_met(self._lost_starts)
        self._leave_if_not_ended()
        self.seat.take()
        broken = 0
        while True:
            try:
                super()._rendezvous(worker_group)
                self._rendezvous_handler.publish_running(worker_group.store, worker_group.spec.local_world_size)
                return
            except UnfitSpare as unfit:
                self.seat.give_up(str(unfit))
            except DistError as error:
                broken = 1 if self._rendezvous_handler.saw_departure() else broken + 1  # that node may be the cause
                if broken == BROKEN_ROUNDS:
                    raise
                log.warning("the rendezvous broke after it was complete (%s): a node may be lost; joining again", error)
            time.sleep(REJOIN_PAUSE_S)

    def _leave_if_not_ended(self) -> None:
        """Leave, and raise NotEnded, when a worker of the last attempt still runs."""
        if why := not_ended({rank: pid for rank, pid in self._pids.items() if exit_status(pid) is None}):
            self._rendezvous_handler.leave(
                f"{socket.gethostname()}: {why}"
            )  # torch waits once more at this agent's end
            raise NotEnded(why)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers after a rendezvous, and watch them."""
        job_store = self._rendezvous_handler.job_store
        start_id = f"{job_store.round_number}-{uuid.uuid4().hex}"
        job_id = start_name(self._rendezvous_handler.get_run_id(), job_store.round_number)
        attempt_dir = self._attempt_directory.make()
        given = self._rendezvous_handler.given
        vacant = f"{given.order.freeze_id} {self._spare.leader}".strip() if given is not None else ""
        begin_attempt(self._launching, self._rendezvous_handler, worker_group, job_id, start_id, attempt_dir, vacant)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see __main__; torch installs its own handler after this
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in replace_lost():
            log.warning("%s is closed; further worker output on it is discarded", name)
        before = set(children_leading_sessions())
        begun_unix_s = time.time()
        nodes = worker_group.group_world_size or 1
        try:
            local_pids: dict[int, int] = self._start_processes(worker_group)
            pids = {worker.global_rank: local_pids[worker.local_rank] for worker in worker_group.workers}
            self._pids = pids
            if self._launching.identities is not None:
                self._launching.identities.started(pids)
            self._attempt = Attempt(
                self._launching,
                job_id=job_id,
                job_store=job_store,
                start_id=start_id,
                attempt_dir=attempt_dir,
                pids=pids,
                nodes=nodes,
                node=worker_group.group_rank or 0,
                hosts_rank_zero=0 in pids,
                begun_unix_s=begun_unix_s,
                world_size=worker_group.workers[0].world_size,
                forker=self._warm_start,
                vacant=given.order.freeze_id if given is not None else 0,
            )
            self._spare.close()  # the attempt has a connection of its own
            self._pids = self._attempt.pids  # another process may take a worker's place
            self.seat.report_others()
            for taken in self._rendezvous_handler.places_taken:
                log.warning("%s", taken)
                if (reporter := self._launching.reporter) is not None:
                    reporter.place_taken(job_store.round_number, taken.spare, taken.lost)
        except BaseException:
            # torch does not end workers that it started before one failed to start. A signal may come before all are watched.
            end_workers(set(children_leading_sessions()) - before, signal.SIGKILL, 0.0)
            self._spare.refuse("its processes could not be started")
            self._spare.close()
            self._attempt_directory.remove()
            raise
        log.info(
            "attempt %d: %s of %d on this node (of %d), pids %s; workers' store at %s:%d",
            job_store.round_number, ranks_text(pids), worker_group.workers[0].world_size, nodes,
            ", ".join(str(pids[rank]) for rank in sorted(pids)), job_store.host, job_store.port,
        )  # fmt: skip
        return local_pids

    def _start_processes(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start the workers through torch. Raises NotStarted for a program or script that does not exist or cannot be executed."""
        if (script := self._launching.script) and not os.path.exists(script):
            raise NotStarted(
                f"cannot start the workers: got script {script!r} (no such file or directory), expected an existing Python script. Give its"
                f" path relative to {os.getcwd()}; start a module with -m, and another program with --no-python"
            )
        try:
            local_pids = self._fork_or_execute(worker_group)
        except (FileNotFoundError, PermissionError) as error:
            program = worker_group.spec.entrypoint
            if error.filename != program:
                raise
            reason = error.strerror.lower() if error.strerror else str(error)
            raise NotStarted(
                f"cannot start the workers: got program {program!r} ({reason}), expected an executable file. Give its path relative to"
                f" {os.getcwd()}, or a name on PATH; start a Python script without --no-python"
            ) from error
        return local_pids

    def _fork_or_execute(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start the workers from the fork server where that can be done."""
        servers, self._warm_start = self._launching.fork_servers, None
        with forking(servers.workers) if servers is not None else nullcontext() as start:
            local_pids: dict[int, int] = super()._start_workers(worker_group)
        self._signals.install()  # before a line is logged, which swallows what torch's own handlers raise
        if servers is None or start is None:
            return local_pids
        if start.reason:
            log.info("started %d workers without the fork server: %s", len(local_pids), start.reason)
        else:
            log.info("forked %d workers from %s", len(local_pids), servers.workers.description)
            if not self._always_ask_torch:  # torch would see the exit of one that is replaced
                self._warm_start = start
        return local_pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers, every monitor interval. torch's own method ends all workers as soon as one has failed: it is
        called only when there is no survivor to wait for."""
        attempt = self._attempt
        if attempt is None:
            return self._ask_torch(worker_group)
        if attempt.was_replaced:
            return self._wait_as_spare(attempt)
        servers = self._launching.fork_servers
        if servers is not None:
            servers.look()
            self._learned.look(servers.workers, self._attempt_directory.path)
        if self._launching.copies is not None:
            self._launching.copies.look(servers.workers if servers is not None else None)
        self._launching.mirror.look(self._attempt_directory.path)
        if not attempt.failed():
            attempt.end_given_up()
        self.seat.fault(attempt)
        self._leave_if_drained(attempt)
        if attempt.failed():
            if attempt.hold():
                return RunResult(state=WorkerState.HEALTHY)  # all that failed were replaced: no restart
            if attempt.was_replaced:
                return self._wait_as_spare(attempt)
            if attempt.left_for_others() and self._another_node_waits(attempt.lost_ranks_elsewhere()):
                return RunResult(state=WorkerState.HEALTHY)  # as below: another node causes this restart
        elif self._drained_for_node(attempt) or self._lost_a_node(attempt):
            return RunResult(state=WorkerState.HEALTHY)  # torch sees the waiting node and restarts without counting
        elif (attempt.living() and not self._always_ask_torch) or attempt.settling():
            return RunResult(state=WorkerState.HEALTHY)  # torch would reap the exiting worker and end its peers
        if attempt.failed() or not attempt.living():
            attempt.end_workers(signal.SIGTERM, attempt.grace_s())
        with end_line_kept() as end_line:
            result = self._ask_torch(worker_group)
        attempt.learn({rank: failure.exitcode for rank, failure in result.failures.items()}, result.is_failed())
        if result.state == WorkerState.SUCCEEDED:
            return self._after_success(attempt, result)
        if not result.is_failed():
            return result
        result = self._put_cause_first(result, attempt)
        for root in list(result.failures.values())[:1]:
            end_line.write(root)
        self._decide_restart(attempt, result, worker_group.spec.max_restarts)
        return result

    def _wait_as_spare(self, attempt: Attempt) -> RunResult:
        """End what runs on this node, which was lost: others train on in its ranks' places. torch then begins anew without counting."""
        log.warning("%s: ending %s; this node waits as a spare one", NODE_REPLACED, ranks_text(attempt.living()))
        attempt.next = NODE_REPLACED
        attempt.end_workers(signal.SIGKILL, 0.0)
        self._rendezvous_handler.become_spare()
        return RunResult(state=WorkerState.HEALTHY)

    def _leave_if_drained(self, attempt: Attempt) -> None:
        """Have all nodes save at the next step boundary, and raise Drained, if this node was asked to leave."""
        asked = self._rendezvous_handler.drain
        if asked and attempt.living() and attempt.has_controller and not attempt.failed():
            why = f"{socket.gethostname()} is drained: {asked}"
            self._rendezvous_handler.announce_leave(why)
            not_left = attempt.drain(why)
            if not attempt.succeeded():
                raise Drained(f"{why}; its ranks were killed before they had left ({not_left})" if not_left else why)

    def _drained_for_node(self, attempt: Attempt) -> bool:
        """Where a node waits to join, have the workers save and exit. False: no node waits, or the job completed before."""
        if not (attempt.living() and attempt.has_controller and self._rendezvous_handler.num_nodes_waiting() > 0):
            return False
        attempt.drain(SET_CHANGES)
        return not attempt.succeeded()

    def _lost_a_node(self, attempt: Attempt) -> bool:
        """Return whether a node was lost before the ranks had a controller; then the remaining nodes join a new rendezvous."""
        lost = attempt.lost_node if attempt.living() else ""
        if lost:
            log.error("a node was lost before the ranks had a controller: %s; the remaining nodes restart", lost)
            self._rendezvous_handler.meet_again()
        return bool(lost)

    def _after_success(self, attempt: Attempt, result: RunResult) -> RunResult:
        """Wait for the workers of other nodes, as torch's exit barrier does. Unlike it, stop when the job has failed on another node, and
        restart with a node whose workers have failed: it cannot run without this one.
        """
        peers = attempt.peers
        if peers is None:
            return result
        peers.publish_succeeded()
        static = self._rendezvous_handler.get_backend() == "static"
        begun_s, logged, why = time.monotonic(), False, ""
        while not (why or peers.all_have_succeeded):
            if attempt.was_replaced:
                return self._wait_as_spare(attempt)
            if over := peers.over:
                why = over
            elif peers.restarts and (static or self._rendezvous_handler.num_nodes_waiting() > 0):
                if not static or self._remaining_restarts > 0:
                    log.warning("all workers on this node succeeded, but %s; restarting with that node", peers.restarts)
                    return RunResult(state=WorkerState.UNHEALTHY if static else WorkerState.HEALTHY)
                why = f"{peers.restarts}, and this node has no restart left"  # a static job cannot restart uncounted
                peers.publish_failed(f"{socket.gethostname()} succeeded, and has no restart left")
            elif (lost := peers.lost) and not peers.restarts:
                why = lost
            elif (waited_s := time.monotonic() - begun_s) >= OTHERS_S:
                why = f"workers on other nodes did not finish within {OTHERS_S:.0f} s"
            else:
                if waited_s > TELL_S and not logged:
                    logged = True
                    log.info("all workers on this node succeeded; waiting up to %.0f s for other nodes", OTHERS_S)
                time.sleep(NEWS_LOOK_S)
        if why:
            log.warning("all workers on this node succeeded; not waiting for other nodes: %s", why)
        return result

    def _exit_barrier(self) -> None:
        """Do nothing: `_after_success` has waited already (torch's barrier handles successes only)."""

    def _another_node_waits(self, cause_known: bool) -> bool:
        """Return whether a node waits to join, now or within NEWS_S: agents poll, and another agent may have seen that node first. `cause_known`: no node
        that joins has had the ranks leave."""
        until_s = time.monotonic() + (0.0 if cause_known else NEWS_S)
        while self._rendezvous_handler.num_nodes_waiting() == 0:
            if time.monotonic() >= until_s:
                return False
            time.sleep(NEWS_LOOK_S)
        return True

    def _ask_torch(self, worker_group: WorkerGroup) -> RunResult:
        for (
            worker
        ) in worker_group.workers:  # torch compares it with its own, which follow by themselves (`warm_start.py`)
            worker.id = self._pids.get(worker.global_rank, worker.id)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        """Stop the workers before a restart or when the job has failed; some still run when another node causes the restart."""
        attempt = self._attempt
        lost = never = ""
        if attempt is not None and attempt.living() and not attempt.had_controller:
            never = attempt.unreached_store
            lost = attempt.lost_node or never
        self._lost_starts = [*self._lost_starts, (lost, never)] if lost else []
        if attempt is not None and attempt.living():
            if attempt.had_controller and attempt.fault is None:
                attempt.drain(SET_CHANGES)  # torch has seen a waiting node after this agent looked
            else:
                attempt.hold(why=lost or SET_CHANGES)
                attempt.end_workers(signal.SIGTERM, attempt.grace_s())
        super()._stop_workers(worker_group, *args, **kwargs)
        pause_s, self._pause_s = self._pause_s, 0.0  # after the attempt was reported
        time.sleep(pause_s)  # a signal to the agent ends it by torch's SignalException

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        """End all processes of this attempt: at the end of each attempt, and of the agent (success, failure, signal, exception).

        With a controller a signal is a preemption notice: the workers receive SIGTERM and have a fault's time to save. A second Ctrl-C kills
        them, and then the controllers on this node, which other nodes' ranks may still need. What follows the signal differs between versions
        of torch; the arguments are passed on.
        """
        try:
            with self._signals.leaving():
                self._end_all(death_sig, *args, **kwargs)
        except (SignalException, KeyboardInterrupt):
            if self._attempt is None:
                raise
            with self._signals.leaving():  # it came before the workers received SIGTERM: handle it as the first
                self._end_all(death_sig, *args, **kwargs)
            raise

    def _end_all(self, death_sig: signal.Signals, *args: Any, **kwargs: Any) -> None:
        """End the attempt; only a second SIGINT or SIGQUIT interrupts it. That is raised at the end, unless torch raises the first itself."""
        attempt, came, noticed, at_once = self._attempt, None, bool(self._signals.name), False
        if attempt is None:
            super()._shutdown(death_sig, *args, **kwargs)
            return
        try:
            self._attempt = None
            self._end_start(attempt, death_sig, kwargs.get("timeout", SHUTDOWN_S))
        except (SignalException, KeyboardInterrupt) as signalled:
            came = signalled
            at_once = self._signals.forced or isinstance(signalled, KeyboardInterrupt)  # not seen by ShutdownSignals
            if at_once and attempt.living():
                attempt.end_at_once()
        finally:
            try:
                super()._shutdown(death_sig, *args, **kwargs)
            finally:  # a second signal may have come there too
                try:
                    attempt.close(not (at_once or self._signals.forced), lambda: self._signals.name)
                finally:
                    self._attempt_directory.remove()
        if came is not None and not noticed:
            raise came  # else it is lost, and the next attempt would follow

    def _end_start(self, attempt: Attempt, death_sig: signal.Signals, timeout_s: float) -> None:
        """Drain the workers, or end those that have never had a controller."""
        if name := self._signals.name:
            attempt.note_signal(name)
        if attempt.living() and attempt.led_by_now():
            attempt.drain()  # also before the agent's own connection to the controller is up: the ranks have theirs
        else:
            attempt.end_unled(death_sig, timeout_s)

    # --- after a failure ---

    def _put_cause_first(self, result: RunResult, attempt: Attempt) -> RunResult:
        seen = {rank: death.seen_unix_s for rank, death in attempt.deaths().items()}
        failures = sort_root_cause_first(result.failures, seen)
        return RunResult(state=result.state, return_values=result.return_values, failures=failures)

    def _decide_restart(self, attempt: Attempt, result: RunResult, max_restarts: int) -> None:
        """Log in one line what happened and what follows, with the root cause's traceback where the console has none.
        Back off in a crash loop, and allow no restart after a failure that would repeat."""
        what = attempt.outcome()
        self.seat.fault(attempt)  # ranks that hung have ended now
        root = next(iter(result.failures), None)
        attempt.raised = recorded_by(result.failures)
        if root is not None and (raised := exception_text(result.failures[root])):
            what = f"{what}; rank {root} raised {raised}"
        if root is not None and self._launching.quotes_traces and (trace := traceback_text(result.failures[root])):
            log.error("rank %d's traceback:\n%s", root, trace)
        restart = (
            max_restarts - self._remaining_restarts + 1
        )  # counted by torch; includes those that another node caused
        new_step = self._made_a_step(attempt)
        protected, lasted_s = attempt.had_controller, attempt.lasted_s()
        crash = self._crash_loop.ended(new_step=new_step, lasted_s=lasted_s, protected=protected)
        refused = attempt.refusal(new_step is not False)
        if refused:
            self._remaining_restarts = 0
            self.failure_reason = f"{what}; {refused}"
            attempt.next = f"no restart: {refused}"
            log.error("not restarting: %s", self.failure_reason)
            self._publish_outcome(attempt, self.failure_reason, again=False)
            return
        self.failure_reason = what = f"{what}; {crash.text}" if crash.text else what
        if elsewhere := attempt.peers.failed if attempt.peers is not None else "":
            self._remaining_restarts = 0
            self.failure_reason = f"{what}; the job failed on another node: {elsewhere}"
            attempt.next = f"no restart: {elsewhere}"
            log.error("not restarting: %s", self.failure_reason)
        elif self._remaining_restarts <= 0:
            attempt.next = f"no restart left (of {max_restarts})"
            log.error("no restart left (of %d): %s", max_restarts, what)
            self._publish_outcome(attempt, what, again=False)
        elif crash.stop:
            self._remaining_restarts = 0
            attempt.next = f"no restart: {crash.text}"
            log.error("not restarting: %s", what)
            self._publish_outcome(attempt, what, again=False)
        else:
            self._publish_outcome(attempt, what, again=True)
            attempt.next = f"restart {restart} of {max_restarts}{self.seat.condition()}"
            pause = f"; waiting {crash.wait_s:g} s" if crash.wait_s else ""
            self._pause_s = crash.wait_s
            log.warning("restarting (%d of %d restarts): %s%s", restart, max_restarts, what, pause)

    def _publish_outcome(self, attempt: Attempt, what: str, *, again: bool) -> None:
        """Publish what follows to nodes whose workers have succeeded, or that wait for this one's."""
        if attempt.peers is None:
            return
        failure = f"{socket.gethostname()} failed ({what})"
        if again:
            attempt.peers.publish_restart(f"{failure} and restarts")
        else:
            attempt.peers.publish_failed(failure)

    def _made_a_step(self, attempt: Attempt) -> bool | None:
        """Return whether a rank has completed a step; None: not known, or the ranks exited on a preemption notice."""
        handler = self._rendezvous_handler
        return attempt.made_a_step(lambda: handler.job_store_has(progress_key(handler.job_store.round_number)))
