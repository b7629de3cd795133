"""The controller's service without a network: a caller that is gone, the two unary calls, and how often the loop is woken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.handler import StatusAsked, StopAsked, StreamEnded, StreamMessages
from ttp.controller.server import GATHER_S, ControlService
from ttp.controller.stream_ends import Carrier, Outbox, StreamLink
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import encode_upward
from ttp.proto.messages import Finished, Heartbeat, KeepAlive, Phase
from ttp.proto.status import JobStatus

from .conftest import LONG_S

JOB, TERM = "job", 5
STATUS = JobStatus(JOB, TERM, 1, "running", "", (), None, 7)


class Refused(Exception):
    """What a call is ended with."""


class Caller:
    """The service's driver, and its side of a call."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.put: Callable[[Any], None] = self.items.append
        self.written = 0
        self.generation, self.finished = 5, False
        self.settings = ControllerSettings(JOB, TERM, 1)
        driver: Any = self
        self.service = ControlService(self.settings, driver)

    async def looked_for(self, term: int, look: int = 0) -> pb.ShutdownReply:
        request = pb.ShutdownRequest(job_id=JOB, term=term, looks=True, look=look)
        return await self.service.Shutdown(request, self.context)

    async def write(self, envelope: pb.DownwardEnvelope) -> None:
        self.written += 1

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Refused(code, text)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:7"

    @property
    def context(self) -> Any:
        return self


