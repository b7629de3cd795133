"""A rank's part in a recovery without a checkpoint: it leaves its step, makes its process groups again with those that take the places of lost
ranks, gives them what they are to hold, and enters its training again.

Owns the order to do so from its arrival until it is answered. The controller decides; nothing of this rank's state changes before all have it
(`docs/proof.md`, "Recoveries without a checkpoint").

    processor's thread   order(...)         this rank leaves its groups: the training thread comes out of its collective, or of the gate
    training thread      enters_again(exc)  training ended with an exception: is there an order, or does one come?
                         come_back()        groups, shards, comparison; the answer; all enter training together
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch.distributed as dist

from ttp.config import Settings
from ttp.errors import STAY_WRONG, CheckpointError, NotAsBefore, Regroup
from ttp.exchange import error_file
from ttp.exchange.json_collectives import exchange_json
from ttp.groups.process_groups import GROUPS, Successor
from ttp.groups.vacancy import vacant
from ttp.interfaces.protected_optimizer import ProtectedOptimizer
from ttp.optim.on_divergence import OnDivergence
from ttp.processor.core.events import RegroupDone, WorkFailed
from ttp.proto import messages
from ttp.proto.messages import CommitRecord
from ttp.runtime.rank_runtime import Protection, show
from ttp.runtime.saves import SaveMarks, Saves
from ttp.runtime.state_provider import OptimizerStateProvider
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp")

LEAVE_AGAIN_S = 0.02
"""A connection that is shut down just as an operation begins on it may be missed: all are, so often, until the training thread has come out."""
ORDERED_S = 60.0
"""How long a process that takes a lost one's place waits for the order to regroup."""
MAKE_AGAIN_AT_MOST_S = 120.0
"""Longer than all ranks ever have for it."""


class Refillable(ProtectedOptimizer, Protocol):
    """An optimizer whose state can be given to a process that has none. One that has `why_not_filled()` says by it why this cannot be done here, the same
    on all ranks; empty: it can."""

    def fill(self, replaced: Collection[int]) -> None:
        """Give the ranks in `replaced`, which hold nothing, what their replicas hold (a collective). Raises LayoutError, CheckpointError."""

    def load_end(self, step: int, host_state: dict[str, Any], record: CommitRecord | None = None) -> None:
        """Of the ranks in `replaced`: take the filled state as that of `step` (a collective of all ranks)."""

    def keep(self, step: int, record: CommitRecord | None) -> None:
        """Of the other ranks: take the state as it is for that of `step` (the same collective)."""

    on_divergence: OnDivergence

    def check_replicas(self) -> Sequence[object]:
        """Compare the holders of each shard, and do what `on_divergence` says about a difference (a collective); return what differs where that is to
        report it. Raises ReplicasDiffer, WrongReplica, WrongPeer, after the digests are in the gate."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Where the job trains on: the state is that after update `step`."""

    step: int
    state: dict[str, Any]
    record: CommitRecord | None
    saves: SaveMarks
    optimizer: dict[str, Any]
    """The optimizer's host state."""
    equal_after: int
    """The newest step after which the ranks that stay have found their replicas equal."""


