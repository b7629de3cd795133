"""One stream at the controller's end, without a network: which envelopes are taken, and what is sent, against a few lines that say so.

The simulation's network (`tests/simulation/network.py`) takes for granted what is shown here for any order of calls: what a rank
says in the job and term of its controller comes once, in order, until the stream ends; whatever else it says ends the stream; what
is sent comes in order, and before the end; and the end is noticed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.handler import StreamEnded, StreamMessages
from ttp.controller.server import ControlService
from ttp.controller.stream_ends import StreamLink
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import decode_parcels, encode_upward
from ttp.proto.messages import Finished, KeepAlive

JOB, TERM = "job", 5
DENIED, FENCED, INVALID = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)


@dataclass
class Stream:
    """A caller's end, and what the controller's driver sees of it."""

    acts: list[tuple[str, Any]]
    pauses: int
    """Before each act: so often others run."""
    said: list[int] = field(default_factory=list)
    ends: int = 0
    late: int = 0
    """What was received from it after its end."""
    written: list[pb.DownwardEnvelope] = field(default_factory=list)
    status: tuple[grpc.StatusCode, str] | None = None
    link: StreamLink | None = None
    other: StreamLink | None = None
    """Of another rank on the same node."""

    # what `ControlService` needs of its driver

    finished = ""

    def put(self, item: Any) -> None:
        match item:
            case StreamMessages(((_, said),)):
                self.late += self.ends
                self.said += [message.rank for message in said if isinstance(message, Finished)]
            case StreamEnded(link):
                self.ends += link is not self.other

    # what it needs of gRPC

    async def requests(self, service: ControlService) -> AsyncIterator[pb.UpwardEnvelope]:
        """Do one act after the other, with pauses in which the service goes on."""
        for what, value in self.acts:
            for _ in range(self.pauses):
                await asyncio.sleep(0)
            self.link = self.link or next(iter(service._links))
            match what:
                case "says":
                    job_id, term, rank = value
                    yield encode_upward(job_id, term, [Finished(rank)])
                case "garbles":
                    yield pb.UpwardEnvelope(job_id=JOB, term=TERM, messages=[pb.Upward()])
                case "is sent":
                    self.link.send([((rank,), KeepAlive()) for rank in value])
                case "is refused":
                    for text in value:
                        self.link.reject(text)
                case "is finished":
                    service.finish_streams()

    async def write(self, envelope: pb.DownwardEnvelope) -> None:
        assert not self.ends and self.status is None
        self.written.append(envelope)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        assert self.status is None
        self.status = code, text


@dataclass
class CarriedStream(Stream):
    """The same through a relay, which carries another stream that nothing is said on."""

    others: list[str] = field(default_factory=list)

    async def bundles(self, service: ControlService) -> AsyncIterator[pb.UpwardBundle]:
        yield pb.UpwardBundle(parts=[pb.CarriedUpward(streams=[1], begins=0)])
        await asyncio.sleep(0)
        (self.link,) = service._links
        yield pb.UpwardBundle(parts=[pb.CarriedUpward(streams=[2], begins=1)])
        await asyncio.sleep(0)
        (self.other,) = service._links - {self.link}
        async for envelope in self.requests(service):
            part = pb.CarriedUpward(streams=[1], envelope=envelope.SerializeToString())
            yield pb.UpwardBundle(parts=[part])

    async def write(self, bundle: Any) -> None:
        for part in bundle.parts:
            assert len(part.streams) == 1
            if part.streams[0] == 2:
                self.others.append(str(part.WhichOneof("body")))
            elif part.WhichOneof("body") == "ended":
                if part.ended.code:
                    codes = {code.value[0]: code for code in grpc.StatusCode}
                    await self.abort(codes[part.ended.code], part.ended.text)
            else:
                await super().write(pb.DownwardEnvelope.FromString(part.envelope))


def attended(acts: list[tuple[str, Any]], carried: bool = False) -> Stream:
    """Return a stream after all of it."""
    by_driver = any(
        what in ("is refused", "is finished") for what, _ in acts
    )  # what is said at that moment may be received
    stream = (CarriedStream if carried else Stream)(acts, 10 if by_driver else 0)

    async def attend() -> None:
        service = ControlService(ControllerSettings(JOB, TERM, 4), stream)  # type: ignore[arg-type]
        context: Any = stream
        if isinstance(stream, CarriedStream):
            await asyncio.wait_for(service.Carry(stream.bundles(service), context), 30.0)
        else:
            await asyncio.wait_for(service.Attach(stream.requests(service), context), 30.0)
        assert not service._links, "a stream that has ended is forgotten"
        for _ in range(100):  # nothing is received from it any more
            await asyncio.sleep(0)

    asyncio.run(attend())
    return stream


@dataclass
class Expected:
    """What must come of it, in a few lines."""

    said: list[int] = field(default_factory=list)
    sent: list[tuple[int, ...]] = field(default_factory=list)
    status: grpc.StatusCode | None = None
    text: str = ""
    """Of a refusal by the driver: the first one's."""

    def act(self, what: str, value: Any) -> bool:
        """Say whether the stream goes on."""
        match what:
            case "says":
                job_id, term, rank = value
                if (job_id, term) == (JOB, TERM):
                    self.said.append(rank)
                    return True
                self.status = DENIED if job_id != JOB else FENCED
            case "garbles":
                self.status = INVALID
            case "is sent":
                self.sent.append(value)
                return True
            case "is refused":
                self.status, self.text = FENCED, value[0]
        return False


