"""The caller's end of one stream to the controller, over synchronous gRPC (its threads live well with a data loader's forks).

Owns the connection, the greeting's checks (right job, no fenced term), and nothing else: what comes in is handed to a
listener, what goes out is queued. A stream that has ended is thrown away; the next try is a new object with a new
channel, so that no backoff is inherited. Used by a rank's processor and by a node's agent.

A rank's stream may go through its node's relay, which sends an envelope of no job as a sign of its own life: at once, and whenever nothing else came for
a while. A stream on which nothing comes has a relay that does not run; a controller that is silent behind one that runs is silent, as on a stream of
the rank's own.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ttp.errors import ControllerError
from ttp.proto import control_pb2 as pb
from ttp.proto.chunks import Joiner, split
from ttp.proto.codec import CodecError, DownwardParcel, decode_parcels, encode_upward
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.fence import Fence
from ttp.proto.messages import Upward
from ttp.proto.transport import describe, grpc, open_channel, open_relay

Address = str | Callable[[], str | None]
"""`host:port`, or how to find out (None: not known yet). May block for a moment: asked on the stream's own thread."""

_NOTHING_LISTENS = "connection refused"
"""What the system says of a port that no process has, in gRPC's text for the failed connection. Where it is worded otherwise,
a dead controller is given up for one that is silent: later, but all the same."""

GREETING_TIMEOUT_S = 5.0
"""A controller that takes the connection but says nothing for this long, or for a lease where that is longer, counts as not reached (stopped,
overloaded)."""

SERVICE = "ttp.control.v1.Control"
CONTROLLER = "ttp-controller"
"""Of a stream's metadata: the address of the controller that it is to."""
RANK = "ttp-rank"
"""Of a stream's metadata: whose it is."""
PASSED_ON = ("ttp-passed-on", "1")
"""Of the metadata of a stream's end: it is the controller's word, or what became of the connection to it, and not the relay's own."""
SIGN_OF_LIFE = pb.DownwardEnvelope().SerializeToString()

SILENT_LEASES = 1 / 5
"""A rank that has received nothing from its relay for this part of a lease connects to the controller itself. Its last heartbeat may be a third of a
lease old then: the controller receives something of it again before it suspects it (`SUSPECT_AFTER`)."""
ALIVE_LEASES = 1 / 12
"""A relay shows so often that it runs."""
LOOKS = 8
"""Within the time for which a relay may be silent."""


class RelayFailed(ControllerError):
    """The relay ended the stream, or was silent. The rank connects to the controller itself."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """By which relay a rank's stream goes."""

    path: str
    """Of the relay's socket."""
    rank: int
    silent_s: float
    """A relay from which nothing comes for so long does not run."""

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Return what the relay asks for: to which controller the stream is, and whose it is."""
        return (CONTROLLER, address), (RANK, str(self.rank))

    def carried(self, call: grpc.CallIterator[pb.DownwardEnvelope]) -> Iterator[pb.DownwardEnvelope]:
        """Yield what the controller sends. Raises RelayFailed, or grpc.RpcError for what is not the relay's fault."""
        watch = _Watch(call, self.silent_s)
        try:
            for envelope in call:
                watch.received_at = time.monotonic()
                if envelope.job_id:
                    yield envelope
        except grpc.RpcError as error:
            if watch.fired:
                raise RelayFailed(f"nothing received from this node's relay for {self.silent_s:g} s") from error
            if not _is_passed_on(error):
                raise RelayFailed(f"this node's relay has ended the stream: {describe(error)}") from error
            raise
        finally:
            watch.end()


class _Watch:
    """Cancels a stream on which nothing comes."""

    def __init__(self, call: grpc.CallIterator[pb.DownwardEnvelope], silent_s: float) -> None:
        self.received_at = time.monotonic()
        self.fired = False
        self._call, self._silent_s = call, silent_s
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="ttp-relay-watch", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        excused_until, looked = -math.inf, time.monotonic()
        while not self._ended.wait(self._silent_s / LOOKS):
            now = time.monotonic()
            if now - looked > self._silent_s / 2:
                # This process was stopped itself: for so long nothing could be received.
                held_s = now - looked - self._silent_s / LOOKS
                excused_until = min(now, max(self.received_at, excused_until) + held_s)
            looked = now
            if now - max(self.received_at, excused_until) > self._silent_s:
                self.fired = True
                _cancel(self._call)
                return


def _is_passed_on(error: grpc.RpcError) -> bool:
    """Say whether an end is not the relay's own; one that this side has asked for is not either."""
    if not isinstance(error, grpc.Call):
        return True
    return error.code() is grpc.StatusCode.CANCELLED or PASSED_ON in tuple(map(tuple, error.trailing_metadata() or ()))


