"""Spare nodes: whose place is free, and what a spare does until then."""

from __future__ import annotations

import sys
import threading

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from tests.unit.launch.test_multi_endpoint import Bench, agent, free_place, quick, serve
from tests.waiting import until
from ttp.errors import ConfigError
from ttp.launch.arguments import make_parser, parse
from ttp.launch.hosts.topology import choose_rendezvous, explicit_arguments
from ttp.launch.main import main
from ttp.launch.msrun import apply_msrun
from ttp.launch.rendezvous import departures, multi_endpoint, spare_nodes, waiting_spare
from ttp.launch.rendezvous.choose import check_spare_node
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores, epoch_key
from ttp.launch.rendezvous.spare_nodes import (
    JOINING,
    LEFT,
    LOST_S,
    RUNNING,
    SPARE,
    Agent,
    Entry,
    PlaceTaken,
    Silence,
    place_to_take,
    read_agents,
)
from ttp.launch.rendezvous.waiting_spare import wait_for_place

__all__ = ["quick"]
"""A fixture that pytest uses by itself: short times."""


def member(number: int, state: str, start: int = 4, size: int = 3) -> Agent:
    return Agent(node=f"node-{number}", number=number, state=state, start=start, size=size, epoch=1)


def spare(number: int) -> Agent:
    return Agent(node=f"node-{number}", number=number, state=SPARE)


NEW = Agent(node="node-9", number=9, state=JOINING)
"""An ordinary agent that has just been started: of a lost node, for instance."""


@pytest.mark.parametrize(
    ("agents", "lost", "own", "taken"),
    [
        ([member(1, JOINING), member(2, RUNNING), member(3, JOINING), spare(5)], {2}, 5, "node-2"),
        ([member(1, JOINING), member(2, LEFT), member(3, RUNNING), spare(5)], {2}, 5, "node-2"),
        # no node of the job waits: it runs, or none remains
        ([member(1, RUNNING), member(2, RUNNING), member(3, RUNNING), spare(5)], {2}, 5, ""),
        ([member(1, JOINING), member(2, JOINING), member(3, JOINING), spare(5)], {1, 2, 3}, 5, ""),
        # late, but there: an agent that still ends its workers
        ([member(1, JOINING), member(2, RUNNING), member(3, JOINING), spare(5)], set(), 5, ""),
        # before the first attempt, and before another spare has gone on
        ([NEW, spare(5)], set(), 5, ""),
        # the lost node's agent has been started again, or another one has come
        ([member(1, JOINING), member(2, RUNNING), member(3, JOINING), spare(5), NEW], {2}, 5, ""),
        # places go to spares in order
        ([member(1, JOINING), member(2, RUNNING), member(3, JOINING), spare(5), spare(6)], {2}, 6, ""),
        ([member(1, JOINING), member(2, RUNNING), member(3, JOINING), spare(5), spare(6)], {2, 5}, 6, "node-2"),
        ([member(1, JOINING), member(2, RUNNING), member(3, RUNNING), spare(5), spare(6)], {2, 3}, 6, "node-3"),
        ([member(1, JOINING), member(2, RUNNING, start=3), member(3, JOINING), spare(5)], {2}, 5, "a lost node"),
        # entries of an earlier job of the same name, all of whose agents are gone
        (
            [member(7, RUNNING, start=9), member(1, JOINING), member(2, LEFT), member(3, RUNNING), spare(5)],
            {7, 2},
            5,
            "node-2",
        ),
        (
            [member(7, RUNNING, start=4), member(1, JOINING), member(2, LEFT), member(3, RUNNING), spare(5)],
            {7, 2},
            5,
            "node-2",
        ),
        ([member(1, JOINING), member(2, RUNNING), member(3, JOINING), Agent(node="node-5", number=5)], {2}, 5, ""),
    ],
)
def test_whose_place_a_spare_takes(agents: list[Agent], lost: set[int], own: int, taken: str) -> None:
    found = place_to_take(agents, lost, own)
    assert (found.node if found is not None else "") == taken


