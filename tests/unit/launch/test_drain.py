"""`ttp drain`: whom it asks, what it waits for, and what it refuses. The agents are played by a thread that renews entries."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed import Store  # type: ignore[attr-defined]

from tests.unit.launch.test_multi_endpoint import free_place, serve
from tests.waiting import until
from ttp.identity.secret import from_text
from ttp.launch import drain
from ttp.launch.rendezvous import departures
from ttp.launch.rendezvous.job_secret import JobSecret
from ttp.launch.rendezvous.multi_endpoint import Endpoint, epoch_key
from ttp.launch.rendezvous.spare_nodes import LEFT, RUNNING, SPARE, Agent, Entry, read_agents

SECRET = "s" * 32


class Agents:
    """Entries of a job's nodes in a store, which are renewed; one that is asked to leave does, unless it is `deaf`."""

    def __init__(
        self,
        place: Endpoint,
        secret: str = "",
        *,
        deaf: bool = False,
        epoch: int = 1,
        lost: Sequence[str] = ("node-b", "node-d"),
        names: Sequence[str] = ("node-a", "node-b", "node-c"),
    ) -> None:
        """`names`: the second agent of a node has an apostrophe."""
        self.place = place
        self.asked: dict[str, str] = {}
        self._deaf = deaf
        self._server = serve(place)
        job = JobSecret("j", lambda: from_text(secret.encode(), "secret") if secret else None)
        job.compare(self._server)
        self._store = job.sealed(self._server, str(place))
        self._store.set(epoch_key("j"), str(epoch))
        self._lost = lost
        self._entries = {name: Entry("j", name.rstrip("'")) for name in names}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[Agents]:
        for node in self._lost:
            Entry("j", node).renew(self._store, self.place, RUNNING)
        self._thread.start()
        until(lambda: self._entries["node-c"].agent.beat > 0)
        yield self
        self._stop.set()
        self._thread.join()

    def enter(self, node: str) -> None:
        self._entries[node].renew(self._store, self.place, RUNNING)

    def stop(self) -> None:
        """End the thread and the store."""
        self._stop.set()
        self._thread.join()
        del self._server, self._store

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            for node, entry in self._entries.items():
                if node in self.asked and not self._deaf:
                    continue
                entry.renew(self._store, self.place, SPARE if node == "node-c" else RUNNING)
                if why := departures.asked_to_leave(self._store, "j", entry.agent.number):
                    self.asked[node] = why
                    if not self._deaf:
                        entry.renew(self._store, self.place, LEFT)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "end_despite_calls", lambda status: None)
    monkeypatch.setattr(drain, "SILENT_S", 2.0)
    for name in ("TTP_SECRET", "TTP_SECRET_FILE", "TTP_TLS"):
        monkeypatch.delenv(name, raising=False)


def ask(place: Endpoint, node: str, *more: str) -> int:
    return drain.main([node, "--rdzv-endpoint", str(place), "--rdzv-id", "j", *more])


def test_a_node_is_asked_and_the_command_waits_until_it_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    with Agents(free_place()).running() as agents:
        assert ask(agents.place, "node-b", "--reason", "a new cable") == 0
        assert agents.asked == {"node-b": "a new cable"}
    said = capsys.readouterr().out.splitlines()
    assert said == ["node-b was asked to leave at the next step boundary", "node-b has left the job"]