class StreamListener(Protocol):
    """Receives what happens on a stream, on the stream's thread: must only enqueue."""

    def stream_opened(self, stream: ControlStream) -> None: ...

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None: ...

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        """Said once per started stream, last."""


class ControlStream:
    """One try to talk to the controller; `start`, then `send` after `stream_opened`, then `close`."""

    def __init__(
        self,
        address: Address,
        job_id: str,
        listener: StreamListener,
        *,
        fence: int = 0,
        greeting_s: float = GREETING_TIMEOUT_S,
        relayed: Relayed | None = None,
    ) -> None:
        """`fence`: the highest term seen so far; a controller of a lower one is refused. `greeting_s`: how long it may say nothing. `relayed`: by
        which relay; None: the connection is this stream's own."""
        self._address = address
        self._job_id = job_id
        self._listener = listener
        self._fence = Fence(job_id, fence)
        self._greeting_s = greeting_s
        self._relayed = relayed
        self.relay_failed = False
        """The relay has ended the stream, or does not run. To be read when the stream has closed."""
        self._outbox: queue.SimpleQueue[pb.UpwardEnvelope | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _call and _closed
        self._call: grpc.CallIterator[pb.DownwardEnvelope] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ttp-stream", daemon=True)
        self._nothing_listens = False

    @property
    def term(self) -> int:
        """The controller's term, once the stream is open."""
        return self._fence.term

    @property
    def refused(self) -> bool:
        """Whoever is at the address will not be this job's controller: nothing listens there, or one of a lower term does.
        To be read when the stream has closed."""
        return self._nothing_listens or self._fence.refused

    def start(self) -> None:
        self._thread.start()

    def send(self, *messages: Upward) -> None:
        """Queue one envelope. Raises CodecError for what the wire cannot carry."""
        for envelope in split(encode_upward(self._job_id, self.term, messages)):
            self._outbox.put(envelope)

    def close(self, drain_s: float = 0.0) -> None:
        """End the stream; with `drain_s`, let what was queued go out first, for up to that long."""
        self._outbox.put(None)
        if drain_s > 0:
            self._thread.join(drain_s)
        with self._lock:
            self._closed = True
            if self._call is not None:
                _cancel(self._call)
        if drain_s > 0:
            self._thread.join(drain_s)

    def _run(self) -> None:
        reason = "the controller ended the stream"
        try:
            address = self._address if isinstance(self._address, str) else self._address()
            unknown = "the controller's address is not known yet"
            reason = unknown if address is None else self._talk(address) or reason
        except grpc.RpcError as error:
            reason = describe(error)
            self._nothing_listens = _NOTHING_LISTENS in reason.lower()
        except CodecError as error:
            reason = str(error)
        except RelayFailed as error:
            reason, self.relay_failed = str(error), True
        except ControllerError as error:  # this process has no certificate
            reason = str(error)
        except Exception as error:  # the caller's address function; a stream must always say that it has ended
            reason = f"the controller's address cannot be found: {type(error).__name__}: {error}"
        finally:
            self._outbox.put(None)
            self._listener.stream_closed(self, reason)

    def _talk(self, address: str) -> str:
        """Read the stream to its end; return why it was given up, or empty."""
        relayed = self._relayed
        with open_channel(address) if relayed is None else open_relay(relayed.path) as channel:
            metadata = None if relayed is None else relayed.metadata(address)
            call = ControlStub(channel).Attach(self._requests(), metadata=metadata)
            with self._lock:
                self._call = call
                if self._closed:
                    _cancel(call)
            timer = threading.Timer(self._greeting_s, _cancel, (call,))
            timer.daemon = True
            timer.start()
            try:
                joiner = Joiner[pb.DownwardEnvelope]()
                for envelope in call if relayed is None else relayed.carried(call):
                    timer.cancel()
                    if refusal := self._check(address, envelope):  # before anything else of it is read
                        _cancel(call)
                        return refusal
                    if (whole := joiner.take(envelope)) is not None:
                        self._take(whole)
            finally:
                timer.cancel()
                self._outbox.put(None)
        return ""

    def _check(self, address: str, envelope: pb.DownwardEnvelope) -> str:
        """Say why this controller is given up; empty: it is the right one."""
        greeted = self.term != 0
        if refusal := self._fence.refusal(address, envelope.job_id, envelope.term):
            return refusal
        if not greeted:
            self._listener.stream_opened(self)
        return ""

    def _take(self, envelope: pb.DownwardEnvelope) -> None:
        for parcel in decode_parcels(envelope):
            if parcel.message is not None:
                self._listener.stream_received(self, parcel)

    def _requests(self) -> Iterator[pb.UpwardEnvelope]:
        while (envelope := self._outbox.get()) is not None:
            yield envelope


def _cancel(call: grpc.CallIterator[pb.DownwardEnvelope]) -> None:
    call.cancel()  # type: ignore[no-untyped-call]
