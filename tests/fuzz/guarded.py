"""A controller with TLS in a process of its own, and what its journal must have: each allowed message once, each refusal counted, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio

from tests.fuzz.live import LONG_S, SERVICE, LiveStream, envelope
from ttp.chaos.observed.training_job import read_jsonl
from ttp.controller.core.facts.events import ControllerSettings, HeartbeatBatch, Received
from ttp.controller.journal import inputs_path, read_inputs
from ttp.controller.json_codec import to_json
from ttp.controller.permissions import MOST_REFUSALS
from ttp.controller.process import ControllerProcess, start_controller
from ttp.identity.authority import Authority
from ttp.identity.credentials import Credentials
from ttp.identity.issuer import Issuer
from ttp.identity.role import Identity, Role, controller_name
from ttp.identity.secret import make_secret
from ttp.proto import control_pb2 as pb
from ttp.proto.address import split_address
from ttp.proto.messages import AgentHello, Upward, Vouch, WorkerExit
from ttp.proto.transport import CLIENT_OPTIONS

JOB, TERM = "job", 3
ALL_RANKS = (0, 1, 2, 3)
AGENT = Identity(JOB, Role.AGENT, ALL_RANKS, node="everywhere")
"""The job's own agent in these tests: ranks' messages go through it as well."""
MOST_GROWTH = 128 << 20
"""Bytes of memory that no number of attacks may add."""
SPARE_DESCRIPTORS = 8
NEVER_S = 1e6


def patient(settings: ControllerSettings) -> ControllerSettings:
    """Return settings under which no time that passes changes the machine's state."""
    times = {
        name: NEVER_S
        for name, value in settings.flat().items()
        if type(value) is float and name not in ("heartbeat_s", "in_place_s")
    }
    return ControllerSettings.from_flat(settings.flat() | times)


class Job:
    """One attempt's authority, and the socket at which its controllers get their certificates."""

    def __init__(self) -> None:
        self.authority = Authority(make_secret(), JOB)
        self.stranger = Authority(make_secret(), JOB)
        """Of another job that has the same name."""
        self.issuer = Issuer("host")
        self.issuer.begin(self.authority, range(1, 100))

    def start(self, settings: ControllerSettings, journal: Path) -> ControllerProcess:
        with mock.patch.dict(os.environ, {"TTP_IDENTITY": self.issuer.address}):
            return start_controller(settings, journal)


@contextlib.contextmanager
def job() -> Iterator[Job]:
    made = Job()
    try:
        yield made
    finally:
        made.issuer.close()


