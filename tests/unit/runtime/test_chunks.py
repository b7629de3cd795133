"""Large messages: in chunks, joined on the other side, and refused above a size."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from unittest import mock

import pytest

from tests.unit.runtime.test_server import RawStream, registration
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.stream_ends import Carrier, Outbox, StreamLink
from ttp.proto import chunks
from ttp.proto import control_pb2 as pb
from ttp.proto.address import split_address
from ttp.proto.chunks import CHUNK_BYTES, Joiner, split
from ttp.proto.codec import MOST_TEXT, CodecError, DownwardParcel, decode_parcels, encode_downward, encode_upward
from ttp.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from ttp.proto.messages import Cause, CauseKind, FaultReport, FileEntry, PublishOrder, ShardGroup, ShareResult, Welcome
from ttp.proto.stream import ControlStream
from ttp.proto.transport import MAX_MESSAGE_BYTES, SERVER_OPTIONS, Options, grpc, open_channel

from .conftest import LONG_S, StartController

ORDER = PublishOrder(1, 5, "/a", "iter_0000005_tmp_1", tuple(ShareResult((FileEntry(f"r{r}", 10, "ab" * 32, r),)) for r in range(500)),
                     Cause(CauseKind.EXITED, (0,), "signal SIGKILL"), None, 3)  # fmt: skip


def test_a_large_order_comes_whole_out_of_its_chunks() -> None:
    """Each chunk names job and term: whoever must not speak is refused at the first one."""
    whole = encode_downward("job", 3, (1,), ORDER)
    parts = split(whole, 1000)
    assert len(parts) > 20 and all(part.job_id == "job" and part.term == 3 and part.ByteSize() < 1100 for part in parts)
    joiner = Joiner[pb.DownwardEnvelope]()
    taken = [joiner.take(part) for part in parts]
    assert taken[:-1] == [None] * (len(parts) - 1) and taken[-1] == whole
    assert joiner.take(whole) == whole and split(whole) == [whole]


def test_chunks_that_make_no_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off, endless, of another job within, or no message at all."""
    envelope = encode_upward("job", 3, [FaultReport(0, Cause(CauseKind.EXCEPTION, (0,), "x"), "y" * 5000)])
    joiner = Joiner[pb.UpwardEnvelope]()
    assert joiner.take(split(envelope, 1000)[0]) is None
    with pytest.raises(CodecError, match="cut off"):
        joiner.take(envelope)
    with pytest.raises(CodecError, match="cannot be read"):
        Joiner[pb.UpwardEnvelope]().take(pb.UpwardEnvelope(job_id="job", term=3, chunk=b"\xff\xff"))
    (other,) = split(encode_upward("other", 3, []), 1)[:1]
    with pytest.raises(CodecError, match="another job's"):
        inner = encode_upward("other", 3, []).SerializeToString()
        Joiner[pb.UpwardEnvelope]().take(pb.UpwardEnvelope(job_id="job", term=3, chunk=inner))
    assert other.job_id == "other"
    monkeypatch.setattr(chunks, "MAX_WHOLE_BYTES", 3000)
    with pytest.raises(CodecError, match="too large"):
        split(envelope, 1000)
    endless = Joiner[pb.UpwardEnvelope]()
    part = pb.UpwardEnvelope(job_id="job", term=3, chunk=b"x" * 1000, more=True)
    with pytest.raises(CodecError, match="too large"):
        for _ in range(4):
            endless.take(part)


def test_a_text_for_people_has_a_size() -> None:
    """A traceback of many megabytes is cut in its middle: its beginning and its end say most."""
    envelope = encode_upward("job", 3, [FaultReport(0, Cause(CauseKind.EXCEPTION, (0,), "x"), "a" * 10**7 + "end")])
    detail = envelope.messages[0].fault_report.detail
    assert len(detail) < MOST_TEXT + 100 and detail.endswith("end") and "characters left out" in detail


