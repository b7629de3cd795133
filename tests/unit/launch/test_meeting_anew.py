"""Agents that are all here meet at once, without those that are lost; others of a broken network wait as long as torch does."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from tests.unit.launch.test_multi_endpoint import Bench, agent, free_place, quick, serve
from tests.waiting import until
from ttp.launch.rendezvous import choose, spare_nodes
from ttp.launch.rendezvous.multi_endpoint import Endpoint, epoch_key
from ttp.launch.rendezvous.spare_nodes import JOINING, LEFT, LOST_S, RUNNING, SPARE, Agent, Entry, MeetingAnew, to_meet

__all__ = ["quick"]
"""A fixture that pytest uses by itself: short times."""


def member(number: int, state: str = JOINING, start: int = 4, size: int = 3) -> Agent:
    return Agent(node=f"node-{number}", number=number, state=state, start=start, size=size, epoch=1)


NEW = Agent(node="node-9", number=9, state=JOINING)
WAITING_SPARE = Agent(node="node-8", number=8, state=SPARE)
ONE, TWO, THREE = member(1), member(2), member(3)
PAIR = member(1, size=2), member(2, size=2)


@pytest.mark.parametrize(
    ("agents", "lost", "nodes", "elsewhere", "moved", "meet"),
    [
        # two of three are here, the third is lost
        ((ONE, TWO, member(3, RUNNING)), {3}, (2, 3), True, False, (1, 2)),
        ((ONE, TWO, member(3, LEFT)), {3}, (2, 3), True, True, (1, 2)),
        # it is not known to be lost, or one that is here has not ended its workers
        ((ONE, TWO, member(3, RUNNING)), set(), (2, 3), True, False, None),
        ((ONE, member(2, RUNNING), member(3, RUNNING)), {3}, (2, 3), True, False, None),
        # all will meet by themselves
        ((ONE, TWO, THREE), set(), (2, 3), True, False, None),
        # too few
        ((ONE, TWO, member(3, RUNNING)), {3}, (3, 3), True, False, None),
        # the lost node's agent was started again: torch still has its predecessor
        ((ONE, TWO, member(3, RUNNING), NEW), {3}, (3, 3), True, False, (1, 2, 9)),
        # a spare takes the place; not one that is lost
        ((ONE, TWO, member(3, RUNNING), WAITING_SPARE), {3}, (2, 3), True, False, None),
        ((ONE, TWO, member(3, RUNNING), WAITING_SPARE), {3, 8}, (2, 3), True, False, (1, 2)),
        # a job on fewer nodes than it may have, of which none was lost
        ((member(1, size=2), member(2, size=2)), set(), (2, 3), True, False, (1, 2)),
        # one of three: the two others may meet elsewhere, but not if there is one endpoint only
        ((ONE, member(2, RUNNING), member(3, RUNNING)), {2, 3}, (1, 3), True, False, None),
        ((ONE, member(2, RUNNING), member(3, RUNNING)), {2, 3}, (1, 3), False, False, (1,)),
        # half of the nodes: the side that has kept the endpoint goes on at once, the other one waits
        ((PAIR[0], member(2, RUNNING, size=2)), {2}, (1, 2), True, False, (1,)),
        ((PAIR[0], member(2, RUNNING, size=2)), {2}, (1, 2), True, True, None),
        ((PAIR[0], NEW, member(2, RUNNING, size=2)), {2}, (1, 2), True, True, (1, 9)),
        # a new node does not make one of three a majority
        ((ONE, NEW, member(2, RUNNING), member(3, RUNNING)), {2, 3}, (1, 3), True, False, None),
        # before the first attempt torch's rules apply
        ((member(1, start=-1), member(2, start=-1)), set(), (1, 3), True, False, None),
        # this agent itself counts as lost: it was stopped
        ((ONE, TWO, member(3, RUNNING)), {1, 3}, (1, 3), True, False, None),
    ],
)
def test_who_meets_at_once(
    agents: tuple[Agent, ...],
    lost: set[int],
    nodes: tuple[int, int],
    elsewhere: bool,
    moved: bool,
    meet: tuple[int, ...] | None,
) -> None:
    least, most = nodes
    found = to_meet(agents, lost, agents[0], epoch=1, min_nodes=least, max_nodes=most, elsewhere=elsewhere, moved=moved)
    assert found == meet


def test_under_a_new_epoch_torch_waits_for_none_that_is_lost() -> None:
    """A spare has taken the place, and begun it: all that are here meet by themselves. Where they are fewer, they need not wait for more."""
    here, gone = (ONE, TWO, NEW), member(3, RUNNING)
    for epoch, most, meet in ((1, 3, (1, 2, 9)), (2, 3, None), (2, 4, (1, 2, 9))):
        found = to_meet((*here, gone), {3}, ONE, epoch=epoch, min_nodes=2, max_nodes=most, elsewhere=True, moved=False)
        assert found == meet


class Job:
    """Two agents of a job, of which one is lost, and the first one's part in a meeting."""

    def __init__(self, waits_for_more: bool = False, rank: int = 0, max_nodes: int = 2) -> None:
        self.place = free_place()
        self.server = serve(self.place)
        self.server.set(epoch_key(""), "1")
        self.stores = agent(self.place)
        assert self.stores.find(patient=False) == self.place
        self.entries = Entry("job", "node-a"), Entry("job", "node-b")
        for entry in self.entries:
            entry.met(0, 2, 1)
            entry.renew(self.server, self.place, RUNNING)
        self.meeting = MeetingAnew(self.stores, "job", self.entries[0], 1, max_nodes, waits_for_more)
        self.meeting.met(self.place, rank)
        self.meeting.begin(self.place, 1, 100.0)

    def looks(self, *moments_s: float) -> bool:
        """Return whether the last of these looks begins a meeting, and no earlier one does."""
        found = []
        for moment in moments_s:
            self.entries[0].renew(self.server, self.place, JOINING)
            found.append(self.meeting.look(self.place, self.stores.epoch, moment))
        assert not any(found[:-1])
        return found[-1]


