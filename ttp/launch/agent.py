"""The elastic agent that holds: torch's own, except that a dead worker does not take its peers along at once.

torch's agent sends SIGTERM to every worker as soon as one has failed. Here the survivors keep running until they have
written their checkpoint and left (exit code 75), or until the fault's deadline; then torch's agent goes on as ever:
restarts are counted, logged and limited by it.

Built on the methods that `SimpleElasticAgent` declares for its subclasses. They begin with an underscore; `torch_names.py`
lists them, and the versions of torch that this was run with.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import uuid
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException

from ttp.config import start_name
from ttp.exchange import imported_modules
from ttp.exchange.first_step import progress_key
from ttp.fork_server.client import ForkServer
from ttp.fork_server.preload import has_accelerator
from ttp.launch.attempts.attempt import SHUTDOWN_S, Attempt
from ttp.launch.attempts.attempt_directory import AttemptDirectory
from ttp.launch.attempts.context import LaunchContext
from ttp.launch.attempts.crash_loop import CrashLoop
from ttp.launch.attempts.signals import ShutdownSignals
from ttp.launch.links.controller_shutdown import START_VARIABLE
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.rendezvous.multi_endpoint import ROUND_S
from ttp.launch.report.exit_status import exception_text, recorded_by, sort_root_cause_first, traceback_text
from ttp.launch.streams import replace_lost
from ttp.launch.torch_log import end_line_kept
from ttp.launch.warm_start import forking
from ttp.launch.watch.processes import children_leading_sessions, end_workers
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp.launch")

NEWS_S = 2 * ROUND_S
"""How long after its own workers have left an agent may hear that another node waits."""
NEWS_LOOK_S = 0.05

OTHERS_S = 300.0
"""torch's time for other nodes' workers to end after this one's have succeeded."""
TELL_S = 5.0

BROKEN_ROUNDS = 5
"""So many rendezvous in a row break after they were complete, and a node leaves: another can die at any moment, but not at
every one, so that this one is likely to be what is broken."""
REJOIN_PAUSE_S = 1.0

LOST_STARTS = 5
"""So many starts in a row end, uncounted, before the ranks have a controller, as launchers do not hear of each other, and a node
that never reached the workers' store leaves; one that did, after twice as many: those that cannot be reached have left by then."""


SET_CHANGES = "the set of nodes changes (another node's fault, or a node that wants to join)"


class NotStarted(RuntimeError):
    """The workers' program cannot be run on this node."""


class NeverMet(RuntimeError):
    """The nodes meet again and again, but the starts' own stores are not reached from all of them."""


