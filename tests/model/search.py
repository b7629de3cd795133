"""Breadth-first search of the model's states to fixpoint: every order of everything, each state once.

`python -m tests.model.search --help`. Prints how many states, how deep, how long; a violation is printed as the shortest
story that leads to it. Owns the search only: what can happen is `world`'s.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from tests.model.world import Limits, State, World


@dataclass
class Found:
    """What a search found."""

    world: World
    states: int
    steps: int
    depth: int
    seconds: float
    violations: list[str]
    """Each with its story."""
    whole: bool
    """The fixpoint was reached: nothing was left out."""
    ends: dict[str, int]
    """How many final states there are, by outcome."""


def search(
    limits: Limits, *, most_states: int = 10**9, progress: Callable[[str], None] | None = None, world: World | None = None
) -> Found:
    """Search until every state has been seen, a violation is found, or there are `most_states`."""
    began, worked = time.monotonic(), time.process_time()
    world = world or World(limits)
    numbers: dict[State, int] = {world.first: 0}
    parents = array("I", [0])
    edges = array("I")  # pairs (from, to), for the search for cycles
    layer, depth, steps = [world.first], 0, 0
    while layer and not world.violations and len(numbers) < most_states:
        following: list[State] = []
        for state in layer:
            number = numbers[state]
            for _, after in world.successors(state):
                steps += 1
                while after not in numbers:  # a state with one way on is passed through
                    onward = world.successors(after)
                    if len(onward) != 1:
                        break
                    after, steps = onward[0][1], steps + 1
                known = numbers.get(after)
                if known is None:
                    known = numbers[after] = len(numbers)
                    parents.append(number)
                    following.append(after)
                edges.append(number)
                edges.append(known)
            if world.violations:
                break
        layer, depth = following, depth + 1
        if progress is not None and depth % 10 == 0:
            progress(f"depth {depth}: {len(numbers)} states, {len(layer)} in this layer, {time.monotonic() - began:.0f} s")
    violations = _stories(world, numbers, parents)
    if not violations and not layer:
        violations = _cycles(edges, len(numbers))
    return Found(
        world, len(numbers), steps, depth, time.monotonic() - began, violations, not layer and not violations, {}
    )


def _stories(world: World, numbers: dict[State, int], parents: array[int]) -> list[str]:
    if not world.violations:
        return []
    states = list(numbers)
    told = []
    for state, label, wrong in world.violations[:1]:
        path = [state]
        while path[-1] != world.first:
            path.append(states[parents[numbers[path[-1]]]])
        path.reverse()
        lines = [wrong]
        known = list(world.violations)
        for before, after in zip(path, path[1:], strict=False):
            lines += ["  " + describe(world, done) for done in _way(world, before, after)]
        world.violations[:] = known
        told.append("\n".join([*lines, "  " + describe(world, label)]))
    return told


def _way(world: World, before: State, after: State) -> list[tuple[object, ...]]:
    """Return the steps from one kept state to a next one, through states with one way on."""
    for label, here in world.successors(before):
        labels = [label]
        while here != after and len(onward := world.successors(here)) == 1:
            labels.append(onward[0][0])
            here = onward[0][1]
        if here == after:
            return labels
    raise AssertionError("a kept state was not reached from its parent")


def describe(world: World, label: tuple[object, ...]) -> str:
    """Return one step of a story for people."""
    match label:
        case ("gets" | "hears" as verb, rank, int(message)):
            return f"{'rank' if verb == 'gets' else 'controller hears rank'} {rank}{' gets' if verb == 'gets' else ':'} {world.messages.values[message]}"
        case (str(verb), int(rank), *_):
            return f"{verb} {rank}" if " of" in verb or "tells" in verb else f"rank {rank} {verb}"
    return " ".join(map(str, label))


def _cycles(edges: array[int], count: int) -> list[str]:
    """I11: a job that can go round for ever. What is left after taking away all that nothing leads to is a cycle."""
    incoming = array("I", bytes(4 * count))
    for at in range(1, len(edges), 2):
        incoming[edges[at]] += 1
    starts = array("I", bytes(4 * (count + 1)))
    for at in range(0, len(edges), 2):
        starts[edges[at] + 1] += 1
    for index in range(count):
        starts[index + 1] += starts[index]
    targets, place = array("I", bytes(2 * len(edges))), array("I", starts)
    for at in range(0, len(edges), 2):
        targets[place[edges[at]]] = edges[at + 1]
        place[edges[at]] += 1
    ready = [index for index in range(count) if not incoming[index]]
    taken = 0
    while ready:
        index = ready.pop()
        taken += 1
        for at in range(starts[index], starts[index + 1]):
            incoming[targets[at]] -= 1
            if not incoming[targets[at]]:
                ready.append(targets[at])
    return [] if taken == count else [f"I11: {count - taken} states lie on or behind a cycle: the job can go round for ever"]


if __name__ == "__main__":
    from tests.simulation.training import even
    import argparse
    A=argparse.ArgumentParser(); A.add_argument("--size",type=int,default=4); A.add_argument("--steps",type=int,default=2); A.add_argument("--faults",type=int,default=1)
    A.add_argument("--kinds",default="kill,exception,stream break,write failure,publish failure"); A.add_argument("--first"); A.add_argument("--ranks",default=""); A.add_argument("--hints",type=int,default=3); A.add_argument("--freeze",action="store_true"); A.add_argument("--full",action="store_true"); A.add_argument("--agentless",action="store_true")
    a=A.parse_args()
    k=tuple(a.kinds.split(","))
    found = search(
        Limits(even(a.size), steps=a.steps, faults=a.faults, hints=a.hints, later_from_freeze=a.freeze, turns=not a.full, agents=not a.agentless,
        kinds=k, first_kinds=tuple(a.first.split(",")) if a.first else k, first_ranks=tuple(map(int,a.ranks))), progress=print
    )
    print(time.process_time(), "CPU s", found.states, "states", found.steps, "steps, depth", found.depth, f"{found.seconds:.1f} s", found.whole)
    for story in found.violations:
        print(story)
    w = found.world
    print({k: len(getattr(w, k).values) for k in ("heads", "nodes", "wires", "disks", "messages", "agents")}, len(w._done), len(w._told))
