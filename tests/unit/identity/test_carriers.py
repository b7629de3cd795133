"""Who may carry the streams of ranks, and what is believed on each: an agent relays those of its own node, and speaks on none itself."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit.identity.test_attacks import DENIED, JOB, LONG_S, TERM, Live, rank, registration, until
from ttp.controller.agent_link import request_shutdown, request_status
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.permissions import carrier_refusal
from ttp.controller.process import start_controller
from ttp.controller.stream_ends import Carrier, Outbox, StreamLink
from ttp.identity.authority import Authority
from ttp.identity.issuer import Issuer
from ttp.identity.role import Identity, Role
from ttp.identity.secret import make_secret
from ttp.launch.links.relay import Relay
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import DownwardParcel, encode_upward
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.messages import (
    AgentHello,
    Cause,
    CauseKind,
    FaultReport,
    Finished,
    Heartbeat,
    Phase,
    Registration,
    ReplaceFailed,
    Upward,
    Vouch,
    Welcome,
    WorkerExit,
)
from ttp.proto.stream import ControlStream, Relayed
from ttp.proto.transport import grpc, open_channel

AGENT = Identity(JOB, Role.AGENT, (0, 1), node="host")
OTHERS = [
    rank(0),
    Identity(JOB, Role.CONTROLLER, term=TERM),
    Identity(JOB, Role.KEEPER, node="host"),
    Identity(JOB, Role.OPERATOR),
]


def test_an_agent_carries_the_streams_of_ranks() -> None:
    assert carrier_refusal(AGENT) == ""


def test_without_certificates_each_is_believed() -> None:
    assert carrier_refusal(None) == ""


@pytest.mark.parametrize("peer", OTHERS, ids=str)
def test_no_other_process_carries_the_streams_of_ranks(peer: Identity) -> None:
    """Not even a rank its own."""
    assert carrier_refusal(peer) == f"got the streams of ranks from {peer}, expected them from an agent"


# --- what is believed of a carried stream ---


class Carried:
    """The controller's end of a relay's connection, and what it lets through."""

    def __init__(self, peer: Identity | None) -> None:
        self.refusals: list[str] = []
        self.said: list[tuple[int, Upward]] = []
        """By the order in which the streams have begun."""
        self.links: list[StreamLink] = []
        loop = mock.Mock(is_closed=lambda: False, call_soon_threadsafe=lambda deliver: deliver())
        mailroom = Outbox(loop, ControllerSettings(JOB, TERM, 8))
        self._carrier = Carrier(mailroom, peer, self.links.append, self.refusals.append)

    def begins(self, stream: int, of: int) -> None:
        self._take(pb.CarriedUpward(streams=[stream], begins=of))

    def says(self, stream: int, *messages: Upward) -> None:
        self.say_together((stream,), *messages)

    def say_together(self, streams: Sequence[int], *messages: Upward, job_id: str = JOB, term: int = TERM) -> None:
        """Send one envelope for several streams: one message of each, as a relay does with what comes at one moment."""
        envelope = encode_upward(job_id, term, messages).SerializeToString()
        self._take(pb.CarriedUpward(streams=streams, envelope=envelope))

    def _take(self, part: pb.CarriedUpward) -> None:
        parts, _ = self._carrier.take(pb.UpwardBundle(parts=[part]))
        self.said += [(self.links.index(link), message) for link, said in parts for message in said]

    def ends(self) -> dict[int, tuple[int, str]]:
        """Return how the controller ends streams, by their numbers: what the relay is sent next, up to its own end."""

        async def read() -> dict[int, tuple[int, str]]:
            self._carrier.close()
            found: dict[int, tuple[int, str]] = {}
            while (sent := await self._carrier.next_bundle()) is not None:
                for part in sent[0].parts:
                    if part.WhichOneof("body") == "ended":
                        found |= dict.fromkeys(part.streams, (part.ended.code, part.ended.text))
            return found

        return asyncio.run(read())


def beat(of: int) -> Heartbeat:
    return Heartbeat(of, Phase.COMPUTE, 1)


def registers(of: int) -> Registration:
    return registration(of)


def faults(of: int, culprit: int | None = None) -> FaultReport:
    ranks = (of if culprit is None else culprit,)
    return FaultReport(of, Cause(CauseKind.EXITED, ranks, "signal SIGKILL"), "")


@pytest.mark.parametrize("says", [registers, beat, faults, Finished])
def test_a_stream_of_a_rank_on_another_node_is_refused_as_soon_as_it_says_anything(
    says: Callable[[int], Upward],
) -> None:
    """An agent cannot speak for rank 5 by relaying it, whatever it relays besides."""
    carried = Carried(AGENT)
    carried.begins(1, of=0)
    carried.begins(2, of=5)
    carried.says(2, says(5))
    carried.says(2, says(0))
    carried.says(1, says(0))
    assert carried.said == [(0, says(0))]
    (refusal,) = carried.refusals
    assert "for rank 5" in refusal and "expected it from that rank or its agent" in refusal
    assert carried.ends() == {2: (DENIED.value[0], refusal)}


@pytest.mark.parametrize("of", [0, 1])
def test_a_stream_of_another_nodes_rank_does_not_speak_for_the_agents_own(of: int) -> None:
    """What began as rank 5's is believed of no rank at all."""
    carried = Carried(AGENT)
    carried.begins(1, of=5)
    carried.says(1, registers(of))
    assert carried.said == []
    assert carried.ends() == {1: (DENIED.value[0], carried.refusals[0])} and f"for rank {of}" in carried.refusals[0]


