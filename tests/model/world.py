"""What every action does to a model job.

Every transition of a part is computed once: a search meets the same local situation in many global ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from typing import Any

from tests.model import controller as controllers
from tests.model import disk as disks
from tests.model import in_place
from tests.model import rank as ranks
from tests.model.disk import Disk
from tests.model.possible import Possibilities
from tests.model.situation import CLOSED, GREETING, HELLO, LOOKED_FOR, Action, Draft, Situation, is_stale
from ttp.proto.messages import (
    CauseKind,
    KeepAlive,
    Phase,
    PublishOrder,
    ReplaceFailed,
    StateReport,
    Thaw,
    WorkerExit,
    WriteOrder,
)


class World(Possibilities):
    """A model job of one shape."""

    def start(self) -> Situation:
        """Return the job after all ranks have registered and were welcomed: nothing has gone wrong yet."""
        shape, places = self.shape, 1 + self.shape.standbys
        size = shape.world_size
        draft = Draft(
            Situation(
                tuple(self._rank_number(ranks.first(shape, rank)) for rank in range(size)),
                tuple(self.of_controllers.of(controllers.first(shape, place)) for place in range(places)),
                ((),) * (size * places), ((),) * (size * places), (), (), self.of_disks.of(Disk()), shape.faults,
                0, shape.peer_errors, -1, 0, 0,
            )
        )  # fmt: skip
        for rank in range(size):
            self._on_rank(draft, rank, ranks.tick)
        situation = draft.done()
        while any(self.rank(situation, rank).main == "start" for rank in range(size)):
            situation = self.apply(situation, self.ordinary(situation)[0])
        while any(situation.up) or any(situation.down):
            messages = [action for action in self.ordinary(situation) if action[0] in ("receive", "deliver")]
            situation = self.apply(situation, messages[0])
        while min(self.rank(situation, rank).gate.step for rank in range(size)) <= shape.calm_steps:
            behind = [
                action
                for action in self.ordinary(situation)
                if self.rank(situation, action[1]).gate.step <= shape.calm_steps
            ]
            situation = self.apply(situation, behind[0])
        return situation

    # --- what it does ---

    def apply(self, situation: Situation, action: Action) -> Situation:
        """Return the situation after an action."""
        draft = Draft(situation)
        _ACTIONS[action[0]](self, draft, *action[1:])
        draft.spent |= self.shape.spent_by(action[0])
        self._leave_alone(draft)
        return draft.done()

    def _leave_alone(self, draft: Draft) -> None:
        """A controller that no rank speaks to, or ever will, does nothing any more that anybody notices."""
        for place in range(len(draft.controllers) - 1):
            if self.controller(draft, place).gone:
                continue
            views = map(self.views.__getitem__, draft.ranks)
            if in_place.may_replace(self, draft, place):
                continue
            if all(view.fence > place + 1 and view.link != place for view in views if view.alive):
                self._on_controller(draft, place, controllers.killed, "left alone")

    def _on_rank(self, draft: Draft, rank: int, transition: Callable[..., Any], *arguments: Hashable) -> None:
        """Let a rank make a transition, and carry what comes out of it."""
        key = ("rank", draft.ranks[rank], transition, arguments)
        known = self._steps.get(key)
        if known is None:
            after, out = transition(self.shape, self.rank(draft, rank), *arguments)
            known = self._steps[key] = (self._rank_number(after), out)
        draft.ranks[rank] = known[0]
        for kind, what in known[1]:
            _FROM_RANKS[kind](self, draft, rank, what)

    def _on_controller(self, draft: Draft, place: int, transition: Callable[..., Any], *arguments: Hashable) -> None:
        draft.controllers[place], out = self._controller_step(draft.controllers[place], transition, *arguments)
        for kind, what in out:
            _FROM_CONTROLLERS[kind](self, draft, place, what)

    def _controller_step(
        self, number: int, transition: Callable[..., Any], *arguments: Hashable
    ) -> tuple[int, tuple[Any, ...]]:
        key = ("controller", number, transition, arguments)
        known = self._steps.get(key)
        if known is None:
            after, out = transition(self.shape, self.of_controllers.values[number], *arguments)
            known = self._steps[key] = (self.of_controllers.of(after), out)
        return known

    def changes_no_stage(self, situation: Situation, place: int, rank: int, message: Hashable) -> bool:
        """True for a message that its controller takes without saying anything or going on to another stage."""
        number = situation.controllers[place]
        after, out = self._controller_step(number, controllers.receive, rank, message)
        values = self.of_controllers.values
        return not out and values[after].state.stage is values[number].state.stage

    # from ranks

    def _send_up(self, draft: Draft, rank: int, what: Any) -> None:
        place, message = what
        controller = self.controller(draft, place)
        if isinstance(message, StateReport) and is_stale(controller.state, message):
            message = StateReport(rank, message.freeze_id, False, Phase.COMPUTE, 0, 0, False, -1, ())
        if not controller.gone:
            self._append(draft.up, rank * len(draft.controllers) + place, self.of_messages.of(message))

    @staticmethod
    def _append(channels: list[tuple[int, ...]], index: int, number: int) -> None:
        channels[index] = (*channels[index], number)

    def _beat_up(self, draft: Draft, rank: int, what: Any) -> None:
        """Heartbeats are received at once: they only show that nothing is wrong."""
        place, message = what
        controller, index = self.controller(draft, place), rank * len(draft.controllers) + place
        if controller.running and rank in controller.streams and not draft.up[index]:
            self._on_controller(draft, place, controllers.receive, rank, message)

    def _connect(self, draft: Draft, rank: int, place: Any) -> None:
        self._let_go(draft, rank)
        controller = self.controller(draft, place)
        if controller.gone:
            self._on_rank(draft, rank, ranks.refused, "connection refused")
        elif controller.stopped:
            self._on_rank(draft, rank, ranks.waits_at, place)
            self._append(draft.up, rank * len(draft.controllers) + place, HELLO)
        else:
            self._on_rank(draft, rank, ranks.connected, place, self._standby(rank))

    def _standby(self, rank: int) -> str:
        return f"c{rank}" if 0 < rank <= self.shape.standbys else ""

    def _let_go(self, draft: Draft, rank: int) -> None:
        """A rank's end of its stream is closed."""
        place = self.rank(draft, rank).link
        if place < 0:
            return
        index = rank * len(draft.controllers) + place
        draft.down[index] = ()
        if draft.up[index][-1:] == (HELLO,):
            draft.up[index] = draft.up[index][:-1]  # a stream that was asked for and given up is none, however often
        elif not self.controller(draft, place).gone:
            self._append(draft.up, index, CLOSED)
        self._on_rank(draft, rank, ranks.let_go)

    def _gone(self, draft: Draft, rank: int, what: Any) -> None:
        link, places = what[0], len(draft.controllers)
        for place in range(places):
            index = rank * places + place
            draft.down[index] = ()
            if self.controller(draft, place).gone:
                continue
            if place == link:
                self._append(draft.up, index, CLOSED)
            if self.shape.agents:
                draft.exits.add((place, rank))

    # from controllers

    def _send_down(self, draft: Draft, place: int, what: Any) -> None:
        ranks, message = what
        if isinstance(message, Thaw):
            draft.thawed_up_to = max(draft.thawed_up_to, message.freeze_id)
        places, number = len(draft.controllers), self.of_messages.of(message)
        for rank in ranks:
            self._one_down(draft, place, rank, rank * places + place, number)

    def _one_down(self, draft: Draft, place: int, rank: int, index: int, number: int) -> None:
        controller, it = self.controller(draft, place), self.rank(draft, rank)
        current = it.link == place and CLOSED not in draft.up[index] and CLOSED not in draft.down[index]
        if it.alive and current and rank in controller.streams:
            self._append(draft.down, index, number)

    def _look_for(self, draft: Draft, place: int, addresses: Any) -> None:
        for address in addresses:
            older = controllers.place_of(address)
            if not self.controller(draft, older).gone:
                draft.exits.add((older, LOOKED_FOR - place))

    def _supersede(self, draft: Draft, place: int, address: Any) -> None:
        """One that has just answered receives it at once, or never does."""
        if self.controller(draft, (older := controllers.place_of(address))).running:
            self._on_controller(draft, older, controllers.killed, "superseded")

    def _controller_over(self, draft: Draft, place: int, reason: Any) -> None:
        """There is no reader any more; what it had sent still arrives."""
        places = len(draft.controllers)
        for rank in range(self.shape.world_size):
            index = rank * places + place
            draft.up[index] = ()
            it = self.rank(draft, rank)
            if it.alive and it.link == place and CLOSED not in draft.down[index]:
                self._append(draft.down, index, CLOSED)
        draft.exits = {(to, rank) for to, rank in draft.exits if to != place and rank != LOOKED_FOR - place}

    # ordinary actions

    def _receive(self, draft: Draft, rank: int) -> None:
        place = self.rank(draft, rank).link
        index = rank * len(draft.controllers) + place
        number, *rest = draft.down[index]
        draft.down[index] = tuple(rest)
        if number == CLOSED:
            draft.down[index] = ()
            self._on_rank(draft, rank, ranks.stream_broke)
        elif number == GREETING:
            self._on_rank(draft, rank, ranks.connected, place, self._standby(rank))
        else:
            message = self.of_messages.values[number]
            self._on_rank(draft, rank, ranks.receive, message)

    def _deliver(self, draft: Draft, place: int, rank: int) -> None:
        index = rank * len(draft.controllers) + place
        number, *rest = draft.up[index]
        draft.up[index] = tuple(rest)
        if number == CLOSED:
            self._on_controller(draft, place, controllers.close_seen, rank)
        elif number == HELLO:
            if self.rank(draft, rank).link == place and not rest:
                self._append(draft.down, index, GREETING)
        else:
            self._on_controller(draft, place, controllers.receive, rank, self.of_messages.values[number])

    def _exit(self, draft: Draft, place: int, rank: int) -> None:
        draft.exits.discard((place, rank))
        if rank <= LOOKED_FOR:
            generation = self.controller(draft, place).state.generation
            self._on_controller(draft, LOOKED_FOR - rank, controllers.earlier_lives, place, generation)
            return
        it = self.rank(draft, rank)
        if it.began_in:
            failed = ReplaceFailed(ranks.host_of(rank), rank, it.began_in, "")
            self._on_controller(draft, place, controllers.receive_from_agent, failed)
        if self.controller(draft, place).running:
            report = WorkerExit(rank, ranks.pid_of(it), it.ended, 0.0)
            self._on_controller(draft, place, controllers.receive_from_agent, report)

    def _lose_order(self, draft: Draft, place: int, rank: int) -> None:
        """It has answered, and does not receive in time that it is to end: it is looked for again."""
        asker, generation = LOOKED_FOR - rank, self.controller(draft, place).state.generation
        draft.controllers[asker], out = self._controller_step(
            draft.controllers[asker], controllers.earlier_lives, place, generation
        )
        for kind, what in out:
            if kind != "supersede":
                _FROM_CONTROLLERS[kind](self, draft, asker, what)

    def _begin(self, draft: Draft, rank: int) -> None:
        draft.committed = max(draft.committed, self.rank(draft, rank).gate.step)
        in_place.begins_update(self, draft, rank)
        self._on_rank(draft, rank, ranks.begin_update, draft.thawed_up_to)

    def _disk_work(self, draft: Draft, rank: int) -> None:
        it, disk = self.rank(draft, rank), self.disk(draft)
        match ranks.order_of(it):
            case WriteOrder() as order:
                changed = self._write(draft, rank, disk, order)
            case PublishOrder() as order:
                changed = self._publish(draft, rank, disk, order)
        if len(changed.published) > len(disk.published):
            self._check_published(draft, rank, changed)
        draft.disk = self.of_disks.of(changed)

    def _write(self, draft: Draft, rank: int, disk: Disk, order: WriteOrder) -> Disk:
        it = self.rank(draft, rank)
        name, content = ranks.file_name(it), it.gate.content
        if not it.stage:
            self._on_rank(draft, rank, ranks.work_begun, f"writing {content}")
            return disks.begin_write(disk, order, name)
        if it.stage != f"writing {content}":
            self._on_rank(draft, rank, ranks.found_broken, f"I5: rank {rank}'s state changed while it was written")
        changed, error = disks.end_write(disk, order, name, content)
        if error:
            self._on_rank(draft, rank, ranks.work_failed, error)
        else:
            self._on_rank(draft, rank, ranks.write_done)
        return changed

    def _publish(self, draft: Draft, rank: int, disk: Disk, order: PublishOrder) -> Disk:
        stage = self.rank(draft, rank).stage
        if stage == "renamed":
            self._on_rank(draft, rank, ranks.publish_done)
            return disks.track(disk, order)
        changed, error = disks.rename(disk, order) if stage else disks.write_manifest(disk, order)
        if error:
            self._on_rank(draft, rank, ranks.work_failed, error)
        else:
            self._on_rank(draft, rank, ranks.work_begun, "renamed" if stage else "listed")
        return changed

    def _check_published(self, draft: Draft, rank: int, disk: Disk) -> None:
        """I1 to I6 at the moment of the rename: nothing that is published changes afterwards."""
        root, step = disk.published[-1]
        broken = disks.faults_of(disk, root, step, self.shape.groups)
        if step not in (draft.committed - 1, draft.committed):
            broken = f"I6: step {step} was published, step {draft.committed} was the last that was committed"
        if disk.published.count((root, step)) > 1:
            broken = f"I4: step {step} was published twice in {root}"
        if broken:
            self._on_rank(draft, rank, ranks.found_broken, broken)

    # faults and what may happen

    def _fault(self, draft: Draft, rank: int, transition: Callable[..., Any], *arguments: Hashable) -> None:
        draft.faults_left -= 1
        self._on_rank(draft, rank, transition, *arguments)

    def _raise(self, draft: Draft, rank: int) -> None:
        draft.faults_left -= 1
        in_place.raises(self, draft, rank, CauseKind.EXCEPTION)

    def _break(self, draft: Draft, rank: int) -> None:
        """The stream breaks, and with it all that is under way on it."""
        draft.faults_left -= 1
        place = self.rank(draft, rank).link
        index = rank * len(draft.controllers) + place
        draft.up[index] = () if self.controller(draft, place).gone else (CLOSED,)
        draft.down[index] = (CLOSED,)

    def _fault_of_controller(self, draft: Draft, place: int, transition: Callable[..., Any], *arguments: str) -> None:
        draft.faults_left -= 1
        self._on_controller(draft, place, transition, *arguments)

    def _fill(self, draft: Draft, root: str) -> None:
        disk = self.disk(draft)
        draft.faults_left -= 1
        draft.disk = self.of_disks.of(Disk(disk.directories, disk.tracker, disk.published, disk.full | {root}))

    def _peer_error(self, draft: Draft, rank: int) -> None:
        draft.peer_errors_left -= 1
        in_place.raises(self, draft, rank, CauseKind.PEER_ERROR)

    # --- time ---

    def wait(self, situation: Situation) -> Situation | None:
        """Let time pass until something can happen again; None: nothing ever will, unless a stopped process goes on.

        Called where no ordinary action remains. All that run send heartbeats all the while.
        """
        if not self.anybody(situation):
            return None
        seen = set()
        while situation not in seen:
            seen.add(situation)
            seconds = self._next_moment(situation)
            if seconds == inf:
                return None
            situation = self._pass_time(situation, seconds)
            if self.ordinary(situation) or (self.shape.in_place_s and not self.anybody(situation)):
                return situation
        return None

    def _next_moment(self, situation: Situation) -> float:
        living = [it for rank in range(self.shape.world_size) if (it := self.rank(situation, rank)).running]
        moments = [ranks.due_in(it) for it in living]
        for place in range(len(situation.controllers)):
            controller = self.controller(situation, place)
            if controller.running:
                moments.append(controllers.due_in(controller))
        return max(0.0, min(moments, default=inf))

    def _pass_time(self, situation: Situation, seconds: float) -> Situation:
        draft = Draft(situation)
        for rank in range(self.shape.world_size):
            if self.rank(draft, rank).alive:
                self._on_rank(draft, rank, ranks.later, seconds)
        for place in range(len(draft.controllers)):
            if not self.controller(draft, place).gone:
                self._on_controller(draft, place, controllers.later, seconds)
        for rank in range(self.shape.world_size):
            if self.rank(draft, rank).running:
                self._on_rank(draft, rank, ranks.tick)
        for place in range(len(draft.controllers)):
            if self.controller(draft, place).running:
                self._on_controller(draft, place, controllers.tick)
                self._beats(draft, place)
        return draft.done()

    def _beats(self, draft: Draft, place: int) -> None:
        """The controller receives a heartbeat of every rank that has nothing else to send to it."""
        places = len(draft.controllers)
        for rank in range(self.shape.world_size):
            it, index = self.rank(draft, rank), rank * places + place
            attached = rank in self.controller(draft, place).streams and it.link == place
            if it.running and attached and not draft.up[index] and not draft.down[index]:
                self._on_rank(draft, rank, ranks.receive, _BEAT)


