"""When a controller starts the page's process: while it leads, and again when the process has died of something else than its arguments."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.status_page.live_page import get
from tests.waiting import LONG_S, replace_sleep, until
from ttp.controller import __main__ as controller_main
from ttp.controller import page_process
from ttp.controller.agent_link import request_shutdown
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.driver import Driver
from ttp.controller.handler import StopIfNeverUsed
from ttp.controller.journal import Journal
from ttp.controller.page_process import REFUSED, PageProcess
from ttp.controller.process import start_controller
from ttp.launch.checks import warn_of_taken_port
from ttp.status import page_access
from ttp.status.main import main as status_main
from ttp.status.page_access import Access
from ttp.status_page import __main__ as page_main
from ttp.status_page import certificate


class Process:
    """One that ends with a status; None: when it is killed; `stuck`: not even then."""

    def __init__(self, status: int | None, stuck: bool = False) -> None:
        self.status = status
        self.killed = threading.Event()
        self.waited = threading.Event()
        self._ended = threading.Event() if stuck else self.killed

    def wait(self) -> int:
        self.waited.set()
        if self.status is None:
            assert self._ended.wait(LONG_S)
        return self.status or 0

    def kill(self) -> None:
        self.killed.set()
        raise ProcessLookupError

    def let_go(self) -> None:
        self._ended.set()


def kept(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int | None], leads: list[bool]
) -> tuple[list[Process], list[bool]]:
    """Run it until it ends, or until its last process runs, and stop it; return the processes and what remains of `leads`."""
    started: list[Process] = []

    def start(command: list[str], **_: Any) -> Process:
        assert "ttp.status_page" in command
        started.append(Process(statuses[len(started)]))
        return started[-1]

    monkeypatch.setattr(page_process, "LEADS_POLL_S", 0.0)
    monkeypatch.setattr(page_process, "AGAIN_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", start)
    page = page_of(lambda: leads.pop(0) if leads else True)
    page.start()
    until(lambda: not runs() or (len(started) == len(statuses) and started[-1].status is None), "its last process")
    page.stop()
    until(lambda: not runs(), "the end of its thread")
    return started, leads


def page_of(leads: Callable[[], bool]) -> PageProcess:
    return PageProcess("j", Path("/log"), "127.0.0.1", "h", 1, leads)


def runs() -> bool:
    return any(thread.name == "ttp-page" for thread in threading.enumerate())


def test_it_is_started_when_the_controller_leads_and_again_when_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    started, leads = kept(monkeypatch, [-9, 1, None], [False, False, False])
    assert len(started) == 3 and leads == [] and started[-1].killed.is_set()


def test_what_cannot_be_served_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started, _ = kept(monkeypatch, [REFUSED, None], [])
    assert len(started) == 1


def test_nothing_waits_for_a_page_that_is_slow_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that has come after the stop is ended all the same."""
    begun, go_on, late = threading.Event(), threading.Event(), Process(None)

    def start(command: list[str], **_: Any) -> Process:
        begun.set()
        assert go_on.wait(LONG_S)
        return late

    monkeypatch.setattr(subprocess, "Popen", start)
    page = page_of(lambda: True)
    page.start()
    assert begun.wait(LONG_S)
    page.stop()
    go_on.set()
    assert late.killed.wait(LONG_S)
    until(lambda: not runs(), "the end of its thread")