def test_a_request_follows_the_rendezvous(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """To another endpoint, where the node comes after others, with another number: until then it has not left."""
    places, looked = (free_place(), free_place()), threading.Event()
    read = read_agents

    def seen(store: Store, run_id: str) -> list[Agent]:
        found = read(store, run_id)
        if not found:
            looked.set()
        return found

    monkeypatch.setattr(drain, "read_agents", seen)
    came: list[dict[str, str]] = []

    def move(first: Agents) -> None:
        until(lambda: "node-b" in first.asked)
        second = Agents(places[1], epoch=2, lost=(), names=("node-a", "node-c", "node-b"))
        assert looked.wait(60)
        with second.running():
            until(lambda: over.is_set())
        came.append(second.asked)

    with Agents(places[0], deaf=True).running() as first:
        over = threading.Event()
        mover = threading.Thread(target=move, args=(first,), daemon=True)
        mover.start()
        where = ",".join(map(str, places))
        status = drain.main(["node-b", "--rdzv-endpoint", where, "--rdzv-id", "j", "--reason", "a cable"])
        over.set()
        mover.join(60)
    assert (status, came) == (0, [{"node-b": "a cable"}])
    assert capsys.readouterr().out.count("has left the job") == 1


def test_a_store_that_was_started_again_empty_does_not_mean_that_the_node_has_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the same endpoint, where the node's number is another agent's at first."""
    came: list[dict[str, str]] = []
    first, over, looked = Agents(free_place(), deaf=True), threading.Event(), threading.Event()
    read = read_agents

    def seen(store: Store, run_id: str) -> list[Agent]:
        found = read(store, run_id)
        if not any(agent.node == "node-b" for agent in found):
            looked.set()
        return found

    monkeypatch.setattr(drain, "read_agents", seen)

    def start_again() -> None:
        until(lambda: "node-b" in first.asked)
        first.stop()
        second = Agents(first.place, lost=(), names=("node-a", "node-c", "node-d", "node-e", "node-b"))
        for node in ("node-a", "node-c", "node-d", "node-e"):  # as many as there were before
            second.enter(node)
        assert looked.wait(60)
        with second.running():
            until(lambda: over.is_set())
        came.append(second.asked)

    restart = threading.Thread(target=start_again, daemon=True)
    with first.running():
        restart.start()
        status = ask(first.place, "node-b", "--reason", "a cable")
        over.set()
        restart.join(60)
    assert (status, came) == (0, [{"node-b": "a cable"}])
    assert capsys.readouterr().out.count("has left the job") == 1


def test_all_agents_of_a_node_are_asked() -> None:
    with Agents(free_place(), names=("node-a", "node-b", "node-c", "node-b'")).running() as agents:
        assert ask(agents.place, "node-b", "--reason", "x") == 0
        assert agents.asked == {"node-b": "x", "node-b'": "x"}


def test_it_is_said_who_asks_where_no_reason_is_given() -> None:
    with Agents(free_place()).running() as agents:
        assert ask(agents.place, "node-a") == 0
        assert agents.asked["node-a"].startswith("asked by ")


def test_a_node_that_stays_is_waited_for_so_long(capsys: pytest.CaptureFixture[str]) -> None:
    with Agents(free_place(), deaf=True).running() as agents:
        assert ask(agents.place, "node-b", "--wait", "0.5") == 1
        until(lambda: "node-b" in agents.asked)
    assert "node-b has not left within 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("node-x", "no such node: got 'node-x', expected one of the job's nodes: node-a, node-b"),
        ("node-d", "no such node: got 'node-d', expected one of the job's nodes: node-a, node-b"),
        ("node-c", "node-c waits as a spare and has no ranks. End its ttprun by SIGTERM"),
    ],
)
def test_who_has_no_ranks_is_refused(node: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Agents(free_place()).running() as agents:
        assert ask(agents.place, node) == 2
        assert agents.asked == {}
    assert said in capsys.readouterr().err


def test_only_who_has_the_jobs_secret_is_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it, and with another one, nothing is asked."""
    own, other = tmp_path / "own", tmp_path / "other"
    for path, text in ((own, SECRET), (other, "o" * 32)):
        path.write_text(text)
        path.chmod(0o600)
    with Agents(free_place(), SECRET).running() as agents:
        assert ask(agents.place, "node-b") == 2
        assert ask(agents.place, "node-b", "--secret-file", str(other)) == 2
        assert agents.asked == {}
        assert capsys.readouterr().err.count("invalid secret on this node") == 2
        assert ask(agents.place, "node-b", "--secret-file", str(own)) == 0


def test_a_request_without_the_seal_is_not_read() -> None:
    """Whoever reaches the store may write there."""
    with Agents(free_place(), SECRET).running() as agents:
        for number in range(1, 6):
            agents._server.set(f"ttp/drain/j/{number}", "by a stranger")
        before = agents._entries["node-b"].agent.beat
        until(lambda: agents._entries["node-b"].agent.beat > before + 3)
        assert agents.asked == {}


def test_a_job_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    place = free_place()
    assert ask(place, "node-b") == 2
    assert f"no job found: got --rdzv-id 'j' at {place}" in capsys.readouterr().err
    server = serve(place)
    assert ask(place, "node-b") == 2
    assert "no job of that name meets there" in capsys.readouterr().err
    del server
