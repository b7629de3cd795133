"""One process's part in TTP: starts the controller (rank 0) and the processor, resumes, saves, and holds the training
thread at its end until the job's fate is known.

Owns the handles of this process and the order in which they start and stop. Never decides anything about a fault: that
is the controller's.

    optimizer = ttp.TTPReplicaOptimizer(model.named_parameters(), lr=3e-4)
    session = ttp.start(optimizer, save_dirs=["checkpoints"])
    point = session.resume()                         # None: a fresh start

    @ttp.ttp_to_persist
    def train():
        for step in range(optimizer.current_step + 1, last_step + 1):
            loss = ...; loss.backward()
            session.set_step_state(step, {"samples": ...})   # what step + 1 needs to go on
            optimizer.step()

    train()
    session.close()
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ttp import torch_range
from ttp.checkpoint.format.signature import read_keys
from ttp.checkpoint.reader import Reader
from ttp.config import Settings
from ttp.errors import ConfigError, Regroup
from ttp.exchange import error_file, last_step, saved_alone
from ttp.exchange.error_file import refusals_in_one_line
from ttp.exchange.json_collectives import check_joined, world
from ttp.exchange.last_step import LastStep
from ttp.groups.process_groups import GROUPS
from ttp.groups.vacancy import vacant
from ttp.interfaces.protected_optimizer import ProtectedOptimizer
from ttp.proto.messages import CauseKind, Registration
from ttp.regroup.choice import check_asked, choose
from ttp.regroup.kept_result import KeptResults, agreed_program
from ttp.regroup.reentry import Reentry, Refillable
from ttp.regroup.rehearsal import Regrouping
from ttp.resume_search import ResumePoint as ResumePoint
from ttp.resume_search import ResumeSearch
from ttp.runtime.boundary_save import BoundarySave
from ttp.runtime.directory_agreement import JobDirectories, named_directories
from ttp.runtime.instrumentation import instrumentation
from ttp.runtime.rank_runtime import Protection, show
from ttp.runtime.retention import check_keep
from ttp.runtime.saves import Saves
from ttp.runtime.state_provider import OptimizerStateProvider, Publisher
from ttp.runtime.step_copies import NO_COPIES, CopyOptions, begin_copies

if TYPE_CHECKING:
    from ttp.runtime.mirror_resume import MirrorResume

log = logging.getLogger("ttp")

SAVE_AT_MOST_S = 600.0
"""A save between two steps that takes longer counts as a standstill: its disk may be what hangs."""

RESUME_AT_MOST_S = 3600.0
"""The same for verifying and loading a checkpoint."""

_current: Session | None = None


def start(
    optimizer: ProtectedOptimizer,
    *,
    save_dirs: Sequence[str | os.PathLike[str]],
    layout: Mapping[str, Any] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    publisher: Publisher | None = None,
    keep_checkpoint_max: int | None = None,
    copies: CopyOptions = NO_COPIES,
    in_place: bool | str = False,
) -> Session:
    """Protect this rank (all ranks call, after `init_process_group` and after the optimizer was built).

    save_dirs: checkpoint directories in order of preference; each is tried at once. Shared by all ranks, or, with
    TTP_SHARED_DIRS=False, each node's own under the same names.
    layout: JSON facts for the manifest (the axes' sizes, the model's shape).
    log_dir: where the controller's journal goes (default: `ttp_log` in the first save directory that serves in this attempt).
    publisher: for a trainer that writes and loads checkpoints in a form of its own (`ttp.runtime.state_provider.Publisher`): it makes them of the
    shares that the ranks write into save_dirs at a fault. Then `resume` and `save` are not used.
    keep_checkpoint_max: after a save the newest so many valid checkpoints of each directory stay, and older ones are removed beside
    training, as `ttp ckpt prune` does it; None: all stay.
    copies: `CopyOptions("memory")` keeps copies of what this rank holds in its agent's memory and, of what has no replica on another node, in the
    next node's: see `ttp.runtime.step_copies.CopyOptions`.
    in_place: a rank that dies is replaced by another process, and the others keep running, where that can be done. `train` is then entered again; a
    rehearsal has to have shown once that it can be (`docs/rehearsal.md`; "unrehearsed": without one). TTP_IN_PLACE goes before it.
    Raises NotWritable, ControllerError (no controller could be started or reached), ConfigError (also: WORLD_SIZE is above 1 and there
    is not a process group).
    """
    global _current
    if _current is not None:
        raise ConfigError(
            "ttp.start was called twice in this process: call session.close() on the first session before"
        )
    error_file.install()
    error_file.before_end(_hold)
    with refusals_in_one_line():
        check_joined("ttp.start")
        _current = Session(
            optimizer,
            save_dirs,
            layout or {},
            log_dir,
            settings or Settings.from_env(),
            publisher,
            keep_checkpoint_max,
            copies,
            in_place,
        )
    return _current


def _hold(exc: BaseException) -> None:
    """An exception ends the process that no `ttp_to_persist` has seen."""
    if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
        return  # somebody has a traceback printed: nothing ends
    if _current is not None and _current.pid == os.getpid():  # not in a child that was forked
        _current.hold_after(exc)


def current_session() -> Session:
    """Return this process's session. Raises ConfigError when `ttp.start` has not been called."""
    if _current is None:
        raise ConfigError("no session in this process: call ttp.start(optimizer, save_dirs=...) first")
    return _current


