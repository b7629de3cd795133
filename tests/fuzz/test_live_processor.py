"""Whatever bytes come to a live processor on its stream, in whatever stage: it goes on, obeys its controller afterwards, and does what it was ordered to."""

from __future__ import annotations

import contextlib
import queue
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import CASES
from tests.fuzz.test_processor import CAUSE, POOLS
from tests.fuzz.wire import fill
from tests.unit.runtime.conftest import LONG_S, Rank, commit_record, until
from ttp.proto import control_pb2 as pb
from ttp.proto.chunks import Joiner, split
from ttp.proto.codec import decode_parcels, decode_upward, encode_downward
from ttp.proto.messages import (
    Downward,
    Exit,
    FileEntry,
    Freeze,
    Part,
    PublishOrder,
    Registration,
    RollForward,
    ShareResult,
    StateReport,
    Upward,
    WriteOrder,
)
from ttp.proto.transport import SERVER_OPTIONS, grpc

settings.load_profile("fuzz")

RANK, WORLD, TERM, STEP = 1, 4, 3, 4
NAME = f"iter_{STEP:07d}_tmp_1_1_1"
MOST = 2**63 - 1


class RawCall:
    """One stream of a rank: what is put here goes to it as it is."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.over = threading.Event()

    def put(self, content: bytes) -> None:
        self.answers.put(content)

    def end(self) -> None:
        self.over.set()
        self.answers.put(None)


class RawController:
    """A server that says what the test says, and notes what it receives."""

    def __init__(self) -> None:
        self.calls: list[RawCall] = []
        self.received: list[Upward] = []
        self.greets: Callable[[RawCall], None] = lambda call: None
        """Called with each new stream."""
        attach = grpc.stream_stream_rpc_method_handler(self._attach)
        handler = grpc.method_handlers_generic_handler("ttp.control.v1.Control", {"Attach": attach})
        self._server = grpc.server(futures.ThreadPoolExecutor(64), options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _attach(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        call = RawCall()
        context.add_callback(call.end)
        threading.Thread(target=self._read, args=(requests, call), daemon=True).start()
        self.calls.append(call)
        self.greets(call)
        while (content := call.answers.get()) is not None:
            yield content

    def _read(self, requests: Iterator[bytes], call: RawCall) -> None:
        """Read to the end of what the rank sends: then the stream is over."""
        joiner = Joiner[pb.UpwardEnvelope]()
        with contextlib.suppress(grpc.RpcError):
            for content in requests:
                if (whole := joiner.take(pb.UpwardEnvelope.FromString(content))) is not None:
                    self.received += decode_upward(whole).messages
        call.end()

    def has(self, kind: type[Upward], **fields: object) -> bool:
        return any(
            isinstance(each, kind) and all(getattr(each, name) == value for name, value in fields.items())
            for each in list(self.received)
        )

    def close(self) -> None:
        for call in self.calls:
            call.end()
        self._server.stop(None).wait(LONG_S)


def wire(message: Downward | None, term: int = TERM) -> bytes:
    return encode_downward("job", term, (RANK,) if message is not None else (), message).SerializeToString()


class Attacked:
    """A rank under a controller that the test plays, and what it was ordered to do."""

    def __init__(self, controller: RawController, rank: Rank) -> None:
        self.controller, self.rank = controller, rank
        self.ordered: list[Downward] = []
        self.logged: list[str] = []
        self.blocked, self.go_on = threading.Event(), threading.Event()

    def order(self, message: Downward) -> None:
        self.ordered.append(message)
        self.controller.calls[-1].put(wire(message))

    def _blocks(self, name: str) -> None:
        """Have the holder's method wait until the attack is over."""
        act = getattr(self.rank.holder, name)

        def wait(order: Any) -> Any:
            self.blocked.set()
            assert self.go_on.wait(LONG_S)
            return act(order)

        setattr(self.rank.holder, name, wait)

    # --- the stages ---

    def training(self) -> None:
        """As it is."""

    def frozen(self) -> None:
        self.order(Freeze(1, CAUSE))
        until(lambda: self.controller.has(StateReport, freeze_id=1), "a report")

    def rolling(self) -> None:
        self.rank.gate.computing(STEP + 1)
        self.rank.gate.ready(STEP + 1)
        self._blocks("roll_forward")
        self.frozen()
        self.order(RollForward(1, commit_record(STEP + 1)))
        assert self.blocked.wait(LONG_S)

    def writing(self, blocks: str = "write") -> None:
        self._blocks(blocks)
        self.frozen()
        self.order(WriteOrder(1, STEP, self.rank.holder.save_dir, NAME, (Part("g1", 0, 1),)))
        assert blocks != "write" or self.blocked.wait(LONG_S)

    def publishing(self) -> None:
        self.writing("publish")
        results = (ShareResult((FileEntry("f", 1, "00", 0),)),)
        self.order(PublishOrder(1, STEP, self.rank.holder.save_dir, NAME, results, CAUSE, commit_record(STEP), TERM))
        assert self.blocked.wait(LONG_S)

    # --- the attack ---

    def attack(self, rng: random.Random) -> None:
        """Send envelopes to whichever streams there are; each new one may be greeted as it should be."""
        seed = rng.random()
        self.controller.greets = lambda call: call.put(wire(None)) if random.Random(seed).random() < 0.7 else None
        for _ in range(rng.randrange(1, 10)):
            for content in self._an_envelope(rng):
                self.controller.calls[-1].put(content)
            if rng.random() < 0.15:
                self._await_read()
        self._await_read()

    def _await_read(self) -> None:
        """Wait until the rank has read it, or has another stream."""
        before, calls = self.controller.calls[-1], len(self.controller.calls)
        until(lambda: before.answers.empty() or before.over.is_set() or len(self.controller.calls) > calls, "a reader")

    def _an_envelope(self, rng: random.Random) -> list[bytes]:
        envelope = pb.DownwardEnvelope(job_id="job", term=TERM)
        fill(envelope, rng, POOLS | {"directory": [self.rank.holder.save_dir], "code": [75, 1], "ranks": [RANK, 0]})
        for names in (
            (envelope.welcome.successors, envelope.standby_list.addresses)
            if envelope.WhichOneof("body") in ("welcome", "standby_list")
            else ()
        ):
            names[:] = [self.controller.address] * len(names)  # a controller that names others is believed
        envelope.job_id, envelope.term = "job", TERM
        kind = rng.random()
        if kind < 0.08:
            envelope.job_id = rng.choice(("", "other", "job\0"))
        elif kind < 0.16:
            envelope.term = rng.choice((0, 2, 4, -1, MOST))
        content = bytearray(envelope.SerializeToString())
        if 0.16 <= kind < 0.3:
            self._note(bytes(content))
            parts = [part.SerializeToString() for part in split(envelope, rng.choice((1, 7, 100)))]
            if rng.random() < 0.5:
                del parts[rng.randrange(len(parts))]
            return parts[:100]
        if kind > 0.8 and content:
            for _ in range(rng.choice((1, 1, 3, 10))):
                content[rng.randrange(len(content))] = rng.randrange(256)
            content = content[: rng.choice((len(content), rng.randrange(len(content) + 1)))]
        elif kind > 0.77:
            content = bytearray(rng.randbytes(rng.randrange(60)))
        self._note(bytes(content))
        return [bytes(content)]

    def _note(self, content: bytes) -> None:
        """Note the orders that the rank may read in it: of this job, to this rank."""
        with contextlib.suppress(Exception):
            envelope = pb.DownwardEnvelope.FromString(content)
            for parcel in decode_parcels(envelope) if envelope.job_id == "job" else ():
                if parcel.message is not None and (RANK in parcel.ranks or not parcel.ranks):
                    self.ordered.append(parcel.message)

    # --- the judge ---

    def judge(self) -> None:
        """It answers a freeze of its controller, and has done nothing but what was ordered."""
        self._check_ordered()
        processor = self.rank.processor
        freeze_id = min(self.rank.gate.freeze_id + 1, MOST)

        def greet(call: RawCall) -> None:
            term = max(1, processor._handler._highest_term)
            call.put(wire(None, term))
            call.put(wire(Freeze(freeze_id, CAUSE), term))

        self.ordered.append(Freeze(freeze_id, CAUSE))
        self.controller.greets = greet
        self.controller.received.clear()
        for call in list(self.controller.calls):
            call.end()
        until(lambda: self.rank.exited.is_set() or self.controller.has(StateReport, freeze_id=freeze_id), "an answer")
        if not self.rank.exited.is_set():
            assert processor._thread.is_alive() and processor._worker._thread.is_alive()
            assert self.rank.gate.closed
        self._check_ordered()
        assert not [text for text in self.logged if "machine failed" in text], self.logged

    def _check_ordered(self) -> None:
        orders = [repr(order) for order in self.ordered]
        holder = self.rank.holder
        for done in (*holder.written, *holder.published):
            assert repr(done) in orders, f"{done} was not ordered"
        records = [repr(order.record) for order in self.ordered if isinstance(order, RollForward)]
        assert all(repr(record) in records for record in holder.rolled)
        codes = [order.code for order in self.ordered if isinstance(order, Exit)]
        assert not self.rank.exited.is_set() or self.rank.exit_code in codes, self.rank.exit_code
        frozen = any(isinstance(order, Freeze) for order in self.ordered)
        assert frozen or not self.rank.gate.closed, "the gate is closed without an order"


