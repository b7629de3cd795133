"""How gRPC is set up on both sides: message sizes, keepalive, no proxies, no shared ports, mutual TLS.

Import gRPC through this module: it must find GRPC_ENABLE_FORK_SUPPORT=0 when it loads, or a data loader's forked
workers crash or crawl. Never decides anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
import grpc.aio

from ttp.errors import ControllerError
from ttp.identity import own
from ttp.identity.credentials import Credentials
from ttp.identity.role import ANY_CONTROLLER, Identity, controller_name
from ttp.proto.address import split_address

__all__ = [
    "CLIENT_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "SERVER_OPTIONS",
    "Options",
    "certified",
    "describe",
    "grpc",
    "open_async_channel",
    "open_channel",
    "open_relay",
    "server_credentials",
]

Options = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES = 16 << 20
"""A larger message is refused on both sides; a larger table is sent in chunks (`chunks.py`)."""

_AHEAD_BYTES = 1 << 20
"""A message of this size needs no word of its receiver while it is sent."""

_LOOPBACK = ("127.", "[::1]", "localhost:")

_BOTH: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC measures what a connection can carry by a ping for what it receives: a quarter of a heartbeat's cost on both sides.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _AHEAD_BYTES),
)

SERVER_OPTIONS: Options = (
    *_BOTH,
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not half of the connections
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

CLIENT_OPTIONS: Options = (
    *_BOTH,
    ("grpc.enable_http_proxy", 0),  # the control plane stays inside the cluster, whatever http_proxy says
    ("grpc.use_local_subchannel_pool", 1),  # a new channel tries at once: no backoff inherited from the last one
    ("grpc.enable_retries", 0),
)


def open_channel(address: str) -> grpc.Channel:
    """Return a channel of its own to the controller at `address` (`host:port/term`, or `host:port`: of any term); the caller closes it.

    Raises ControllerError: this process has no certificate.
    """
    target, credentials, options = _connection(address)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def open_async_channel(address: str) -> grpc.aio.Channel:
    """As `open_channel`, for the running loop."""
    target, credentials, options = _connection(address)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def open_relay(path: str) -> grpc.Channel:
    """Return a channel of its own to the relay of this node, which listens on the socket `path`."""
    return grpc.insecure_channel(f"unix:{path}", options=CLIENT_OPTIONS)


def _connection(address: str) -> tuple[str, grpc.ChannelCredentials | None, Options]:
    target, term = split_address(address)
    credentials = own.credentials()
    if credentials is None:
        return target, None, CLIENT_OPTIONS
    name = controller_name(term) if term else ANY_CONTROLLER
    if credentials.site_host:  # one that listens on this host's loopback has its name
        name = credentials.site_host if target.startswith(_LOOPBACK) else ""
    expected: Options = (("grpc.ssl_target_name_override", name),) if name else ()
    secure = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return target, secure, (*CLIENT_OPTIONS, *expected)


def server_credentials() -> grpc.ServerCredentials | None:
    """Return what a controller shows, and by what it checks those who connect; None: connections are plain. Raises ControllerError."""
    first = own.credentials()
    if first is None:
        return None
    shown = [first]

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """At each handshake: None where nothing has changed."""
        try:
            now = own.credentials()
        except ControllerError:
            return None
        if now is None or now is shown[0]:
            return None
        shown[0] = now
        return _configuration(now)

    # None, for what has not changed, is missing from the types of the callback.
    return grpc.dynamic_ssl_server_credentials(_configuration(first), renewed, True)  # type: ignore[arg-type]


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], credentials.authority
    )


def describe(error: grpc.RpcError) -> str:
    """Return an error of a call in one line."""
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {' '.join((error.details() or '').split())}"
    return str(error)


def certified(names: Iterable[bytes]) -> Identity:
    """Return which process has shown a certificate with these alternative names. Raises ValueError."""
    uris = [name.decode(errors="replace") for name in names if name.startswith(b"ttp://")]
    if len(uris) != 1:
        raise ValueError(f"invalid certificate: got {len(uris)} URIs of a TTP job, expected one")
    return Identity.parse(uris[0])
