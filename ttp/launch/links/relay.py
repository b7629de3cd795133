"""A node's relay: it carries the streams of the node's ranks to a controller in one connection.

A controller of 10,000 ranks has 1,250 connections then, and receives the messages of a node's ranks of one moment as one. The relay changes nothing: what a
stream carries, its greeting, its end and its status are the controller's and the rank's (`Carry` in `control.proto`). It only adds signs of its own
life, where a stream had nothing to carry for a while. A rank that misses them connects to the controller itself (`ttp/proto/stream.py`).

Owns a thread with a loop, a socket that this node's processes of this user reach, and one connection to each controller that a rank asks for; another one where nothing comes on that.
Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from ttp.errors import ControllerError
from ttp.proto import control_pb2 as pb
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.stream import ALIVE_LEASES, CONTROLLER, PASSED_ON, RANK, SERVICE, SIGN_OF_LIFE
from ttp.proto.transport import SERVER_OPTIONS, grpc, open_async_channel

log = logging.getLogger("ttp.launch")

TOGETHER_S = 0.02
"""What comes from the ranks within so short a time goes into one message: their heartbeats, their answers to one order."""
BUNDLE_BYTES = 1 << 20
"""A message that has grown to this size is sent at once."""
START_S = 10.0
CLOSE_S = 2.0
DRAIN_S = 0.5
"""The last messages of ranks go out within it."""

STALE_LEASES = 0.5
"""A connection on which nothing has come for this part of a lease gets no more streams: a controller that leads sends something three times a lease."""

Ending = tuple[grpc.StatusCode, str, bool]
"""gRPC's status, and whether it is the controller's word, or what became of the connection to it."""

LOST_STATUS = "Internal error from Core"
"""gRPC's details where it has no status of the controller: the call ended while a message was on its way, and that the write failed replaces it."""


@dataclass(eq=False)
class _Carried:
    """One rank's stream. What comes for it is queued: an envelope, or how the controller has ended it."""

    number: int
    queue: asyncio.Queue[bytes | Ending] = field(default_factory=asyncio.Queue)


class _Connection:
    """One connection to a controller, and the streams in it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._queue: asyncio.Queue[pb.CarriedUpward | None] = asyncio.Queue()
        self._streams: dict[int, _Carried] = {}
        self._begun = 0
        self.over = False
        self.received_at = time.monotonic()
        self.task = asyncio.create_task(self._run())

    def begin(self, rank: int) -> _Carried:
        self._begun += 1
        stream = self._streams[self._begun] = _Carried(self._begun)
        self._queue.put_nowait(pb.CarriedUpward(streams=[stream.number], begins=rank))
        return stream

    def send(self, stream: _Carried, envelope: bytes) -> None:
        self._queue.put_nowait(pb.CarriedUpward(streams=[stream.number], envelope=envelope))

    def end(self, stream: _Carried) -> None:
        """Its rank has ended it, or is gone. With its last stream the connection ends."""
        if self._streams.pop(stream.number, None) is not None:
            self._queue.put_nowait(pb.CarriedUpward(streams=[stream.number], ended=True))
        if not self._streams:
            self.close()

    def close(self) -> None:
        """Let what was said go out, and end."""
        self.over = True
        self._queue.put_nowait(None)

    async def _run(self) -> None:
        ending: Ending = grpc.StatusCode.UNAVAILABLE, "the controller ended the connection of this node's relay", True
        try:
            async with open_async_channel(self._address) as channel:
                to_any: Any = channel  # the stub of either kind of channel
                call: Any = ControlStub(to_any).Carry()  # type: ignore[call-arg]
                writer = asyncio.create_task(self._write(call))
                try:
                    async for bundle in call:
                        self.received_at = time.monotonic()
                        for part in bundle.parts:
                            self._take(part)
                finally:
                    writer.cancel()
        except grpc.aio.AioRpcError as error:
            ending = ending_of(error)
        except ControllerError as error:  # this process has no certificate
            ending = grpc.StatusCode.UNAUTHENTICATED, str(error), False
        except Exception as error:  # its streams must not wait for ever
            log.exception("the relay's connection to %s failed", self._address)
            ending = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}", False
        finally:
            self.over = True
            for stream in self._streams.values():
                stream.queue.put_nowait(ending)
            self._streams.clear()

    async def _write(self, call: Any) -> None:
        """Send what is queued. Not by an iterator that is handed to the call: where the controller ends it meanwhile, gRPC would report that the iterator
        failed, and not why the call has ended."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async for bundle in bundles(self._queue):
                await call.write(bundle)
            await call.done_writing()

    def _take(self, part: pb.CarriedDownward) -> None:
        for number in part.streams:
            if (stream := self._streams.get(number)) is None:
                continue  # its rank has left it
            if part.WhichOneof("body") == "ended":
                del self._streams[number]
                stream.queue.put_nowait((_STATUS.get(part.ended.code, grpc.StatusCode.UNKNOWN), part.ended.text, True))
            elif part.WhichOneof("body") == "envelope":
                stream.queue.put_nowait(part.envelope)


def ending_of(error: grpc.aio.AioRpcError) -> Ending:
    """Return how the streams end whose connection ended with `error`. Of a controller that refuses this agent they learn that no controller's word
    was passed on: it may take its ranks. Where gRPC has lost the status they come again, and receive it then."""
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == LOST_STATUS:
        return grpc.StatusCode.UNAVAILABLE, "the connection to the controller ended while a message was sent", True
    return error.code(), error.details() or "", error.code() is grpc.StatusCode.UNAVAILABLE