STAGES: dict[str, Callable[[Attacked], None]] = {
    name: getattr(Attacked, name) for name in ("training", "frozen", "rolling", "writing", "publishing")
}


@contextlib.contextmanager
def attacked() -> Iterator[Attacked]:
    """Start a rank and have it greeted by its controller, with some steps done."""
    controller = RawController()
    with tempfile.TemporaryDirectory() as folder:
        controller.greets = lambda call: call.put(wire(None))
        rank = Rank(RANK, WORLD, controller.address, folder)
        found = Attacked(controller, rank)
        rank.processor.log = lambda level, text: found.logged.append(text)
        try:
            until(lambda: controller.has(Registration), "a registration")
            rank.train_to(STEP)
            yield found
        finally:
            found.go_on.set()
            rank.processor.stop()
            controller.close()


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=max(10, CASES // 3), phases=(Phase.generate,))
@given(rng=st.randoms(use_true_random=True))
def test_a_live_processor_goes_on_whatever_is_sent_to_it(stage: str, rng: random.Random) -> None:
    failures: list[Any] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        with attacked() as rank:
            STAGES[stage](rank)
            rank.attack(rng)
            rank.go_on.set()
            rank.judge()
    finally:
        threading.excepthook = before
    assert not failures, failures


def test_what_was_not_ordered_is_noticed() -> None:
    """The judge of this file: a thaw or an exit that no controller has sent."""
    with attacked() as rank:
        rank.frozen()
        rank.rank.holder.written.append(WriteOrder(1, STEP, "/elsewhere", NAME, ()))
        with pytest.raises(AssertionError, match="was not ordered"):
            rank.judge()
