"""One run of a job under a schedule: waits for the moment of each fault, has it carried out, and waits until it is settled.

Owns the loop that receives from ranks, reads journals and undoes what is due; what became of a fault is judged by `verdict/fault_outcome.py`, what
it means by `invariants.py`. One thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path

from ttp.chaos.faults.control_socket import Control, Message, Peer
from ttp.chaos.faults.external import Injector
from ttp.chaos.faults.inject import DUMP_POINTS, POINTS, START_POINTS
from ttp.chaos.faults.rank_hook import FaultOrder
from ttp.chaos.faults.scenario import KINDS, FaultSpec, Scenario
from ttp.chaos.nodes.interrupts import InterruptGuard
from ttp.chaos.observed.recorder import Key, Record, Recorder
from ttp.chaos.observed.target import Target
from ttp.chaos.observed.training_job import JobError
from ttp.chaos.run.environment import staged
from ttp.chaos.verdict.fault_outcome import NOT_REACHED, OVERDUE, FaultOutcome, Firing, of_ended_job, settle

POLL_S = 0.005
LOOK_S = 0.5
"""Time between two looks at directories and trackers."""
MEMORY_S = 0.25
"""Time between two looks at the ranks' memory."""
SETTLED_STEPS = 3
"""A fault after which training went on for so many steps, and no rank is frozen, has done nothing."""
FATAL_STEPS, FATAL_S = 40, 15.0
"""The same for a fault that is expected to end a rank: so many steps, and so long."""
DRAIN_S = 5.0
MARGIN_STEPS = 2
"""An order must come before its step: the next step may be under way."""

OnProgress = Callable[["Harness", FaultOutcome | None], None]
"""Called when something has changed, now and then."""


