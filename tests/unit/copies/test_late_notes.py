"""What comes to a keeper late, or early: of an attempt that has ended, or before one has begun."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError

from tests.unit.copies.conftest import HOST, credentials, keeper
from tests.unit.copies.material import described
from tests.unit.copies.test_transfer import ORDER, STATE, of_rank, secure, taken
from tests.waiting import until
from ttp import addresses
from ttp.checkpoint.staging import make_staging
from ttp.copies import keeper as keepers
from ttp.copies import transfer
from ttp.copies.checkpoints import read_share, share_name, write_share_file
from ttp.copies.keeper import PEER_S, checksum_of, listen
from ttp.copies.memory import of_save, own, received
from ttp.copies.region import data_bytes, region_bytes
from ttp.errors import CheckpointError
from ttp.fork_server import frames
from ttp.launch.attempts.copies import Copies
from ttp.runtime.saves import BackgroundSaves


def test_what_a_connection_of_an_ended_attempt_notes_late_damages_no_copy() -> None:
    """Its next node was lost: it learns so when the next attempt's rank uses the memory already."""
    answers: list[str] = []
    with socket.create_server((HOST, 0)) as silent, keeper() as (of, _):
        of._set_peer({"address": f"{HOST}:{silent.getsockname()[1]}"})
        before, peer = of_rank(of), list[socket.socket]()
        old = threading.Thread(target=lambda: answers.append(of._secure(own(0), before, ORDER, peer)))
        old.start()
        lost, _ = silent.accept()
        assert lost.recv(1)
        of._begin({"attempt": 2, "job_id": "job/2", "host": HOST, "port": 0, "credentials": None})
        now = of_rank(of, attempt=2)
        of._forget_sums(own(0))  # as at a rank's connection
        taken(step=8, sequence=1, region=now)
        of._note(own(0), now, 1, 1, checksum_of(now, 1))
        lost.close()
        old.join()
        assert answers and answers[0].startswith("the next node has not got it"), answers
        taken(step=10, sequence=3, region=now)  # and its rank dies before it says so
        assert of._region(own(0), 1, 10) is now


def test_a_rank_that_comes_before_the_first_attempt_has_begun_is_waited_with_for_the_next_node() -> None:
    """A keeper gives memory as soon as it runs, and its first order may come later."""
    answers: list[str] = []
    with keeper() as (sender, _), keeper() as (receiver, address):
        region, before = of_rank(sender), sender._listener
        sender._attempt, sender._listener = -1, None
        rank = threading.Thread(target=lambda: answers.append(secure(sender, region)))
        rank.start()
        until(lambda: bool(sender._lock._waiters) or not rank.is_alive())  # type: ignore[attr-defined]
        sender._begin({"attempt": 1, "job_id": "job/1", "host": HOST, "port": 0, "credentials": None})
        sender._set_peer({"address": address})
        rank.join()
        assert answers == [""] and receiver._region(received(0), 1, 5)
        assert before is not None
        before.close()


def test_a_rank_learns_that_there_is_no_next_node_as_soon_as_the_first_attempt_has_begun() -> None:
    answers: list[str] = []
    with keeper() as (of, _):
        region, before = of_rank(of), of._listener
        of._attempt, of._listener = -1, None
        rank = threading.Thread(target=lambda: answers.append(secure(of, region)))
        rank.start()
        until(lambda: bool(of._lock._waiters) or not rank.is_alive())  # type: ignore[attr-defined]
        of._begin({"attempt": 1, "job_id": "job/1", "host": "", "port": 0, "credentials": None})
        rank.join(PEER_S / 2)
        assert answers == ["the next node has not got it: the site's certificates name no keeper"]
        of._listener = before


