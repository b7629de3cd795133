"""The launcher's line to real controllers that are killed, stopped and replaced: `attached` says whether one leads."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ttp.controller import agent_link
from ttp.controller.agent_link import AgentLink, request_status
from ttp.controller.core.facts.state import Stage
from ttp.controller.journal import read_events
from ttp.controller.process import ControllerProcess
from ttp.proto.codec import DownwardParcel
from ttp.proto.messages import Cause, CauseKind, Exit, Freeze
from ttp.proto.transport import open_channel

from .conftest import LONG_S, Rank, StartController, until
from .test_server import RawStream, registration

OpenLink = Callable[..., AgentLink]


@pytest.fixture
def new_link() -> Iterator[OpenLink]:
    links: list[AgentLink] = []

    def open_link(address: str, running: Callable[[], Mapping[int, int]] = dict) -> AgentLink:
        links.append(AgentLink(address, "job", "host", (0, 1), (100, 101), running))
        return links[-1]

    yield open_link
    for link in links:
        link.close()


@contextlib.contextmanager
def two_ranks(new_controller: StartController, new_link: OpenLink) -> Iterator[tuple[ControllerProcess, AgentLink]]:
    """A controller that has learned of both ranks, and the launcher's line to it."""
    controller = new_controller(world_size=2)
    link = new_link(controller.address)
    with open_channel(controller.address) as channel:
        stream = RawStream(channel)
        stream.say(registration(0, 2))
        stream.say(registration(1, 2))
        until(lambda: link.attached, "the first word of the controller")
        # What it has sent to the launcher does not show that it has read what the ranks sent.
        until(lambda: all(rank.attached for rank in request_status(controller.address).ranks), "both registrations")
        yield controller, link


def test_a_killed_controller_without_a_standby_is_not_attached_any_more(
    new_controller: StartController, new_link: OpenLink
) -> None:
    """The link object lives on and tries again: that alone must not count as a controller."""
    controller = new_controller(world_size=2)
    link = new_link(controller.address)
    until(lambda: link.attached, "the first word of the controller")
    controller.process.kill()
    until(lambda: not link.attached, "the end of the line")
    link.worker_exit(1, 101, "signal SIGKILL")
    assert not link.attached


