"""A real controller with TLS, two ranks that speak by hand, and the status page's real process beside it."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from tests.unit.checkpoint.conftest import Job
from tests.unit.identity.test_attacks import JOB, TERM, Stream, rank
from tests.waiting import LONG_S, until
from ttp.controller.agent_link import request_shutdown, request_status
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.process import ControllerProcess, start_controller
from ttp.hang_limits import HangLimits
from ttp.identity import own
from ttp.identity.authority import Authority
from ttp.identity.issuer import Issuer
from ttp.identity.role import Identity, Role
from ttp.identity.secret import make_secret
from ttp.proto.codec import encode_upward
from ttp.proto.messages import Heartbeat, Phase, Registration, ShardGroup
from ttp.proto.transport import open_channel
from ttp.status import page_access
from ttp.status.page_access import PagePlace

LASTS_S = 3600.0
"""For so long no rank counts as lost or hung, and no stream ends: a module's tests may take their time."""
NAME = re.compile(r"\bttp_[a-z0-9_]+")
"""Of a metric."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: str


def get(place: PagePlace | str, path: str, **headers: str) -> Reply:
    """Ask a page over plain HTTP, as what is given; a name's `_` is a `-`."""
    target = urlsplit(place if isinstance(place, str) else place.url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=LONG_S)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode())
    finally:
        connection.close()


@dataclass
class LivePage:
    """The parts of it."""

    controller: ControllerProcess
    log_dir: Path
    streams: list[Stream]
    last: int = 0
    """The newest step that the ranks have reported."""

    @property
    def place(self) -> PagePlace:
        until(lambda: page_access.read(self.log_dir), "the page's process")
        place = page_access.read(self.log_dir)
        assert place is not None
        return place

    @property
    def token(self) -> str:
        return Path(self.place.token_file).read_text().strip()

    def ask(self, path: str) -> Reply:
        return get(self.place, path, Authorization=f"Bearer {self.token}")

    def steps(self, count: int, seconds: float = 0.5) -> None:
        """Have both ranks report that they have finished so many steps more: rank 1, which takes twice as long, and rank 0 with a loss."""
        for _ in range(count):
            self.last += 1
            for each, stream in enumerate(self.streams):
                own_s, loss = seconds * (1 + each), None if each else 2.5
                beat = Heartbeat(
                    each, Phase.DONE, self.last, steps=self.last, step_times_s=(own_s,), own_s=own_s, waited_s=0.25, loss=loss
                )  # fmt: skip
                stream.outbox.put(encode_upward(JOB, TERM, (beat,)))


@contextlib.contextmanager
def live_page(folder: Path, host: str = "n0") -> Iterator[LivePage]:
    """Start all of it. `host`: the ranks', as they say it."""
    authority, issuer = Authority(make_secret(), JOB), Issuer("host")
    issuer.begin(authority, range(1, 100))
    save_dir = folder / "checkpoints"
    Job({"w": torch.arange(64.0)}).save(save_dir, 3)
    settings = ControllerSettings(JOB, TERM, 2, heartbeat_s=0.2, lease_s=LASTS_S, hang=HangLimits(floor_s=LASTS_S))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as channels:
        patch.setenv("TTP_IDENTITY", issuer.address)
        patch.setenv("TTP_STATUS_PORT", "0")
        controller = start_controller(settings, folder / "log" / "journal_0.jsonl")
        try:
            streams = []
            for number in range(2):
                issued = authority.issue(rank(number))
                own.use(lambda issued=issued: issued)  # type: ignore[misc]
                stream = Stream(channels.enter_context(open_channel(controller.address)), LASTS_S)
                group = ShardGroup("g", "all", 1 << 20)
                registered = Registration(
                    number, 2, host, os.getpid(), (group,), 0, (str(save_dir),), "{}", workload="a model"
                )
                stream.say(registered)
                streams.append(stream)
            operator = authority.issue(Identity(JOB, Role.OPERATOR))
            own.use(lambda: operator)
            until(lambda: request_status(controller.address).stage == "running", "both registrations")
            own.use(None)
            yield LivePage(controller, folder / "log", streams)
        finally:
            agent = authority.issue(Identity(JOB, Role.AGENT, (0, 1)))
            own.use(lambda: agent)
            request_shutdown(controller.address, reason="the test is over")
            own.use(None)
            assert controller.wait(LONG_S) == 0
            issuer.close()
