"""A node's launcher on the line to the controller: it says who has died and who runs, takes orders to replace a process, looks at the job, and
ends the controller.

Owns one stream that reconnects, and moves to the next controller when the active one is gone: nothing listens at its
address any more, or nothing was received from it for a lease. Nothing here raises into the launcher's loop or blocks it, but
the requests (`given_up`, `request_status`, `request_shutdown`), which are plain calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf

from ttp.errors import ControllerError
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import CodecError, DownwardParcel, decode_status
from ttp.proto.control_pb2_grpc import ControlStub
from ttp.proto.frozen import replace
from ttp.proto.messages import (
    NO_PROCESS,
    AgentHello,
    CauseKind,
    Exit,
    Freeze,
    Replace,
    ReplaceFailed,
    StandbyList,
    TakePlaces,
    Thaw,
    Vouch,
    WorkerExit,
)
from ttp.proto.status import JobStatus
from ttp.proto.stream import GREETING_TIMEOUT_S, Address, ControlStream
from ttp.proto.transport import grpc, open_channel
from ttp.text.wording import ranks_text

from .core.facts.state import Stage

log = logging.getLogger("ttp.launch")

RECONNECT_S = 0.2
LOOK_S = 0.1
"""Between two looks whether the controller still sends."""
VOUCHES_A_LEASE = 3
"""A vouch ages like a heartbeat: one may be late."""
USUAL_LEASE_S = 3.0
"""Before the controller has said its own."""
OWN_ABSENCE_S = 1.0
"""A look that comes later than this says nothing about the controller: the launcher was stopped itself."""
_NO_FAILURE = frozenset({"exiting", "exit code 0"})
"""What is reported of a worker whose status is 0, or unknown so far."""
ASK_S = 1.0
"""How long the controller has to say whom it has given up."""


class AgentLink:
    """The launcher's stream. Deaths that were said are said again after a reconnect, and to every later controller: they
    stay true."""

    def __init__(
        self,
        address: Address,
        job_id: str,
        host: str,
        ranks: tuple[int, ...],
        pids: tuple[int, ...],
        running: Callable[[], Mapping[int, int]] = dict,
        take: Callable[[Replace | TakePlaces | Thaw], None] = lambda order: None,
        places: int = 0,
    ) -> None:
        """`pids` in the order of `ranks`: this node's workers. `running()`: those of their processes that run now, by rank. `take(order)`: a
        process is to be replaced, a lost node's ranks are to be started here, or the ranks train on. Neither may block or raise. `places`: for so
        many ranks there is room on this node, a spare one, which has none. Connects in the background."""
        self._running = running
        self._take = take
        self._vouch_at = float("-inf")
        self._controllers: list[Address] = [address]
        self._place = 0
        self._lease_s = inf
        self._received_monotonic_s = time.monotonic()
        self._job_id = job_id
        self._hello = AgentHello(host, ranks, pids, places)
        self._lock = threading.Lock()  # guards all below but _lease_s, _last_reason, _logged and _thread
        self._stream: ControlStream | None = None
        self._attached = False
        self._led = False  # the controller of this stream has said something
        self._exits: list[WorkerExit] = []
        self._closing = False
        self._ended = threading.Event()  # the current stream has ended
        self._wake = threading.Event()  # set by close
        self._last_reason = ""
        self._sent_away_s: float | None = None
        self._frozen_by: CauseKind | None = None
        self._logged: Freeze | Exit | None = None  # it comes again when this agent attaches again
        self._fence = 0
        self._thread = threading.Thread(target=self._run, name="ttp-agent-link", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Say whether an active controller is on the line now.

        One that was killed or has been silent for a lease is not, nor is a standby that no rank has come to: it takes the
        stream but says nothing on it.
        """
        with self._lock:
            return self._attached and self._led

    @property
    def sent_away_monotonic_s(self) -> float | None:
        """When it was received that the controller sends the ranks away: all is decided then, for all nodes. None: it was not, or a later
        controller leads them now."""
        with self._lock:
            return self._sent_away_s

    @property
    def lease_s(self) -> float:
        """How long the controller may be silent; 0: it has not said so yet."""
        return self._lease_s if self._lease_s < inf else 0.0

    @property
    def frozen_by(self) -> CauseKind | None:
        """The cause of the newest freeze, as the controller reported it; None: there was none."""
        with self._lock:
            return self._frozen_by

    @property
    def leader(self) -> str:
        """The address of the controller that is on the line, or was last; empty: it is not known."""
        with self._lock:
            place = self._controllers[self._place]
        return (place if isinstance(place, str) else place()) or ""

    def worker_exit(self, rank: int, pid: int, text: str) -> None:
        """Say that a worker ends: `signal SIGKILL`, `exit code 1`, or `exiting` as long as the kernel does not tell how."""
        report = WorkerExit(rank, pid, text, time.time())
        with self._lock:
            self._exits.append(report)
            if self._attached and self._stream is not None:
                self._say(self._stream, report)

    def replaced(self, rank: int, pid: int) -> None:
        """Process `pid` has the place of the one that this rank had. Nothing is reported of that one any more: a controller that does not know
        the rank could take it for the other's."""
        with self._lock:
            pids = dict(zip(self._hello.ranks, self._hello.pids, strict=True)) | {rank: pid}
            self._hello = replace(self._hello, pids=tuple(pids[each] for each in self._hello.ranks))
            self._exits = [report for report in self._exits if report.rank != rank or report.pid == pid]

    def replace_failed(self, rank: int, freeze_id: int, error: str) -> None:
        """No process has taken this rank's place, or it has ended. Lost without a connection: the order's time runs out then."""
        with self._lock:
            if self._attached and self._stream is not None:
                self._say(self._stream, ReplaceFailed(self._hello.host, rank, freeze_id, error))

    def add_controllers(self, addresses: Sequence[str]) -> None:
        """Learn of standbys, in the order in which they take over; those that are known already stay where they are."""
        with self._lock:
            self._controllers += [address for address in addresses if address not in self._controllers]

    def given_up(self) -> frozenset[int] | None:
        """Ask which ranks the controller on the line has taken for dead because they were silent, once it has sent the others away:
        all is decided then. None where it has not, or does not answer within ASK_S."""
        with self._lock:
            fence = self._fence
        address = self.leader
        if not address:
            return None
        try:
            status = request_status(address, job_id=self._job_id, timeout_s=ASK_S)
        except ControllerError as error:
            log.debug("whom the controller has given up is not known: %s", error)
            return None
        if status.stage != Stage.EXITING.value or status.term < fence:
            return None
        dead = {one.rank: one.cause for one in status.ranks if one.dead}
        return frozenset(rank for rank, cause in dead.items() if cause is not None and cause.kind is CauseKind.SILENT)

    def close(self, drain_s: float = 1.0) -> None:
        """Let what was said go out, and end the stream. Call it once."""
        with self._lock:
            self._closing = True
            stream = self._stream if self._attached else None
        self._wake.set()
        if stream is not None:
            stream.close(drain_s)
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        self._thread.join(5.0)

    def _run(self) -> None:
        tried_since = time.monotonic()
        while True:
            with self._lock:
                place, greeting_s = self._controllers[self._place], max(GREETING_TIMEOUT_S, self.lease_s)
                stream = ControlStream(place, self._job_id, self, fence=self._fence, greeting_s=greeting_s)
                if self._closing:
                    return
                self._stream = stream
                self._ended.clear()
                stream.start()
            received = self._stay(tried_since)
            stream.close()
            pause_s = RECONNECT_S
            if stream.refused or time.monotonic() - max(received, tried_since) >= self._lease_s:
                self._place = (self._place + 1) % len(self._controllers)
                tried_since = time.monotonic()
                pause_s = 0.0 if self._place else RECONNECT_S
            elif received > tried_since:
                tried_since = time.monotonic()
            if self._wake.wait(pause_s):
                return

    def _stay(self, since: float) -> float:
        """Wait until the stream has ended, or nothing was received for a lease; return when something was received last."""
        looked = time.monotonic()
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            with self._lock:
                if now - looked > OWN_ABSENCE_S:
                    self._received_monotonic_s = min(
                        now, max(self._received_monotonic_s, since) + now - looked - LOOK_S
                    )
                if now - max(self._received_monotonic_s, since) >= self._lease_s:
                    self._attached = False
                    log.debug("nothing received from the controller for %g s", self._lease_s)
                    break
            looked = now
            if now >= self._vouch_at:
                self._vouch(now)
        with self._lock:
            return self._received_monotonic_s

    def _vouch(self, now: float) -> None:
        """Report which processes run, three times a lease: a rank that is silent, because its interpreter is held, has not died. Also that this agent
        is there where none does: its node is not lost."""
        with self._lock:
            stream = self._stream
            if not self._attached or stream is None:
                return
            self._vouch_at = now + (self.lease_s or USUAL_LEASE_S) / VOUCHES_A_LEASE
        running, ranks = self._running(), self._hello.ranks
        self._say(stream, Vouch(ranks, tuple(running.get(rank, NO_PROCESS) for rank in ranks)))

    def _say(self, stream: ControlStream, *messages: AgentHello | WorkerExit | Vouch | ReplaceFailed) -> None:
        try:
            stream.send(*messages)
        except CodecError as error:
            log.error("could not report to the controller: %s", error)

    # --- listener, on the stream's thread ---

    def stream_opened(self, stream: ControlStream) -> None:
        with self._lock:
            if stream is self._stream and not self._closing:
                self._attached, self._led = True, False
                self._vouch_at = float("-inf")
                self._last_reason = ""
                self._say(stream, self._hello, *self._exits)

    def stream_received(self, stream: ControlStream, parcel: DownwardParcel) -> None:
        """Keep to the controller that sends (a standby without ranks does not), report what it orders the ranks to do: why they are frozen, and
        why they leave, and pass on what it orders this launcher to do."""
        with self._lock:
            if stream is not self._stream:
                return
            self._received_monotonic_s = time.monotonic()
            self._led = True
            if stream.term > self._fence:  # a later controller has not sent anybody away so far
                self._fence, self._sent_away_s = stream.term, None
            if isinstance(parcel.message, Exit) and self._sent_away_s is None:
                self._sent_away_s = self._received_monotonic_s
            if isinstance(parcel.message, Thaw):
                self._frozen_by = None
            if isinstance(parcel.message, Freeze):
                self._frozen_by = parcel.message.cause.kind
        match parcel.message:
            case StandbyList(addresses=addresses, lease_s=lease_s):
                self._lease_s = lease_s
                self.add_controllers(addresses)
            case Freeze(cause=cause) if parcel.message != self._logged:
                self._logged = parcel.message
                whose = f"{ranks_text(cause.ranks)}: " if cause.ranks else ""
                log.warning("controller: freeze: %s%s: %s", whose, cause.kind.value, cause.brief)
            case Replace() | TakePlaces() | Thaw():
                self._take(parcel.message)
            case Exit(reason=reason) if parcel.message != self._logged:
                if self._all_ended_well():
                    log.debug("controller: the ranks leave: %s", reason)
                else:
                    self._logged = parcel.message
                    log.info("controller: the ranks leave: %s", reason)

    def _all_ended_well(self) -> bool:
        """Say whether all workers here have ended already, and no status but 0 is known: they may have succeeded without a word to the
        controller, which takes them for dead. What it makes of that is not news then."""
        with self._lock:
            ended = {report.rank: report.text for report in self._exits}
        return ended.keys() >= set(self._hello.ranks) and set(ended.values()) <= _NO_FAILURE

    def stream_closed(self, stream: ControlStream, reason: str) -> None:
        with self._lock:
            if stream is not self._stream:
                return
            self._attached = False
            new = reason != self._last_reason and not self._closing
            self._last_reason = reason
            self._ended.set()  # of this stream, and no later one
        if new:
            log.debug("the controller is not attached: %s", reason)