_BEAT = KeepAlive()
_FROM_RANKS: dict[str, Callable[..., None]] = {
    "up": World._send_up,
    "beat": World._beat_up,
    "connect": World._connect,
    "gone": World._gone,
}
_FROM_CONTROLLERS: dict[str, Callable[..., None]] = {
    "send": World._send_down,
    "replace": in_place.order_replacement,
    "look for": World._look_for,
    "supersede": World._supersede,
    "over": World._controller_over,
}
_ACTIONS: dict[str, Callable[..., None]] = {
    "receive": World._receive,
    "ready": lambda world, draft, rank: world._on_rank(draft, rank, ranks.ready),
    "begin": World._begin,
    "end": lambda world, draft, rank: world._on_rank(draft, rank, ranks.end_update),
    "gathered": lambda world, draft, rank: world._on_rank(draft, rank, ranks.gathered),
    "end roll": lambda world, draft, rank: world._on_rank(draft, rank, ranks.end_roll),
    "disk": World._disk_work,
    "deliver": World._deliver,
    "exit": World._exit,
    "lose order": World._lose_order,
    "resume": lambda world, draft, rank: world._on_rank(draft, rank, ranks.resumed),
    "late end": lambda world, draft, rank: world._on_rank(draft, rank, ranks.end_update),
    "peer error": World._peer_error,
    "controller resume": lambda world, draft, place: world._on_controller(draft, place, controllers.resumed),
    "kill": lambda world, draft, rank: world._fault(draft, rank, ranks.killed),
    "stop": lambda world, draft, rank: world._fault(draft, rank, ranks.stopped),
    "raise": World._raise,
    "hang": lambda world, draft, rank: world._fault(
        draft, rank, ranks.hung if world.views[draft.ranks[rank]].busy else in_place.stuck
    ),
    "break": World._break,
    "controller kill": lambda world, draft, place: world._fault_of_controller(
        draft, place, controllers.killed, "killed"
    ),
    "controller stop": lambda world, draft, place: world._fault_of_controller(draft, place, controllers.stopped),
    "full disk": World._fill,
    "leave": lambda world, draft, rank: world._on_rank(draft, rank, ranks.leave),
    "fill": in_place.fill,
    "regroup done": lambda world, draft, rank: world._on_rank(draft, rank, in_place.regroup_done),
    "again": in_place.enter,
    "replace": in_place.replace_process,
    "replace fails": in_place.cannot_replace,
}
