"""torch's process groups of this process: closed, and made again with the same names, members and order.

Owns what a group is made of, and the store's keys of each generation. Names stay, so whatever finds its group by name (DeviceMesh, DTensor,
functional collectives) needs nothing; whatever holds a group as an object is given the one that has taken its place. Never decides when.

torch keeps its own table of groups, in the order in which they were made: nothing has to be recorded as they are made. The table is private
(`torch.distributed.distributed_c10d._world`); `tests/unit/groups` fails where another version of torch has another one.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ttp.errors import ConfigError
from ttp.groups.connections import Connections, computing, end_waits
from ttp.groups.device_backends import abort_all, await_kernels

Successor = Callable[[Any], Any]
"""Of a process group that was closed: the one in its place. Of None, a group of now, and one without this rank: the same."""

c10d: Any = distributed_c10d
OPEN_S = 1.0
"""A connection that is open so long after it was shut down may be one from which gloo reads no more."""
CLOSED_S = 2.0
"""Connections that are open for longer after they were shut down, and may still bring something: their groups cannot be made again."""
_LOOK_S = 0.001
_LOOK_AGAIN_S = 0.5
_ALONE = 2
"""References to an object that one list has: the list's, and that of whoever counts."""
_PREFIX = "ttp_generation_"
_OF_A_GENERATION = re.compile(rf"{_PREFIX}(\d+)\.(\d+)/")
_TAGGED = "user:"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one process group of this rank is made of. Options of its backend other than the timeout are not kept."""

    group: Any
    name: str
    ranks: tuple[int, ...]
    """Global ranks, in the group's order."""
    backend: str
    timeout: timedelta
    """A group of torch's fake backend has none of its own: the default."""
    tag: str
    """What its maker called it (torch's functional collectives); empty: nothing."""
    description: str
    device: Any
    """The device that it is bound to; None: none."""


