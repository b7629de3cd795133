"""What an attempt begins with: which address copies may go to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from ttp.launch.attempts import begin
from ttp.launch.attempts.begin import begin_attempt


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
    launching = SimpleNamespace(identities=None, secret=None, copies=copies, fork_servers=None)
    rendezvous = SimpleNamespace(job_store=SimpleNamespace(round_number=0), host="node7")
    group = SimpleNamespace(workers=[SimpleNamespace(global_rank=3)], store=None, group_rank=1, group_world_size=2)
    for vacant in ("7 127.0.0.1:4001", ""):
        with mock.patch.object(begin, "set_variables") as variables:
            begin_attempt(cast(Any, launching), cast(Any, rendezvous), cast(Any, group), "j", "s", None, vacant)
        given = variables.call_args.args[-1]
        assert (given["TTP_VACANT"], given["TTP_COPIES"]) == (vacant, "" if vacant else "@copies")
