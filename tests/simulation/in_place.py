"""How a simulated job trains on without a checkpoint: processes in the place of lost ones, and training threads that leave their step, make
their groups again and are given what they are to hold. What goes wrong in it is drawn by seed; what must be so then is judged (I17, I18, I20).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from tests.simulation.disk import final_name
from tests.simulation.replica import HALF_WRITTEN
from ttp.errors import ProtocolError
from ttp.processor.core import events as ev
from ttp.proto.messages import Regroup, Replace, ReplaceFailed, TakePlaces

if TYPE_CHECKING:
    from tests.simulation.agents import Agent
    from tests.simulation.controllers import Controller
    from tests.simulation.job import Job
    from tests.simulation.rank import Rank

TRIED = 0.6
"""Part of the jobs whose controllers try it."""
PUBLISHED_FIRST = 0.4
"""Part of those in which the step is published before the ranks regroup."""
LIMIT_S = 1.0
FAILING = 0.04
"""Chance of each thing that can go wrong for each rank."""
FIRST_PID, PIDS_APART = 100, 10_000
"""Of rank 0; from a process to the one in its place."""


class InPlace:
    """What all ranks of a job share. `fills_are_compared` False: a wrong variant of the ranks."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        self.job, self.rng = job, rng
        self.generation = 0
        """In which the job trains: the freeze under which its groups were made; 0: the first."""
        self.opened = 0
        """The newest in which a gate has opened."""
        self.given_up_s: dict[str, float] = {}
        """When a node's places were last given to another one."""
        self.former: list[Rank] = []
        """Processes that were replaced."""
        self.fills_are_compared = True
        self.failing = FAILING
        """Chance of each thing that can go wrong by itself."""
        self.slow_to_leave: dict[int, float] = {}
        """Ranks whose training thread takes so many seconds to come out of its step, the next time."""

    def fails(self) -> bool:
        return self.rng.random() < self.failing

    def leaves_after_s(self, rank: int) -> float:
        """Return how long a training thread takes to come out of its step."""
        chance = self.rng.random()
        usual_s = self.rng.uniform(0.0, 1.5 * LIMIT_S) if chance >= 1 - self.failing else 0.001 + 0.049 * chance
        return self.slow_to_leave.pop(rank, usual_s)

    def process_of(self, rank: int, pid: int) -> Rank:
        """Return the process that an incident is about."""
        return next(
            (process for process in self.former if (process.rank, process.pid) == (rank, pid)), self.job.ranks[rank]
        )

    def was_silent(self, process: Rank) -> bool:
        """Say whether some controller has taken this process for dead because it was silent, or whichever it is that did not come to that controller."""
        return any(
            line.event == "death_seen"
            and line.fields["kind"] == "silent"
            and line.fields["rank"] == process.rank
            and (
                line.fields["pid"] == process.pid if "pid" in line.fields else process.started_s <= at < process.ended_s
            )
            for at, line in self.job.journal
        )

    def trains_on(self, rank: int) -> Rank | None:
        """Return this rank's process that may run on while the others regroup: a silent one, or a lost node's that another has replaced. None: none."""
        processes = (*(former for former in self.former if former.rank == rank and former.alive), self.job.ranks[rank])
        return next(filter(self.was_silent, processes), None)

    def is_silent(self, process: Rank) -> bool:
        """Say whether a controller that runs took this process for dead because it was silent, and has not received from it since. It may have come to
        another one, which is cut off with it."""
        return self.was_silent(process) and any(
            self._last_said(controller, process.rank) == "death_seen"
            for controller in self.job.controllers
            if not controller.gone
        )

    def _last_said(self, controller: Controller, rank: int) -> str:
        said = ("death_seen", "cleared", "registered")
        lines = (line for _, line in reversed(controller.journal) if line.event in said)
        return next((line.event for line in lines if line.fields["rank"] == rank), "")

    def counts(self, process: Rank) -> bool:
        """Say whether this process has its rank's place, or had ended before another got it, on a node that was not given up."""
        now = self.job.ranks[process.rank]
        ended_before = process.ended_s < now.started_s and f"host{process.node}" not in self.given_up_s
        return process is now or ended_before

    def _decided(self) -> Iterator[int]:
        return (int(str(line.fields["step"])) for _, line in self.job.journal if line.event == "decided")

    def process_in(self, rank: int, generation: int) -> Rank:
        """Return the process that trains in that generation: in its place another may wait that a controller had asked for which is lost."""
        current = self.job.ranks[rank]
        if not self.former or (current.alive and current.generation == generation):
            return current  # nearly always: an update of every rank asks for all of them
        former = (p for p in reversed(self.former) if p.rank == rank and p.alive and p.generation == generation)
        return next(former, current)

    def end_former(self) -> None:
        """The launchers of nodes that were given up learn that the job is over."""
        for process in self.former:
            if process.alive:
                self.job.process_gone(process, "signal SIGKILL")

    def takes_place(self, old: Rank) -> None:
        """I22: another node's process takes a place of which the first may still run, and never rank 0's."""
        if old.alive and old.rank == 0:
            self.job.broken("I22: rank 0's place is given to another process, and its own has not ended")

    def update_begins(self, process: Rank, step: int) -> None:
        """I17: all train in one generation, and none in an older one any more. What runs on where its node was given up may end the step at which
        it was, and so may a silent process until its agent has ended it: the step after the one that is saved, if all had contributed to that one."""
        if process.started_s < self.given_up_s.get(f"host{process.node}", -inf):
            return
        if process in self.former:
            self.job.broken(f"I17: rank {process.rank} begins an update, and another process is in its place")
        newest = max(self.generation, process.generation)
        those = (
            [self.process_in(rank, newest) for rank in range(len(self.job.ranks))] if self.former else self.job.ranks
        )
        behind = [other.rank for other in (process, *those) if other.alive and other.generation != newest]
        if behind and not (self.was_silent(process) and step <= max(self._decided(), default=0) + 1):
            self.job.broken(
                f"I17: rank {process.rank} begins an update in generation {process.generation}, and ranks {behind} are not in {newest}"
            )
        self.generation = newest

    def knows_checkpoint(self, process: Rank, step: int) -> None:
        """As `Saves.saved` looks for what was published before all regrouped."""
        there = [root for root in self.job.roots if (root, step) in self.job.disk.published]
        if process.regrouping.saved and there:
            process.known_checkpoint = f"{there[0]}/{final_name(step)}"

    def enters(self, entering: Rank) -> None:
        """I18: when the first gate has opened in a new generation every rank that lives has the same step, bit for bit that of a fault-free
        run. A controller that says so and that no rank obeys any more opens none."""
        newest = entering.generation
        if newest <= self.opened:
            return
        living = [p for p in (self.process_in(rank, newest) for rank in range(len(self.job.ranks))) if p.alive]
        self.opened = newest
        training, at = self.job.training, living[0].gate.state_step
        if self.job.times.publish_first and at not in [step for _, step in self.job.disk.published]:
            self.job.broken(f"I20: a gate opens at step {at}, which is not published")
        for process in living:
            step, replica = process.gate.state_step, process.replica
            if (process.generation, step) != (newest, living[0].gate.state_step):
                self.job.broken(f"I18: rank {process.rank} is at step {step} of generation {process.generation}")
            elif any(
                value != training.expected(group, step) and self.job.comparing.wrong_part(group)
                for group, value in replica.values.items()
            ):
                self.job.broken(f"I18: rank {process.rank} trains on from a state that is not that of step {step}")
            elif replica.host_states.get(step) != training.host_state(step):
                self.job.broken(
                    f"I18: rank {process.rank} trains on with the host state {replica.host_states.get(step)}"
                )
            if process.pid >= PIDS_APART:
                self.job.killed.pop(process.rank, None)
                self.job.seen_to_end.discard(process.rank)


