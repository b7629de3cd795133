"""What comes to a keeper late, or early: of an attempt that has ended, or before one has begun."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch

from tests.unit.copies.conftest import HOST, keeper
from tests.unit.copies.material import described
from tests.unit.copies.test_transfer import ORDER, STATE, of_rank, secure, taken
from tests.waiting import until
from ttp.copies import keeper as keepers
from ttp.copies import transfer
from ttp.copies.keeper import PEER_S, checksum_of
from ttp.copies.memory import of_save, own, received
from ttp.copies.region import data_bytes, region_bytes


def test_what_a_connection_of_an_ended_attempt_notes_late_damages_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next node was lost: it learns so when the next attempt's rank uses the memory already."""
    monkeypatch.setattr(transfer, "ANSWER_S", 1.0)
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
        old.join()
        lost.close()
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


def test_where_a_keeper_cannot_listen_the_attempt_has_begun_all_the_same() -> None:
    with keeper() as (of, _):
        before, of._attempt, of._listener = of._listener, -1, None
        with pytest.raises(OSError, match="assign"):
            of._begin({"attempt": 4, "job_id": "job/4", "host": "192.0.2.1", "port": 0, "credentials": None})
        assert of._attempt == 4
        of._listener = before


@pytest.mark.parametrize(
    ("begun", "ended"),
    [(2, "the attempt has ended"), (1, "has written no share within"), (-1, "has written no share within")],
)
def test_a_save_ends_with_its_own_attempt(
    begun: int, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the keeper's: another may have begun before the save came to it, or none at one that was started again."""
    monkeypatch.setattr(keepers, "SHARES_S", 0.2)
    what = described(1, facts={"directories": [], "sign_key": ""})
    with keeper() as (of, _):
        region, descriptor = of._open(of_save(0), region_bytes(what.slots), data_bytes(what.slots))
        os.close(descriptor)
        region.describe(what)
        region.write(0, 5, 3, STATE, [torch.zeros(4), torch.ones(2)])
        of._attempt = begun
        order = {"directory": str(tmp_path), "tmp_name": "iter_0000005_tmp_1_1_1", "step": 5, "rank": 0, "ranks": 2}
        answer = of._saved(of_save(0), {**order, "publishes": True, "cause": "periodic"})
        assert ended in answer["error"], answer
