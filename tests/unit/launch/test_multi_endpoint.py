"""The agents use one of several endpoints, move to the next when it is lost, and never hang on it."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from tests.ports import free_port
from tests.waiting import until
from ttp.errors import ConfigError
from ttp.launch.rendezvous import choose, departures, multi_endpoint, node_polls, store_failover
from ttp.launch.rendezvous.multi_endpoint import ANSWER_S, Endpoint, Stores, parse_endpoints, why_not_reached
from ttp.launch.rendezvous.store_failover import FailoverRendezvous


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store_failover, node_polls, multi_endpoint):
        monkeypatch.setattr(module, "ROUND_S", 0.05)


def free_place() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


def serve(place: Endpoint) -> TCPStore:
    return TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)


def agent(*places: Endpoint) -> Stores:
    return Stores(places, hosting=False)


def test_endpoints_are_a_list_in_order() -> None:
    assert parse_endpoints("a, b:5") == (Endpoint("a", 29400), Endpoint("b", 5))


def test_an_address_of_the_newer_kind_is_taken_as_torchrun_takes_it() -> None:
    """In brackets, with a port or without; it is written in brackets again."""
    places = parse_endpoints("[::1]:29401,[fe80::2]")
    assert places == (Endpoint("::1", 29401), Endpoint("fe80::2", 29400)) and str(places[0]) == "[::1]:29401"


@pytest.mark.parametrize("text", ["", "a,,b", "a:x", "a:70000", "a:1,a:1", ":29400"])
def test_an_invalid_list_is_an_error_with_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"invalid --rdzv-endpoint: got .*expected"):
        parse_endpoints(text)


def test_an_agent_keeps_a_store_at_its_own_places() -> None:
    """Others reach it until it is closed."""
    place = free_place()
    own = Stores((Endpoint("192.0.2.1", 1), place))
    assert agent(place).find(patient=False) == place
    own.close()


def test_a_place_whose_name_is_known_late_is_served_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server may lag behind: every agent, and the one that is meant, looks again."""
    place, known = free_place(), [False]
    monkeypatch.setattr(multi_endpoint, "is_own_address", lambda host: known[0])
    own = Stores((place,))
    assert own.find(patient=True) is None and own.find(patient=True) is None
    known[0] = True
    until(lambda: own.find(patient=True) == place)
    own.close()


@pytest.mark.parametrize(("hosting", "keeps"), [(None, False), (True, True), (False, False)])
def test_is_host_says_who_keeps_the_store_of_an_address_that_is_not_its_own(hosting: bool | None, keeps: bool) -> None:
    """The address may be a virtual one, or a container's published port: it leads here all the same."""
    place = Endpoint("198.51.100.2", free_place().port)
    own = Stores((place,), hosting=hosting)
    assert (agent(Endpoint("127.0.0.1", place.port)).look(Endpoint("127.0.0.1", place.port)) == 0) is keeps
    own.close()


def test_is_host_is_about_the_first_place_alone() -> None:
    """The others are kept by those whose address they are."""
    first, second = Endpoint("198.51.100.2", free_place().port), Endpoint("198.51.100.1", free_place().port)
    own = Stores((first, second, here := free_place()), hosting=True)
    seen = [Endpoint("127.0.0.1", place.port) for place in (first, second, here)]
    assert [agent(place).look(place) for place in seen] == [0, None, 0]
    own.close()


@pytest.mark.parametrize(("given", "hosting"), [("1", True), ("no", False), (None, None)])
def test_is_host_is_read_as_torchrun_reads_it(given: str | None, hosting: bool | None) -> None:
    """Not given: by the address."""
    configs = {} if given is None else {"is_host": given}
    place = free_place()
    config = LaunchConfig(1, 2, 1, run_id="j", rdzv_backend="c10d", rdzv_endpoint=str(place), rdzv_configs=configs)
    made = choose.make_failover(config)
    assert made._stores._hosting is hosting
    made.shutdown()


def test_a_bad_word_for_is_host_is_refused() -> None:
    """In torch's own words."""
    config = LaunchConfig(
        1, 2, 1, run_id="j", rdzv_backend="c10d", rdzv_endpoint="a:1", rdzv_configs={"is_host": "maybe"}
    )
    with pytest.raises(ValueError, match="'is_host' does not represent a valid boolean value"):
        choose.make_failover(config)


