"""A lost node's place in an attempt that runs: what spare nodes read of it, which one sits down, and how the lost node's agent learns of it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo

from tests.unit.launch.attempts import LineToController
from tests.unit.launch.test_fresh_store import FixedNodes
from tests.unit.launch.test_multi_endpoint import agent, free_place, quick, serve
from tests.unit.launch.test_sick_nodes import Check
from tests.unit.launch.test_spare_nodes import job
from tests.waiting import until
from ttp.identity.secret import Secret
from ttp.launch.attempts.attached_spare import AttachedSpare
from ttp.launch.attempts.context import LaunchContext, Workers
from ttp.launch.attempts.replacements import Replacements
from ttp.launch.links.controller_client import ControllerLink
from ttp.launch.rendezvous import departures, running_job, waiting_spare
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous, JobStore
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores, epoch_key
from ttp.launch.rendezvous.running_job import RunningJob, RunningNode, WasReplaced
from ttp.launch.rendezvous.spare_nodes import (
    JOINING,
    RUNNING,
    SPARE,
    Entry,
    PlaceTaken,
    read_agents,
)
from ttp.launch.rendezvous.store_failover import FailoverRendezvous
from ttp.launch.rendezvous.waiting_spare import PlaceGiven, UnfitSpare, wait_for_place
from ttp.launch.watch.death_watch import Death
from ttp.proto.messages import Replace, TakePlaces, Thaw

__all__ = ["job", "quick"]
"""Fixtures that pytest uses by themselves: a store with two nodes' entries, and short times."""

pytestmark = pytest.mark.usefixtures("agents_in_one_process")

NODES = (RunningNode(1, (0, 4, 0, 4)), RunningNode(2, (2, 4, 2, 4)))
SECRET = "ab" * 16
RUNS = RunningJob(f"127.0.0.1 4000 0 {SECRET}", 0, 1, NODES)
ORDER = TakePlaces((2, 3), 7)


def test_what_runs_is_read_as_it_was_published() -> None:
    store = HashStore()
    assert running_job.read(store, "job") is None
    running_job.publish(store, "job", RUNS)
    assert running_job.read(store, "job") == RUNS and running_job.read(store, "other") is None


@pytest.mark.parametrize(
    "entry",
    ["", "[[", "[" * 5000, "7", "{}", '{"answer": 1, "start": 0, "epoch": 1, "nodes": []}',
     '{"answer": "a", "start": -1, "epoch": 1, "nodes": []}', '{"answer": "a", "start": 0, "epoch": 1, "nodes": [[1, 0, 4]]}',
     '{"answer": "a", "start": 0, "epoch": 1, "nodes": [[]]}', '{"answer": "a", "start": 0, "epoch": 1, "nodes": {"a": 1}}'],
)  # fmt: skip
def test_an_entry_that_another_program_has_written_is_left_out(entry: str) -> None:
    store = HashStore()
    store.set("ttp/running/job", entry)
    assert running_job.read(store, "job") is None


@pytest.mark.parametrize(("ranks", "number"), [((0, 1), 0), ((2, 3), 1), ((3, 2), 1), ((3,), None), ((), None)])
def test_a_node_is_known_by_its_first_rank(ranks: tuple[int, ...], number: int | None) -> None:
    assert RUNS.number_of(ranks) == number


class Given:
    """Stands in for a spare node's connection: the test orders."""

    def __init__(self) -> None:
        self.followed: list[RunningJob] = []
        self.refused: list[str] = []
        self.closed = 0
        self.job_runs = False
        self._order: TakePlaces | None = None
        self._came = threading.Condition()

    def orders(self, order: TakePlaces) -> None:
        with self._came:
            self._order = order
            self._came.notify_all()

    def follow(self, job: RunningJob) -> None:
        self.followed.append(job)

    def order(self, within_s: float) -> TakePlaces | None:
        with self._came:
            self._came.wait_for(lambda: self._order is not None, within_s)
            return self._order

    def refuse(self, why: str) -> None:
        self._order = None
        self.refused.append(why)

    def close(self) -> None:
        self.closed += 1


