"""The end of a controller's streams: what is queued is delivered to those that read, and a node that is lost is not waited for."""

from __future__ import annotations

import asyncio
import time

import pytest

from ttp.controller import server
from ttp.controller.core.facts.events import ControllerSettings
from ttp.controller.server import ControlService
from ttp.controller.stream_ends import StreamLink


class Driver:
    """Takes what comes, and does nothing."""

    def put(self, item: object) -> None: ...


def ended(*ago_s: float, over: tuple[int, ...] = ()) -> tuple[bool, float]:
    """End streams on which something was received so long ago; return whether some were not waited for, and how long that took.

    `over`: those whose other side reads to the end."""
    settings = ControllerSettings("job", 1, 4)

    async def end() -> tuple[bool, float]:
        service = ControlService(settings, Driver())  # type: ignore[arg-type]
        links = [StreamLink(service._mailroom) for _ in ago_s]
        service._links |= set(links)
        for number, (link, ago) in enumerate(zip(links, ago_s, strict=True)):
            link.received_at = time.monotonic() - ago
            if number in over:
                link.over.set()
        service.finish_streams()
        begun_s = time.monotonic()
        return await service.await_streams(), time.monotonic() - begun_s

    return asyncio.run(end())


LEASE_S = ControllerSettings("job", 1, 4).lease_s


@pytest.mark.parametrize(
    ("ago_s", "over", "lost"),
    [((0.1, 0.2), (0, 1), False), ((0.1, LEASE_S), (0,), True), ((LEASE_S, 60.0), (), True), ((), (), False)],
    ids=["all read", "one is lost", "all are lost", "there is none"],
)
def test_streams_of_lost_nodes_are_not_waited_for(
    ago_s: tuple[float, ...], over: tuple[int, ...], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 60.0)
    found, took_s = ended(*ago_s, over=over)
    assert found is lost and took_s < 30.0


def test_a_stream_that_is_read_slowly_has_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0.2)
    found, took_s = ended(0.1)
    assert found is False and took_s >= 0.2
