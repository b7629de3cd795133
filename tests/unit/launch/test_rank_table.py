"""A rank table gives the job's nodes and ranks, in both forms; an error names the field."""

from __future__ import annotations

import copy
import json
import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ttp.addresses import is_own_address
from ttp.errors import ConfigError
from ttp.launch.arguments import make_parser
from ttp.launch.hosts.rank_table import RankTable, Server, read_rank_table
from ttp.launch.hosts.topology import VISIBLE_DEVICES, apply_rank_table, explicit_arguments

LISTED: dict[str, Any] = {
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {
            "server_id": "10.0.0.1",
            "device": [
                {"device_id": "0", "device_ip": "192.1.0.1", "rank_id": "0"},
                {"device_id": "1", "device_ip": "192.1.0.2", "rank_id": "1"},
            ],
            "host_nic_ip": "reserve",
        },
        {
            "server_id": "10.0.0.2",
            "device": [{"device_id": "0", "device_ip": "192.1.0.3", "rank_id": "2"}],
            "host_nic_ip": "reserve",
        },
    ],
    "status": "completed",
}
GROUPED: dict[str, Any] = {
    "board_id": "0x0020",
    "chip_info": "910",
    "deploy_mode": "lab",
    "group_count": "1",
    "group_list": [
        {
            "device_num": "3",
            "server_num": "2",
            "group_name": "",
            "instance_count": "3",
            "instance_list": [
                {"devices": [{"device_id": "0", "device_ip": "192.1.0.3"}], "rank_id": "2", "server_id": "10.0.0.2"},
                {"devices": [{"device_id": "1", "device_ip": "192.1.0.2"}], "rank_id": "1", "server_id": "10.0.0.1"},
                {"devices": [{"device_id": "0", "device_ip": "192.1.0.1"}], "rank_id": "0", "server_id": "10.0.0.1"},
            ],
        }
    ],
    "para_plane_nic_location": "device",
    "para_plane_nic_num": "2",
    "para_plane_nic_name": ["eth0", "eth1"],
    "status": "completed",
}
SERVERS = (Server("10.0.0.1", "10.0.0.1", (0, 1), (0, 1)), Server("10.0.0.2", "10.0.0.2", (2,), (0,)))


def write(folder: Path, table: object) -> str:
    path = folder / "hccl.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return str(path)


@pytest.mark.parametrize("table", [LISTED, GROUPED], ids=["server_list", "group_list"])
def test_both_forms_say_the_same(tmp_path: Path, table: dict[str, Any]) -> None:
    """Servers in the order of their ranks, devices in the order of theirs, wherever they stand in the file."""
    assert read_rank_table(write(tmp_path, table)).servers == SERVERS
    shuffled = copy.deepcopy(table)
    for name in ("server_list", "group_list"):
        shuffled.get(name, []).reverse()
    assert read_rank_table(write(tmp_path, shuffled)).servers == SERVERS


def test_numbers_may_be_numbers_and_a_server_may_have_an_address(tmp_path: Path) -> None:
    """Version 1.2 with its extra fields; ids that are names, with the hosts' addresses beside them."""
    table = {
        "version": "1.2",
        "server_count": 1,
        "server_list": [
            {
                "server_id": "node_0",
                "host_ip": "10.0.0.9",
                "device": [{"device_id": 4, "super_device_id": "0", "rank_id": 0}],
            }
        ],
        "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "node_0"}]}],
    }
    assert read_rank_table(write(tmp_path, table)).servers == (Server("node_0", "10.0.0.9", (0,), (4,)),)


def changed(table: dict[str, Any], path: Sequence[str | int], value: object) -> dict[str, Any]:
    """Return a copy with one field set, or removed when `value` is None."""
    result = copy.deepcopy(table)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = None if value is NULL else value
    return result


class Null:
    """Stands for JSON's null in a case: `None` there removes the field."""


