"""At its end a controller waits for ranks that may still receive the order to exit, and not for those that are lost with their node."""

from __future__ import annotations

import pytest

from tests.unit.protocol.bench import ControllerBench
from ttp.controller.core.facts.events import Tick
from ttp.controller.core.facts.membership import only_lost_nodes, renew_all_leases
from ttp.controller.core.facts.state import EXIT_WAIT_S, Exiting, Stage
from ttp.proto.messages import NO_PROCESS, AgentHello, Exit, Published, Vouch, WorkerExit

NODE, OTHERS = (2, 3), (0, 1)
PIDS = {rank: 100 + rank for rank in range(4)}


def vouch(job: ControllerBench, ranks: tuple[int, ...], *running: int) -> None:
    job.say(Vouch(ranks, tuple(PIDS[rank] if rank in running else NO_PROCESS for rank in ranks)))


def saved(
    *,
    agent_lives: bool = False,
    agent_known: bool = True,
    stopped: tuple[int, ...] = NODE,
    left: tuple[int, ...] = (0, 1, 2, 3),
) -> ControllerBench:
    """Ranks 2 and 3 of another node fall silent, and the others save and exit; return the job when these have closed their streams.

    `agent_lives`: the silent ranks' agent still reports. `agent_known`: it did before. `stopped`: which of its ranks are silent. `left`: the ranks whose streams close, of those that live."""
    job = ControllerBench()
    job.say(AgentHello("host0", OTHERS, tuple(PIDS[rank] for rank in OTHERS)))
    if agent_known:
        job.say(AgentHello("host1", NODE, tuple(PIDS[rank] for rank in NODE)))
        vouch(job, NODE, *NODE)
    alive = tuple(rank for rank in range(4) if rank not in stopped)
    for _ in range(8):
        job.wait(0.5, senders=alive)
        vouch(job, OTHERS, *OTHERS)
        if agent_lives:
            vouch(job, NODE, *(rank for rank in NODE if rank not in stopped))
    assert {line["rank"] for line in job.logged("death_seen")} == set(stopped)
    job.all_report(7, ranks=alive)
    job.all_write(job.orders())
    rank, order = job.publish_order()
    job.say(Published(rank, order.freeze_id, order.step, f"/a/iter_{order.step:07d}"))
    assert isinstance(job.state.at, Exiting) and set(job.sent(Exit)) >= set(alive)
    for rank in set(alive) & set(left):
        job.say(WorkerExit(rank, PIDS[rank], "exit code 75", 0.0))
    return job


def test_a_lost_node_is_not_waited_for() -> None:
    """No order reaches it, and no agent is there to ask anything."""
    job = saved()
    assert job.at(Stage.OVER)


def test_living_ranks_are_waited_for_beside_a_lost_node() -> None:
    job = saved(left=(0,))
    assert job.at(Stage.EXITING)
    job.say(WorkerExit(1, PIDS[1], "exit code 75", 0.0))
    assert job.at(Stage.OVER)


@pytest.mark.parametrize(
    "options",
    [{"agent_lives": True}, {"agent_lives": True, "stopped": (3,)}, {"agent_known": False}],
    ids=["all processes stopped", "one process stopped", "its agent is not known"],
)
def test_a_node_that_may_be_there_has_its_time(options: dict[str, bool]) -> None:
    """Its agent asks which ranks it may kill; one that has not come to this controller may be on its way."""
    job = saved(**options)  # type: ignore[arg-type]
    assert job.at(Stage.EXITING)
    if options.get("agent_lives"):  # it reports on, whatever runs there
        for _ in range(round(2 * EXIT_WAIT_S) - 1):
            job.wait(0.5, senders=())
            if job.at(Stage.EXITING):
                vouch(job, NODE)
        assert job.at(Stage.EXITING)
    job.take(Tick(), after=EXIT_WAIT_S)
    assert job.at(Stage.OVER)


def test_silence_while_the_controller_was_away_itself_does_not_count() -> None:
    """Leases begin anew then, and that of an agent too."""
    job = saved()
    members, settings, now = job.state.members, job.state.settings, job.now
    assert only_lost_nodes(members, now, settings)
    renewed = renew_all_leases(members, now, settings)
    assert not only_lost_nodes(renewed, now + settings.lease_s - 0.1, settings)
    assert only_lost_nodes(renewed, now + settings.lease_s, settings)


def test_a_node_whose_agent_falls_silent_as_well_is_lost_a_lease_later() -> None:
    job = saved(agent_lives=True)
    lease_s = job.state.settings.lease_s
    job.take(Tick(), after=lease_s - 0.1)
    assert job.at(Stage.EXITING)
    job.take(Tick(), after=0.1)
    assert job.at(Stage.OVER)
