"""The controller's service without a network: a caller that is gone, the two unary calls, and how often the loop is woken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from math import inf
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.handler import StatusAsked, StopAsked, StreamEnded
from ttp.controller.server import ControlService
from ttp.controller.stream_ends import Outbox
from ttp.proto import control_pb2 as pb
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
    links: list[Any] = [SimpleNamespace(outbox=asyncio.Queue()) for _ in range(2)]
    first, second, third = (pb.DownwardEnvelope(term=term) for term in (1, 2, 3))
    mailroom.put(links[0], first)
    mailroom.put(links[1], second)
    mailroom.put(links[0], None)
    assert len(woken) == 1 and links[0].outbox.empty(), "the outboxes belong to the loop's thread"
    woken[0]()
    assert [links[0].outbox.get_nowait() for _ in range(2)] == [first, None] and links[1].outbox.get_nowait() == second
    mailroom.put(links[1], third)
    assert len(woken) == 2
    woken[1]()
    assert links[1].outbox.get_nowait() == third
    ended = True
    mailroom.put(links[0], first)
    assert len(woken) == 2
