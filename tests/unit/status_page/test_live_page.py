"""The page's process beside a real controller: what it serves, whom it lets in, and what its clients cost the controller."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.status_page.live_page import NAME, LivePage, get, live_page
from tests.waiting import until
from ttp.controller.stragglers import WINDOW
from ttp.status import page_access
from ttp.status.main import main
from ttp.status_page.http_server import MOST_CONNECTIONS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePage]:
    """Its ranks have finished so many steps that the slower one is named."""
    with live_page(tmp_path_factory.mktemp("page")) as live:

        def named() -> bool:
            live.steps(WINDOW)
            return "ttp_straggler_ratio{n0}{1}" in metrics(live)

        until(named, "a slow rank in the metrics")
        until(lambda: metrics(live).get("ttp_step") == live.last, "the last step in the metrics")
        yield live


def metrics(page: LivePage) -> dict[str, float]:
    """Return a scrape's samples, by name and labels."""
    reply = page.ask("/metrics")
    if reply.status == 503:  # before the first look
        return {}
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.body)
        for sample in family.samples
    }


def test_a_scrape_has_what_the_controller_knows_now(page: LivePage) -> None:
    found = metrics(page)
    assert found["ttp_step"] == page.last
    assert found["ttp_stragglers"] == 1 and found["ttp_straggler_ratio{n0}{1}"] == 2.0 and found["ttp_loss"] == 2.5
    assert found["ttp_controller_answers"] == 1 and found["ttp_phase{training}"] == 1
    assert found["ttp_ranks{done}"] == 2 and found["ttp_world_size"] == 2
    assert found["ttp_step_duration_median_seconds"] == 0.5  # the shortest that a rank measured
    assert (found["ttp_rank_step_duration_max_seconds"], found["ttp_slowest_rank"]) == (1.0, 1)
    assert found["ttp_shard_live_holders_min"] == 2 and found["ttp_checkpoint_step"] == 3
    assert found["ttp_faults_total{saved}"] == 0


def dashboard() -> str:
    return (ROOT / "examples/monitoring/grafana_dashboard.json").read_text()


def rules() -> str:
    return (ROOT / "examples/monitoring/alerts.yaml").read_text()


def documented() -> str:
    """Return the table of metrics."""
    return (ROOT / "docs/metrics.md").read_text().partition("<!-- metrics -->")[2].partition("<!-- end -->")[0]


@pytest.mark.parametrize("read", [dashboard, rules, documented])
def test_every_metric_that_is_named_is_in_a_real_scrape(read: Callable[[], str], page: LivePage) -> None:
    """Those of the table may have no sample now; they are there."""
    body = page.ask("/metrics").body
    samples = {re.split(r"[{ ]", line)[0] for line in body.splitlines() if not line.startswith("#")}
    typed = set(re.findall(r"^# TYPE (\S+) ", body, re.MULTILINE))
    named = set(NAME.findall(read()))
    assert named and named <= (samples | typed if read is documented else samples)
    if read is documented:
        assert typed == named


def test_the_page_is_an_operator_and_can_change_nothing(page: LivePage) -> None:
    """The certificate is what bounds it, not its own good will: the agent gives it that role, and the controller refuses the rest."""
    environ = Path(f"/proc/{page.place.pid}/environ").read_bytes()
    assert b"TTP_IDENTITY=@" in environ and b"TTP_SECRET" not in environ
    words = Path(f"/proc/{page.place.pid}/cmdline").read_bytes().split(b"\0")
    assert b"ttp.status_page" in words and not any(page.token.encode() in word for word in words)
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
        with connected(page) as client:
            client.sendall(f"{method} /status.json HTTP/1.1\r\nAuthorization: Bearer {page.token}\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.0 501 ")


@contextlib.contextmanager
def connected(page: LivePage) -> Iterator[socket.socket]:
    target = urlsplit(page.place.url)
    with socket.create_connection((target.hostname, target.port), 30.0) as client:
        yield client