class Replacements:
    """An agent's part: it ends a process, and starts another one in its place."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._job = agent, agent.job
        self.over = False
        """The ranks were ordered to exit: no process is started any more."""
        self.slower_s = 0.0
        """Seconds that the next order takes longer than usual."""
        self._newest: dict[int, int] = {}
        """The freeze of the newest order that was carried out or refused, by rank."""

    def take(self, order: Replace) -> None:
        shared = self._job.in_place
        slow_s = shared.rng.uniform(0.0, 1.5 * LIMIT_S) if shared.fails() else self.slower_s
        self.slower_s = 0.0
        self._job.scheduler.after(slow_s + shared.rng.uniform(0.005, 0.05), partial(self._start, order, shared.fails()))

    def sit(self, order: TakePlaces) -> None:
        """It has a lost node's ranks from now on: their processes are started, one after the other."""
        shared = self._job.in_place
        if len(order.ranks) > self._agent.places:
            self._job.broken(
                f"I22: {self._agent.host} is given ranks {order.ranks}, with room for {self._agent.places}"
            )
        self._agent.places = 0
        slow_s = shared.rng.uniform(0.0, 1.5 * LIMIT_S) if shared.fails() else self.slower_s
        self.slower_s = 0.0
        for rank in order.ranks:
            slow_s += shared.rng.uniform(0.005, 0.05)
            self._job.scheduler.after(slow_s, partial(self._start_here, rank, order.freeze_id, shared.fails()))
        self._job.scheduler.after(slow_s + 0.001, self._agent.attach_again)

    def _start_here(self, rank: int, freeze_id: int, fails: bool) -> None:
        agent, job = self._agent, self._job
        if agent.lost or self.over or freeze_id < self._newest.get(rank, 0):
            return
        self._newest[rank] = freeze_id
        if fails:
            agent.report(ReplaceFailed(agent.host, rank, freeze_id, "no process could be started"))
            return
        job.in_place.takes_place(job.ranks[rank])
        job.nodes[rank] = agent.node
        self._begin(rank, freeze_id)

    def _begin(self, rank: int, freeze_id: int) -> None:
        agent, job = self._agent, self._job
        new = job.replace(rank, freeze_id, agent.addresses[agent.place])
        job.happened("replacement started", rank)
        if job.in_place.fails():
            new.soon(job.in_place.rng.uniform(0.0, 0.02), partial(job.kill, rank))

    def _start(self, order: Replace, fails: bool) -> None:
        agent, job, old = self._agent, self._job, self._job.ranks[order.rank]
        if agent.lost or self.over or order.freeze_id < self._newest.get(order.rank, 0):
            return
        self._newest[order.rank] = order.freeze_id
        if fails or (old.alive and old.pid != order.pid) or old.ended == "exit code 0":
            agent.report(ReplaceFailed(agent.host, order.rank, order.freeze_id, "no process could be started"))
            return
        if old.alive:
            job.comparing.ends_process(old)
            job.kill(order.rank)
        self._begin(order.rank, order.freeze_id)

    def ended(self, process: Rank) -> None:
        """A process that was started in another's place has ended: the controller may not know it yet."""
        if process.pid >= PIDS_APART:
            self._agent.report(ReplaceFailed(self._agent.host, process.rank, process.began_in, "it has ended"))


