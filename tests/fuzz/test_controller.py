"""Whatever comes to a controller, in whatever stage: taken, or a ProtocolError that changes nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.wire import fill
from tests.unit.protocol.bench import ControllerBench, registration, report
from ttp.controller.core.facts.events import (
    EarlierLives,
    Effect,
    Event,
    HeartbeatBatch,
    Journal,
    Received,
    Send,
    StreamClosed,
    Tell,
    Tick,
)
from ttp.controller.core.facts.state import MOST_KEPT, ControllerState, Regrouping, Stage
from ttp.controller.json_codec import from_json, plain_json, to_json
from ttp.errors import ProtocolError
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import CodecError, decode_upward, encode_downward
from ttp.proto.messages import AgentHello, Heartbeat, Phase, Published, Upward, WorkerExit

settings.load_profile("fuzz")


def standby() -> ControllerBench:
    return ControllerBench(assembled=False, standby=1)


def gathering() -> ControllerBench:
    bench = standby()
    for rank in (0, 1):
        bench.say(registration(rank))
    assert bench.at(Stage.GATHERING), bench.state.stage
    return bench


def assembling() -> ControllerBench:
    bench = ControllerBench(assembled=False)
    bench.say(registration(0), registration(1))
    return bench


def running() -> ControllerBench:
    bench = ControllerBench()
    bench.say(*(Heartbeat(rank, Phase.COMPUTE, 5) for rank in range(4)), after=0.5)
    return bench


def freezing() -> ControllerBench:
    bench = running()
    bench.say(WorkerExit(2, 102, "signal SIGKILL", 0.0))
    return bench


def rolling() -> ControllerBench:
    bench = freezing()
    freeze_id = bench.state.freeze_id
    bench.say(report(0, freeze_id, Phase.DONE, 5, records=(5,)), report(1, freeze_id, Phase.READY, 5))
    bench.say(report(3, freeze_id, Phase.READY, 5))
    return bench


def writing() -> ControllerBench:
    bench = freezing()
    bench.all_report(5, ranks=(0, 1, 3))
    return bench


def regrouping() -> ControllerBench:
    bench = ControllerBench(assembled=False, in_place_s=30.0)
    for rank in range(4):
        bench.say(AgentHello(f"host{rank}", (rank,), (100 + rank,)), replace(registration(rank), regroups=True))
    bench.say(WorkerExit(2, 102, "signal SIGKILL", 0.0))
    bench.all_report(5, ranks=(0, 1, 3))
    assert bench.at(Stage.REGROUPING), bench.state.stage
    return bench


def publishing() -> ControllerBench:
    bench = writing()
    bench.all_write(bench.orders())
    return bench


def exiting() -> ControllerBench:
    bench = publishing()
    rank, order = bench.publish_order()
    bench.say(Published(rank, order.freeze_id, order.step, f"{order.directory}/iter_{order.step:07d}"))
    return bench


STAGES: dict[Stage, Callable[[], ControllerBench]] = {
    Stage.STANDBY: standby,
    Stage.GATHERING: gathering,
    Stage.ASSEMBLING: assembling,
    Stage.RUNNING: running,
    Stage.FREEZING: freezing,
    Stage.ROLLING: rolling,
    Stage.REGROUPING: regrouping,
    Stage.WRITING: writing,
    Stage.PUBLISHING: publishing,
    Stage.EXITING: exiting,
}


def pools(state: ControllerState) -> dict[str, list[Any]]:
    """Values that get past the first checks in this state."""
    ranks, orders = [0, 1, 2, 3], list[Any]()
    if state.dump is not None:
        orders = [order for work in state.dump.work for order in work.orders]
    order = state.dump.order if state.dump is not None else None
    names = [each.tmp_name for each in [*orders, *([order] if order else [])]]
    return {
        "rank": ranks,
        "ranks": ranks,
        "pid": [100, 101, 102, 103, 7],
        "pids": [100, 101],
        "world_size": [4],
        "vacant": [state.freeze_id, 0],
        "regroups": [True],
        "freeze_id": [state.freeze_id, state.freeze_id, max(0, state.freeze_id - 1)],
        "step": [3, 4, 5, 6],
        "state_step": [4, 5, 6],
        "backup_step": [-1, 4],
        "tmp_name": names,
        "directory": ["/a", "/b"],
        "index": [0, 1],
        "count": [1, 2],
        "nbytes": [10],
        "heartbeat_s": [1.0],
        "seen_unix_s": [1.7e9],
        "step_times_s": [0.1, 0.2, 5.0],
        "state_step_": [5],
        "torn": ranks,
        "path": ["/a/iter_0000005"],
        "closed": [True],
    }


def an_event(state: ControllerState, rng: random.Random) -> Event | None:
    """None: the wire refuses it."""
    choice = rng.random()
    if choice < 0.08:
        return StreamClosed(tuple(rng.sample(range(4), rng.randrange(1, 4))))
    if choice < 0.16:
        return Tick()
    if choice < 0.2:
        return HeartbeatBatch(
            tuple(Heartbeat(rng.randrange(-1, 5), Phase.COMPUTE, rng.randrange(10)) for _ in range(3))
        )
    if choice < 0.24 and state.stage is not Stage.ASSEMBLING:  # the first controller looks for none
        return EarlierLives("c0", rng.choice((0, state.generation, state.generation + 1)))
    envelope = pb.UpwardEnvelope(job_id="job", term=3)
    fill(envelope.messages.add(), rng, pools(state))
    try:
        (message,) = decode_upward(pb.UpwardEnvelope.FromString(envelope.SerializeToString())).messages
    except CodecError:
        return None
    return Received(message)


def check(state: ControllerState, effects: Iterable[Effect]) -> None:
    """What holds in every state that a machine can be in, and of everything that it sends."""
    table = state.members.table
    assert state.members.alive == sum(member.dead is None for member in table)
    assert state.members.attached == sum(member.attached for member in table)
    assert state.members.registered == sum(member.registration is not None for member in table)
    assert state.members.suspects == sum(member.suspect and member.dead is None for member in table)
    assert state.members.finished == sum(member.finished for member in table)
    of_a_fault = (Stage.FREEZING, Stage.ROLLING, Stage.REGROUPING, Stage.WRITING, Stage.PUBLISHING)
    assert (state.fault is not None) == (state.stage in of_a_fault) or state.stage in (Stage.EXITING, Stage.OVER)
    if isinstance(state.at, Regrouping):
        assert state.at.awaited <= state.at.pending and all(table[rank].dead is not None for rank in state.at.awaited)
    if state.dump is not None and state.stage is Stage.ROLLING:
        assert state.dump.pending == sum(state.dump.rolling)
    if state.dump is not None and state.stage is Stage.WRITING:
        assert state.dump.pending == sum(len(work.orders) for work in state.dump.work)
    if state.fault is not None:
        assert max(len(state.fault.records), len(state.fault.causes), len(state.fault.errors)) <= MOST_KEPT
        assert 0 <= state.fault.awaiting <= 4
    assert max(len(state.successors), len(state.agents)) <= MOST_KEPT
    assert from_json(json.loads(json.dumps(to_json(state)))) == state or _has_nan(state)
    for effect in effects:
        match effect:
            case Send(ranks, message):
                assert all(0 <= rank < 4 for rank in ranks)
                encode_downward("job", 3, ranks, message)
            case Tell(_, message):
                encode_downward("job", 3, (), message)
            case Journal(_, fields):
                json.dumps(plain_json(fields))


def _has_nan(state: ControllerState) -> bool:
    return "nan" in repr(state)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.value)
@given(st.randoms(use_true_random=True))
def test_a_controller_takes_a_message_or_refuses_it_unchanged(stage: Stage, rng: random.Random) -> None:
    bench = STAGES[stage]()
    assert bench.at(stage), bench.state.stage
    for _ in range(rng.randrange(1, 12)):
        event = an_event(bench.state, rng)
        if event is None:
            continue
        before = bench.state
        after = rng.choice((0.0, 0.0, 0.0, 0.01, 0.5, 1.0, 4.0, 60.0, 1e4, -1.0))
        try:
            bench.take(event, after)
        except ProtocolError:
            assert bench.state is before
            continue
        check(bench.state, bench.effects)


def test_every_kind_of_message_is_drawn() -> None:
    """Every kind reaches every stage: none is left out by mistake."""
    rng, kinds = random.Random(1), set[str]()
    state = running().state
    for _ in range(3000):
        event = an_event(state, rng)
        if isinstance(event, Received):
            kinds.add(type(event.message).__name__)
    assert kinds == {kind.__name__ for kind in Upward.__args__}