def test_the_first_place_is_opened_and_all_meet_there() -> None:
    places = free_place(), free_place()
    servers = [serve(place) for place in places]
    one, two = agent(*places), agent(*places)
    assert one.find(patient=True) == places[0] == two.find(patient=True)
    assert one.epoch == two.epoch == 1 and servers


def test_the_first_place_is_waited_for_at_the_start() -> None:
    """Its node may take longer to come up; when it does not come, the next one will do."""
    places = free_place(), free_place()
    server = serve(places[1])
    one = agent(*places)
    assert one.find(patient=True) is None
    assert one.find(patient=False) == places[1] and server


def test_when_the_store_is_lost_all_meet_in_the_next_under_a_higher_number() -> None:
    """Also one that comes back, whose list begins with its own, empty, store."""
    places = free_place(), free_place(), free_place()
    servers = {place: serve(place) for place in places}
    one, two = agent(*places), agent(*places)
    assert one.find(patient=True) == two.find(patient=True) == places[0]
    del servers[places[0]]
    assert one.find(patient=False) == two.find(patient=False) == places[1]
    assert one.epoch == two.epoch == 2
    servers[places[0]] = serve(places[0])
    back = agent(*places)
    assert back.find(patient=True) == places[1] and back.epoch == 2


def test_one_that_was_cut_off_learns_that_the_others_have_moved_on() -> None:
    """Its own store never went away: it is in use, under a lower number."""
    places = free_place(), free_place()
    servers = [serve(place) for place in places]
    cut, other = agent(*places), agent(*places)
    assert cut.find(patient=True) == other.find(patient=True) == places[0]
    other.epoch = 2  # what it met under since, where `cut` could not look
    TCPStore(places[1].host, places[1].port, is_master=False).set(multi_endpoint.epoch_key(""), "3")
    until(lambda: cut.newer_than(places[0]) == places[1])  # what does not answer at once is taken in a later look
    until(lambda: cut.find(patient=False) == places[1])
    assert other.find(patient=False) == places[1] and servers


def test_a_lone_place_that_comes_back_empty_is_opened_again() -> None:
    place = free_place()
    servers = [serve(place)]
    one = agent(place)
    assert one.find(patient=True) == place
    servers.clear()
    assert one.find(patient=False) is None
    servers.append(serve(place))
    until(lambda: one.find(patient=False) == place)  # one that gave no answer is not waited for
    assert one.epoch == 2


@contextlib.contextmanager
def deaf() -> Iterator[Endpoint]:
    """A place that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield Endpoint("127.0.0.1", server.getsockname()[1])


def test_why_a_place_does_not_answer_is_known() -> None:
    """A dead host, a mistyped name, an invalid one, and a store that answers again."""
    place = free_place()
    one = agent(place)
    assert one.look(place) is None and one.trouble() == f"{place}: connection refused"
    server = serve(place)
    assert one.look(place) == 0 and one.trouble() == "" and server
    assert "'nosuch.invalid' does not resolve (" in why_not_reached(Endpoint("nosuch.invalid", 1), 1.0)
    assert why_not_reached(Endpoint("a" * 70, 1), 1.0).startswith("invalid host name: ")


def test_a_place_that_never_answers_is_asked_as_long_as_there_is_time() -> None:
    """An answer may take 30 s, but not longer than the remaining time."""
    with deaf() as place:
        one = agent(place)
        began = time.monotonic()
        assert one.find(patient=False, within_s=0.1) is None
        assert time.monotonic() - began < multi_endpoint.ANSWER_S / 2
        assert re.fullmatch(
            rf"{place}: (it accepts connections, but no store answered within 1 s|.*time.*)", one.trouble()
        )


def test_a_launcher_that_ends_asks_a_place_that_hangs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the job has failed elsewhere; closing it then has no effect."""
    bench = Bench(place := free_place())
    asked: list[float] = []

    def hang(window: Any, question: Any, within_s: float) -> None:
        asked.append(within_s)
        window.hangs = True

    monkeypatch.setattr(multi_endpoint.Window, "ask", hang)
    bench.store_failover._place = place
    assert bench.store_failover.failed_elsewhere() == "" and not bench.store_failover.shutdown("why")
    bench.store_failover.leave("why")
    assert asked == [store_failover.CLOSE_S]