def test_the_controller_ends_though_its_page_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an uninterruptible sleep; its journal is closed before."""
    stuck, order, close = Process(None, stuck=True), list[str](), Journal.close
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: stuck)
    journal, made = tmp_path / "journal_0.jsonl", list[Driver]()

    def driver(*given: Any, **named: Any) -> Driver:
        made.append(Driver(*given, **named))
        return made[-1]

    def closed(journal: Journal) -> None:
        order.append("killed" if stuck.killed.is_set() else "runs")
        close(journal)

    async def run() -> None:
        serving = asyncio.create_task(
            controller_main.serve(ControllerSettings("run/0", 1, 2), "127.0.0.1", 0, journal, page_port=0)
        )
        while not stuck.waited.is_set():
            await asyncio.sleep(0.01)
        made[0].put(StopIfNeverUsed("the test is over"))
        await serving

    monkeypatch.setattr(Journal, "close", closed)
    monkeypatch.setattr(controller_main, "Driver", driver)
    monkeypatch.setattr(controller_main, "_announce", lambda line: None)
    asyncio.run(asyncio.wait_for(run(), LONG_S))
    assert order == ["runs"] and stuck.killed.is_set()
    stuck.let_go()


def test_a_standby_leads_nothing_until_ranks_come(tmp_path: Path) -> None:
    def driver(standby: int) -> Driver:
        settings = ControllerSettings("j", 1, 2, standby=standby)
        return Driver(settings, Journal(tmp_path / f"{standby}.jsonl", settings), lambda reason: None)

    first, standby = driver(0), driver(1)
    assert not first.leads  # it has not begun
    for each in (first, standby):
        each.start()
    until(lambda: first.leads, "its first state")
    until(lambda: standby._handler.state is not None, "the same")
    assert not standby.leads


def test_a_token_that_cannot_be_used_is_a_line_in_the_controllers_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes its way without a page."""
    monkeypatch.setenv("TTP_STATUS_PORT", "0")
    monkeypatch.setenv("TTP_STATUS_TOKEN_FILE", str(tmp_path / "missing"))
    controller = start_controller(ControllerSettings("run/0", 1, 2), tmp_path / "log" / "journal_0.jsonl")
    log = tmp_path / "log" / "journal_0.log"
    until(lambda: log.read_text().endswith("\n"), "its line")
    assert log.read_text().startswith("ttp-status-page: ") and log.read_text().count("\n") == 1
    assert "expected a file with the job's page token" in log.read_text()
    request_shutdown(controller.address)
    assert controller.wait(LONG_S) == 0 and page_access.read(tmp_path / "log") is None


def test_a_controller_that_other_nodes_reach_has_its_page_by_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the controller's addresses; what a scraper checks it by is beside the journals, and its fingerprint too."""
    monkeypatch.setenv("TTP_STATUS_PORT", "0")
    settings = ControllerSettings("run/0", 1, 2)
    controller = start_controller(settings, tmp_path / "log" / "journal_0.jsonl", bind="0.0.0.0", advertise="127.0.0.1")
    try:
        until(lambda: page_access.read(tmp_path / "log"), "the page")
        place = page_access.read(tmp_path / "log")
        assert place is not None and place.url.startswith("https://127.0.0.1:")
        pem = (tmp_path / "log" / "status_page.pem").read_text()
        assert "PRIVATE" not in pem and place.fingerprint == certificate.fingerprint(pem.encode())
        assert status_main(["--login", str(tmp_path / "log")]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(f"{place.url}login?once=") and place.fingerprint in printed.err
        token = Path(place.token_file).read_text().strip()
        port = int(place.url.rpartition(":")[2].strip("/"))
        scraper = ssl.create_default_context(cadata=pem)
        with (
            socket.create_connection(("127.0.0.1", port), LONG_S) as plain,
            scraper.wrap_socket(plain, server_hostname=certificate.SERVER_NAME) as client,
        ):
            client.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
            assert client.recv(1 << 16).startswith(b"HTTP/1.0 200 ")
    finally:
        request_shutdown(controller.address)
        assert controller.wait(LONG_S) == 0


def test_a_port_that_is_taken_is_waited_for_and_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the next attempt's page waits for the one before; what no waiting changes is an error."""
    waits = list[float]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "ttp.launch"):
            warn_of_taken_port(port)
            warn_of_taken_port(0)
            warn_of_taken_port(-1)
        assert caplog.text.count("--status-port") == 1 and f"--status-port {port} cannot be had" in caplog.text

        def free(seconds: float) -> None:
            waits.append(seconds)
            taken.close()

        replace_sleep(monkeypatch, free)
        (tmp_path / "token").write_text("x" * 32)
        (tmp_path / "token").chmod(0o600)
        access = Access(page_access.read_token(tmp_path / "token"), "s", time.time)
        with page_main.listen("127.0.0.1", port, lambda: {}, access, None) as server:
            assert server.port == port and len(waits) == 1
        with pytest.raises(OSError, match="assign requested address"):
            page_main.listen("192.0.2.1", 0, lambda: {}, access, None)
    caplog.clear()
    warn_of_taken_port(port)
    assert caplog.text == ""


def test_a_page_without_a_launcher_asks_over_plain_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun's jobs have them: there is no agent to ask for a certificate."""
    monkeypatch.setenv("TTP_STATUS_PORT", "0")
    controller = start_controller(ControllerSettings("run/0", 1, 2), tmp_path / "log" / "journal_0.jsonl")
    try:
        until(lambda: page_access.read(tmp_path / "log"), "the page")
        place = page_access.read(tmp_path / "log")
        assert place is not None
        login = {"Authorization": f"Bearer {Path(place.token_file).read_text().strip()}"}
        until(lambda: "ttp_controller_answers 1.0" in get(place, "/metrics", **login).body, "its first look")
    finally:
        request_shutdown(controller.address)
        assert controller.wait(LONG_S) == 0
