"""Whatever bytes come to a controller's TLS port: it answers an honest rank as before, and neither descriptors nor memory pile up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.guarded import AGENT, JOB, TERM, GuardedController, Job, guarded_controller, job, until
from tests.fuzz.live import LONG_S, envelope
from tests.fuzz.test_live_controller import way_to
from ttp.controller.core.facts.state import Stage
from ttp.identity.authority import Authority
from ttp.identity.role import Identity, Role, controller_name
from ttp.proto import messages as m
from ttp.proto.transport import MAX_MESSAGE_BYTES

settings.load_profile("fuzz")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
MOST_OPEN = 20
"""Connections that stay open, and say nothing more, while others come."""
DEATH = envelope([m.WorkerExit(2, 102, "signal SIGKILL", 0.0)])
"""What would change the controller's stage if it were received."""


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Return an HTTP/2 frame; `length`: what it says of itself in place of the truth."""
    size = len(payload) if length is None else length
    return size.to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def call(path: str, body: bytes, length: int | None = None) -> bytes:
    """Return the frames of a call of gRPC with one message; `length`: what the message says of itself."""
    fields = ((":method", "POST"), (":scheme", "https"), (":path", path), (":authority", "c"), ("te", "trailers"),
              ("content-type", "application/grpc"))  # fmt: skip
    block = b"".join(b"\0" + b"".join(bytes((len(each),)) + each.encode() for each in pair) for pair in fields)
    size = len(body) if length is None else length
    message = b"\0" + size.to_bytes(4) + body
    return frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, 0, 1, message)


def some_http2(rng: random.Random) -> bytes:
    """Return what a client might send by mistake or on purpose: frames at random, calls with wrong lengths, cut off somewhere."""
    parts = [PREFACE if rng.random() < 0.9 else rng.randbytes(24), frame(SETTINGS, 0, 0, b"")]
    for _ in range(rng.randrange(1, 8)):
        choice, payload = rng.random(), rng.randbytes(rng.choice((0, 1, 4, 8, 40, 300)))
        if choice < 0.25:
            length = rng.choice((0, 1, MAX_MESSAGE_BYTES + 1, 2**31, 2**32 - 1))
            parts.append(
                call(f"/ttp.control.v1.Control/{rng.choice(('Attach', 'Status', 'Shutdown'))}", payload, length)
            )
        elif choice < 0.4:
            kind = rng.choice((DATA, HEADERS, SETTINGS, PING, CONTINUATION))
            parts.append(frame(kind, rng.randrange(256), rng.choice((0, 1, 2, 2**31 - 1)), payload, 2**24 - 1))
        elif choice < 0.5:  # many streams that are given up at once
            for stream in range(3, 3 + 2 * rng.randrange(1, 200), 2):
                parts += [
                    frame(HEADERS, END_HEADERS, stream, b"\x83\x86\x84"),
                    frame(RST_STREAM, 0, stream, bytes(4)),
                ]
        else:
            parts.append(frame(rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 3, 2**32 - 1)), payload))
    whole = b"".join(parts)
    return whole[: rng.choice((len(whole), rng.randrange(len(whole)))) or 1]


def context(authority: bytes, shown: tuple[Path, Path] | None) -> ssl.SSLContext:
    """Return how Python's own TLS connects. `shown`: files with a certificate and its key."""
    made = ssl.create_default_context(cadata=authority.decode())
    made.set_alpn_protocols(["h2"])
    if shown is not None:
        made.load_cert_chain(*shown)
    return made


class Port:
    """The controller's port, and who connects to it."""

    def __init__(self, controller: GuardedController, job: Job, folder: Path) -> None:
        self.controller = controller
        self.step = 0
        self.held: list[socket.socket] = []
        trusted = job.authority.certificate
        strangers = Identity(JOB, Role.AGENT, AGENT.ranks)
        self.own = context(trusted, self._files(folder, "own", job.authority, Identity(JOB, Role.RANK, (1,))))
        self.strangers = context(trusted, self._files(folder, "stranger", job.stranger, strangers))
        self.without = context(trusted, None)

    @staticmethod
    def _files(folder: Path, name: str, authority: Authority, identity: Identity) -> tuple[Path, Path]:
        issued = authority.issue(identity)
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, content in zip(paths, (issued.certificate, issued.key), strict=True):
            path.write_bytes(content)
        return paths

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.controller.port), LONG_S)

    def hello(self) -> bytes:
        """Return the bytes with which TLS begins."""
        sent = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            self.own.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=controller_name(TERM)).do_handshake()
        return sent.read()

    def leave(self, connection: socket.socket, rng: random.Random) -> None:
        """Close one half of it or none, and keep it open, or close it, properly or by a reset."""
        with contextlib.suppress(OSError):
            if rng.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
            elif rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if rng.random() < 0.2 and len(self.held) < MOST_OPEN:
            self.held.append(connection)
        else:
            connection.close()

    def send(self, content: bytes, rng: random.Random) -> None:
        """Send bytes as they are, at once or in small pieces, and leave."""
        connection = self.connect()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            if rng.random() < 0.2:
                for byte in content[:200]:
                    connection.sendall(bytes((byte,)))
                content = content[200:]
            connection.sendall(content)
        self.leave(connection, rng)

    def session(self, tls: ssl.SSLContext, content: bytes, rng: random.Random) -> bytes:
        """Send bytes in a session of TLS, read what comes at once, and leave."""
        got = b""
        connection = self.connect()
        with contextlib.suppress(OSError):
            secured = tls.wrap_socket(connection, server_hostname=controller_name(TERM))
            connection = secured
            secured.sendall(content)
            got = secured.recv(1 << 16)
        self.leave(connection, rng)
        return got

    async def check(self) -> None:
        """An honest rank is received, and answered, and nothing else has changed."""
        self.step += 1
        await self.controller.say(m.Heartbeat(0, m.Phase.COMPUTE, self.step))
        status = await self.controller.until_status(lambda status: status.ranks[0].step == self.step)
        assert status.stage == Stage.RUNNING.value and all(rank.attached and not rank.dead for rank in status.ranks)
        await self.controller.check_resources(len(self.held))


