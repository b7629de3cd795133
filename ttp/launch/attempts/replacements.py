"""Replaces single processes of a running attempt, as the controller orders it: the other ranks keep theirs.

Owns the rule that no process is started beside the one whose place it takes: that one has been seen to end (docs/proof.md, A6). Owns one thread, so that
an order is carried out within milliseconds, whatever the agent's main thread waits for. Never decides whose process is replaced. What it cannot do it
refuses at once, with the reason: the controller then has the step written.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from ttp.fork_server.forked_process import ForkedChild
from ttp.fork_server.request import NotForked
from ttp.launch.attempts.copies import Copies
from ttp.launch.attempts.faults import Faults
from ttp.launch.attempts.identities import Identities
from ttp.launch.health.node_health import NodeHealth
from ttp.launch.links.controller_client import ControllerClient
from ttp.launch.links.controller_shutdown import is_controller
from ttp.launch.watch.death_watch import Death, DeathWatch
from ttp.launch.watch.hang_stacks import ask
from ttp.launch.watch.oom import OutOfMemory
from ttp.launch.watch.processes import signal_workers, sweep_sessions
from ttp.launch.watch.shell_ranks import ShellRanks
from ttp.proto.messages import Replace, TakePlaces, Thaw

log = logging.getLogger("ttp.launch")

VACANT = "TTP_VACANT"
"""The variable of a process that takes another one's place: the number of the freeze in which it does, and who leads the job."""
END_S = 5.0
"""How long the process that is replaced may take to end: the kernel frees its memory first."""
STACKS_S = 0.5
"""How long a process that is ended may take to write where it is."""
LOOK_S = 0.02
"""Between two looks whether the attempt ends meanwhile."""
STOP_S = 30.0
"""How long the end of an attempt waits for an order that is being carried out: longer than all of its own limits together."""


class Forker(Protocol):
    """What has forked the workers of an attempt."""

    def fork_again(self, rank: int, variables: Mapping[str, str]) -> tuple[ForkedChild, ForkedChild]:
        """Fork another process in the place of a rank's; return it and that one, which is not reaped. Raises NotForked."""


class _Refused(Exception):
    """An order cannot be carried out; its text is the reason."""


@dataclass(slots=True)
class _Answered:
    """The newest order for a rank."""

    freeze_id: int
    pid: int = 0
    """The process that was started; 0: none."""
    error: str = ""
    open: bool = True
    """The controller has not opened the gates since."""