RANKS = st.integers(0, 3)
ACTS: dict[str, st.SearchStrategy[Any]] = {
    "says": st.tuples(st.just(JOB), st.just(TERM), RANKS),
    "is sent": st.lists(RANKS, min_size=1, max_size=3).map(tuple),
}
LAST: dict[str, st.SearchStrategy[Any]] = {
    "says": st.tuples(st.sampled_from((JOB, "other", "")), st.sampled_from((TERM - 1, TERM, TERM + 1, 0)), RANKS),
    "garbles": st.none(),
    "is refused": st.permutations(("register first", "is it another attempt?")),
    "is finished": st.none(),
}


def acts(kinds: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.sampled_from(sorted(kinds)).flatmap(lambda what: st.tuples(st.just(what), kinds[what]))


@pytest.mark.parametrize("carried", [False, True], ids=["of its own", "through a relay"])
@given(before=st.lists(acts(ACTS), max_size=8), then=st.lists(acts({**ACTS, **LAST}), max_size=4))
@example(before=[], then=[("says", ("other", TERM + 1, 0)), ("says", (JOB, TERM, 1))])
@example(
    before=[("says", (JOB, TERM, 0)), ("is sent", (0,))], then=[("says", (JOB, TERM + 1, 1)), ("says", (JOB, TERM, 2))]
)
@example(
    before=[("is sent", (0, 1)), ("is sent", (2,))],
    then=[("is refused", ("register first", "is it another attempt?")), ("garbles", None)],
)
@example(before=[("says", (JOB, TERM, 0))], then=[("garbles", None), ("says", (JOB, TERM, 1))])
@example(before=[("says", (JOB, TERM, 0))], then=[("is finished", None), ("says", (JOB, TERM, 1))])
def test_a_stream_is_taken_and_answered_as_the_simulated_network_takes_for_granted(
    before: list[tuple[str, Any]], then: list[tuple[str, Any]], carried: bool
) -> None:
    expected, all_acts = Expected(), [*before, *then]
    goes_on: Callable[[tuple[str, Any]], bool] = lambda act: expected.act(*act)  # noqa: E731
    all(map(goes_on, all_acts))
    stream = attended(all_acts, carried)
    assert stream.said == expected.said
    assert {(envelope.job_id, envelope.term) for envelope in stream.written} == {(JOB, TERM)}
    greeting, *sent = [decode_parcels(envelope) for envelope in stream.written]
    assert [parcel.message for parcel in greeting] == [None]
    named = [tuple(rank for parcel in parcels for rank in parcel.ranks) for parcels in sent]
    assert named == ([()] * len(sent) if carried else expected.sent), "a stream that a relay carries is one rank's"
    assert [len(parcels) for parcels in sent] == [len(ranks) for ranks in expected.sent]
    assert (stream.status and stream.status[0]) == expected.status
    assert not expected.text or (stream.status and stream.status[1]) == expected.text
    assert stream.ends == 1 and not stream.late
    if isinstance(stream, CarriedStream):
        finished = any(what == "is finished" for what, _ in all_acts)
        assert stream.others in (["envelope"], ["envelope", "ended"]) and (finished or len(stream.others) == 1)
