"""The caller's end of one stream to the controller, over synchronous gRPC (its threads live well with a data loader's forks).

Owns the connection, the greeting's checks (right job, no fenced term), and nothing else: what comes in is handed to a
listener, what goes out is queued. A stream that has ended is thrown away; the next try is a new object with a new
channel, so that no backoff is inherited. Used by a rank's processor and by a node's agent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from ttp.errors import ControllerError
from ttp.proto import control_pb2 as pb
from ttp.proto.chunks import Joiner, split
from ttp.proto.codec import CodecError, DownwardParcel, decode_parcels, encode_upward
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.fence import Fence
from ttp.proto.messages import Upward
from ttp.proto.transport import grpc, open_channel

Address = str | Callable[[], str | None]
"""`host:port`, or how to find out (None: not known yet). May block for a moment: asked on the stream's own thread."""

_NOTHING_LISTENS = "connection refused"
"""What the system says of a port that no process has, in gRPC's text for the failed connection. Where it is worded otherwise,
a dead controller is given up for one that is silent: later, but all the same."""

GREETING_TIMEOUT_S = 5.0
"""A controller that takes the connection but says nothing for this long, or for a lease where that is longer, counts as not reached (stopped,
overloaded)."""


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
    ) -> None:
        """`fence`: the highest term seen so far; a controller of a lower one is refused. `greeting_s`: how long it may say nothing."""
        self._address = address
        self._job_id = job_id
        self._listener = listener
        self._fence = Fence(job_id, fence)
        self._greeting_s = greeting_s
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
            reason = _describe(error)
            self._nothing_listens = _NOTHING_LISTENS in reason.lower()
        except CodecError as error:
            reason = str(error)
        except ControllerError as error:  # this process has no certificate
            reason = str(error)
        except Exception as error:  # the caller's address function; a stream must always say that it has ended
            reason = f"the controller's address cannot be found: {type(error).__name__}: {error}"
        finally:
            self._outbox.put(None)
            self._listener.stream_closed(self, reason)

    def _talk(self, address: str) -> str:
        """Read the stream to its end; return why it was given up, or empty."""
        with open_channel(address) as channel:
            call = ControlStub(channel).Attach(self._requests())
            with self._lock:
                self._call = call
                if self._closed:
                    _cancel(call)
            timer = threading.Timer(self._greeting_s, _cancel, (call,))
            timer.daemon = True
            timer.start()
            try:
                joiner = Joiner[pb.DownwardEnvelope]()
                for envelope in call:
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


def _describe(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
