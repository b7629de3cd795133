"""What an attempt begins with: which address copies may go to, and by which relay its ranks reach controllers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from ttp.launch.attempts import begin
from ttp.launch.attempts.begin import begin_attempt
from ttp.launch.attempts.relays import Relays


@pytest.mark.parametrize(
    ("identities", "secret", "host"),
    [(True, True, "node7"), (False, False, "node7"), (False, True, "")],
    ids=["the job's certificates", "TTP_TLS=False", "the site's certificates"],
)
def test_copies_leave_their_node_unless_certificates_name_no_keeper(identities: bool, secret: bool, host: str) -> None:
    copies = mock.Mock(address="@copies", begin=mock.Mock(return_value=None))
    launching = SimpleNamespace(
        identities=mock.Mock() if identities else None,
        secret=mock.Mock() if secret else None,
        copies=copies,
        relays=None,
        fork_servers=None,
    )
    rendezvous = SimpleNamespace(job_store=SimpleNamespace(round_number=0), host="node7", secret="the secret")
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=3)], store=None, group_rank=1, group_world_size=2)
    with mock.patch.object(begin, "set_variables") as variables:
        begin_attempt(cast(Any, launching), cast(Any, rendezvous), cast(Any, group), "job/0", "start", None)
    given = copies.begin.call_args.kwargs
    assert (given["host"], given["ranks"], given["node"], given["nodes"]) == (host, [3], 1, 2)
    assert given["secret"] == ("the secret" if identities else None)
    assert variables.call_args.args[-1]["TTP_COPIES"] == "@copies"


def test_workers_of_a_seated_node_know_the_fault_and_make_no_copies() -> None:
    """What the lost node had in memory is lost with it."""
    copies = mock.Mock(address="@copies", begin=mock.Mock(return_value=None))
    launching = SimpleNamespace(identities=None, secret=None, copies=copies, relays=None, fork_servers=None)
    rendezvous = SimpleNamespace(job_store=SimpleNamespace(round_number=0), host="node7")
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=3)], store=None, group_rank=1, group_world_size=2)
    for vacant in ("7 127.0.0.1:4001", ""):
        with mock.patch.object(begin, "set_variables") as variables:
            begin_attempt(cast(Any, launching), cast(Any, rendezvous), cast(Any, group), "j", "s", None, vacant)
        given = variables.call_args.args[-1]
        assert (given["TTP_VACANT"], given["TTP_COPIES"]) == (vacant, "" if vacant else "@copies")


@pytest.mark.parametrize("world_size", [2000, 2001])
def test_workers_of_a_large_job_find_the_relay_of_their_node(world_size: int) -> None:
    """Each attempt has another one; those of a small job find none, also where the variable was set before."""
    relays = Relays(None, lambda world_size: 3.0)
    launching = SimpleNamespace(identities=None, secret=None, copies=None, relays=relays, fork_servers=None)
    rendezvous = SimpleNamespace(job_store=SimpleNamespace(round_number=0), host="node7")
    workers = [SimpleNamespace(global_rank=rank, world_size=world_size) for rank in (3, 4)]
    group = SimpleNamespace(workers=workers, store=None, group_rank=1, group_world_size=2)
    given: list[str] = []
    with mock.patch.dict(os.environ, {"TTP_RELAY_SOCKET": "/an/outer/jobs"}):
        for _ in range(2):
            begin_attempt(cast(Any, launching), cast(Any, rendezvous), cast(Any, group), "j", "s", None)
            given.append(os.environ["TTP_RELAY_SOCKET"])
            carried = relays._relay
            if world_size > 2000:
                assert carried is not None and given[-1] == str(carried.path) and carried._ranks == {3, 4}
            else:
                assert carried is None and given[-1] == ""
    relays.close()
    assert len(set(given)) == (2 if world_size > 2000 else 1)


def test_workers_of_a_job_without_relays_find_none() -> None:
    """Also where ttprun itself is a worker of a job that has them."""
    launching = SimpleNamespace(identities=None, secret=None, copies=None, relays=None, fork_servers=None)
    rendezvous = SimpleNamespace(job_store=SimpleNamespace(round_number=0), host="node7")
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=3, world_size=10_000)])
    with mock.patch.dict(os.environ, {"TTP_RELAY_SOCKET": "/an/outer/jobs"}):
        begin_attempt(cast(Any, launching), cast(Any, rendezvous), cast(Any, group), "j", "s", None)
        assert os.environ["TTP_RELAY_SOCKET"] == ""


def test_workers_inherit_the_attempts_number_and_where_its_agent_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    launching = SimpleNamespace(identities=None, secret=None, copies=None, relays=None, fork_servers=None)
    rendezvous = SimpleNamespace(job_store=SimpleNamespace(round_number=3), host="node7")
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=3)], store=None, group_rank=1, group_world_size=2)
    begin_attempt(cast(Any, launching), cast(Any, rendezvous), cast(Any, group), "job/3", "a start", tmp_path)
    assert os.environ["TTP_ATTEMPT_DIR"] == str(tmp_path) and os.environ["TTP_ATTEMPT"] == "3"
    assert os.environ["TTP_START_ID"] == "a start" and os.environ["TTP_LAUNCHED"] == "1"
