"""The page's HTTP server by itself: what a client can take, how it is let in, and its certificate."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.status_page.live_page import get
from tests.waiting import LONG_S, until
from ttp.errors import ConfigError
from ttp.identity.secret import Secret, make_secret
from ttp.status import page_access
from ttp.status.page_access import COOKIE_S, LINK_S, Access, PagePlace, login_link
from ttp.status_page import certificate, http_server
from ttp.status_page.__main__ import make_context
from ttp.status_page.http_server import PageServer, Response

TOKEN = Secret(b"0123456789abcdef0123456789abcdef")
BEARER = f"Bearer {TOKEN.value.decode()}"
ANSWERS = {"/": Response("text/plain", b"page"), "/large": Response("text/plain", b"x" * (8 << 20))}


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def served(clock: Clock, context: ssl.SSLContext | None = None) -> Iterator[PageServer]:
    access = Access(TOKEN, "started", clock)
    with PageServer(("127.0.0.1", 0), lambda: ANSWERS, access, context) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield page
        finally:
            page.shutdown()
            thread.join(LONG_S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def page(clock: Clock) -> Iterator[PageServer]:
    with served(clock) as running:
        yield running


def url(page: PageServer) -> str:
    return f"http://127.0.0.1:{page.port}/"


def connect(page: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", page.port), LONG_S)


def is_closed(client: socket.socket) -> bool:
    """Wait for the other end's close."""
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 16):
            pass
    return True


# --- bounds ---


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No read or write of the server ends by a time of its own, and no wait for room: what a test is about comes first, however slow the machine."""
    for name in ("IO_S", "REQUEST_S", "ROOM_S"):
        monkeypatch.setattr(http_server, name, 2 * LONG_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"\xff\x00"])
def test_a_client_that_says_too_little_is_cut_off(
    said: bytes, page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the time of its whole request: one that sends a byte now and then too."""
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    with connect(page) as client:
        client.sendall(said)
        assert is_closed(client)
    until(lambda: page.open_connections == 0, "its place")


