"""The client's link to a controller: what it is asked, what it receives, and that no caller waits for it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.unit.launch.controller_clients import DEADLINE_S, Switchboard, death
from tests.waiting import until
from ttp.exchange.discovery import controller_key
from ttp.launch.links.controller_client import ControllerClient
from ttp.runtime.standby import enter


def test_whom_the_controller_has_given_up_is_asked_on_the_line(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """Without a controller nothing is known to be decided."""
    assert client.given_up() is None
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)
    client.report(death("exiting"))
    assert client.given_up() == frozenset({1})


def test_a_link_that_fails_does_not_reach_the_death_watch(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient, caplog: pytest.LogCaptureFixture
) -> None:
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)

    def fails(rank: int, pid: int, text: str) -> None:
        raise ConnectionError("reset")

    switchboard.links["host:8000"].worker_exit = fails  # type: ignore[method-assign]
    client.report(death("exiting"))
    assert "cannot report the exit of rank 1 to the controller: reset" in caplog.text


def test_a_death_is_reported_while_a_controller_is_asked_whom_it_has_given_up(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """That may take a second; the death watch does not wait for it."""
    asked, go_on = threading.Event(), threading.Event()
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)

    def slow() -> frozenset[int] | None:
        asked.set()
        assert go_on.wait(DEADLINE_S)
        return None

    link = switchboard.links["host:8000"]
    link.given_up = slow  # type: ignore[method-assign]
    asking = threading.Thread(target=client.given_up, daemon=True)
    asking.start()
    assert asked.wait(DEADLINE_S)
    reporting = threading.Thread(target=client.report, args=(death("exiting"),), daemon=True)
    reporting.start()
    reporting.join(DEADLINE_S / 4)
    try:
        assert link.reported == [(1, 71, "exiting")]
    finally:
        go_on.set()
        asking.join(DEADLINE_S)


def test_the_time_of_the_order_to_exit_is_the_links(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    store.set(controller_key(7), "host:8000 12")
    assert client.sent_away_monotonic_s is None
    client.start()
    until(lambda: client.connected)
    assert client.sent_away_monotonic_s is None
    switchboard.links["host:8000"].sent_away_monotonic_s = 7.0
    assert client.sent_away_monotonic_s == 7.0


def test_the_lease_is_the_links(store: TCPStore, switchboard: Switchboard, client: ControllerClient) -> None:
    store.set(controller_key(7), "host:8000 12")
    assert client.lease_s == 0.0
    client.start()
    until(lambda: client.connected)
    switchboard.links["host:8000"].lease_s = 7.0
    assert client.lease_s == 7.0


def test_the_link_is_closed_with_the_client(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)
    client.close()
    assert switchboard.links["host:8000"].closed and not client.connected


def test_a_standby_is_kept_once_however_often_it_is_read(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """The store is looked into once a second for as long as the job lasts."""
    enter(store, 7, 1, "one:8001")
    store.set(controller_key(7), "host:8000 12")
    client.start()
    for _ in range(3):
        client.look_now(DEADLINE_S)
    store.set(controller_key(7), "other:9000 13")
    until(lambda: "other:9000" in switchboard.links)
    client.look_now(DEADLINE_S)
    assert switchboard.links["other:9000"].added[0] == ("one:8001",)


def test_the_death_of_a_process_that_was_replaced_is_reported_to_no_later_controller(
    store: TCPStore, switchboard: Switchboard, client: ControllerClient
) -> None:
    """One that does not know the rank yet would take it for the other process's. That one's death is reported as any."""
    store.set(controller_key(7), "host:8000 12")
    client.start()
    until(lambda: client.connected)
    first = switchboard.links["host:8000"]
    client.report(death("signal SIGKILL"))
    client.replaced(1, 99)
    client.report(death("signal SIGKILL, out of memory"))  # comes late
    assert first.reported == [(1, 71, "signal SIGKILL")] and first.replacements == [(1, 99)]
    store.set(controller_key(7), "host:8001 13")
    client.look_now(DEADLINE_S)
    until(lambda: client.connected and "host:8001" in switchboard.links)
    until(lambda: switchboard.links["host:8001"].replacements)
    second = switchboard.links["host:8001"]
    assert second.replacements == [(1, 99)] and second.reported == []
    client.report(replace(death("exit code 3"), pid=99))
    assert second.reported == [(1, 99, "exit code 3")]
    client.replace_failed(1, 5, "no process")
    assert second.refusals == [(1, 5, "no process")] and first.refusals == []