class Spare:
    """A spare node that waits."""

    def __init__(self, stores: Stores, health: Check | None = None, silence_s: float = 60.0) -> None:
        self.attached, self.entry = Given(), Entry("job", "node-c")
        self.came: list[PlaceTaken | PlaceGiven | Exception] = []

        def run() -> None:
            try:
                self.came.append(wait_for_place(stores, "job", self.entry, silence_s, health, attached=self.attached))
            except Exception as error:
                self.came.append(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def ended(self) -> PlaceTaken | PlaceGiven | Exception:
        self.thread.join(30)
        (came,) = self.came
        return came


Job = tuple[Endpoint, TCPStore, Entry, Entry]


def test_a_spare_takes_the_place_that_the_controller_gives_it(job: Job) -> None:
    """While the other node's entry says that it runs: no node meets anew. What it follows is what was published, also later."""
    place, server, *_ = job
    spare = Spare(agent(place))
    until(lambda: any(each.state == SPARE for each in read_agents(server, "job")))
    assert not spare.attached.followed
    running_job.publish(server, "job", RUNS)
    until(lambda: RUNS in spare.attached.followed)
    spare.attached.orders(ORDER)
    assert spare.ended() == PlaceGiven(RUNS, 1, ORDER, place) and not spare.attached.refused
    assert server.get(epoch_key("")) == b"1"


def test_an_order_is_obeyed_while_the_store_does_not_answer(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be lost with that node."""
    place, server, *_ = job
    running_job.publish(server, "job", RUNS)
    look, hangs, free = waiting_spare._find_and_look, threading.Event(), threading.Event()
    answered: list[Any] = []

    def looks(*of: Any) -> Any:
        if answered:
            hangs.set()
            free.wait(60)
        answered.append(look(*of))
        return answered[-1]

    monkeypatch.setattr(waiting_spare, "_find_and_look", looks)
    spare = Spare(agent(place))
    assert hangs.wait(30)
    spare.attached.orders(ORDER)
    assert spare.ended() == PlaceGiven(RUNS, 1, ORDER, place) and not free.is_set()
    free.set()


def test_an_order_for_ranks_that_no_node_has_is_refused_and_the_spare_waits_on(job: Job) -> None:
    place, server, *_ = job
    running_job.publish(server, "job", RUNS)
    spare = Spare(agent(place))
    spare.attached.orders(TakePlaces((1, 2), 7))
    until(lambda: bool(spare.attached.refused))
    assert "ranks (1, 2): no node has them in attempt 0" in spare.attached.refused[0] and spare.thread.is_alive()
    departures.publish_success(server, "job", "node-a")
    spare.ended()


@pytest.mark.parametrize("sick", ["", "its disk"])
def test_a_spares_health_is_checked_before_it_sits_down(job: Job, sick: str) -> None:
    """Anew, from the order on. A sick one refuses, so that the controller need not wait."""
    place, server, *_ = job
    running_job.publish(server, "job", RUNS)
    check = Check()
    spare = Spare(agent(place), check)
    until(lambda: bool(spare.attached.followed))
    assert not check.begun
    spare.attached.orders(ORDER)
    until(lambda: len(check.begun) > 2)
    assert len(set(check.begun)) == 1 and not spare.came
    check.answer = sick
    came = spare.ended()
    if sick:
        assert isinstance(came, UnfitSpare) and spare.attached.refused == ["this node is sick: its disk"]
    else:
        assert isinstance(came, PlaceGiven) and not spare.attached.refused


def test_a_spare_looks_at_no_other_endpoint_while_the_job_runs(job: Job) -> None:
    """And takes no place by a meeting then: whoever waits there is cut off. A job that it has seen so is there, whatever its store does."""
    place, server, first, _ = job
    running_job.publish(server, "job", RUNS)
    other = free_place()
    spare = Spare(agent(place, other), silence_s=0.5)
    spare.attached.job_runs = True
    until(lambda: bool(spare.attached.followed))
    elsewhere = serve(other)
    elsewhere.set(epoch_key(""), "7")

    def looks_on(state: str) -> None:
        beat = read_agents(server, "job")[-1].beat

        def looked() -> bool:
            first.renew(server, place, state)
            return read_agents(server, "job")[-1].beat > beat + 20

        until(looked)

    looks_on(JOINING)
    assert not spare.came and not read_agents(elsewhere, "job")
    looks_on(RUNNING)
    spare.attached.job_runs = False

    def has_moved() -> bool:
        first.renew(server, place, RUNNING)  # the job is seen until the other endpoint has answered, however late
        return bool(read_agents(elsewhere, "job"))

    until(has_moved)
    departures.publish_success(elsewhere, "job", "node-a")
    spare.ended()


# --- what node 0 publishes, and what torch's agent is given ---


class Meeting(FailoverRendezvous):
    """The nodes have met: what they publish is recorded."""

    def __init__(self, store: HashStore, rank: int) -> None:
        self._inner_handler = FixedNodes(store, rank, 2)
        self.published: list[RunningJob] = []
        self.took_place = None
        self.met_as: list[tuple[int, int]] = []
        self.spare: PlaceGiven | None = None
        self.replaced = 0
        self.number = rank + 11

    @property
    def epoch(self) -> int:
        return 1

    def wait_as_spare(self, attached: object = None) -> PlaceGiven | None:
        return self.spare

    def become_spare(self) -> None:
        self.spare = PlaceGiven(RUNS, 1, ORDER, Endpoint("a", 1))

    def next_rendezvous(self) -> RendezvousInfo:
        if self.replaced:
            raise WasReplaced("another node has its place")
        return self._inner_handler.next_rendezvous()

    def publish_running(self, job: RunningJob) -> None:
        self.published.append(job)

    def met(self, start: int, size: int) -> None:
        self.met_as.append((start, size))

    def num_nodes_waiting(self) -> int:
        return 0

    @property
    def agent_number(self) -> int:
        return self.number

    def get_run_id(self) -> str:
        return "job"


def handler(inner: Meeting) -> FreshStoreRendezvous:
    return FreshStoreRendezvous(inner, "127.0.0.1", same_keys_every_round=False)


@pytest.mark.parametrize("identical", [False, True])
def test_node_0_publishes_what_runs(identical: bool) -> None:
    """Once torch's agents know their ranks; with TORCH_ELASTIC_WORKER_IDENTICAL they write none down."""
    store = HashStore()
    inner = [Meeting(store, rank) for rank in range(2)]
    nodes = [handler(each) for each in inner]
    threads = [threading.Thread(target=node.next_rendezvous) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    ranks = HashStore()
    if not identical:
        ranks.set("torchelastic/assigned_ranks/0", "[0, 5, 0, 5]")
        ranks.set("torchelastic/assigned_ranks/1", "[3, 5, 3, 5]")
    for node in nodes:
        node.publish_running(ranks, 3)
    (found,) = inner[0].published
    assert not inner[1].published and found.start == 0
    expected = [(0, 6, 0, 6), (3, 6, 3, 6)] if identical else [(0, 5, 0, 5), (3, 5, 3, 5)]
    assert [(node.agent, node.assigned) for node in found.nodes] == list(zip((11, 12), expected, strict=True))
    job_store, secret = nodes[1].decode(found)
    assert job_store == nodes[0].job_store == nodes[1].job_store and secret == nodes[0].secret


@pytest.mark.parametrize("was_replaced", [False, True])
def test_a_seated_nodes_agent_finds_its_ranks_without_a_meeting(was_replaced: bool) -> None:
    """A spare, or one that finds its own place taken as it joins."""
    inner = Meeting(HashStore(), 0)
    inner.replaced = int(was_replaced)
    if not was_replaced:
        inner.become_spare()
    node = handler(inner)
    node.attached = attached = Given()
    met = node.next_rendezvous()
    assert (met.rank, met.world_size) == (1, 2) and node.given is not None and not inner.met_as
    assert json.loads(met.store.get("torchelastic/assigned_ranks/1")) == [2, 4, 2, 4]
    assert node.job_store == JobStore("127.0.0.1", 4000, 0, "job/0") and node.secret.value.decode() == SECRET
    assert node.num_nodes_waiting() == 0 and attached.closed == int(was_replaced), "until its workers run"
    node.become_spare()
    assert node.num_nodes_waiting() == 1, "torch begins anew"


def test_a_spares_connection_ends_where_it_meets_the_others() -> None:
    inner = Meeting(HashStore(), 0)
    inner._inner_handler = FixedNodes(HashStore(), 0, 1)
    node = handler(inner)
    node.attached = attached = Given()
    node.next_rendezvous()
    assert attached.closed == 1 and node.given is None


# --- the connection ---


class Attached:
    """A spare's connection to a controller that the test is; its address is in the workers' store."""

    def __init__(self) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.server.set("ttp/controller/0", "127.0.0.1:1 5")
        self.lines: list[LineToController] = []
        self.opened: list[tuple[str, dict[int, int], int]] = []
        launching = LaunchContext(
            total_timeout_s=5.0, poll_s=0.002, open_link=self._open, request_shutdown=lambda address: None
        )
        self.spare = AttachedSpare(launching, 2, self._decode)

    def _open(self, address: str, job_id: str, pids: Mapping[int, int], workers: Workers) -> ControllerLink:
        self.opened.append((job_id, dict(pids), workers.places))
        self.lines.append(LineToController())
        return self.lines[-1]

    def _decode(self, job: RunningJob) -> tuple[JobStore, Secret]:
        if not job.answer:
            raise ValueError("invalid answer: got nothing")
        return JobStore("127.0.0.1", self.server.port, job.start, f"job/{job.start}"), Secret(SECRET.encode())


def test_a_spare_attaches_with_its_room_and_keeps_the_newest_order(caplog: pytest.LogCaptureFixture) -> None:
    """One attempt after the other; other orders are not for it."""
    bench = Attached()
    spare = bench.spare
    spare.refuse("nothing was ordered")
    spare.follow(RunningJob("", 0, 1, NODES))
    assert "this spare node takes no place in the attempt that runs: invalid answer" in caplog.text and not spare.leader
    spare.follow(RUNS)
    spare.follow(RUNS)
    until(lambda: len(bench.opened) == 1, "the connection")
    assert bench.opened == [("job/0", {}, 2)] and spare.running() == {}
    spare.take(Replace(1, 0, 7))
    assert spare.order(0.0) is None
    spare.take(ORDER)
    assert spare.order(30.0) == ORDER
    until(lambda: spare._client is not None and spare._client.connected, "the line")
    spare.refuse("this node is sick")
    assert bench.lines[0].refusals == [(2, 7, "this node is sick"), (3, 7, "this node is sick")]
    assert spare.order(0.0) is None
    spare.take(ORDER)
    assert spare._client is not None and spare._client._lost_store_level == logging.DEBUG, "no news there"
    bench.lines[0].sent_away_monotonic_s = 5.0
    assert spare.order(0.0) is None, "the ranks leave: the recovery has failed"
    bench.lines[0].sent_away_monotonic_s = None
    spare.take(ORDER)
    bench.server.set("ttp/controller/1", "127.0.0.1:2 6")
    spare.follow(RunningJob(RUNS.answer, 1, 1, NODES))
    until(lambda: len(bench.opened) == 2, "the next attempt's")
    assert spare.order(0.0) is None, "it was the last attempt's"
    spare.close()


# --- its workers ---


def test_workers_of_a_seated_node_hold_nothing_until_the_gates_open() -> None:
    """One that ends before has the recovery end at once; afterwards its end is a fault as any other."""
    controller = mock.Mock()
    replacements = Replacements(
        {2: 52, 3: 53}, None, nodes=2, watch=mock.Mock(), controller=controller, faults=mock.Mock(), memory=mock.Mock(),
        behind_shells=mock.Mock(), identities=None, copies=None, vacant=7,
    )  # fmt: skip
    assert replacements.vacant() == {2, 3} and replacements.places == 0
    replacements.take(ORDER)
    death = Death(2, 52, 0.0, 0.0, "signal SIGKILL", -9, True)
    replacements.report(death)
    (call,) = controller.replace_failed.call_args_list
    assert call.args[:2] == (2, 7) and "process 52, which was started for it, has ended" in call.args[2]
    replacements.take(Thaw(7))
    assert replacements.vacant() == set()
    replacements.report(Death(3, 53, 0.0, 0.0, "signal SIGKILL", -9, True))
    assert controller.replace_failed.call_count == 1 and controller.report.call_count == 2
