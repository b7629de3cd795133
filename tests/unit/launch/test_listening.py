"""Which addresses the stores listen on, as the kernel has it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from tests.ports import free_port
from tests.unit.launch.test_fresh_store import FixedNodes
from ttp import addresses
from ttp.addresses import address_of, listen
from ttp.launch.hosts.listening import serve
from ttp.launch.rendezvous import fresh_store
from ttp.launch.rendezvous.fresh_store import FreshStoreRendezvous
from ttp.launch.rendezvous.multi_endpoint import Endpoint, Stores

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net"),
    pytest.mark.usefixtures("agents_in_one_process"),
]

EVERYWHERE = {"::", "0.0.0.0"}
OTHER = "127.0.0.2"
"""An address of this host, as all of 127.0.0.0/8 are; not the one that torch would take."""


def sockets_of(pid: int) -> set[int]:
    """Return the inodes of a process's descriptors."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.stat(f"/proc/{pid}/fd/{name}").st_ino)
    return found


def listens_on(port: int, pid: int = 0) -> set[str]:
    """Return the addresses at which a process (this one unless named) listens on a port: another one may listen at another address."""
    found, mine = set(), sockets_of(pid or os.getpid())
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port and int(inode) in mine:
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found


def handler(host: str, rank: int, nodes: int) -> FreshStoreRendezvous:
    return FreshStoreRendezvous(FixedNodes(HashStore(), rank, nodes), host, same_keys_every_round=False)


def test_the_workers_store_of_a_lone_node_is_on_the_loopback_interface() -> None:
    """Whatever name the node has for others, who are not there."""
    alone = handler("node-a.invalid", 0, 1)
    info = alone.next_rendezvous()
    assert listens_on(alone.job_store.port) == {"127.0.0.1"}
    assert info.bootstrap_store_info is not None and info.bootstrap_store_info.master_addr == "127.0.0.1"


def test_the_workers_store_of_several_nodes_is_on_the_nodes_own_address() -> None:
    """Of the name that the other nodes have for it."""
    node = handler(OTHER, 0, 2)
    job_store, _, answer = node._begin(0, 2)
    assert listens_on(job_store.port) == {OTHER} and answer.startswith(f"{OTHER} {job_store.port} 0 ")
    assert TCPStore(OTHER, job_store.port, is_master=False, wait_for_workers=False).add("n", 1) == 1


def test_a_store_is_closed_with_its_handler() -> None:
    """Its port is free then, and no descriptor stays open."""
    store = serve("127.0.0.1", 0, "127.0.0.1")
    port = store.port
    before = len(list(Path("/proc/self/fd").iterdir()))
    del store
    assert listens_on(port) == set() and len(list(Path("/proc/self/fd").iterdir())) < before


@pytest.mark.parametrize(
    ("host", "leads_to", "own", "expected"),
    [
        ("10.0.0.5", ["10.0.0.5"], ["10.0.0.5"], "10.0.0.5"),
        ("node-a", ["10.0.0.5"], ["10.0.0.5"], "10.0.0.5"),
        ("node-a", ["127.0.1.1", "10.0.0.5"], ["127.0.1.1", "10.0.0.5"], "10.0.0.5"),
        ("node-a", ["10.0.0.5", "10.0.0.6"], ["10.0.0.5"], "10.0.0.5"),
        ("node-a", ["127.0.1.1"], ["127.0.1.1"], ""),
        ("node-a", ["10.0.0.5", "fd00::5"], ["10.0.0.5", "fd00::5"], ""),
        ("node-a", ["198.51.100.1"], [], ""),
        ("198.51.100.1", ["198.51.100.1"], [], ""),
        ("127.0.0.1", ["127.0.0.1"], ["127.0.0.1"], "127.0.0.1"),
        ("::1", ["::1"], ["::1"], "::1"),
        ("localhost", ["::1", "127.0.0.1"], ["::1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_the_address_is_chosen_where_it_can_be_known(
    host: str, leads_to: list[str], own: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads to the loopback interface here leads elsewhere to another one: then a store listens on all, as torch's own."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(0, 0, 0, "", (each, 0)) for each in leads_to])
    monkeypatch.setattr(addresses, "is_own_address", own.__contains__)
    assert address_of(host) == expected


def test_a_name_that_is_not_known_has_no_address() -> None:
    assert address_of("nosuch.invalid") == "" and address_of("a" * 70) == ""


def test_a_host_without_version_6_listens_on_all_addresses_of_version_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_where_the_address_is_not_known_the_store_listens_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other nodes reach it as ever."""
    monkeypatch.setattr(fresh_store, "address_of", lambda host: "")
    job_store, *_ = handler("127.0.0.1", 0, 2)._begin(0, 2)
    assert listens_on(job_store.port) <= EVERYWHERE


def test_an_endpoints_store_is_on_its_own_address() -> None:
    """One that is forced, at an address that is not this host's, is on all."""
    place, forced = Endpoint(OTHER, free_port()), Endpoint("198.51.100.1", free_port())
    own = Stores((place,))
    other = Stores((forced,), hosting=True)
    assert listens_on(place.port) == {OTHER} and listens_on(forced.port) <= EVERYWHERE
    assert own.look(place) == 0
    own.close()
    other.close()


@pytest.mark.parametrize("taken", [False, True])
def test_a_port_that_is_taken_is_another_agents(taken: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without an error: this agent is the store's client then."""
    caplog.set_level("INFO", "ttp.launch")
    place = Endpoint("127.0.0.1", free_port())
    first = Stores((place,)) if taken else None
    second = Stores((place,))
    assert second.look(place) == 0
    assert (f"this agent cannot serve a store at {place}" in caplog.text) is taken
    for stores in filter(None, (first, second)):
        stores.close()


@pytest.mark.parametrize(("options", "expected"), [((), EVERYWHERE), (("--host", OTHER), {OTHER})])
def test_the_command_listens_on_the_address_that_is_named(options: tuple[str, ...], expected: set[str]) -> None:
    """On all addresses unless one is named: it serves other hosts."""
    port = free_port()
    command = [sys.executable, "-m", "ttp.launch.stores", "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None and keeper.stdout.readline() == f"rendezvous store on port {port}\n"
        found = listens_on(port, keeper.pid)
        keeper.terminate()
        assert found and found <= expected
        assert keeper.wait(30) == 0


def test_the_command_names_an_address_that_is_not_this_hosts() -> None:
    command = [sys.executable, "-m", "ttp.launch.stores", "--port", "0", "--host", "198.51.100.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.startswith("cannot listen on port 0: ")
    assert done.stderr.endswith("; name another one with --port, or another address with --host\n")
    assert "198.51.100.1" in done.stderr and "Traceback" not in done.stderr
