"""The controller's end of the streams: those that ranks and agents open themselves, and those that a node's relay carries in one connection.

Owns what is queued on a stream, and the check of what comes on it: an envelope of this job and this term, whose sender may say it
(`permissions.py`). Knows nothing of calls: `server.py` reads and writes them. Never decides anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError

from ttp.identity.role import Identity, Role
from ttp.proto import control_pb2 as pb
from ttp.proto.chunks import Joiner, split
from ttp.proto.codec import CodecError, decode_upward, encode_batch, encode_downward
from ttp.proto.messages import Downward, Upward
from ttp.proto.transport import grpc

from .core.facts.events import ControllerSettings
from .handler import Addressed, RankLink
from .permissions import Sender

BUNDLE_BYTES = 1 << 20
"""A bundle that has grown to this size is sent; what is still queued goes into the next one."""


class Queue(Protocol):
    def put_nowait(self, item: pb.DownwardEnvelope | None, /) -> None: ...


class Outbox:
    """Carries what any thread puts on a stream's outbox to the loop's thread.

    The loop is woken once for all that has gathered, not once an envelope: each waking is a system call, and a plan for
    10,000 ranks would need 1,250 of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: ControllerSettings) -> None:
        self.settings = settings
        self._newest: tuple[Addressed | None, pb.DownwardEnvelope] = None, pb.DownwardEnvelope()
        self._loop = loop
        self._lock = threading.Lock()  # guards _gathered and _woken
        self._gathered: list[Callable[[], None]] = []
        self._woken = False

    def encoded(self, messages: Sequence[Addressed]) -> pb.DownwardEnvelope:
        """Return what goes over the wire, the same as the last one for the same message. For the driver's thread. Raises CodecError."""
        if len(messages) > 1:
            return encode_batch(self.settings.job_id, self.settings.term, messages)
        (one,), (last, envelope) = messages, self._newest
        if last is None or one[1] is not last[1] or one[0] != last[0]:
            envelope = encode_downward(self.settings.job_id, self.settings.term, *one)
            self._newest = one, envelope
        return envelope

    def put(self, *puts: Callable[[], None]) -> None:
        """Let the loop's thread call these, in order."""
        if self._loop.is_closed():  # the controller has ended: there is no receiver
            return
        with self._lock:
            self._gathered += puts
            wake, self._woken = not self._woken, True
        if wake:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            gathered, self._gathered, self._woken = self._gathered, [], False
        for put in gathered:
            put()


class StreamLink(RankLink):
    """One stream's outbox. The driver's thread sends, the loop's thread delivers."""

    def __init__(self, mailroom: Outbox, carried: CarriedQueue | None = None) -> None:
        """`carried`: takes what is sent on a stream that a relay carries; None: the stream has a connection of its own."""
        self._settings = mailroom.settings
        self._mailroom = mailroom
        self._carried = carried
        self.outbox: Queue = carried if carried is not None else asyncio.Queue()
        self.received_at = time.monotonic()
        """When the other side last sent anything."""
        self.over = asyncio.Event()
        self.rejection: tuple[grpc.StatusCode, str] | None = None

    def send(self, messages: Sequence[Addressed]) -> None:
        if self._carried is not None:  # it is one rank's, which need not be named: others are sent the same
            messages = [((), message) for _, message in messages]
        self._put(self._mailroom.encoded(messages))

    def send_alike(self, links: Sequence[RankLink], message: Downward) -> None:
        """To all streams of a relay at once: ten thousand ranks get a heartbeat every second."""
        envelope = self._mailroom.encoded((((), message),))
        puts: list[Callable[[], None]] = []
        carried: dict[Carrier, list[int]] = {}
        for link in links:
            assert isinstance(link, StreamLink)
            if (queue := link._carried) is not None:
                carried.setdefault(queue.carrier, []).append(queue.number)
            else:
                puts.append(partial(link.outbox.put_nowait, envelope))
        self._mailroom.put(*puts, *(partial(carrier.queue, numbers, envelope) for carrier, numbers in carried.items()))

    def greet(self) -> None:
        self._put(encode_downward(self._settings.job_id, self._settings.term, (), None))

    def refusal(self, envelope: pb.UpwardEnvelope) -> tuple[grpc.StatusCode, str] | None:
        """Return why an envelope ends the stream; None: it is of this job and this term."""
        job_id, term = self._settings.job_id, self._settings.term
        if envelope.job_id != job_id:
            text = (
                f"this is the controller of job {job_id!r}, got a message of job {envelope.job_id!r}; check the address"
            )
            return grpc.StatusCode.PERMISSION_DENIED, text
        if envelope.term != term:
            fenced = "this controller is fenced" if envelope.term > term else "that term is over"
            text = f"this controller has term {term}, got a message of term {envelope.term}: {fenced}; attach anew"
            return grpc.StatusCode.FAILED_PRECONDITION, text
        return None

    def reject(self, text: str) -> None:
        self.refuse(grpc.StatusCode.FAILED_PRECONDITION, text)

    def refuse(self, code: grpc.StatusCode, text: str) -> None:
        """End the stream with this status, after what is queued."""
        self.rejection = self.rejection or (code, text)
        self.finish()

    def finish(self) -> None:
        self._put(None)

    def _put(self, envelope: pb.DownwardEnvelope | None) -> None:
        parts = (None,) if envelope is None else split(envelope)
        self._mailroom.put(*(partial(self.outbox.put_nowait, part) for part in parts))