NULL = Null()
FIRST = ("server_list", 0, "device", 0)
WRONG = [
    (LISTED, ("status",), "initializing", "status: got 'initializing', expected 'completed'"),
    (LISTED, ("version",), "3.0", "version: got '3.0', expected 1.0 or 1.2"),
    (
        LISTED,
        ("server_list",),
        None,
        "got the keys ['server_count', 'status', 'version'], expected server_list or group_list",
    ),
    (LISTED, ("server_list",), [], "server_list: got [], expected a list of at least one object"),
    (LISTED, ("server_list", 1), "10.0.0.2", "server_list[1]: got '10.0.0.2', expected an object"),
    (LISTED, ("server_count",), "3", "server_count: got '3', expected 2, as many as"),
    (LISTED, ("server_list", 1, "server_id"), None, "server_list[1].server_id: got nothing, expected an address"),
    (LISTED, ("server_list", 1, "server_id"), 7, "server_list[1].server_id: got 7, expected an address"),
    (LISTED, ("server_list", 1, "server_id"), "a\0b", "server_list[1].server_id: got 'a\\x00b', expected an address"),
    (LISTED, ("server_list", 1, "server_id"), "a\nb", "server_list[1].server_id: got 'a\\nb', expected an address"),
    (LISTED, ("server_list", 1, "server_id"), "x" * 301, "server_list[1].server_id: got 'xxx"),
    (LISTED, ("server_list", 0, "device"), None, "server_list[0].device: got nothing, expected a list"),
    (LISTED, (*FIRST, "rank_id"), None, "server_list[0].device[0].rank_id: got nothing, expected an integer >= 0"),
    (LISTED, (*FIRST, "rank_id"), "-1", "server_list[0].device[0].rank_id: got '-1', expected an integer >= 0"),
    (LISTED, (*FIRST, "rank_id"), True, "server_list[0].device[0].rank_id: got True, expected an integer >= 0"),
    (LISTED, (*FIRST, "rank_id"), "1", "server_list[0].device[1].rank_id: got 1, which server_list[0].device[0] has"),
    (
        LISTED,
        (*FIRST, "rank_id"),
        "3",
        "server_list[0].device[1].rank_id: got 1, expected 0: ranks are numbered from 0",
    ),
    (LISTED, (*FIRST, "device_id"), "x", "server_list[0].device[0].device_id: got 'x', expected an integer >= 0"),
    (LISTED, (*FIRST, "device_id"), "1", "server_list[0].device[1].device_id: got 1, which server_list[0].device[0]"),
    (GROUPED, ("group_count",), "2", "group_count: got '2', expected 1, as many as"),
    (GROUPED, ("group_list", 0, "device_num"), "8", "group_list[0].device_num: got '8', expected 3, as many as"),
    (
        GROUPED,
        ("group_list", 0, "instance_list", 1, "devices"),
        [],
        "instance_list[1].devices: got [], expected a list",
    ),
    (
        GROUPED,
        ("group_list", 0, "instance_list", 1, "devices"),
        [{"device_id": "1"}, {"device_id": "2"}],
        "instance_list[1].devices: got 2 entries, expected 1",
    ),
    (LISTED, ("group_list",), 3, "group_list: got 3, expected a list of at least one object"),
    (LISTED, ("group_list",), [1], "group_list[0]: got 1, expected an object"),
    (LISTED, ("group_list",), NULL, "group_list: got None, expected a list of at least one object"),
    (LISTED, ("status",), NULL, "status: got None, expected 'completed'"),
    (LISTED, (*FIRST, "rank_id"), "0" * 5000, "rank_id: got '000"),
    (LISTED, ("server_list", 0, "host_ip"), {"x": 1}, "server_list[0].host_ip: got {'x': 1}, expected an address"),
    (LISTED, ("server_list", 0, "server_ip"), 7, "server_list[0].server_ip: got 7, expected an address"),
    (
        LISTED,
        ("server_list", 1, "host_ip"),
        "10.0.0.1",
        "servers '10.0.0.1' in server_list[0].device[0] and '10.0.0.2' in server_list[1].device[0]: got '10.0.0.1' for both",
    ),
    (
        LISTED,
        ("server_list", 1),
        {"server_id": "10.0.0.1", "host_ip": "10.0.0.9", "device": [{"device_id": "5", "rank_id": "2"}]},
        "server '10.0.0.1': got the addresses '10.0.0.1' in server_list[0].device[0] and '10.0.0.9' in server_list[1].device[0], "
        "expected one address",
    ),
]


@pytest.mark.parametrize(("table", "path", "value", "expected"), WRONG, ids=[case[3][:60] for case in WRONG])
def test_a_wrong_field_is_named(
    tmp_path: Path, table: dict[str, Any], path: Sequence[str | int], value: object, expected: str
) -> None:
    """With the file, its place, its value and what was expected."""
    file = write(tmp_path, changed(table, path, value))
    with pytest.raises(ConfigError) as caught:
        read_rank_table(file)
    assert str(caught.value).startswith(f"invalid --rank_table_file {file}: ") and expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "expected JSON"),
        ("[]", "got list, expected an object"),
        ("[" * 100_000, "expected JSON .got values nested too deep"),
        (
            '{"server_list": [{"server_id": "a", "device": [{"rank_id": ' + "1" * 5000 + "}]}]}",
            "expected JSON .*digits",
        ),
    ],
    ids=["text", "list", "deep", "digits"],
)
def test_another_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    """No JSON, no object, no file."""
    with pytest.raises(ConfigError, match=expected):
        read_rank_table(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"cannot read --rank_table_file .*: No such file"):
        read_rank_table(str(tmp_path / "missing.json"))