class Reentry:
    """One session's."""

    def __init__(
        self,
        optimizer: Refillable,
        holder: OptimizerStateProvider,
        saves: Saves,
        settings: Settings,
        rank: int,
        renew: Callable[[Successor], None],
        pause: Callable[[float], AbstractContextManager[None]],
        step_back: Callable[[], None] = lambda: None,
    ) -> None:
        """`renew(successor)`: gives all that holds process groups the ones in their places. `pause`: says within its block that this rank does
        something else than steps. `step_back`: of a rank that stays, has what surrounds the optimizer be as it was after the newest step."""
        self._optimizer, self._holder, self._saves, self._rank = optimizer, holder, saves, rank
        self._renew, self._pause, self._step_back = renew, pause, step_back
        self._lock = threading.Lock()  # guards the three below
        self._order: messages.Regroup | None = None
        self._not_yet = "" if vacant() else "training has not begun"
        """Why an order cannot be carried out now; empty: it can."""
        self._closed = ""
        """Why none can be any more; empty: one can."""
        self._ordered = threading.Event()
        self._out = threading.Event()
        """The training thread has come out."""
        self._leaving: threading.Thread | None = None
        address = settings.master_addr, settings.master_port
        GROUPS.meeting = dist.PrefixStore("ttp/groups", dist.TCPStore(*address, is_master=False))  # type: ignore[attr-defined]
        GROUPS.pollable = optimizer.device.type == "cpu"
        holder.prepare_copy()

    # --- the processor's thread ---

    def order(self, order: messages.Regroup) -> str:
        """Have the training thread leave its step for this order; return why it cannot, empty: it does."""
        with self._lock:
            if why := self._closed or self._not_yet:
                return why
            if order.saved and getattr(getattr(self._optimizer, "on_divergence", None), "acts", False):
                return (
                    f"step {order.step} was published before replicas were compared, which on_divergence is to prevent"
                )
            self._order = order
            self._out.clear()
            self._ordered.set()
            if not vacant():
                self._leaving = threading.Thread(target=self._leave, args=(order,), name="ttp-leave", daemon=True)
                self._leaving.start()
        return ""

    def _leave(self, order: messages.Regroup) -> None:
        # An abort that blocks in the driver would block an emergency checkpoint's copies, too.
        try:
            self._holder.copy_to_host(order.step)
        except Exception as error:  # then the step is written, when the time to regroup is over
            log.error("rank %d: step %d cannot be copied to the host: %s", self._rank, order.step, error)
            return
        while not self._out.is_set():
            GROUPS.leave()
            self._out.wait(LEAVE_AGAIN_S)

    # --- any thread ---

    @property
    def closed(self) -> bool:
        """Training is not entered again, whatever comes."""
        return bool(self._closed)

    @property
    def ordered(self) -> bool:
        """There is an order that is not answered."""
        return self._ordered.is_set()

    # --- the training thread ---

    def enters_again(self, exc: BaseException, protection: Protection) -> bool:
        """Training ended with `exc`: say whether it is to be entered again. Without an order the exception is reported, and what
        becomes of the job is waited for."""
        if not isinstance(exc, Exception | Regroup) or isinstance(exc, (*STAY_WRONG, NotAsBefore)):
            self.close(f"training has ended with {type(exc).__name__}")
            return False
        if not self.ordered and not protection.released:
            protection.hold_after(exc, until=self._ordered)
        with self._lock:
            order = self._order
        if order is None:
            return False
        self._end_leaving()
        try:
            GROUPS.close()  # before the frames go that hold the handles of operations
        except RuntimeError as error:
            self._failed(order, error, protection)
            return False
        return True

    def _end_leaving(self) -> None:
        """The training thread has come out: this rank has left the groups of now, and must not leave those that come."""
        with self._lock:
            self._out.set()
            leaving = self._leaving
        if leaving is not None:
            leaving.join()

    def begin(self, not_yet: str = "") -> None:
        """Training can be entered again from now on; `not_yet`: why it still cannot."""
        with self._lock:
            self._not_yet = not_yet

    def close(self, why: str) -> None:
        """Training is not entered again: it has returned, or ended with an exception that would come again. An order that has come stays without an
        answer: this rank reports its end."""
        with self._lock:
            self._closed = self._closed or why
        self._end_leaving()

    def wait_ordered(self) -> None:
        """Wait for the order for which this process was started. Raises CheckpointError: none came."""
        if not self._ordered.wait(ORDERED_S):
            raise CheckpointError(
                f"rank {self._rank}: got no order to regroup within {ORDERED_S:g} s of this process's start, expected one"
            )

    def come_back(self, protection: Protection) -> Returned:
        """Carry the order out, and every order that comes before the gate opens; return when all ranks enter their training. An order that cannot
        be carried out is answered so, and the process ends with the fault."""
        while True:
            with self._lock:
                order = self._order
            assert order is not None
            began = time.perf_counter()
            self._end_leaving()
            protection.gate.abandon()
            protection.gate.regroups = order.freeze_id
            try:
                with self._pause(MAKE_AGAIN_AT_MOST_S):
                    returned = self._carry_out(order)
            except Exception as error:
                self._failed(order, error, protection)
                raise
            protection.gate.regrouped(order.step, order.record)
            protection.note_next_step()
            took_s = time.perf_counter() - began
            self._take_back(order)
            protection.processor.put(RegroupDone(order))
            try:
                protection.gate.await_open()
            except Regroup:
                continue
            self._holder.drop_copy()
            self._saves.take(returned.saves)
            if order.saved:
                self._saves.published(order.step)
            GROUPS.let_go()  # else the training thread, or the interpreter's end, would wait for their operations
            error_file.withdraw()
            if self._rank == 0:
                show(logging.WARNING, _text(order, took_s))
            return returned

    def _carry_out(self, order: messages.Regroup) -> Returned:
        optimizer, new = self._optimizer, self._rank in order.replaced
        successor = GROUPS.make_again(order.freeze_id)
        optimizer.rewire(successor)
        self._renew(successor)
        if new:
            optimizer.load_begin()
        optimizer.fill(order.replaced)
        returned = self._exchange(order)
        self._holder.step_states.put(order.step, returned.state)
        if new:
            optimizer.load_end(order.step, returned.optimizer, order.record)
        else:
            optimizer.keep(order.step, order.record)
            self._step_back()
        optimizer.on_divergence.equal_after = returned.equal_after  # they are not compared yet
        optimizer.on_divergence.filled = order.replaced
        try:
            differing = optimizer.check_replicas()
        finally:
            optimizer.on_divergence.filled = ()
        if differing:
            raise CheckpointError(f"replicas differ after they were filled: {differing}")
        return returned

    def _exchange(self, order: messages.Regroup) -> Returned:
        """Take the part of the state that all ranks have from the first that stays, and agree on what each counts by itself (a collective)."""
        step, holder = order.step, self._holder
        speaker = min(set(range(dist.get_world_size())) - set(order.replaced))
        mine: dict[str, Any] = {
            "saves": astuple(self._saves.marks),
            "equal_after": self._optimizer.on_divergence.equal_after,
        }
        if speaker == self._rank:
            mine["trainer"] = (
                holder.step_states.get(step) if step else {}
            )  # before step 1 the program has what it began with
            mine["optimizer"] = holder.optimizer.host_state(step)
            mine["passed_over"] = holder.passed_over
        everyone = exchange_json(mine, holder.optimizer.device)
        marks = [
            SaveMarks(newest, count, tuple(under_way))
            for newest, count, under_way in (each["saves"] for each in everyone)
        ]
        agreed = SaveMarks(
            max(mark.newest for mark in marks),
            max(mark.count for mark in marks),
            next((mark.under_way for mark in marks if mark.under_way), ()),
        )
        given = everyone[speaker]
        if self._rank in order.replaced:
            holder.pass_over(given["passed_over"])
        equal_after = int(given["equal_after"])
        return Returned(step, given["trainer"], order.record, agreed, given["optimizer"], equal_after)

    def _take_back(self, order: messages.Regroup) -> None:
        with self._lock:
            if self._order is order:
                self._order = None
                self._ordered.clear()

    def _failed(self, order: messages.Regroup, error: Exception, protection: Protection) -> None:
        """Answer that this rank has not regrouped, and stay as a holder: the step is written now."""
        text = f"{type(error).__name__}: {error}"
        log.error("rank %d: cannot regroup: %s", self._rank, text)
        if isinstance(error, STAY_WRONG):
            error_file.record(error)  # this process ends by an order, and no restart is to follow
        protection.processor.put(WorkFailed(order.freeze_id, "regroup", "", text))
        protection.hold()


def _text(order: messages.Regroup, took_s: float) -> str:
    replaced = f"{ranks_text(order.replaced)} in a new process" if order.replaced else "all ranks in their processes"
    return f"training continues after step {order.step} with {replaced}, and no restart was needed: all made their groups again within {took_s:.2f} s"
