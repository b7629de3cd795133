"""A job on one node has no other to meet: no store is served, and nothing is waited for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from ttp.errors import ConfigError
from ttp.launch.rendezvous.choose import make_rendezvous
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.rendezvous.one_node import OneNode


def rendezvous(endpoint: str = "localhost:0", nodes: int = 1, /, **conf: Any) -> FreshStoreRendezvous:
    """Make what ttprun makes for `--nnodes NODES --rdzv-backend c10d`."""
    config = LaunchConfig(nodes, nodes, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint=endpoint, rdzv_configs=conf)
    return make_rendezvous(config)


@pytest.mark.parametrize("endpoint", ["localhost:0", ""])
def test_every_attempt_gets_an_empty_store_and_its_number(endpoint: str) -> None:
    """And no thread keeps a membership alive."""
    before = set(threading.enumerate())
    meeting = rendezvous(endpoint)
    numbers = []
    for _ in range(3):
        met = meeting.next_rendezvous()
        assert (met.rank, met.world_size) == (0, 1)
        assert not met.store.check(["left by an earlier attempt"])
        met.store.set("left by an earlier attempt", "1")
        numbers.append(meeting.job_store.round_number)
    assert numbers == [0, 1, 2]
    assert meeting.num_nodes_waiting() == 0 and meeting.get_run_id() == "job" and meeting.get_backend() == "c10d"
    assert not set(threading.enumerate()) - before


def test_a_closed_rendezvous_is_not_joined() -> None:
    """As with torch's own handler."""
    for close in (OneNode.set_closed, OneNode.shutdown):
        node = OneNode("job")
        assert not node.is_closed()
        close(node)
        assert node.is_closed()
        with pytest.raises(RendezvousClosedError):
            node.next_rendezvous()


def test_several_nodes_and_a_shared_file_are_torchs(tmp_path: Any) -> None:
    """There others may come."""
    (tmp_path / "meet").touch()
    for meeting in (rendezvous(str(tmp_path / "meet"), store_type="file"), rendezvous("localhost:0", 2)):
        assert isinstance(meeting._inner, DynamicRendezvousHandler)


@pytest.mark.parametrize("name", ["timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"])
def test_a_value_that_is_not_a_time_is_refused_though_nothing_waits(name: str) -> None:
    """The same command line is valid on one node and on two."""
    with pytest.raises(ConfigError, match=f"invalid --rdzv-conf {name}: got 'soon'"):
        rendezvous("localhost:0", 1, **{name: "soon"})