def request_status(address: str, *, job_id: str = "", timeout_s: float = 5.0) -> JobStatus:
    """Ask a controller what it knows. `job_id` empty: whatever job it has. Raises ControllerError."""
    with open_channel(address) as channel:
        try:
            return decode_status(ControlStub(channel).Status(pb.StatusRequest(job_id=job_id), timeout=timeout_s))
        except (grpc.RpcError, CodecError) as error:
            raise _unreachable(address, "status", error) from error


def request_shutdown(
    address: str,
    *,
    job_id: str = "",
    reason: str = "",
    term: int = 0,
    generation: int = 0,
    look: int = 0,
    timeout_s: float = 2.0,
) -> None:
    """Ask a controller to end; `term`: for a controller that takes over from it (0: the launcher asks), with a rank of that generation,
    as it has answered the question `look`.

    Raises ControllerError (it cannot be reached, so that it has ended or must be killed; or its term is not lower).
    """
    request = pb.ShutdownRequest(job_id=job_id, reason=reason, term=term, generation=generation, look=look)
    _shutdown(address, request, timeout_s)


def look_for_controller(address: str, *, job_id: str, term: int, look: int, timeout_s: float) -> int:
    """Return, once a controller answers at this address, the newest generation that is whole as far as it knows. `term`: of the one that takes over from
    it; `look`: the number of this question. Raises ControllerError as `request_shutdown` does."""
    request = pb.ShutdownRequest(job_id=job_id, term=term, looks=True, look=look)
    return _shutdown(address, request, timeout_s).generation


def _shutdown(address: str, request: pb.ShutdownRequest, timeout_s: float) -> pb.ShutdownReply:
    with open_channel(address) as channel:
        try:
            return ControlStub(channel).Shutdown(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _unreachable(address, "shutdown", error) from error


def _unreachable(address: str, what: str, error: Exception) -> ControllerError:
    text = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
    return ControllerError(f"the controller at {address} did not answer the {what} request: {text}")