def test_a_controller_refuses_a_message_above_the_size_and_takes_it_in_chunks(new_controller: StartController) -> None:
    """The limit is gRPC's own, so that nothing of such a message is read: a sender that keeps to none is refused by the controller."""
    controller = new_controller(world_size=1)
    large = pb.UpwardEnvelope()
    with grpc.insecure_channel(
        split_address(controller.address)[0], options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        stream = RawStream(channel)
        large = encode_upward(stream.job_id, stream.term, [registration(0, 1)])
        large.messages[0].registration.layout = "x" * (MAX_MESSAGE_BYTES + 1)
        stream.put(large)
        code, text = stream.refusal()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in text, (code, text)
        stream = RawStream(channel)
        for part in split(large):
            stream.put(part)
        assert isinstance(stream.next()[1], Welcome)
        stream.end()


class Reported:
    """A rank's end of a stream."""

    def __init__(self) -> None:
        self.opened, self.received = threading.Event(), queue.SimpleQueue[object]()

    def stream_opened(self, stream: ControlStream) -> None:
        self.opened.set()

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        self.received.put(parcel.message)

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        self.received.put(reason)


def test_a_rank_s_large_table_goes_up_in_chunks(new_controller: StartController) -> None:
    """Larger than a message may be: the shards of a rank that holds very many."""
    controller = new_controller(world_size=1)
    groups = tuple(ShardGroup(f"g{number}", "x" * MOST_TEXT, 8) for number in range(260))
    table = replace(registration(0, 1), groups=groups)
    assert encode_upward("job", 1, [table]).ByteSize() > MAX_MESSAGE_BYTES
    reported = Reported()
    stream = ControlStream(controller.address, "job", reported)
    stream.start()
    assert reported.opened.wait(LONG_S)
    stream.send(table)
    assert isinstance(reported.received.get(timeout=LONG_S), Welcome)
    stream.close()


def test_a_controller_s_large_order_goes_down_in_chunks() -> None:
    """Each of them is put into the outbox of its stream."""
    sent: list[pb.DownwardEnvelope | None] = []
    mailroom = mock.Mock(wraps=Outbox(mock.Mock(), ControllerSettings(job_id="job", term=3, world_size=2)))
    mailroom.settings = ControllerSettings(job_id="job", term=3, world_size=2)
    mailroom.put.side_effect = lambda *puts: sent.extend(put.args[0] for put in puts)
    files = tuple(ShareResult((FileEntry(f"r{r}_{'x' * 200}", 10, "ab" * 32, r),)) for r in range(60_000))
    StreamLink(mailroom).send([((1,), replace(ORDER, results=files))])
    assert len(sent) > 1 and all(part is not None and part.ByteSize() < MAX_MESSAGE_BYTES for part in sent)
    joiner = Joiner[pb.DownwardEnvelope]()
    *first, whole = [joiner.take(part) for part in sent if part is not None]
    assert set(first) == {None} and whole is not None
    (parcel,) = decode_parcels(whole)
    assert isinstance(parcel.message, PublishOrder) and parcel.message.results == files


class Orders(ControlServicer):
    """A controller that sends each rank these envelopes."""

    def __init__(self, *sent: pb.DownwardEnvelope) -> None:
        self._sent = sent
        self.over = threading.Event()

    def Attach(self, request_iterator: object, context: object) -> Iterator[pb.DownwardEnvelope]:  # type: ignore[override]
        yield encode_downward("job", 3, [], None)
        yield from self._sent
        self.over.wait(LONG_S)


@contextlib.contextmanager
def attached(service: Orders, options: Options) -> Iterator[Reported]:
    """Yield what a rank receives from this controller, whose server has these options."""
    server = grpc.server(futures.ThreadPoolExecutor(2), options=options)
    add_ControlServicer_to_server(service, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    reported = Reported()
    stream = ControlStream(f"127.0.0.1:{port}", "job", reported)
    stream.start()
    try:
        yield reported
    finally:
        stream.close()
        service.over.set()
        server.stop(None).wait(LONG_S)


def test_a_large_order_comes_to_a_rank_whole() -> None:
    """Each chunk is larger than what gRPC lets a client receive by itself."""
    files = tuple(ShareResult((FileEntry(f"r{r}_{'x' * 200}", 10, "ab" * 32, r),)) for r in range(60_000))
    order = replace(ORDER, results=files)
    service = Orders(*split(encode_downward("job", 3, [0], order)))
    with attached(service, SERVER_OPTIONS) as reported:
        assert reported.received.get(timeout=LONG_S) == order


def test_a_rank_refuses_a_message_above_the_size() -> None:
    """The limit is gRPC's own: a controller that keeps to none fills no memory of a rank's."""
    service = Orders(pb.DownwardEnvelope(job_id="job", term=3, chunk=b"x" * (MAX_MESSAGE_BYTES + 1)))
    with attached(service, (("grpc.max_send_message_length", -1),)) as reported:
        assert "larger than max" in str(reported.received.get(timeout=LONG_S))


def test_what_is_sent_together_to_a_relay_is_at_most_as_large_as_a_message_may_be() -> None:
    """The chunks of an order are most of one each."""

    async def sizes() -> list[int]:
        mailroom = Outbox(asyncio.get_running_loop(), ControllerSettings(job_id="job", term=3, world_size=2))
        relay = Carrier(mailroom, None, lambda link: None, lambda text: None)
        relay.take(pb.UpwardBundle(parts=[pb.CarriedUpward(streams=[1], begins=0)]))
        for _ in range(3):
            relay.queue([1], pb.DownwardEnvelope(job_id="job", term=3, chunk=b"x" * CHUNK_BYTES))
        relay.close()
        await asyncio.sleep(0)  # the greeting and the end are put in by the loop
        found = []
        while (sent := await relay.next_bundle()) is not None:
            found.append(sent[0].ByteSize())
        return found

    found = asyncio.run(sizes())
    assert sum(found) > 3 * CHUNK_BYTES and max(found) < MAX_MESSAGE_BYTES


def test_a_message_of_another_job_is_refused_before_it_is_read(new_controller: StartController) -> None:
    """It holds what cannot be read: whose it is counts first."""
    controller = new_controller(world_size=1)
    with open_channel(controller.address) as channel:
        stream = RawStream(channel)
        stream.put(pb.UpwardEnvelope(job_id="other", term=stream.term, messages=[pb.Upward()]))
        code, text = stream.refusal()
        assert code is grpc.StatusCode.PERMISSION_DENIED and "'other'" in text
        stream = RawStream(channel)
        stream.put(pb.UpwardEnvelope(job_id="other", term=stream.term, chunk=b"\xff", more=True))
        assert stream.refusal()[0] is grpc.StatusCode.PERMISSION_DENIED


class Foreign(ControlServicer):
    """A controller of another job."""

    def Attach(self, request_iterator: object, context: object) -> Iterator[pb.DownwardEnvelope]:  # type: ignore[override]
        yield pb.DownwardEnvelope(job_id="other", term=3, chunk=b"\xff")


def test_a_rank_gives_up_a_controller_of_another_job_before_it_reads_more() -> None:
    """What that one sends cannot be read at all."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_ControlServicer_to_server(Foreign(), server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    reported = Reported()
    ControlStream(f"127.0.0.1:{port}", "job", reported).start()
    reason = reported.received.get(timeout=LONG_S)
    assert reason == f"127.0.0.1:{port} is the controller of job 'other', expected 'job'; check its address"
    assert not reported.opened.is_set()
    server.stop(None).wait(LONG_S)