class Inlet:
    """What comes in on one stream, checked."""

    def __init__(self, link: StreamLink, sender: Sender, refused: Callable[[str], None]) -> None:
        """`refused(text)`: the sender has said what it may not say."""
        self.link, self._sender, self._refused = link, sender, refused
        self._joiner = Joiner[pb.UpwardEnvelope]()

    @property
    def closed(self) -> bool:
        """It has said something that ends its stream: nothing more of it is read."""
        return self.link.rejection is not None

    def take(self, envelope: pb.UpwardEnvelope) -> tuple[Upward, ...]:
        """Return what an envelope says; nothing while more of it is to come, or where it ends the stream."""
        link = self.link
        link.received_at = time.monotonic()
        if refusal := link.refusal(envelope):  # before anything else of it is read
            link.refuse(*refusal)
            return ()
        try:
            whole = self._joiner.take(envelope)
            said = decode_upward(whole).messages if whole is not None else ()
        except CodecError as error:  # left open and not read, the stream would cost its ranks their lease
            link.refuse(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return ()
        return self.allowed(said)

    def allowed(self, said: tuple[Upward, ...]) -> tuple[Upward, ...]:
        """Return these messages; none, and the stream ends, where one of them is not the sender's."""
        if self._sender.is_believed:
            return said
        if text := next(filter(None, map(self._sender.refusal, said)), ""):
            self._refused(text)
            self.link.refuse(grpc.StatusCode.PERMISSION_DENIED, text)
            return ()
        return said


class CarriedQueue:
    """The outbox of one of the streams that a relay carries."""

    def __init__(self, carrier: Carrier, number: int) -> None:
        self.carrier, self.number = carrier, number

    def put_nowait(self, item: pb.DownwardEnvelope | None, /) -> None:
        self.carrier.queue([self.number], item)


class Carrier:
    """The connection of one relay, and the streams in it. To the driver each is as if its rank had opened it."""

    def __init__(
        self,
        mailroom: Outbox,
        peer: Identity | None,
        opened: Callable[[StreamLink], None],
        refused: Callable[[str], None],
    ) -> None:
        """`peer`: the agent that relays; None: there are no certificates. `opened(link)`: a stream has begun. `refused`: as of `Inlet`."""
        self._mailroom, self._peer, self._opened, self._refused = mailroom, peer, opened, refused
        self._inlets: dict[int, Inlet] = {}
        self._newest = 0
        """The highest number of a stream so far."""
        self._queued: deque[tuple[list[int], pb.DownwardEnvelope | None]] = deque()
        """What is sent next, and on which streams; None: they end."""
        self._has_more = asyncio.Event()
        self._closed = False

    @property
    def links(self) -> list[StreamLink]:
        """The streams that are open."""
        return [inlet.link for inlet in self._inlets.values()]

    def take(self, bundle: pb.UpwardBundle) -> tuple[list[tuple[StreamLink, tuple[Upward, ...]]], list[StreamLink]]:
        """Return what its streams say, in order, and which of them have ended behind that. What comes of a stream that is over is not read."""
        parts: list[tuple[StreamLink, tuple[Upward, ...]]] = []
        ended: list[StreamLink] = []
        for part in bundle.parts:
            kind, numbers = part.WhichOneof("body"), tuple(part.streams)
            if kind == "envelope":
                parts += self._said(numbers, part.envelope)
            elif kind == "begins":
                self._begin(max(numbers, default=0), part.begins)
            elif kind == "ended":
                ended += [self._inlets.pop(number).link for number in numbers if number in self._inlets]
        return parts, ended

    def _begin(self, number: int, rank: int) -> None:
        if number <= self._newest:
            return
        self._newest, link, peer = number, StreamLink(self._mailroom, CarriedQueue(self, number)), self._peer
        if peer is not None:
            its = (rank,) if rank in peer.ranks else ()  # nothing is believed of a rank on another node
            peer = replace(peer, role=Role.RANK, ranks=its)
        self._inlets[number] = Inlet(link, Sender(peer), self._refused)
        self._opened(link)
        link.greet()

    def _said(self, numbers: Sequence[int], content: bytes) -> list[tuple[StreamLink, tuple[Upward, ...]]]:
        """Return what an envelope says, by stream."""
        inlets = [self._inlets.get(number) for number in numbers]
        live = [inlet for inlet in inlets if inlet is not None and inlet.link.rejection is None]
        try:
            envelope = pb.UpwardEnvelope.FromString(content)
            if len(numbers) == 1:
                return [(inlet.link, said) for inlet in live if (said := inlet.take(envelope))]
            if ending := live[0].link.refusal(envelope) if live else None:
                return _refuse(live, *ending)
            messages = decode_upward(envelope).messages
            if envelope.chunk or len(messages) != len(numbers):
                raise CodecError(f"got {len(messages)} messages for {len(numbers)} streams, expected one of each")
        except (CodecError, DecodeError) as error:
            return _refuse(live, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        now, parts = time.monotonic(), []
        for inlet, message in zip(inlets, messages, strict=True):
            if inlet is not None and inlet.link.rejection is None and (allowed := inlet.allowed((message,))):
                inlet.link.received_at = now
                parts.append((inlet.link, allowed))
        return parts

    def queue(self, numbers: list[int], envelope: pb.DownwardEnvelope | None) -> None:
        """Send this on these streams, behind what was queued before; None: end them."""
        if envelope is not None and self._queued and self._queued[-1][1] is envelope:
            self._queued[-1][0].extend(numbers)
        else:
            self._queued.append((numbers, envelope))
            self._has_more.set()

    async def next_bundle(self) -> tuple[pb.DownwardBundle, list[StreamLink]] | None:
        """Return what is sent next, as soon as there is something, and which streams end with it; None once the relay has gone."""
        while True:
            await self._has_more.wait()
            bundle, ended = self._bundle()
            if bundle.parts:
                return bundle, ended
            if self._closed:
                return None

    def _bundle(self) -> tuple[pb.DownwardBundle, list[StreamLink]]:
        bundle, ended, nbytes = pb.DownwardBundle(), list[StreamLink](), 0
        while self._queued and nbytes < BUNDLE_BYTES:
            numbers, envelope = self._queued.popleft()
            streams = [number for number in numbers if number in self._inlets]
            if envelope is not None and streams:
                content = envelope.SerializeToString()
                bundle.parts.add(streams=streams, envelope=content)
                nbytes += len(content)
            for number in streams if envelope is None else ():
                link = self._inlets.pop(number).link
                ended.append(link)
                code, text = link.rejection or (grpc.StatusCode.OK, "")
                bundle.parts.add(streams=[number], ended=pb.StreamStatus(code=code.value[0], text=text))
        if not self._queued and not self._closed:
            self._has_more.clear()
        return bundle, ended

    def close(self) -> None:
        """The relay sends nothing any more. What its streams were sent before is delivered before."""
        self._mailroom.put(self._close)

    def _close(self) -> None:
        self._closed = True
        self._has_more.set()


def _refuse(inlets: Sequence[Inlet], code: grpc.StatusCode, text: str) -> list[tuple[StreamLink, tuple[Upward, ...]]]:
    """End these streams with this status; none of them has said anything."""
    for inlet in inlets:
        inlet.link.refuse(code, text)
    return []
