"""The ranks of an attempt find rank 0's controller, or learn at once why there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import partial

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ttp.errors import ConfigError, ControllerError, NotWritable
from ttp.exchange import discovery


class Clock:
    """Time that passes by sleeping; `at` makes something happen at a moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.at: dict[float, object] = {}

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        for moment in [moment for moment in self.at if moment <= self.now]:
            self.at.pop(moment)()  # type: ignore[operator]


def find(store: HashStore, clock: Clock, timeout_s: float = 300.0) -> str:
    return discovery.find(store, 7, 3, timeout_s, clock=lambda: clock.now, sleep=clock.sleep)


def test_a_controller_that_is_published_late_is_found() -> None:
    store, clock = HashStore(), Clock()
    clock.at[20.0] = lambda: discovery.publish(store, 7, "host:8000", 12)
    assert find(store, clock) == "host:8000" and clock.now < 21.5


def test_a_standby_waits_for_the_folder_and_not_for_the_controller() -> None:
    """Both start at the same time; rank 0's reason ends this wait as well."""
    store, clock = HashStore(), Clock()
    clock.at[3.0] = lambda: discovery.publish_folder(store, 7)
    wait = partial(discovery.find, store, rank=1, key=discovery.folder_key, clock=lambda: clock.now, sleep=clock.sleep)
    wait(7, timeout_s=300.0)
    assert 3 <= clock.now < 5 and not store.check([discovery.controller_key(7)])
    with pytest.raises(ControllerError, match="rank 1: rank 0 did not publish a controller within 60 s"):
        wait(8, timeout_s=60.0)
    discovery.publish_failure(store, 8, NotWritable("log directory /logs cannot be written"))
    with pytest.raises(NotWritable, match="log directory /logs cannot be written"):
        wait(8, timeout_s=60.0)


def test_the_wait_is_made_of_short_slices() -> None:
    """A signal's handler runs between them: Ctrl-C during the start is answered within a second."""
    store, clock = HashStore(), Clock()
    with pytest.raises(ControllerError, match="within 300 s"):
        find(store, clock)
    assert max(clock.slept) <= 1.0 and 300 <= clock.now < 302


def test_rank_0s_reason_stops_all_others_within_a_second() -> None:
    store, clock = HashStore(), Clock()
    clock.at[10.0] = lambda: discovery.publish_failure(store, 7, ControllerError("port 8000 is taken"))
    with pytest.raises(ControllerError, match="rank 3: rank 0 could not start the controller: port 8000 is taken"):
        find(store, clock)
    assert clock.now <= 11.5


@pytest.mark.parametrize("kind", [ConfigError, NotWritable])
def test_what_rank_0_refuses_all_ranks_refuse_alike(kind: type[Exception]) -> None:
    """A configuration error of one rank that its peers took for a fault would be tried again."""
    store = HashStore()
    discovery.publish_failure(store, 7, kind("invalid TTP_CONTROLLER_PORT=8000: taken"))
    with pytest.raises(
        kind, match="rank 3: rank 0 could not start the controller: invalid TTP_CONTROLLER_PORT=8000: taken"
    ):
        find(store, Clock())


def test_another_attempts_entries_are_not_taken_for_this_ones() -> None:
    store, clock = HashStore(), Clock()
    discovery.publish(store, 6, "old:1", 1)
    discovery.publish_failure(store, 6, ControllerError("old trouble"))
    with pytest.raises(ControllerError, match="did not publish"):
        find(store, clock, 5.0)


def check_name(address: str, clock: Clock, known_from_s: float) -> None:
    def resolve(host: str, port: None) -> object:
        assert host == "node-x"
        if clock.now < known_from_s:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    discovery.check_name(address, 3, resolve=resolve, clock=lambda: clock.now, sleep=clock.sleep)


def test_a_controllers_name_that_does_not_resolve_is_an_error_of_its_own() -> None:
    """Not that of a lost controller: it has the rank, what was got, what is expected and what to do."""
    clock = Clock()
    with pytest.raises(ControllerError) as caught:
        check_name("node-x:8000", clock, float("inf"))
    assert str(caught.value) == (
        "invalid controller address on rank 3: got node-x:8000, whose host does not resolve on this node ([Errno -2] Name or"
        " service not known) within 30 s, expected a name or address that all nodes know. Set TTP_HOST on the"
        " controller's node"
    )
    assert 30 <= clock.now < 32


def test_a_name_server_may_learn_of_the_node_later() -> None:
    clock = Clock()
    check_name("node-x:8000", clock, 12.0)
    assert 12 <= clock.now < 14


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_is_named_by_its_number_and_its_beginning() -> None:
    """So that no later process of that number is taken for it; one that is gone has no name."""
    child = subprocess.Popen(["sleep", "600"])
    named = discovery.process_text(child.pid)
    assert named.split()[0] == str(child.pid) and int(named.split()[1]) > 0
    assert discovery.process_text() == discovery.process_text(os.getpid()) != named
    child.kill()
    child.wait()
    assert discovery.process_text(child.pid) == ""
