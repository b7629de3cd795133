"""Whatever message comes from whatever process: it takes effect only where the table in docs/security.md says so."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import CASES
from tests.fuzz.guarded import ALL_RANKS, JOB, TERM, GuardedController, Job, call_status, guarded_controller, job
from tests.fuzz.live import LiveStream, envelope
from tests.fuzz.test_controller import STAGES, pools
from tests.fuzz.test_live_controller import way_to
from tests.fuzz.wire import fill
from tests.unit.protocol.bench import registration
from ttp.controller.core.facts.state import ControllerState
from ttp.identity.role import Identity, Role
from ttp.proto import control_pb2 as pb
from ttp.proto.codec import CodecError, decode_upward
from ttp.proto.messages import Upward

settings.load_profile("fuzz")

STREAMS = 50
"""To one controller; each is a case."""
DENIED, INVALID, UNREACHED = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAVAILABLE,
)
PEER = "ipv4:127.0.0.1: "


@dataclass(frozen=True)
class Process:
    """A process that connects. `identity` None: it has no certificate. `ours`: its certificate is of this job's authority."""

    identity: Identity | None
    ours: bool = True

    @property
    def gets_in(self) -> bool:
        return self.identity is not None and self.ours


PROCESSES = {
    "agent of ranks 0 and 1": Process(Identity(JOB, Role.AGENT, (0, 1), node="host0")),
    "agent of ranks 2 and 3": Process(Identity(JOB, Role.AGENT, (2, 3), node="host2")),
    "rank 1": Process(Identity(JOB, Role.RANK, (1,))),
    "rank 2": Process(Identity(JOB, Role.RANK, (2,))),
    "operator": Process(Identity(JOB, Role.OPERATOR)),
    "controller of this term": Process(Identity(JOB, Role.CONTROLLER, term=TERM)),
    "controller of a lower term": Process(Identity(JOB, Role.CONTROLLER, term=TERM - 1)),
    "controller of a higher term": Process(Identity(JOB, Role.CONTROLLER, term=TERM + 6)),
    "agent of another attempt": Process(Identity("job/1", Role.AGENT, ALL_RANKS)),
    "no certificate": Process(None),
    "agent of another job": Process(Identity(JOB, Role.AGENT, ALL_RANKS), ours=False),
}
KINDS = tuple(field.name for field in pb.Upward.DESCRIPTOR.fields)
OF_AGENTS = ("agent_hello", "worker_exit", "vouch", "replace_failed")
"""Deaths, and what is known of processes."""


def may_say(process: Process, message: pb.Upward) -> bool:
    """The table: a rank reports for itself, an agent for its node's ranks, and nothing else takes part."""
    peer, kind = process.identity, message.WhichOneof("body")
    if peer is None or not process.ours or peer.job_id != JOB:
        return False
    body = getattr(message, str(kind))
    about = set(body.ranks) if kind in ("agent_hello", "vouch") else {body.rank}
    if kind == "fault_report":
        about |= set(body.cause.ranks)
    if peer.role is Role.AGENT:
        return about <= set(peer.ranks)
    return peer.role is Role.RANK and kind not in OF_AGENTS and about <= set(peer.ranks)


def may_end(process: Process, term: int) -> bool:
    """The table: an agent ends it, and a controller of a higher term, as that term's."""
    peer = process.identity
    if peer is None or not process.ours or peer.job_id != JOB:
        return False
    return peer.role is Role.AGENT or (peer.role is Role.CONTROLLER and term == peer.term > TERM)


def some_messages(process: Process, state: ControllerState, rng: random.Random, kind: str) -> pb.UpwardEnvelope:
    """Return a message of this kind, and sometimes more of any: about the process's own ranks, or about any. Half of them follow a
    registration of one of its ranks, without which no more of a rank is received."""
    wire = pb.UpwardEnvelope(job_id=JOB, term=TERM)
    own = process.identity.ranks if process.identity is not None else ()
    likely = {**pools(state), **({"rank": own, "ranks": own} if own and rng.random() < 0.5 else {})}
    if own and rng.random() < 0.5:
        wire.MergeFromString(envelope([registration(rng.choice(own))]))
    body = getattr(wire.messages.add(), kind)
    body.SetInParent()
    fill(body, rng, likely, depth=1)
    for _ in range(rng.choice((0, 0, 0, 1, 4))):
        fill(wire.messages.add(), rng, likely)
    return wire


def decoded(wire: pb.UpwardEnvelope) -> tuple[Upward, ...] | None:
    """None: no controller can read it, whoever sends it."""
    try:
        return decode_upward(pb.UpwardEnvelope.FromString(wire.SerializeToString())).messages
    except CodecError:
        return None


