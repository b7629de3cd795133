"""A rank's copies of its state in its agent's memory: when they are taken, and that none is overwritten before all ranks' next ones are safe.

Owns the two hooks around a step. Behind every so many updates training stops while the shards are copied; the keeper does the rest. Before the
rank is READY for the step behind which it copies next, its last copy must be safe: what a rank knows when the step's spanning collective has ended
is then true of all ranks (docs/proof.md, L13).
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ttp.config import Settings
from ttp.copies.copy_memory import CopyMemory, be_ended_first
from ttp.copies.region import Description, places_of
from ttp.copies.rules import SLOTS, interval, most_lost, slot_of, waits_before
from ttp.errors import CheckpointError, ConfigError
from ttp.exchange.json_collectives import exchange_json, world
from ttp.inputs import checked
from ttp.processor.gate import Gate
from ttp.runtime.rank_runtime import show
from ttp.runtime.state_provider import OptimizerStateProvider
from ttp.text.wording import counted, size_text

log = logging.getLogger("ttp")

BUDGET = 0.01
"""Of the time of the steps, for copies."""
MEASURED = 16
"""The newest so many steps and copies say how often to copy."""
SAFE_S = 180.0
"""A keeper that has not answered for a copy by then is stopped, or starved: training continues without that copy."""
AGREED_AT = (2, 8, 32)
"""After so many copies the ranks agree anew on how often, and after each multiple of the last."""


class CopyOptions:
    """What a trainer asks for. Raises ConfigError for what cannot be."""

    def __init__(self, copies: str | None, budget: float = BUDGET, every: int | None = None) -> None:
        if copies not in (None, "memory"):
            raise ConfigError(f"invalid copies: got {checked.shown(copies)}, expected 'memory', or None for none")
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
            raise ConfigError(
                f"invalid copy_budget: got {checked.shown(budget)}, expected a part of the time above 0, up to 1: 0.01 is one percent"
            )
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ConfigError(f"invalid copy_every: got {checked.shown(every)}, expected a number of steps, or None")
        self.enabled = copies is not None
        self.budget = float(budget)
        self.every = every


NO_COPIES = CopyOptions(None)


class StepCopies:
    """One rank's. All ranks make one together, and use it on the training thread."""

    def __init__(
        self,
        holder: OptimizerStateProvider,
        settings: Settings,
        options: CopyOptions,
        directories: Sequence[str],
        gate: Gate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError on every rank: copies cannot be had here."""
        self._holder, self._gate, self._clock = holder, gate, clock
        self._optimizer = optimizer = holder.optimizer
        self._rank = world()[0]
        self._options = options
        self._every = options.every or 1
        self._next = 0
        """Behind the first step from this one on comes the next copy."""
        self._count = 0
        self._pending = 0
        """The step of the copy that is not safe yet; 0: there is none."""
        self._warned = ""
        self._steps_s: list[float] = []
        self._stops_s: list[float] = []
        self._ended_s = 0.0
        held = optimizer.holdings()
        everyone = exchange_json({"host": settings.host, "groups": sorted(held)}, optimizer.device)
        hosts_of: dict[str, set[str]] = {}
        for one in everyone:
            for group in one["groups"]:
                hosts_of.setdefault(group, set()).add(one["host"])
        self._hosts = len({one["host"] for one in everyone})
        self._send = self._hosts > 1 and any(len(hosts_of[group]) == 1 for group in held)
        places = places_of(held)
        facts = facts_of(holder, settings, directories)
        description = Description(
            self._rank, settings.round_number, len(everyone), tuple(sorted(hosts_of)), (places,) * SLOTS, facts
        )
        self._nbytes = sum(place.nbytes for place in places)
        self._memory = self._open(settings, description)
        be_ended_first()
        if self._rank == 0:
            show(logging.INFO, self._introduction(len(everyone)))
        self._check, gate.before_ready = gate.before_ready, self.before_ready
        gate.after_update = self.after_update

    def _open(self, settings: Settings, description: Description) -> CopyMemory:
        memory, error = None, ""
        try:
            if not settings.copies:
                raise ConfigError(
                    "copies='memory': got no ttprun, expected its agent to keep them. Start the job with ttprun"
                )
            memory = CopyMemory(settings.copies, description)
        except (ConfigError, OSError, EOFError, CheckpointError) as problem:
            error = str(problem)
        errors = [said for said in exchange_json(error, self._optimizer.device) if said]
        if memory is None or errors:
            raise ConfigError(error or f"another rank has no memory for its copies: {errors[0]}")
        return memory

    def _introduction(self, ranks: int) -> str:
        where = "its node's memory"
        if self._hosts > 1:
            where += " and, without a replica on another node, of the next one's"
        what = f"any of {counted(ranks, 'rank')}" + (f", or 1 of {self._hosts} nodes," if self._hosts > 1 else "")
        copied = f"copies in memory: those of rank 0 take {size_text(SLOTS * self._nbytes)} of {where}"
        if not self._options.every:
            return f"{copied}; at first after each step, then as often as {self._options.budget:.1%} of the time allows"
        lost = counted(most_lost(self._every), "step")
        return f"{copied}; after every {counted(self._every, 'step')}. Losing {what} costs at most {lost}"

    # --- the training thread ---

    def before_ready(self, step: int) -> None:
        """`step`'s gradients are final, and no rank has that from this one yet."""
        if self._check is not None:
            self._check(step)
        if self._pending and waits_before(step, self._next):
            begun = self._clock()
            self._gate.waiting = True
            try:
                self._await()
            finally:
                self._gate.waiting = False
            if self._stops_s:
                self._stops_s[-1] += self._clock() - begun

    def after_update(self) -> None:
        """An update has ended, and the gate is given back."""
        now, step = self._clock(), self._optimizer.current_step
        if self._ended_s:
            self._steps_s = [*self._steps_s[1 - MEASURED :], now - self._ended_s]
        if step >= self._next:
            self._take(step)
            self._next = step + self._every
            self._agree()
        self._ended_s = self._clock()

    def _take(self, step: int) -> None:
        optimizer, begun = self._optimizer, self._clock()
        optimizer.lane.drain()
        record = optimizer.last_record
        state = {"state": self._holder.host_state(step), "record": record and asdict(record)}
        held = optimizer.holdings(step)
        tensors = [tensor.values for _, group in sorted(held.items()) for tensor in group]
        self._count += 1
        slot = slot_of(self._count)
        try:
            self._memory.take(slot, step, self._count, json.dumps(state).encode(), tensors)
            pace_s = self._every * statistics.median(self._steps_s) / 2 if self._steps_s else 0.0
            self._memory.say(
                {
                    "do": "copied",
                    "slot": slot,
                    "step": step,
                    "sequence": self._count,
                    "send": self._send,
                    "within_s": pace_s,
                }
            )
            self._pending = step
        except (CheckpointError, ConfigError, OSError, EOFError) as error:
            self._warn(f"no copy of step {step}: {error}")
        self._stops_s = [*self._stops_s[1 - MEASURED :], self._clock() - begun]

    def _await(self) -> None:
        """Wait until the last copy is safe, or is known not to become so."""
        until_s = self._clock() + SAFE_S
        try:
            while self._pending:
                answer = self._memory.next_message(max(0.0, until_s - self._clock()))
                if answer is None:
                    step, self._pending = self._pending, 0
                    self._warn(
                        f"the copy of step {step} is not safe: no answer of the copy keeper within {SAFE_S:.0f} s"
                    )
                elif answer.get("safe") == self._pending:
                    self._pending = 0
                    if answer["why"]:
                        self._warn(f"the copy of step {answer['safe']} is not safe: {answer['why']}")
        except OSError as error:
            self._pending = 0
            self._warn(str(error))

    def _agree(self) -> None:
        """Agree with all ranks on how often to copy (a collective), after some copies."""
        if self._options.every or not (self._count in AGREED_AT or self._count % AGREED_AT[-1] == 0):
            return
        own = interval(
            statistics.median(self._stops_s), statistics.median(self._steps_s or [0.0]), self._options.budget
        )
        self._gate.waiting = True
        try:
            every = max(exchange_json(own, self._optimizer.device))
        finally:
            self._gate.waiting = False
        if every != self._every and self._rank == 0:
            stop_s = statistics.median(self._stops_s)
            show(
                logging.INFO,
                f"copies in memory every {counted(every, 'step')} from step {self._next} on, as one stops training for {1e3 * stop_s:.1f} ms:"
                f" at most {counted(most_lost(every), 'step')} lost",
            )
        self._every = every

    def _warn(self, text: str) -> None:
        if text.partition(":")[2] != self._warned:
            self._warned = text.partition(":")[2]
            show(logging.WARNING, f"rank {self._rank}: {text}")

    def close(self) -> None:
        self._gate.before_ready = self._gate.after_update = None
        self._memory.close()


def facts_of(holder: OptimizerStateProvider, settings: Settings, directories: Sequence[str]) -> dict[str, Any]:
    """Return what whoever writes a checkpoint of copies needs besides them."""
    optimizer = holder.optimizer
    group_count = len(optimizer.host_state(optimizer.current_step)["param_groups"])
    return {
        "layout": holder.layout,
        "expected": optimizer.expected_tensors(),
        "param_names": [optimizer.param_names(index) for index in range(group_count)],
        "directories": list(directories),
        "passed_over": holder.passed_over,
        "sign_key": settings.sign_key,
        "verify_key": settings.verify_key,
    }


def begin_copies(
    options: CopyOptions,
    holder: OptimizerStateProvider,
    settings: Settings,
    directories: Sequence[str],
    gate: Gate | None,
    *,
    own_form: bool,
) -> StepCopies | None:
    """Return this rank's copies; None: none were asked for, or nothing is protected. All ranks call. gate: this rank's; None: it is not protected.
    own_form: the trainer's checkpoints have a form of their own. Raises ConfigError where copies were asked for and cannot be had."""
    if not options.enabled or gate is None:
        return None
    why = ""
    if own_form:
        why = "checkpoints in a form of the trainer's own, in which a copy cannot be written"
    elif not holder.optimizer.spans_job:
        why = "no collective that every rank of the job enters in each step"
    elif not settings.shared_dirs:
        why = "TTP_SHARED_DIRS=False: copies are saved in directories that all nodes share"
    elif (choice := getattr(holder.optimizer, "on_divergence", None)) is not None and choice.acts:
        why = f"on_divergence={choice.choice!r}: a copy may be of replicas that differ, and would be resumed from"
    if why:
        raise ConfigError(f"copies='memory': got {why}. Do without copies, or change that")
    return StepCopies(holder, settings, options, directories, gate)