@pytest.mark.parametrize("field", ["status", "version"])
def test_a_wrong_value_is_shown_in_short(tmp_path: Path, field: str) -> None:
    """A value of thousands of characters is shortened in the message."""
    with pytest.raises(ConfigError, match=f"{field}: got '111") as caught:
        read_rank_table(write(tmp_path, changed(LISTED, (field,), "1" * 5000)))
    assert len(str(caught.value)) < 500


def settle(
    folder: Path, *options: str, table: dict[str, Any] = LISTED, own: Sequence[str] = ("10.0.0.2",)
) -> tuple[Any, RankTable]:
    """Parse a command line with this table, on the host with these addresses."""
    line = ["--rank_table_file", write(folder, table), *options, "train.py", "--node-rank", "9"]

    def parser() -> ArgumentParser:
        return make_parser()

    args = parser().parse_args(line)
    return args, apply_rank_table(args, explicit_arguments(parser, line), lambda address: address in own)


def test_the_table_fills_torchruns_arguments(tmp_path: Path) -> None:
    """This host's own addresses say which node it is; node 0 is the master; script arguments are left alone."""
    args, _ = settle(tmp_path)
    assert (args.nnodes, args.nproc_per_node, args.node_rank, args.master_addr) == ("2", "1", 1, "10.0.0.1")
    assert args.rdzv_backend == "static" and args.training_script_args == ["--node-rank", "9"]
    args, _ = settle(tmp_path, own=("10.0.0.1",))
    assert (args.nproc_per_node, args.node_rank) == ("2", 0)


def test_node_rank_and_master_addr_override_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By flag or by torchrun's variable; saying what the table says is allowed."""
    args, _ = settle(tmp_path, "--node_rank=0", "--master-addr", "node0.lan", "--nnodes", "2", own=())
    assert (args.node_rank, args.nproc_per_node, args.master_addr) == (0, "2", "node0.lan")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert settle(tmp_path, own=())[0].node_rank == 1


@pytest.mark.parametrize(
    ("options", "own", "expected"),
    [
        (
            (),
            (),
            r"got none with an address of this host \(servers: 10.0.0.1, 10.0.0.2\), expected one. Set --node-rank",
        ),
        ((), ("10.0.0.1", "10.0.0.2"), "got servers 0 and 1 with an address of this host"),
        (("--node-rank", "2"), (), "invalid --node-rank: got 2, expected 0 to 1"),
        (("--nnodes", "4"), ("10.0.0.1",), "invalid --nnodes: got '4', expected 2 as in .*. Omit the option"),
        (("--nproc_per_node", "8"), ("10.0.0.1",), "invalid --nproc-per-node: got '8', expected 2 as in"),
        (("--rdzv-backend", "c10d"), ("10.0.0.1",), "invalid --rdzv-backend: got 'c10d', expected static as in"),
        (
            ("--rdzv-endpoint", "h:1"),
            ("10.0.0.1",),
            "invalid --rdzv-endpoint: got it with --rank_table_file, expected one of the two",
        ),
        (
            ("--standalone",),
            ("10.0.0.1",),
            "invalid --standalone: got it with --rank_table_file, expected one of the two",
        ),
    ],
)
def test_what_contradicts_the_table_is_refused(
    tmp_path: Path, options: Sequence[str], own: Sequence[str], expected: str
) -> None:
    """By the flag's name, with both values."""
    with pytest.raises(ConfigError, match=expected):
        settle(tmp_path, *options, own=own)


def test_other_devices_than_the_first_are_shown_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local rank 0 uses the table's device for it; what the user has set already counts."""
    monkeypatch.setenv(VISIBLE_DEVICES, "")
    monkeypatch.delenv(VISIBLE_DEVICES)
    settle(tmp_path)
    assert VISIBLE_DEVICES not in os.environ
    settle(tmp_path, table=changed(LISTED, ("server_list", 1, "device", 0, "device_id"), "5"))
    assert os.environ[VISIBLE_DEVICES] == "5"
    monkeypatch.setenv(VISIBLE_DEVICES, "7")
    settle(tmp_path, table=changed(LISTED, ("server_list", 1, "device", 0, "device_id"), "5"))
    assert os.environ[VISIBLE_DEVICES] == "7"


def test_own_addresses_are_known_without_a_list_of_them() -> None:
    """The loopback is this host's; an address reserved for documents is not, and neither is a name without one."""
    assert is_own_address("127.0.0.1") and is_own_address("localhost")
    assert not is_own_address("192.0.2.1") and not is_own_address("no-such-host.invalid")
    assert not is_own_address("a" * 70)