@pytest.mark.parametrize("fails", ["listen", "contexts"])
def test_where_a_keeper_cannot_begin_the_attempt_has_begun_all_the_same_and_ranks_learn_why(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent without the attempt's certificates."""

    def refuse(*_: object) -> None:
        raise OSError("Too many open files") if fails == "listen" else ValueError("Too many open files")

    with keeper(secured=True) as (of, _), monkeypatch.context() as patch:
        region, before = of_rank(of), (of._server, of._client)
        patch.setattr(of, "_attempt", -1)
        patch.setattr(of, "_listener", None)
        patch.setattr(addresses if fails == "listen" else transfer, fails, refuse)
        with pytest.raises((OSError, ValueError), match="Too many"):
            of._begin({"attempt": 4, "job_id": "job/4", "host": HOST, "port": 0, "credentials": credentials("job/4")})
        assert of._attempt == 4 and None not in (of._server, of._client)
        assert ((of._server, of._client) == before) == (fails == "contexts")
        of._set_peer({"address": f"{HOST}:1"})
        assert secure(of, region) == (
            "the next node has not got it: this node's keeper could not begin: Too many open files"
        )


def test_a_node_that_has_no_next_one_any_more_asks_for_none() -> None:
    with keeper() as (of, _):
        of._begin({"attempt": 2, "job_id": "job/2", "host": "", "port": 0, "credentials": None})
        of._set_peer({"address": f"{HOST}:1"})
        assert secure(of, of_rank(of)) == "the next node has not got it: the site's certificates name no keeper"


@pytest.mark.parametrize(("leads_to", "at"), [("127.0.1.1", ""), ("10.0.0.5", "10.0.0.5"), ("fd00::5", "fd00::5")])
def test_a_keeper_listens_where_its_nodes_name_leads_the_others(
    leads_to: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all addresses where the name leads to the loopback interface here."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (leads_to, 0))])
    monkeypatch.setattr(addresses, "is_own_address", lambda address: True)
    monkeypatch.setattr(addresses, "listen", lambda *of: asked.append(of))
    listen("node-a", 29400)
    assert asked == [(at, 29400)]


@pytest.mark.parametrize(
    ("begun", "ended"),
    [(2, "the attempt has ended"), (1, "has written no share within"), (-1, "has written no share within")],
)
def test_a_save_ends_with_its_own_attempt(
    begun: int, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the keeper's: another may have begun before the save came to it, or none at one that was started again."""
    monkeypatch.setattr(keepers, "SHARES_S", 0.2)
    what = described(1, facts={"directories": [], "passed_over": {}, "sign_key": ""})
    with keeper() as (of, _):
        region, descriptor = of._open(of_save(0), region_bytes(what.slots), data_bytes(what.slots))
        os.close(descriptor)
        region.describe(what)
        region.write(0, 5, 3, STATE, [torch.zeros(4), torch.ones(2)])
        of._attempt = begun
        order = {"directory": str(tmp_path), "tmp_name": "iter_0000005_tmp_1_1_1", "step": 5, "rank": 0, "ranks": 2}
        answer = of._saved(of_save(0), {**order, "publishes": True, "cause": "periodic"})
        assert ended in answer["error"], answer


def test_what_a_keeper_could_not_write_its_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's has ended before it wrote its share: rank 0's waits for it no longer."""
    monkeypatch.setattr(keepers, "SHARES_S", 0.2)

    class Lost:
        def next_message(self, timeout_s: float | None) -> None:
            raise OSError("the copy keeper was lost")

    saves = BackgroundSaves.__new__(BackgroundSaves)
    saves._rank, saves._directory, saves._memory = 1, str(tmp_path), Lost()  # type: ignore[assignment]
    saves.pending, saves._tmp_name = 7, "iter_0000007_tmp_periodic_background_1_1"
    saves.finish()
    with keeper() as (of, _), pytest.raises(CheckpointError, match=r"^rank 1: the copy keeper was lost"):
        of._shares(tmp_path / saves._tmp_name, 2, {"files": []}, of._attempt)


def test_a_share_that_was_written_stays_whatever_becomes_of_its_keeper(tmp_path: Path) -> None:
    saves = BackgroundSaves.__new__(BackgroundSaves)
    saves._rank, saves._directory, saves._tmp_name = 1, str(tmp_path), "iter_0000007_tmp_periodic_background_1_1"
    folder = make_staging(tmp_path, saves._tmp_name)
    write_share_file(folder, 1, {"files": ()})
    saves._pass_on("the copy keeper was lost")
    assert read_share(folder / share_name(1)) == {"files": []}


def test_a_moment_without_descriptors_does_not_end_a_listener() -> None:
    class Full:
        """Of which each second call finds no descriptor."""

        def __init__(self) -> None:
            self.calls = 0

        def fileno(self) -> int:
            return 3 if self.calls < 4 else -1

        def accept(self) -> tuple[str, str]:
            self.calls += 1
            if self.calls % 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return f"connection {self.calls}", ""

    assert list(keepers.connections(Full())) == ["connection 2", "connection 4"]  # type: ignore[arg-type,comparison-overlap]


def test_where_the_store_is_away_the_keepers_address_is_published_later() -> None:
    class Away:
        """A store that answers from the second call on."""

        def __init__(self) -> None:
            self.keys: dict[str, str] = {}
            self.calls = 0

        def set(self, key: str, value: str) -> None:
            self.calls += 1
            if self.calls == 1:
                raise DistNetworkError("Connection reset by peer")
            self.keys[key] = value

        def check(self, keys: list[str]) -> bool:
            return False

    agent, store = Copies(), Away()
    ours, theirs = socket.socketpair()
    agent._orders, agent._begins, agent._nodes, agent._attempt_store = ours, True, 2, store  # type: ignore[assignment]
    frames.send(theirs, {"address": "127.0.0.1:1234"})
    agent.look(None)
    agent.look(None)
    assert store.keys == {"ttp/copies/address/0": "127.0.0.1:1234"}
    agent.look(None)
    assert store.calls == 2
    theirs.close()
    agent.close()


def test_what_was_noted_of_another_description_is_forgotten() -> None:
    """The next attempt's numbers come again: until its copy is noted, it does not count as damaged."""
    with keeper() as (sender, _), keeper() as (receiver, address):
        sender._set_peer({"address": address})
        assert secure(sender, of_rank(sender)) == ""
        until(lambda: (received(0), 1) in receiver._sums)
        for each in (sender, receiver):
            each._begin({"attempt": 2, "job_id": "job/2", "host": HOST, "port": 0, "credentials": None})
        sender._set_peer({"address": address})
        again = of_rank(sender, attempt=2)
        receiver._described(received(0), again.description, {"rank": 0, "attempt": 2})  # type: ignore[arg-type]
        assert (received(0), 1) not in receiver._sums