class GuardedController:
    """The controller's process, seen from outside."""

    def __init__(self, job: Job, settings: ControllerSettings, folder: Path) -> None:
        self.journal = folder / "journal_0.jsonl"
        self.process = job.start(settings, self.journal)
        self.target, _ = split_address(self.process.address)
        self.authority = job.authority
        self._operator = self.channel(job.authority.issue(Identity(JOB, Role.OPERATOR)))
        self._agent = self.channel(job.authority.issue(AGENT))
        self.honest = LiveStream(self._agent)
        self.said: list[tuple[str, bool]] = []
        """What the machine may have received, in order, and whether it must have."""
        self.refused: Counter[str] = Counter()
        self.descriptors, self.memory = self.resources()

    @property
    def port(self) -> int:
        return int(self.target.rpartition(":")[2])

    @property
    def runs(self) -> bool:
        return self.process.wait(0.0) is None

    def channel(self, credentials: Credentials | None) -> Any:
        """Return a channel of a process that has these; None: it has no certificate, and knows the authority."""
        shown = (credentials.key, credentials.certificate) if credentials is not None else (None, None)
        secure = grpc.ssl_channel_credentials(self.authority.certificate, *shown)
        name = (("grpc.ssl_target_name_override", controller_name(TERM)),)
        return grpc.aio.secure_channel(self.target, secure, options=(*CLIENT_OPTIONS, *name))

    async def status(self) -> pb.JobStatus:
        """Return its status without ages, which differ at every look."""
        status = await call_status(self._operator)
        for rank in status.ranks:
            rank.ClearField("silent_s")
        status.pace.ClearField("still_s")
        if status.HasField("fault"):
            status.fault.ClearField("age_s")
        return status

    async def until_status(self, condition: Callable[[pb.JobStatus], bool]) -> pb.JobStatus:
        """Return the first status that meets it: messages of other streams may come later than a question."""
        deadline = asyncio.get_running_loop().time() + LONG_S
        while not condition(status := await self.status()):
            assert asyncio.get_running_loop().time() < deadline, f"an honest message had no effect: {status}"
        return status

    async def say(self, *messages: Upward) -> None:
        """Say it as the job's own agent."""
        self.expect(messages)
        assert await self.honest.put(envelope(messages))

    async def check_hello(self) -> None:
        """It receives an agent's hello on a new stream: the first one ends when all its ranks have gone to others."""
        hello = AgentHello("host-of-the-test", (0,), (100,))
        self.expect((hello,))
        stream = LiveStream(self._agent)
        assert (await stream.put(envelope([hello])) and await stream.end() is grpc.StatusCode.OK) or not self.runs

    def expect(self, messages: tuple[Upward, ...]) -> None:
        """Note what the machine may receive: an agent's own messages always, a rank's where its stream is the rank's."""
        self.said += [(recorded(each), isinstance(each, AgentHello | WorkerExit | Vouch)) for each in messages]

    def refusal(self, text: str) -> None:
        if text in self.refused or len(self.refused) < MOST_REFUSALS:
            self.refused[text] += 1

    def resources(self) -> tuple[int, int]:
        """Return how many descriptors it has open, and how many bytes of memory it uses."""
        place = Path(f"/proc/{self.process.pid}")
        pages = int((place / "statm").read_text().split()[1])
        return len(os.listdir(place / "fd")), pages * os.sysconf("SC_PAGE_SIZE")

    async def check_resources(self, open_connections: int = 0) -> None:
        """Nothing piles up: what was closed here is closed there as well."""

        def found() -> bool:
            return self.resources()[0] <= self.descriptors + open_connections + SPARE_DESCRIPTORS

        if not found():
            gc.collect()  # a channel of gRPC's that is closed here may still be open, until then
        await until(found, f"descriptors: {self.resources()[0]}, at first {self.descriptors}")
        assert self.resources()[1] <= self.memory + MOST_GROWTH, "its memory has grown"

    async def shutdown(self, channel: Any, term: int = 0) -> tuple[grpc.StatusCode, str]:
        """Ask it to end; return how it answered."""
        ask = channel.unary_unary(
            f"{SERVICE}/Shutdown",
            request_serializer=pb.ShutdownRequest.SerializeToString,
            response_deserializer=pb.ShutdownReply.FromString,
        )
        try:
            if term:  # an order of a later controller follows its question
                await asyncio.wait_for(ask(pb.ShutdownRequest(job_id=JOB, term=term, looks=True)), LONG_S)
            await asyncio.wait_for(ask(pb.ShutdownRequest(job_id=JOB, term=term)), LONG_S)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    async def end(self, channel: Any | None = None, term: int = 0, *, counted: bool = True) -> None:
        """Have it end, by the job's own agent unless another may, and look at what it has written. `counted`: each refusal was noted."""
        over = not self.runs
        if not over:
            code, text = await self.shutdown(channel or self._agent, term)
            assert code is grpc.StatusCode.OK or not self.runs, text
        status = self.process.wait(LONG_S)
        assert status == 0, f"status {status}; {self.log()}"
        await self.close()
        wrong = [line for line in self.events() if line["event"] in ("machine_failed", "not_sent")]
        assert not wrong, wrong
        assert "/controller/" not in self.log(), (
            self.log()
        )  # no traceback of its own; gRPC writes one of a call that ends with it
        if counted:
            self._check_refusals()
        self._check_inputs(over)

    def events(self) -> list[dict[str, Any]]:
        """Return the whole lines of its journal."""
        return read_jsonl(self.journal)

    def not_allowed(self) -> list[dict[str, Any]]:
        """Return the fields of the lines about refusals."""
        return [line["fields"] for line in self.events() if line["event"] == "not_allowed"]

    async def close(self) -> None:
        await self._operator.close()
        await self._agent.close()

    def log(self) -> str:
        return self.journal.with_suffix(".log").read_text(errors="replace")

    def _check_refusals(self) -> None:
        """One line for the first, the tenth, the hundredth refusal of each kind, and none for what was allowed."""
        lines = self.not_allowed()
        expected = {(text, 10**n) for text, count in self.refused.items() for n in range(len(str(count)))}
        assert {(line["text"], line["count"]) for line in lines} == expected and len(lines) == len(expected)

    def _check_inputs(self, over: bool) -> None:
        """What went into the machine was allowed. `over`: the job has ended by itself, and what was said last may not have been read."""
        inputs = (event for _, event in read_inputs(inputs_path(self.journal)).inputs)
        said = iter(self.said)
        for event in inputs:
            if not isinstance(event, Received | HeartbeatBatch):
                continue
            for message in (event.message,) if isinstance(event, Received) else event.messages:
                text = recorded(message)
                for expected, always in said:
                    if expected == text:
                        break
                    assert not always, f"the machine has not received {expected}"
                else:
                    raise AssertionError(f"the machine has received {text}")
        left = [text for text, always in said if always]
        assert over or not left, f"the machine has not received {left[0]}"


def recorded(message: Upward) -> str:
    """Return a message as journals have it: two that hold NaN are equal."""
    return json.dumps(to_json(message))


async def call_status(channel: Any) -> pb.JobStatus:
    ask = channel.unary_unary(
        f"{SERVICE}/Status",
        request_serializer=pb.StatusRequest.SerializeToString,
        response_deserializer=pb.JobStatus.FromString,
    )
    answer: pb.JobStatus = await asyncio.wait_for(ask(pb.StatusRequest(job_id=JOB)), LONG_S)
    return answer


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + LONG_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def guarded_controller(
    job: Job, settings: ControllerSettings, said: list[Upward], stage: str, folder: Path
) -> AsyncIterator[GuardedController]:
    """Start a controller and bring it into a stage."""
    controller = GuardedController(job, patient(settings), folder)
    try:
        for message in said:
            await controller.say(message)
        await controller.until_status(lambda status: status.stage == stage)
        yield controller
    finally:
        await controller.close()
        if controller.runs:
            controller.process.process.kill()
        controller.process.wait(LONG_S)