class Attacker:
    """Speaks to a controller as one process."""

    def __init__(self, controller: GuardedController, process: Process, job: Job) -> None:
        self.controller, self.process = controller, process
        self._issuer = job.authority if process.ours else job.stranger
        self.channel = self._connect()

    def _connect(self) -> Any:
        identity = self.process.identity
        return self.controller.channel(None if identity is None else self._issuer.issue(identity))

    async def connect_again(self) -> None:
        await self.channel.close()
        self.channel = self._connect()

    async def say(self, wire: pb.UpwardEnvelope) -> None:
        """Say it, and see that it was taken or refused as the table has it."""
        may, messages = all(may_say(self.process, message) for message in wire.messages), decoded(wire)
        before = None if may else await self.controller.status()
        if may and messages is not None:
            self.controller.expect(messages)
        stream = LiveStream(self.channel)
        await stream.put(wire.SerializeToString())
        code, text = await stream.end(), await stream.details()
        if may:
            assert (code is not DENIED and code is not UNREACHED) or not self.controller.runs, (code, text, wire)
            return
        if not self.process.gets_in:
            assert code is UNREACHED, (code, wire)
        elif self._takes_part and messages is None:
            assert code is INVALID, (code, wire)
        else:
            if code is grpc.StatusCode.INTERNAL and not self._takes_part:  # it was refused while it still wrote
                text = await self._attach_in_silence()
                self.controller.refusal(PEER + text)
            else:
                assert code is DENIED, (code, wire)
            self.controller.refusal(text if self._takes_part else PEER + text)
        assert await self.controller.status() == before, wire

    async def _attach_in_silence(self) -> str:
        """Return why this process may not attach, whatever it says."""
        stream = LiveStream(self.channel)
        assert await stream.end() is DENIED
        return await stream.details()

    @property
    def _takes_part(self) -> bool:
        peer = self.process.identity
        return peer is not None and peer.job_id == JOB and peer.role in (Role.RANK, Role.AGENT)

    async def ask_to_end(self, term: int) -> None:
        """Ask for what it may not have."""
        before = await self.controller.status()
        code, text = await self.controller.shutdown(self.channel, term)
        expected = (DENIED, grpc.StatusCode.FAILED_PRECONDITION) if self.process.gets_in else (UNREACHED,)
        assert code in expected, (code, text, term)
        if code is DENIED:
            self.controller.refusal(PEER + text)
        assert await self.controller.status() == before

    async def ask_for_status(self) -> None:
        """Whoever has a certificate of the job may look at it."""
        try:
            answer = await call_status(self.channel)
            assert self.process.gets_in and answer.job_id == JOB
        except grpc.aio.AioRpcError as error:
            assert error.code() is UNREACHED and (not self.process.gets_in or not self.controller.runs)


async def attack(process: Process, job: Job, folder: Path, rng: random.Random) -> None:
    stage = rng.choice(list(STAGES))
    chosen, said = way_to(stage)
    state = STAGES[stage]().state
    async with guarded_controller(job, chosen, said, stage.value, folder) as controller:
        attacker = Attacker(controller, process, job)
        for what in itertools.islice(itertools.cycle(KINDS), STREAMS):
            if not controller.runs:  # the job is over, as an allowed message may have it
                break
            kind, term = rng.random(), rng.choice((0, 0, 1, TERM - 1, TERM, TERM + 1, TERM + 6, 2**62))
            if kind < 0.1:
                await attacker.connect_again()
            if kind < 0.05:
                await attacker.ask_for_status()
            elif kind < 0.15 and not may_end(process, term):
                await attacker.ask_to_end(term)
            else:
                await attacker.say(some_messages(process, state, rng, what))
        if controller.runs:
            await controller.check_hello()
            await controller.check_resources()
        term = next((term for term in (0, TERM + 6) if may_end(process, term)), -1)
        await controller.end(*((attacker.channel, term) if term >= 0 else ()))
        await attacker.channel.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as each:
        yield each


@pytest.fixture(scope="module")
def one_job() -> Iterator[Job]:
    with job() as each:
        yield each


@pytest.mark.parametrize("name", PROCESSES)
@settings(max_examples=max(1, CASES // STREAMS), phases=(Phase.generate,))
@given(st.randoms(use_true_random=True))
def test_a_message_takes_effect_only_where_its_sender_may_say_it(
    name: str, runner: asyncio.Runner, one_job: Job, rng: random.Random
) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runner.run(attack(PROCESSES[name], one_job, folder, rng))


def test_every_kind_of_message_is_drawn_allowed_and_refused() -> None:
    """From a rank and from an agent: what a rank may never say is refused to it alone."""
    rng, state = random.Random(1), STAGES[next(iter(STAGES))]().state
    for name, never in (("rank 1", OF_AGENTS), ("agent of ranks 0 and 1", ())):
        found = {True: set[str](), False: set[str]()}
        for kind in KINDS * 100:
            for message in some_messages(PROCESSES[name], state, rng, kind).messages:
                found[may_say(PROCESSES[name], message)].add(str(message.WhichOneof("body")))
        assert found == {True: set(KINDS) - set(never), False: set(KINDS)}