def find_session() -> Session | None:
    """Return this process's session, or None."""
    return _current


class Session:
    """The handles of one process. Made by `ttp.start`; see there."""

    def __init__(
        self,
        optimizer: ProtectedOptimizer,
        save_dirs: Sequence[str | os.PathLike[str]],
        layout: Mapping[str, Any],
        log_dir: str | os.PathLike[str] | None,
        settings: Settings,
        publisher: Publisher | None,
        keep_checkpoint_max: int | None = None,
        copies: CopyOptions = NO_COPIES,
        in_place: bool | str = False,
    ) -> None:
        check_asked(in_place)
        check_keep(keep_checkpoint_max, settings.shared_dirs)
        self.optimizer = optimizer
        self.settings = settings
        self.rank, self.world_size = world()
        self.pid = os.getpid()
        if self.rank == 0 and (untested := torch_range.untested(torch.__version__)):
            show(logging.WARNING, untested)
        self._handled = id(sys.exception())
        """Of the exception within whose handler all of this runs, if that is so: it is not on its way. Not itself, with all its frames."""
        named = named_directories(save_dirs)
        keys = read_keys(settings)
        self._instrumentation = instrumentation(settings, self.rank, self.world_size, named)
        self._instrumentation.at_start("start")
        choice = getattr(getattr(optimizer, "on_divergence", None), "choice", "")
        places = self._directories = JobDirectories(named, settings, self.rank, self._device, choice)
        self.save_dirs = self._directories.used
        self.log_dir = Path(log_dir if log_dir is not None else f"{self._directories.serving[0]}/ttp_log").resolve()
        self._instrumentation.logs_in(self.log_dir)
        facts = json.dumps({**layout, "optimizer": json.loads(optimizer.layout_json())}, sort_keys=True)
        program = agreed_program(self.world_size, self._device, facts)
        kept_results = KeptResults(self._directories.serving, program, settings.round_number)
        own = self._saves_itself = publisher is not None
        why_not = choose(
            settings, optimizer, in_place, kept_results, rank=self.rank, copies=copies.enabled, own_form=own
        )
        registration = Registration(
            rank=self.rank,
            world_size=self.world_size,
            host=settings.host,
            pid=self.pid,
            groups=optimizer.shard_groups(),
            state_step=0,
            save_dirs=tuple(self.save_dirs),
            copies=copies.enabled,
            regroups=not why_not,
            workload=optimizer.workload
            if self._device.type == "cpu"
            else "",  # elsewhere no wait is seen from the host
            layout=facts,
        )
        self.holder = OptimizerStateProvider(optimizer, registration, publisher, places.store, keys, places.before)
        kept = keep_checkpoint_max if keep_checkpoint_max is not None and self._directories.keeps else None
        self._saves = Saves(self.holder, self._directories, settings, self.rank, kept)
        self._mirror: MirrorResume | None = None
        if settings.mirror and publisher is None:
            from ttp.runtime.mirror_resume import MirrorResume  # fsspec takes a while

            self._mirror = MirrorResume(settings, places, self.rank, self._device, keys.verify, kept)
            self._mirror.tell_agent({})
        self._first_step = optimizer.current_step
        self.warns_unsaved = not own
        """Say at the end that the last step is not on disk; False: another part of the program does, or saves by itself."""
        self.enters_again_after = ""
        """What else has to come before training can be entered again; who sets this then calls `reentry.begin()`."""
        self._over = False
        self.on_loss: Callable[[float], None] = lambda loss: None
        self.begun = self.raised = False
        """Training has raised on this rank."""
        self.regrouping: Regrouping
        self.reentry: Reentry | None = None
        if not why_not:
            renew, back = (lambda new: self.regrouping.renew(new)), (lambda: self.regrouping.step_back())
            filled = cast(Refillable, optimizer)
            self.reentry = Reentry(filled, self.holder, self._saves, settings, self.rank, renew, self.pause, back)
        account = saved_alone.path_of(self.log_dir, settings.round_number)
        save_alone = BoundarySave(self._saves.together, self.holder, self.save_dirs, self.rank, account)
        self._protection = (
            Protection(
                self.holder,
                settings,
                self.log_dir,
                self.rank,
                self.world_size,
                save_alone=save_alone if publisher is None and optimizer.spans_job else None,
                reentry=self.reentry,
            )
            if settings.enable
            else None
        )
        gate = self._protection.gate if self._protection is not None else None
        self._copies = begin_copies(copies, self.holder, settings, self.save_dirs, gate, own_form=own)
        rehearsal = settings.rehearse_every, self.rank, self.pause
        self.regrouping = Regrouping(optimizer, gate, *rehearsal, own_groups=own, kept=kept_results)
        self._search = ResumeSearch(
            self.holder, self._directories, self._mirror, self.rank, settings.round_number > 0, self._skipped
        )
        atexit.register(self._report_end)
        self._instrumentation.attach(optimizer, self.holder)
        self._instrumentation.at_start("protected")

    @property
    def protected(self) -> bool:
        """False with `ENABLE_TTP=False`: saving and resuming work, a fault is not survived."""
        return self._protection is not None

    @property
    def protection(self) -> Protection | None:
        """This rank's gate and processor; None when the session is not `protected`."""
        return self._protection

    @property
    def _device(self) -> torch.device:
        return self.optimizer.device

    def resume(
        self, choice: str = "auto", *, check: Callable[[Mapping[str, Any]], None] = lambda state: None
    ) -> ResumePoint | None:
        """Load the newest valid checkpoint into the optimizer (all ranks call) and return where it stands.

        choice: `auto` (newest valid one of save_dirs, None when there is none), `never` (a fresh start), or the path of one
        checkpoint. `never` and a path are about the job's first start, and are refused when save_dirs hold newer
        checkpoints, which would be mixed up with this run's, and a path must lie in save_dirs where TTP_SHARED_DIRS is False; a restart after a fault goes on where the fault left off.
        check: of the trainer: called with what `set_step_state` was given; raises ValueError, with the path of the key, for a state
        that it cannot use. Such a checkpoint counts as broken, and the next older one is taken.
        Raises CheckpointMismatch (another model), CorruptCheckpoint (the named path is not valid), CheckpointError,
        ConfigError (the optimizer has trained already).
        """
        if step := self.optimizer.current_step:
            raise ConfigError(
                f"resume after step {step}: a checkpoint is loaded once, before the first step; start the job again to go back"
            )
        with refusals_in_one_line(), self.pause(RESUME_AT_MOST_S):
            return self._resume(choice, check) if not vacant() else self._take_place()

    def _take_place(self) -> ResumePoint | None:
        """This process is in a lost one's place: take what it is to hold from the others."""
        assert self.reentry is not None and self._protection is not None
        self.reentry.wait_ordered()
        given = self.reentry.come_back(self._protection)
        if self._mirror is not None:
            self._mirror.tell_agent(self.holder.passed_over)
        self.reentry.begin(self.enters_again_after)
        self._first_step, self.regrouping.recovered = given.step, True
        return ResumePoint(given.step, given.state, given.record, "", ()) if given.step else None

    def _skipped(self, path: Path) -> None:
        if self._protection is not None:
            self._protection.skipped(path)

    def _resume(self, choice: str, check: Callable[[Mapping[str, Any]], None]) -> ResumePoint | None:
        found, reasons = self._search.newest(choice, check)
        if found is not None:
            return self._load(found)
        self._instrumentation.resumed(0, "", reasons, None)
        return None

    def _load(self, found: Reader) -> ResumePoint:
        path, manifest = str(found.path), found.manifest
        self._instrumentation.at_start("resume")
        found.read_into(self.optimizer.load_begin())
        self._instrumentation.at_start("loaded")
        self.optimizer.load_end(manifest.step, manifest.state["optimizer"])
        self.holder.step_states.put(manifest.step, manifest.state["trainer"])
        self.holder.trust(path)
        self._saves.newest = self._first_step = manifest.step
        self._directories.forget_superseded(manifest.step)
        if self._protection is not None:
            self._protection.resumed(manifest.step, manifest.record)
        self._instrumentation.resumed(manifest.step, path, found.skipped, manifest.record)
        if self.rank == 0:
            show(logging.INFO, f"resumed from {path} at step {manifest.step} ({manifest.cause.kind.value})")
        if manifest.finite is False and self._directories.keeps:
            self._saves.warn_not_finite(path, manifest.step)
        return ResumePoint(manifest.step, manifest.state["trainer"], manifest.record, path, found.skipped)

    @property
    def newest_saved(self) -> int:
        """Step of the newest checkpoint that this run has loaded, or that `save` has written and waited for; 0: none. The same on every rank."""
        return self._saves.newest

    def step_state(self) -> Mapping[str, Any]:
        """Return what `set_step_state` was given for the newest step (empty: nothing): where `train` goes on when it is entered again."""
        return self.holder.step_states.get(step) if (step := self.optimizer.current_step) else {}

    def set_step_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Say what step + 1 needs to go on, once `step` is committed: JSON values, before every `optimizer.step()`, or never. Raises ConfigError."""
        self.holder.set_step_state(step, state)
        self._saves.look()

    def report_loss(self, loss: float) -> None:
        """Show the newest step's loss on the status page and in the metrics: any number, of one rank or of all alike."""
        self.on_loss(float(loss))
        if self._protection is not None:
            self._protection.processor.report_loss(float(loss))

    @contextlib.contextmanager
    def pause(self, at_most_s: float = 3600.0) -> Iterator[None]:
        """Say that this rank does something else than steps for a while (an evaluation, a long save): no hang, for `at_most_s`. Ends where the `with` does."""
        if self._protection is None:
            yield
            return
        before = self._protection.processor.pause(at_most_s)
        try:
            yield
        finally:
            self._protection.processor.end_pause(before)

    def prepare_saves(self) -> None:
        """Have memory for saves that are not waited for, before the first of them (all ranks call). Raises ConfigError."""
        if self.reentry is not None:
            self.reentry.close("saves that are not waited for keep memory of this process")
        self._saves.prepare()

    def save(self, step: int | None = None, *, periodic: bool = False, wait: bool = True) -> str:
        """Write a checkpoint of the current step (all ranks call, between two steps); return its path.

        `wait`: False returns, without a path, when the state is copied into the agent's memory, and processes of low priority write it; a save
        that fails then is logged. The share of the save before is waited for.

        `periodic`: because so many steps are over, as the manifest then says. Each shard's replicas share its bytes. A directory that
        cannot be written falls through to the next one. Raises CheckpointError on every rank when none took it.
        """
        kind = CauseKind.PERIODIC if periodic else CauseKind.REQUESTED
        saved = self.optimizer.current_step if step is None else step
        if not wait:
            self.prepare_saves()
        began = time.perf_counter()
        with self.pause(SAVE_AT_MOST_S) if wait or self._saves.under_way else contextlib.nullcontext():
            path = self._saves.save(saved, kind, wait=wait)
        if self._protection is not None:
            self._protection.saved(saved, time.perf_counter() - began)
        return path

    # --- the end of train ---

    def begin_train(self, train: str, *, in_place: bool = True) -> None:
        """The function `train` is called; `in_place`: it can be entered again. Raises ConfigError when it has returned before, so that nothing is protected."""
        if self._over:
            raise ConfigError(
                "the function decorated with ttp_to_persist was called again: the session ended when every rank had returned"
                " from it; decorate the function that holds the whole training loop"
            )
        self.begun = True
        if not in_place:
            return self.end_in_place(f"{train} is not to be entered again: ttp_to_persist(in_place=False)")
        self.regrouping.begin_train(train)
        if self.reentry is not None and not GROUPS.recovery:
            self.regrouping.make_again()  # from now on their connections are known
            self.reentry.begin(self.enters_again_after)

    def end_in_place(self, why: str) -> None:
        """From now on a rank that dies costs a checkpoint and a restart (every rank calls)."""
        if self.reentry is not None and not self.reentry.closed:
            self.reentry.close(why)
            if self.rank == 0:
                show(logging.INFO, f"a rank that dies costs a checkpoint and a restart from now on: {why}")

    def enters_again(self, exc: BaseException) -> bool:
        """Training ended with `exc`: say whether it is to be entered again, after `come_back`. Waits for what becomes of the job."""
        if self.reentry is None or self._protection is None:
            return isinstance(exc, Regroup)
        rehearsed = isinstance(exc, Regroup) and not self.reentry.ordered
        return rehearsed or self.reentry.enters_again(exc, self._protection)

    def come_back(self) -> None:
        """Make the process groups again, in a recovery or a rehearsal, before `train` is entered again."""
        if self.reentry is not None and self.reentry.ordered and self._protection is not None:
            self.reentry.come_back(self._protection)
            self.regrouping.recovered = True
        else:
            self.regrouping.make_again()
            self.regrouping.step_back()

    def hold_after(self, exc: BaseException) -> None:
        """Keep this rank as a holder after training raised; returns when the exception may go on, at once where it is decided already
        what becomes of the job."""
        self.raised = True
        if self._protection is not None and not self._protection.released:
            self._protection.hold_after(exc)

    def hold_until_all_finish(self) -> None:
        """Keep this rank as a holder until every rank's `train` has returned."""
        self._over = True
        if self.reentry is not None:
            self.reentry.close("training has returned")
        self._saves.finish(self.pause(SAVE_AT_MOST_S))
        self._write_last_step()
        if self._protection is not None:
            self._protection.finished()

    def exception_on_its_way(self) -> BaseException | None:
        """Return the exception that is being handled, unless that was so when the session began, or it is a good end (`sys.exit()`)."""
        exc = sys.exception()
        good_end = isinstance(exc, SystemExit) and exc.code in (None, 0)
        return None if good_end or id(exc) == self._handled else exc

    def close(self) -> None:
        """Stop this process's part (all ranks call); afterwards nothing is protected and `ttp.start` may be called again.

        For a trainer without `ttp_to_persist` this is its end: the rank stays as a holder until all ranks have called it, or a fault's state is
        safe. An exception that is being handled (`finally: session.close()`) counts as the training's, and is held for.
        As the interpreter ends it is too late for that: then no rank is waited for. In a forked child it does nothing.
        """
        global _current
        if self.pid != os.getpid():
            return
        self.regrouping.check_close()
        if self.exception_on_its_way() is None:
            self._saves.finish(self.pause(SAVE_AT_MOST_S))
        if self._protection is not None:
            if not self._over and threading.main_thread().is_alive():
                self._over = True
                self._protection.part(self.exception_on_its_way())
            self._protection.close()
        if self._copies is not None:
            self._copies.close()
        self._report_end()
        self._saves.close()
        self._instrumentation.close()
        self._directories.release()
        if _current is self:
            _current = None

    def _write_last_step(self) -> None:
        """Have the agent know which step was the last, and whether it is on disk (rank 0)."""
        if self.rank == 0 and self.protected and self.pid == os.getpid():
            saved = None if self._saves_itself else self._saves.newest_anywhere()
            last_step.write(self.log_dir, self.settings.round_number, LastStep(self.optimizer.current_step, saved))

    def _report_end(self) -> None:
        """Training has ended without an exception, or the process ends: say where, and warn once if that is not on disk."""
        atexit.unregister(self._report_end)
        warns, self.warns_unsaved = self.warns_unsaved, False
        ended_well = (
            not self.raised and self.exception_on_its_way() is None and getattr(sys, "last_value", None) is None
        )
        if self.rank != 0 or self.pid != os.getpid() or not ended_well:
            return
        self.regrouping.report()
        self._write_last_step()
        step = self.optimizer.current_step
        if warns and step > self._first_step:
            self._saves.warn_unsaved(step)
