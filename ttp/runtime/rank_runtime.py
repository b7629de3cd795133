"""What protects one rank while it trains: the gate, the processor, and, on some ranks, a controller's process.

Owns their start and end, and what becomes of an exception out of `train`. Decides nothing about a fault.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Protocol

import torch

from ttp.config import Settings
from ttp.controller.agent_link import request_status
from ttp.errors import ControllerError, WrongPeer
from ttp.exchange import error_file
from ttp.exchange.first_step import FirstStep, progress_key
from ttp.exchange.time_marks import TimeMarks
from ttp.groups.vacancy import vacant
from ttp.heartbeats import heartbeat_warning
from ttp.optim.step_agreement.communicators import silent_backends
from ttp.optim.step_agreement.participation import attempt_number
from ttp.processor.core.causes import cause_of
from ttp.processor.core.events import ProcessorSettings
from ttp.processor.driver import Processor, ProcessorOptions, cannot_regroup
from ttp.processor.gate import ABANDONED_STEP_S, Gate
from ttp.proto.messages import CauseKind, CommitRecord, Regroup, Welcome
from ttp.proto.stream import SILENT_LEASES, Relayed
from ttp.runtime.identity import identify
from ttp.runtime.job_controller import JobController
from ttp.runtime.preemption import Notice
from ttp.runtime.standby import Standbys, standby_place, standbys_of
from ttp.runtime.state_provider import OptimizerStateProvider
from ttp.text.wording import ranks_text

log = logging.getLogger("ttp")

ASSEMBLY_TIMEOUT_S = 300.0
"""How long a rank waits at the start for all others to be registered."""
OVERTAKEN_POLL_S = 0.02
ORDER_POLL_S = 0.02
"""How often a rank that may be called back looks whether it was released."""
WAIT_LOGGED_S = 30.0
"""A rank whose training has ended says after this that it waits for others, and again after twice as long each time."""
STATUS_S = 2.0
"""How long the controller has to say for whom."""
ABANDONED_BEHIND_LEASE_S = 2.0
"""How much longer than a lease the gradients of a step that failed are kept: so long may the freeze of a peer's silent loss take (A5)."""
LOOKS_A_LEASE = 3
"""How often in a lease a rank that has lost every controller looks for one that another rank has started: a new controller waits a lease for all."""
ASKED_UP_TO = 64
"""Ranks of a job in which each may ask, and reports that it waits: the answer names them all. In a larger one a rank of each node does."""


class RegroupsTraining(Protocol):
    """What has a rank's training thread make its groups again (`ttp.regroup.reentry.Reentry`)."""

    @property
    def ordered(self) -> bool: ...

    def order(self, order: Regroup) -> str: ...

    def close(self, why: str) -> None: ...


def _warnings(device: torch.device, settings: Settings, rank: int, world_size: int) -> Iterator[str]:
    """Yield what is not as TTP needs it on this device and for so many ranks, for the log of each node's first rank."""
    if rank == 0 and (too_often := heartbeat_warning(settings.heartbeat_s, world_size, settings.relayed)):
        yield too_often
    if device.type == "cuda":
        yield from settings.nccl_warnings
    for backend in silent_backends(device):
        yield (
            f"process groups of backend {backend} cannot report an error of {device.type} (no get_error): a collective that was aborted there without"
            " raising is not noticed. Set the backend so that it waits or raises, and never aborts"
        )