FOREIGN: list[Upward] = [
    registration(1),
    beat(1),
    Finished(1),
    faults(1),
    faults(0, culprit=1),
    AgentHello("host", (0,), (100,)),
    AgentHello("host", (0, 1), (100, 101)),
    Vouch((0,), (100,)),
    Vouch((0, 1), (100, 101)),
    WorkerExit(0, 100, "signal SIGKILL", 0.0),
    ReplaceFailed("host", 0, 1, "no memory"),
]


@pytest.mark.parametrize("message", FOREIGN, ids=lambda message: f"{type(message).__name__}")
def test_a_stream_of_one_rank_speaks_as_no_other_and_as_no_agent(message: Upward) -> None:
    """Although the agent may say each on a stream of its own. The other rank's stream goes on."""
    carried = Carried(AGENT)
    carried.begins(1, of=0)
    carried.begins(2, of=1)
    carried.says(1, registration(0), beat(0))
    carried.says(1, beat(0), message)
    carried.says(1, beat(0))
    carried.says(2, registration(1))
    assert carried.said == [(0, registration(0)), (0, beat(0)), (1, registration(1))], "nothing of the refused envelope"
    (refusal,) = carried.refusals
    assert f"got {type(message).__name__}" in refusal and "from rank 0 on host" in refusal
    assert carried.ends() == {1: (DENIED.value[0], refusal)}


def test_of_an_envelope_for_several_streams_each_message_is_its_own_streams() -> None:
    carried = Carried(AGENT)
    carried.begins(1, of=0)
    carried.begins(2, of=1)
    carried.say_together((2, 1), beat(1), beat(0))
    assert carried.said == [(1, beat(1)), (0, beat(0))] and carried.refusals == []


@pytest.mark.parametrize("message", FOREIGN, ids=lambda message: f"{type(message).__name__}")
def test_an_envelope_for_several_streams_lets_none_speak_as_another(message: Upward) -> None:
    """Wherever it stands there: the other streams go on, and what they say is believed."""
    for order in (1, -1):
        carried = Carried(AGENT)
        carried.begins(1, of=0)
        carried.begins(2, of=1)
        for one in (message, beat(0)):
            carried.say_together([1, 2][::order], *[one, beat(1)][::order])
        assert carried.said == [(1, beat(1))] * 2
        (refusal,) = carried.refusals
        assert f"got {type(message).__name__}" in refusal and "from rank 0 on host" in refusal
        assert carried.ends() == {1: (DENIED.value[0], refusal)}