def test_without_the_token_there_is_nothing(page: LivePage) -> None:
    for path in ("/", "/status.json", "/metrics", "/nothing"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Cookie": "ttp_page=1"}):
            reply = get(page.place, path, **headers)
            assert reply.status == 401 and "ttp_" not in reply.body and "n0" not in reply.body
    assert stat.S_IMODE(os.stat(page.place.token_file).st_mode) == 0o600
    assert page.ask("/nothing").status == 404


def test_status_prints_where_the_page_is_and_a_link_that_lets_one_browser_in(
    page: LivePage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--login", str(page.log_dir)]) == 0
    printed = capsys.readouterr()
    link = printed.out.strip()
    assert printed.err == ""  # without TLS there is nothing to compare
    path = link.removeprefix(page.place.url[:-1])
    assert page.token not in link
    first = get(page.place, path)
    assert (first.status, first.headers["location"]) == (303, "/")
    cookie, *attributes = first.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(attributes)
    assert "<title>" in get(page.place, "/", Cookie=cookie).body
    assert get(page.place, "/status.json", Cookie=f"a=b; {cookie}").status == 200
    assert get(page.place, "/status.json", Cookie=f"{cookie}0").status == 401
    assert get(page.place, path).status == 403  # it lets one in once
    main([str(page.log_dir)])
    assert f"page      {page.place.url}" in capsys.readouterr().out


def test_status_json_has_the_keys_of_ttp_status(page: LivePage, capsys: pytest.CaptureFixture[str]) -> None:
    """One word for one thing, wherever it is read."""
    served = json.loads(page.ask("/status.json").body)
    main([str(page.log_dir), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert served.keys() - {"curve"} == printed.keys() - {"status"}
    assert [rank["node"] for rank in served["ranks"]] == ["n0", "n0"]
    curve = served["curve"]
    assert curve["step"][-1] == page.last and curve["step_s"][-1] == 0.5 and curve["loss"][-1] == 2.5
    (slow,) = served["stragglers"]
    assert served["stragglers_compared"] is True
    assert (slow["rank"], slow["node"], slow["ratio"], slow["own_s"], slow["others_s"]) == (1, "n0", 2.0, 1.0, 0.5)
    assert [(rank["own_s"], rank["waited_s"], rank["slower"]) for rank in served["ranks"]] == [
        (0.5, 0.25, None),
        (1.0, 0.25, 2.0),
    ]


def cost(pid: int) -> tuple[int, int]:
    """Return threads and descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def test_slow_and_hostile_clients_cost_the_controller_nothing(page: LivePage) -> None:
    """Not one message, thread or descriptor: the controller has nothing to do with them, and how often the page looks is not theirs to say.
    Who is let in is answered meanwhile."""
    began, refused, answered = time.monotonic(), 0, 0
    looks = len(json.loads(page.ask("/status.json").body)["curve"]["step"])
    before = cost(page.controller.pid)
    with contextlib.ExitStack() as clients:
        slow = [clients.enter_context(connected(page)) for _ in range(3 * MOST_CONNECTIONS)]
        for number, client in enumerate(slow):
            with contextlib.suppress(OSError):
                client.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: " if number % 2 else b"\x16\x03\x01" + bytes(64))
        while answered < 200:
            try:
                assert page.ask("/metrics").status == 200
                answered += 1
            except (ConnectionError, http.client.HTTPException):
                refused += 1  # the page stood still for a moment: the oldest made no room in time
                assert refused <= 20
        with connected(page) as endless, contextlib.suppress(OSError):
            for _ in range(100):
                endless.sendall(b"X: " + b"y" * 4096 + b"\r\n")
        assert len(os.listdir(f"/proc/{page.place.pid}/task")) <= MOST_CONNECTIONS + 16
        asked = len(json.loads(page.ask("/status.json").body)["curve"]["step"]) - looks
        assert asked <= 1 + (time.monotonic() - began) / 2.0
    threads, descriptors = cost(page.controller.pid)
    assert threads <= before[0] + 1 and descriptors <= before[1] + 2  # a look of the page's own


def test_a_page_that_hangs_ends_with_its_controller(tmp_path: Path) -> None:
    with live_page(tmp_path) as live:
        first = live.place
        os.kill(first.pid, signal.SIGSTOP)
    until(lambda: not os.path.exists(f"/proc/{first.pid}"), "the end of the page's process")
    assert page_access.read(live.log_dir) is None
