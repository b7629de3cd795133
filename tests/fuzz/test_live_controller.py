"""Whatever bytes come to a live controller, in whatever stage: its server, driver and journal go on, and every stream ends with a status."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import CASES
from tests.fuzz.live import LiveController, LiveStream, envelope, live_controller
from tests.fuzz.test_controller import STAGES, check, pools
from tests.fuzz.wire import fill
from tests.unit.protocol.bench import ControllerBench
from ttp.controller.core.facts.events import ControllerSettings, Event, Received
from ttp.controller.core.facts.state import ControllerState, Stage
from ttp.proto import control_pb2 as pb
from ttp.proto.chunks import split
from ttp.proto.messages import AgentHello, Upward

settings.load_profile("fuzz")

ENDINGS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all cases."""
    with asyncio.Runner() as each:
        yield each


def way_to(stage: Stage) -> tuple[ControllerSettings, list[Upward]]:
    """Return a controller's settings and the messages that bring it into this stage, as the bench sends them."""
    said: list[Upward] = []
    take = ControllerBench.take

    def noted(bench: ControllerBench, event: Event, after: float = 0.0) -> Any:
        if isinstance(event, Received):
            said.append(event.message)
        return take(bench, event, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ControllerBench, "take", noted)
        state = STAGES[stage]().state
    return state.settings, said


def an_envelope(state: ControllerState, rng: random.Random) -> list[bytes]:
    """Return one envelope, or the chunks of one: right, of another job or term, with fields at random, or with bytes at random."""
    wire = pb.UpwardEnvelope(job_id="job", term=3)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        fill(wire.messages.add(), rng, pools(state))
    kind = rng.random()
    if kind < 0.05:
        wire.job_id = rng.choice(("", "other", "job\0"))
    elif kind < 0.1:
        wire.term = rng.choice((0, 2, 4, -1, 2**63 - 1))
    if kind < 0.2:
        parts = [part.SerializeToString() for part in split(wire, rng.choice((1, 7, 100)))]
        if rng.random() < 0.5:
            del parts[rng.randrange(len(parts))]
        return parts[:200]
    content = bytearray(wire.SerializeToString())
    if kind < 0.4 and content:
        for _ in range(rng.choice((1, 1, 3, 10))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        content = content[: rng.choice((len(content), rng.randrange(len(content) + 1)))]
    elif kind < 0.45:
        content = bytearray(rng.randbytes(rng.randrange(60)))
    return [bytes(content)]


def a_bundle(content: bytes, rng: random.Random) -> bytes:
    """Return what a relay sends with this envelope in it: for one stream or several, that have begun or not, between others' parts."""
    bundle = pb.UpwardBundle()
    numbers = [rng.choice((-1, 0, 1, 2, 3, 2**62)) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    for number in numbers:
        if rng.random() < 0.7:
            bundle.parts.add(streams=[number], begins=rng.choice((-1, 0, 1, 2, 3, 2**31 - 1)))
    bundle.parts.add(streams=numbers, envelope=content)
    for number in numbers:
        if rng.random() < 0.3:
            bundle.parts.add(streams=rng.choice(([number], numbers, [])), ended=True)
    wire = bytearray(bundle.SerializeToString())
    if rng.random() < 0.2:
        wire[rng.randrange(len(wire))] = rng.randrange(256)
    return bytes(wire)


async def attack(stage: Stage, folder: Path, rng: random.Random) -> None:
    chosen, said = way_to(stage)
    async with live_controller(chosen, folder) as controller:
        streams = [LiveStream(controller.channel)]
        for message in said:
            assert await streams[0].put(envelope([message]))
        if stage is not Stage.STANDBY:
            await controller.until(lambda: controller.state.stage is stage, f"stage {stage}")
        for _ in range(rng.randrange(1, 9)):
            if rng.random() < 0.3:
                streams.append(LiveStream(controller.channel, rng.choice(("Attach", "Carry"))))
            for content in an_envelope(controller.state, rng):
                stream = rng.choice(streams[-2:])
                if not await stream.put(content if stream.method == "Attach" else a_bundle(content, rng)):
                    break
        await judge(controller, streams)


async def judge(controller: LiveController, streams: list[LiveStream]) -> None:
    """Every stream ends, and a new one is still greeted and received, unless the job has come to its end."""
    codes = [await stream.end() for stream in streams]
    over = controller.ended.is_set() or controller.state.stage is Stage.OVER
    assert set(codes) <= ENDINGS | ({grpc.StatusCode.UNAVAILABLE} if over else set()), codes
    if not controller.ended.is_set():
        before = controller.state
        stream = LiveStream(controller.channel)
        greeted = await stream.put(envelope([AgentHello("host-of-the-test", (0,), (100,))]))
        assert greeted or controller.state.stage is Stage.OVER
        await controller.until(
            lambda: (
                "host-of-the-test" in [agent.host for agent in controller.state.agents]
                or controller.state.stage is Stage.OVER
            ),
            f"a launcher's hello after {before.stage}",
        )
        try:
            assert (await controller.status()).job_id == "job" and controller.runs
        except grpc.aio.AioRpcError:
            assert controller.state.stage is Stage.OVER
        code = await stream.end()
        assert code is grpc.StatusCode.OK or controller.state.stage is Stage.OVER, code
    check(controller.state, ())
    wrong = [line for line in controller.events() if line["event"] in ("machine_failed", "not_sent")]
    assert not wrong, wrong


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.value)
@settings(max_examples=max(10, CASES // 3), phases=(Phase.generate,))  # a smaller case of one that hangs takes as long
@given(st.randoms(use_true_random=True))
def test_a_live_controller_goes_on_whatever_is_sent_to_it(
    stage: Stage, runner: asyncio.Runner, rng: random.Random
) -> None:
    failures: list[dict[str, Any]] = []
    runner.get_loop().set_exception_handler(lambda loop, context: failures.append(context))
    with tempfile.TemporaryDirectory() as folder:
        runner.run(attack(stage, Path(folder), rng))
    assert not failures, failures