class Handler(RendezvousHandler):
    """Stands in for torch's: joins when it is let, and is asked whether nodes wait."""

    def __init__(self, place: Endpoint, nodes: int = 0, moved: bool = False) -> None:
        self.place, self.nodes, self.moved = place, nodes, moved
        self.joined = threading.Event()
        self.waiting: Callable[[], int] = lambda: 0
        self.closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        self.joined.wait()
        store = TCPStore(self.place.host, self.place.port, is_master=False)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.place.host, self.place.port))

    def num_nodes_waiting(self) -> int:
        return self.waiting()

    def get_backend(self) -> str:
        return "c10d"

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return "job"

    def shutdown(self) -> bool:
        return True


class Bench:
    """An agent's rendezvous whose handlers the test lets join."""

    def __init__(self, *places: Endpoint, join_timeout_s: float = 60.0) -> None:
        self.made: list[Handler] = []
        self.store_failover = FailoverRendezvous(agent(*places), self._make, "job", join_timeout_s=join_timeout_s)

    def _make(self, place: Endpoint, epoch: int, nodes: int, moved: bool) -> Handler:
        self.made.append(Handler(place, nodes, moved))
        return self.made[-1]

    def join(self) -> list[RendezvousInfo]:
        """Begin to join; return a list that will hold what comes of it."""
        came: list[RendezvousInfo] = []
        self.thread = threading.Thread(target=lambda: came.append(self.store_failover.next_rendezvous()), daemon=True)
        self.thread.start()
        return came


def test_a_join_that_hangs_on_a_lost_store_goes_on_at_the_next_place() -> None:
    """The hanging call is abandoned."""
    places = free_place(), free_place()
    servers = {place: serve(place) for place in places}
    bench = Bench(*places)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    del servers[places[0]]
    until(lambda: len(bench.made) == 2)
    assert not bench.made[0].joined.is_set() and bench.made[1].place == places[1]
    bench.made[1].joined.set()
    bench.thread.join(30)
    met = came[0].bootstrap_store_info
    assert met is not None and met.master_port == places[1].port
    bench.store_failover.shutdown()


def test_a_lost_store_does_not_disturb_the_workers() -> None:
    """The question how many nodes wait is answered at once: with what was last known while the asking hangs, with none once it has failed."""
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].waiting = lambda: 2
    bench.made[0].joined.set()
    until(lambda: bool(came) and bench.store_failover.num_nodes_waiting() == 2)
    asked, answer = threading.Event(), threading.Event()

    def hangs() -> int:
        asked.set()
        answer.wait(60)
        return 2

    def lost() -> int:
        raise RendezvousConnectionError("gone")

    bench.made[0].waiting = hangs
    assert asked.wait(60)
    began = time.monotonic()
    assert bench.store_failover.num_nodes_waiting() == 2 and time.monotonic() - began < 30, "it waited for the answer"
    bench.made[0].waiting = lost
    answer.set()
    until(lambda: bench.store_failover.num_nodes_waiting() == 0)
    bench.store_failover.shutdown()
    assert server


def test_the_reason_of_the_node_that_ended_the_job_is_read() -> None:
    """By the node whose ranks have all succeeded, too; also when the store goes right after."""
    place = free_place()
    servers = [serve(place)]
    bench = Bench(place)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    until(lambda: bool(came))
    assert bench.store_failover.failed_elsewhere() == ""
    departures.publish_over(TCPStore(place.host, place.port, is_master=False), "job", "b: exit code 3")
    assert bench.store_failover.failed_elsewhere() == "b: exit code 3"
    waiting = bench.store_failover._waiting
    assert waiting is not None
    until(lambda: waiting.over == "b: exit code 3")
    servers.clear()
    assert bench.store_failover.failed_elsewhere() == "b: exit code 3"
    bench.store_failover.shutdown()


@pytest.mark.parametrize("said", ["b: exit code 3", ""])
def test_a_node_that_joins_when_the_job_is_over_gets_the_reason(said: str) -> None:
    """As far as anybody has said so; it has not met the others before."""
    place = free_place()
    server = serve(place)
    if said:
        departures.publish_over(TCPStore(place.host, place.port, is_master=False), "job", said)

    class Closed(Handler):
        def next_rendezvous(self) -> RendezvousInfo:
            raise RendezvousClosedError

    late = FailoverRendezvous(agent(place), lambda place, *_: Closed(place), "job", join_timeout_s=60.0)
    with pytest.raises(RendezvousClosedError) as caught:
        late.next_rendezvous()
    assert str(caught.value) == f"the job 'job' is over at {place}: {said or 'no node has reported why'}" and server