async def bundles(queue: asyncio.Queue[pb.CarriedUpward | None]) -> AsyncIterator[pb.UpwardBundle]:
    """Yield what is queued, in messages; None ends it."""
    while (part := await queue.get()) is not None:
        if part.WhichOneof("body") == "envelope":
            await asyncio.sleep(TOGETHER_S)
        taken, nbytes = [part], len(part.envelope)
        while part is not None and nbytes < BUNDLE_BYTES and not queue.empty():
            if (part := queue.get_nowait()) is not None:
                taken.append(part)
                nbytes += len(part.envelope)
        yield pb.UpwardBundle(parts=joined(taken))
        if part is None:
            return


def joined(parts: Iterable[pb.CarriedUpward]) -> list[pb.CarriedUpward]:
    """Return the parts with those that say one message each, and stand side by side, as one: it takes a controller as long as one of them."""
    found: list[tuple[pb.CarriedUpward, pb.UpwardEnvelope | None]] = []
    for part in parts:
        one, (last, whole) = _single(part), found[-1] if found else (None, None)
        if last is None or whole is None or one is None or (one.job_id, one.term) != (whole.job_id, whole.term):
            found.append((part, one))
        else:
            whole.MergeFrom(one)
            last.streams.extend(part.streams)
    for part, whole in found:
        if len(part.streams) > 1 and whole is not None:
            part.envelope = whole.SerializeToString()
    return [part for part, _ in found]


def _single(part: pb.CarriedUpward) -> pb.UpwardEnvelope | None:
    """Return the envelope of a part that has one message; None: it is something else, or cannot be read here."""
    if part.WhichOneof("body") != "envelope":
        return None
    try:
        envelope = pb.UpwardEnvelope.FromString(part.envelope)
    except DecodeError:
        return None
    return envelope if len(envelope.messages) == 1 and not envelope.chunk and not envelope.more else None


_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class Relay:
    """`start` it before the node's ranks, `close` it behind them."""

    def __init__(self, path: Path, ranks: tuple[int, ...], lease_s: float) -> None:
        """`path`: of the socket; only this user may come to its folder. `lease_s`: the job's."""
        self.path, self._ranks, self._alive_s = path, frozenset(ranks), ALIVE_LEASES * lease_s
        self._stale_s = STALE_LEASES * lease_s
        self._connections: dict[str, _Connection] = {}
        """By controller, the one that takes its next streams."""
        self._all: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ttp-relay", daemon=True)
        self._server: grpc.aio.Server | None = None
        self._listening: concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Return once it listens. Raises OSError, RuntimeError, TimeoutError: it cannot."""
        self._thread.start()
        self._listening = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        self._listening.result(START_S)

    def close(self) -> None:
        """End the streams that are open. Harmless when it has ended."""
        if self._loop.is_closed():
            return
        if self._thread.ident is not None:  # else it could not be started
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _listen(self) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self._attach)
        server = self._server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Attach": handler}),))
        server.add_insecure_port(f"unix:{self.path}")
        await server.start()

    async def _end(self) -> None:
        if self._listening is not None:  # a server that is stopped while it starts takes the process along
            await asyncio.gather(asyncio.wrap_future(self._listening), return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
        tasks = [connection.task for connection in self._all]
        for connection in self._all:
            connection.close()
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _attach(self, envelopes: AsyncIterator[bytes], context: Any) -> None:
        asked = dict(context.invocation_metadata())
        address, rank = asked.get(CONTROLLER, ""), asked.get(RANK, "")
        if not address or not rank.isdecimal() or int(rank) not in self._ranks:
            text = f"got a stream of rank {rank or 'unknown'} to {address or 'no controller'}, expected one of ranks {sorted(self._ranks)} of this node"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        connection = self._connection_to(address)
        stream = connection.begin(int(rank))
        reader = asyncio.create_task(self._read(envelopes, connection, stream))
        try:
            code, text, is_passed_on = await self._write(stream, context)
        finally:
            reader.cancel()
            connection.end(stream)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, text, (PASSED_ON,) if is_passed_on else ())

    def _connection_to(self, address: str) -> _Connection:
        """Return the connection that takes another stream: not one on which nothing comes any more, which the streams in it will leave."""
        known = self._connections.get(address)
        if known is not None and not known.over and time.monotonic() - known.received_at < self._stale_s:
            return known
        connection = self._connections[address] = _Connection(address)
        self._all.add(connection)
        connection.task.add_done_callback(lambda task: self._all.discard(connection))
        return connection

    async def _read(self, envelopes: AsyncIterator[bytes], connection: _Connection, stream: _Carried) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for envelope in envelopes:
                connection.send(stream, envelope)
        connection.end(stream)
        stream.queue.put_nowait((grpc.StatusCode.OK, "", True))

    async def _write(self, stream: _Carried, context: Any) -> Ending:
        """Pass on what comes for a stream; return how it ends."""
        await context.write(SIGN_OF_LIFE)
        while True:
            try:
                item = await asyncio.wait_for(stream.queue.get(), self._alive_s)
            except TimeoutError:
                item = SIGN_OF_LIFE
            if isinstance(item, tuple):
                return item
            await context.write(item)
