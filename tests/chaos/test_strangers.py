"""Programs that are not of the job and reach its rendezvous, with real agents."""

from __future__ import annotations

import contextlib
import pickle
import sys
from base64 import b64encode
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.chaos.launching import Launch
from tests.ports import free_port
from tests.unit.launch.test_job_secret import Creates
from tests.unit.launch.test_listening import listens_on
from ttp.identity.secret import Secret
from ttp.launch.rendezvous import departures
from ttp.launch.rendezvous.multi_endpoint import epoch_key

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="watches /proc"),
]

FALLS_ONCE_WHEN_ASKED = """
note("begun", os.environ["MASTER_PORT"])
if start == "0":
    await_file("fall")
    sys.exit(3 if rank == 1 else 75)
"""
SECRET, OTHER = "a" * 32, "b" * 32


def options(port: int) -> tuple[str, ...]:
    meets = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-endpoint", f"127.0.0.1:{port}")
    return (*meets, "--local-addr", "127.0.0.1", "--max-restarts", "1")


def test_a_pickle_and_forged_entries_in_a_live_rendezvous_do_nothing(tmp_path: Path) -> None:
    """The ranks go on; after a fault the agents meet again at the same place, and no program of the stranger has run."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                Launch(tmp_path, FALLS_ONCE_WHEN_ASKED, *options(port), name=f"node{n}", environ={"TTP_SECRET": SECRET})
            )
            for n in range(2)
        ]
        nodes[0].await_notes("begun-0-0", "begun-1-0")
        workers_store = int(nodes[0].read("begun-0-0"))
        for store in (port, workers_store):
            assert set().union(*(listens_on(store, node.process.pid) for node in nodes)) == {"127.0.0.1"}
        stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        evil = b64encode(pickle.dumps(Creates(tmp_path / "created"))).decode()
        stranger.set("torch.rendezvous.j", evil)
        stranger.set(epoch_key("j"), "9")
        departures.publish_over(stranger, "j", "forged")
        for node in nodes:
            node.says("the rendezvous store is lost (the rendezvous' state is refused: got")
            assert node.process.poll() is None
        (tmp_path / "fall").touch()
        assert [node.wait() for node in nodes] == [0, 0], "".join(node.text for node in nodes)
        assert nodes[0].notes("begun") == ["begun-0-0", "begun-0-1", "begun-1-0", "begun-1-1"]
        for node in nodes:
            assert node.text.count(f"the store's entry '{epoch_key('j')}' is refused, and counts as absent") == 1
            assert "Traceback" not in node.text and SECRET not in node.text
            node.assert_nothing_left()
    assert not (tmp_path / "created").exists()


def test_a_node_with_another_secret_ends_in_a_line_and_the_job_starts_without_it(tmp_path: Path) -> None:
    """It is found out before it joins; the node that was meant comes later."""
    port = free_port()
    with contextlib.ExitStack() as stack:

        def launch(name: str, secret: str) -> Launch:
            environ = {"TTP_SECRET": secret} if secret else {}
            worker = 'note("begun")'
            return stack.enter_context(Launch(tmp_path, worker, *options(port), name=name, environ=environ))

        first = launch("node0", SECRET)
        first.until(lambda: bool(listens_on(port, first.process.pid)), "its store")
        expected = f"for job 'j': secret {Secret(SECRET.encode()).name}. Give every node the same"
        for name, secret, got in (
            ("other", OTHER, f"secret {Secret(OTHER.encode()).name}"),
            ("none", "", "no secret"),
        ):
            wrong = launch(name, secret)
            assert wrong.wait() == 2, wrong.text
            assert f"ttprun: error: invalid secret on this node: got {got}, expected" in wrong.text
            assert expected in wrong.text and "Traceback" not in wrong.text
            wrong.assert_nothing_left()
        second = launch("node1", SECRET)
        assert [first.wait(), second.wait()] == [0, 0], first.text + second.text
        assert first.notes("begun") == ["begun-0-0", "begun-1-0"]


def test_several_nodes_without_a_secret_start_with_a_warning_or_not_at_all(tmp_path: Path) -> None:
    """As TTP_REQUIRE_SECRET has it."""
    with Launch(tmp_path, "", *options(free_port()), environ={"TTP_REQUIRE_SECRET": "True"}) as refused:
        assert refused.wait() == 2
        assert "ttprun: error: invalid TTP_REQUIRE_SECRET=True: got several nodes and no secret" in refused.text
    port = free_port()
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(Launch(tmp_path, 'note("begun")', *options(port), name=f"node{n}")) for n in range(2)
        ]
        assert [node.wait() for node in nodes] == [0, 0], "".join(node.text for node in nodes)
        for node in nodes:
            assert node.text.count("That protects from accidents only") == 1
