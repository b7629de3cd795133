"""Nodes that are lost for good, or cut off from the others and back: the messages of their processes and of their agent are held, and they run on."""

from __future__ import annotations

from tests.simulation.job import Job
from tests.simulation.network import DOWN, UP


def lose_node(job: Job, node: int) -> bool:
    """All of it is gone, and says nothing; streams stay open. False: no process of it was alive."""
    agent, on_it = job.launchers.get(node), [process for process in job.ranks if process.node == node and process.alive]
    for process in on_it:
        job.kill(process.rank, quiet=True)
    if agent is not None:
        agent.lost = True
    return bool(on_it)


def cut_off(job: Job, node: int, seconds: float, standbys: tuple[int, ...] = ()) -> bool:
    """Its ranks and its agent reach no controller but these standbys, and nothing reaches them. What ranks do with one another goes on:
    another network may carry it. False: no process of it was alive."""
    until, on_it = job.now + seconds, [process for process in job.ranks if process.node == node and process.alive]
    job.note(f"host{node} is cut off for {seconds:.3f} s{f', with the standbys {standbys}' if standbys else ''}")
    for process in on_it:
        job.struck("node cut off", process.rank)
        process.was_stopped = True
        process.route.beside = frozenset(standbys)
        process.route.hold(UP, until)
        process.route.hold(DOWN, until)
    for place in standbys:
        job.controllers[place].parted_until = until
    if (agent := job.launchers.get(node)) is not None:
        agent.cut_until = max(agent.cut_until, until)
    return bool(on_it)
