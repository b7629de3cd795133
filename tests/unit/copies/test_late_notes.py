"""What comes to a keeper late, or early: of an attempt that has ended, or before one has begun."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.unit.copies.conftest import HOST, keeper
from tests.unit.copies.test_transfer import ORDER, of_rank, secure, taken
from tests.waiting import until
from ttp.copies import transfer
from ttp.copies.keeper import checksum_of
from ttp.copies.memory import own, received


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