@pytest.mark.parametrize(
    ("agents", "own", "gone_with_store", "taken"),
    [
        ([member(1, JOINING), spare(5)], 5, "node-2", "node-2"),
        ([member(1, JOINING), spare(5), spare(6)], 6, "node-2", ""),
        ([member(1, JOINING), spare(5)], 5, "", ""),
        ([member(1, JOINING), spare(5)], 5, None, "a lost node"),
        # that node's agent is here: it has been started again, or was only cut off
        ([member(1, JOINING), member(2, JOINING), spare(5)], 5, "node-2", ""),
        ([member(1, RUNNING), spare(5)], 5, "node-2", ""),
    ],
)
def test_after_a_move_the_place_of_the_node_with_the_lost_store_is_free_at_once(
    agents: list[Agent], own: int, gone_with_store: str | None, taken: str
) -> None:
    """Other nodes may be on their way to the new store."""
    found = place_to_take(agents, set(), own, gone_with_store=gone_with_store)
    assert (found.node if found is not None else "") == taken


def test_an_entry_has_whether_the_store_is_its_agents_own() -> None:
    here, there, store = Endpoint("a", 1), Endpoint("b", 1), HashStore()
    entry = Entry("job", "node-a", lambda place: place == here)
    entry.renew(store, there, RUNNING)
    assert [each.serves for each in read_agents(store, "job")] == [0]
    entry.renew(store, here, RUNNING)
    assert [each.serves for each in read_agents(store, "job")][-1] == 1


def test_an_agent_is_lost_once_its_entry_has_not_been_renewed_for_a_while() -> None:
    """By this agent's own clock; one that has left is lost at once."""
    silence = Silence(LOST_S)
    first, second = Agent(node="a", number=1, beat=7), Agent(node="b", number=2, beat=3)
    assert silence.of([first, second], 100.0) == set()
    again = Agent(node="a", number=1, beat=8)
    assert silence.of([again, second], 100.0 + LOST_S - 0.1) == set()
    assert silence.of([again, second], 100.0 + LOST_S) == {2}
    assert silence.of([again, Agent(node="b", number=2, beat=4)], 100.0 + LOST_S + 1.0) == set()
    assert silence.of([Agent(node="a", number=1, beat=9, state=LEFT)], 100.0 + LOST_S + 1.0) == {1}


@pytest.mark.parametrize(
    "entry", ["", "[]", "{}", "[" * 5000, '{"node": 1}', '{"node": "a", "state": "spare", "number": "1"}', "\xff"]
)
def test_what_is_not_an_entry_is_left_out(entry: str) -> None:
    """The others count as ever: a spare still finds its place."""
    store, place = HashStore(), Endpoint("node-a", 1)
    first, second = Entry("job", "node-a"), Entry("job", "node-b")
    first.renew(store, place, JOINING)
    store.set(f"ttp/agents/job/{store.add('ttp/agents/job', 1)}", entry)
    second.renew(store, place, SPARE)
    assert [agent.node for agent in read_agents(store, "job")] == ["node-a", "node-b"]
    assert read_agents(store, "job")[1] == second.agent


def test_a_count_that_another_program_has_set_delays_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be as high as an integer can be."""
    monkeypatch.setattr(spare_nodes, "MOST_AGENTS", 50)
    store, place = HashStore(), Endpoint("node-a", 1)
    first = Entry("job", "node-a")
    first.renew(store, place, JOINING)
    store.set("ttp/agents/job", str(2**62))
    store.set("ttp/agents/job/51", store.get("ttp/agents/job/1").decode())
    assert [agent.node for agent in read_agents(store, "job")] == ["node-a"]
    store.set("ttp/agents/job", "0")
    first.renew(store, place, JOINING)
    assert [agent.number for agent in read_agents(store, "job")] == [1]


def test_an_entry_is_written_again_into_a_store_that_was_restarted() -> None:
    """And into another store, under the next number there."""
    here, there = Endpoint("a", 1), Endpoint("b", 1)
    first, second = Entry("j", "node-a"), Entry("j", "node-b")
    store = HashStore()
    for entry in (first, second, first):
        entry.renew(store, here, RUNNING)
    second.met(3, 2, 1)
    second.renew(store, here, JOINING)
    assert [(each.node, each.state, each.beat, each.start) for each in read_agents(store, "j")] == [
        ("node-a", RUNNING, 2, -1),
        ("node-b", JOINING, 2, 3),
    ]
    for place in (here, there):
        store = HashStore()
        second.renew(store, place, JOINING)
        assert [(each.node, each.number) for each in read_agents(store, "j")] == [("node-b", 1)]


def test_the_nodes_meet_again_under_one_epoch_however_many_spares_begin_it() -> None:
    place = free_place()
    server = serve(place)
    server.set(epoch_key(""), "1")
    spares = [agent(place), agent(place)]
    for each in spares:
        assert each.find_in_use() == place
    for each in spares:
        each.begin_anew(place, 1)
        each.begin_anew(place, 1)
    assert [each.epoch for each in spares] == [2, 2] and server.get(epoch_key("")) == b"2"


def test_a_spare_opens_no_store() -> None:
    """One that is not in use yet waits for the job's own nodes."""
    place = free_place()
    server = serve(place)
    assert agent(place).find_in_use() is None and not server.check([epoch_key("")])


