"""How a simulated rank's training thread ends a step with a preemption notice: it waits for its controller, or saves the step with all
other ranks where none has one, in the order of `ttp.runtime.boundary_save` and `ttp.runtime.saves`.

What every rank contributes to the spanning collective, and what follows, is judged against what was so (I14).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.disk import PART_BYTES, DiskError, File, Manifest, final_name, look_at
from tests.simulation.waits import Blocked
from ttp.optim.step_agreement.participation import Ending, ending_of
from ttp.processor.core import events as ev
from ttp.proto.messages import SAVED_EXIT_CODES, FileEntry

if TYPE_CHECKING:
    from tests.simulation.rank import Rank


@dataclass(frozen=True)
class Contribution:
    """What one rank added to the spanning collective of a step, and what was so then."""

    notice: bool
    unled: bool
    attached: bool


@dataclass(frozen=True)
class Written:
    """One rank's answer: its file, or why there is none."""

    entry: FileEntry | None
    error: str = ""


class Boundary:
    """One rank's part."""

    def __init__(self, process: Rank) -> None:
        self.process, self.job, self.rank = process, process.job, process.rank
        self.possible = self.job.own is None and not self.job.training.local_copy
        """The ranks can save together: this is simulated in directories that all share."""
        self.saving = 0
        """The step that it saves, or has saved, without a controller."""
        self.saved = False
        self._led = False
        """It had come to a controller before it began to save."""
        process.gate.step_boundary.on_unled = self._save

    # --- the spanning collective ---

    def contribute(self, members: tuple[int, ...], step: int) -> None:
        gate, job = self.process.gate, self.job
        if alone := sorted(rank for rank, saved in job.saved_alone.items() if saved < step):
            job.broken(f"I14: rank {self.rank} is READY of step {step}, after ranks {alone} saved a step alone")
        given = Contribution(gate.notice, gate.unled, self.process.attached is not None)
        job.contributed.setdefault((members, step, self.process.generation), {})[self.rank] = given

    def ending(self, step: int) -> Ending:
        """Return what this rank reads from the collective's sums."""
        members = self.job.training.collectives(self.rank)
        given = self.job.contributed[members, step, self.process.generation].values()
        notices, unled = sum(one.notice for one in given), sum(one.unled for one in given)
        return ending_of(notices, unled, len(members), len(self.job.ranks))

    # --- behind the step ---

    def stop(self, step: int, ending: Ending, go_on: Callable[[], None]) -> None:
        """Wait behind a finished step; `go_on` follows only if every controller is lost."""
        self.job.happened("boundary", self.rank)
        try:
            self.process.gate.boundary(step, ending is Ending.SAVE)
        except Blocked as blocked:
            assert blocked.event is not None
            blocked.event.when_set = partial(self.process.run, go_on)
        else:
            go_on()

    def leaves(self, code: int) -> None:
        """The process exits with this status."""
        there = any((root, self.saving) in self.job.disk.published for root in self.job.roots)
        if self.saving and code in SAVED_EXIT_CODES and not there and self.process.attached is None:
            self.job.broken(f"I14: rank {self.rank} exits with {code}, and step {self.saving} is not on disk")

    # --- the save: every rank writes, rank 0 publishes; what each answers goes to all ---

    def _save(self, step: int) -> None:
        members = self.job.training.collectives(self.rank)
        given = self.job.contributed[members, step, self.process.generation]
        led = [rank for rank, one in sorted(given.items()) if one.attached]
        if led or len(given) < len(self.job.ranks):
            self.job.broken(f"I14: rank {self.rank} saves step {step} alone, of ranks {sorted(given)} {led} were led")
        self.job.happened("save begins", self.rank)
        begin = partial(self.process.run, partial(self._begin, step))
        self.process.enter("all behind the step", step, self.job.everybody, begin)

    def _begin(self, step: int) -> None:
        if self.process.main_raised:
            return
        self.saving = self.job.saved_alone[self.rank] = step
        self._led = self.process.attached is not None
        self.process.put(ev.SavesAlone(step))
        self.job.happened("saving alone", self.rank)
        self._write(step, 0)

    def _write(self, step: int, attempt: int) -> None:
        if attempt == len(self.job.roots):
            self._end("", "no directory took the checkpoint")
            return
        before = dict(self.process.replica.held(step))
        delay_s = self.process.slow_work.get("alone", self.job.rng.uniform(0.001, 0.05))
        self.process.soon(delay_s, partial(self._written, step, attempt, before))

    def _written(self, step: int, attempt: int, before: dict[str, int]) -> None:
        after = self.process.replica.held(step)
        if before != after:
            self.job.broken(f"I5: rank {self.rank}'s state changed while it saved step {step} alone")
        holders = zip(self.job.training.groups, self.job.training.layout.holders, strict=True)
        parts = tuple((g, ranks.index(self.rank), len(ranks), after[g]) for g, ranks in holders if self.rank in ranks)
        root, name = self.job.roots[attempt], f"r{self.rank}_alone{attempt}"
        disk, here = self.job.disk, _staging(step, attempt)
        try:
            disk.check(self.rank, root)
            disk.write(root, here, name, File((), False))
            disk.check_fsync(self.rank, root)
            disk.write(root, here, name, File(parts, True))
            answer = Written(FileEntry(name, PART_BYTES * len(parts), "0", self.rank))
        except DiskError as error:
            self.job.struck(error.kind or "disk", self.rank, "leaderless")
            answer = Written(None, str(error))
        self._exchange(f"written alone {attempt}", step, answer, partial(self._all_written, step, attempt))

    def _all_written(self, step: int, attempt: int, answers: list[Written]) -> None:
        entries = [answer.entry for answer in answers if answer.entry is not None]
        if len(entries) < len(answers):
            self._write(step, attempt + 1)
        elif self.rank == 0:
            self.process.soon(self.job.rng.uniform(0.0005, 0.005), partial(self._publish, step, attempt, entries))
        else:
            self._all_published(step, attempt)

    def _publish(self, step: int, attempt: int, entries: list[FileEntry]) -> None:
        disk, root, error = self.job.disk, self.job.roots[attempt], ""
        behind = [rank.rank for rank in self.job.ranks if rank.gate.state_step != step]
        if behind:
            self.job.broken(f"I14: step {step} is published alone, ranks {behind} are at another step")
        try:
            disk.check(self.rank, root)
            host_state, record = self.process.replica.host_states[step], self.job.training.record(step)
            if (root, final_name(step)) not in disk.directories:
                here = disk.directories[root, _staging(step, attempt)]
                look_at(here.files, entries)
                here.manifest = Manifest(step, tuple(entry.name for entry in entries), host_state, record=record)
                if disk.rename(root, _staging(step, attempt), final_name(step)):
                    self.job.renamed(root, step, self.process)
            disk.tracker[root] = max(step, disk.tracker.get(root, 0))
        except DiskError as problem:
            self.job.struck(problem.kind or "disk", self.rank, "leaderless")
            error = str(problem)
        self._all_published(step, attempt, error)

    def _all_published(self, step: int, attempt: int, error: str = "") -> None:
        """Rank 0's answer counts; the others have none."""
        self._exchange(f"published alone {attempt}", step, error, partial(self._outcome, step, attempt))

    def _outcome(self, step: int, attempt: int, errors: list[str]) -> None:
        if any(errors):
            self._write(step, attempt + 1)
        else:
            self._end(f"{self.job.roots[attempt]}/{final_name(step)}", "")

    def _end(self, path: str, error: str) -> None:
        self.saved = bool(path)
        self.process.put(ev.SavedAlone(self.saving, path, error))

    def _exchange(self, name: str, step: int, answer: Any, then: Callable[[list[Any]], None]) -> None:
        """Give all ranks this one's answer, and go on when every rank has given its own."""
        if self.process.attached is not None and not self._led:
            self.job.broken(f"I14: rank {self.rank} came to a controller while it saved step {step} alone")
        members, answers = self.job.everybody, self.job.answers.setdefault((name, step), {})
        answers[self.rank] = answer

        def all_answered() -> None:
            then([answers[rank] for rank in members])

        def failed() -> None:
            """A rank is gone: it has died, or has exited as all was done."""
            there = [root for root in self.job.roots if (root, step) in self.job.disk.published]
            self._end(f"{there[0]}/{final_name(step)}" if there else "", "" if there else "a rank is gone")

        run = self.process.run
        generation, answered = self.process.generation, partial(run, all_answered)
        self.job.collectives.enter(
            name, step, members, self.rank, answered, partial(run, failed), generation=generation
        )


def _staging(step: int, attempt: int) -> str:
    return f"{final_name(step)}_tmp_preempted_0_{attempt + 1}"