@pytest.mark.usefixtures("patient")
def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read of it ever waits long: the time of the whole request is over."""
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    with connect(page) as client:

        def is_refused() -> bool:
            try:
                client.sendall(b"x")
            except OSError:
                return True
            return False

        until(is_refused, "the end of the connection")


@pytest.mark.usefixtures("patient")
def test_a_client_that_reads_no_further_is_cut_off(page: PageServer) -> None:
    """In the middle of the answer."""
    with connect(page) as client:
        client.sendall(f"GET /large HTTP/1.1\r\nAuthorization: {BEARER}\r\n\r\n".encode())
        received = len(client.recv(1))
        with page._room:
            page._due = dict.fromkeys(page._due, 0.0)
        until(lambda: page.open_connections == 0, "its end")
        while part := client.recv(1 << 20):
            received += len(part)
    assert 0 < received < len(ANSWERS["/large"].body)


@pytest.mark.usefixtures("patient")
def test_the_oldest_connection_makes_room(page: PageServer) -> None:
    """There are never more than so many, and who is let in is answered beside those who hold them all."""
    with contextlib.ExitStack() as clients:
        slow = [clients.enter_context(connect(page)) for _ in range(http_server.MOST_CONNECTIONS)]
        until(lambda: page.open_connections == http_server.MOST_CONNECTIONS, "all of them")
        for number in range(3):
            assert get(url(page), "/", Authorization=BEARER).body == "page"
            assert page.open_connections <= http_server.MOST_CONNECTIONS
            assert is_closed(slow[number]) if number == 0 else True
        assert page.open_connections >= http_server.MOST_CONNECTIONS - 3


TOKEN_LINE = f" HTTP/1.1\r\nAuthorization: {BEARER}\r\n\r\n".encode()
"""The end of a request that would be answered, were it shorter."""


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET /?" + b"x" * 100_000 + TOKEN_LINE,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + TOKEN_LINE[11:],
        b"GET / HTTP/1.1\r\nCookie: " + b"z" * 100_000 + TOKEN_LINE[9:],
        b"GET / HTTP/1.1\r\nCookie: " + b"z" * 40_000 + TOKEN_LINE[9:],
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_a_request_that_is_none_is_refused_or_cut(request_text: bytes, page: PageServer) -> None:
    with connect(page) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(request_text)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := client.recv(1 << 16):
                answer += part
    assert not answer.startswith(b"HTTP/1.0 200") and b"page" not in answer
    assert get(url(page), "/", Authorization=BEARER).body == "page"


def test_a_request_without_an_end_is_answered_when_it_is_too_long(page: PageServer) -> None:
    """Not read on, and not taken for a whole one, though its token is in the part that was read."""
    with connect(page) as client:
        client.sendall(f"GET / HTTP/1.1\r\nAuthorization: {BEARER}\r\nX: {'y' * 20_000}".encode())
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = client.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.0 431 ")


def test_what_is_not_known_yet_is_not_a_wrong_address(page: PageServer) -> None:
    assert get(url(page), "/metrics", Authorization=BEARER).status == 503
    assert get(url(page), "/metric", Authorization=BEARER).status == 404


def test_what_follows_a_request_is_not_read(page: PageServer) -> None:
    with connect(page) as client:
        one = f"GET / HTTP/1.1\r\nAuthorization: {BEARER}\r\nConnection: keep-alive\r\n\r\n".encode()
        client.sendall(one + one)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := client.recv(1 << 16):
                answer += part
    assert answer.count(b"200 OK") == 1


# --- who is let in ---


def place(page: PageServer, token_file: str, started: str = "started") -> PagePlace:
    return PagePlace(url(page), "host", 1, started, token_file)


def path_of(link: str, page: PageServer) -> str:
    return "/" + link.removeprefix(url(page))


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_bytes(TOKEN.value + b"\n")
    path.chmod(0o600)
    return str(path)


def test_a_link_ends_and_is_of_one_page_and_one_token(page: PageServer, clock: Clock, token_file: str) -> None:
    late = path_of(login_link(place(page, token_file), clock.now), page)
    of_another_page = path_of(login_link(place(page, token_file, "before"), clock.now), page)
    Path(token_file).write_text("another token of thirty-two letters")
    of_another_token = path_of(login_link(place(page, token_file), clock.now), page)
    clock.now += LINK_S + 1
    assert get(url(page), late).status == 403
    clock.now -= LINK_S + 1
    assert get(url(page), of_another_page).status == 403 and get(url(page), of_another_token).status == 403
    assert get(url(page), late).status == 303 and get(url(page), late).status == 403
    for broken in ("/login", "/login?once=", "/login?once=1.2.3", f"{late}0", "/login?" + "&".join(["once=1"] * 9)):
        assert get(url(page), broken).status == 403


def test_two_that_use_a_link_at_once_are_not_both_let_in(clock: Clock, token_file: str) -> None:

    def slow_clock() -> float:
        time.sleep(0.002)  # so that one thread is between its look and its note when others look
        return clock.now

    access = Access(TOKEN, "started", slow_clock)
    earlier = login_link(PagePlace("http://h/", "h", 1, "started", token_file), clock.now).partition("once=")[2]
    assert access.takes_link(earlier)
    once = login_link(PagePlace("http://h/", "h", 1, "started", token_file), clock.now).partition("once=")[2]
    barrier, taken = threading.Barrier(8), list[bool]()

    def use() -> None:
        barrier.wait()
        taken.append(access.takes_link(once))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(taken) == [False] * 7 + [True]


def test_a_cookie_ends_and_is_good_for_a_page_that_has_moved(clock: Clock) -> None:
    cookie = Access(TOKEN, "here", clock).cookie()
    there = Access(TOKEN, "there", clock)
    assert there.takes_cookie(cookie) and not Access(make_secret(), "here", clock).takes_cookie(cookie)
    clock.now += COOKIE_S + 1
    assert not there.takes_cookie(cookie)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "named"
    named.write_text("x" * 32)
    named.chmod(0o644)
    monkeypatch.setenv("TTP_STATUS_TOKEN_FILE", str(named))
    with pytest.raises(ConfigError, match=r"invalid TTP_STATUS_TOKEN_FILE=.*: got mode 0644"):
        page_access.read_token(page_access.token_path(tmp_path))
    monkeypatch.delenv("TTP_STATUS_TOKEN_FILE")
    own = page_access.token_path(tmp_path)
    assert own == tmp_path / "status_token" and len(page_access.read_token(own).value) == 64
    before = own.read_text()
    assert page_access.token_path(tmp_path).read_text() == before  # the next attempt has the same


def test_the_token_is_made_beside_what_another_process_of_the_same_id_left(tmp_path: Path) -> None:
    """Containers share a folder, and process ids; one was ended while it wrote."""
    (tmp_path / f".status_token.{os.getpid()}").write_text("")
    assert len(page_access.read_token(page_access.token_path(tmp_path)).value) == 64


# --- its certificate ---


def test_a_page_that_other_machines_reach_has_tls_that_a_scraper_checks(clock: Clock) -> None:
    """By a copy of its certificate, which is the same wherever the token is."""
    pem, context = make_context("0.0.0.0", TOKEN)
    assert context is not None and make_context("0.0.0.0", TOKEN)[0] == pem != make_context("0.0.0.0", make_secret())[0]
    assert make_context("127.0.0.1", TOKEN) == (b"", None)
    with served(clock, context) as page:
        scraper = ssl.create_default_context(cadata=pem.decode())
        with (
            connect(page) as plain,
            scraper.wrap_socket(plain, server_hostname=certificate.SERVER_NAME) as client,
        ):
            shown = client.getpeercert(binary_form=True)
            client.sendall(f"GET / HTTP/1.1\r\nAuthorization: {BEARER}\r\n\r\n".encode())
            answer = b""
            while part := client.recv(1 << 16):
                answer += part
        assert answer.endswith(b"page")
        assert shown is not None
        assert certificate.fingerprint(pem) == certificate.fingerprint(ssl.DER_cert_to_PEM_cert(shown).encode())
        with connect(page) as plain, pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(plain, server_hostname=certificate.SERVER_NAME)
        with connect(page) as plain:  # not TLS
            plain.sendall(f"GET / HTTP/1.1\r\nAuthorization: {BEARER}\r\n\r\n".encode())
            assert b"page" not in plain.recv(1 << 16)


def test_a_cookie_of_a_page_with_tls_goes_over_tls_alone(clock: Clock, token_file: str) -> None:
    pem, context = make_context("0.0.0.0", TOKEN)
    with served(clock, context) as page:
        link = path_of(login_link(place(page, token_file), clock.now), page)
        scraper = ssl.create_default_context(cadata=pem.decode())
        with connect(page) as plain, scraper.wrap_socket(plain, server_hostname=certificate.SERVER_NAME) as client:
            client.sendall(f"GET {link} HTTP/1.1\r\n\r\n".encode())
            answer = client.recv(1 << 16).decode()
    assert "303" in answer and "; Secure" in answer