def test_a_node_that_joins_does_so_anew_when_a_spare_takes_a_place() -> None:
    """What it had begun is abandoned: the lost node is a participant there."""
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    server.set(epoch_key(""), "2")
    until(lambda: len(bench.made) == 2)
    bench.made[1].joined.set()
    bench.thread.join(30)
    assert came and bench.store_failover.num_nodes_waiting() == 0
    server.set(epoch_key(""), "3")
    until(lambda: bench.store_failover.num_nodes_waiting() == 1)  # a place was taken though this node runs
    bench.store_failover.shutdown()


class Waits:
    """A spare in `wait_for_place`, and what comes of it."""

    def __init__(self, stores: Stores, silence_s: float = 60.0) -> None:
        self.taken: list[PlaceTaken] = []
        self.raised: list[Exception] = []

        def run() -> None:
            try:
                taken = wait_for_place(stores, "job", Entry("job", "node-c"), silence_s)
                assert isinstance(taken, PlaceTaken)
                self.taken.append(taken)
            except Exception as error:
                self.raised.append(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> tuple[Endpoint, TCPStore, Entry, Entry]:
    """A store in use, and the entries of a job's two nodes."""
    monkeypatch.setattr(waiting_spare, "ROUND_S", 0.02)
    monkeypatch.setattr(waiting_spare, "LOST_S", 0.3)
    place = free_place()
    server = serve(place)
    server.set(epoch_key(""), "1")
    entries = Entry("job", "node-a"), Entry("job", "node-b")
    for entry in entries:
        entry.met(0, 2, 1)
        entry.renew(server, place, RUNNING)
    return place, server, *entries


def test_a_spare_waits_until_a_node_is_missed(job: tuple[Endpoint, TCPStore, Entry, Entry]) -> None:
    """While the other node waits; then all meet anew."""
    place, server, first, _ = job
    stores = agent(place)
    waits = Waits(stores)
    until(lambda: any(each.state == SPARE for each in read_agents(server, "job")))
    first.renew(server, place, RUNNING)

    def waiting() -> bool:
        first.renew(server, place, JOINING)
        return bool(waits.taken)

    until(waiting)
    assert waits.taken == [PlaceTaken("node-c", "node-b")] and str(waits.taken[0]).startswith("node-c, a spare, takes")
    assert stores.epoch == 2 and server.get(epoch_key("")) == b"2"


def test_after_a_move_to_another_store_a_spare_waits_for_the_nodes_to_come(
    job: tuple[Endpoint, TCPStore, Entry, Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is there first: the others are not lost."""
    monkeypatch.setattr(waiting_spare, "LOST_S", 1e9)
    other = free_place()
    server = serve(other)
    server.set(epoch_key(""), "2")
    _, _, first, _ = job
    first.renew(server, other, JOINING)
    waits = Waits(agent(job[0], other))
    until(
        lambda: (
            any(each.state == SPARE and each.beat > 20 for each in read_agents(server, "job"))
            or not waits.thread.is_alive()
        )
    )
    assert waits.taken == [] and waits.thread.is_alive()
    departures.publish_success(server, "job", "node-a")
    waits.end()


def test_a_spare_ends_with_its_job(job: tuple[Endpoint, TCPStore, Entry, Entry]) -> None:
    """Well with its success, with its reason when it has failed, and with a failure when nothing of it remains."""
    place, server, *_ = job
    waits = Waits(agent(place), silence_s=0.5)
    waits.end()
    (error,) = waits.raised
    assert isinstance(error, RendezvousTimeoutError) and "no node of the job 'job' was seen at" in str(error)
    departures.publish_success(server, "job", "node-a")
    waits = Waits(agent(place))
    waits.end()
    assert [type(error) for error in waits.raised] == [RendezvousGracefulExitError]
    departures.publish_over(server, "job", "node-b: exit code 3")
    waits = Waits(agent(place))
    waits.end()
    (error,) = waits.raised
    assert isinstance(error, RendezvousClosedError) and "the job 'job' is over: node-b: exit code 3" in str(error)


def test_a_spare_before_its_job_has_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store answers, then one in which no node of the job is."""
    monkeypatch.setattr(waiting_spare, "ROUND_S", 0.02)
    monkeypatch.setattr(multi_endpoint, "CONNECT_S", 0.2)
    place = free_place()
    waits = Waits(agent(place), silence_s=0.1)
    server = serve(place)
    server.set(epoch_key(""), "1")
    until(
        lambda: (
            any(each.state == SPARE and each.beat > 20 for each in read_agents(server, "job"))
            or not waits.thread.is_alive()
        )
    )
    assert waits.thread.is_alive()
    departures.publish_over(server, "job", "x")
    waits.end()


def test_a_node_that_leaves_says_so_once() -> None:
    """Its place is free from then on; the launcher's own end does not publish it again."""
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    bench.thread.join(30)
    bench.store_failover.leave("node-a: x")
    bench.store_failover.leave("node-a: again")
    assert departures.departures_after(server, "job", 0) == ("node-a: x",)
    assert [each.state for each in read_agents(server, "job")] == [LEFT]


PLACE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:29400")


@pytest.mark.parametrize(
    ("options", "got"),
    [
        (("--nnodes", "2"), "--rdzv-backend static"),
        (("--nnodes", "2", "--node-rank", "1", "--master-addr", "node-a"), "--rdzv-backend static"),
        (("--nnodes", "2", "--rdzv-backend", "c10d"), "no --rdzv-endpoint that other nodes know"),
        (("--nnodes", "2", *PLACE, "--rdzv-conf", "store_type=file"), "--rdzv-conf store_type=file"),
        (PLACE, "a job on one node (--nnodes 1)"),
        (("--standalone",), "a job on one node (--nnodes 1)"),
        (("--worker_num", "4", "--local_worker_num", "2", "--node_rank", "1"), "--rdzv-backend static"),
    ],
)
def test_a_spare_where_no_nodes_meet_is_refused_in_one_line(options: tuple[str, ...], got: str) -> None:
    """With what to do instead."""
    with pytest.raises(ConfigError, match=r"^invalid --spare-node: got it with ") as raised:
        checked(*options, "--spare-node")
    text = str(raised.value)
    assert f"got it with {got}, expected several nodes" in text and "\n" not in text
    checked(*options)


def checked(*words: str) -> None:
    args = parse([*words, "train.py"])
    apply_msrun(args, explicit_arguments(make_parser, [*words, "train.py"]))
    choose_rendezvous(args)
    check_spare_node(args)


@pytest.mark.parametrize(
    "options",
    [
        ("--nnodes", "2:3", *PLACE),
        ("--worker_num", "4", "--local_worker_num", "2", "--master_addr", "node-a"),
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a,node-b"),
    ],
)
def test_a_spare_of_nodes_that_meet_by_c10d_is_accepted(options: tuple[str, ...]) -> None:
    checked(*options, "--spare_node")


def test_plain_torchrun_has_no_spare(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It would join as any other node."""
    monkeypatch.setenv("ENABLE_TTP", "False")
    monkeypatch.setattr("sys.stderr", sys.__stderr__)  # torch's decorator of `main` needs its descriptor
    with pytest.raises(SystemExit):
        main([*PLACE, "--nnodes", "2", "--spare-node", "train.py"])
    assert "invalid --spare-node: got it with ENABLE_TTP=False" in capfd.readouterr().err