class HoldAgent(LocalElasticAgent):
    """Runs one node's workers, start after start, and holds the survivors of a fault.

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
        self._round: Attempt | None = None
        self._notices = ShutdownSignals()
        self._attempt_directory = AttemptDirectory()
        self._lost_starts: list[tuple[str, str]] = []
        """Of each of the last starts in a row that a lost node has ended: which node, and whether its store was never reached
        from here."""
        self.last_words = ""
        """Why the job has failed here, once it has."""
        self._futile_starts = CrashLoop(launching.futile_starts)
        self._imports_learned = False
        self._pause_s = 0.0
        """Before the next rendezvous, when the last start was for nothing."""
        # torch collects the results of Python functions (`--run-path`) by being asked all the time, and looks for
        # workers in uninterruptible sleep, when told to, at the same occasion.
        self._always_ask_torch = callable(spec.entrypoint) or bool(
            os.environ.get("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT")
        )

    # --- what torch's agent calls, in the order in which it does ---

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes (before each start), and agree on the ranks. A node that dies in between leaves the others without
        its answers: they meet again, and those that had all answers see them wait. A node whose rendezvous breaks again and
        again leaves, so that the others can go on without it."""
        self._leave_if_never_met()
        broken = 0
        while True:
            try:
                super()._rendezvous(worker_group)
                return
            except DistError as error:
                broken = (
                    1 if self._rendezvous_handler.heard_of_a_parting() else broken + 1
                )  # it may have been the other's doing
                if broken == BROKEN_ROUNDS:
                    raise
                log.warning("the rendezvous was complete and broke (%s): is a node lost? Meeting again", error)
            time.sleep(REJOIN_PAUSE_S)

    def _leave_if_never_met(self) -> None:
        """Raise NeverMet when too many starts in a row have ended as a node was lost."""
        count = len(self._lost_starts)
        unreached = [words for _, words in self._lost_starts if words]
        if len(unreached) >= LOST_STARTS:
            what = unreached[-1]
        elif count >= 2 * LOST_STARTS:
            what = self._lost_starts[-1][0]
        else:
            return
        raise NeverMet(
            f"{count} starts in a row ended before the ranks had a controller: {what}; wanted: every node resolves the name of"
            " node 0 and reaches a port there that is chosen anew for each start; open the ports between the nodes, or name an"
            " address that all reach with --local-addr"
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers (after each rendezvous) and watch them."""
        job_store = self._rendezvous_handler.job_store
        start_id = f"{job_store.round_number}-{uuid.uuid4().hex}"
        attempt_dir = self._attempt_directory.make()
        os.environ.update({"TTP_LAUNCHED": "1", "TTP_ROUND_ID": str(job_store.round_number), START_VARIABLE: start_id})
        os.environ["TTP_ATTEMPT_DIR"] = str(attempt_dir or "")
        servers = self._launching.fork_servers
        os.environ["TTP_FORK_SERVER"] = servers.address if servers is not None else ""
        if (
            signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        ):  # see __main__; torch's handler follows, unless told otherwise
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in replace_lost():
            log.warning("nobody reads %s any more: what the workers print there is lost from now on", name)
        before = set(children_leading_sessions())
        begun_unix_s = time.time()
        nodes = worker_group.group_world_size or 1
        try:
            local_pids: dict[int, int] = self._start_processes(worker_group)
            pids = {worker.global_rank: local_pids[worker.local_rank] for worker in worker_group.workers}
            self._round = Attempt(
                self._launching,
                job_id=start_name(self._rendezvous_handler.get_run_id(), job_store.round_number),
                job_store=job_store,
                start_id=start_id,
                attempt_dir=attempt_dir,
                pids=pids,
                nodes=nodes,
                node=worker_group.group_rank or 0,
                hosts_rank_zero=0 in pids,
                begun_unix_s=begun_unix_s,
                world_size=worker_group.workers[0].world_size,
            )
        except BaseException:
            # torch forgets those that it had started before the one that failed; or a signal came before all were watched.
            end_workers(set(children_leading_sessions()) - before, signal.SIGKILL, 0.0)
            self._attempt_directory.remove()
            raise
        log.info(
            "start %d: %s of %d on this node (of %d), pids %s; workers' store at %s:%d",
            job_store.round_number, ranks_text(pids), worker_group.workers[0].world_size, nodes,
            ", ".join(str(pids[rank]) for rank in sorted(pids)), job_store.host, job_store.port,
        )  # fmt: skip
        return local_pids

    def _start_processes(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Let torch start them. Raises NotStarted for a program or script that is not there, or that may not be run."""
        if (script := self._launching.script) and not os.path.exists(script):
            raise NotStarted(
                f"the workers cannot be started: {script!r} (no such file or directory); wanted a Python script that is there: a"
                f" path as seen from the folder of ttprun ({os.getcwd()}); a module goes with -m, another program with --no-python"
            )
        try:
            local_pids = self._fork_or_execute(worker_group)
            self._notices.install()
        except (FileNotFoundError, PermissionError) as error:
            program = worker_group.spec.entrypoint
            if error.filename != program:
                raise
            reason = error.strerror.lower() if error.strerror else str(error)
            raise NotStarted(
                f"the workers cannot be started: {program!r} ({reason}); wanted a program that is there and may be executed:"
                " a path as seen from the folder of ttprun, or a name on PATH; a Python script goes without --no-python"
            ) from error
        return local_pids

    def _fork_or_execute(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Start the workers from the fork server where that can be done."""
        servers = self._launching.fork_servers
        if servers is None:
            local_pids: dict[int, int] = super()._start_workers(worker_group)
            return local_pids
        with forking(servers.workers) as start:
            local_pids = super()._start_workers(worker_group)
        if start.reason:
            log.info("%d workers import for themselves: %s", len(local_pids), start.reason)
        else:
            log.info("forked %d workers from %s", len(local_pids), servers.workers.description)
        return local_pids

    def _learn_imports(self, server: ForkServer) -> None:
        """Have the fork server import what the workers had imported at their first step, once. Where there are accelerators it is
        not known what such an import does to the devices, and nothing is learned."""
        directory = self._attempt_directory.path
        if self._imports_learned or directory is None or has_accelerator():
            return
        try:
            names = imported_modules.read(directory)
        except (OSError, ValueError) as error:
            log.warning("the list of modules that the workers imported cannot be read: %s", error)
            self._imports_learned = True
            return
        if names:
            self._imports_learned = True
            log.info("the fork server imports what the workers had imported: %d modules", len(names))
            server.also_import(names)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Say how the workers are (every monitor interval). torch's own method ends all as soon as one has failed: it is
        asked only when nobody is left to be held."""
        round_ = self._round
        if round_ is None:
            return self._ask_torch(worker_group)
        if self._launching.fork_servers is not None:
            self._launching.fork_servers.look()
            self._learn_imports(self._launching.fork_servers.workers)
        if not round_.failed():
            round_.end_given_up()
        if round_.failed():
            round_.hold()
            if round_.left_for_others() and self._another_node_waits():
                return RunResult(state=WorkerState.HEALTHY)  # as below: it is not this node's restart
        elif self._makes_room(round_) or self._misses_a_node(round_):
            return RunResult(
                state=WorkerState.HEALTHY
            )  # torch sees the waiting node too, and restarts without counting
        elif round_.living() and (not self._always_ask_torch or round_.settling()):
            return RunResult(state=WorkerState.HEALTHY)  # torch would reap the one that ends, and end its peers at once
        if round_.failed() or not round_.living():
            round_.end_workers(signal.SIGTERM, round_.grace_s())
        with end_line_kept() as end_line:
            result = self._ask_torch(worker_group)
        round_.learn({rank: failure.exitcode for rank, failure in result.failures.items()}, result.is_failed())
        if result.state == WorkerState.SUCCEEDED:
            return self._after_success(round_, result)
        if not result.is_failed():
            return result
        result = self._put_cause_first(result, round_)
        for root in list(result.failures.values())[:1]:
            end_line.say(root)
        self._judge(round_, result, worker_group.spec.max_restarts)
        return result

    def _makes_room(self, round_: Attempt) -> bool:
        """Where a node waits to be taken in, have the workers persist and leave; False when there is none, or when
        the job was done before."""
        if not (round_.living() and round_.has_controller and self._rendezvous_handler.num_nodes_waiting() > 0):
            return False
        round_.take_leave(SET_CHANGES)
        return not round_.succeeded()

    def _misses_a_node(self, round_: Attempt) -> bool:
        """Say whether a node was lost before the ranks had a controller; then all that are left meet again."""
        words = round_.lost_node if round_.living() else ""
        if words:
            log.error("a node is lost before the ranks have a controller: %s; those that are left meet again", words)
            self._rendezvous_handler.meet_again()
        return bool(words)

    def _after_success(self, round_: Attempt, result: RunResult) -> RunResult:
        """Wait for the other nodes, whose workers may still run, as torch's exit barrier does; but end when the job has
        failed on one, and start again with one whose workers have failed: it cannot without this node.
        """
        neighbours = round_.neighbours
        if neighbours is None:
            return result
        neighbours.tell_succeeded()
        static = self._rendezvous_handler.get_backend() == "static"
        begun_s, told, why = time.monotonic(), False, ""
        while not (why or neighbours.all_have_succeeded):
            if words := neighbours.over:
                why = words
            elif neighbours.restarts and (static or self._rendezvous_handler.num_nodes_waiting() > 0):
                if not static or self._remaining_restarts > 0:
                    log.warning("all workers here have succeeded, but %s: starting again with it", neighbours.restarts)
                    return RunResult(state=WorkerState.UNHEALTHY if static else WorkerState.HEALTHY)
                why = f"{neighbours.restarts}, and no restart is left here"  # no way to come without counting
                neighbours.tell_failed(f"{socket.gethostname()} has succeeded, and no restart is left there")
            elif (words := neighbours.lost) and not neighbours.restarts:
                why = words
            elif (waited_s := time.monotonic() - begun_s) >= OTHERS_S:
                why = f"not all had succeeded within {OTHERS_S:.0f} s"
            else:
                if waited_s > TELL_S and not told:
                    told = True
                    log.info("all workers here have succeeded; waiting up to %.0f s for those on other nodes", OTHERS_S)
                time.sleep(NEWS_LOOK_S)
        if why:
            log.warning("all workers here have succeeded; not waiting for other nodes: %s", why)
        return result

    def _exit_barrier(self) -> None:
        """Do nothing: the others were waited for, and theirs was not a failure (torch's barrier knows of successes only)."""

    def _another_node_waits(self) -> bool:
        """Say whether a node waits to be taken in, or does so soon: each agent asks now and then only, and another one may have
        told its workers to leave before this one knew."""
        until_s = time.monotonic() + NEWS_S
        while self._rendezvous_handler.num_nodes_waiting() == 0:
            if time.monotonic() >= until_s:
                return False
            time.sleep(NEWS_LOOK_S)
        return True

    def _ask_torch(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        """Stop the workers before a restart or at a failed job's end; some may live when other nodes cause the restart."""
        round_ = self._round
        lost = never = ""
        if round_ is not None and round_.living() and not round_.had_controller:
            never = round_.unreached_store
            lost = round_.lost_node or never
        self._lost_starts = [*self._lost_starts, (lost, never)] if lost else []
        if round_ is not None and round_.living():
            if round_.had_controller and round_.fault is None:
                round_.take_leave(SET_CHANGES)  # torch has seen a node wait that did not when this agent looked
            else:
                round_.hold(why=lost or SET_CHANGES)
                round_.end_workers(signal.SIGTERM, round_.grace_s())
        super()._stop_workers(worker_group, *args, **kwargs)
        pause_s, self._pause_s = self._pause_s, 0.0  # when the start's story has been told
        time.sleep(pause_s)  # a signal to the launcher ends it, as torch's SignalException

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        """End all that this start has left (each start's end, and the agent's own: success, failure, signal, exception).

        Under a controller a signal is a notice: the workers get SIGTERM and the time of a fault to persist. Who insists (a second
        Ctrl-C) ends them at once, and then the controllers on this node, which other nodes' ranks may still need. Versions of torch differ in what follows the signal; it is handed on.
        """
        try:
            with self._notices.leaving():
                self._end_all(death_sig, *args, **kwargs)
        except (SignalException, KeyboardInterrupt):
            if self._round is None:
                raise
            with self._notices.leaving():  # it came before anything was done: a notice, and nobody has told the workers
                self._end_all(death_sig, *args, **kwargs)
            raise

    def _end_all(self, death_sig: signal.Signals, *args: Any, **kwargs: Any) -> None:
        """End the start, while only who insists interrupts it; that comes out at last, unless torch raises the notice itself."""
        noticed, at_once = bool(self._notices.name), False
        round_, came = self._round, None
        if round_ is None:
            super()._shutdown(death_sig, *args, **kwargs)
            return
        try:
            self._round = None
            self._end_start(round_, death_sig, kwargs.get("timeout", SHUTDOWN_S))
        except (SignalException, KeyboardInterrupt) as signalled:
            came = signalled
            at_once = self._notices.insisted or isinstance(signalled, KeyboardInterrupt)  # Notices did not see that one
            if at_once and round_.living():
                round_.end_at_once()
        finally:
            try:
                super()._shutdown(death_sig, *args, **kwargs)
            finally:  # somebody may have insisted there too
                try:
                    round_.close(not (at_once or self._notices.insisted), lambda: self._notices.name)
                finally:
                    self._attempt_directory.remove()
        if came is not None and not noticed:
            raise came  # else it is lost: this was the end of one start, and the next would follow

    def _end_start(self, round_: Attempt, death_sig: signal.Signals, timeout_s: float) -> None:
        """Let the workers leave, or end those that have never had a controller."""
        if name := self._notices.name:
            round_.told_to_end(name)
        if round_.living() and round_.led_by_now():
            round_.take_leave()  # also when the launcher's own line to the controller is not up yet: the ranks have theirs
        else:
            round_.end_unled(death_sig, timeout_s)

    # --- telling ---

    def _put_cause_first(self, result: RunResult, round_: Attempt) -> RunResult:
        seen = {rank: death.seen_unix_s for rank, death in round_.deaths().items()}
        failures = sort_root_cause_first(result.failures, seen)
        return RunResult(state=result.state, return_values=result.return_values, failures=failures)

    def _judge(self, round_: Attempt, result: RunResult, max_restarts: int) -> None:
        """Say in one line what happened and what comes, with the root cause's traceback where nobody else shows it.
        Have the restart wait when the start was for nothing, and allow none when it could change nothing."""
        what = round_.outcome()
        root = next(iter(result.failures), None)
        round_.raised = recorded_by(result.failures)
        if root is not None and (raised := exception_text(result.failures[root])):
            what = f"{what}; rank {root} raised {raised}"
        if root is not None and self._launching.quotes_traces and (trace := traceback_text(result.failures[root])):
            log.error("rank %d's traceback:\n%s", root, trace)
        restart = max_restarts - self._remaining_restarts + 1  # torch counts; also those for another node's sake
        new_step = self._made_a_step(round_)
        protected, lasted_s = round_.had_controller, round_.lasted_s()
        futile = self._futile_starts.ended(new_step=new_step, lasted_s=lasted_s, protected=protected)
        refused = round_.refusal() if new_step is False else ""  # after a step a restart may go better
        if refused:
            self._remaining_restarts = 0
            self.last_words = f"{what}; {refused}"
            round_.next = f"no restart: {refused}"
            log.error("not restarting: %s", self.last_words)
            self._tell_others(round_, self.last_words, again=False)
            return
        self.last_words = what = f"{what}; {futile.text}" if futile.text else what
        if elsewhere := round_.neighbours.failed if round_.neighbours is not None else "":
            self._remaining_restarts = 0
            self.last_words = f"{what}; the job has failed on another node: {elsewhere}"
            round_.next = f"no restart: {elsewhere}"
            log.error("not restarting: %s", self.last_words)
        elif self._remaining_restarts <= 0:
            round_.next = f"no restart left (of {max_restarts})"
            log.error("no restart left (of %d): %s", max_restarts, what)
            self._tell_others(round_, what, again=False)
        elif futile.stop:
            self._remaining_restarts = 0
            round_.next = f"no restart: {futile.text}"
            log.error("not restarting: %s", what)
            self._tell_others(round_, what, again=False)
        else:
            self._tell_others(round_, what, again=True)
            round_.next = f"restart {restart} of {max_restarts}"
            pause = f"; waiting {futile.wait_s:g} s" if futile.wait_s else ""
            self._pause_s = futile.wait_s
            log.warning("restarting (%d of %d restarts): %s%s", restart, max_restarts, what, pause)

    def _tell_others(self, round_: Attempt, what: str, *, again: bool) -> None:
        """Say to nodes whose workers have succeeded, or that wait for this one's, what comes."""
        if round_.neighbours is not None:
            words = f"{socket.gethostname()} has failed ({what})"
            tell = round_.neighbours.tell_restart if again else round_.neighbours.tell_failed
            tell(f"{words} and starts again" if again else words)

    def _made_a_step(self, round_: Attempt) -> bool | None:
        """Return whether a rank has reported a finished step; None: that is not known, or the ranks left on a preemption notice."""
        if round_.told_to_leave():
            return None
        return self._rendezvous_handler.job_store_has(progress_key(self._rendezvous_handler.job_store.round_number))
