"""One episode on one rank: train on the device under a fault, freeze, decide, roll forward, dump, and compare with a run without it.

The gate, the optimizer, the decision and the copies to the host are ttp's own; the controller's messages are an exchange over gloo, between threads
that no fault touches. Raises Violation for what must not be.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.device import backend
from tests.device.build import extension
from tests.device.plan import AT, STEPS, Plan
from ttp.checkpoint import host_copy
from ttp.checkpoint.host_copy import HostCopier
from ttp.controller.core.facts.coverage import Group
from ttp.controller.core.facts.decision import Decision, Refusal, decide
from ttp.errors import AbortedCollective
from ttp.optim.replica_optimizer import (
    ClipNorm,
    ClipValue,
    LossScale,
    TTPOddReplicaOptimizer,
    TTPReplicaOptimizer,
)
from ttp.processor.gate import Gate
from ttp.proto.messages import CommitRecord, StateReport

TOO_LONG_S = 15.0
"""Nothing of an episode takes longer, on a machine that has much else to do: what does, hangs."""
QUEUED_S = 2.0
"""With one hardware queue a call may wait behind a kernel that hangs: the rank is given up then, as it is after TTP_OT."""
FREEZE_S = 1.0

QUIET = ("frozen", "slow", "hang_beside")
"""Faults at which no collective fails."""

State = dict[tuple[str, int], torch.Tensor]


class Violation(AssertionError):
    """What no fault may bring about."""


class Queued(Exception):
    """A call waits in the device's one queue."""


class Bounded(threading.Thread):
    """A call on a thread of its own, waited for so long."""

    def __init__(self, what: str, device: torch.device, call: Callable[[], Any], may_wait: bool = False) -> None:
        super().__init__(name=what, daemon=True)
        self._what, self._device, self._call, self._may_wait = what, device, call, may_wait
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            torch.get_device_module(self._device).set_device(self._device)
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def finish(self) -> Any:
        """Return what the call returned; raises what it raised, Queued or Violation when it has not ended."""
        self.join(QUEUED_S if self._may_wait else TOO_LONG_S)
        if self.is_alive() and self._may_wait:
            raise Queued(f"{self._what} waits")
        if self.is_alive():
            frame = sys._current_frames().get(self.ident or 0)
            raise Violation(f"{self._what} hangs\n{''.join(traceback.format_stack(frame)) if frame else ''}")
        if self.error is not None:
            raise self.error
        return self.result


