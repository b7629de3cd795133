"""Who is hit is who is informed of: launchers and nodes, named, of a rank, or drawn; and where nodes cannot be made it is said why."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ttp.chaos.cli import USAGE, main
from ttp.chaos.faults.control_socket import Peer
from ttp.chaos.faults.external import Injector
from ttp.chaos.faults.scenario import parse_scenario
from ttp.chaos.nodes.namespaces import NodesError
from ttp.chaos.observed.recorder import Record
from ttp.chaos.observed.target import Target
from ttp.chaos.verdict.fault_outcome import Firing

NODES = 3


class FakeNode:
    """A node on which one rank runs."""

    def __init__(self, name: str, rank_pid: int) -> None:
        self.name = name
        self.done: list[str] = []
        self._rank_pid = rank_pid

    def holds(self, pid: int) -> bool:
        return pid == self._rank_pid

    def unplug(self) -> None:
        self.done.append("unplug")

    def plug(self) -> None:
        self.done.append("plug")

    def power_off(self) -> None:
        self.done.append("power_off")


@pytest.fixture
def target() -> Iterator[Any]:
    """A job of three nodes whose launchers are real processes; rank r runs on node 2 - r."""
    launchers = [subprocess.Popen(["sleep", "1000"]) for _ in range(NODES)]
    nodes = [FakeNode(f"node-{'abc'[number]}", 1000 + NODES - 1 - number) for number in range(NODES)]
    yield SimpleNamespace(nodes=nodes, launchers=launchers)
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


def peers() -> dict[int, Peer]:
    return {rank: cast(Peer, SimpleNamespace(rank=rank, pid=1000 + rank)) for rank in range(NODES)}


def strike(target: Any, seed: int, **fault: Any) -> tuple[Injector, int, Firing]:
    """Strike; return the striker, the index of the node that got the order, and what was done."""
    (spec,) = parse_scenario({"faults": [fault], "nodes": NODES}, "here").faults
    striker = Injector(cast(Target, target), random.Random(seed))
    for peer in peers().values():
        striker.met(peer)
    (firing,) = striker.elsewhere(spec, Record(world_size=NODES))
    return striker, striker.node_of(firing), firing


@pytest.mark.parametrize("seed", range(6))
def test_the_launcher_that_is_named_is_the_one_that_was_killed(target: Any, seed: int) -> None:
    """Also when chance draws it: the harness starts the launcher of that node again."""
    _, index, firing = strike(target, seed, fault="kill_agent")
    killed = target.launchers[index]
    assert killed.wait(30) == -signal.SIGKILL and f"(pid {killed.pid})" in firing.whom
    assert firing.ranks == (NODES - 1 - index,)
    assert [launcher.poll() for launcher in target.launchers].count(None) == NODES - 1


def test_a_node_of_a_rank_is_where_that_rank_runs(target: Any) -> None:
    """Ranks are not in the order of the nodes."""
    for rank in range(NODES):
        striker, index, firing = strike(target, 0, fault="partition", rank=rank, for_s=5)
        node = target.nodes[index]
        assert index == NODES - 1 - rank and firing.whom == f"{node.name} #{index}"
        assert firing.ranks == tuple(range(NODES)), "either side may be cut off"
        assert node.done == ["unplug"]
        striker.undo(float("inf"))
        assert node.done == ["unplug", "plug"], "the cable is put back, whatever happens"


def test_a_lost_node_costs_its_ranks_alone(target: Any) -> None:
    """And a launcher without nodes all ranks."""
    _, _, firing = strike(target, 0, fault="lose_node", rank=1)
    assert firing.ranks == (1,) and target.nodes[1].done == ["power_off"]
    target.nodes = ()
    (spec,) = parse_scenario({"faults": [{"fault": "kill_agent"}]}, "here").faults
    (firing,) = Injector(target, random.Random(0)).elsewhere(spec, Record(world_size=NODES))
    assert firing.ranks == tuple(range(NODES))


def test_a_rank_that_is_hit_is_in_the_record_of_it(target: Any) -> None:
    """By a signal from outside."""
    process = target.launchers[0]
    (spec,) = parse_scenario({"faults": [{"fault": "kill", "rank": 1}]}, "here").faults
    peer = cast(Peer, SimpleNamespace(rank=1, pid=process.pid, lost=False))
    (firing,) = Injector(target, random.Random(0)).signal_rank(spec, peer, 4)
    assert (firing.whom, firing.step, firing.ranks) == (f"rank 1 (pid {process.pid})", 4, (1,))
    other = target.launchers[1]
    left = cast(Peer, SimpleNamespace(rank=1, pid=other.pid, lost=True))
    assert Injector(target, random.Random(0)).signal_rank(spec, left, 4) == [], "its number may be another process's"
    assert other.poll() is None
    assert process.wait(30) == -signal.SIGKILL


def test_a_disk_that_could_be_mounted_is_filled_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none could, ranks get an order."""
    monkeypatch.setattr("ttp.chaos.faults.external._fill_file", lambda path: path.write_text("full"))
    content = {"faults": [{"fault": "fill_disk", "for_s": 5}], "small_disk_mib": 64}
    (spec,) = parse_scenario(content, "here").faults
    target = SimpleNamespace(mounted=True, disk=tmp_path)
    striker = Injector(cast(Target, target), random.Random(0))
    assert not striker.by_order(spec)
    (firing,) = striker.elsewhere(spec, Record(newest_step=7))
    assert (firing.whom, firing.step, firing.ranks) == (str(tmp_path), 7, ())
    assert [path.name for path in tmp_path.iterdir()] == ["ballast"]
    striker.undo(float("inf"))
    assert not list(tmp_path.iterdir())
    target.mounted = False
    assert striker.by_order(spec)


def test_a_rank_that_runs_on_no_node_is_reported(target: Any) -> None:
    """The command may start its ranks elsewhere."""
    (spec,) = parse_scenario({"faults": [{"fault": "lose_node", "rank": 0}], "nodes": NODES}, "here").faults
    with pytest.raises(NodesError, match="rank 0 runs on none of the 3 nodes"):
        Injector(cast(Target, target), random.Random(0)).elsewhere(spec, Record())


def test_a_scenario_of_nodes_is_refused_with_the_reason_where_none_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started; the status is that of wrong usage."""
    monkeypatch.setattr("ttp.chaos.run.campaign.why_not", lambda: "not root: network namespaces need it")
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("{name: far, nodes: 2, faults: [{fault: lose_node}]}")
    assert main(["run", str(scenario), "--output", str(tmp_path / "out"), "--", "true"]) == USAGE
    logged = capsys.readouterr().out
    assert "'far': nodes: 2: not root: network namespaces need it; leave nodes out, or run it elsewhere" in logged
