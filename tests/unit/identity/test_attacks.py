"""What others can do to a live controller and its ranks: nothing, without the job's secret; what their role allows, with a certificate."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttp.controller.agent_link import request_shutdown, request_status
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.permissions import shutdown_refusal
from ttp.controller.process import ControllerProcess, start_controller
from ttp.errors import ControllerError
from ttp.identity import own
from ttp.identity.authority import LIFETIME_S, SKEW_S, Authority
from ttp.identity.issuer import Issuer
from ttp.identity.role import Identity, Role
from ttp.identity.secret import make_secret
from ttp.proto import control_pb2 as pb
from ttp.proto import transport
from ttp.proto.codec import decode_downward, encode_upward
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.messages import (
    AgentHello,
    Cause,
    CauseKind,
    FaultReport,
    Heartbeat,
    Phase,
    Published,
    Registration,
    Regrouped,
    ReplaceFailed,
    ShardGroup,
    Upward,
    Vouch,
    WorkerExit,
)
from ttp.proto.stream import ControlStream
from ttp.proto.transport import grpc, open_channel

JOB, TERM = "job/0", 7
LONG_S = 30.0
DENIED = grpc.StatusCode.PERMISSION_DENIED


@dataclass
class Live:
    """A controller with TLS, with its two ranks attached."""

    authority: Authority
    controller: ControllerProcess
    journal: Path

    def status_stage(self) -> str:
        with self.speaking_as(Identity(JOB, Role.OPERATOR)):
            return request_status(self.controller.address, job_id=JOB).stage

    @contextlib.contextmanager
    def speaking_as(self, peer: Identity | None, authority: Authority | None = None) -> Iterator[None]:
        """Let this process have the certificate of another for a while."""
        issued = (authority or self.authority).issue(peer) if peer is not None else None
        before = own._obtain
        own.use((lambda: issued) if issued is not None else None)
        try:
            yield
        finally:
            own.use(before)

    def refusals(self) -> list[str]:
        events = [json.loads(line) for line in self.journal.read_text(encoding="utf-8").splitlines()]
        return [event["fields"]["text"] for event in events if event.get("event") == "not_allowed"]


class Stream:
    """A stream, spoken by hand as whoever this process is; ended after `within_s`."""

    def __init__(self, channel: grpc.Channel, within_s: float = LONG_S) -> None:
        self.outbox: queue.SimpleQueue[pb.UpwardEnvelope | None] = queue.SimpleQueue()
        self.call = ControlStub(channel).Attach(iter(self.outbox.get, None), timeout=within_s)

    def say(self, *messages: Upward) -> None:
        assert decode_downward(next(iter(self.call))).term == TERM
        self.outbox.put(encode_upward(JOB, TERM, messages))

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as error:
            for _ in self.call:
                pass
        self.outbox.put(None)
        assert isinstance(error.value, grpc.Call)
        return error.value.code(), error.value.details() or ""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another process does, where it gives no other sign."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def registration(rank: int) -> Registration:
    return Registration(rank, 2, "host", 100 + rank, (ShardGroup("g", "all", 1 << 20),), 0, ("/nowhere",), "{}")


def rank(number: int) -> Identity:
    return Identity(JOB, Role.RANK, (number,))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    authority = Authority(make_secret(), JOB)
    issuer = Issuer("host")
    issuer.begin(authority, range(1, 100))
    before = os.environ.get("TTP_IDENTITY")
    os.environ["TTP_IDENTITY"] = issuer.address
    journal = folder / "journal.jsonl"
    try:
        controller = start_controller(ControllerSettings(JOB, TERM, 2, heartbeat_s=0.5, lease_s=60.0), journal)
    finally:
        del os.environ["TTP_IDENTITY"]
        if before is not None:
            os.environ["TTP_IDENTITY"] = before
    job = Live(authority, controller, journal)
    streams = []
    with contextlib.ExitStack() as channels:
        for number in range(2):
            with job.speaking_as(rank(number)):
                stream = Stream(channels.enter_context(open_channel(controller.address)))
                stream.say(registration(number))
                streams.append(stream)  # one that nothing refers to is cancelled
        until(lambda: job.status_stage() == "running", "both registrations")
        yield job
        assert job.status_stage() == "running", "an attack has changed something"
        with job.speaking_as(Identity(JOB, Role.AGENT, (0, 1))):
            request_shutdown(controller.address, reason="the test is over")
        assert controller.wait(LONG_S) == 0
    issuer.close()


def attach_refusal(live: Live, *messages: Upward) -> tuple[grpc.StatusCode, str]:
    with open_channel(live.controller.address) as channel:
        stream = Stream(channel)
        with contextlib.suppress(grpc.RpcError):
            stream.say(*messages)
        return stream.refusal()


FORGED = {
    "a registration of another rank": (registration(0),),
    "a heartbeat of another rank": (registration(1), Heartbeat(0, Phase.COMPUTE, 5)),
    "a checkpoint that another rank published": (registration(1), Published(0, 1, 1, "/forged")),
    "a fault of another rank": (
        registration(1),
        FaultReport(1, Cause(CauseKind.EXITED, (0,), "signal SIGKILL"), ""),
    ),
    "an agent's hello": (AgentHello("host", (1,), (101,)),),
    "a death": (WorkerExit(1, 101, "signal SIGKILL", 0.0),),
    "a vouch": (Vouch((1,), (101,)),),
    "that no process can be started in its place": (ReplaceFailed("host", 1, 1, "no memory"),),
    "that another rank has regrouped": (registration(1), Regrouped(0, 1)),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_rank_cannot_send(live: Live, what: str) -> None:
    with live.speaking_as(rank(1)):
        code, text = attach_refusal(live, *FORGED[what])
    assert code is DENIED and "expected it from" in text
    until(lambda: any("from rank 1" in refusal for refusal in live.refusals()), "its line in the journal")


@pytest.mark.parametrize(
    "message",
    [
        AgentHello("host", (1, 0), (101, 100)),
        WorkerExit(0, 100, "signal SIGKILL", 0.0),
        Vouch((1, 0), (101, 100)),
        ReplaceFailed("other", 0, 1, "no memory"),
        registration(0),
    ],
)
def test_an_agent_cannot_speak_for_another_nodes_ranks(live: Live, message: Upward) -> None:
    with live.speaking_as(Identity(JOB, Role.AGENT, (1,), node="other")):
        code, text = attach_refusal(live, message)
    assert code is DENIED and "for rank 0 from agent on other" in text


@pytest.mark.parametrize(
    "peer", [Identity(JOB, Role.OPERATOR), Identity(JOB, Role.CONTROLLER, term=50), Identity("job/1", Role.RANK, (0,))]
)
def test_no_other_role_and_no_other_attempt_takes_part(live: Live, peer: Identity) -> None:
    with live.speaking_as(peer):
        assert attach_refusal(live, registration(0))[0] is DENIED


@pytest.mark.parametrize(
    ("peer", "term"),
    [
        (Identity(JOB, Role.OPERATOR), 0),
        (Identity(JOB, Role.RANK, (0,)), 0),
        (Identity(JOB, Role.CONTROLLER, term=8), 9),  # with another's term
        (Identity(JOB, Role.CONTROLLER, term=8), 0),
        (Identity(JOB, Role.CONTROLLER, term=TERM), TERM),
        (Identity(JOB, Role.CONTROLLER, term=6), 6),
        (Identity("job/1", Role.AGENT, (0, 1)), 0),
    ],
)
def test_a_controller_ends_only_for_an_agent_or_a_controller_of_a_higher_term(
    live: Live, peer: Identity, term: int
) -> None:
    with live.speaking_as(peer), pytest.raises(ControllerError, match=r"PERMISSION_DENIED|FAILED_PRECONDITION"):
        request_shutdown(live.controller.address, term=term)


def test_an_operator_does_not_even_see_the_greeting_of_a_stream(live: Live) -> None:
    with live.speaking_as(Identity(JOB, Role.OPERATOR)), open_channel(live.controller.address) as channel:
        stream = Stream(channel)
        code, text = stream.refusal()
    assert code is DENIED and "expected a rank's or an agent's" in text


@pytest.mark.parametrize(("world_size", "allowed"), [(1, True), (2, False)])
def test_a_rank_ends_the_controller_that_it_has_to_itself_alone(world_size: int, allowed: bool) -> None:
    assert (shutdown_refusal(rank(0), JOB, 0, world_size) == "") == allowed


def test_a_controller_shows_a_renewed_certificate_at_the_next_handshake(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(transport.grpc, "dynamic_ssl_server_credentials", lambda *of: given.extend(of))
    monkeypatch.setattr(transport.grpc, "ssl_server_certificate_configuration", lambda pairs, believed: pairs[0][1])
    controller = Identity(JOB, Role.CONTROLLER, term=50)
    first, second = live.authority.issue(controller), live.authority.issue(controller)
    shown = [first]
    monkeypatch.setattr(own, "_obtain", lambda: shown[0])
    transport.server_credentials()
    configuration, renewed, client_must_show_one = given
    assert (configuration, renewed(), client_must_show_one) == (first.certificate, None, True)
    shown[0] = second
    assert (renewed(), renewed()) == (second.certificate, None)


def test_without_a_certificate_nothing_is_answered(live: Live) -> None:
    with live.speaking_as(None), pytest.raises(ControllerError, match="UNAVAILABLE"):
        request_status(live.controller.address)


def test_a_certificate_of_another_job_is_refused(live: Live) -> None:
    with live.speaking_as(rank(0), Authority(make_secret(), JOB)), pytest.raises(ControllerError, match="UNAVAILABLE"):
        request_status(live.controller.address)


def test_a_certificate_of_another_attempt_of_the_job_is_refused(live: Live) -> None:
    secret = make_secret()
    with live.speaking_as(rank(0), Authority(secret, "job/1")), pytest.raises(ControllerError, match="UNAVAILABLE"):
        request_status(live.controller.address)


@contextlib.contextmanager
def clock_apart(live: Live, by_s: float) -> Iterator[None]:
    """Issue as an agent does whose clock is so far ahead."""
    before = live.authority._clock
    live.authority._clock = lambda: time.time() + by_s
    try:
        yield
    finally:
        live.authority._clock = before


def test_a_certificate_that_has_expired_is_refused(live: Live) -> None:
    with clock_apart(live, -(LIFETIME_S + 2 * SKEW_S)), live.speaking_as(rank(0)), pytest.raises(ControllerError):
        request_status(live.controller.address)


@pytest.mark.parametrize("by_s", [3600.0, -LIFETIME_S])
def test_clocks_may_be_apart(live: Live, by_s: float) -> None:
    with clock_apart(live, by_s), live.speaking_as(rank(0)):
        assert request_status(live.controller.address).term == TERM


@pytest.mark.parametrize("claimed", [TERM - 1, TERM + 1, TERM * 10])
def test_a_controller_of_another_term_than_its_address_says_is_not_followed(live: Live, claimed: int) -> None:
    place = live.controller.address.partition("/")[0]
    with live.speaking_as(rank(0)), pytest.raises(ControllerError, match="UNAVAILABLE"):
        request_status(f"{place}/{claimed}")


class Listening:
    """Collects what a stream reports."""

    def __init__(self) -> None:
        self.opened = 0
        self.reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def stream_opened(self, stream: ControlStream) -> None:
        self.opened += 1

    def stream_received(self, stream: ControlStream, parcel: object) -> None: ...

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        self.reasons.put(reason)


def test_a_rank_that_poses_as_a_controller_is_not_followed(live: Live) -> None:
    """It has a certificate of the job, and listens: what it has is not a controller's."""
    issued = live.authority.issue(rank(1))
    secure = grpc.ssl_server_credentials([(issued.key, issued.certificate)], issued.authority, require_client_auth=True)
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", secure)
    server.start()
    listening = Listening()
    try:
        for address in (f"127.0.0.1:{port}/99", f"127.0.0.1:{port}"):
            with live.speaking_as(rank(0)):
                stream = ControlStream(address, JOB, listening)
                stream.start()
                assert listening.reasons.get(timeout=LONG_S)
                stream.close()
        assert listening.opened == 0
    finally:
        server.stop(None)