class Protection:
    """One rank's gate, processor and (rank 0, and those that have a standby) controller. Made by every rank, ended by `close` or by the process's end."""

    def __init__(
        self,
        holder: OptimizerStateProvider,
        settings: Settings,
        log_dir: Path,
        rank: int,
        world_size: int,
        *,
        save_alone: Callable[[int, bool, Processor], None] | None = None,
        reentry: RegroupsTraining | None = None,
    ) -> None:
        """Start everything and wait until all ranks are registered. `save_alone`: saves a step with all ranks when no controller leads
        any; None: the ranks cannot. `reentry`: has this rank make its groups again after a fault; None: it cannot. Raises ControllerError, ConfigError, NotWritable."""
        self._settings = settings
        self._log_dir = log_dir
        self._rank = rank
        self._world_size = world_size
        openness = identify(settings, rank)
        self._controller = JobController(settings, log_dir, rank, world_size)
        self._standbys = Standbys(settings, world_size, log_dir, self._controller.open_store)
        self._first_step: FirstStep | None = None
        self._marks = TimeMarks(log_dir, settings.round_number) if rank == 0 else None
        optimizer = holder.optimizer
        # Not step 0 where the trainer has loaded a checkpoint of its own: what a freeze reports, and what the rank registers with.
        self.gate = Gate(
            rank,
            state_step=optimizer.current_step,
            abandoned_s=max(ABANDONED_STEP_S, ABANDONED_BEHIND_LEASE_S + settings.lease_s),
            drain=optimizer.lane.drain_within if optimizer.lane.ordered else None,
        )
        self.gate.before_ready = holder.step_states.check
        self._reentry = reentry
        if reentry is not None:
            self.gate.left = lambda: reentry.ordered
        optimizer.attach(self.gate, attempt_number(settings.start_name))
        if settings.local_rank <= 0:
            for line in _warnings(optimizer.device, settings, rank, world_size):
                show(logging.WARNING, line)
        if (place := standby_place(settings, rank, world_size)) and not vacant():
            self._controller.wait_for_folder(ASSEMBLY_TIMEOUT_S)
            holder.standby = self._standbys.first(place, self._controller.store())
        address = self._controller.open(ASSEMBLY_TIMEOUT_S)
        restores = standbys_of(settings, world_size) > 0
        self.processor = Processor(
            ProcessorSettings(
                rank=rank,
                heartbeat_s=settings.heartbeat_s,
                controller_lost_s=settings.lost_s,
                boundary_s=settings.boundary_s,
                address=address,
                look_s=settings.lease_s / LOOKS_A_LEASE if restores else inf,
                saves_alone=save_alone is not None,
                alone_s=settings.total_timeout_s,
                vacant=vacant(),
                beats_together=bool(settings.relay),
            ),
            address,
            settings.start_name,
            holder,
            self.gate,
            ProcessorOptions(
                watch_parent=settings.launched,
                stacks_path=log_dir / f"rank_{rank}" / "stacks.log",
                work_done=lambda: holder.work_done,
                checkpoint=lambda: holder.checkpoint,
                relayed=Relayed(settings.relay, rank, SILENT_LEASES * settings.lease_s) if settings.relay else None,
                starter=self._standbys if restores else None,
                regroup=reentry.order if reentry is not None else cannot_regroup,
            ),
        )
        if save_alone is not None:
            self.gate.step_boundary.on_unled = lambda step: save_alone(step, self.gate.notice, self.processor)
        self._notice = Notice(self.processor.preempted)
        self.processor.start()
        if vacant():  # the others have been welcomed
            self._notice.listen()
            self._report_first_step()
            self._controller.forget_store()
            return
        welcome = self.processor.wait_welcomed(ASSEMBLY_TIMEOUT_S)
        if welcome is None:
            self.close()
            raise ControllerError(
                f"rank {rank}: the controller at {address} was lost, or did not report all {world_size} ranks registered"
                f" within {ASSEMBLY_TIMEOUT_S:.0f} s; look into {log_dir} for its journal, and for the rank that is missing"
            )
        self._controller.write_for_agent(address, *welcome.successors)
        self._notice.listen()
        self._report_first_step()
        self._controller.forget_store()
        if rank == 0 and not self._controller.reports_to_launcher:
            introduce(welcome, openness)

    def _report_first_step(self) -> None:
        """Have the node's agent know the first step of this attempt, unless a process before this one has reported it."""
        settings = self._settings
        self.note_next_step()
        if not (settings.launched and settings.local_rank <= 0 and settings.master_port):
            return
        store = self._controller.store()
        if vacant() and store.check([progress_key(settings.round_number)]):
            return
        self._first_step = FirstStep(store, settings.round_number, settings.attempt_dir)
        first, marks = self._first_step, self._marks

        def finished(step: int) -> None:
            first.tell(step)
            if marks is not None:
                marks.stepped(step)

        self.gate.on_first_step = finished

    def note_next_step(self) -> None:
        """Rank 0 notes when the next step is finished: the first of the attempt, or since a recovery."""
        if self._marks is not None and self.gate.on_first_step is None:
            self.gate.on_first_step = self._marks.stepped

    def saved(self, step: int, took_s: float) -> None:
        """Training has waited so long for a save of `step`."""
        if self._marks is not None:
            self._marks.saved(step, took_s)

    def skipped(self, path: Path) -> None:
        """A checkpoint is broken, and is not taken."""
        if self._first_step is not None:
            self._first_step.skip(path)

    def resumed(self, step: int, record: CommitRecord | None) -> None:
        """A checkpoint of `step` was loaded."""
        self.gate.resumed(step, record)

    def overtaken_after(self, exc: BaseException, step: int) -> bool:
        """Tell the controller that a peer made this thread's collective of `step` fail, and stay as a holder. True when the step was
        then finished by a roll forward: only bookkeeping remains. False: the exception may propagate."""
        cause = cause_of(self._rank, type(exc).__name__, str(exc))
        if cause.kind is not CauseKind.PEER_ERROR:
            return False
        log.warning("rank %d: a peer is gone (%s); waiting for the controller", self._rank, cause.text)
        self.processor.fault(cause, "".join(traceback.format_exception(exc)))
        while not self.gate.overtook(step):
            if self.processor.wait_for_verdict(OVERTAKEN_POLL_S):
                return False
        return True

    @property
    def released(self) -> bool:
        """Say whether the outcome of the job is settled, so that no rank needs this one any more."""
        return self.processor.wait_for_verdict(0.0)

    def hold(self) -> None:
        """Stay as a holder: this thread has nothing left to do. Returns only when no controller will end the process any more."""
        self.processor.wait_for_verdict()

    def hold_after(self, exc: BaseException, until: threading.Event | None = None) -> None:
        """Tell the controller that training raised and stay as a holder. Returns when the exception may go on, and when `until` is set; a rank whose
        peer was the cause leaves with status 75 instead."""
        if until is None and self._reentry is not None:
            self._reentry.close(f"training has ended with {type(exc).__name__}")
        cause = cause_of(self._rank, type(exc).__name__, str(exc))
        if not isinstance(exc, Exception):  # KeyboardInterrupt, SystemExit
            cause = replace(cause, kind=CauseKind.EXCEPTION)
        if cause.kind is not CauseKind.PEER_ERROR:
            kept = exc if log.hasHandlers() else None  # else stderr has the traceback when the process ends
            log.error(
                "rank %d raised %s; holding this rank's shards for the others",
                self._rank,
                cause.brief,
                exc_info=kept,
            )
            error_file.record(exc)
            self.processor.release_at_exit()
        else:
            what = cause.text if isinstance(exc, WrongPeer) else f"a peer is gone ({cause.text})"
            log.warning("rank %d: %s; waiting for the controller", self._rank, what)
        detail = "".join(traceback.format_exception(exc))
        self.processor.fault(cause, detail)
        if until is None:
            self.processor.wait_for_verdict()
        while until is not None and not until.wait(ORDER_POLL_S) and not self.processor.wait_for_verdict(0.0):
            pass

    def finished(self, where: str = "at the end of train") -> None:
        """`train` returned: stay as a holder until every rank's has. `where` this rank waits then: a long wait is logged."""
        self.processor.finished()
        pause_s, waited_s = WAIT_LOGGED_S, 0.0
        while not self.processor.wait_for_verdict(pause_s):
            waited_s += pause_s
            pause_s *= 2
            if self._world_size > ASKED_UP_TO and self._settings.local_rank > 0:
                continue
            step = self.gate.state_step
            show(
                logging.WARNING,
                f"rank {self._rank} waits {where} since step {step} for {self._awaited()}, {waited_s:,.0f} s so far",
            )

    def _awaited(self) -> str:
        if self._world_size > ASKED_UP_TO:
            return "ranks that still train"
        try:
            status = request_status(self.processor.controller, job_id=self._settings.start_name, timeout_s=STATUS_S)
        except ControllerError as error:
            return f"the others ({error})"
        training = [one.rank for one in status.ranks if not (one.finished or one.dead)]
        return (
            f"{ranks_text(training)}, which still train{'s' if len(training) == 1 else ''}"
            if training
            else "the controller"
        )

    def part(self, exc: BaseException | None) -> None:
        """The session ends, and no `train` has returned: wait until all ranks' sessions end, and go on then whatever has become of
        the others. Or, with an exception on its way, until the state is safe."""
        if self.released:
            return
        if exc is not None:
            self.hold_after(exc)
            return
        self.processor.release_at_exit()
        self.finished("in close()")

    def close(self) -> None:
        """End this process's threads; the controller ends by itself when all ranks have gone.

        A standby is ordered to when the outcome of the job is settled. So is the controller of a rank alone, always. One that other
        ranks may still need (this one's training has not come to its end) stays with them, and is not waited for; an idle standby then
        ends after this process and its launcher.
        """
        settled = self.released
        self._notice.close()
        self.processor.stop()
        if settled:
            self._standbys.dismiss()
        self._controller.close(settled)


def introduce(welcome: Welcome, openness: str = "") -> None:
    """Show at the start, on rank 0 of a job without ttprun, what lies where, what the job survives, and what could be better: a line each.

    A program that has configured no logging sees them all the same: what it may lose is important.
    """
    standbys = len(welcome.successors)
    behind = "1 standby" if standbys == 1 else f"{standbys or 'no'} standbys"
    for line in welcome.overview:
        show(logging.INFO, line)
    show(logging.INFO, f"protected by a controller with {behind}; the job survives: {welcome.survives}")
    for line in filter(None, (*welcome.warnings, openness)):
        show(logging.WARNING, line)


def show(level: int, line: str) -> None:
    if log.hasHandlers():
        log.log(level, "%s", line)
    else:
        print(f"ttp: {'warning: ' if level >= logging.WARNING else ''}{line}", file=sys.stderr, flush=True)
