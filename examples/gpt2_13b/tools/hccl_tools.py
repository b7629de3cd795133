"""Writes the rank table of this machine: `python hccl_tools.py --device_num "[0,8)" --server_ip 10.0.0.1`.

Tables of several machines are put together by `merge_hccl.py`. Owns this machine's devices and addresses, and the form of the file.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ttp.addresses import is_own_address
from ttp.errors import ConfigError
from ttp.inputs.input_file import read_text
from ttp.launch.hosts.rank_table import read_rank_table

HCCN_CONF = "/etc/hccn.conf"
"""Where Ascend's driver keeps the addresses of the devices' own network."""
MOST_DEVICES = 1024
SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address."""


def device_ids(device_num: str, visible: str | None) -> list[int]:
    """Return the devices of a range `[0,8)`, of which `visible` ("4,5,6,7") names the physical ones. Raises ConfigError."""
    found = re.fullmatch(r"\[([0-9]{1,4}),\s*([0-9]{1,4})[\])]", device_num.strip())
    first, stop = (int(found[1]), int(found[2])) if found else (0, 0)
    if not first < stop <= MOST_DEVICES:
        raise ConfigError(f"--device_num: got {device_num!r}, expected a range without its end, as in [0,8)")
    if visible is None:
        return list(range(first, stop))
    words = [word.strip() for word in visible.split(",")]
    if not all(re.fullmatch("[0-9]{1,4}", word) for word in words) or len(set(map(int, words))) < len(words):
        raise ConfigError(f"--visible_devices: got {visible!r}, expected different device ids, as in 0,1,2,3")
    if len(words) < stop:
        raise ConfigError(
            f"--visible_devices: got {len(words)} devices, expected {stop} or more for --device_num {device_num}"
        )
    return [int(word) for word in words[first:stop]]


def device_addresses(path: str, needed: bool) -> dict[int, str]:
    """Return the devices' addresses by id (`address_0=192.1.27.6`); none where the file is not there. Raises ConfigError."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        if not needed:
            return {}
        raise ConfigError(f"--hccn_conf: got {path!r}, expected a file that is there") from None
    except OSError as error:
        raise ConfigError(f"--hccn_conf: {path} cannot be read: {error.strerror}") from None
    return {int(number): address for number, address in re.findall(r"(?m)^address_([0-9]{1,4})=(\S+)\s*$", text)}


def server_address(given: str) -> str:
    """Return the address by which other machines reach this one. Raises ConfigError."""
    if given:
        if not is_own_address(given):
            raise ConfigError(f"--server_ip: got {given!r}, expected one of {', '.join(own_addresses())}")
        return given
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise ConfigError(
            f"host name: {socket.gethostname()} has no address ({error.strerror}). Give --server_ip"
        ) from None
    if found.startswith("127."):
        print(
            f"hccl_tools.py: {found} is reached from this machine only. Give --server_ip for several", file=sys.stderr
        )
    return found


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine's interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def table_of(servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table of servers with their devices; rank ids ascend from 0 through the servers in their order."""
    rank, listed = 0, []
    for server in servers:
        devices = []
        for device in server["device"]:
            devices.append({**device, "rank_id": str(rank)})
            rank += 1
        listed.append({**server, "device": devices})
    return {"version": "1.0", "server_count": str(len(listed)), "server_list": listed, "status": "completed"}


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table whole or not at all, after `ttprun`'s own checks of it. Raises ConfigError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(table, indent=4) + "\n", encoding="utf-8")
        read_rank_table(str(unfinished))
        os.replace(unfinished, path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"--rank_table_file {unfinished}", str(path))) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table into the current folder and print its path. Returns 0, or 2 for arguments that cannot be."""
    parser = argparse.ArgumentParser(prog="hccl_tools.py", description="Write the rank table of this machine.")
    parser.add_argument(
        "--device_num", default="[0,8)", help="range of devices, the last one excluded (default: [0,8))"
    )
    parser.add_argument("--visible_devices", help="physical ids of the devices, as in 4,5,6,7 (default: 0,1,2,...)")
    parser.add_argument("--server_ip", default="", help="this machine's address (default: that of its host name)")
    parser.add_argument("--hccn_conf", help=f"file with the devices' addresses (default: {HCCN_CONF}, if it is there)")
    given = parser.parse_args(argv)
    try:
        ids = device_ids(given.device_num, given.visible_devices)
        addresses = device_addresses(given.hccn_conf or HCCN_CONF, needed=given.hccn_conf is not None)
        missing = [device for device in ids if addresses and device not in addresses]
        if missing:
            raise ConfigError(
                f"{given.hccn_conf or HCCN_CONF}: has no address_{missing[0]}, expected one for each device"
            )
        devices = [
            {"device_id": str(device)} | ({"device_ip": addresses[device]} if addresses else {}) for device in ids
        ]
        server = {"server_id": server_address(given.server_ip), "device": devices, "host_nic_ip": "reserve"}
        path = Path(f"hccl_{len(ids)}p_{''.join(map(str, ids))}_{server['server_id']}.json").absolute()
        write_table(path, table_of([server]))
    except ConfigError as error:
        print(f"hccl_tools.py: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
