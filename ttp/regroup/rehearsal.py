"""Leaving the training function and coming back into it, rehearsed in a job that is well: `TTP_REHEARSE=every:N`.

At every N-th step all ranks compute the step up to its update, leave `train`, close their process groups, make them again, and call `train`
again, which computes the same step a second time. Owns when that is, and the comparison of the two results: a function that cannot be
entered again shows itself by another loss or gradient, and the job ends with that. Nothing is committed by the first time.
"""

from __future__ import annotations

import logging
import struct
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ttp.errors import STAY_WRONG, ConfigError, NotRepeatable, Regroup, TTPError
from ttp.groups.process_groups import GROUPS, Successor
from ttp.interfaces.protected_optimizer import ProtectedOptimizer
from ttp.processor.core.causes import classify
from ttp.processor.gate import Gate
from ttp.proto.messages import CauseKind, CommitRecord
from ttp.regroup.kept_result import KeptResults
from ttp.runtime.rank_runtime import show

log = logging.getLogger("ttp")

MAKE_AGAIN_AT_MOST_S = 120.0
"""Groups that take longer to be made again count as a standstill."""

OnRegroup = Callable[[Successor], None]


class Regrouping:
    """One session's. All of it on the training thread."""

    def __init__(
        self,
        optimizer: ProtectedOptimizer,
        gate: Gate | None,
        every: int,
        rank: int,
        pause: Callable[[float], AbstractContextManager[None]],
        *,
        own_groups: bool = False,
        kept: KeptResults | None = None,
    ) -> None:
        """`every`: 0 for no rehearsal. `pause`: says within its block that this rank does something else than steps. `own_groups`: the trainer keeps
        process groups that are not known here. `kept`: where results are kept. Raises ConfigError for a rehearsal of such a one."""
        if every and own_groups:
            raise ConfigError(
                f"invalid TTP_REHEARSE=every:{every}: this trainer's framework keeps process groups of its own, expected one that keeps none. Leave"
                " TTP_REHEARSE out"
            )
        self._optimizer, self._gate, self._every, self._rank, self._pause = optimizer, gate, every, rank, pause
        self._kept = kept
        self.rehearses = every > 0
        self._train = "train()"
        """The function that is entered again, by its name and place."""
        self._callbacks: list[OnRegroup] = []
        self._step_backs: list[Callable[[], None]] = []
        self._enterings: list[Callable[[], None]] = []
        self.recovered = False
        """The job was recovered in place, and `train` was not entered since."""
        self._first: CommitRecord | None = None
        self._took_s = 0.0
        self._rehearsed = 0
        self._equal = 0
        """The step that had equal results on rank 0, until all ranks are known to have made its update; 0: none."""

    def on_regroup(self, callback: OnRegroup) -> None:
        """Have `callback` called whenever the groups were made again, with the function that returns a group's successor."""
        self._callbacks.append(callback)

    def on_step_back(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when `train` is to be entered again, behind those of `on_regroup`: all is to be as it was after the newest step."""
        self._step_backs.append(callback)

    def on_enter_again(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on every rank just before `train` is entered after a recovery, in a new process too: it may be a collective."""
        self._enterings.append(callback)

    def step_back(self) -> None:
        """The newest step is the one from which `train` is entered again."""
        for callback in self._step_backs:
            callback()

    def enter(self) -> None:
        """`train` is entered: after a recovery on all ranks."""
        if self.recovered:
            self.recovered = False
            for callback in self._enterings:
                callback()

    def begin_train(self, train: str = "train()") -> None:
        """`train`, a function's name, is entered under `ttp_to_persist`, after the session began: it can be exited and entered again until `end_train`.
        Raises ConfigError."""
        self._train = train
        if self._every and self._gate is not None:
            GROUPS.check()
            self._gate.before_update = self._before_update

    def end_train(self, exc: BaseException | None = None) -> None:
        """`train` has returned, or raised `exc`. Raises NotRepeatable where it has returned without the step that was to be computed again."""
        if self._gate is not None:
            self._gate.before_update = None
        first, self._first = self._first, None
        if first is None or isinstance(exc, NotRepeatable):
            return
        if exc is None:
            raise self._not_repeatable(first.step, f"was not computed a second time: {self._train} returned before")
        if isinstance(exc, STAY_WRONG) or (isinstance(exc, Exception) and _of_its_own(exc)):
            why = f"{self._train} raised {type(exc).__name__} when it was entered again: {exc}"
            log.error("rehearsal: step %d was not computed a second time: %s", first.step, why)
            self._note_failed(first.step, why)

    def check_close(self) -> None:
        """Raise ConfigError where the session is closed on the way out of `train`, which will be entered again."""
        if isinstance(sys.exception(), Regroup):
            raise ConfigError(
                "rehearsal: train() closes the session on its way out (`finally:`), expected that its caller does. Move close() there"
            )

    def make_again(self) -> None:
        """Make the groups again, and give them to whatever holds one (every rank calls)."""
        began = time.perf_counter()
        with self._pause(MAKE_AGAIN_AT_MOST_S):
            successor = GROUPS.make_again()
            self._optimizer.rewire(successor)
            for callback in self._callbacks:
                callback(successor)
        self._took_s = time.perf_counter() - began

    def renew(self, successor: Successor) -> None:
        """The groups were made again in a recovery, and the optimizer has them: give them to whatever else holds one. What was computed once before is
        computed twice anew, on all ranks."""
        self._first, self._equal = None, 0
        for callback in self._callbacks:
            callback(successor)

    def _before_update(self, record: CommitRecord) -> None:
        self._keep_equal()  # all ranks have agreed on the step behind it
        if record.step % self._every:
            return
        first, self._first = self._first, None
        if first is None or first.step != record.step:
            self._first = record
            assert self._gate is not None
            self._gate.step_back(record.step)
            raise Regroup(f"step {record.step} is given up before its update")
        if differing := differences(first, record):
            raise self._not_repeatable(
                record.step, f"gave another result when {self._train} was called again: {differing}"
            )
        self._rehearsed += 1
        if self._rank == 0:
            self._equal = record.step
            took = f"{1e3 * self._took_s:.0f} ms"
            show(
                logging.INFO,
                f"rehearsal: step {record.step} was computed twice with equal results; groups made again in {took}",
            )

    def _not_repeatable(self, step: int, why: str) -> NotRepeatable:
        self._note_failed(step, why)
        return NotRepeatable(
            f"rehearsal: step {step} {why}. Have train() begin from the session's state alone (optimizer.current_step, session.step_state()), and make"
            " iterators, schedules and random numbers within it"
        )

    def _keep_equal(self) -> None:
        step, self._equal = self._equal, 0
        if step and self._kept is not None:
            self._kept.passed(step)

    def _note_failed(self, step: int, why: str) -> None:
        if self._kept is not None:
            self._kept.failed(step, why)

    def report(self) -> None:
        """Training has ended well on all ranks: say how often it was rehearsed (rank 0)."""
        self._keep_equal()
        if self._rehearsed:
            show(
                logging.INFO,
                f"rehearsal: train() was exited and entered again {self._rehearsed} times, with equal results",
            )
        elif self._every:
            show(
                logging.WARNING,
                f"rehearsal: no step was computed twice (TTP_REHEARSE=every:{self._every}): begin the session before train() is called, decorate"
                " train() with ttp_to_persist, without in_place=False, leave ENABLE_TTP on, and train for more steps",
            )
        self._rehearsed = self._every = 0


def differences(first: CommitRecord, second: CommitRecord) -> str:
    """Return what differs in two results of one step, bit for bit; empty: nothing does. The norm and the sums are over all ranks."""
    found = []
    for name in ("learning_rates", "sums", "grad_norm", "clip_factor", "loss_scale", "skipped"):
        before, after = getattr(first, name), getattr(second, name)
        if _bits(before) != _bits(after):
            found.append(f"{name} was {before}, then {after}")
    return "; ".join(found)


def _of_its_own(exc: Exception) -> bool:
    """TTP's own errors and those of collectives may be a peer's end."""
    return not isinstance(exc, TTPError) and classify(str(exc), type(exc).__name__) is not CauseKind.PEER_ERROR


def _bits(value: object) -> bytes:
    """Return a number's bits, or those of a tuple of them: two NaN of the same bits are the same result."""
    numbers = value if isinstance(value, tuple) else (value,)
    return struct.pack(f"<{len(numbers)}d", *(float(number) for number in numbers))