def test_a_survivor_meets_alone_once_the_other_is_silent() -> None:
    """By its own clock, since it waits. The meeting is for this agent, and for one time."""
    job = Job()
    assert job.looks(100.0, 100.0 + LOST_S - 0.1) is False
    assert job.looks(100.0 + LOST_S) is True and job.server.get(epoch_key("")) == b"2"
    assert job.meeting.begin(job.place, 2, 105.0) == 1
    job.meeting.met(job.place, 0)
    assert job.meeting.is_over(job.place, 2) and not job.meeting.is_over(job.place, 3)


def test_a_meeting_that_is_under_way_is_begun_again_only_if_one_of_its_agents_is_lost() -> None:
    """Not for one that comes late, and waits for room: the others may have met already."""
    job = Job(max_nodes=3)
    third = Entry("job", "node-c")
    third.renew(job.server, job.place, JOINING)
    assert job.looks(100.0) is False
    third.renew(job.server, job.place, JOINING)
    assert job.looks(100.0 + LOST_S) is True and job.stores.meeting_of(job.place, 2) == "1 3"
    assert job.meeting.begin(job.place, 2, 100.0 + LOST_S) == 2
    Entry("job", "node-d").renew(job.server, job.place, JOINING)
    third.renew(job.server, job.place, JOINING)
    assert job.looks(101.0 + LOST_S) is False
    third.renew(job.server, job.place, LEFT)
    assert job.looks(102.0 + LOST_S) is True and job.stores.meeting_of(job.place, 3) == "1 4"


def test_an_agent_that_is_not_among_those_that_meet_waits_for_room() -> None:
    job = Job()
    assert job.looks(100.0, 100.0 + LOST_S) is True
    late = MeetingAnew(job.stores, "job", job.entries[1], 1, 2, False)
    assert late.begin(job.place, 2, 105.0) == 0
    assert late.waits(job.place, 105.0), "it would take the place of the one that has not joined yet"
    job.entries[0].renew(job.server, job.place, RUNNING)
    assert not late.waits(job.place, 106.0), "its wait in the rendezvous is what they make room for"
    late.met(job.place, 1)
    assert not late.is_over(job.place, 2)


def test_no_handler_is_made_for_an_agent_before_those_that_meet_have_met() -> None:
    job = Job()
    assert job.looks(100.0, 100.0 + LOST_S) is True
    job.server.set(epoch_key("job"), "2")
    bench = Bench(job.place)
    failover = bench.store_failover
    members = Entry("job", "node-a")
    members.renew(job.server, job.place, JOINING)
    failover._stores.meeting_of = lambda place, epoch: str(members.agent.number)  # type: ignore[method-assign]
    looks: list[bool] = []
    waits = failover._anew_meeting.waits

    def noted(place: Endpoint, now_s: float) -> bool:
        members.renew(job.server, job.place, JOINING if len(looks) < 3 else RUNNING)
        looks.append(waits(place, now_s))
        return looks[-1]

    failover._anew_meeting.waits = noted  # type: ignore[method-assign]
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    assert looks == [True, True, True, False]
    bench.made[0].joined.set()
    until(lambda: bool(came))
    failover.shutdown()


def test_it_waits_for_none_that_is_lost_before_it_has_joined() -> None:
    job = Job()
    assert job.looks(100.0, 100.0 + LOST_S) is True
    late = MeetingAnew(job.stores, "job", job.entries[1], 1, 2, False)
    late.begin(job.place, 2, 105.0)
    assert late.waits(job.place, 105.0) and late.waits(job.place, 104.9 + LOST_S)
    assert not late.waits(job.place, 105.1 + LOST_S)
    job.server.set(epoch_key(""), "3")
    late.begin(job.place, 3, 110.0)
    assert not late.waits(job.place, 110.0), "an epoch for all"