@pytest.mark.parametrize("kept", [False, True])
def test_a_stopped_controller_is_not_attached_after_its_lease(
    new_controller: StartController, new_link: OpenLink, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Its connection stays open; it comes back when it goes on. `kept`: the launcher comes too late to each look."""
    if kept:
        monkeypatch.setattr(agent_link, "OWN_ABSENCE_S", 0.0)
    controller = new_controller(world_size=2)
    link = new_link(controller.address)
    until(lambda: link.attached, "the first word of the controller")
    os.kill(controller.pid, signal.SIGSTOP)
    try:
        until(lambda: not link.attached, "the end of the lease")
    finally:
        os.kill(controller.pid, signal.SIGCONT)
    until(lambda: link.attached, "the controller that goes on")


def test_an_idle_standby_is_not_taken_for_a_controller(new_controller: StartController, new_link: OpenLink) -> None:
    """It takes the stream, but leads no rank: with it alone the workers are unled."""
    standby = new_controller(world_size=2, standby=1, term=2, heartbeat_s=0.05, lease_s=0.3)
    link = new_link(standby.address)
    until(lambda: link._attached, "the standby's greeting")
    with open_channel(standby.address) as channel:
        RawStream(channel)  # a second greeting: several heartbeats of an active controller have passed since the first
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert not link.attached
        time.sleep(0.01)


def test_deaths_that_a_lost_controller_knew_are_repeated_to_the_standby(
    new_controller: StartController, new_link: OpenLink, tmp_path: Path
) -> None:
    """The controller is killed after it has read of a death. The standby that rank 0 comes to learns of it from the launcher, and how
    rank 1 ended; it does not have to find out by rank 1's silence."""
    standby = new_controller(world_size=2, standby=1, term=2)
    with two_ranks(new_controller, new_link) as (first, link):
        link.add_controllers([standby.address])
        link.worker_exit(1, 101, "signal SIGKILL")
        until(lambda: request_status(first.address).ranks[1].dead, "the death at the first controller")
        assert link.leader == first.address
        first.process.kill()
        until(lambda: not link.attached, "the end of the line")
    with open_channel(standby.address) as channel:
        stream = RawStream(channel)
        stream.say(registration(0, 2))
        until(lambda: link.attached, "the standby's first message")

        def deaths() -> list[tuple[object, object]]:
            lines = list(read_events(tmp_path / "journal0.jsonl"))
            return [(line.fields["rank"], line.fields["kind"]) for line in lines if line.event == "death_seen"]

        until(lambda: bool(deaths()), "a death")
        assert deaths() == [(1, CauseKind.EXITED.value)] and link.leader == standby.address


def test_the_launcher_does_not_return_to_a_controller_of_a_lower_term(
    new_controller: StartController, new_link: OpenLink, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was cut off and has come back would learn of deaths that its successor acts on, and count as the job's controller."""
    caplog.set_level("DEBUG", "ttp.launch")
    earlier = new_controller(world_size=2, term=1)
    now = new_controller(world_size=2, term=2)
    link = new_link(now.address)
    link.add_controllers([earlier.address])
    until(lambda: link.attached, "the first message of the controller")
    now.process.kill()
    until(lambda: not link.attached, "the end of the line")
    until(lambda: link.attached or "term 1, but term 2 was seen: it is fenced" in caplog.text, "an answer of term 1")
    assert not link.attached


def test_a_message_of_the_stream_before_is_dropped_by_the_launcher(
    new_controller: StartController, new_link: OpenLink
) -> None:
    """What a lost controller sent last does not say that the one of now sends the ranks away."""
    controller = new_controller(world_size=2)
    link = new_link(controller.address)
    until(lambda: link.attached, "the first message of the controller")
    old = link._stream
    assert old is not None
    old.close()
    until(lambda: link._stream is not old and link.attached, "a new stream")
    link.stream_received(old, DownwardParcel("job", 1, (0, 1), Exit(75, "step 7 is saved")))
    assert link.sent_away_monotonic_s is None
    link.stream_closed(old, "noticed late")
    assert link.attached


@pytest.mark.parametrize(("how", "said"), [("exiting", False), ("signal SIGKILL", True)])
def test_that_nothing_was_saved_is_not_news_when_all_may_have_succeeded(
    new_controller: StartController, new_link: OpenLink, caplog: pytest.LogCaptureFixture, how: str, said: bool
) -> None:
    """They have exit code 0, and never reported that training was over: ttprun says that, and nothing that contradicts it."""
    caplog.set_level("INFO", "ttp.launch")
    with two_ranks(new_controller, new_link) as (_, link):
        link.worker_exit(0, 100, how)
        link.worker_exit(1, 101, how)
        until(lambda: link.sent_away_monotonic_s is not None, "the end")
    link.close()
    assert ("all ranks are dead" in caplog.text) == said


@pytest.mark.parametrize(
    ("exits", "said"),
    [
        ({0: "exit code 0", 1: "exiting"}, False),
        ({0: "exit code 0"}, True),
        ({0: "exit code 0", 1: "exit code 1"}, True),
        ({0: "exiting", 1: "exit code 0", 2: "signal SIGKILL"}, True),
    ],
)
def test_why_the_ranks_leave_is_news_where_one_lives_or_has_failed(
    new_link: OpenLink,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    exits: dict[int, str],
    said: bool,
) -> None:
    """A rank that ended early without a word may be what the others leave for. The last word on a worker counts."""
    monkeypatch.setattr(agent_link, "RECONNECT_S", LONG_S)  # the stream stays the one of now
    caplog.set_level("INFO", "ttp.launch")
    link = new_link("127.0.0.1:1")
    for rank, how in exits.items():
        link.worker_exit(rank, 100 + rank, "exiting")
        link.worker_exit(rank, 100 + rank, how)
    until(lambda: link._stream is not None, "a stream")
    assert link._stream is not None
    link.stream_received(link._stream, DownwardParcel("job", 0, (0, 1), Exit(75, "step 7 is saved")))
    assert ("the ranks leave: step 7 is saved" in caplog.text) == said


def test_what_a_controller_repeats_is_logged_once(
    new_link: OpenLink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that attaches again has it repeated; what was not news at first may be news then."""
    monkeypatch.setattr(agent_link, "RECONNECT_S", LONG_S)  # the stream stays the one of now
    caplog.set_level("INFO", "ttp.launch")
    link = new_link("127.0.0.1:1")
    until(lambda: link._stream is not None, "a stream")
    stream = link._stream
    assert stream is not None
    freeze = Freeze(1, Cause(CauseKind.EXITED, (1,), "signal SIGKILL"))
    link.worker_exit(0, 100, "exiting")
    link.worker_exit(1, 101, "exiting")
    link.stream_received(stream, DownwardParcel("job", 0, (), Exit(75, "step 7 is saved")))
    assert not caplog.records, "it may be that all have succeeded"
    link.worker_exit(1, 101, "signal SIGKILL")
    said = (Exit(75, "step 7 is saved"), Exit(75, "step 7 is saved"), Exit(75, "no rank is attached"), freeze, freeze)
    for message in said:
        link.stream_received(stream, DownwardParcel("job", 0, (), message))
    assert [record.getMessage() for record in caplog.records] == [
        "controller: the ranks leave: step 7 is saved",
        "controller: the ranks leave: no rank is attached",
        "controller: freeze: rank 1: exited: signal SIGKILL",
    ]


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_controller_of_an_earlier_term_gives_no_rank_up(
    new_controller: StartController, new_link: OpenLink, monkeypatch: pytest.MonkeyPatch, earlier: int
) -> None:
    """It was taken for dead and has come back: the ranks that were silent to it may stand under its successor."""
    with two_ranks(new_controller, new_link) as (controller, link):
        real = request_status(controller.address)
        silent = replace(real.ranks[1], dead=True, cause=Cause(CauseKind.SILENT, (1,), "nothing was received"))
        reported = replace(real, stage=Stage.EXITING.value, term=real.term - earlier, ranks=(real.ranks[0], silent))
        monkeypatch.setattr(agent_link, "request_status", lambda *args, **kwargs: reported)
        assert link.given_up() == (None if earlier else frozenset({1}))


def test_the_controller_reports_which_ranks_were_silent_when_all_is_decided(
    new_controller: StartController, new_link: OpenLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before: until then a rank that is silent may come back and be needed. Nor one that left, or a controller that is gone."""
    monkeypatch.setattr(agent_link, "ASK_S", LONG_S)
    # With heartbeats every 0.2 s a busy machine keeps the controller for half a heartbeat again and again, and each lease begins anew.
    controller = new_controller(world_size=2, heartbeat_s=1.0)
    link = new_link(controller.address)
    rank = Rank(0, 2, controller.address, str(tmp_path / "checkpoints"))
    try:
        with open_channel(controller.address) as channel:
            silent = RawStream(channel)
            silent.say(registration(1, 2))
            assert rank.processor.wait_welcomed(LONG_S) is not None
            assert link.given_up() is None and link.sent_away_monotonic_s is None
            assert rank.exited.wait(LONG_S)
            until(lambda: link.sent_away_monotonic_s is not None, "word that the ranks are sent away")
            assert link.given_up() == frozenset({1})
            silent.end()
        controller.process.wait(LONG_S)
        assert link.given_up() is None
    finally:
        rank.processor.stop()


def test_a_silent_rank_lives_while_the_launcher_sees_its_process_run(
    new_controller: StartController, new_link: OpenLink, tmp_path: Path
) -> None:
    """Three ranks send nothing. Rank 2, whose process no rank sees, is dead after its lease; rank 1 once it is not seen to run any more."""
    controller = new_controller(world_size=3, heartbeat_s=1.0, lease_s=3.0)
    seen = {0: 100, 1: 101}
    link = new_link(controller.address, lambda: dict(seen))
    with open_channel(controller.address) as channel:
        stream = RawStream(channel)
        until(lambda: link._attached, "the controller's greeting")
        stream.say(*(registration(rank, 3) for rank in range(3)))

        def dead() -> list[int]:
            return [one.rank for one in request_status(controller.address).ranks if one.dead]

        until(lambda: bool(dead()), "the end of a lease")
        assert dead() == [2]
        del seen[1]
        until(lambda: dead() == [1, 2], "the end of the lease of a rank that does not run")

    def deaths() -> list[object]:
        return [line.fields["rank"] for line in read_events(tmp_path / "journal0.jsonl") if line.event == "death_seen"]

    until(lambda: len(deaths()) == 2, "both deaths in the journal, which is written behind the answers")
    assert deaths() == [2, 1]


def test_the_link_asks_for_running_processes_three_times_a_lease(
    new_controller: StartController, new_link: OpenLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    looks: list[float] = []
    vouch = AgentLink._vouch

    def look(link: AgentLink, now: float) -> None:
        looks.append(now)
        vouch(link, now)

    def running() -> dict[int, int]:
        asked.append(looks[-1])  # the next one is due by this time, whenever this call comes
        return {}

    monkeypatch.setattr(AgentLink, "_vouch", look)

    controller = new_controller(world_size=2, heartbeat_s=0.1, lease_s=1.2)
    new_link(controller.address, running)
    until(lambda: len(asked) >= 5, "five looks")
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert min(gaps[1:]) >= 0.39, "before the lease is known it is a second at most"


def test_a_link_without_a_controller_asks_for_no_processes(new_link: OpenLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each look has no effect while the controller starts."""
    asked: list[int] = []
    looks: list[float] = []
    vouch = AgentLink._vouch

    def running() -> dict[int, int]:
        asked.append(0)
        return {}

    def look(link: AgentLink, now: float) -> None:
        vouch(link, now)
        looks.append(now)

    monkeypatch.setattr(AgentLink, "_vouch", look)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        new_link(f"127.0.0.1:{silent.getsockname()[1]}", running)
        until(lambda: len(looks) >= 3, "three looks of the link")
    assert not asked
