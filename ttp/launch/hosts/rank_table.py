"""`--rank_table_file hccl.json`: the nodes and devices of a job, read from the file that Ascend clusters use.

Two forms of the file are in use, and both are read:

    {"version": "1.0", "status": "completed", "server_count": "2", "server_list": [
        {"server_id": "10.0.0.1", "device": [{"device_id": "0", "device_ip": "192.1.0.1", "rank_id": "0"}, ...]}, ...]}

    {"status": "completed", "group_count": "1", "group_list": [{"group_name": "", "server_num": "2", "instance_list": [
        {"rank_id": "0", "server_id": "10.0.0.1", "devices": [{"device_id": "0", "device_ip": "192.1.0.1"}]}, ...]}]}

Numbers may be strings. Owns reading and checking. Never uses the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ttp.errors import ConfigError
from ttp.inputs import checked
from ttp.inputs.input_file import read_json

VERSIONS = ("1.0", "1.2")
"""Of the form with `server_list`; 1.2 adds fields for super pods, which are ignored."""

_LONGEST = 300
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Server:
    """One node: its devices in the order of their ranks."""

    server_id: str
    address: str
    """Where other nodes reach it: its `host_ip` or `server_ip` if the table has one, else its id."""
    ranks: tuple[int, ...]
    device_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTable:
    """The nodes of a job, in the order of their ranks: node i has the ranks that follow node i-1's."""

    path: str
    servers: tuple[Server, ...]

    def own_node(self, is_own_address: Callable[[str], bool]) -> int:
        """Return the node that this host is. Raises ConfigError when none is, or more than one."""
        found = [node for node, server in enumerate(self.servers) if is_own_address(server.address)]
        if len(found) == 1:
            return found[0]
        addresses = ", ".join(server.address for server in self.servers)
        what = f"servers {' and '.join(map(str, found))}" if found else "none"
        raise ConfigError(
            f"invalid {self.path}: got {what} with an address of this host (servers: {addresses}), expected one. Set --node-rank"
        )


@dataclass(frozen=True, slots=True)
class _Device:
    """One entry for a device, and its place in the file."""

    place: str
    server_id: str
    address: str
    rank: int
    device_id: int


def read_rank_table(path: str) -> RankTable:
    """Read and check a rank table. Raises ConfigError naming the file, the field, its value and what was expected."""
    try:
        table = read_json(path)
    except OSError as error:
        raise ConfigError(f"cannot read --rank_table_file {path}: {error.strerror}") from None
    except ValueError as error:  # a number of thousands of digits, too
        raise ConfigError(f"invalid --rank_table_file {path}: expected JSON ({error})") from None
    try:
        devices = list(_devices(table))
        servers = _servers(devices)
        _check_counts(table, servers)
    except _FieldError as error:
        raise ConfigError(f"invalid --rank_table_file {path}: {error}") from None
    return RankTable(path, servers)


class _FieldError(ValueError):
    """A field is missing or invalid; the message names it."""


def _devices(table: Any) -> Iterator[_Device]:
    if not isinstance(table, Mapping):
        raise _FieldError(f"got {type(table).__name__}, expected an object")
    if table.get("status", "completed") != "completed":
        raise _FieldError(
            f"status: got {checked.shown(table['status'])}, expected 'completed'. The table is still being written"
        )
    if "server_list" in table:
        if str(table.get("version", "1.0")) not in VERSIONS:
            raise _FieldError(f"version: got {checked.shown(table['version'])}, expected {' or '.join(VERSIONS)}")
        for place, server in _objects(table, "server_list", ""):
            name = _text(server, "server_id", place)
            address = _address(server, place) or name
            for at, device in _objects(server, "device", place):
                yield _Device(at, name, address, _number(device, "rank_id", at), _number(device, "device_id", at))
    elif "group_list" in table:
        for group_place, group in _objects(table, "group_list", ""):
            for place, instance in _objects(group, "instance_list", group_place):
                name, rank = _text(instance, "server_id", place), _number(instance, "rank_id", place)
                devices = _objects(instance, "devices", place)
                if len(devices) != 1:
                    raise _FieldError(f"{place}.devices: got {len(devices)} entries, expected 1: a rank has one device")
                yield _Device(place, name, name, rank, _number(devices[0][1], "device_id", devices[0][0]))
    else:
        raise _FieldError(f"got the keys {checked.shown(sorted(table))}, expected server_list or group_list")


