"""The command line of `ttp doctor`: which checks are made, what is printed, exit statuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from ttp import cli
from ttp.doctor import main, save_directories, this_machine, two_nodes
from ttp.doctor.finding import FAILED, OK, WARNING, Finding
from ttp.errors import ConfigError
from ttp.text.console import open_console


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status of `ttp doctor WORDS --json`, and what it printed."""
    code = cli.main(["doctor", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["status"] == code
    return code, found


def test_a_node_that_serves_passes_and_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check is made for real: a device's probe, a fork server, the disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(save_directories, "MEASURED_BYTES", 16 << 20)
    shared = sorted(os.listdir("/dev/shm"))
    code, found = run(
        capsys,
        "--config",
        "gpt_tiny",
        "--nproc-per-node",
        "2",
        "--device",
        "cpu",
        "--training_config.output_dir",
        "output",
    )
    checks = {each["name"]: each for each in found["checks"]}
    assert code == 0, found
    assert list(checks) == [
        "versions", "settings", "device", "shared memory", "name of this node", "names of addresses", "ports", "open files", "processes", "core dumps", "locked memory",
        "warm starts", "layout", *(f"directory output/checkpoints{what}" for what in ("", ", links", ", speed", ", room", ", dump")),
    ]  # fmt: skip
    assert FAILED not in {each["status"] for each in found["checks"]} and found["notes"] == []
    layout = checks["layout"]["figures"]
    assert layout["world_size"] == 2 and layout["replicas"] == 2
    assert checks["directory output/checkpoints, room"]["figures"]["needed_bytes"] == 2 * layout["dump_bytes"]
    assert os.listdir(tmp_path) == [] and sorted(os.listdir("/dev/shm")) == shared


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Finding]]:
    """Return what is found of this machine, in place of a look at it."""
    given = [Finding("versions", OK, "torch 2.13.0")]
    monkeypatch.setattr(this_machine, "check", lambda *of: given)
    yield given


@pytest.mark.parametrize(("status", "code"), [(OK, 0), (WARNING, 0), (FAILED, 1)])
def test_a_failure_alone_is_an_exit_status(
    status: str, code: int, quick: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    quick.append(Finding("one", status, "got [this]", "that", "Do it", {"figure": 1}))
    assert main.main([]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["ok      versions: torch 2.13.0", f"{status:<7} one: got [this]; expected that. Do it"]
    assert [line.partition(":")[0] for line in lines[2:]] == ["not checked"] * 3
    assert run(capsys)[1]["checks"][1] == {
        "name": "one", "status": status, "found": "got [this]", "expected": "that", "do": "Do it", "figures": {"figure": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("--nproc-per-node", "2"), OK, "survived: any 1 of 2 ranks"),
        (("--nproc-per-node", "1"), WARNING, "a death loses the steps since the last checkpoint"),
        (("--nproc-per-node", "1", "--nnodes", "2"), OK, "each of 2 nodes"),
        (("--nproc-per-node", "3", "--parallel_config.tensor_model_parallel_size", "2"), FAILED, ""),
        (
            ("--nproc-per-node", "3", "--nnodes", "2", "--parallel_config.tensor_model_parallel_size", "2"),
            WARNING,
            "not each node: some holders of a shard share one",
        ),
    ],
)
def test_the_layout_is_what_plan_says(
    words: tuple[str, ...],
    status: str,
    text: str,
    quick: list[Finding],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = run(capsys, "--config", "gpt_tiny", *words, "--save-dirs", str(tmp_path))
    (layout,) = [each for each in found["checks"] if each["name"] == "layout"]
    assert layout["status"] == status and text in layout["found"] and code == (1 if status == FAILED else 0)


def test_a_nodes_part_of_a_checkpoint_is_weighed(
    quick: list[Finding], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without shared directories a node has room for its part alone; TTP_OT is the fault's time."""
    monkeypatch.setenv("TTP_OT", "7")
    needed = {}
    for shared in ("True", "False"):
        monkeypatch.setenv("TTP_SHARED_DIRS", shared)
        _, found = run(capsys, "--state", "1GB", "--nnodes", "4", "--save-dirs", str(tmp_path))
        checks = {each["name"].rpartition(", ")[2]: each for each in found["checks"]}
        needed[shared] = checks["room"]["figures"]["needed_bytes"]
        assert checks["dump"]["figures"]["timeout_s"] == 7.0
    assert needed == {"True": 2 << 30, "False": (2 << 30) // 4}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--peer", "node"), "invalid --peer: got 'node', expected host:port"),
        (("--peer", ":80"), "invalid --peer"),
        (("--peer", "node:99999"), "invalid --peer"),
        (("--listen", "x"), "invalid --listen: got 'x', expected a port, or host:port"),
        (("--state", "much"), "--state: got 'much', expected a size"),
        (("--config", "no_such"), "no_such"),
        (("--config", "gpt_tiny", "--training_config.no_key", "1"), "no_key"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: tuple[str, ...], text: str, quick: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("ttp doctor: ") and text in printed.err and printed.err.count("\n") == 1
    assert run(capsys, *words)[0] == 2


def test_a_trainers_key_needs_a_configuration(quick: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["--training_config.output_dir", "x"])
    assert "needs --config" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 70])
def test_a_host_that_is_none_cannot_be_listened_on(
    host: str, quick: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["--listen", f"{host}:80"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ttp doctor: cannot listen on {host}:80: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("host", "family"),
    [("", socket.AF_INET6), ("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6), ("node-a", socket.AF_INET6)],
)
def test_a_port_alone_is_listened_on_by_both_versions_and_a_name_by_its_own(
    host: str, family: int, quick: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[socket.socket] = []
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *of, **more: look_up("::1" if name == "node-a" else name, *of, **more)
    )
    monkeypatch.setattr(two_nodes, "serve", lambda server, show: found.append(server.dup()))
    assert main.main(["--listen", f"{host}:{free_port()}".removeprefix(":")]) == 0
    with found[0] as server:
        assert server.family == family
        assert host or not server.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def test_two_nodes_ask_each_other(quick: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    """One serves until Ctrl-C."""
    port = free_port()
    command = [sys.executable, "-m", "ttp.cli", "doctor", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith(f"listening on port {port}")
        code, found = run(capsys, "--peer", f"127.0.0.1:{port}")
        assert code == 0 and [each["name"] for each in found["checks"]] == [
            "versions", *(f"peer 127.0.0.1:{port}, {what}" for what in ("round trip", "clock", "versions")),
        ]  # fmt: skip
        assert server.stdout.readline().startswith("127.0.0.1 asked: TTP")
        with pytest.raises(ConfigError, match="cannot listen"):
            main._listen(f"127.0.0.1:{port}", open_console())
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
    assert run(capsys, "--peer", f"127.0.0.1:{port}")[0] == 1
