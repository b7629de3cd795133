"""One of the client processes of `benchmarks.scale`: the connections of many nodes, each of one rank, or of a relay that carries several ranks' streams.

Reads commands from standard input and reports what happened on standard output, a JSON line each; all times are
CLOCK_MONOTONIC, which all processes of a machine share. It speaks through the project's own codec. Ranks exist in name only:
what they report and write is made up, and of the size that real ranks send.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks._scale_world import WORLD_FLAGS, World, file_entry, registration, report
from ttp.identity.credentials import Credentials
from ttp.identity.role import controller_name
from ttp.proto import control_pb2 as pb
from ttp.proto.address import split_address
from ttp.proto.codec import decode_downward, decode_parcels, encode_upward
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.messages import (
    AgentHello,
    Downward,
    Exit,
    Freeze,
    Heartbeat,
    KeepAlive,
    Phase,
    Published,
    PublishOrder,
    RolledForward,
    RollForward,
    ShareResult,
    StandbyList,
    StateReport,
    Upward,
    Vouch,
    Welcome,
    WorkerExit,
    WriteOrder,
    Written,
)
from ttp.proto.transport import CLIENT_OPTIONS

Wire = pb.UpwardEnvelope | pb.UpwardBundle
BEAT_SLICE_S = 0.02
ATTACH_AT_ONCE = 64


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)


@dataclass
class Arrivals:
    """When a kind of message reached the ranks that it is for; reports once, when it has reached all of them."""

    event: str
    expected: frozenset[int]
    first: float = 0.0
    ranks: set[int] = field(default_factory=set)

    def note(self, ranks: tuple[int, ...]) -> None:
        """A rank may have it twice: a Freeze is repeated to one whose heartbeat was sent before it was frozen. The stream of the rank that is dead
        may have it too."""
        if new := self.expected.intersection(ranks) - self.ranks:
            self.first = self.first or time.monotonic()
            self.ranks |= new
            if self.ranks == self.expected:
                tell(self.event, first=self.first, count=len(self.ranks))


@functools.cache
def certificates() -> dict[int, Credentials] | None:
    """Return the agents' credentials by the first rank of each, which SCALE_CREDENTIALS names a file of; None: connections are plain."""
    if not (path := os.environ.get("SCALE_CREDENTIALS")):
        return None
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    return {int(rank): Credentials.decode(one) for rank, one in content.items()}


def open_aio_channel(address: str, first_rank: int) -> grpc.aio.Channel:
    """As `ttp.proto.transport.open_channel`, with the certificate of the agent whose first rank this is."""
    target, term = split_address(address)
    if (agents := certificates()) is None:
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    own = agents[first_rank]
    secure = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    expected = ("grpc.ssl_target_name_override", controller_name(term))
    return grpc.aio.secure_channel(target, secure, options=(*CLIENT_OPTIONS, expected))