def test_an_agent_that_has_met_none_reads_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first start of a large job each one would read those of all."""
    job = Job()
    new = MeetingAnew(job.stores, "job", Entry("job", "node-c"), 1, 2, False)
    monkeypatch.setattr(spare_nodes, "read_agents", None)
    assert new.begin(job.place, 1, 100.0) == 0 and new.look(job.place, 1, 200.0) is False
    assert not new.waits(job.place, 200.0)


def test_a_meeting_that_has_begun_as_it_is_joined_is_joined_under_its_own_epoch() -> None:
    """A drained node, or fewer nodes than the job may have: no entry is silent. Else the handler of the older epoch would be counted as another node."""
    place = free_place()
    server = serve(place)
    server.set(epoch_key("job"), "1")
    bench = Bench(place)
    failover = bench.store_failover
    failover._anew_meeting._min_nodes, failover._anew_meeting._max_nodes = 1, 2
    failover.met(0, 1)
    failover._anew_meeting.met(place, 0)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    assert (failover._epoch, failover._stores.epoch, bench.made[0].nodes) == (2, 2, 1)
    bench.made[0].joined.set()
    until(lambda: bool(came))
    failover.shutdown()


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ({"waits_for_more": True}, False),
        ({"rank": spare_nodes.LOOKERS}, False),
        ({"rank": spare_nodes.LOOKERS - 1}, True),
    ],
    ids=["the job says how long it waits", "another agent looks", "this one looks"],
)
def test_who_begins_a_meeting(options: dict[str, int], begins: bool) -> None:
    assert Job(**options).looks(100.0, 100.0 + LOST_S) is begins  # type: ignore[arg-type]


def test_the_agent_that_serves_the_store_looks_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(rank=spare_nodes.LOOKERS)
    monkeypatch.setattr(job.stores, "serves", lambda place: True)
    assert job.looks(100.0, 100.0 + LOST_S) is True


@pytest.mark.parametrize("given", [{}, {"last_call_timeout": "20"}], ids=["not given", "given"])
def test_a_job_that_gives_the_last_call_timeout_waits_for_more_nodes_so_long(given: dict[str, str]) -> None:
    place, configs = str(free_place()), dict(given)
    config = LaunchConfig(1, 2, 1, run_id="j", rdzv_backend="c10d", rdzv_endpoint=place, rdzv_configs=configs)
    made = choose.make_failover(config)
    assert made._anew_meeting._waits_for_more is bool(given) and made._anew_meeting._min_nodes == 1
    made.shutdown()


@pytest.mark.parametrize(
    ("given", "moved", "waits_s"), [({}, False, None), ({}, True, 45), ({"last_call_timeout": "20"}, True, 20)]
)
def test_nodes_that_have_moved_wait_for_more_as_long_as_torch_would_at_the_old_endpoint(
    given: dict[str, str], moved: bool, waits_s: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may have gone on there at once, and these may be what was cut off."""
    made: list[RendezvousParameters] = []
    monkeypatch.setattr(choose, "make_c10d", lambda parameters, secret: made.append(parameters))
    place = free_place()
    configs = dict(given)
    config = LaunchConfig(1, 2, 1, run_id="j", rdzv_backend="c10d", rdzv_endpoint=str(place), rdzv_configs=configs)
    failover = choose.make_failover(config)
    failover._make(place, 1, 0, moved)
    failover._make(place, 2, 1, moved)
    assert [parameters.get_as_int("last_call_timeout") for parameters in made] == [waits_s, waits_s]
    assert [(parameters.min_nodes, parameters.max_nodes) for parameters in made] == [(1, 2), (1, 1)]
    assert [parameters.run_id for parameters in made] == ["j", "j@2"], (
        "of the epoch of this join, whatever has begun since"
    )
    failover.shutdown()


def test_whether_the_nodes_have_moved_is_known() -> None:
    job = Job()
    assert not job.meeting.moved(job.place) and job.meeting.moved(Endpoint("node-c", 1))
    assert not MeetingAnew(job.stores, "job", job.entries[0], 1, 2, False).moved(job.place), "it has met none"


def test_after_a_move_those_that_come_one_by_one_are_waited_for() -> None:
    """Their entries are not there yet: that does not make them lost."""
    job = Job(max_nodes=3)
    job.entries[1].renew(job.server, job.place, LEFT)
    job.meeting.met(Endpoint("node-c", 1), 0)
    job.meeting.begin(job.place, 1, 100.0)
    assert job.looks(100.0, 100.0 + LOST_S - 0.1) is False


def test_agents_that_were_counted_join_a_rendezvous_of_so_many() -> None:
    """The next one is for all again: a node that has come since has a place."""
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    server.set(f"{epoch_key('')}/2", "1 7")
    server.set(epoch_key(""), "2")
    until(lambda: len(bench.made) == 2)
    assert [handler.nodes for handler in bench.made] == [0, 2]
    bench.made[1].joined.set()
    bench.thread.join(30)
    assert len(came) == 1
    bench.join()
    until(lambda: len(bench.made) == 3)
    assert bench.made[2].nodes == 0 and server.get(epoch_key("")) == b"3"
    bench.made[2].joined.set()
    bench.thread.join(30)
    bench.store_failover.shutdown()
