"""One simulated rank's work thread: the shipped `Tasks` and the shipped memory of written shares, and a holder whose rolling, writing and
publishing take simulated time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.disk import OLDER_STEP, PART_BYTES, Disk, DiskError, File, Manifest, final_name, look_at
from tests.simulation.waits import Blocked
from ttp.checkpoint.write import WrittenShare, WrittenShares, merge_results
from ttp.errors import TornShare
from ttp.processor.core import events as ev
from ttp.processor.worker import Held, Task, Tasks
from ttp.proto.messages import FileEntry, Part, PublishOrder, ShareResult, WriteOrder

if TYPE_CHECKING:
    from tests.simulation.rank import Rank

FREEZE_TIMEOUT_S = 0.5


def unheard(level: int, text: str) -> None:
    """A log line without a reader."""


class Worker:
    """Does what the processor's machine orders. What takes a while ends in a callback, which a dead rank never comes to."""

    def __init__(self, process: Rank) -> None:
        self.process = process
        self.job, self.rank, self.replica = process.job, process.rank, process.replica
        self.tasks = Tasks(process.gate, FREEZE_TIMEOUT_S, unheard)
        self._queue: list[Task] = []
        self._task: Held
        """The holder's."""
        self._written = WrittenShares(self._link)
        self._files = 0
        self._now: Task | None = None
        """What has its turn."""
        self._begun = False
        """The holder is at it."""
        self.writing = self.publishing = False
        """A write, a publish is under way."""
        self.progresses = False
        """What is under way counts its work; what is held up does not."""
        self.before = ""
        """The step of the work that comes next, or came last."""

    def _root(self, order: WriteOrder | PublishOrder) -> str:
        """Return which directory this rank sees under the ordered name."""
        return self.job.root_of(self.rank, order.directory)

    def submit(self, task: Task) -> None:
        self._queue.append(task)
        self._work()

    def on_disk(self) -> list[WriteOrder | PublishOrder]:
        """Return the orders to write and to publish that are being carried out, and those that will be: of an older freeze none is begun."""
        if self._now is None:
            return []
        begun, freeze_id = self._now if self._begun else None, self.process.gate.freeze_id
        tasks = [task for task in (self._now, *self._queue) if isinstance(task, ev.WriteShare | ev.PublishCheckpoint)]
        return [task.order for task in tasks if task is begun or task.order.freeze_id >= freeze_id]

    def _work(self) -> None:
        if self._now is not None or not self._queue:
            return
        task = self._now = self._queue.pop(0)
        self._held_up(type(task).__name__, partial(self._begin, task))

    def _held_up(self, step: str, go_on: Callable[[], None], delay_s: float = 0.0) -> None:
        """Do a step of the work: now, after a while, or when what holds it up is over."""
        self.before = step
        hold = self.job.holds.pop(step, None)
        if hold is not None:
            hold.begin(self.process, step, partial(self.process.run_beside, go_on))
        elif delay_s:
            self.progresses = True
            self.process.later(self.process.slow_work.pop(step, delay_s), partial(self._progressed, go_on))
        else:
            go_on()

    def _progressed(self, go_on: Callable[[], None]) -> None:
        self.progresses = False
        self.process.count_work()
        go_on()

    def _begin(self, task: Task, in_vain: bool = False) -> None:
        """Begin a task. One that would wait for the gate is begun again when that is free, or `in_vain` when its time is over."""
        lock = self.process.waits.gates_lock
        lock.in_vain = in_vain
        try:
            answer = self.tasks.begin(task)
        except Blocked as blocked:
            self._begin_later(task, blocked.timeout_s)
            return
        finally:
            lock.in_vain = False
        self._begun = answer is None
        self.process.pass_on()
        if answer is not None or not isinstance(task, Held):
            self._next(answer)
        elif self.process.hang_work:
            self.job.struck("hanging work", self.rank)  # for ever
        else:
            self._hold_to(task)

    def _begin_later(self, task: Task, timeout_s: float) -> None:
        waiting = [True]

        def again(in_vain: bool) -> None:
            if waiting:
                waiting.clear()
                self._begin(task, in_vain)

        lock = self.process.waits.gates_lock
        lock.when_free(lambda: self.process.run_beside(partial(again, False)))
        self.process.later(timeout_s, partial(again, True))

    def _hold_to(self, task: Held) -> None:
        """Begin what the holder does of a task."""
        self._task = task
        match task:
            case ev.ApplyUpdate(_, record):
                self.job.happened("rolling", self.rank)
                self.replica.begin(record)
                self._later("roll", 0.02, self._end_roll)
            case ev.WriteShare(write):
                self._begin_write(write)
            case ev.PublishCheckpoint(publish):
                self._begin_publish(publish)

    def _done(self, result: object) -> None:
        self._next(self.tasks.done(self._task, result))

    def _failed(self, error: Exception) -> None:
        if isinstance(error, DiskError) and error.kind:
            self.job.struck(error.kind, self.rank)
        if isinstance(error, DiskError) and error.torn:
            error = TornShare(str(error), error.torn)
        self._next(self.tasks.failed(self._task, error))

    def _next(self, answer: ev.Event | None = None) -> None:
        self._now, self._begun = None, False
        self.writing = self.publishing = False
        if answer is not None:
            self.process.put(answer)
        self._work()

    def _later(self, step: str, slowest_s: float, act: Callable[..., None], *arguments: object) -> None:
        """Go on with a step after a random while."""
        self._held_up(step, partial(act, *arguments), self.job.rng.uniform(slowest_s / 10, slowest_s))

    def _end_roll(self) -> None:
        if self.process.break_roll:
            self.job.struck("failing roll-forward", self.rank)
            self._failed(RuntimeError("raised half way"))
        else:
            self._done(self.replica.end())
        self.process.freed()

    # --- writing ---

    def _begin_write(self, order: WriteOrder) -> None:
        """Read the values at the start and at the end: a holder must stand still meanwhile. As `OptimizerStateProvider.write` does, use again
        what earlier writes have of the ordered parts, and write the others."""
        self.writing = True
        before = dict(self.replica.held(order.step))
        reused, left = self._written.take(order.step, order.directory, order.tmp_name, order.parts)
        parts = tuple(part for part in order.parts if part in left)
        name = f"r{self.rank}_{self._files}"
        self._files += 1
        if parts:
            self.job.disk.write(self._root(order), order.tmp_name, name, File((), False))
        delay_s = self.job.rng.uniform(0.001, 0.05) * len(parts) if parts else 0.0005
        self._held_up("write", partial(self._end_write, order, parts, reused, name, before), delay_s)
        self.job.happened("writing", self.rank)

    def _link(self, directory: str, share: WrittenShare, tmp_name: str) -> bool:
        """As `link_files`. A disk that fails this rank links nothing."""
        root, disk = self.job.root_of(self.rank, directory), self.job.disk
        return disk.serves(self.rank, root) and disk.link(root, share.tmp_name, tmp_name, share.result.files)

    def _end_write(
        self, order: WriteOrder, parts: tuple[Part, ...], reused: ShareResult, name: str, before: dict[str, int]
    ) -> None:
        after = self.replica.held(order.step)
        if any(before[part.group_id] != after[part.group_id] for part in order.parts):
            self.job.broken(f"I5: rank {self.rank}'s state changed while it was written")
        result = reused
        try:
            if parts:
                content = tuple((p.group_id, p.index, p.count, after[p.group_id]) for p in parts)
                self.job.disk.write(self._root(order), order.tmp_name, name, self._write(order, name, content))
                result = merge_results(reused, ShareResult((FileEntry(name, PART_BYTES * len(parts), "0", self.rank),)))
        except DiskError as error:
            self._failed(error)
            return
        self._written.add(order.step, WrittenShare(order.directory, order.tmp_name, frozenset(order.parts), result))
        self._done(result)

    def _write(self, order: WriteOrder, name: str, parts: tuple[tuple[str, int, int, int], ...]) -> File:
        disk, where = self.job.disk, (self.rank, self._root(order))
        disk.check(*where)
        if where in disk.unsynced:
            disk.write(where[1], order.tmp_name, name, File(parts, False))
            disk.check_fsync(*where)
        if where in disk.tearing:
            self.job.struck("torn write", self.rank)
            return File((), True)
        return File(parts, True)

    # --- publishing: manifest, rename, tracker, answer; each a moment of its own, so that death may come between ---

    def _begin_publish(self, order: PublishOrder) -> None:
        self.publishing = True
        self._later("manifest", 0.005, self._write_manifest, order)
        self.job.happened("publishing", self.rank)

    def _write_manifest(self, order: PublishOrder) -> None:
        if (order.directory, final_name(order.step)) not in self.job.disk.directories:
            try:
                self._complete_staged(order)
            except DiskError as error:
                self._failed(error)
                return
        self._later("rename", 0.005, self._rename, order)
        self.job.happened("manifest written", self.rank)

    def _complete_staged(self, order: PublishOrder) -> None:
        disk = self.job.disk
        disk.check(self.rank, order.directory)
        manifest = self._manifest(disk, order)
        disk.check_fsync(self.rank, order.directory)
        disk.directories[order.directory, order.tmp_name].manifest = manifest

    def _manifest(self, disk: Disk, order: PublishOrder) -> Manifest:
        """List the files, all of which must be there with the size that their writers reported."""
        here = disk.directories.get((order.directory, order.tmp_name))
        if here is None:
            raise DiskError(f"{order.tmp_name} is gone")
        entries = [file for result in order.results for file in result.files]
        look_at(here.files, entries)
        host_state = self.replica.host_states.get(order.step)
        if host_state is None:
            raise DiskError(f"no host state of step {order.step} is kept")
        return Manifest(order.step, tuple(entry.name for entry in entries), host_state, record=order.record)

    def _rename(self, order: PublishOrder) -> None:
        disk, final = self.job.disk, final_name(order.step)
        try:
            if (order.directory, final) not in disk.directories:
                disk.check(self.rank, order.directory)
                staged = disk.directories.get((order.directory, order.tmp_name))
                if staged is not None and staged.manifest is None:  # discarded since, and written anew
                    self._complete_staged(order)
                if disk.rename(order.directory, order.tmp_name, final):
                    self.job.renamed(order.directory, order.step, self.process)
            disk.check_fsync(self.rank, order.directory)
        except DiskError as error:
            self._failed(error)
            return
        self._later("tracker", 0.005, self._replace_tracker, order)
        self.job.happened("renamed", self.rank)

    def _replace_tracker(self, order: PublishOrder) -> None:
        """A tracker that cannot be replaced stays: it is a hint, and the checkpoint is published all the same."""
        disk, root = self.job.disk, self._root(order)
        try:
            disk.check(self.rank, root)
            disk.check_fsync(self.rank, root)
            disk.tracker[root] = max(order.step, disk.tracker.get(root, OLDER_STEP), *disk.steps_in(root))
        except DiskError as error:
            self.job.struck(error.kind, self.rank)
        self.job.happened("tracker replaced", self.rank)
        path = f"{order.directory}/{final_name(order.step)}"
        if self.job.own is None:  # else it is a part of one
            self.process.known_checkpoint = path
        self.process.run_beside(partial(self._held_up, "answer", partial(self._done, path)))
