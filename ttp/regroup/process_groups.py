"""torch's process groups of this process: closed, and made again with the same names, members and order.

Owns what a group is made of, and the store's keys of each generation. Names stay, so whatever finds its group by name (DeviceMesh, DTensor,
functional collectives) needs nothing; whatever holds a group as an object is given the one that has taken its place. Never decides when.

torch keeps its own table of groups, in the order in which they were made: nothing has to be recorded as they are made. The table is private
(`torch.distributed.distributed_c10d._world`); `tests/unit/regroup` fails where another version of torch has another one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ttp.errors import ConfigError

Successor = Callable[[Any], Any]
"""Of a process group that was closed: the one in its place. Of None, a group of now, and one without this rank: the same."""

c10d: Any = distributed_c10d
_PREFIX = "ttp_generation_"
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
    tag: str
    """What its maker called it (torch's functional collectives); empty: nothing."""
    description: str
    device: Any
    """The device that it is bound to; None: none."""


class ProcessGroups:
    """All process groups of this process, from one generation to the next: one object for the whole process, as torch's table is."""

    def __init__(self) -> None:
        self.generation = 0
        """How often they were made again."""
        self._store: Any = None
        self._made: Any = None
        """The default group that was made last; another one: the program has joined anew since."""

    def check(self) -> None:
        """Raise ConfigError for groups that cannot be made again."""
        bound = [recipe.name for recipe in recipes() if recipe.device is not None]
        if bound:
            raise ConfigError(
                f"invalid TTP_REHEARSE: got process groups that are bound to a device ({', '.join(bound[:3])}), of which all ranks split each"
                " subgroup, expected none. Call init_process_group without device_id"
            )

    def make_again(self) -> Successor:
        """Close every group and make it again (every rank of the job calls, with no collective under way); without groups there is none to make.

        Blocks until the other ranks of each group have come, at most for the group's timeout. Raises ConfigError.
        """
        if not dist.is_initialized():
            return lambda group: group
        self.check()
        made, count = recipes(), c10d._world.group_count
        if made[0].group is not self._made:
            self._store = c10d._world.pg_map[made[0].group][1]
        self.generation += 1
        rank = dist.get_rank()
        dist.destroy_process_group()
        successors = {recipe.group: group for recipe, group in zip(made, self._make(made, rank), strict=True)}
        self._made = dist.group.WORLD
        c10d._world.group_count = count  # the next one that the program makes has the name that it would have had
        if rank == 0:
            self._forget_keys(self.generation - 1)

        current = set(successors.values())

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
        store = c10d.PrefixStore(f"{_PREFIX}{self.generation}", self._store)
        hook = sys.excepthook  # torch hangs one more on it each time
        dist.init_process_group(
            first.backend,
            store=store,
            rank=rank,
            world_size=len(first.ranks),
            timeout=first.timeout,
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
                c10d.Backend(recipe.backend),
                c10d._world.pg_map[default][1],
                recipe.name,
                timeout=recipe.timeout,
                pg_tag=recipe.tag,
                device_id=recipe.device,
                group_desc=recipe.description,
            )
            c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(recipe.ranks)}
            groups.append(group)
        return groups

    def _forget_keys(self, generation: int) -> None:
        """Take an earlier generation's keys out of the store: every rank has left it, since all have formed a later one."""
        store = self._store
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        with contextlib.suppress(RuntimeError, AttributeError):  # a store that lists no keys keeps them
            for key in store.list_keys():
                if f"{_PREFIX}{generation}/" in key:
                    store.delete_key(key)


GROUPS = ProcessGroups()


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
    backend = group._get_backend(group._device_types[0])
    return Recipe(
        group=group,
        name=world.pg_names[group],
        ranks=tuple(sorted(places, key=places.__getitem__)),
        backend=str(world.pg_map[group][0]),
        timeout=backend.options._timeout,
        tag=tag.removeprefix(_TAGGED) if tag.startswith(_TAGGED) else "",
        description=group.group_desc,
        device=group.bound_device_id,
    )