class Replacements:
    """Those of one attempt on this node. `take`, `running` and `report` may be called from any thread, and never block."""

    def __init__(
        self,
        pids: MutableMapping[int, int],
        forker: Forker | None,
        *,
        nodes: int,
        watch: DeathWatch,
        controller: ControllerClient,
        faults: Faults,
        memory: OutOfMemory,
        behind_shells: ShellRanks,
        identities: Identities | None,
        copies: Copies | None,
        health: NodeHealth | None = None,
        vacant: int = 0,
    ) -> None:
        """`pids`: the workers, by rank, which are changed here. `vacant`: the number of the freeze in which they take the places of a lost node's
        ranks; 0: they are the attempt's first. `forker`: None: they cannot be forked. `nodes`: how many take part. `health`: no
        process is started on a node whose check fails."""
        self._pids = pids
        self._forker = forker
        self._nodes = nodes
        self._watch = watch
        self._controller = controller
        self._faults = faults
        self._memory = memory
        self._behind_shells = behind_shells
        self._identities = identities
        self._copies = copies
        self._health = health
        self._orders: SimpleQueue[Replace | None] = SimpleQueue()
        self._first: list[ForkedChild] = []
        """Processes that were replaced, whose sessions are not swept yet."""
        self._changed = threading.Condition()  # guards all below
        self._answered = {rank: _Answered(vacant, pid) for rank, pid in pids.items() if vacant}
        self._ending: set[int] = set()
        self._busy = False
        self._stopped = ""
        """Why no order is carried out any more; empty: they are."""
        self._thread: threading.Thread | None = None

    def running(self) -> Mapping[int, int]:
        return self._watch.running()

    @property
    def places(self) -> int:
        """A node with workers has no room for others."""
        return 0

    def take(self, order: Replace | TakePlaces | Thaw) -> None:
        """Carry out an order soon, or learn that the ranks train on."""
        if isinstance(order, TakePlaces):
            return  # of the node that was a spare one: its workers run
        if isinstance(order, Thaw):
            self._faults.over()
            with self._changed:
                for answered in self._answered.values():
                    answered.open = False
            return
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ttp-replacements", daemon=True)
                self._thread.start()
        self._orders.put(order)

    def report(self, death: Death) -> None:
        """Report that a process ends. The controller may not know it yet, if it was started in another one's place."""
        self._controller.report(death)
        with self._changed:
            answered = self._answered.get(death.rank)
            if answered is None or answered.pid != death.pid or not answered.open:
                return
            answered.open = False
        self._controller.replace_failed(
            death.rank, answered.freeze_id, f"process {death.pid}, which was started for it, has ended: {death.text}"
        )

    def ending(self) -> set[int]:
        """Return the ranks whose process is being ended so that another one can take its place: they have not failed."""
        with self._changed:
            return set(self._ending)

    def vacant(self) -> set[int]:
        """Return the ranks whose process was started in another one's place, and holds nothing: the gates have not opened since."""
        with self._changed:
            return {rank for rank, answered in self._answered.items() if answered.open and answered.pid}

    def possible(self) -> bool:
        """Return whether processes may still take the places of all workers of this node: a controller may lead ranks of other nodes, and has ordered
        none to exit."""
        with self._changed:
            led = self._controller.entry is not None and self._controller.sent_away_monotonic_s is None
            return self._nodes > 1 and led and self._forker is not None and not self._stopped

    def settle(self) -> None:
        """Publish the fault to the other nodes as soon as no process can be replaced in it, and replace none from then on. That no controller is
        connected does not settle it: a standby may take over."""
        if self._nodes == 1 or self.possible():
            return
        with self._changed:
            if self._busy:
                return
            self._stopped = self._stopped or "the other nodes know that this fault ends the attempt"
        self._faults.publish()

    def stop(self, why: str) -> None:
        """The attempt ends: refuse later orders, and wait for the one that is being carried out."""
        with self._changed:
            self._stopped = self._stopped or why
            self._changed.wait_for(lambda: not self._busy, STOP_S)
        self._faults.publish()

    def close(self) -> None:
        self.stop("the attempt has ended")
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(STOP_S)

    # --- the thread ---

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._answer(order)
            if self._orders.empty():
                self._clean_up()
        self._clean_up()

    def _answer(self, order: Replace) -> None:
        """Carry out an order, once; repeat the refusal of one that is repeated."""
        begun_s = time.monotonic()
        with self._changed:
            last = self._answered.get(order.rank)
            if last is None or last.freeze_id < order.freeze_id:
                answered = self._answered[order.rank] = _Answered(order.freeze_id)
            elif last.freeze_id == order.freeze_id and last.error:
                answered = last
            else:
                return  # it was carried out, or a later one was
            self._busy = not (answered.error or self._stopped)
            answered.error = answered.error or self._stopped
        try:
            if not answered.error:
                self._replace(order, answered)
        except (_Refused, NotForked, OSError) as error:
            answered.error = str(error)
        except Exception as error:  # a defect: the job must not wait for it
            log.exception("rank %d cannot be replaced", order.rank)
            answered.error = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._ending.discard(order.rank)
                self._busy = False
                self._changed.notify_all()
        if answered.error:
            log.warning("no process takes the place of rank %d's: %s", order.rank, answered.error)
            self._controller.replace_failed(order.rank, order.freeze_id, answered.error)
        else:
            took_ms = 1e3 * (time.monotonic() - begun_s)
            log.warning("rank %d: started process %d in the place of the one that ended, in %.0f ms", order.rank, answered.pid,
                        took_ms)  # fmt: skip

    def _replace(self, order: Replace, answered: _Answered) -> None:
        """Raises _Refused, NotForked."""
        rank, forker = order.rank, self._forker
        if rank not in self._pids:
            raise _Refused(f"rank {rank} is not on this node")
        if forker is None:
            raise _Refused(
                "the workers were executed, or torch polls them (TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT)"
            )
        if rank in self._behind_shells.pids:
            raise _Refused(f"rank {rank} was started by its worker")
        if self._copies is not None and self._copies.has_memory(rank):
            raise _Refused(
                f"rank {rank} has copies or a save in this agent's memory, which another process would overwrite"
            )
        if self._controller.sent_away_monotonic_s is not None:
            raise _Refused("the ranks were ordered to exit")
        begun_s = self._end_first(order)
        self._refuse_if_sick(begun_s)
        try:
            if self._identities is not None:
                self._identities.starting()
            child, first = forker.fork_again(rank, {VACANT: f"{order.freeze_id} {self._controller.leader}".strip()})
            self._pids[rank] = child.pid
        finally:
            if self._identities is not None:
                self._identities.started(self._pids)
        with self._changed:
            answered.pid = child.pid
        self._first.append(first)
        self._faults.replaced(begun_s)
        self._memory.add(child.pid)
        self._controller.replaced(rank, child.pid)
        self._watch.replace(rank, child.pid)

    def _end_first(self, order: Replace) -> float:
        """See the process that is replaced end, and end it if that is the order; return when its end was seen first. Raises _Refused."""
        rank, now = order.rank, self._pids[order.rank]
        # A death is reported before it is shown. One that is shown between these two looks is seen by the second.
        ended = rank in self._watch.begun() or rank in self._watch.deaths()
        if order.pid not in (0, now):
            raise _Refused(f"process {order.pid} was to be ended, rank {rank} is process {now}")
        if not order.pid and not ended:
            raise _Refused(f"process {now} of rank {rank} has not ended")
        if not ended:
            with self._changed:
                self._ending.add(rank)
            if (log_dir := self._controller.log_dir) is not None:
                ask(log_dir, {rank: now}, STACKS_S)
            log.warning("rank %d: killing process %d, to start another one in its place", rank, now)
            signal_workers([now], signal.SIGKILL)
        until_s = time.monotonic() + END_S
        while not self._watch.wait(LOOK_S, lambda deaths: rank in deaths and deaths[rank].settled):
            if self._stopped:
                raise _Refused(self._stopped)
            if time.monotonic() >= until_s:
                raise _Refused(f"process {now} of rank {rank} has not ended within {END_S:g} s")
        death = self._watch.deaths()[rank]
        if not (death.failed or order.pid):  # a controller without the job's own ranks does not know that it is over
            raise _Refused(f"process {now} of rank {rank} has succeeded")
        return death.seen_monotonic_s

    def _refuse_if_sick(self, begun_s: float) -> None:
        """Wait for a verdict on this node that is newer than the end of the process. Raises _Refused."""
        if self._health is None:
            return
        self._health.begin(begun_s)
        while (sick := self._health.wait(LOOK_S)) is None:
            if self._stopped or self._controller.sent_away_monotonic_s is not None:
                raise _Refused(self._stopped or "the ranks were ordered to exit while this node's health was checked")
        if sick:
            raise _Refused(f"this node is sick: {sick}")

    def _clean_up(self) -> None:
        """End what the replaced processes have left in their sessions (data loaders, tools), and reap them."""
        replaced, self._first = self._first, []
        if left := sweep_sessions([first.pid for first in replaced], spare=is_controller):
            log.info("ended %d leftover processes of the replaced workers: %s", len(left), ", ".join(map(str, left)))
        for first in replaced:
            first.poll()
