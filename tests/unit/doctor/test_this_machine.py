"""What `ttp doctor` finds of a node: versions, variables, device, shared memory, names, ports, limits, warm starts."""

from __future__ import annotations

import glob
import os
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.copies.node_limits import Limit
from ttp.doctor import this_machine
from ttp.doctor.finding import FAILED, OK, WARNING, Finding
from ttp.errors import ConfigError
from ttp.fork_server.client import ForkServer
from ttp.selftest.probe_process import ProbeFailed

MIB = 1 << 20


@pytest.mark.parametrize(
    ("installed", "status"), [("2.13.0+cpu", OK), ("2.14.1", OK), ("2.12.9", WARNING), ("3.0.0", WARNING)]
)
def test_a_version_of_torch_outside_the_tested_range_warns(
    installed: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "version", lambda name: installed)
    (found,) = this_machine.versions()
    assert found.status == status and f"torch {installed}" in found.found


def test_without_torch_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(this_machine, "version", missing)
    (found,) = this_machine.versions()
    assert found.status == FAILED


@pytest.mark.parametrize(
    ("name", "value", "status", "words"),
    [
        ("TTP_OT", "300", OK, "valid"),
        ("TTP_OT", "soon", FAILED, "TTP_OT"),
        ("TTP_OTT", "300", WARNING, "TTP_OTT (nearest: TTP_OT)"),
    ],
)
def test_the_variables_are_read_as_a_job_would(
    name: str, value: str, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (found,) = this_machine.settings()
    assert found.status == status and words in found.found


def answer(count: int = 8, checked: str = "passed") -> dict[str, Any]:
    device = {"type": "cuda", "name": "H100", "driver": "555", "count": count, "trainer_device": "cuda"}
    if not count:
        device = {"type": "cpu", "name": "x86", "driver": "Linux", "count": 0, "trainer_device": "cpu"}
    return {
        "device": device,
        "torch": "2.13.0",
        "checks": [{"name": "streams and events", "status": checked, "reason": "early event"}],
    }


@pytest.mark.parametrize(
    ("given", "ranks", "status", "words"),
    [
        (answer(), 8, OK, "8 cuda devices: H100, driver 555"),
        (answer(4), 8, FAILED, "4 cuda devices"),
        (answer(checked="failed"), 8, FAILED, "early event"),
        (answer(0), 8, OK, "the CPU"),
    ],
)
def test_there_is_a_device_for_each_rank(
    given: Mapping[str, Any], ranks: int, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "probe", lambda name: given)
    monkeypatch.setattr(glob, "glob", lambda pattern: [])
    found = this_machine.device_finding("auto", ranks)
    assert found.status == status and words in found.found


@pytest.mark.parametrize(("named", "status"), [("auto", WARNING), ("cpu", OK)])
def test_a_device_that_torch_does_not_see_warns_unless_the_cpu_is_meant(
    named: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "probe", lambda name: answer(0))
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    found = this_machine.device_finding(named, 1)
    assert found.status == status and "/dev/nvidia0" in found.found


@pytest.mark.parametrize("error", [ConfigError("--device: got 'npu'"), ProbeFailed("its probe ended with -11")])
def test_a_device_that_is_not_there_or_broken_fails(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(name: str) -> None:
        raise error

    monkeypatch.setattr(this_machine, "probe", raises)
    found = this_machine.device_finding("npu", 1)
    assert (found.status, found.found) == (FAILED, str(error)) and found.do


@pytest.mark.parametrize(
    ("free", "ranks", "host", "status"),
    [
        (64 * MIB, 1, True, OK),
        (64 * MIB - 1, 1, True, WARNING),
        (1024 * MIB, 8, False, OK),
        (1024 * MIB - 1, 1, False, WARNING),
        (1024 * MIB, 32, True, WARNING),
    ],
)
def test_shared_memory_is_enough_for_the_ranks(
    free: int, ranks: int, host: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "SHM", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    found = this_machine.shared_memory(ranks, host)
    assert found.status == status and os.listdir(tmp_path) == []
    assert (status == OK) == (not found.do)


def test_a_node_without_shared_memory_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "SHM", tmp_path / "none")
    found = this_machine.shared_memory(1, True)
    assert found.status == WARNING and "cannot be written: No such file" in found.found


def by_name(nodes: int, *others: str) -> dict[str, Finding]:
    return {each.name: each for each in this_machine.names(nodes, others)}


@pytest.mark.parametrize(("nodes", "status"), [(1, WARNING), (2, FAILED)])
def test_a_name_of_this_node_that_leads_nowhere(nodes: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one node nothing goes by it."""
    monkeypatch.setenv("TTP_HOST", "nowhere.invalid")
    found = by_name(nodes)["name of this node"]
    assert found.status == status and "nowhere.invalid does not resolve" in found.found and "TTP_HOST" in found.do


@pytest.mark.parametrize(("address", "status"), [("10.0.0.5", OK), ("", WARNING)])
def test_on_several_nodes_it_leads_to_one_address_of_this_one(
    address: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_HOST", "localhost")
    monkeypatch.setattr(this_machine, "address_of", lambda host: address)
    assert by_name(2)["name of this node"].status == status


def test_the_other_nodes_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_HOST", "localhost")
    found = by_name(1, "localhost", "nowhere.invalid")
    assert (found["name localhost"].status, found["name nowhere.invalid"].status) == (OK, FAILED)


@pytest.mark.parametrize(("slow", "status"), [(0, OK), (7, WARNING)])
def test_a_slow_look_up_of_an_addresss_name_is_found(slow: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number; that the address has no name is an answer like another."""
    now_s, asked = 0.0, []

    def look_up(address: tuple[object, ...], flags: int) -> tuple[str, str]:
        nonlocal now_s
        asked.append((address[0], flags))
        now_s += 5.0 if len(asked) == slow else 0.001
        raise socket.gaierror(socket.EAI_NONAME, "no name")

    monkeypatch.setattr("ttp.doctor.this_machine.time.monotonic", lambda: now_s)
    monkeypatch.setattr("ttp.doctor.this_machine.socket.getnameinfo", look_up)
    found = this_machine.address_look_ups("10.0.0.5")
    assert found.status == status and asked == [("::ffff:10.0.0.5", 0)] * (slow or this_machine.LOOK_UPS)
    assert not slow or ("the slowest of 7 look-ups" in found.found and "/etc/hosts" in found.do)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_port_is_listened_on_and_reached(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_HOST", "localhost")
    found = this_machine.port(nodes)
    assert found.status == OK and ("localhost" if nodes > 1 else "127.0.0.1") in found.found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_on_several_nodes_a_port_is_reached_by_addresses_of_both_versions(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the controller's is."""
    monkeypatch.setenv("TTP_HOST", host)
    found = this_machine.port(2)
    assert (found.status, found.found) == (OK, f"a free port listens, and is reached as {host}")


def test_a_port_that_is_taken_or_a_name_that_leads_elsewhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("TTP_CONTROLLER_PORT", str(taken.getsockname()[1]))
        found = this_machine.port(1)
        assert found.status == FAILED and "Address already in use" in found.found and "TTP_CONTROLLER_PORT" in found.do
    monkeypatch.delenv("TTP_CONTROLLER_PORT")
    for nowhere in ("nowhere.invalid", "a" * 70):
        monkeypatch.setenv("TTP_HOST", nowhere)
        assert this_machine.port(2).status == FAILED


NONE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("name", "limit", "value", "ranks", "world", "status"),
    [
        ("open files", resource.RLIMIT_NOFILE, 1024 + 4 * 8, 8, 8, OK),
        ("open files", resource.RLIMIT_NOFILE, 1024 + 4 * 8 - 1, 8, 8, WARNING),
        ("open files", resource.RLIMIT_NOFILE, 4096, 8, 10_000, WARNING),
        ("open files", resource.RLIMIT_NOFILE, NONE, 8, 10_000, OK),
        ("processes", resource.RLIMIT_NPROC, 256 * 9, 8, 8, OK),
        ("processes", resource.RLIMIT_NPROC, 256 * 9 - 1, 8, 8, WARNING),
        ("core dumps", resource.RLIMIT_CORE, 0, 1, 1, OK),
        ("core dumps", resource.RLIMIT_CORE, NONE, 1, 1, WARNING),
        ("locked memory", resource.RLIMIT_MEMLOCK, 65536, 1, 1, OK),
    ],
)
def test_limits(
    name: str, limit: int, value: int, ranks: int, world: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (value if which == limit else NONE, NONE))
    monkeypatch.setattr(this_machine, "_goes_to_a_program", lambda: False)
    monkeypatch.setattr(this_machine, "process_limits", list)
    found = {each.name: each for each in this_machine.limits(ranks, world, True)}
    assert found[name].status == status


@pytest.mark.parametrize(
    ("limits", "status", "words"),
    [
        ([Limit(2500, 196, "pids.max")], OK, "no limit"),
        ([Limit(2500, 197, "pids.max")], WARNING, "2,303 more processes and threads (pids.max: 2,500)"),
        (
            [Limit(9999, 0, "inner"), Limit(3000, 1000, "outer")],
            WARNING,
            "2,000 more processes and threads (outer: 3,000)",
        ),
        ([], OK, "no limit"),
    ],
)
def test_processes_of_a_container_count(
    limits: list[Limit], status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (NONE, NONE))
    monkeypatch.setattr(this_machine, "process_limits", lambda: limits)
    found = {each.name: each for each in this_machine.limits(8, 8, True)}["processes"]
    assert found.status == status and found.found.startswith(words)
    assert status == OK or (found.expected, found.figures) == ("2304", {"limit": limits[-1].total})


@pytest.mark.parametrize(("value", "host", "devices", "status"), [(65536, False, ["/dev/infiniband/uverbs0"], WARNING), (NONE, False, ["x"], OK),
                                                                  (65536, False, [], OK), (65536, True, ["x"], OK)])  # fmt: skip
def test_memory_is_locked_for_rdma_alone(
    value: int, host: bool, devices: list[str], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (value, NONE))
    monkeypatch.setattr(glob, "glob", lambda pattern: devices)
    assert {each.name: each for each in this_machine.limits(1, 1, host)}["locked memory"].status == status


@pytest.mark.parametrize(("pattern", "status"), [("|/usr/lib/systemd/systemd-coredump %P", OK), ("core", WARNING)])
def test_a_core_dump_that_a_program_takes_is_its_own_affair(
    pattern: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pattern").write_text(pattern)
    monkeypatch.setattr(this_machine, "_CORE_PATTERN", tmp_path / "pattern")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (NONE, NONE))
    assert {each.name: each for each in this_machine.limits(1, 1, True)}["core dumps"].status == status


def test_a_process_is_forked_as_workers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = this_machine.warm_start(("json",))
    assert found.status == OK and float(found.figures["seconds"]) > 0


def test_what_is_imported_for_workers_is_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "for_workers", lambda: ("ttp.selftest.long_kernel",))
    asked: list[tuple[str, ...]] = []

    def server(names: Sequence[str]) -> ForkServer:
        asked.append(tuple(names))
        return ForkServer(("json",))

    monkeypatch.setattr(this_machine, "ForkServer", server)
    assert this_machine.warm_start().status == OK and asked == [("ttp.selftest.long_kernel",)]


def test_a_server_that_cannot_fork_warns() -> None:
    """It ends while it imports."""
    found = this_machine.warm_start(
        ("antigravity_of_no_package", "ttp.selftest.long_kernel"), {"PYTHONHOME": "/nowhere"}
    )
    assert found.status == WARNING and "fork server" in found.found and "docs/warm_starts.md" in found.do


def test_warm_starts_may_be_off() -> None:
    assert this_machine.warm_start(environ={"TTP_WARM_START": "False"}).status == OK
    assert this_machine.warm_start(environ={"TTP_WARM_START": "perhaps"}).status == FAILED