def raw(live: Live, act: Callable[[socket.socket], None]) -> None:
    host, _, port = live.controller.address.partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port)), LONG_S) as connection, contextlib.suppress(OSError):
        act(connection)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2000))
def test_garbage_before_the_handshake_changes_nothing(live: Live, content: bytes) -> None:
    raw(live, lambda connection: connection.sendall(content))
    assert live.controller.process.poll() is None


def test_a_hundred_silent_connections_and_a_long_message_keep_no_one_waiting(live: Live) -> None:
    host, _, port = live.controller.address.partition("/")[0].rpartition(":")
    with contextlib.ExitStack() as silent:
        for _ in range(100):
            silent.enter_context(socket.create_connection((host, int(port)), LONG_S))
        flood = threading.Thread(
            target=raw, args=(live, lambda connection: connection.sendall(b"\x16\x03\x01" * (8 << 20)))
        )
        flood.start()
        assert live.status_stage() == "running"
        flood.join(LONG_S)
        assert not flood.is_alive()


def test_refused_messages_are_counted_and_logged_once(live: Live) -> None:
    before = len(live.refusals())
    for _ in range(9):
        with live.speaking_as(rank(0)):
            assert attach_refusal(live, WorkerExit(0, 4711, "signal SIGKILL", 0.0))[0] is DENIED
            with pytest.raises(ControllerError):  # from another port each time
                request_shutdown(live.controller.address)
    assert len(live.refusals()) - before <= 2
