"""Whatever comes to a rank's processor, in whatever standing: taken, or a ProtocolError that changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.wire import fill
from tests.unit.protocol.bench import ProcessorBench, record, registration, report, share
from ttp.errors import ProtocolError
from ttp.processor.core.events import (
    BoundaryReached,
    Connected,
    Disconnected,
    Event,
    GateClosed,
    LocalFault,
    Noticed,
    OpenGate,
    PublishCheckpoint,
    PublishDone,
    Received,
    RegroupDone,
    RollForwardDone,
    Send,
    Tick,
    TrainReturned,
    WorkFailed,
    WriteDone,
    WriteShare,
)
from ttp.processor.core.state import RankMode
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import CodecError, decode_downward, encode_upward
from ttp.proto.messages import Cause, CauseKind, Downward, Exit, Part, Phase, PublishOrder, Regroup, WriteOrder

settings.load_profile("fuzz")

CAUSE = Cause(CauseKind.EXITED, (0,), "signal SIGKILL")
REGROUP = Regroup(1, 5, (3,), None)
WRITE = WriteOrder(1, 5, "/a", "iter_0000005_tmp_1_1_1", (Part("g1", 0, 1),))


def training() -> ProcessorBench:
    return ProcessorBench(connected=False)


def connected() -> ProcessorBench:
    return ProcessorBench()


def frozen() -> ProcessorBench:
    bench = ProcessorBench()
    bench.freeze()
    return bench


def rolling() -> ProcessorBench:
    bench = frozen()
    bench.roll()
    return bench


def writing() -> ProcessorBench:
    bench = ProcessorBench()
    bench.freeze(phase=Phase.DONE)
    bench.receive(WRITE)
    return bench


def regrouping() -> ProcessorBench:
    bench = ProcessorBench()
    bench.freeze(phase=Phase.DONE)
    bench.receive(REGROUP)
    assert bench.state.regrouping == REGROUP
    return bench


def vacant() -> ProcessorBench:
    return ProcessorBench(vacant=1)


def publishing() -> ProcessorBench:
    bench = writing()
    bench.take(WriteDone(WRITE, share(1)))
    bench.receive(PublishOrder(1, 5, "/a", WRITE.tmp_name, (share(1),), CAUSE, record(5), 3))
    return bench


def failed() -> ProcessorBench:
    bench = ProcessorBench()
    bench.take(LocalFault(Cause(CauseKind.EXCEPTION, (1,), "ValueError"), "trace"))
    return bench


def noticed() -> ProcessorBench:
    bench = ProcessorBench()
    bench.take(Noticed("SIGTERM"))
    return bench


def leaving() -> ProcessorBench:
    bench = publishing()
    bench.receive(Exit(75, "all is saved"))
    return bench


STANDINGS: dict[str, Callable[[], ProcessorBench]] = {
    each.__name__: each
    for each in (
        training,
        connected,
        frozen,
        rolling,
        regrouping,
        vacant,
        writing,
        publishing,
        failed,
        noticed,
        leaving,
    )
}

POOLS: dict[str, list[Any]] = {
    "rank": [1],
    "ranks": [0, 1, 2, 3],
    "replaced": [3, 3, 1],
    "source": [0, 1],
    "target": [3],
    "freeze_id": [1, 1, 2],
    "step": [4, 5, 6],
    "term": [3, 3, 4],
    "directory": ["/a", "/b"],
    "tmp_name": [WRITE.tmp_name],
    "group_id": ["g1", "g0"],
    "index": [0, 1],
    "count": [1, 2],
    "code": [75, 1, 0],
    "heartbeat_s": [1.0, 0.5],
    "lease_s": [3.0, 1.0],
    "nbytes": [10],
    "addresses": ["127.0.0.1:1", "127.0.0.1:2"],
}


def an_event(bench: ProcessorBench, rng: random.Random) -> Event | None:
    """A message of the wire mostly, or what the driver says; None: the wire refuses it."""
    if rng.random() < 0.7:
        envelope = pb.DownwardEnvelope(job_id="job", term=3)
        while envelope.WhichOneof("body") in (None, "batch"):
            fill(envelope, rng, POOLS)
        try:
            message = decode_downward(pb.DownwardEnvelope.FromString(envelope.SerializeToString())).message
        except CodecError:
            return None
        return None if message is None else Received(message)
    phase, step, freeze_id = rng.choice(list(Phase)), rng.choice((4, 5, 6)), rng.choice((1, 2))
    return rng.choice(
        (
            Tick(phase, step, rng.random() < 0.3, rng.random() < 0.3, rng.randrange(5)),
            Connected(registration(1)),
            Disconnected("connection refused", rng.random() < 0.5),
            GateClosed(report(1, freeze_id, phase, step)),
            RollForwardDone(freeze_id, step),
            RegroupDone(bench.state.regrouping or REGROUP),
            WriteDone(WRITE, share(1)),
            PublishDone(PublishOrder(1, 5, "/a", WRITE.tmp_name, (share(1),), CAUSE, record(5), 3), "/a/iter_0000005"),
            WorkFailed(
                freeze_id, rng.choice(("roll_forward", "regroup", "write", "publish")), WRITE.tmp_name, "OSError"
            ),
            LocalFault(Cause(CauseKind.EXCEPTION, (1,), "ValueError"), "trace"),
            Noticed("SIGTERM"),
            BoundaryReached(step),
            TrainReturned(),
        )
    )


@pytest.mark.parametrize("name", STANDINGS)
@given(st.randoms(use_true_random=True))
def test_a_processor_takes_a_message_or_refuses_it_unchanged(name: str, rng: random.Random) -> None:
    bench = STANDINGS[name]()
    for _ in range(rng.randrange(1, 12)):
        event = an_event(bench, rng)
        if event is None:
            continue
        before = bench.state
        try:
            bench.take(event, rng.choice((0.0, 0.0, 0.1, 1.0, 5.0, 100.0)))
        except ProtocolError:
            assert bench.state is before
            continue
        for effect in bench.effects:
            if isinstance(effect, Send):
                encode_upward("job", 3, [effect.message])
            if isinstance(effect, WriteShare | PublishCheckpoint):
                assert bench.state.standing is not RankMode.TRAINING, "an order is carried out while its rank trains"
            if isinstance(effect, OpenGate):
                half_way = before.rolled or before.regrouping is not None or before.vacant
                assert not half_way, "a gate opens whose rank is half way"
        deadline = bench.deadline()
        assert deadline is None or deadline == deadline, "a deadline that is not a number"


def test_every_kind_of_message_is_drawn() -> None:
    """Every kind reaches every standing: none is left out by mistake."""
    rng, bench = random.Random(1), connected()
    events = [an_event(bench, rng) for _ in range(4000)]
    kinds = {type(event.message).__name__ for event in events if isinstance(event, Received)}
    assert kinds == {kind.__name__ for kind in Downward.__args__}
