"""One copy's way from a node's keeper to the next one's: TCP of its own, TLS where the job has certificates, and a checksum behind the bytes.

Owns the form on the wire. The receiver's slot holds the copy only when all its bytes have come and the checksum fits.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any

import xxhash

from ttp.copies.region import Region
from ttp.identity.credentials import Credentials
from ttp.identity.role import KEEPER_NAME, Identity, Role
from ttp.inputs import checked

CHUNK_BYTES = 4 << 20
CONNECT_S = 10.0
ANSWER_S = 60.0
"""The other side's time for the next bytes."""
_MOST_HEADER = 64 << 20
_LENGTH = struct.Struct("!Q")


def context(credentials: Credentials, *, server: bool) -> ssl.SSLContext:
    """Return what a keeper shows to another one, and by what it checks it."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    found.verify_mode = ssl.CERT_REQUIRED
    found.minimum_version = ssl.TLSVersion.TLSv1_3
    found.load_verify_locations(cadata=credentials.authority.decode())
    descriptor = os.memfd_create(
        "ttp-keeper", os.MFD_CLOEXEC
    )  # ssl reads files only, and keys are not written to a disk
    try:
        os.write(descriptor, credentials.key + b"\n" + credentials.certificate)
        found.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return found


def contexts(encoded: object) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return a keeper's for the connections that it takes, and for those that it makes; without credentials None each: they are plain. Raises
    ValueError, OSError."""
    if not encoded:
        return None, None
    credentials = Credentials.decode(encoded)
    return context(credentials, server=True), context(credentials, server=False)


def check_keeper(channel: socket.socket, job_id: str) -> None:
    """Raise OSError unless the other side is a keeper of this attempt. Without TLS nothing is known of it."""
    if not isinstance(channel, ssl.SSLSocket):
        return
    names = [value for kind, value in (channel.getpeercert() or {}).get("subjectAltName", ()) if kind == "URI"]  # type: ignore[str-unpack]
    peer = Identity.parse(str(names[0])) if len(names) == 1 else None
    if peer is None or peer.role is not Role.KEEPER or peer.job_id != job_id:
        raise OSError(f"got a connection of {peer}, expected a keeper of {job_id}")


def connect(address: str, security: ssl.SSLContext | None) -> socket.socket:
    """Raises OSError."""
    host, _, port = address.rpartition(":")
    channel = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
    channel.settimeout(ANSWER_S)
    if security is None:
        return channel
    try:
        return security.wrap_socket(channel, server_hostname=KEEPER_NAME)
    except BaseException:
        channel.close()
        raise


def send(
    channel: socket.socket, region: Region, slot: int, sequence: int, within_s: float, described: bool
) -> tuple[str, bool]:
    """Send what a slot holds, spread over `within_s`, and wait until the other side has it; return its checksum, and whether that is so: False
    when the slot was written anew meanwhile. `described`: the other side has the region's description. Raises OSError, ValueError."""
    copy = region.read(slot)
    if copy is None or copy.sequence != sequence or region.description is None:
        return "", False
    description = b"" if described else region.description.encode()
    data = region.data(slot)
    header = {
        "rank": region.description.rank,
        "attempt": region.description.attempt,
        "slot": slot,
        "step": copy.step,
        "sequence": sequence,
        "state": len(copy.state),
        "data": len(data),
        "description": len(description),
    }
    _say(channel, header)
    channel.sendall(description)
    _accepted(channel)
    channel.sendall(copy.state)
    digest = xxhash.xxh3_128(copy.state)
    begun, total = time.monotonic(), max(1, len(data))
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        digest.update(chunk)
        channel.sendall(chunk)
        time.sleep(max(0.0, within_s * (start + len(chunk)) / total - (time.monotonic() - begun)))
    now = region.read(slot)
    whole = now is not None and now.sequence == sequence
    _say(channel, {"checksum": digest.hexdigest() if whole else "", "header": _checksum_of(header, description)})
    _accepted(channel)
    return digest.hexdigest(), whole


def receive(
    channel: socket.socket, room: Callable[[dict[str, Any], bytes], Region]
) -> tuple[Region, int, int, str] | None:
    """Take one copy; return where it is: region, slot, sequence, checksum. None: the other side has closed.

    `room(header, description)` returns the region for it. Raises OSError, ValueError; `refuse` has the other side know of ValueError and NoRoom.
    """
    try:
        header = _next_message(channel)
    except EOFError:
        return None
    description = _bytes(channel, _size(header, "description", _MOST_HEADER))
    region = room(header, description)
    slot, step, sequence = (
        checked.integer(*checked.field(header, name, "copy")) for name in ("slot", "step", "sequence")
    )
    state, data = region.state(slot), region.data(slot)
    parts = (state[: _size(header, "state", len(state))], data[: _size(header, "data", len(data))])
    region.clear(slot)
    _say(channel, {})
    digest = xxhash.xxh3_128()
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            chunk = part[start : start + CHUNK_BYTES]
            _fill(channel, chunk)
            digest.update(chunk)
    closing = _next_message(channel)
    checksum = str(closing.get("checksum", ""))
    if checksum and (checksum, closing.get("header")) != (digest.hexdigest(), _checksum_of(header, description)):
        raise ValueError(f"rank {header['rank']}, step {step}: the bytes that came are not those that were sent")
    if checksum:
        region.commit(slot, step, sequence, header["state"])
    _say(channel, {})
    return region, slot, sequence, checksum


def _accepted(channel: socket.socket) -> None:
    """Wait until the other side takes it: before the bytes of the copy, so that a refusal is not lost among them, and behind them."""
    answer = _next_message(channel)
    if answer.get("error"):
        raise OSError(str(answer["error"]))


def _checksum_of(header: dict[str, Any], description: bytes) -> str:
    return xxhash.xxh3_128(json.dumps(header).encode() + description).hexdigest()


def refuse(channel: socket.socket, error: str) -> None:
    """Tell the other side why its copy was not taken."""
    _say(channel, {"error": error})


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def _next_message(channel: socket.socket) -> dict[str, Any]:
    (size,) = _LENGTH.unpack(_bytes(channel, _LENGTH.size))
    if size > _MOST_HEADER:
        raise ValueError(f"got a message of {size} bytes, expected at most {_MOST_HEADER}")
    try:
        return checked.mapping(json.loads(_bytes(channel, size)), "message")
    except RecursionError:
        raise ValueError("got a message nested too deep to be read") from None


def _size(header: dict[str, Any], name: str, most: int) -> int:
    return checked.integer(*checked.field(header, name, "copy"), 0, most)


def _bytes(channel: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    _fill(channel, memoryview(content))
    return bytes(content)


def _fill(channel: socket.socket, room: memoryview) -> None:
    """Raises EOFError where the other side has closed."""
    while len(room):
        count = channel.recv_into(room)
        if not count:
            raise EOFError("the other side has closed the connection")
        room = room[count:]