class Stream:
    """One connection to the controller: a rank's or an agent's own stream, or those that a relay carries."""

    def __init__(self, client: Client, ranks: tuple[int, ...], relays: bool) -> None:
        self.client, self.ranks, self.relays = client, ranks, relays
        self.frozen: list[StateReport] = []
        self._lock = asyncio.Lock()  # gRPC takes one write of a stream at a time
        self._freeze_id = 0
        self._owing: set[int] = set()
        self._left = False
        self._beat: Wire | None = None

    async def open(self) -> None:
        """Attach; a connection that breaks before the greeting (an overloaded machine) is tried again, and counted."""
        while True:
            self._channel = open_aio_channel(self.client.address, self.ranks[0])
            stub: Any = ControlStub(self._channel)
            self._call: Any = stub.Carry() if self.relays else stub.Attach()
            try:
                await self._begin()
                break
            except grpc.aio.AioRpcError as error:
                self.client.retries += 1
                print(f"a stream could not be opened and is tried again: {error.code()}", file=sys.stderr)
                await self._channel.close()
        self.reader = asyncio.create_task(self._read())

    async def _begin(self) -> None:
        greetings: list[bytes] = []
        if self.relays:
            begins = [pb.CarriedUpward(streams=[1 + number], begins=rank) for number, rank in enumerate(self.ranks)]
            await self._call.write(pb.UpwardBundle(parts=begins))
            while len(greetings) < len(self.ranks):
                greetings += [part.envelope for part in await self._next()]
        else:
            greetings.append((await self._call.read()).SerializeToString())
        assert all(decode_downward(pb.DownwardEnvelope.FromString(each)).message is None for each in greetings)

    async def _next(self) -> Sequence[pb.CarriedDownward]:
        """Return the parts of the next bundle. Raises AioRpcError: the connection has ended."""
        bundle = await self._call.read()
        if bundle is grpc.aio.EOF:
            raise EOFError("the controller has ended the connection")
        return bundle.parts  # type: ignore[no-any-return]

    def wire(self, *messages: Upward) -> Wire:
        """Return what goes out at once to say these: an envelope, or one of each rank's stream."""
        if not self.relays:
            return self.client.envelope(*messages)
        streams = [
            1 + message.rank - self.ranks[0] for message in messages if not isinstance(message, AgentHello | Vouch)
        ]
        part = pb.CarriedUpward(streams=streams, envelope=self.client.envelope(*messages).SerializeToString())
        return pb.UpwardBundle(parts=[part])  # as a relay joins them

    async def say(self, *messages: Upward) -> None:
        await self.put(self.wire(*messages))

    async def beat(self) -> None:
        """Send the heartbeats of ranks that have not left: a controller repeats what they do not say that they have received."""
        if self._left:
            return
        if self._beat is None:
            step, freeze_id = self.client.world.step, self._freeze_id
            beats = (
                Heartbeat(rank, Phase.COMPUTE, step, frozen=freeze_id, owes=rank in self._owing) for rank in self.ranks
            )
            self._beat = self.wire(*beats)
        await self.put(self._beat)

    def ordered(self, ranks: tuple[int, ...], message: Downward) -> None:
        """These ranks have an order, and owe an answer to it."""
        self._beat = None
        self._owing.update(ranks)
        match message:
            case Freeze(freeze_id):
                self._freeze_id = freeze_id
            case Exit():
                self._left = True

    def answered(self, *ranks: int) -> None:
        self._beat = None
        self._owing.difference_update(ranks)

    async def put(self, wire: Wire) -> None:
        async with self._lock:
            with contextlib.suppress(*((asyncio.InvalidStateError,) if self.client.closing else ())):
                await self._call.write(wire)

    async def _read(self) -> None:
        try:
            while (read := await self._call.read()) is not grpc.aio.EOF:
                for ranks, envelope in self._carried(read) if self.relays else (((), read),):
                    for parcel in decode_parcels(envelope):
                        if parcel.message is not None:
                            named = parcel.ranks or (() if isinstance(parcel.message, KeepAlive) else ranks)
                            await self.client.take(self, named, parcel.message, envelope.ByteSize())
        except grpc.aio.AioRpcError as error:
            if not (self._left or self.client.closing):
                self.client.broken += 1
                print(f"the stream of ranks {self.ranks} broke: {error.code()}: {error.details()}", file=sys.stderr)

    def _carried(self, bundle: pb.DownwardBundle) -> Iterator[tuple[tuple[int, ...], pb.DownwardEnvelope]]:
        """Yield what is sent on streams, and to which ranks."""
        for part in bundle.parts:
            if part.WhichOneof("body") == "ended":
                continue
            ranks = tuple(self.ranks[number - 1] for number in part.streams)
            yield ranks, pb.DownwardEnvelope.FromString(part.envelope)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