def _servers(devices: Sequence[_Device]) -> tuple[Server, ...]:
    """Group the devices by server, in the order of their ranks, which must be numbered server by server."""
    seen: dict[int, str] = {}
    by_server: dict[str, list[_Device]] = {}
    used: dict[tuple[str, int], str] = {}
    for device in devices:
        if device.rank in seen:
            raise _FieldError(
                f"{device.place}.rank_id: got {device.rank}, which {seen[device.rank]} has already, expected a unique rank"
            )
        seen[device.rank] = device.place
        key = (device.server_id, device.device_id)
        if key in used:
            raise _FieldError(
                f"{device.place}.device_id: got {device.device_id}, which {used[key]} has already, expected one unique in its server"
            )
        used[key] = device.place
        by_server.setdefault(device.server_id, []).append(device)
    _check_addresses(by_server)
    servers, rank = [], 0
    for group in sorted(by_server.values(), key=lambda group: min(device.rank for device in group)):
        group.sort(key=lambda device: device.rank)
        for device in group:
            if device.rank != rank:
                raise _FieldError(
                    f"{device.place}.rank_id: got {device.rank}, expected {rank}: ranks are numbered from 0 without gaps, server by"
                    " server"
                )
            rank += 1
        first = group[0]
        ranks, ids = tuple(device.rank for device in group), tuple(device.device_id for device in group)
        servers.append(Server(first.server_id, first.address, ranks, ids))
    return tuple(servers)


def _check_addresses(by_server: Mapping[str, Sequence[_Device]]) -> None:
    """Check that every server has one address, and no two the same."""
    places: dict[str, _Device] = {}
    for server_id, devices in by_server.items():
        first = devices[0]
        for device in devices:
            if device.address != first.address:
                raise _FieldError(
                    f"server {checked.shown(server_id)}: got the addresses {checked.shown(first.address)} in {first.place} and"
                    f" {checked.shown(device.address)} in {device.place}, expected one address"
                )
        if (other := places.setdefault(first.address, first)) is not first:
            raise _FieldError(
                f"servers {checked.shown(other.server_id)} in {other.place} and {checked.shown(server_id)} in {first.place}: got"
                f" {checked.shown(first.address)} for both, expected different addresses"
            )


def _check_counts(table: Mapping[str, Any], servers: Sequence[Server]) -> None:
    """Compare the table's counts with its lists."""
    groups = [group for _, group in _objects(table, "group_list", "")] if "group_list" in table else []
    counts = [(table, "server_count", "", len(servers)), (table, "group_count", "", len(groups))]
    if len(groups) == 1:
        total = sum(len(server.ranks) for server in servers)
        place = "group_list[0]"
        counts += [(groups[0], "server_num", place, len(servers))]
        counts += [(groups[0], name, place, total) for name in ("device_num", "instance_count")]
    for fields, name, place, count in counts:
        if name in fields and _number(fields, name, place) != count:
            raise _FieldError(
                f"{_at(place, name)}: got {checked.shown(fields[name])}, expected {count}, as many as the table lists"
            )


def _objects(fields: Mapping[str, Any], name: str, place: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the objects of a list with the place of each."""
    at = _at(place, name)
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise _FieldError(f"{at}: got {_shown(fields, name)}, expected a list of at least one object")
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise _FieldError(f"{at}[{index}]: got {checked.shown(item)}, expected an object")
    return [(f"{at}[{index}]", item) for index, item in enumerate(value)]


def _text(fields: Mapping[str, Any], name: str, place: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip() or not value.strip().isprintable() or len(value) > _LONGEST:
        raise _FieldError(f"{_at(place, name)}: got {_shown(fields, name)}, expected an address or a host name")
    return value.strip()


def _address(fields: Mapping[str, Any], place: str) -> str:
    """Return a server's own address field; empty: it has none."""
    for name in ("host_ip", "server_ip"):
        if fields.get(name) not in (None, ""):
            return _text(fields, name, place)
    return ""


def _number(fields: Mapping[str, Any], name: str, place: str) -> int:
    value = fields.get(name)
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise _FieldError(f"{_at(place, name)}: got {_shown(fields, name)}, expected an integer >= 0")
    return int(text)


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _shown(fields: Mapping[str, Any], name: str) -> str:
    if name not in fields:
        return "nothing"
    return checked.shown(fields[name])