class Episode:
    """One rank's. `exchange`: every rank's value, in their order."""

    def __init__(self, plan: Plan, rank: int, world: int, exchange: Callable[[Any], list[Any]]) -> None:
        self.plan, self.rank, self.world, self.exchange = plan, rank, world, exchange
        self.device = torch.device(backend.NAME, rank)
        self._stopped = threading.Event()
        self._waits = bool(dict(plan.traits)["one_queue"])
        """Everything may wait behind what hangs there: a kernel, or a collective that waits for a rank which was frozen before it."""
        self._faulty = False
        self._begun = time.monotonic()
        self._ticket = 0
        self._raised: BaseException | None = None
        self._froze = threading.Event()
        """Somebody asks for a freeze."""
        before = set(dist.distributed_c10d._world.pg_map)
        self.group = dist.new_group(list(range(world)))
        torch.manual_seed(plan.seed)
        settings = dict(plan.settings)
        dtype = self._dtype = getattr(torch, plan.dtype)
        self.model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12)).to(
            self.device, dtype
        )
        clips = {None: None, "norm": ClipNorm(0.1), "value": ClipValue(0.01)}
        kind = TTPOddReplicaOptimizer if settings["ring"] else TTPReplicaOptimizer
        self.on_device = settings["sums_on_device"]
        self.optimizer = kind(
            self.model.named_parameters(), getattr(torch.optim, plan.base), group=self.group, replicas=2,
            clip=clips[settings["clip"]], loss_scale=LossScale(64.0) if settings["loss_scale"] else None,
            micro_batches=2, bucket_bytes=settings["bucket_bytes"], local_copy=settings["local_copy"],
            masters_apart=settings["masters_apart"], gradient_accumulation_shard=settings["gradient_accumulation_shard"],
            compare_every=0, **dict(plan.options),
        )  # fmt: skip
        host_copy.STAGING_BYTES = 512  # so that all pieces go through it, in several parts
        self.copier = HostCopier(self.device)
        self._beside = torch.get_device_module(self.device).Stream(self.device)
        self.groups = [pg for pg in dist.distributed_c10d._world.pg_map if pg not in before]
        self.expected: list[State] = []
        self.records: list[CommitRecord] = []

    # --- the run without a fault ---

    def rehearse(self) -> None:
        """Train all steps; keep the state after each, and go back to the first."""
        self.expected.append(self._state())
        first = self.optimizer.host_state(0)
        fresh = [target.values.detach().cpu().clone() for target in self.optimizer.load_targets()]
        for step in range(1, STEPS + 1):
            self._step(step)
            self.expected.append(self._state())
            assert self.optimizer.last_record is not None
            self.records.append(self.optimizer.last_record)
        for target, values in zip(self.optimizer.load_begin(), fresh, strict=True):
            target.values.copy_(values)
        self.optimizer.load_end(0, first)
        self.optimizer.zero_grad()

    def _step(self, step: int) -> None:
        sim = torch.get_device_module(self.device)
        generator = torch.Generator().manual_seed(self.plan.seed * 1000 + step * 10 + self.rank)
        self.optimizer.zero_grad()
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        for last in (False, True):
            batch = torch.randn(6, 12, generator=generator).to(self.device, self._dtype)
            with contextlib.nullcontext() if last else self.optimizer.no_sync():
                loss = self.optimizer.scale_loss(self.model(batch).float().square().mean())
                torch.autograd.backward(loss)
            losses += loss.detach()
        sums: Any = losses if self.on_device else [float(step)]
        self.optimizer.step(sums=sums)
        assert sim.current_device() == self.rank

    def _state(self) -> State:
        return {
            (held.key, held.start): held.values.detach().cpu().clone()
            for tensors in self.optimizer.holdings().values()
            for held in tensors
        }

    # --- the run with it ---

    def run(self) -> str:
        """Let the fault happen; return what came of it: `saved STEP` or `refused`. Raises Violation."""
        self.gate = Gate(self.rank, state_step=0, drain=self.optimizer.lane.drain_within)
        self.optimizer.attach(self.gate, attempt=1)
        self.optimizer.on_point = self._point
        backend.set_traits(**dict(self.plan.traits))
        training = threading.Thread(target=self._train, daemon=True)
        self._begun = time.monotonic()
        training.start()
        self._await_end(training)
        if self._raised is not None and self.plan.kind in QUIET:
            raise Violation(f"training raised {self._raised!r} without a fault of its own") from self._raised
        return self._dump()

    def _train(self) -> None:
        try:
            torch.get_device_module(self.device).set_device(self.device)
            for step in range(1, STEPS + 1):
                self._step(step)
        except BaseException as error:
            self._raised = error
            self.gate.abandon()
            self._froze.set()

    def _await_end(self, training: threading.Thread) -> None:
        """Wait until all ranks are to be frozen: one has seen a fault, or all have trained to the end."""
        while True:
            states = self.exchange((self._froze.is_set(), training.is_alive()))
            if any(frozen for frozen, _ in states) or not any(alive for _, alive in states):
                return
            if time.monotonic() - self._begun > TOO_LONG_S:
                raise Violation("training neither ends nor fails")

    def _point(self, name: str, step: int) -> None:
        plan = self.plan
        self._begun = time.monotonic()
        if (name, step) == (plan.point, plan.step) and plan.kind in AT and self.rank != plan.victim:
            time.sleep(3 * plan.lag_s)  # the victim waits for this rank
        if (
            self._faulty
            or (name, step) != (plan.point, plan.step)
            or not (self.rank == plan.victim or plan.kind == "abort_all")
        ):
            return
        self._faulty = True
        sim = torch.get_device_module(self.device)
        if plan.kind in ("hang", "hung_stop"):
            backend.hang(sim.current_stream(self.device))
        elif plan.kind in ("hang_beside", "stuck"):
            backend.hang(self._beside)
        elif plan.kind == "slow":
            backend.sleep(0.05, sim.current_stream(self.device))
        elif plan.kind == "fail":
            backend.fail("an illegal address", self.rank)
        if plan.kind.startswith("abort") and plan.lag_s:
            threading.Timer(plan.lag_s, self._abort).start()
        elif plan.kind.startswith("abort"):
            self._abort()
        threading.Timer(plan.lag_s * (10 if plan.kind in AT else 2), self._froze.set).start()
        if plan.kind == "raise":
            raise RuntimeError("planned")
        if plan.kind in ("stop", "dead", "hung_stop", "stuck"):
            self._stopped.wait()
            raise RuntimeError("the episode is over")

    def _abort(self) -> None:
        groups = {"abort_one": self.groups[-1:], "abort_early": self.groups[1:]}.get(self.plan.kind, self.groups)
        for group in groups:
            group._get_backend(self.device).abort()

    # --- freeze, decide, roll forward, dump ---

    def _dump(self) -> str:
        gate, plan = self.gate, self.plan
        self._ticket = ticket = gate.shut(1)
        report: StateReport = Bounded("settle", self.device, lambda: gate.settle(ticket, 1, FREEZE_S)).finish()
        dead = plan.kind == "dead" and self._faulty
        holds = [(group.group_id, group.label, group.nbytes) for group in self.optimizer.shard_groups()]
        answers = self.exchange((dead, report, holds))
        self._check_records([record for _, one, _ in answers for record in one.records])
        records = {record.step: record for _, one, _ in answers for record in one.records}
        reports = {rank: one for rank, (gone, one, _) in enumerate(answers) if not gone}
        groups = _groups([held for _, _, held in answers])
        unreachable: frozenset[tuple[int, int]] = frozenset()
        written: set[tuple[int, str]] = set()
        while True:
            decision = decide(groups, reports, records, unreachable)
            if isinstance(decision, Refusal):
                return self._refused(records, reports, decision)
            failed = self._roll_forward(decision) if self.rank in decision.roll_forward else ""
            outcomes = self.exchange(failed)
            lost = {(rank, decision.step) for rank, outcome in enumerate(outcomes) if outcome}
            if lost:
                unreachable |= lost
                reports = {rank: one for rank, one in reports.items() if (rank, decision.step) not in lost}
                continue
            mine = self._write(decision) if self.rank in decision.able else set()
            written = {(rank, group) for rank, ids in enumerate(self.exchange(mine)) for group in ids}
            covered = {group for _, group in written}
            if covered >= {group.group_id for group in groups}:
                return f"saved {decision.step}"
            unable = {rank for rank in decision.able if not any(writer == rank for writer, _ in written)}
            if not unable:
                raise Violation(
                    f"step {decision.step}: no rank wrote {[g.label for g in groups if g.group_id not in covered]}"
                )
            reports = {rank: one for rank, one in reports.items() if rank not in unable}

    def _check_records(self, records: list[CommitRecord]) -> None:
        """A record of a step is that of the run without a fault, whoever has it."""
        for record in records:
            if record != self.records[record.step - 1]:
                raise Violation(f"a wrong commit: {record}, expected {self.records[record.step - 1]}")

    def _roll_forward(self, decision: Decision) -> str:
        """Finish the step here; return why not."""
        record = decision.record
        assert record is not None

        def roll() -> None:
            self.gate.start_roll_forward(record)
            try:
                self.optimizer.roll_forward(record)
            except BaseException:
                self.gate.roll_forward_failed()
                raise
            self.gate.rolled_forward(record.step)

        try:
            Bounded(f"the roll forward to step {record.step}", self.device, roll, self._waits).finish()
        except Violation:
            raise
        except Queued as late:
            return repr(late)
        except (AbortedCollective, RuntimeError) as error:
            if not self.plan.kind.startswith(("abort", "fail")):
                raise Violation(f"the roll forward raised {error!r}") from error
            return repr(error)
        return ""

    def _write(self, decision: Decision) -> set[str]:
        """Copy this rank's state of the step to the host, and compare; return the groups that it has."""

        def copy() -> dict[str, State]:
            held = self.optimizer.holdings(decision.step)
            return {
                group: {(tensor.key, tensor.start): self.copier(tensor.values).clone() for tensor in tensors}
                for group, tensors in held.items()
            }

        try:
            copied = Bounded(f"the dump of step {decision.step}", self.device, copy, self._waits).finish()
        except Queued:
            return set()
        except RuntimeError as error:
            if self.plan.kind != "fail":
                raise Violation(f"the dump raised {error!r}") from error
            return set()
        for state in copied.values():
            for key, values in state.items():
                if not torch.equal(values.flatten(), self.expected[decision.step][key].flatten()):
                    raise Violation(f"step {decision.step} is saved with other bits in {key}")
        return set(copied)

    def _refused(self, records: dict[int, CommitRecord], reports: dict[int, StateReport], refusal: Refusal) -> str:
        """Nothing is saved: rightly before the first step, and where all holders of a shard are lost or wait in the one queue."""
        committed = max(records, default=0)
        usable = [one for one in reports.values() if one.closed and not one.torn]
        if committed and not self._waits and (len(usable) == self.world or self.plan.kind == "abort"):
            raise Violation(f"step {committed} is committed and nothing is saved: {refusal.reason}")
        return "refused"

    def end(self) -> None:
        """Give back what can be: kernels, groups; a thread that waits at its gate stays."""
        self._faulty = True  # the fault may not have come yet
        self._stopped.set()
        self.gate.reopen(self._ticket)
        backend.release(self.rank)
        for group in self.groups:
            group._get_backend(self.device).abort()
        extension().clear_error(self.rank)
        backend.set_traits(delay_us=0, alloc_syncs=0, poison=0, late_release=0, lazy_load=0, one_queue=0)
        with contextlib.suppress(RuntimeError):
            torch.get_device_module(self.device).synchronize(self.device)
        self.optimizer.close()
        for (
            group
        ) in self.groups:  # not destroyed: torch would give its name, and the addresses in the store, to another one
            dist.distributed_c10d._world.pg_map.pop(group)


def _groups(holdings: list[list[tuple[str, str, int]]]) -> list[Group]:
    holders: dict[str, list[int]] = {}
    about: dict[str, tuple[str, int]] = {}
    for rank, held in enumerate(holdings):
        for group_id, label, nbytes in held:
            holders.setdefault(group_id, []).append(rank)
            about[group_id] = (label, nbytes)
    return [Group(group_id, *about[group_id], tuple(ranks)) for group_id, ranks in sorted(holders.items())]
