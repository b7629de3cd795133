"""The HTTP server of the status page: GET of three answers that are made beforehand, and a login.

Owns the bounds on what a client can take: connections at a time, bytes of a request, seconds of both. Each connection has one request. An answer is
bytes that a look has left (`looks.py`): no request causes a look, reads a file or reaches a controller. Changes nothing, and has no method but GET.
"""

from __future__ import annotations

import contextlib
import io
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

from ttp.status.page_access import COOKIE_S, Access

PATHS = ("/", "/status.json", "/metrics")
MOST_CONNECTIONS = 16
MOST_REQUEST_BYTES = 16 << 10
IO_S = 5.0
"""How long one read or write may wait for a client."""
REQUEST_S = 10.0
"""A connection is closed after so long, however busy it is."""
CLOSE_S = 0.5
"""Between two looks for connections that are due."""
ROOM_S = 1.0
"""How long a new connection waits for the oldest to make room."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Response:
    """What one path answers."""

    content_type: str
    body: bytes
    policy: str = "default-src 'none'"
    """Content-Security-Policy."""


Responses = Callable[[], Mapping[str, Response]]
"""`answers()`: what each path answers now. Must return at once."""


class PageServer(socketserver.ThreadingTCPServer):
    """Listens at construction (raises OSError); `serve_forever` answers."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self, address: tuple[str, int], answers: Responses, access: Access, tls: ssl.SSLContext | None = None
    ) -> None:
        self.answers = answers
        self.access = access
        self._tls = tls
        self._room = threading.Condition()
        self._due: dict[socket.socket, float] = {}  # guarded by the condition
        """Open connections with the time at which they are closed, the oldest first."""
        super().__init__(address, PageHandler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def open_connections(self) -> int:
        return len(self._due)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, client = super().get_request()
        connection.settimeout(IO_S)
        if self._tls is None:
            return connection, client
        try:  # the handshake is the connection's own thread's
            return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), client
        except (OSError, ValueError) as error:
            connection.close()
            raise OSError(str(error)) from error

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take a connection where there is room: the oldest one makes it."""
        with self._room:
            if len(self._due) >= MOST_CONNECTIONS:
                _cut(next(iter(self._due)))
                if not self._room.wait_for(lambda: len(self._due) < MOST_CONNECTIONS, ROOM_S):
                    return False
            self._due[request] = time.monotonic() + REQUEST_S
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._room:
            self._due.pop(request, None)
            self._room.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close the connections that are due (socketserver calls this again and again)."""
        now = time.monotonic()
        with self._room:
            for connection in [connection for connection, due in self._due.items() if due <= now]:
                _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or speaks something else: nothing is logged, lest it fill a disk."""


def _cut(connection: socket.socket) -> None:
    """End a connection that another thread reads or writes: that one closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _is_whole(head: bytes) -> bool:
    return b"\r\n\r\n" in head or b"\n\n" in head


class PageHandler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    server_version = "ttp"
    sys_version = ""

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()
        self._head = self._read_head()
        self.rfile = io.BufferedReader(io.BytesIO(self._head))

    def _read_head(self) -> bytes:
        """Return a request up to its empty line, or as much of it as is read; what follows is never read."""
        head = b""
        while not _is_whole(head) and len(head) < MOST_REQUEST_BYTES:
            part = self.request.recv(MOST_REQUEST_BYTES - len(head))
            if not part:
                break
            head += part
        return head

    def parse_request(self) -> bool:
        """Refuse a request that is too long, or of which the client has not sent all."""
        if not _is_whole(self._head):
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return False
        return super().parse_request()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/login":
            self._log_in(query)
            return
        if not self._is_let_in():
            self._say(
                HTTPStatus.UNAUTHORIZED,
                "not logged in: open the link that `ttp status --login` prints on a node of the job, or send the header"
                " Authorization: Bearer TOKEN with the token of the job's status_token file",
                {"WWW-Authenticate": "Bearer"},
            )
            return
        answer = self.server.answers().get(path)
        if answer is None and path in PATHS:
            self._say(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the job was not looked at for some seconds: try again",
                {"Retry-After": "2"},
            )
            return
        if answer is None:
            self._say(HTTPStatus.NOT_FOUND, f"no such page: expected {', '.join(PATHS)}")
            return
        self._send(HTTPStatus.OK, answer, {})

    def _is_let_in(self) -> bool:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.server.access.takes_token(token.strip()):
            return True
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name)
        except CookieError:
            return False
        return found is not None and self.server.access.takes_cookie(found.value)

    @property
    def _cookie_name(self) -> str:
        """Cookies are shared by all ports of a host."""
        return f"ttp_page_{self.server.port}"

    def _log_in(self, query: str) -> None:
        try:
            once = parse_qs(query, max_num_fields=4).get("once", [""])[0]
        except ValueError:
            once = ""
        if not self.server.access.takes_link(once):
            self._say(
                HTTPStatus.FORBIDDEN,
                "this link does not let anyone in: each does once, within five minutes. `ttp status --login` prints another",
            )
            return
        secure = "; Secure" if isinstance(self.request, ssl.SSLSocket) else ""
        # Lax: a link to the page that is followed in another site works; nothing here changes anything.
        cookie = f"{self._cookie_name}={self.server.access.cookie()}; Path=/; Max-Age={COOKIE_S:.0f}; HttpOnly; SameSite=Lax{secure}"
        self._say(HTTPStatus.SEE_OTHER, "logged in", {"Location": "/", "Set-Cookie": cookie})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is not a GET that this server reads."""
        self._say(HTTPStatus(code), "expected a GET of HTTP/1.0 or 1.1, of at most 16 KiB")

    def _say(self, status: HTTPStatus, text: str, headers: Mapping[str, str] = _HEADERS) -> None:
        self._send(status, Response("text/plain; charset=utf-8", f"{text}\n".encode()), headers)

    def _send(self, status: HTTPStatus, answer: Response, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        fixed = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": answer.policy,
        }
        for name, value in {**_HEADERS, **fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged, lest a client fill a disk."""
