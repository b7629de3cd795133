"""The controller's gRPC side: streams in, streams out, two unary calls. Handlers only enqueue for the driver.

asyncio (grpc.aio) rather than gRPC's threads: a synchronous server keeps one or two threads per open stream for as long as
it is open, 2,500 for a job of 10,000 ranks on 1,250 nodes, while one loop was measured to carry 5,300 messages/s of such a
job on 1,250 streams at a quarter of a core. The loop's thread does the wire and the protobuf, the driver's thread the
decisions; a message crosses from one to the other by a queue, which costs tens of microseconds.

Checks who is there; `stream_ends.py` checks what each says. Never decides anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from math import inf
from typing import Any, NoReturn, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError

from ttp.errors import ControllerError
from ttp.identity import own
from ttp.identity.role import Identity
from ttp.proto import control_pb2 as pb
from ttp.proto.address import join_address
from ttp.proto.codec import encode_status
from ttp.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from ttp.proto.messages import Heartbeat, Upward
from ttp.proto.status import JobStatus
from ttp.proto.transport import SERVER_OPTIONS, certified, grpc, server_credentials

from .core.facts.events import ControllerSettings
from .core.ranks.takeover import SUPERSEDE_PART
from .driver import Driver
from .handler import NotAllowed, StatusAsked, StopAsked, StreamEnded, StreamMessages
from .permissions import Sender, carrier_refusal, shutdown_refusal, stream_refusal
from .stream_ends import Carrier, Inlet, Outbox, StreamLink

GRACE_S = 2.0
"""How long streams may take to deliver what was queued before the server ends."""
GATHER_S = 0.01
"""How long the heartbeats of a relay wait for those of others: handing over each alone would wake the driver a thousand times a second."""

AttachContext: TypeAlias = "grpc.aio.ServicerContext[pb.UpwardEnvelope, pb.DownwardEnvelope]"
CarryContext: TypeAlias = "grpc.aio.ServicerContext[pb.UpwardBundle, pb.DownwardBundle]"


class ControlService(ControlServicer):
    """The handlers. All run on the loop's thread."""

    def __init__(self, settings: ControllerSettings, driver: Driver) -> None:
        self._settings = settings
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._mailroom = Outbox(self._loop, settings)
        self._links: set[StreamLink] = set()
        self._answered: dict[tuple[int, int], float] = {}
        """When the controller of a later term got the answer that this one is alive, by its term and question."""
        shown = own.credentials()
        self._roles = shown is not None and not shown.site_host
        self._gathered: list[tuple[StreamLink, tuple[Upward, ...]]] = []
        """Heartbeats that relays have brought and the driver has not been given yet."""

    def finish_streams(self) -> None:
        """Let every stream deliver what is queued and end."""
        for link in self._links:
            link.finish()

    async def await_streams(self) -> bool:
        """Wait for the streams' ends, for GRACE_S at most. Return whether some were not waited for: for a lease, in which heartbeats and vouches come
        several times, the other side has sent nothing, so that its node is lost."""
        since = time.monotonic() - self._settings.lease_s
        living = [link.over.wait() for link in self._links if link.received_at > since]
        lost = len(living) < len(self._links)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*living), GRACE_S)
        return lost

    async def Attach(self, request_iterator: AsyncIterator[pb.UpwardEnvelope], context: AttachContext) -> None:
        peer = await self._peer(context)
        if refusal := stream_refusal(peer, self._settings.job_id):
            await self._refuse(context, refusal)
        await self._check_running(context)
        link = StreamLink(self._mailroom)
        self._links.add(link)
        link.greet()
        reader = asyncio.create_task(self._read(request_iterator, Inlet(link, Sender(peer), self._note_refused)))
        try:
            assert isinstance(link.outbox, asyncio.Queue)
            while (envelope := await link.outbox.get()) is not None:
                await context.write(envelope)
        finally:  # also when the other side is gone: the handler is cancelled
            reader.cancel()
            self._end([link])
        if link.rejection is not None:
            await context.abort(*link.rejection)

    async def _read(self, request_iterator: AsyncIterator[pb.UpwardEnvelope], inlet: Inlet) -> None:
        try:
            async for envelope in request_iterator:
                if said := inlet.take(envelope):
                    self._hand_over()
                    self._driver.put(StreamMessages(((inlet.link, said),)))
                if inlet.closed:
                    return
        except grpc.aio.AioRpcError:
            pass  # it is gone
        except DecodeError as error:
            inlet.link.refuse(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        inlet.link.finish()

    async def Carry(self, request_iterator: AsyncIterator[pb.UpwardBundle], context: CarryContext) -> None:
        peer = await self._peer(context)
        if refusal := stream_refusal(peer, self._settings.job_id) or carrier_refusal(peer):
            await self._refuse(context, refusal)
        await self._check_running(context)
        carrier = Carrier(self._mailroom, peer, self._links.add, self._note_refused)
        reader = asyncio.create_task(self._read_bundles(request_iterator, carrier))
        ended = list[StreamLink]()
        try:
            while (sent := await carrier.next_bundle()) is not None:
                bundle, ended = sent
                await context.write(bundle)
                self._end(ended)
                ended = []
        finally:
            reader.cancel()
            self._end([*ended, *carrier.links])

    async def _read_bundles(self, request_iterator: AsyncIterator[pb.UpwardBundle], carrier: Carrier) -> None:
        try:
            async for bundle in request_iterator:
                parts, ended = carrier.take(bundle)
                if parts:
                    self._gather(parts)
                self._end(ended)
        except (grpc.aio.AioRpcError, DecodeError):
            pass
        finally:  # a node that is not read must not be spoken to as if it were
            carrier.close()

    def _gather(self, parts: Sequence[tuple[StreamLink, tuple[Upward, ...]]]) -> None:
        """Give the driver what has come: the heartbeats of several relays together, all else at once, behind them."""
        only_beats = all(isinstance(message, Heartbeat) for _, said in parts for message in said)
        if only_beats and not self._gathered:
            self._loop.call_later(GATHER_S, self._hand_over)
        self._gathered += parts
        if not only_beats:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._gathered:
            self._driver.put(StreamMessages(tuple(self._gathered)))
            self._gathered.clear()

    def _end(self, links: Iterable[StreamLink]) -> None:
        for link in links:
            self._hand_over()
            self._links.discard(link)
            link.over.set()
            self._driver.put(StreamEnded(link))

    def _note_refused(self, refusal: str) -> None:
        self._driver.put(NotAllowed(refusal))

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.JobStatus]
    ) -> pb.JobStatus:
        await self._check_job(request.job_id, context)
        await self._check_running(context)
        answer: asyncio.Future[JobStatus] = self._loop.create_future()

        def reply(status: JobStatus) -> None:
            self._loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(status))

        self._driver.put(StatusAsked(reply))
        return encode_status(await answer)

    async def Shutdown(
        self, request: pb.ShutdownRequest, context: grpc.aio.ServicerContext[pb.ShutdownRequest, pb.ShutdownReply]
    ) -> pb.ShutdownReply:
        await self._check_job(request.job_id, context)
        term = self._settings.term
        peer = await self._peer(context)
        if refusal := shutdown_refusal(peer, self._settings.job_id, request.term, self._settings.world_size):
            await self._refuse(context, refusal)
        if request.term and request.term <= term:
            text = f"this controller has term {term}: one of term {request.term} cannot take over from it"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        reason = request.reason or f"asked to end by {context.peer()}"
        if request.looks:
            await self._check_running(context)
            self._answered[request.term, request.look] = time.monotonic()
        elif not request.term:
            self._driver.put(StopAsked(reason))
        else:
            until_s = self._answered.get((request.term, request.look), -inf) + SUPERSEDE_PART * self._settings.lease_s
            if time.monotonic() > until_s:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{reason}: this one did not answer just now")
            self._driver.put(StopAsked(reason, request.generation, until_s))
        return pb.ShutdownReply(generation=self._driver.generation)

    async def _peer(self, context: grpc.aio.ServicerContext[Any, Any]) -> Identity | None:
        """Return which process is on the other side; None: connections are plain, or certificates name no roles. Refuses one whose
        certificate cannot be read."""
        if not self._roles:
            return None
        try:
            return certified(context.auth_context().get("x509_subject_alternative_name", ()))
        except ValueError as error:
            await self._refuse(context, str(error))

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], refusal: str) -> NoReturn:
        self._driver.put(
            NotAllowed(f"{context.peer().rpartition(':')[0]}: {refusal}")
        )  # without the port, new each time
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)

    async def _check_running(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One that ends answers nothing any more: who comes now turns to another one at once."""
        if self._driver.finished:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this controller is ending")

    async def _check_job(self, job_id: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if job_id and job_id != self._settings.job_id:
            text = f"this is the controller of job {self._settings.job_id!r}, not of {job_id!r}; check the address"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)


def make_server(host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Return a server that listens on `host:port` (0: any free one) and its port; add services, then start it.

    Raises ControllerError when the port cannot be had, or this process has no certificate.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    address = join_address(host, port)
    credentials = server_credentials()
    try:
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        bound, cause = 0, str(error)
    else:
        cause = "no address was bound"
    if bound == 0:
        raise ControllerError(
            f"the controller cannot listen on {address}: the port is taken, or the host is not one of this machine's"
            f" addresses; set TTP_CONTROLLER_PORT to a free port, or to 0 for any ({cause})"
        )
    return server, bound


def add_service(server: grpc.aio.Server, service: ControlService) -> None:
    add_ControlServicer_to_server(service, server)