def garbage(port: Port, rng: random.Random) -> None:
    """Bytes that are not TLS, or only begin like it."""
    start = rng.choice(
        (b"", b"\x16\x03\x01", b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x02\x00\x01\xff\xff\xff", b"GET / HTTP/1.1\r\n")
    )
    port.send(start + rng.randbytes(rng.choice((0, 1, 100, 5000, 1 << 20))), rng)


def wrong_hello(port: Port, rng: random.Random) -> None:
    """The first message of TLS, cut off or changed."""
    content = bytearray(port.hello())
    for _ in range(rng.choice((0, 1, 1, 3, 30))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    port.send(bytes(content[: rng.choice((len(content), rng.randrange(len(content))))]), rng)


def broken_handshake(port: Port, rng: random.Random) -> None:
    """A handshake that ends in the middle, or goes on with garbage."""
    connection = port.connect()
    with contextlib.suppress(OSError):
        connection.sendall(port.hello())
        connection.recv(rng.choice((1, 1 << 16)))
        connection.sendall(
            rng.choice((b"", b"\x14\x03\x03\x00\x01\x01\x17\x03\x03\x40\x00")) + rng.randbytes(rng.randrange(200))
        )
    port.leave(connection, rng)


def session_of_a_rank(port: Port, rng: random.Random) -> None:
    """A session with a rank's certificate, and in it what no gRPC client sends."""
    content = some_http2(rng) if rng.random() < 0.8 else rng.randbytes(rng.choice((1, 100, 1 << 18)))
    port.session(port.own, content, rng)


def session_without_a_certificate(port: Port, rng: random.Random) -> None:
    """A right call, from who may not say anything. TLS 1.3 lets the client write before it learns that it was refused."""
    right = (
        PREFACE
        + frame(SETTINGS, 0, 0, b"")
        + call(f"/ttp.control.v1.Control/{rng.choice(('Attach', 'Shutdown'))}", DEATH)
    )
    tls = rng.choice((port.without, port.strangers))
    assert port.session(tls, rng.choice((right, some_http2(rng))), rng) == b""


def plain(port: Port, rng: random.Random) -> None:
    """gRPC without TLS."""
    right = PREFACE + frame(SETTINGS, 0, 0, b"") + call("/ttp.control.v1.Control/Attach", DEATH)
    port.send(rng.choice((right, some_http2(rng))), rng)


ATTACKS: dict[str, Callable[[Port, random.Random], None]] = {
    each.__name__: each
    for each in (garbage, wrong_hello, broken_handshake, session_of_a_rank, session_without_a_certificate, plain)
}


@contextlib.asynccontextmanager
async def opened(job: Job) -> AsyncIterator[Port]:
    chosen, said = way_to(Stage.RUNNING)
    with tempfile.TemporaryDirectory() as folder:
        async with guarded_controller(job, chosen, said, Stage.RUNNING.value, Path(folder)) as controller:
            port = Port(controller, job, Path(folder))
            yield port
            for connection in port.held:
                connection.close()
            await port.controller.check_resources()
            await controller.end(counted=False)
            texts = {line["text"] for line in controller.not_allowed()}
            assert all("from rank 1" in text for text in texts), texts  # the only one who gets in


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as each:
        yield each


@pytest.fixture(scope="module")
def port(runner: asyncio.Runner) -> Iterator[Port]:
    """One controller for all cases: whatever one of them leaves behind is there for the next."""
    stack = contextlib.AsyncExitStack()
    with job() as each:
        yield runner.run(stack.enter_async_context(opened(each)))
        runner.run(stack.aclose())


@pytest.mark.parametrize("name", ATTACKS)
@settings(phases=(Phase.generate,))
@given(st.randoms(use_true_random=True))
def test_bytes_at_the_port_change_nothing(name: str, runner: asyncio.Runner, port: Port, rng: random.Random) -> None:
    ATTACKS[name](port, rng)
    runner.run(port.check())


def test_a_right_call_in_a_session_of_the_job_is_received(runner: asyncio.Runner, port: Port) -> None:
    """So the attacks come as far as they are meant to."""
    right = PREFACE + frame(SETTINGS, 0, 0, b"") + call("/ttp.control.v1.Control/Attach", DEATH)
    with port.connect() as plain, port.own.wrap_socket(plain, server_hostname=controller_name(TERM)) as secured:
        secured.sendall(right)
        refusal = "got WorkerExit from rank 1, expected it from an agent"
        runner.run(until(lambda: any(line["text"] == refusal for line in port.controller.not_allowed()), refusal))
