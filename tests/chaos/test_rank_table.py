"""Two launchers on one host, which know only from a rank table who they are."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

from tests.chaos.launching import TORCHRUN, Launch
from tests.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches /proc")

WORKER = """
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
note("place", json.dumps([os.environ[name] for name in names] + [os.environ.get("ASCEND_RT_VISIBLE_DEVICES")]))
if start == "0" and rank == 2:
    await_file("place-0-0")
    await_file("place-1-0")
    os.kill(os.getpid(), signal.SIGKILL)
if start == "0":
    await_file("place-2-0")
    sys.exit(75)
"""


def table(folder: Path) -> str:
    """Write a table of two servers, with 2 devices and 1."""
    servers = [
        {"server_id": "127.0.0.1", "device": [{"device_id": str(i), "rank_id": str(i)} for i in range(2)]},
        {"server_id": "127.0.0.2", "device": [{"device_id": "3", "device_ip": "192.1.0.1", "rank_id": "2"}]},
    ]
    path = folder / "hccl.json"
    path.write_text(json.dumps({"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}))
    return str(path)


def test_a_rank_table_places_the_ranks_of_two_nodes(tmp_path: Path) -> None:
    """Each launcher knows by --node-rank alone which server it stands in for (both addresses are this host's); ranks, sizes and
    devices are the table's, also after a fault and a restart."""
    options = ("--rank_table_file", table(tmp_path), "--master-port", str(free_port()))
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(Launch(tmp_path, WORKER, *options, "--node-rank", str(node), name=f"node{node}"))
            for node in (0, 1)
        ]
        assert [node.wait() for node in nodes] == [0, 0], "".join(node.text for node in nodes)
        for start in (0, 1):
            places = [json.loads(nodes[0].read(f"place-{rank}-{start}")) for rank in range(3)]
            assert places == [
                ["0", "0", "0", "3", "2", "127.0.0.1", None],
                ["1", "1", "0", "3", "2", "127.0.0.1", None],
                ["2", "0", "1", "3", "1", "127.0.0.1", "3"],
            ]
        assert "node 1 of 2 (127.0.0.2), ranks 2-2 of 3; node 0 at 127.0.0.1" in nodes[1].text
        for node in nodes:
            node.assert_nothing_left()


def test_a_table_that_does_not_say_which_node_this_is_is_refused(tmp_path: Path) -> None:
    """One line, exit status 2, before anything starts; torchrun does not know the flag."""
    options = ("--rank_table_file", table(tmp_path))
    with Launch(tmp_path, WORKER, *options) as job:
        assert job.wait() == 2
        assert "got servers 0 and 1 with an address of this host" in job.text.strip().splitlines()[-1]
        assert job.text.strip().splitlines()[-1].startswith("ttprun: error: ") and job.notes("place") == []
    with Launch(tmp_path, WORKER, *options, program=TORCHRUN, name="torchrun") as job:
        assert job.wait() == 2 and "--rank_table_file" in job.text
