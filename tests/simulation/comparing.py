"""How a simulated job's ranks compare their replicas behind a step, as the shipped optimizers do: once, again where holders differ, and then all know who is
wrong, if a majority says so. What is altered or misread is arranged; what must be so then is judged (I19).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ttp.processor.core.state import RankMode
from ttp.proto.messages import CauseKind, Digest

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.rank import Rank

Place = tuple[int, str]
"""(rank, shard group)."""
COMPARED = 0.12
"""Part of the jobs in which replicas differ, or seem to."""


class Comparing:
    """What all ranks of a job share."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.step = 0
        """Behind which replicas are compared; 0: behind none."""
        self.repairs = True
        """What the ranks ask for."""
        self.to_alter: tuple[Place, ...] = ()
        """What is altered, and behind which step that is, if not that of the comparison."""
        self.altered_at = 0
        self.misread: tuple[Place, ...] = ()
        """What the first look there reads wrongly."""
        self.altered: set[Place] = set()
        self.reading_s: dict[int, float] = {}
        """Ranks whose second look takes so long."""
        self.disputed = False
        """Some rank has reported to its gate that replicas differ."""
        self.known = False
        """Some rank has learned in a collective that they do."""
        self.published_knowing = False
        """Some process that counts has published a step since then."""
        self.known_of: set[str] = set()
        """Of which shard groups."""
        self._unknowing: set[int] = set()
        """Steps that only processes on nodes that were given up have published."""
        self._by_own: set[int] = set()
        """Steps that others have."""
        self._read: dict[tuple[str, int, int], dict[str, int]] = {}
        """By look, generation and rank, what the rank has read."""

    # --- the ranks' part ---

    def compare(self, process: Rank, step: int, go_on: Callable[[], None]) -> None:
        """The training thread is behind the gather of `step`."""
        for rank, group in self.to_alter if step == (self.altered_at or self.step) and not process.gate.torn else ():
            if rank == process.rank and process.state.standing is RankMode.TRAINING:
                self._job.note(f"rank {rank}'s {group} is altered behind step {step}")
                process.replica.values = {**process.replica.values, group: process.replica.values[group] + 1 + rank}
                self.altered.add((rank, group))
        if step != self.step or process.gate.torn:
            go_on()
            return
        wrong = {group for rank, group in self.misread if rank == process.rank}
        values = {group: value + (group in wrong) for group, value in process.replica.values.items()}
        self._meet(process, "compared", values, partial(self._look_again, process, step, go_on))

    def _meet(self, process: Rank, look: str, values: dict[str, int], then: Callable[[], None]) -> None:
        self._read[look, process.generation, process.rank] = values
        process.gate.waiting = True
        process.enter(look, self.step, self._job.everybody, process.in_turn(then))

    def _differing(self, process: Rank, look: str) -> dict[str, Counter[int]]:
        """Return the values of each group that differ, with how many holders have read each."""
        training = self._job.training
        found = {}
        for group, holders in zip(training.groups, training.layout.holders, strict=True):
            values = Counter(self._read[look, process.generation, rank].get(group, 0) for rank in holders)
            if len(values) > 1:
                found[group] = values
        return found

    def _look_again(self, process: Rank, step: int, go_on: Callable[[], None]) -> None:
        if process.main_raised:
            return
        process.gate.waiting = False
        differing = self._differing(process, "compared")
        if not differing:
            go_on()
            return
        again = {group: value for group, value in process.replica.values.items() if group in differing}
        digests = tuple(Digest(group, value, differing[group].total()) for group, value in sorted(again.items()))
        dispute = partial(self._dispute, process, step, digests)
        meet = partial(self._meet, process, "compared again", again, partial(self._learn, process, step, go_on))
        if process.rank in self.reading_s:
            process.soon(self.reading_s[process.rank], partial(self._has_read, process, dispute, meet))
        else:
            process.pass_gate(dispute, meet)

    @staticmethod
    def _has_read(process: Rank, dispute: Callable[[], None], meet: Callable[[], None]) -> None:
        if not process.main_raised:
            process.pass_gate(dispute, meet)

    def _dispute(self, process: Rank, step: int, digests: tuple[Digest, ...]) -> None:
        if process.main_raised:
            return
        process.gate.dispute(step, digests)
        self.disputed |= bool(digests)

    def _learn(self, process: Rank, step: int, go_on: Callable[[], None]) -> None:
        if process.main_raised:
            return
        process.gate.waiting = False
        groups = set(self._differing(process, "compared"))
        differing = {g: values for g, values in self._differing(process, "compared again").items() if g in groups}
        if not differing:
            process.pass_gate(partial(self._dispute, process, step, ()), go_on)
            return
        self.learn(differing)
        most = {group: values.most_common(1)[0] for group, values in differing.items()}
        proven = all(2 * count > sum(differing[group].values()) for group, (_, count) in most.items())
        mine = self._read["compared again", process.generation, process.rank]
        right = all(mine[group] == most[group][0] for group in differing if group in mine)
        if self.repairs and proven and right:
            process.fault(CauseKind.PEER_ERROR, "WrongPeer: another rank's replica is wrong")
        else:
            process.fault(CauseKind.DIVERGED, "replicas differ")

    # --- behind a fill ---

    @property
    def acts(self) -> bool:
        """The ranks do something about replicas that differ."""
        return self.step > 0

    def dispute_filled(self, process: Rank, step: int, differing: Mapping[str, int]) -> None:
        """Shards were filled, and their holders differ in these groups; how many holders each has."""
        held = process.replica.values
        digests = tuple(Digest(group, held[group], differing[group]) for group in sorted(differing) if group in held)
        process.gate.dispute(step, digests)
        self.disputed = True
        self._job.happened("disputed", process.rank)

    def learn(self, differing: Iterable[str]) -> None:
        """Some rank knows it now."""
        self.known = True
        self.known_of.update(differing)

    # --- what must be so ---

    def proven(self, rank: int) -> bool:
        """Say whether most holders of a shard have it right that this rank has wrong."""
        return any(rank == altered and self._has_majority(group) for altered, group in self.altered)

    def _has_majority(self, group: str) -> bool:
        holders = self._job.training.layout.holders[int(group[1:])]
        return 2 * sum((rank, group) not in self.altered for rank in holders) > len(holders)

    def ends_process(self, process: Rank) -> None:
        """I19: a process that lives is replaced only where its state is torn, or its replica is proven wrong, or where it was silent, or has itself come in the
        place of another, which a controller that takes over does not know to be complete, and the step that the others have is on disk. What is silent as well is not among the others: no controller asks it."""
        job = self._job
        asked = (other for other in job.ranks if other.alive and not job.in_place.is_silent(other))
        others = [other.gate.state_step for other in asked if other is not process]
        published = [int(str(line.fields["step"])) for _, line in job.journal if line.event == "published"]
        on_disk = bool(others or published) and max(others, default=0) <= max(
            published, default=0
        )  # though the disk may be lost since
        if (
            process.gate.torn
            or (self.repairs and self.proven(process.rank))
            or ((job.in_place.was_silent(process) or process.began_in) and on_disk)
        ):
            return
        job.broken(f"I19: rank {process.rank} is replaced, whose replica is not proven wrong")

    def publishes(self, process: Rank, step: int) -> None:
        """A process does, one on a node that was given up perhaps: what it has is of an earlier generation, and what the others have found since it does not
        know."""
        if process not in self._job.in_place.former:
            self._by_own.add(step)
            self._unknowing.discard(step)
            self.published_knowing |= self.known
        elif step not in self._by_own:
            self._unknowing.add(step)

    def wrong_part(self, group: str, published: int = -1) -> str:
        """Say what it means that a part is not that of a fault-free run; empty: no rank could know. `published`: the step, of one on disk."""
        if not any(group == altered for _, altered in self.altered):
            return "I3"
        return "I19" if group in self.known_of and published not in self._unknowing else ""

    def violations(self) -> list[str]:
        """I19: a step is written, of which replicas differ, only where the ranks have asked for it and each wrong one is proven."""
        if not self.published_knowing:
            return []
        proven = all(self._has_majority(group) for _, group in self.altered if group in self.known_of)
        return [] if self.repairs and proven else [f"I19: a step was published, replicas differed in {self.altered}"]


def alter(job: Job, rng: random.Random) -> list[str]:
    """Have replicas of some jobs differ behind a step, or seem to; return what was arranged."""
    if rng.random() >= COMPARED:
        return []
    comparing, training = job.comparing, job.training
    comparing.step, comparing.repairs = rng.randint(1, training.steps), rng.random() < 0.75
    places = [(rank, group) for rank in job.everybody for group in training.groups_of(rank)]
    chosen = tuple(rng.sample(places, rng.choice((1, 1, 1, 2))))
    kind = rng.random()
    if rng.random() < 0.5:  # found later, or when shards are filled
        comparing.altered_at = rng.randint(1, comparing.step)
        comparing.step += training.steps * rng.choice((0, 1))
    comparing.misread = chosen if kind < 0.25 else ()
    comparing.to_alter = chosen if kind >= 0.25 else ()
    what = "misread" if comparing.misread else "altered"
    at = comparing.altered_at or comparing.step
    return [
        f"replicas {chosen} {what} behind step {at}, compared behind {comparing.step}, {'repair' if comparing.repairs else 'stop'}"
    ]