def test_an_envelope_whose_messages_are_in_each_others_place_is_believed_of_neither() -> None:
    carried = Carried(AGENT)
    carried.begins(1, of=0)
    carried.begins(2, of=1)
    carried.say_together((1, 2), beat(1), beat(0))
    assert carried.said == [] and len(carried.refusals) == 2
    assert {code for code, _ in carried.ends().values()} == {DENIED.value[0]}


@pytest.mark.parametrize("messages", [(), (beat(0),), (beat(0), beat(1), beat(0))], ids=len)
def test_an_envelope_whose_messages_are_not_one_of_each_stream_is_believed_of_none(
    messages: tuple[Upward, ...],
) -> None:
    """Whose they are is not known. A stream that is not in it goes on."""
    carried = Carried(AGENT)
    for number in (1, 2, 3):
        carried.begins(number, of=number % 2)
    carried.say_together((2, 1), *messages)
    carried.says(3, beat(1))
    assert carried.said == [(2, beat(1))]
    invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert {number: code for number, (code, _) in carried.ends().items()} == {1: invalid, 2: invalid}


@pytest.mark.parametrize(
    ("job_id", "term", "ending"),
    [("other", TERM, DENIED), (JOB, TERM - 1, grpc.StatusCode.FAILED_PRECONDITION)],
    ids=["another job's", "another term's"],
)
def test_an_envelope_for_several_streams_of_another_job_or_term_is_believed_of_none(
    job_id: str, term: int, ending: grpc.StatusCode
) -> None:
    """A stream that is not in it goes on."""
    carried = Carried(AGENT)
    for number in (1, 2, 3):
        carried.begins(number, of=number % 2)
    carried.say_together((2, 1), beat(0), beat(1), job_id=job_id, term=term)
    carried.says(3, beat(1))
    assert carried.said == [(2, beat(1))]
    assert {number: code for number, (code, _) in carried.ends().items()} == dict.fromkeys((1, 2), ending.value[0])


def test_a_number_that_was_given_before_begins_no_other_ranks_stream() -> None:
    """Else what is still under way on the one before would be the other rank's."""
    carried = Carried(AGENT)
    carried.begins(1, of=0)
    carried.begins(2, of=1)
    carried.says(2, beat(0))
    assert len(carried.refusals) == 1
    assert list(carried.ends()) == [2]
    carried.begins(2, of=0)
    carried.says(2, beat(0))
    assert carried.said == [] and len(carried.links) == 2


@pytest.mark.parametrize("of", [0, 5])
def test_without_certificates_a_relay_is_believed_as_each_rank_is(of: int) -> None:
    carried = Carried(None)
    carried.begins(1, of=of)
    carried.says(1, registration(0), beat(5))
    assert carried.said == [(0, registration(0)), (0, beat(5))] and carried.refusals == []


# --- over TLS ---


class Caller:
    """A rank's stream through a relay."""

    def __init__(self, number: int, address: str, path: Path) -> None:
        self.number, self.reasons, self.relay_failed = number, queue.SimpleQueue[str](), False
        self.opened, self.welcomed = threading.Event(), threading.Event()
        self.stream = ControlStream(address, JOB, self, relayed=Relayed(str(path), number, LONG_S))
        self.stream.start()

    def stream_opened(self, stream: ControlStream) -> None:
        stream.send(registration(self.number))
        self.opened.set()

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        if isinstance(parcel.message, Welcome):
            self.welcomed.set()

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        self.reasons.put(reason)


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A controller with TLS that waits for its two ranks."""
    authority, issuer, journal = Authority(make_secret(), JOB), Issuer("host"), tmp_path / "journal.jsonl"
    issuer.begin(authority, range(1, 100))
    with monkeypatch.context() as environ:
        environ.setenv("TTP_IDENTITY", issuer.address)
        controller = start_controller(ControllerSettings(JOB, TERM, 2, heartbeat_s=0.5, lease_s=60.0), journal)
    job = Live(authority, controller, journal)
    yield job
    with job.speaking_as(AGENT):
        request_shutdown(controller.address, reason="the test is over")
    assert controller.wait(LONG_S) == 0
    issuer.close()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The socket of a relay in this process, which speaks as this process does."""
    relay = Relay(tmp_path / "relay", (0, 1), lease_s=60.0)
    relay.start()
    yield relay.path
    relay.close()


