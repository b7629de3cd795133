"""The controller's door, by raw gRPC: what it refuses, with which words, and how it follows ranks from stream to stream."""

from __future__ import annotations

import queue
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from ttp.controller.agent_link import request_status
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import DownwardParcel, decode_downward, decode_parcels, encode_upward
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.messages import (
    Downward,
    Exit,
    FileEntry,
    Finished,
    Freeze,
    Heartbeat,
    KeepAlive,
    Phase,
    Progress,
    Published,
    PublishOrder,
    Registration,
    ShardGroup,
    ShareResult,
    StateReport,
    Upward,
    Welcome,
    WorkerExit,
    WriteOrder,
    Written,
)
from ttp.proto.status import RankStatus
from ttp.proto.transport import grpc, open_channel

from .conftest import LONG_S, StartController


class RawStream:
    """One stream, spoken by hand."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: queue.SimpleQueue[pb.UpwardEnvelope | None] = queue.SimpleQueue()
        self._call = ControlStub(channel).Attach(iter(self._outbox.get, None), timeout=LONG_S)
        self._answers = iter(self._call)
        self.received: list[DownwardParcel] = []
        greeting = decode_downward(next(self._answers))
        assert greeting.message is None
        self.job_id, self.term = greeting.job_id, greeting.term

    def say(self, *messages: Upward, job_id: str | None = None, term: int | None = None) -> None:
        self.put(encode_upward(job_id or self.job_id, term or self.term, messages))

    def put(self, envelope: pb.UpwardEnvelope) -> None:
        self._outbox.put(envelope)

    def next(self) -> tuple[tuple[int, ...], Downward | None]:
        """Return the next message to ranks; what only shows that the controller is there comes by the clock."""
        while not self.received:
            self.received += [
                each for each in decode_parcels(next(self._answers)) if not isinstance(each.message, KeepAlive)
            ]
        parcel = self.received.pop(0)
        return parcel.ranks, parcel.message

    def end(self) -> None:
        """End the stream from this side and wait until the controller has ended it too."""
        self._outbox.put(None)
        for _ in self._call:
            pass

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end; return the status and the words of it."""
        with pytest.raises(grpc.RpcError) as error:
            for _ in self._call:
                pass
        self._outbox.put(None)
        assert isinstance(error.value, grpc.Call)
        return error.value.code(), error.value.details() or ""


def registration(rank: int, world_size: int = 3) -> Registration:
    return Registration(
        rank, world_size, "host", 100 + rank, (ShardGroup("g", "all", 1 << 20),), 0, ("/nowhere",), "{}"
    )


@pytest.fixture
def channel(new_controller: StartController) -> Iterator[grpc.Channel]:
    controller = new_controller(world_size=3, lease_s=20.0)
    with open_channel(controller.address) as channel:
        channel.address = controller.address  # type: ignore[attr-defined]
        yield channel


def attached(channel: grpc.Channel) -> list[bool]:
    return [rank.attached for rank in request_status(channel.address).ranks]  # type: ignore[attr-defined]