def called(act: Callable[[Caller], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(act(Caller()), LONG_S)

    asyncio.run(run())


def test_a_stream_whose_caller_is_gone_ends_for_the_driver_too_and_is_read_no_more() -> None:
    """gRPC cancels its handler. The end of the stream is how the death of its ranks is noticed at once."""
    read: list[str] = []

    async def requests() -> AsyncIterator[pb.UpwardEnvelope]:
        try:
            await asyncio.Event().wait()
        finally:
            read.append("over")
        yield pb.UpwardEnvelope()

    async def act(caller: Caller) -> None:
        attached = asyncio.create_task(caller.service.Attach(requests(), caller.context))
        while not caller.written:
            await asyncio.sleep(0)
        attached.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attached
        for _ in range(10):
            await asyncio.sleep(0)
        assert [type(item) for item in caller.items] == [StreamEnded] and read == ["over"]
        assert not caller.service._links

    called(act)


def test_a_stream_that_breaks_while_it_is_read_ends() -> None:
    """Not by a refusal: no rank is there to read it."""

    class Requests:
        def __aiter__(self) -> Requests:
            return self

        async def __anext__(self) -> pb.UpwardEnvelope:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "reset", "")

    async def act(caller: Caller) -> None:
        await caller.service.Attach(Requests(), caller.context)
        assert [type(item) for item in caller.items] == [StreamEnded]

    called(act)


@pytest.mark.parametrize(
    ("job_id", "term", "accepted"),
    [("", 0, True), (JOB, 0, True), (JOB, TERM + 1, True), (JOB, TERM, False), (JOB, TERM - 1, False), ("other", 0, False)],
)  # fmt: skip
def test_a_controller_is_ended_by_its_launcher_and_by_a_later_term_only(job_id: str, term: int, accepted: bool) -> None:
    async def act(caller: Caller) -> None:
        request = pb.ShutdownRequest(job_id=job_id, reason="the job is over", term=term, generation=9)
        if accepted:
            await caller.looked_for(term)
            await caller.service.Shutdown(request, caller.context)
        else:
            with pytest.raises(Refused):
                await caller.service.Shutdown(request, caller.context)
        assert [(item.reason, item.generation, item.until_s < inf) for item in caller.items] == (
            [("the job is over", 9 if term else None, term > 0)] if accepted else []
        )

    called(act)


def test_a_controller_that_is_looked_for_answers_with_its_generation_and_leads_on() -> None:
    async def act(caller: Caller) -> None:
        assert (await caller.looked_for(TERM + 1)).generation == 5
        with pytest.raises(Refused):
            await caller.looked_for(TERM)
        caller.finished = True
        with pytest.raises(Refused, match="is ending"):
            await caller.looked_for(TERM + 1)
        assert not caller.items

    called(act)


@pytest.mark.parametrize("call", ["Attach", "Carry", "Status"])
def test_a_controller_that_is_ending_takes_no_stream_and_no_question(call: str) -> None:
    """It would answer neither; who comes turns to the next one at once."""

    async def act(caller: Caller) -> None:
        caller.finished = True
        request: Any = pb.StatusRequest(job_id=JOB) if call == "Status" else nothing()
        with pytest.raises(Refused, match="is ending"):
            await getattr(caller.service, call)(request, caller.context)
        assert not caller.items and not caller.service._links

    async def nothing() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    called(act)


def test_a_controller_that_did_not_answer_just_now_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By that controller; one of another term may have given its ranks up."""
    now = [100.0]
    monkeypatch.setattr("ttp.controller.server.time.monotonic", lambda: now[0])

    async def act(caller: Caller) -> None:
        async def order(term: int, look: int = 1) -> None:
            await caller.service.Shutdown(pb.ShutdownRequest(job_id=JOB, term=term, look=look), caller.context)

        await caller.looked_for(TERM + 1, 1)
        with pytest.raises(Refused, match="did not answer just now"):
            await order(TERM + 2)
        now[0] += caller.settings.lease_s / 3 + 0.01
        with pytest.raises(Refused, match="did not answer just now"):
            await order(TERM + 1)
        await caller.looked_for(TERM + 1, 2)
        with pytest.raises(Refused, match="did not answer just now"):
            await order(TERM + 1)  # it follows the answer before
        assert not caller.items
        await order(TERM + 1, 2)
        assert len(caller.items) == 1

    called(act)


def test_who_asks_a_controller_to_end_without_a_reason_is_named() -> None:
    async def act(caller: Caller) -> None:
        await caller.service.Shutdown(pb.ShutdownRequest(), caller.context)
        assert caller.items == [StopAsked("asked to end by ipv4:127.0.0.1:7")]

    called(act)


def test_an_answer_that_no_rank_waits_for_any_more_is_dropped() -> None:
    """The caller's time is over while the driver is busy."""
    failures: list[dict[str, Any]] = []

    async def act(caller: Caller) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        asking = asyncio.create_task(caller.service.Status(pb.StatusRequest(), caller.context))
        while not caller.items:
            await asyncio.sleep(0)
        (asked,) = caller.items
        assert isinstance(asked, StatusAsked)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        asked.reply(STATUS)
        for _ in range(10):
            await asyncio.sleep(0)

    called(act)
    assert failures == []


def test_the_loop_is_woken_once_for_all_that_gathers_until_it_comes_to_it() -> None:
    """And again for what comes later; not at all when it has ended."""
    woken: list[Callable[[], None]] = []
    ended = False
    loop: Any = SimpleNamespace(call_soon_threadsafe=woken.append, is_closed=lambda: ended)
    mailroom = Outbox(loop, ControllerSettings("job", 1, 4))
    done: list[int] = []
    mailroom.put(partial(done.append, 1), partial(done.append, 2))
    mailroom.put(partial(done.append, 3))
    assert len(woken) == 1 and done == [], "the outboxes belong to the loop's thread"
    woken[0]()
    assert done == [1, 2, 3]
    mailroom.put(partial(done.append, 4))
    assert len(woken) == 2
    woken[1]()
    assert done == [1, 2, 3, 4]
    ended = True
    mailroom.put(partial(done.append, 5))
    assert len(woken) == 2


def test_what_all_are_sent_is_one_envelope_a_relay() -> None:
    """On the streams that are meant, and on no other of it."""

    async def act(caller: Caller) -> None:
        mailroom = Outbox(asyncio.get_running_loop(), caller.settings)
        relays = [Carrier(mailroom, None, lambda link: None, lambda text: None) for _ in range(2)]
        for relay in relays:
            bundle = pb.UpwardBundle()
            for number in (1, 2, 3):
                bundle.parts.add(streams=[number], begins=number)
            relay.take(bundle)
            await relay.next_bundle()  # the greetings
        own = StreamLink(mailroom)
        meant = [relays[0].links[0], own, relays[1].links[1], relays[0].links[2]]
        meant[0].send_alike(meant, KeepAlive())
        for relay, numbers in zip(relays, ([1, 3], [2]), strict=True):
            sent = await relay.next_bundle()
            assert sent is not None
            (part,) = sent[0].parts
            envelope = pb.DownwardEnvelope.FromString(part.envelope)
            assert list(part.streams) == numbers and envelope.WhichOneof("body") == "keep_alive"
        assert isinstance(own.outbox, asyncio.Queue)
        assert (await own.outbox.get()).WhichOneof("body") == "keep_alive" and own.outbox.empty()

    called(act)


class Bundles:
    """The calls of two relays, and what the driver is given of what their ranks 0 and 1 say."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.requests: list[asyncio.Queue[pb.UpwardBundle | None]] = [asyncio.Queue(), asyncio.Queue()]
        self.calls = [asyncio.create_task(self._call(requests)) for requests in self.requests]
        for rank, requests in enumerate(self.requests):
            bundle = pb.UpwardBundle()
            bundle.parts.add(streams=[1], begins=rank)
            requests.put_nowait(bundle)

    async def _call(self, requests: asyncio.Queue[pb.UpwardBundle | None]) -> None:
        async def each() -> AsyncIterator[pb.UpwardBundle]:
            while (bundle := await requests.get()) is not None:
                yield bundle

        await self.caller.service.Carry(each(), self.caller.context)

    async def says(self, relay: int, message: Heartbeat | Finished) -> None:
        """Return once the service has read it."""
        bundle = pb.UpwardBundle()
        envelope = encode_upward(JOB, TERM, [message]).SerializeToString()
        bundle.parts.add(streams=[1], envelope=envelope)
        self.requests[relay].put_nowait(bundle)
        await self.read(relay)

    async def read(self, relay: int) -> None:
        while not self.requests[relay].empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self) -> None:
        for requests in self.requests:
            requests.put_nowait(None)
        await asyncio.gather(*self.calls)

    @property
    def given(self) -> list[list[object]]:
        """What the driver was given, item by item."""
        items = [item for item in self.caller.items if isinstance(item, StreamMessages)]
        return [[message for _, said in item.parts for message in said] for item in items]


def test_heartbeats_of_several_relays_are_one_item_and_nothing_else_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each alone would wake the driver a thousand times a second in a job of 10,000 ranks."""

    async def act(caller: Caller) -> None:
        timers: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(
            asyncio.get_running_loop(), "call_later", lambda after_s, act: timers.append((after_s, act))
        )
        relays = Bundles(caller)
        first, second, third = (Heartbeat(rank, Phase.COMPUTE, 1) for rank in (0, 1, 0))
        await relays.says(0, first)
        await relays.says(1, second)
        ((after_s, act),) = timers
        assert after_s == GATHER_S and relays.given == []
        act()
        assert relays.given == [[first, second]]
        await relays.says(0, third)
        await relays.says(1, Finished(1))
        assert relays.given[1:] == [[third, Finished(1)]]
        timers[1][1]()
        assert len(relays.given) == 2
        await relays.end()

    called(act)


def test_what_comes_on_a_stream_of_its_own_overtakes_no_heartbeat() -> None:
    """Such as an agent's report that a rank has ended."""

    async def requests() -> AsyncIterator[pb.UpwardEnvelope]:
        yield encode_upward(JOB, TERM, [Finished(1)])
        await asyncio.Event().wait()

    async def act(caller: Caller) -> None:
        relays = Bundles(caller)
        await relays.says(0, beat := Heartbeat(0, Phase.COMPUTE, 1))
        attached = asyncio.create_task(caller.service.Attach(requests(), caller.context))
        while [Finished(1)] not in relays.given:
            await asyncio.sleep(0)
        assert relays.given == [[beat], [Finished(1)]]
        attached.cancel()
        await relays.end()

    called(act)


def test_a_stream_ends_for_the_driver_behind_what_its_relay_has_brought() -> None:
    async def act(caller: Caller) -> None:
        relays = Bundles(caller)
        await relays.says(0, Heartbeat(0, Phase.COMPUTE, 1))
        await relays.end()
        assert [type(item) for item in caller.items] == [StreamMessages, StreamEnded, StreamEnded]

    called(act)