def test_a_handler_that_has_lost_its_store_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes a backtrace for every question on a broken connection; the store itself is looked at as before."""
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    asked: list[int] = []
    looks: list[object] = []
    ask = multi_endpoint.Window.ask

    def lost() -> int:
        asked.append(len(looks))
        raise RendezvousConnectionError("gone")

    def look(window: Any, question: Any, within_s: float = 30.0) -> Any:
        looks.append(question)
        return ask(window, question, within_s)

    bench.made[0].waiting = lost
    monkeypatch.setattr(multi_endpoint.Window, "ask", look)
    bench.made[0].joined.set()
    until(lambda: bool(came) and bool(asked))
    until(lambda: len(looks) > asked[0] + 5)
    assert len(asked) == 1 and bench.store_failover.num_nodes_waiting() == 0
    bench.store_failover.shutdown()
    assert server


@pytest.mark.filterwarnings("ignore:Exception ignored in. <finalize object:pytest.PytestUnraisableExceptionWarning")
def test_the_heartbeats_of_a_lost_store_end() -> None:
    """torch's own handler goes on sending them, with a backtrace for each, until it is let go of; the job may train for days.

    Where a heartbeat is under way at that moment, on a loaded machine, its thread is the last to hold the handler: torch then
    has that thread end and join itself, in a finalizer. It ends; Python says that the join was an error, and ignores it.
    """
    before = set(threading.enumerate())

    def make(place: Endpoint, epoch: int, nodes: int, moved: bool) -> RendezvousHandler:
        quick = {"is_host": "0", "keep_alive_interval": "1", "last_call_timeout": "1"}
        return get_rendezvous_handler(RendezvousParameters("c10d", str(place), "job", 1, 1, **quick))

    def heartbeats() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - before if "KeepAlive" in thread.name]

    place = free_place()
    command = [sys.executable, "-m", "ttp.launch.stores", "--port", str(place.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline()
        store_failover = FailoverRendezvous(agent(place), make, "job", join_timeout_s=60.0)
        assert store_failover.next_rendezvous().world_size == 1
        assert len(heartbeats()) == 1
        keeper.kill()
    until(
        lambda: not heartbeats(), within_s=3 * ANSWER_S
    )  # a question that was being asked at that moment is waited for so long
    assert store_failover.num_nodes_waiting() == 0 and not store_failover.shutdown()


def test_an_attempt_that_was_left_changes_nothing_when_it_ends_late() -> None:
    """The handler in use stays the one that joined."""
    places = free_place(), free_place()
    servers = {place: serve(place) for place in places}
    others = set(threading.enumerate())

    def attempts() -> list[str]:
        return [thread.name for thread in set(threading.enumerate()) - others if thread.name == "ttp-rendezvous"]

    bench = Bench(*places)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    late = bench.made[0]
    del servers[places[0]]
    until(lambda: len(bench.made) == 2)
    bench.made[1].joined.set()
    bench.thread.join(30)
    assert came and attempts()
    servers[places[0]] = serve(places[0])
    late.joined.set()
    until(lambda: not attempts())
    bench.made[1].closed = True
    assert bench.store_failover.is_closed(), "the question goes to the handler that joined"
    bench.store_failover.shutdown()


def test_a_question_under_way_ends_before_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's handler is for one thread at a time."""
    place = free_place()
    server = serve(place)
    bench = Bench(place)
    came = bench.join()
    until(lambda: len(bench.made) == 1)
    bench.made[0].joined.set()
    until(lambda: bool(came))
    asked, answers, over = threading.Event(), threading.Event(), threading.Event()

    def slow() -> int:
        asked.set()
        answers.wait(60)
        over.set()
        return 0

    bench.made[0].waiting = slow
    assert asked.wait(30)
    monkeypatch.setattr(node_polls, "ROUND_S", 30.0)
    threading.Timer(0.01, answers.set).start()
    bench.store_failover.shutdown()
    assert over.is_set() and server


def test_too_few_nodes_in_time_is_said_with_the_places() -> None:
    place = free_place()
    bench = Bench(place, join_timeout_s=0.3)
    with pytest.raises(
        RendezvousTimeoutError,
        match=rf"within 0 s \(--rdzv-conf join_timeout\) at {place}: {place}: connection refused",
    ):
        bench.store_failover.next_rendezvous()
