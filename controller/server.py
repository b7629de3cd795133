"""The controller's gRPC side: streams in, streams out, two unary calls. Handlers only enqueue for the driver.

asyncio (grpc.aio) rather than gRPC's threads: a synchronous server keeps one or two threads per open stream for as long as
it is open, 2,500 for a job of 10,000 ranks on 1,250 nodes, while one loop was measured to carry 5,300 messages/s of such a
job on 1,250 streams at a quarter of a core. The loop's thread does the wire and the protobuf, the driver's thread the
decisions; a message crosses from one to the other by a queue, which costs tens of microseconds.

Checks that an envelope belongs to this job and this term, and that its sender may say it (`permissions.py`). Never decides anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from math import inf
from typing import Any, NoReturn, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError

from ttp.errors import ControllerError
from ttp.identity import own
from ttp.identity.role import Identity
from ttp.proto import control_pb2 as pb
from ttp.proto.address import join_address
from ttp.proto.chunks import Joiner, split
from ttp.proto.codec import CodecError, decode_upward, encode_batch, encode_downward, encode_status
from ttp.proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from ttp.proto.status import JobStatus
from ttp.proto.transport import SERVER_OPTIONS, certified, grpc, server_credentials

from .core.facts.events import ControllerSettings
from .core.ranks.takeover import SUPERSEDE_PART
from .driver import Driver
from .handler import Addressed, NotAllowed, StatusAsked, StopAsked, StreamEnded, StreamMessage
from .permissions import Sender, shutdown_refusal, stream_refusal

GRACE_S = 2.0
"""How long streams may take to deliver what was queued before the server ends."""

AttachContext: TypeAlias = "grpc.aio.ServicerContext[pb.UpwardEnvelope, pb.DownwardEnvelope]"


class Outbox:
    """Carries envelopes from any thread to the streams' outboxes on the loop's thread.

    The loop is woken once for all that has gathered, not once an envelope: each waking is a system call, and a plan for
    10,000 ranks would need 1,250 of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()  # guards _gathered and _woken
        self._gathered: deque[tuple[StreamLink, pb.DownwardEnvelope | None]] = deque()
        self._woken = False

    def put(self, link: StreamLink, envelope: pb.DownwardEnvelope | None) -> None:
        if self._loop.is_closed():  # the controller has ended: there is no receiver
            return
        with self._lock:
            self._gathered.append((link, envelope))
            wake, self._woken = not self._woken, True
        if wake:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            gathered, self._gathered, self._woken = self._gathered, deque(), False
        for link, envelope in gathered:
            link.outbox.put_nowait(envelope)


class StreamLink:
    """One stream's outbox. The driver's thread sends, the loop's thread delivers."""

    def __init__(self, settings: ControllerSettings, mailroom: Outbox) -> None:
        self._settings = settings
        self._mailroom = mailroom
        self.outbox: asyncio.Queue[pb.DownwardEnvelope | None] = asyncio.Queue()
        self.received_at = time.monotonic()
        """When the other side last sent anything."""
        self.over = asyncio.Event()
        self.rejection: tuple[grpc.StatusCode, str] | None = None

    def send(self, messages: Sequence[Addressed]) -> None:
        self._put(encode_batch(self._settings.job_id, self._settings.term, messages))

    def greet(self) -> None:
        self._put(encode_downward(self._settings.job_id, self._settings.term, (), None))

    def reject(self, text: str) -> None:
        self.refuse(grpc.StatusCode.FAILED_PRECONDITION, text)

    def refuse(self, code: grpc.StatusCode, text: str) -> None:
        """End the stream with this status, after what is queued."""
        self.rejection = self.rejection or (code, text)
        self.finish()

    def finish(self) -> None:
        self._put(None)

    def _put(self, envelope: pb.DownwardEnvelope | None) -> None:
        for part in (None,) if envelope is None else split(envelope):
            self._mailroom.put(self, part)


class ControlService(ControlServicer):
    """The handlers. All run on the loop's thread."""

    def __init__(self, settings: ControllerSettings, driver: Driver) -> None:
        self._settings = settings
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._mailroom = Outbox(self._loop)
        self._links: set[StreamLink] = set()
        self._answered: dict[tuple[int, int], float] = {}
        """When the controller of a later term got the answer that this one is alive, by its term and question."""
        shown = own.credentials()
        self._roles = shown is not None and not shown.site_host

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
        link = StreamLink(self._settings, self._mailroom)
        peer = await self._peer(context)
        if refusal := stream_refusal(peer, self._settings.job_id):
            await self._refuse(context, refusal)
        self._links.add(link)
        link.greet()
        reader = asyncio.create_task(self._read(request_iterator, link, peer))
        try:
            while (envelope := await link.outbox.get()) is not None:
                await context.write(envelope)
        finally:  # also when the other side is gone: the handler is cancelled
            reader.cancel()
            self._links.discard(link)
            link.over.set()
            self._driver.put(StreamEnded(link))
        if link.rejection is not None:
            await context.abort(*link.rejection)

    async def _read(
        self, request_iterator: AsyncIterator[pb.UpwardEnvelope], link: StreamLink, peer: Identity | None
    ) -> None:
        try:
            joiner, sender = Joiner[pb.UpwardEnvelope](), Sender(peer)
            async for envelope in request_iterator:
                link.received_at = time.monotonic()
                if not self._accepts(envelope, link):  # before anything else of it is read
                    return
                if (whole := joiner.take(envelope)) is not None:
                    parcel = decode_upward(whole)
                    if refusal := next(filter(None, map(sender.refusal, parcel.messages)), ""):
                        self._driver.put(NotAllowed(refusal))
                        link.refuse(grpc.StatusCode.PERMISSION_DENIED, refusal)
                        return
                    self._driver.put(StreamMessage(link, parcel))
            link.finish()
        except grpc.aio.AioRpcError:
            link.finish()
        except (
            CodecError,
            DecodeError,
        ) as error:  # left open and not read, the stream would cost its ranks their lease
            link.refuse(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _accepts(self, parcel: pb.UpwardEnvelope, link: StreamLink) -> bool:
        job_id, term = self._settings.job_id, self._settings.term
        if parcel.job_id != job_id:
            text = (
                f"this is the controller of job {job_id!r}, got a message of job {parcel.job_id!r}; check the address"
            )
            link.refuse(grpc.StatusCode.PERMISSION_DENIED, text)
            return False
        if parcel.term != term:
            fenced = "this controller is fenced" if parcel.term > term else "that term is over"
            text = f"this controller has term {term}, got a message of term {parcel.term}: {fenced}; attach anew"
            link.refuse(grpc.StatusCode.FAILED_PRECONDITION, text)
            return False
        return True

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.JobStatus]
    ) -> pb.JobStatus:
        await self._check_job(request.job_id, context)
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
            if self._driver.finished:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "this controller is ending")
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