def test_an_agents_relay_carries_ranks_that_show_no_certificate(live: Live, path: Path) -> None:
    """Its own certificate stands for them."""
    with live.speaking_as(AGENT):
        callers = [Caller(number, live.controller.address, path) for number in (0, 1)]
        for caller in callers:
            assert caller.welcomed.wait(LONG_S)
    assert live.status_stage() == "running"
    with live.speaking_as(Identity(JOB, Role.OPERATOR)):
        assert [each.attached for each in request_status(live.controller.address, job_id=JOB).ranks] == [True, True]
    assert live.refusals() == []
    for caller in callers:
        caller.stream.close()


def test_a_relay_with_another_agents_certificate_carries_none_of_these_ranks(live: Live, path: Path) -> None:
    """The controller takes its stream, and refuses what comes on it."""
    with live.speaking_as(Identity(JOB, Role.AGENT, (1,), node="other")):
        callers = [Caller(number, live.controller.address, path) for number in (0, 1)]
        assert "got Registration for rank 0" in (reason := callers[0].reasons.get(timeout=LONG_S)), reason
        assert not callers[0].stream.relay_failed, "it is the controller's word"
    until(lambda: attached(live) == [1], "the other one, which is on that node")
    assert callers[1].reasons.empty()
    for caller in callers:
        caller.stream.close()
    until(lambda: any("for rank 0 from rank" in text for text in live.refusals()), "its line in the journal")


def attached(live: Live) -> list[int]:
    with live.speaking_as(Identity(JOB, Role.OPERATOR)):
        return [each.rank for each in request_status(live.controller.address, job_id=JOB).ranks if each.attached]


@pytest.mark.parametrize(
    "peer", [rank(0), Identity(JOB, Role.OPERATOR), Identity("job/1", Role.AGENT, (0, 1))], ids=str
)
def test_a_process_with_no_agents_certificate_of_this_attempt_carries_nothing(live: Live, peer: Identity) -> None:
    with live.speaking_as(peer), open_channel(live.controller.address) as channel:
        outbox: queue.SimpleQueue[pb.UpwardBundle | None] = queue.SimpleQueue()
        stub: Any = ControlStub(channel)
        call = stub.Carry(iter(outbox.get, None), timeout=LONG_S)
        outbox.put(pb.UpwardBundle(parts=[pb.CarriedUpward(streams=[1], begins=0)]))
        with pytest.raises(grpc.RpcError) as error:
            next(iter(call))
        outbox.put(None)
    assert isinstance(error.value, grpc.Call) and error.value.code() is DENIED
    until(lambda: len(live.refusals()) == 1, "its line in the journal")
    if peer.role is Role.RANK:
        assert "got the streams of ranks from rank 0, expected them from an agent" in live.refusals()[0]


def test_a_relay_in_a_process_with_a_ranks_certificate_is_refused_and_left_by_its_ranks(live: Live, path: Path) -> None:
    with live.speaking_as(rank(0)):
        reason = "UNAVAILABLE"
        while "UNAVAILABLE" in reason:  # gRPC has lost the controller's word: the rank comes again
            caller = Caller(0, live.controller.address, path)
            reason = caller.reasons.get(timeout=LONG_S)
            caller.stream.close()
    assert "PERMISSION_DENIED" in reason and "expected them from an agent" in reason
    assert not caller.opened.is_set() and caller.stream.relay_failed


def test_a_relay_without_a_certificate_reaches_no_controller(live: Live, path: Path) -> None:
    """Its handshake fails: the rank learns that the controller was not reached."""
    with live.speaking_as(None):
        caller = Caller(0, live.controller.address, path)
        assert "UNAVAILABLE" in caller.reasons.get(timeout=LONG_S)
        caller.stream.close()
    assert not caller.opened.is_set() and attached(live) == []
