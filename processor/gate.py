"""The gate that every optimizer update passes, and where a rank's phase is kept.

The training thread goes through `computing`, `ready`, `begin_update`, `end_update` (the interface of an update tracker);
it touches local memory and takes one lock per update, nothing else. The processor's threads close the gate (`shut`, then
`settle`), read what this rank holds, roll its state forward, and open it again (`reopen`).

What holds, whatever the threads' timing:

1. After `settle` has returned a report with `closed`, nothing that the training thread does through the gate changes
   the optimizer's state, the reduced gradients, or the phase, until `reopen`. The report is taken inside the lock.
2. `ready` waits while closed, like the others. A rank that reported COMPUTE(t) must not go on into the collective that
   makes commit record t: another rank could get the record and update, and this one could not follow.
3. From the first byte of a roll forward the gate is final: the training thread would run the same update again, so it
   waits for the end of the process, or leaves its step and regroups (`regrouped`).
4. An update that raised leaves the state torn, and no other update begins before `regrouped`.

The lock belongs to the training thread from `begin_update` to `end_update`, so closing waits for an update in progress
by waiting for the lock. It is not fair; therefore the bar is raised before the wait, and whoever takes the lock looks
at it. It is re-entrant only so that a thread may give back what it owns without knowing whether it owns it (`abandon`).

Never logs, never sends, never waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable

from ttp.errors import Overtaken, ProtocolError, Regroup
from ttp.processor.freeze_state import FreezeState
from ttp.processor.step_boundary import StepBoundary
from ttp.processor.threads import THREADS, Waits
from ttp.proto.messages import CommitRecord, Digest, Phase, StateReport

_COMPUTE, _READY, _UPDATING, _DONE = Phase.COMPUTE, Phase.READY, Phase.UPDATING, Phase.DONE

ABANDONED_STEP_S = 5.0
"""How long reduced gradients outlive a failed step, at least: longer than a lease, so that a dead peer is known by then."""

_LET_GO_S = 0.02
"""How often a thread that may be let go looks whether its update was done for it."""

_PASSING_S = 1.0
"""A thread that finds the gate closed holds the lock for a moment, to look; no other thread holds it for less than an update."""


class Gate:
    """One rank's gate. Training thread: the tracker methods and `abandon`. Processor's threads: the rest."""

    __slots__ = (
        "_abandoned_s",
        "_acquire",
        "_backup_step",
        "_digests",
        "_drain",
        "_freezes",
        "_in_update",
        "_lock",
        "_phase",
        "_previous_record",
        "_rank",
        "_record",
        "_release",
        "_state_step",
        "_step",
        "_waiting",
        "_waits",
        "after_update",
        "before_ready",
        "before_update",
        "drain_error",
        "left",
        "lets_go",
        "notice",
        "on_first_step",
        "on_step",
        "on_wait",
        "regroups",
        "step_boundary",
        "unled",
    )

    def __init__(
        self,
        rank: int,
        *,
        state_step: int = 0,
        drain: Callable[[float], bool] | None = None,
        waits: Waits = THREADS,
        abandoned_s: float = ABANDONED_STEP_S,
    ) -> None:
        """`state_step`: the step of the optimizer state now (0: untrained). `waits`: what threads wait with. `abandoned_s`: how long the reduced
        gradients of a step that failed stay as they are while no freeze comes.

        `drain(timeout_s) -> bool`: waits until the device has finished the last update (its event has passed); True when
        it has. None on devices where `end_update` is the end.
        """
        self._rank = rank
        self._drain = drain
        self._waits = waits
        self._abandoned_s = abandoned_s
        self._lock = waits.lock()  # guards phase, steps, records: every change of them
        self._acquire = self._lock.acquire
        self._release = self._lock.release
        self._freezes = FreezeState(waits.event())
        self._phase = _COMPUTE
        self._step = state_step + 1
        self._state_step = state_step
        self._backup_step = -1
        self._record: CommitRecord | None = None
        self._previous_record: CommitRecord | None = None
        self._digests: tuple[Digest, ...] = ()  # of the state as it is
        self._in_update = False  # written and read by the training thread alone
        self.drain_error = ""
        self.regroups = 0
        """In which freeze the training thread makes its groups again, up to `regrouped`; 0: in none. Written and read by it alone."""
        self.lets_go = False
        """`begin_update` raises Overtaken, in place of waiting for good, once the work thread has done that very update."""
        self.left: Callable[[], bool] | None = None
        """Says, while the gate is closed, whether the training thread is to leave its step, by Regroup; None: it never is."""
        self._waiting = False
        self.notice = False
        """This rank has a preemption notice (a processor's thread writes, the training thread reads)."""
        self.unled = False
        """No controller leads this rank (as above)."""
        self.step_boundary = StepBoundary(waits)
        self.on_first_step: Callable[[int], None] | None = None
        """Called once, with the step, by the thread that has finished the first update or roll forward."""
        self.on_step: Callable[[], None] | None = None
        """Called on the training thread when it has finished an update."""
        self.before_ready: Callable[[int], None] | None = None
        """Called on the training thread, with the step, before it is READY: this rank waits for what must be so of all ranks by then."""
        self.before_update: Callable[[CommitRecord], None] | None = None
        """Called on the training thread with the record of the update that it is about to begin; may raise, after `step_back`."""
        self.after_update: Callable[[], None] | None = None
        """Called on the training thread behind `on_step`: what takes time."""
        self.on_wait: Callable[[bool], None] | None = None
        """Called on the training thread when `waiting` is set, with its value."""

    # --- training thread ---

    @property
    def waiting(self) -> bool:
        """The training thread is in a collective (it writes, heartbeats read)."""
        return self._waiting

    @waiting.setter
    def waiting(self, waits: bool) -> None:
        self._waiting = waits
        if self.on_wait is not None:
            self.on_wait(waits)

    def computing(self, step: int) -> None:
        """Gradients of `step` are about to change. Waits while closed.

        From READY on they must stay for a roll forward. A thread that comes here from READY has left a step without its
        update: its collective raised, so a freeze is on its way, and is waited for; without one the step is given up.
        """
        if self._phase is _READY:
            self._await_freeze()
        self._pass()
        self._step = step
        self._phase = _COMPUTE
        self._release()

    def ready(self, step: int) -> None:
        """This rank's reduced gradients of `step` are final. Waits while closed."""
        if self.before_ready is not None:
            self.before_ready(step)
        self._pass()
        self._step = step
        self._phase = _READY
        self._release()

    def begin_update(self, step: int, record: CommitRecord, backup_step: int = -1) -> None:
        """Take the gate for `step`'s update; waits while closed, for good once the state was rolled forward.

        Raises ProtocolError when an update is in progress already, or an earlier one failed; Overtaken where `lets_go`.
        """
        if self._in_update:
            raise self._misuse("begin_update", step, "an update is in progress already; call end_update first")
        if self.before_update is not None:
            self.before_update(record)
        self._acquire()
        if self._freezes.barred:
            self._release()
            self._pass(step)
        self._in_update = True
        self._digests = ()
        self._previous_record = self._record
        self._record = record
        self._backup_step = backup_step
        self._step = step
        self._phase = _UPDATING

    def step_back(self, step: int) -> None:
        """Every rank gives `step` up before its update, with its record, and computes it again. Waits while closed, for good once the
        state was rolled forward."""
        self._pass()
        self._phase = _COMPUTE
        self._step = step
        self._release()

    def end_update(self, step: int) -> None:
        """The update is finished: the state is `step`'s. Gives the gate back. Raises ProtocolError without an update."""
        if not self._in_update:
            raise self._misuse("end_update", step, "no update is in progress; call begin_update first")
        self._state_step = step
        self._phase = _DONE
        self._in_update = False
        self._release()
        if self.on_step is not None:
            self.on_step()
        if self.on_first_step is not None:
            self._tell_first_step(step)
        if self.after_update is not None:
            self.after_update()

    def dispute(self, step: int, digests: tuple[Digest, ...]) -> None:
        """These shard groups differ from what other ranks hold of them. Waits while closed: what is decided from a report without them is
        over before a rank learns in a collective who is wrong. A rank that `regroups` does not wait: its gate opens only when all are equal, and what
        is written instead is decided from the reports of a later freeze.

        Raises ProtocolError unless the state is `step`'s, and where that later freeze has come before.
        """
        self._acquire() if self.regroups else self._pass()
        if self.regroups and self._freezes.freeze_id != self.regroups:
            self._release()
            raise self._misuse("dispute", step, f"regroups in freeze {self.regroups}, and a newer one has come")
        if self._state_step != step and not (self.regroups and self._freezes.torn):
            self._release()
            raise self._misuse("dispute", step, f"expected the state of that step, got {self._state_step}'s")
        self._digests = digests
        self._release()

    def fail_update(self, step: int) -> None:
        """The update raised half way: the state is torn, and no update begins any more."""
        if not self._in_update:
            raise self._misuse("fail_update", step, "no update is in progress")
        self._freezes.tear()
        self._in_update = False
        self._release()

    def abandon(self) -> None:
        """An exception took the training thread out of `train`: give back what it holds.

        An update that it left without `end_update` or `fail_update` counts as failed.
        """
        if self._in_update:
            self._freezes.tear()
            self._in_update = False
        try:
            self._release()
        except RuntimeError:
            return  # it did not own the lock: nothing is open

    def boundary(self, step: int, unled: bool = False) -> None:
        """`step` is finished and some rank has a preemption notice: see `StepBoundary.wait`."""
        self.step_boundary.wait(step, unled)

    def resumed(self, step: int, record: CommitRecord | None = None) -> None:
        """A checkpoint of `step` was loaded; `record` is that step's. Waits while closed."""
        self._pass()
        self._phase = _COMPUTE
        self._step = step + 1
        self._state_step = step
        self._record = record
        self._previous_record = None
        self._backup_step = -1
        self._release()

    def regrouped(self, step: int, record: CommitRecord | None) -> None:
        """All ranks enter their training anew with the state of `step`, which this rank has, or was given. `record` is
        that step's. The gate stays closed, and opens as
        after any freeze: a roll forward, or that this process had no state, does not keep it closed any more.

        Raises ProtocolError when the gate is open, or the state is another step's.
        """
        self._acquire()
        if self._freezes.opened.is_set() or not (self._freezes.torn or self._state_step == step):
            self._release()
            raise self._misuse(
                "regrouped", step, f"expected a closed gate and the state of that step, got {self._state_step}'s"
            )
        self._phase = _COMPUTE
        self._step = step + 1
        self._state_step = step
        self._record = record
        self._previous_record = None
        self._backup_step = -1
        self._digests = ()
        self.regroups = 0
        self._freezes.renew()
        self._release()

    def await_open(self) -> None:
        """The training thread, which has regrouped, enters its training only when all ranks have."""
        self._pass()
        self._release()

    def vacate(self, freeze_id: int) -> int:
        """This process holds no state yet: closed, and torn until `regrouped`. Returns the ticket for `reopen`."""
        self._freezes.tear()
        return self._freezes.shut(freeze_id)

    def _await_freeze(self) -> None:
        """Wait for the gate to close, up to `abandoned_s` (a rare path: it may poll)."""
        deadline = self._waits.now() + self._abandoned_s
        while not self._freezes.barred and self._waits.now() < deadline:
            self._waits.sleep(0.01)

    def _pass(self, update: int = 0) -> None:
        """Take the lock with the gate open. `update`: the step whose update needs it, if any."""
        while True:
            self._acquire()
            if not self._freezes.barred:
                return
            overtaken = bool(update) and self.overtook(update)
            self._release()
            if overtaken and self.lets_go:
                raise Overtaken(f"rank {self._rank}: the update of step {update} was done by the work thread")
            if self._freezes.opened.is_set() and self._freezes.torn:
                raise self._misuse("update", self._step, "an earlier update failed half way; restart from a checkpoint")
            if self.left is not None and self.left():
                raise Regroup(f"rank {self._rank} leaves step {self._step}: the ranks make their process groups again")
            self._freezes.opened.wait(_LET_GO_S if self.lets_go or self.left is not None else None)

    def _tell_first_step(self, step: int) -> None:
        tell, self.on_first_step = self.on_first_step, None
        if tell is not None:
            tell(step)

    def _misuse(self, call: str, step: int, why: str) -> ProtocolError:
        return ProtocolError(f"rank {self._rank}, {call}({step}): {why} (phase {self._phase.name}, step {self._step})")

    # --- processor's threads ---

    def shut(self, freeze_id: int) -> int:
        """Let no thread pass any more. Does not wait; returns a ticket for `settle` and `reopen`. The latest one is in force."""
        return self._freezes.shut(freeze_id)

    def settle(self, ticket: int, freeze_id: int, timeout_s: float) -> StateReport:
        """Wait up to `timeout_s` for the update in progress to end and the device to finish it; report what this rank holds.

        `closed` is False without success, and the gate stays shut behind the stuck update; also once it was opened since.
        """
        deadline, shut = self._waits.now() + timeout_s, self._freezes.shut_since
        if not self._acquire(timeout=max(0.0, timeout_s)):
            return self._report(freeze_id, closed=False)
        try:
            closed = shut(ticket) and self._drained(deadline) and shut(ticket)
            return self._report(freeze_id, closed=closed)
        finally:
            self._release()

    def reopen(self, ticket: int) -> bool:
        """Open the gate if `ticket` is the last one, and say whether it is open now.

        Ignored after a roll forward. A torn rank is let out of its wait, but begins no update.
        """
        return self._freezes.reopen(ticket)

    def start_roll_forward(self, record: CommitRecord) -> None:
        """Make the gate final; from here the state may change. Answered by `rolled_forward` or `roll_forward_failed`.

        The same thread calls both. Raises ProtocolError, and changes nothing, unless the gate is closed with this rank
        READY at the record's step.
        """
        if not self._acquire(timeout=_PASSING_S):
            raise self._misuse("roll_forward", record.step, "the gate is not closed: an update is in progress")
        if reason := self._no_roll_forward(record):
            self._release()
            raise self._misuse("roll_forward", record.step, reason)
        self._previous_record = self._record
        self._record = record
        self._phase = _UPDATING

    def _no_roll_forward(self, record: CommitRecord) -> str:
        """Say why this rank cannot roll forward; empty: it can, and the gate is final."""
        if self._freezes.torn:
            return "an update failed half way, the state is torn"
        if self._phase is not _READY or self._step != record.step or self._state_step != record.step - 1:
            return f"got the state of step {self._state_step}, expected READY({record.step})"
        return "" if self._freezes.make_final() else "the gate is open; freeze first"

    def rolled_forward(self, step: int, backup_step: int = -1) -> None:
        """The roll forward is finished: the state is `step`'s, for the last time. `backup_step` as in `begin_update`."""
        self._state_step = step
        self._backup_step = backup_step
        self._phase = _DONE
        self._release()
        if self.on_first_step is not None:
            self._tell_first_step(step)

    def roll_forward_failed(self) -> None:
        """The roll forward raised half way: the state is torn, and so may be a local copy that it was making."""
        self._freezes.tear()
        self._backup_step = -1
        self._release()

    @property
    def closed(self) -> bool:
        """The gate is closed, and no update is in progress: the state stands still."""
        if not self._acquire(timeout=_PASSING_S):
            return False
        try:
            return not self._freezes.opened.is_set()
        finally:
            self._release()

    @property
    def freeze_id(self) -> int:
        """The latest freeze's number; -1 before the first."""
        return self._freezes.freeze_id

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def step(self) -> int:
        """The step that `phase` belongs to."""
        return self._step

    @property
    def state_step(self) -> int:
        """Step of the optimizer state, while no update is in progress."""
        return self._state_step

    @property
    def torn(self) -> bool:
        return self._freezes.torn

    @property
    def final(self) -> bool:
        """The state was rolled forward: the training thread never passes again."""
        return self._freezes.final

    def overtook(self, step: int) -> bool:
        """The update of `step` was done by a roll forward: the training thread has nothing left to do in it."""
        return self._freezes.final and not self._freezes.torn and self._state_step == step

    @property
    def backup_step(self) -> int:
        return self._backup_step

    @property
    def records(self) -> tuple[CommitRecord, ...]:
        """The last two commit records, newest last."""
        return tuple(record for record in (self._previous_record, self._record) if record is not None)

    def _drained(self, deadline: float) -> bool:
        """The device has finished the last update. A device that answers with an error leaves the state unusable: torn."""
        if self._drain is None:
            return True
        try:
            return self._drain(max(0.0, deadline - self._waits.now()))
        except RuntimeError as error:  # torch's device errors
            self.drain_error = str(error)
            self._freezes.tear()
            return True

    def _report(self, freeze_id: int, *, closed: bool) -> StateReport:
        """Not closed means: still UPDATING as far as the state goes, be it the thread's update or the device's."""
        stuck_step = self._step if self._phase is _UPDATING else self._state_step
        return StateReport(
            rank=self._rank,
            freeze_id=freeze_id,
            closed=closed,
            phase=self._phase if closed else _UPDATING,
            step=self._step if closed else stuck_step,
            state_step=self._state_step,
            torn=self._freezes.torn,
            backup_step=self._backup_step,
            records=self.records,
            final=self._freezes.final,
            digests=self._digests if closed else (),
        )