@dataclass
class Client:
    """All streams of this process, and what they wait for."""

    address: str
    world: World
    streams: list[Stream] = field(default_factory=list)
    agent: Any = None
    """The own stream of the first node's agent."""
    orders: dict[tuple[int, WriteOrder], Stream] = field(default_factory=dict)
    """By rank and order: one that a heartbeat has crossed comes twice."""
    publish: tuple[Stream, int, PublishOrder] | None = None
    arrivals: dict[type, Arrivals] = field(default_factory=dict)
    hold: Stream | None = None
    """The stream whose reports are kept back until the command `last`."""
    beating: asyncio.Task[None] | None = None
    closing: bool = False
    retries: int = 0
    """Streams that were opened again, as they broke before the greeting."""
    broken: int = 0
    """Streams that ended with an error after it."""

    def envelope(self, *messages: Upward) -> pb.UpwardEnvelope:
        return encode_upward(self.world.job_id, 1, messages)

    @property
    def ranks(self) -> list[int]:
        return [rank for stream in self.streams for rank in stream.ranks]

    async def attach(self, first: int, count: int) -> None:
        per_node = self.world.ranks_per_node
        for at in range(first, first + count, per_node):
            ranks = tuple(range(at, min(at + per_node, first + count)))
            self.streams.append(Stream(self, ranks, relays=per_node > 1))
        for batch in range(0, len(self.streams), ATTACH_AT_ONCE):
            await asyncio.gather(*(stream.open() for stream in self.streams[batch : batch + ATTACH_AT_ONCE]))
        self.agent = Stream(self, self.streams[0].ranks, relays=False)
        await self.agent.open()
        tell("attached", streams=len(self.streams), retries=self.retries)

    async def register(self) -> None:
        self.arrivals[Welcome] = Arrivals("welcomed", frozenset(self.ranks))
        tell("registering")
        for stream in self.streams:
            await stream.say(*(registration(self.world, rank) for rank in stream.ranks))

    async def beat(self) -> None:
        """One envelope a stream each heartbeat, spread over its time."""
        began, beats = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began) * len(self.streams) / self.world.heartbeat_s)
            for number in range(beats, due):
                await self.streams[number % len(self.streams)].beat()
            beats = due
            await asyncio.sleep(BEAT_SLICE_S)

    async def ping(self) -> None:
        """Ask what the controller answers once it has come to it: everything that was sent before has been received then."""
        tell("pinged")
        await self.agent.say(AgentHello("pinging", (), ()))

    async def arm(self, dead: int, holds: bool) -> None:
        """Get ready for the death of `dead`; with `holds`, this client's last stream answers on command only."""
        alive = frozenset(self.ranks) - {dead}
        rolling = frozenset(rank for rank in alive if self.world.is_ready(rank))
        self.hold = self.streams[-1] if holds else None
        self.arrivals = {
            Freeze: Arrivals("frozen", alive),
            RollForward: Arrivals("rolling", rolling),
            WriteOrder: Arrivals("ordered", alive),
            Exit: Arrivals("exited", alive),
        }
        tell("armed")

    async def die(self, rank: int) -> None:
        tell("died")
        await self.agent.say(WorkerExit(rank, 1000 + rank, "signal SIGKILL", time.time()))

    async def last(self) -> None:
        assert self.hold is not None
        reports, self.hold.frozen = self.hold.frozen, []
        wire = self.hold.wire(*reports)
        tell("last_reply")
        self.hold.answered(*(report.rank for report in reports))
        await self.hold.put(wire)

    async def write(self) -> None:
        """Every rank reports that it has written its parts, in an envelope of its own. Those of a node come about together: its relay has them
        wait for each other."""
        said: dict[Stream, list[Written]] = {}
        for (rank, order), stream in self.orders.items():
            result = ShareResult((file_entry(order.parts, rank),))
            said.setdefault(stream, []).append(Written(rank, order.freeze_id, order.tmp_name, order.parts, result))
        answers = [(stream, stream.wire(*written)) for stream, written in said.items()]
        tell("writing", bytes=sum(wire.ByteSize() for _, wire in answers))
        for stream, wire in answers:
            stream.answered(*(written.rank for written in said[stream]))
            await stream.put(wire)

    async def published(self) -> None:
        if self.publish is None:
            return
        stream, rank, order = self.publish
        tell("publishing")
        stream.answered(rank)
        await stream.say(Published(rank, order.freeze_id, order.step, f"{order.directory}/iter_{order.step:07d}"))

    async def take(self, stream: Stream, ranks: tuple[int, ...], message: Downward, nbytes: int) -> None:
        if isinstance(message, StandbyList):
            tell("ponged")
        if not ranks:
            return
        if type(message) in self.arrivals:
            self.arrivals[type(message)].note(ranks)
        if isinstance(message, Freeze | WriteOrder | PublishOrder | Exit):
            stream.ordered(ranks, message)
        match message:
            case Freeze(freeze_id):
                reports = [report(self.world, rank, freeze_id) for rank in ranks]
                if stream is self.hold:
                    stream.frozen += reports
                else:
                    stream.answered(*ranks)
                    await stream.say(*reports)
            case RollForward(freeze_id, record):
                await stream.say(*(RolledForward(rank, freeze_id, record.step) for rank in ranks))
            case WriteOrder():
                self.orders.update(((rank, message), stream) for rank in ranks)
            case PublishOrder():
                self.publish = (stream, ranks[0], message)
                tell("publish_order", bytes=nbytes, results=len(message.results))

    async def close(self) -> None:
        self.closing = True
        if self.beating is not None:
            self.beating.cancel()
        for stream in (*self.streams, self.agent):
            if stream is not None:
                await stream.close()


async def main() -> None:
    world = World.from_flags(sys.argv[2 : 2 + len(WORLD_FLAGS)])
    client = Client(sys.argv[1], world)
    commands: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read_commands() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(commands.put_nowait, None)

    threading.Thread(target=read_commands, daemon=True).start()
    while (command := await commands.get()) is not None:
        match command.pop("do"):
            case "attach":
                await client.attach(**command)
            case "register":
                await client.register()
            case "beat":
                client.beating = asyncio.create_task(client.beat())
            case "ping":
                await client.ping()
            case "arm":
                await client.arm(**command)
            case "die":
                await client.die(**command)
            case "last":
                await client.last()
            case "write":
                await client.write()
            case "count":
                tell("counted", retries=client.retries, broken=client.broken)
            case "published":
                await client.published()
            case unknown:
                raise ValueError(f"no command {unknown!r}")
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