class ProcessGroups:
    """All process groups of this process, from one generation to the next: one object for the whole process, as torch's table is."""

    def __init__(self) -> None:
        self.generation = 0
        """How often they were made again since `recovery`."""
        self.recovery = 0
        """The number under which they were made after a fault, the newest; 0: there was none."""
        self.meeting: Any = None
        """The store in which they are made; None: that of the first default group."""
        self.backend = ""
        """Of all groups that are made next, in place of the one that each has; empty: each its own."""
        self.timeout: timedelta | None = None
        """Of those groups, in place of their own; None: each its own."""
        self.replaceable = False
        """The program joins in a way in which a process in a lost one's place joins, too (`ttp.groups.vacancy`)."""
        self.pollable = False
        """Whoever waits for their operations looks again and again whether they are to be left (`ttp.groups.polled_wait`)."""
        self._store: Any = None
        self._made: Any = None
        """The default group that was made last; another one: the program has joined anew since."""
        self._connections = Connections()
        self._closed: list[Any] = []
        """The groups that were closed last."""
        self._end_waits_s = 0.0
        """From when on operations that wait on connections that are open still are ended in another way."""
        self._left = self._left_before = False
        """The groups of now, those that were closed last: they were left in the middle of their operations."""

    def check(self) -> None:
        """Raise ConfigError for groups that cannot be made again."""
        bound = [recipe.name for recipe in recipes() if recipe.device is not None]
        if bound:
            raise ConfigError(
                f"invalid TTP_REHEARSE: got process groups that are bound to a device ({', '.join(bound[:3])}), of which all ranks split each"
                " subgroup, expected none. Call init_process_group without device_id"
            )

    @property
    def left(self) -> bool:
        """The groups of now are being left: whoever waits for one of their operations is to raise."""
        return self._left

    def leave(self) -> int:
        """Bring the training thread out of the collectives that it waits in: every connection of the groups is shut down, so that they raise on this
        rank and on its peers; on an accelerator, where they do not raise, they are aborted. Called from another thread; only for groups that were
        made again at least once, whose connections are known.

        Returns how many connections were open.
        """
        first, self._left = not self._left, True
        count = self._connections.shut_down()
        if first:
            self._end_waits_s = time.monotonic() + OPEN_S
            abort_all()
        elif count and time.monotonic() > self._end_waits_s:
            end_waits()
        return count

    def close(self) -> None:
        """Leave the groups, and wait until none of their operations writes to memory any more: connections are closed, as gloo does when it has read
        the end of one, and its threads do nothing. First called while what the training thread has come out of still holds the handles of its
        operations: gloo reads nothing more of a message whose memory is gone, and such a connection stays open. Raises RuntimeError: that takes
        longer than CLOSED_S."""
        self.leave()
        until_s = time.monotonic() + CLOSED_S
        while (count := self._connections.shut_down()) or computing():
            if not computing() and self._connections.without_memory():
                break
            if time.monotonic() > until_s:
                raise RuntimeError(
                    f"process groups that were left are in use after {CLOSED_S:g} s: {count} connections are open"
                )
            time.sleep(_LOOK_S)
        await_kernels()

    def let_go(self) -> None:
        """Drop the groups that were closed last. The destructor of one that this rank has left in the middle of an operation waits for that, which may
        take for ever: then a thread of its own drops it, as the last that refers to it."""
        gone, self._closed = self._closed, []
        while self._left_before and gone:
            threading.Thread(target=_drop_as_last, args=([gone.pop()],), name="ttp-group-gone", daemon=True).start()

    def make_again(self, recovery: int = 0) -> Successor:
        """Close every group and make it again (every rank of the job calls, with no collective under way, or after `leave`); without groups there
        is none to make. `recovery`: the number of the fault after which they are made, the same on all ranks; 0: they are made without one.

        Blocks until the other ranks of each group have come, at most for the group's timeout. Raises ConfigError; RuntimeError: operations of groups
        that were left may still write to memory.
        """
        if not dist.is_initialized():
            return lambda group: group
        self.check()
        made, count = recipes(), c10d._world.group_count
        groups = [recipe.group for recipe in made]
        if groups[0] is not self._made:
            self._store = self.meeting or c10d._world.pg_map[groups[0]][1]
        self.let_go()
        self.recovery, self.generation = (recovery, 0) if recovery else (self.recovery, self.generation + 1)
        rank = dist.get_rank()
        if recovery:
            self.close()
        dist.destroy_process_group()
        self._left, self._left_before = False, self._left
        self._closed, made = groups, [replace(recipe, group=None) for recipe in made]
        with self._connections.opening():
            again = self._make(made, rank)
        self.backend, self.timeout = "", None
        successors = WeakKeyDictionary(zip(groups, again, strict=True))
        self._made = dist.group.WORLD
        c10d._world.group_count = count  # the next one that the program makes has the name that it would have had
        if rank == 0:
            self._forget_keys()

        current = set(again)

        def successor(group: Any) -> Any:
            if not isinstance(group, dist.ProcessGroup):
                return group
            if group in current:
                return group
            if group not in successors:
                raise ConfigError(
                    f"process group {group.group_name!r} was not in use when the groups were made again: it is of an earlier generation."
                    " Renew it in every call of on_regroup"
                )
            return successors[group]

        return successor

    def _make(self, made: list[Recipe], rank: int) -> list[Any]:
        """Make all of them, the default group first; return them in the same order."""
        first, *others = made
        store = c10d.PrefixStore(self._prefix, self._store)
        hook = sys.excepthook  # torch hangs one more on it each time
        dist.init_process_group(
            self.backend or first.backend,
            store=store,
            rank=rank,
            world_size=len(first.ranks),
            timeout=self.timeout or first.timeout,
            device_id=first.device,
        )
        sys.excepthook = hook
        default = dist.group.WORLD
        groups = [default]
        for recipe in others:
            group, _ = c10d._new_process_group_helper(
                len(recipe.ranks),
                recipe.ranks.index(rank),
                list(recipe.ranks),
                c10d.Backend(self.backend or recipe.backend),
                c10d._world.pg_map[default][1],
                recipe.name,
                timeout=self.timeout or recipe.timeout,
                pg_tag=recipe.tag,
                device_id=recipe.device,
                group_desc=recipe.description,
            )
            c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(recipe.ranks)}
            groups.append(group)
        return groups

    @property
    def _prefix(self) -> str:
        """What the keys of the groups of now begin with."""
        return f"{_PREFIX}{self.recovery}.{self.generation}"

    def _forget_keys(self) -> None:
        """Take the keys of all earlier generations out of the store: every rank has left them, since all have formed this one. A process in the place
        of a lost rank 0 does not know which there were. Other ranks may be in a later one already."""
        store, own = self._store, (self.recovery, self.generation)
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        with contextlib.suppress(RuntimeError, AttributeError):  # a store that lists no keys keeps them
            for key in store.list_keys():
                if (of := generation_of(key)) is not None and of < own:
                    store.delete_key(key)


GROUPS = ProcessGroups()


def _drop_as_last(last: list[Any]) -> None:
    """Drop a group once no other Python object refers to it: a frame, which an exception keeps until it is collected, or a variable of the program. The
    destructor runs in the thread that drops it last. What holds it in C++ (DistributedDataParallel's reducer) was given its successor before."""
    while sys.getrefcount(last[0]) > _ALONE:
        time.sleep(_LOOK_AGAIN_S)
    last.clear()


def generation_of(key: str) -> tuple[int, int] | None:
    """Return the recovery and the generation of which this key of the store is; None: of none."""
    found = _OF_A_GENERATION.search(key)
    return (int(found[1]), int(found[2])) if found else None


def recipes() -> list[Recipe]:
    """Return what this process's groups are made of, the default group first, then in the order in which they were made; none without groups."""
    if not dist.is_initialized():
        return []
    world = c10d._world
    default = dist.group.WORLD
    groups = sorted(world.pg_map, key=lambda group: group is not default)  # stable
    return [_recipe(group, world) for group in groups]


def _recipe(group: Any, world: Any) -> Recipe:
    places = world.pg_group_ranks[group]
    tag = world.pg_to_tag.get(group) or ""
    options = getattr(
        group._get_backend(group._device_types[0]), "options", None
    )  # a back end of a plug-in may have none
    return Recipe(
        group=group,
        name=world.pg_names[group],
        ranks=tuple(sorted(places, key=places.__getitem__)),
        backend=str(world.pg_map[group][0]),
        timeout=options._timeout if options is not None else c10d.default_pg_timeout,
        tag=tag.removeprefix(_TAGGED) if tag.startswith(_TAGGED) else "",
        description=group.group_desc,
        device=group.bound_device_id,
    )
