"""A controller as its process runs it, gRPC server, driver and journal, within this process; streams to it carry any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.core.facts.state import ControllerState
from ttp.controller.driver import Driver
from ttp.controller.handler import StopAsked
from ttp.controller.journal import Journal
from ttp.controller.server import ControlService, add_service, make_server
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import encode_upward
from ttp.proto.messages import Upward
from ttp.proto.transport import CLIENT_OPTIONS

LONG_S = 30.0
"""Nothing here should take it: a wait that does is a failure."""

SERVICE = "/ttp.control.v1.Control"
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class LiveStream:
    """One stream of raw envelopes, or of a relay's raw bundles. What comes back is read and dropped, so that the controller is never held up."""

    def __init__(self, channel: Any, method: str = "Attach") -> None:
        self.method = method
        self._call: Any = channel.stream_stream(f"{SERVICE}/{method}")()
        self._reader = asyncio.create_task(self._read())
        self.received = 0

    async def _read(self) -> None:
        try:
            while await self._call.read() is not _EOF:
                self.received += 1
        except grpc.aio.AioRpcError:
            return  # `end` has the status

    async def put(self, content: bytes) -> bool:
        """Send an envelope; False: the controller has ended this stream."""
        try:
            await self._call.write(content)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def end(self) -> grpc.StatusCode:
        """Say that nothing more comes, and wait until the controller has ended the stream as well."""
        if not self._call.done():
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended in this moment
                await self._call.done_writing()
        await asyncio.wait_for(self._reader, LONG_S)
        code: grpc.StatusCode = await asyncio.wait_for(self._call.code(), LONG_S)
        return code

    async def details(self) -> str:
        """Return what the controller's status says, after the end."""
        return await self._call.details() or ""


class LiveController:
    """The running controller and what it has come to."""

    def __init__(self, driver: Driver, channel: Any, journal: Journal, events: Path) -> None:
        self._driver, self._journal, self._events = driver, journal, events
        self.channel = channel
        self.ended = asyncio.Event()
        """The driver has finished: as a job does, or because it was asked to."""

    @property
    def state(self) -> ControllerState:
        state: ControllerState = self._driver._handler.state
        return state

    @property
    def runs(self) -> bool:
        return self._driver._thread.is_alive()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = asyncio.get_running_loop().time() + LONG_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, (
                f"waited in vain: {what}; {self.state and self.state.stage}"
            )
            await asyncio.sleep(0.001)

    async def status(self) -> pb.JobStatus:
        ask: Any = self.channel.unary_unary(
            f"{SERVICE}/Status",
            request_serializer=pb.StatusRequest.SerializeToString,
            response_deserializer=pb.JobStatus.FromString,
        )
        answer: pb.JobStatus = await asyncio.wait_for(ask(pb.StatusRequest(job_id="job")), LONG_S)
        return answer

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of the journal so far."""
        assert self._journal.wait_written(LONG_S)
        return [json.loads(line) for line in self._events.read_text(encoding="utf-8").splitlines()]


def envelope(messages: Sequence[Upward]) -> bytes:
    """Return what a correct rank of this job would send."""
    return encode_upward("job", 3, messages).SerializeToString()


@contextlib.asynccontextmanager
async def live_controller(settings: ControllerSettings, folder: Path) -> AsyncIterator[LiveController]:
    """Run a controller of these settings on a free port; its journal is in `folder`."""
    loop = asyncio.get_running_loop()
    server, port = make_server("127.0.0.1", 0)
    path = folder / "journal_0.jsonl"
    journal = Journal(path, settings)
    ended: list[LiveController] = []

    def on_finish(reason: str) -> None:
        loop.call_soon_threadsafe(ended[0].ended.set)

    driver = Driver(settings, journal, on_finish)
    service = ControlService(settings, driver)
    add_service(server, service)
    await server.start()
    channel: Any = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
    controller = LiveController(driver, channel, journal, path)
    ended.append(controller)
    driver.start()
    try:
        await controller.until(lambda: controller.state is not None, "the first state")
        yield controller
    finally:
        driver.put(StopAsked("the test is over"))
        await asyncio.wait_for(controller.ended.wait(), LONG_S)
        driver.join(LONG_S)
        service.finish_streams()
        await channel.close()
        await server.stop(None)
        journal.close()