def test_a_controller_takes_as_many_streams_as_the_system_lets_it(new_controller: StartController) -> None:
    """A shell's usual limit is 1,024 descriptors; a large job has more ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        pid = new_controller(world_size=3, lease_s=20.0).pid
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_message_of_another_job_is_denied(channel: grpc.Channel) -> None:
    stream = RawStream(channel)
    stream.say(registration(0), job_id="other")
    code, text = stream.refusal()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "job 'job'" in text and "'other'" in text
    assert attached(channel) == [False] * 3


@pytest.mark.parametrize(("term", "why"), [(7, "this controller is fenced"), (-1, "that term is over")])
def test_a_message_of_another_term_is_refused(channel: grpc.Channel, term: int, why: str) -> None:
    stream = RawStream(channel)
    stream.say(registration(0), term=term)
    code, text = stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert why in text and f"term {term}" in text
    assert attached(channel) == [False] * 3


def test_a_stream_with_bytes_that_are_not_an_envelope_ends_with_the_reason(channel: grpc.Channel) -> None:
    """Left open and not read, it would cost its ranks their lease: they would take it for a stream that works."""
    begun: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    raw: Any = channel
    attach = raw.stream_stream("/ttp.control.v1.Control/Attach")
    for content in (registered_as_bytes(), b"\xff\xff\xff", registered_as_bytes()):
        begun.put(content)
    with pytest.raises(grpc.RpcError) as error:
        for _ in attach(iter(begun.get, None), timeout=LONG_S):
            pass
    begun.put(None)
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "UpwardEnvelope" in (error.value.details() or "")
    assert attached(channel) == [False] * 3


def registered_as_bytes() -> bytes:
    return encode_upward("job", 1, [registration(0)]).SerializeToString()


def test_a_rank_that_sends_before_it_registers_is_ordered_to_register(channel: grpc.Channel) -> None:
    stream = RawStream(channel)
    stream.say(Heartbeat(1, Phase.COMPUTE, 1))
    code, text = stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "rank 1 said Heartbeat before it registered" in text


@pytest.mark.parametrize("wrong", [registration(0, world_size=4), registration(3), registration(-1)])
def test_a_rank_of_another_world_is_refused(channel: grpc.Channel, wrong: Registration) -> None:
    stream = RawStream(channel)
    stream.say(wrong)
    code, text = stream.refusal()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "this controller's job has 3 ranks" in text


def test_a_message_of_an_unknown_kind_is_refused(channel: grpc.Channel) -> None:
    stream = RawStream(channel)
    stream.put(pb.UpwardEnvelope(job_id="job", term=1, messages=[pb.Upward()]))
    code, text = stream.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "unknown" in text


def test_one_stream_carries_several_ranks_and_one_envelope_addresses_them(channel: grpc.Channel) -> None:
    stream = RawStream(channel)
    stream.say(*(registration(rank) for rank in range(3)))
    welcomed: set[int] = set()
    while welcomed != {0, 1, 2}:
        ranks, message = stream.next()
        assert isinstance(message, Welcome)
        welcomed |= set(ranks)
    stream.say(*(Heartbeat(rank, Phase.READY, 5) for rank in range(3)))
    stream.say(*(Finished(rank) for rank in range(3)))
    ranks, message = stream.next()
    assert ranks == (0, 1, 2), "the release is one envelope for all three"


def test_a_whole_fault_over_one_stream_that_carries_all_ranks(channel: grpc.Channel) -> None:
    """What a node's agent sees that relays its ranks: one envelope for what one input causes, each message to its ranks."""
    stream = RawStream(channel)
    stream.say(*(registration(rank) for rank in range(3)))
    assert [stream.next()[0] for _ in range(3)] == [(0,), (1,), (2,)], "welcomes"
    stream.say(WorkerExit(1, 101, "signal SIGKILL", 0.0))
    ranks, freeze = stream.next()
    assert isinstance(freeze, Freeze) and ranks == (0, 2)
    stream.say(*(StateReport(rank, freeze.freeze_id, True, Phase.DONE, 5, 5, False, -1, ()) for rank in ranks))
    orders = {rank: order for (rank,), order in (stream.next(), stream.next())}
    assert sorted(orders) == [0, 2] and not stream.received, "both orders came in one envelope"
    for rank, order in orders.items():
        assert isinstance(order, WriteOrder)
        result = ShareResult((FileEntry(f"r{rank}", 4, "00", rank),))
        stream.say(Progress(rank, order.freeze_id), Written(rank, order.freeze_id, order.tmp_name, order.parts, result))
    (publisher,), order = stream.next()
    assert isinstance(order, PublishOrder) and [f.name for r in order.results for f in r.files] == ["r0", "r2"]
    stream.say(Published(publisher, order.freeze_id, order.step, "/nowhere/iter_0000005"))
    ranks, message = stream.next()
    assert isinstance(message, Exit) and ranks == (0, 2)


def test_a_rank_that_came_back_on_a_new_stream_is_not_lost_with_the_old_one(channel: grpc.Channel) -> None:
    """The old stream's end is noticed late: it must not detach the rank from the new one."""
    old, keeper = RawStream(channel), RawStream(channel)
    old.say(registration(0), registration(1))
    while attached(channel) != [True, True, False]:
        pass
    new = RawStream(channel)
    new.say(registration(0), Heartbeat(0, Phase.COMPUTE, 7))
    keeper.say(registration(2))
    while attached(channel) != [True, True, True] or request_status(channel.address).ranks[0].step != 7:  # type: ignore[attr-defined]
        pass
    old.end()
    while attached(channel)[1]:
        pass
    assert attached(channel) == [True, False, True]


def test_what_a_rank_sent_on_its_stream_before_is_dropped(channel: grpc.Channel) -> None:
    """Rank 0 has come to a new stream; what is read from the old one afterwards, which still carries rank 1, is not its word any
    more: neither a heartbeat of a step that is over, nor that its training has ended."""
    old, new = RawStream(channel), RawStream(channel)
    old.say(registration(0), registration(1), registration(2))
    while attached(channel) != [True, True, True]:
        pass
    new.say(registration(0), Heartbeat(0, Phase.COMPUTE, 7))

    def ranks() -> tuple[RankStatus, ...]:
        return request_status(channel.address).ranks  # type: ignore[attr-defined]

    while ranks()[0].step != 7:
        pass
    old.say(Heartbeat(0, Phase.READY, 3), Finished(0), Finished(1), Heartbeat(1, Phase.READY, 9))
    while ranks()[1].step != 9:
        pass
    assert ranks()[0].step == 7
    assert [rank.finished for rank in ranks()] == [False, True, False]