class Harness:
    """The run of one command. Use it within the `with` of its target and its control."""

    def __init__(
        self,
        target: Target,
        control: Control,
        scenario: Scenario,
        rng: random.Random,
        on_progress: OnProgress = lambda *_: None,
    ) -> None:
        self.target = target
        self.incidents: list[FaultOutcome] = []
        self._control = control
        self._scenario = scenario
        self._rng = rng
        self._on_progress = on_progress
        self._watch = Recorder()
        self._keys: dict[Peer, Key] = {}
        self._peers: dict[int, Peer] = {}
        """The ranks of the newest attempt."""
        self._standing: list[tuple[int, FaultOrder]] = []
        """(rank, order) of faults that happen while a process starts: of a later attempt, or in a lost one's place."""
        self._given: dict[int, tuple[FaultSpec, int]] = {}
        """Orders that have not fired: (fault, rank) by id."""
        self._ordered: list[int] = []
        """Ids of all orders of the incident that lasts."""
        self._incident: FaultOutcome | None = None
        self._look_at = self._memory_at = 0.0
        self._relaunch_pending = False
        """The launchers are gone, and will be started anew."""
        self._striker = Injector(target, rng)

    @property
    def record(self) -> Record:
        return self._watch.record

    def run(self, schedule: Iterable[FaultSpec] = (), run: int = 0) -> int:
        """Start the job, let every fault of the schedule happen, and wait for the job's end; return its status.

        Raises JobError: the job did not start, or did not end in time.
        """
        with self._striker:
            self.target.start()
            for number, fault in enumerate(schedule, 1):
                if self._over():
                    self._skip(fault, number, run)
                    continue
                self._meet(fault, number, run)
            if not self.wait(lambda: self.target.ended() is not None, self._scenario.job_s):
                raise JobError(f"the job did not end within {self._scenario.job_s:.0f} s\n{self.target.console_tail()}")
            self._drain()
        status = self.target.ended()
        assert status is not None
        return status

    # --- the loop ---

    def wait(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Go on until the condition holds, the job has ended or the time is over; say whether it holds."""
        deadline = time.monotonic() + within_s
        while not condition():
            if self._over() or time.monotonic() > deadline:
                self._pump(0.0)
                return condition()
            self._pump(POLL_S)
        return True

    def _over(self) -> bool:
        return self.target.ended() is not None and not self._relaunch_pending

    def _comes(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Wait for a fault's moment; say whether it came while the job ran."""
        return self.wait(condition, within_s) and not self._over()

    def _passes(self, lasts_s: float) -> bool:
        """Wait for so long; say whether the job still runs then."""
        end = time.monotonic() + lasts_s
        return self._comes(lambda: time.monotonic() >= end, inf)

    def _pump(self, timeout_s: float) -> None:
        for peer, message in self._control.poll(timeout_s):
            self._receive(peer, message)
        self._watch.look()
        now = time.monotonic()
        self._striker.undo(now)
        if now >= self._memory_at:
            self._memory_at = now + MEMORY_S
            self._watch.look_at_memory(time.time())
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._watch.look_at_directories(time.time())
            self._on_progress(self, self._incident)

    def _drain(self) -> None:
        """Receive what ranks sent last."""
        deadline = time.monotonic() + DRAIN_S
        while self._control.peers and time.monotonic() < deadline:
            self._pump(0.02)
        self._pump(0.0)
        self._watch.look_at_directories(time.time())

    def _receive(self, peer: Peer, message: Message) -> None:
        if message["type"] == "hello":
            key = (self.target.launches, int(message["start"]))
            self._keys[peer] = key
            if key > self._striker.key:
                self._striker.key, self._peers = key, {}
            self._peers[peer.rank] = peer
            self._striker.met(peer)
            mine = [order for rank, order in self._standing if rank == peer.rank]
            self._standing = [entry for entry in self._standing if entry[1] not in mine]
            peer.give(mine)
        self._watch.receive(peer.facts, self._keys[peer], message)
        if message["type"] == "firing" and message["id"] in self._given:
            fault, rank = self._given.pop(message["id"])
            point, step = str(message["point"]), int(message["step"])
            step = step or self.record.newest_step
            whom = f"rank {rank} (pid {peer.pid})"
            self._fired(Firing(fault.kind, whom, float(message["unix_s"]), point, step, self._keys[peer], (rank,)))
            if fault.kind == "stop" and fault.for_s:
                self._striker.go_on_later(peer.pid, fault.for_s)

    def _fired(self, *firings: Firing) -> None:
        if self._incident is not None:
            self._incident.firings += firings
            self._incident.firings.sort(key=lambda firing: firing.unix_s)

    # --- one fault ---

    def _new_incident(self, fault: FaultSpec, number: int, run: int) -> FaultOutcome:
        expected, due = self._scenario.outcomes(fault), self._scenario.in_place_due(fault)
        return FaultOutcome(number, run, fault.text, fault.label, expected, in_place_due=due)

    def _skip(self, fault: FaultSpec, number: int, run: int) -> None:
        incident = self._new_incident(fault, number, run)
        settle(incident, self.record, NOT_REACHED)
        self.incidents.append(incident)

    def _meet(self, fault: FaultSpec, number: int, run: int) -> None:
        """Let one fault and its `then` happen, and wait until the job has settled."""
        incident = self._new_incident(fault, number, run)
        self.incidents.append(incident)
        self._incident = incident
        try:
            how = NOT_REACHED
            if self.wait(self._training, self._scenario.deadline_s):
                how = self._happen(fault, incident)
        finally:
            incident.over_unix_s = time.time()
            self._cancel(self._ordered)  # what has not happened by now, or may happen again, must not hit the next one
            self._ordered = []
            self._standing.clear()
            self._incident = None
        self._watch.look_at_directories(time.time())
        settle(incident, self.record, how)
        self._on_progress(self, incident)

    def _cancel(self, ids: Sequence[int]) -> None:
        """Orders that are not to happen any more."""
        for peer in self._peers.values():
            peer.give((), cancel=ids)
        for one in ids:
            self._given.pop(one, None)

    def _training(self) -> bool:
        """All ranks of the newest attempt are there, and it has made a new step."""
        record = self.record
        if not record.world_size or len(self._peers) < record.world_size:
            return False
        return bool(record.steps) and self._new_steps(self._striker.key, 0.0) >= 1

    def _new_steps(self, key: Key, since_unix_s: float) -> int:
        """Return how many different steps an attempt has finished since then."""
        steps = set()
        for reported in reversed(self.record.steps):
            if reported.unix_s < since_unix_s or reported.key < key:
                break
            if reported.key == key and not reported.recovered:
                steps.add(reported.step)
        return len(steps)

    def _happen(self, fault: FaultSpec, incident: FaultOutcome) -> str:
        """Return how it ended, for `settle`."""
        ranks = self._choose(fault, ())
        chosen = [(one, self._choose(one, ranks)) for one in fault.then]
        incident.planned = len(ranks) + sum(len(its_ranks) for _, its_ranks in chosen)
        for one, its_ranks in chosen:
            if one.point in (*DUMP_POINTS, *START_POINTS):
                self._arm(one, its_ranks, 0)
        self._strike_at_its_moment(fault, ranks)
        if not self.wait(lambda: incident.fired or not self._given, self._scenario.deadline_s):
            return NOT_REACHED if self.target.ended() is not None else OVERDUE
        if not incident.fired:  # it found nothing to hit, or the job is over
            return NOT_REACHED
        for one, its_ranks in chosen:
            if one.point not in (*DUMP_POINTS, *START_POINTS):
                self._strike_when_reported(one, its_ranks, incident)
        relaunched = self._bring_back(fault, incident)
        if self.wait(lambda: self._settled(fault, incident), self._scenario.deadline_s):
            return "relaunched" if relaunched else ""
        if (status := self.target.ended()) is None:
            return OVERDUE
        return of_ended_job(status, self.record)

    def _choose(self, fault: FaultSpec, others: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks; random ones differ from others of the same incident, while there are enough."""
        world = range(self.record.world_size)
        if wrong := [rank for rank in fault.ranks if rank not in world]:
            raise JobError(
                f"{fault.text}: rank {wrong[0]}: the job has ranks 0 to {len(world) - 1}; correct the scenario"
            )
        if KINDS[fault.kind].place not in ("rank", "dump"):
            return (-1,)  # one injection, to no rank
        if fault.ranks:
            return fault.ranks
        free = [rank for rank in world if rank not in others] or list(world)
        return tuple(self._rng.sample(free, min(fault.count, len(free))))

    def _strike_at_its_moment(self, fault: FaultSpec, ranks: tuple[int, ...]) -> None:
        """Wait for the moment of a schedule's fault, and strike, unless the job is over before; one at a point is ordered in time."""
        moment, last = fault.moment, self.record.newest_step
        expected = 0
        if moment.step is not None:
            expected = moment.step
        elif moment.after_steps is not None:
            expected = last + self._rng.randint(*moment.after_steps)
        elif moment.after_s is not None:
            self._passes(self._rng.uniform(*moment.after_s))
        ahead = MARGIN_STEPS if fault.point in POINTS else 0
        if not self._comes(lambda: self.record.newest_step >= expected - ahead - 1, self._scenario.job_s):
            return
        if fault.point in POINTS:
            self._arm(fault, ranks, max(expected, self.record.newest_step + MARGIN_STEPS))
        elif not expected or self._passes(self._rng.random() * self._step_s()):
            self._strike(fault, ranks)  # anywhere within the step, not at its beginning

    def _step_s(self) -> float:
        """Return about how long a step lasts."""
        moments = sorted({reported.step: reported.unix_s for reported in self.record.steps[-64:]}.values())
        return min(5.0, (moments[-1] - moments[0]) / (len(moments) - 1)) if len(moments) > 1 else 0.1

    def _strike_when_reported(self, fault: FaultSpec, ranks: tuple[int, ...], incident: FaultOutcome) -> None:
        """Wait for the moment of a further fault, and strike, unless the job is over before, or its event does not come."""
        began = incident.began_unix_s
        moment = fault.moment
        if moment.after_s is not None:
            if not self._passes(self._rng.uniform(*moment.after_s)):
                return
        elif moment.event:
            event = moment.event
            if not self._comes(lambda: bool(self.record.lines(began, event)), self._scenario.deadline_s):
                return
        if fault.point in POINTS:
            self._arm(fault, ranks, moment.step or 0)
        else:
            self._strike(fault, ranks)

    def _strike(self, fault: FaultSpec, ranks: tuple[int, ...]) -> None:
        if KINDS[fault.kind].place == "disk" and self._striker.by_order(fault):
            ids = self._arm(fault, tuple(self._peers), 0)
            self._striker.later(fault.for_s, lambda: self._cancel(ids))
        elif KINDS[fault.kind].place not in ("rank", "dump"):
            fired = self._striker.elsewhere(fault, self.record)
            self._fired(*fired)
            if fired and fault.kind == "kill_agent" and not self.target.nodes:
                self._relaunch_pending = True
        elif self._striker.by_order(fault):
            self._arm(fault, ranks, self.record.newest_step)
        else:
            for rank in ranks:
                if rank in self._peers:
                    self._fired(*self._striker.signal_rank(fault, self._peers[rank], self.record.newest_step))

    def _arm(self, fault: FaultSpec, ranks: tuple[int, ...], step: int) -> list[int]:
        """Give the order to each rank, or keep it for the attempt to come; return the ids."""
        if fault.point not in POINTS:
            step = 0
        ids = []
        for rank in ranks:
            order = self._striker.order(fault, rank, step)
            self._given[order.id] = (fault, rank)
            ids.append(order.id)
            if fault.point in START_POINTS:
                self._standing.append((rank, order))
            elif rank in self._peers:
                self._peers[rank].give([order])
        self._ordered += ids
        return ids

    def _bring_back(self, fault: FaultSpec, incident: FaultOutcome) -> bool:
        """Do what an operator does: start anew what was lost. Says whether the whole command was."""
        began = incident.began_unix_s
        for firing in list(incident.firings):
            index = self._striker.node_of(firing)
            if firing.kind == "lose_node":
                self.wait(lambda: bool(self.record.lines(began, "published", "refused")), self._scenario.deadline_s)
                self.target.nodes[index].plug()
                self.target.start_on(index)
            elif firing.kind == "kill_agent" and self.target.nodes:
                node = self.target.nodes[index]
                self.wait(lambda node=node: not node.pids(), self._scenario.deadline_s)  # type: ignore[misc]
                self.target.start_on(index)
            elif firing.kind == "kill_agent":
                gone = self.wait(self._striker.gone, self._scenario.deadline_s)
                if not gone:
                    incident.problems.append("I11: processes stayed after their launcher was killed: " + self._left())
                    self.target.kill_all()
                self._relaunch_pending = False
                self.target.start()
                return True
        return False

    def _left(self) -> str:
        return "; ".join(self.target.leftovers())

    def _settled(self, fault: FaultSpec, incident: FaultOutcome) -> bool:
        """The job progresses again: in a later attempt, or in this one with no rank frozen."""
        last = incident.last_unix_s
        hit = incident.firings[-1].key
        if self._striker.key > hit:
            return self._training() and self._new_steps(self._striker.key, last) >= 1
        kinds = {firing.kind for firing in incident.firings}
        since = last + max((one.for_s for one in (fault, *fault.then)), default=0.0)
        if time.time() < since:
            return False
        reported = self.record.lines(incident.began_unix_s, "freeze_sent", "thawed", "regrouped", "took_over")
        leading = max((line["controller"] for line in reported if line["event"] == "took_over"), default=0)
        if (own := [line for line in reported if line["controller"] >= leading]) and own[-1]["event"] == "freeze_sent":
            return False
        if own and own[-1]["event"] == "regrouped" and own[-1]["unix_s"] > last:
            return self._training() and self._new_steps(hit, own[-1]["unix_s"]) >= SETTLED_STEPS
        if "kill_controller" in kinds and not any(line["event"] == "took_over" for line in reported):
            return False
        if "unharmed" in incident.expected:
            return self._new_steps(hit, since) >= SETTLED_STEPS
        return self._new_steps(hit, since) >= FATAL_STEPS and time.time() > since + FATAL_S


def run_baseline(
    command: Iterable[str],
    folder: Path,
    scenario: Scenario,
    on_progress: OnProgress = lambda *_: None,
    patience: InterruptGuard | None = None,
) -> Record:
    """Run the command with no fault and return its record. Raises JobError when it fails, ConfigError."""
    with staged(list(command), folder, scenario, patience or InterruptGuard()) as (target, control):
        harness = Harness(target, control, scenario, random.Random(0), on_progress)
        status = harness.run()
        if status != 0:
            raise JobError(f"the baseline run ended with status {status}\n{target.console_tail()}")
        if not harness.record.hellos:
            raise JobError(
                "no rank of the baseline run has called ttp.start: faults and verdicts need it (the bundled trainer does; in"
                " yours see the README), and ENABLE_TTP must not be False"
            )
        return harness.record