class Regrouping:
    """A rank's part, on its training thread."""

    def __init__(self, process: Rank) -> None:
        self._process, self._job = process, process.job
        self._order: Regroup | None = None
        """Of the groups that are being made."""
        self.saved = False
        """The newest such step was published before."""

    def raised(self, text: str) -> bool:
        """The training thread raises: say whether it is making its groups, and so has failed to."""
        order, self._order = self._order, None
        if order is None:
            return False
        self._process.leave_training()
        self._fail(order, text)
        return True

    def begin(self, order: Regroup) -> None:
        """The training thread is brought out of its step, if it can be."""
        shared = self._job.in_place
        if shared.fails() or self._process.stuck:
            self._job.note(f"rank {self._process.rank} does not come out of its step")
        elif shared.fails():
            self._fail(order, "raised while its groups were made")
        elif order.saved and self._job.comparing.acts:
            self._fail(order, "the step was published before replicas were compared")
        else:
            self._process.later(shared.leaves_after_s(self._process.rank), partial(self._leave, order))

    def _leave(self, order: Regroup) -> None:
        process, step = self._process, order.step
        if process.returned:
            self._job.note(f"rank {process.rank} does not enter a training again that has returned")
            return
        process.leave_training()
        if not process.state.vacant:
            self._job.collectives.leave(process.rank, process.generation)
            process.replica.enter(step)
        process.generation, self._order = order.freeze_id, order
        process.gate.regroups = order.freeze_id
        process.rehearsal.begin_anew(process.rehearsal.steps)
        self._job.happened("left", process.rank)
        self._meet("groups", order, partial(self._fill, order))

    def _meet(self, name: str, order: Regroup, then: partial[None]) -> None:
        process, job = self._process, self._job
        fail = process.in_turn(partial(self._fail, order, "connection closed by peer"))
        job.collectives.enter(
            name, order.freeze_id, job.everybody, process.rank, process.in_turn(then), fail, generation=order.freeze_id
        )

    def _fill(self, order: Regroup) -> None:
        """Take the shards from those that hold them; they must stand still meanwhile."""
        process, job, rank = self._process, self._job, self._process.rank
        for group in job.training.groups_of(rank) if rank in order.replaced else ():
            holders = job.training.layout.holders[int(group[1:])]
            staying = [holder for holder in holders if holder not in order.replaced]
            if not staying:
                job.broken(f"I18: no rank that stays holds {group}")
                continue
            source = job.in_place.process_in(staying[0], order.freeze_id).replica
            value = source.values[group]
            if value == HALF_WRITTEN or source.state_step != order.step:
                job.broken(f"I18: rank {rank} is filled with {group} of step {source.state_step}")
            process.replica.values[group] = value + job.in_place.fails()
            process.replica.take_host_state(order.step, source)
            process.replica.state_step = order.step
        job.happened("filled", rank)
        process.soon(
            job.in_place.rng.uniform(0.001, 0.02), partial(self._meet, "filled", order, partial(self._compare, order))
        )

    def _compare(self, order: Regroup) -> None:
        """All holders of a group have the same bits."""
        process, job = self._process, self._job
        differing = self._differing() if job.in_place.fills_are_compared else {}
        if differing and job.comparing.acts:
            try:
                job.comparing.dispute_filled(process, order.step, differing)
            except ProtocolError as error:
                self._fail(order, str(error))
                return
            self._meet("filled again", order, partial(self._learn, order, differing))
            return
        if any(group in differing for group in job.training.groups_of(process.rank)):
            self._fail(order, f"{', '.join(differing)} differ")
            return
        self._order = None
        process.gate.regrouped(order.step, order.record)
        self.saved = order.saved
        process.put(ev.RegroupDone(order))
        process.compute_again()

    def _differing(self) -> dict[str, int]:
        """Return the groups whose holders have other bits than one another, with how many they are."""
        training, ranks = self._job.training, self._job.ranks
        pairs = zip(training.groups, training.layout.holders, strict=True)
        return {
            group: len(holders)
            for group, holders in pairs
            if len({ranks[holder].replica.values[group] for holder in holders}) > 1
        }

    def _learn(self, order: Regroup, differing: dict[str, int]) -> None:
        """All holders have their digests behind their gates."""
        self._job.comparing.learn(differing)
        self._fail(order, f"ReplicasDiffer: {', '.join(differing)}")

    def _fail(self, order: Regroup, error: str) -> None:
        self._process.put(ev.WorkFailed(order.freeze_id, "regroup", "", error))
